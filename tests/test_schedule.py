"""The tile lists against a plain Python model: every tile once, long ones first, nothing outside the buffer."""

from __future__ import annotations

import random

import pytest
import torch

from gdpa import schedule


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def listed(tiles: torch.Tensor) -> list[tuple[int, int]]:
    """The tiles up to the end mark, which must be followed by end marks only."""
    pairs = [tuple(pair) for pair in tiles.tolist()]
    real = [pair for pair in pairs if pair[0] >= 0]
    assert pairs[: len(real)] == real
    return real


def model(lengths: list[int], block: int) -> set[tuple[int, int]]:
    return {(b, i) for b, length in enumerate(lengths) for i in range(-(-length // block))}


@pytest.mark.parametrize("seed", range(20))
def test_every_tile_is_listed_once_and_the_bound_holds(seed):
    draw = random.Random(seed)
    batch, block = draw.choice([0, 1, 2, 7, 40]), draw.choice([16, 64, 128])
    q_lengths = [draw.choice([0, 0, 1, block - 1, block, block + 1, draw.randrange(500)]) for _ in range(batch)]
    k_lengths = [draw.choice([0, 3, draw.randrange(500)]) for _ in range(batch)]
    tail = draw.choice([0, 1, 3 * block])
    rows = sum(q_lengths) + tail
    queries = schedule.bounds(offsets(*q_lengths), rows)
    keys = schedule.bounds(offsets(*k_lengths), sum(k_lengths))
    tiles = schedule.tiles(queries, keys, batch, rows, block)
    assert tiles.shape == (schedule.tile_bound(True, batch, rows, block), 2)
    found = listed(tiles)
    assert len(found) == len(set(found))
    assert set(found) == model([*q_lengths, tail], block)
    walked = [k_lengths[b] if b < batch else 0 for b, _ in found]
    assert walked == sorted(walked, reverse=True)


def test_a_dense_owner_is_cut_into_equal_tiles_sorted_by_the_other_side():
    keys = schedule.bounds(offsets(3, 90, 0, 40), 133)
    found = listed(schedule.tiles(None, keys, 4, 100, 64))
    assert [b for b, _ in found] == [1, 1, 3, 3, 0, 0, 2, 2]
    assert set(found) == model([100] * 4, 64)


def test_bounds_give_each_sequence_and_the_uncovered_tail():
    assert schedule.bounds(offsets(3, 0, 4), 10).tolist() == [[0, 3], [3, 0], [3, 4], [7, 3]]


@pytest.mark.parametrize(
    "values",
    [[0, 50, 20, 90], [-5, 3, 1000, 7], [2**31 - 1, 0, -(2**31), 5], [9, 9, 9, 9]],
    ids=["falls", "outside", "extreme", "late"],
)
def test_garbage_offsets_stay_inside_the_buffer(values):
    rows = 60
    bounds = schedule.bounds(torch.tensor(values, dtype=torch.int64), rows)
    starts, lengths = bounds.unbind(1)
    assert (starts >= 0).all()
    assert (lengths >= 0).all()
    assert (starts + lengths <= rows).all()
    tiles = schedule.tiles(bounds, bounds, 3, rows, 16)
    assert tiles.shape[0] == schedule.tile_bound(True, 3, rows, 16)
    for b, i in listed(tiles):
        assert i * 16 < lengths[b]


def test_layers_share_a_schedule_until_the_offsets_change():
    cu = offsets(5, 6)
    first = schedule.bounds(cu, 11)
    assert schedule.bounds(cu, 11) is first
    assert schedule.bounds(cu, 12) is not first
    cu[1] = 4
    assert schedule.bounds(cu, 11).tolist() == [[0, 4], [4, 7], [11, 0]]


def test_a_freed_tensors_schedule_is_not_given_to_another_at_its_address():
    for length in range(1, 50):
        assert schedule.bounds(offsets(length), 60)[0].tolist() == [0, length]


def test_heads_first_tensors_are_copied_so_that_their_length_is_not_compiled_in():
    pytest.importorskip("triton")
    from gdpa.backends.triton import launch

    heads_first = torch.randn(4, 65, 16).transpose(0, 1)
    assert launch._strides(launch._aligned(heads_first)) == (0, 64, 16)
    fused = torch.randn(65, 3, 4, 16)[:, 1]
    assert launch._aligned(fused) is fused

"""The hopper backward without a GPU: which way dQ takes, who passes it on to whom, the kernels around (interpreted), remembered launches.

What the kernel computes is tested in tests/gpu, how it compiles in test_compile_kernels.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from typing import Any

import pytest
import torch
from helpers import FORMS, make_case, needs_triton, offsets_of
from test_hopper import Launched, comparable

pytestmark = needs_triton

NAN = float("nan")


def placed(x: torch.Tensor) -> torch.Tensor:
    """The order of columns in the fp32 copy: 8a + 2b + c at 8a + 4c + b."""
    right = torch.full_like(x, NAN)
    for a in range(x.shape[-1] // 8):
        for b in range(4):
            for c in range(2):
                right[..., 8 * a + 4 * c + b] = x[..., 8 * a + 2 * b + c]
    return right


def exact(*shape: int) -> torch.Tensor:
    """Numbers that bfloat16 holds: the interpreter does not round to nearest."""
    return torch.randn(shape).bfloat16().float()


class TestPlan:
    @pytest.mark.parametrize(
        ("form", "keys", "batch", "way"),
        [
            ("dense", 128, 4, "STORE"),
            ("dense", 129, 4, "RELAY"),
            ("dense-key", 100, 4, "STORE"),
            ("dense-key", 200, 4, "RELAY"),
            ("packed", 100, 4, "RELAY"),
            ("shared-query", 100, 400, "SHARED"),
        ],
    )
    def test_the_way_of_dq(self, form, keys, batch, way):
        from gdpa.backends.hopper import plan_backward as plan

        problem = make_case(form, q_lengths=(3,) * batch, k_lengths=(keys,) * batch, heads=4, head_dim=8).problem
        assert plan.way_of_dq(problem, True) == getattr(plan, way)
        assert plan.way_of_dq(problem, False) == plan.NONE

    @pytest.mark.parametrize(
        ("form", "keys", "activation", "way"),
        [
            ("dense", 256, "silu", "THROUGH_DQ"),
            ("dense", 512, "silu", "THROUGH_DQ"),
            ("dense", 513, "silu", "THROUGH_V"),
            ("dense", 513, "relu", "THROUGH_V"),
            ("dense", 513, "gelu_tanh", "THROUGH_V"),
            ("dense-key", 512, "gelu", "THROUGH_DQ"),
            ("dense-key", 513, "gelu", "THROUGH_V"),
            ("packed", 64, "gelu", "THROUGH_V"),
            ("shared-query", 64, "silu", "THROUGH_V"),
        ],
    )
    def test_the_way_of_dv(self, form, keys, activation, way):
        """Jagged keys go through V whatever their lengths, which the host does not know."""
        from gdpa.backends.hopper import plan_backward as plan

        options = {"heads": 4, "head_dim": 8, "activation": activation, "dtype": torch.bfloat16}
        problem = make_case(form, q_lengths=(3,) * 4, k_lengths=(keys,) * 4, **options).problem
        assert plan.way_of_dv(problem, True) == getattr(plan, way)
        assert plan.way_of_dv(problem, False) == plan.NONE

    @pytest.mark.parametrize(
        ("form", "keys", "copied"),
        [("dense", 128, False), ("dense", 512, False), ("dense", 513, True), ("dense-key", 512, False), ("packed", 200, True)],
    )
    def test_the_fp32_copy_is_there_only_for_sequences_that_may_need_it(self, form, keys, copied):
        from gdpa.backends.hopper import launch_backward as launch

        case = make_case(form, q_lengths=(8, 8), k_lengths=(keys, keys), heads=4, head_dim=8)
        copy = launch._copy(case.problem, True, case.inputs.q)
        assert copy.dtype == torch.float32
        assert copy.shape == (case.inputs.q.shape if copied else (1, 4, 8))

    def test_a_few_rows_are_summed_in_fp32(self):
        from gdpa.backends.hopper import launch_backward as launch
        from gdpa.backends.hopper import plan_backward as plan

        for rows, few in ((8, 4), (7, 1)):
            case = make_case("dense", q_lengths=(rows, rows), k_lengths=(200, 200), heads=4, head_dim=8)
            assert plan.rounded_tiles(case.problem) == few
            assert launch._copy(case.problem, True, case.inputs.q).shape == (case.inputs.q.shape if few == 1 else (1, 4, 8))

    @pytest.mark.parametrize(
        ("form", "queries", "keys", "batch", "heads", "paired"),
        [
            ("dense", 256, 256, 132, 4, True),
            ("dense", 256, 129, 132, 4, True),
            ("dense", 256, 256, 131, 4, False),  # too few pairs
            ("dense", 256, 128, 132, 4, False),
            ("dense", 256, 257, 132, 4, False),
            ("dense", 257, 256, 132, 4, False),  # their sums leave L2
            ("dense", 129, 256, 264, 2, True),
            ("dense-key", 256, 256, 132, 4, False),
            ("packed", 256, 256, 132, 4, False),
        ],
    )
    def test_pairs_of_tiles(self, form, queries, keys, batch, heads, paired):
        from gdpa.backends.hopper import launch_backward as launch
        from gdpa.backends.hopper import plan_backward as plan

        problem = make_case(form, q_lengths=(queries,) * batch, k_lengths=(keys,) * batch, heads=heads, head_dim=8).problem
        assert plan.is_paired(problem, 132) == paired
        tiles, *_, rotating, _, _, _ = launch._numbers(problem, 132)
        assert rotating == (0 if paired else 132)
        assert tiles >= batch * heads * -(-keys // 128)

    @pytest.mark.parametrize(
        ("form", "keys", "together"),
        [
            ("dense", 512, False),  # dV through dQ
            ("dense", 513, True),
            ("dense", 8192, True),
            ("dense-key", 2048, False),  # queries differ in length
            ("packed", 2048, False),
            ("shared-query", 2048, False),  # nothing is passed on
        ],
    )
    def test_whose_tiles_are_together(self, form, keys, together):
        from gdpa.backends.hopper import plan_backward as plan

        problem = make_case(form, q_lengths=(3,) * 2, k_lengths=(keys,) * 2, heads=4, head_dim=8).problem
        assert plan.is_together(problem, True) is together
        assert plan.is_together(problem, False) is False

    @pytest.mark.parametrize(
        ("form", "queries", "keys", "activation", "options", "rows", "in_order"),
        [
            ("dense", 257, 257, "silu", {}, 128, True),
            ("dense", 256, 257, "silu", {}, 64, False),
            ("dense", 257, 128, "silu", {}, 64, False),  # dQ is stored
            ("dense", 512, 512, "gelu", {}, 128, False),  # no room for the instructions of a first step in order
            ("dense", 511, 512, "gelu", {}, 64, False),
            ("packed", 240, 240, "relu", {}, 128, True),
            ("packed", 239, 239, "relu", {}, 64, False),
            ("packed", 960, 960, "gelu_tanh", {}, 128, False),
            ("packed", 959, 959, "gelu_tanh", {}, 64, False),
            ("dense-key", 240, 129, "silu", {}, 128, True),
            ("shared-query", 300, 300, "silu", {}, 64, False),
            ("dense", 1024, 1024, "softplus", {}, 64, False),  # twelve instructions a score
            ("dense", 1024, 1024, "silu", {"kv_heads": 2}, 64, False),
            ("dense", 1024, 1024, "silu", {"dtype": torch.float16}, 128, True),
            ("dense", 1024, 1024, "gelu_tanh", {"dtype": torch.float16}, 64, False),  # ten instructions a score
            ("dense", 1024, 1024, "silu", {"dtype": torch.float16, "head_dim": 128}, 64, True),
            ("dense", 1024, 1024, "gelu_tanh", {"dtype": torch.float16, "head_dim": 128}, 64, False),
            ("dense", 1024, 1024, "silu", {"deterministic": True}, 64, False),
            ("dense", 1024, 1024, ["silu", "relu", "silu", "silu"], {}, 64, False),
            ("dense", 1024, 1024, torch.sqrt, {}, 64, False),  # needs a mask
            ("dense", 1024, 1024, torch.erf, {}, 64, False),  # one of its six instructions is a call of nine
            ("dense", 1024, 1024, lambda s: s * torch.sigmoid(s), {}, 128, True),
            ("dense", 1024, 1024, "silu", {"causal": True}, 128, True),
            ("dense", 512, 512, "silu", {"causal": True}, 64, False),
            ("packed", 1024, 1024, "silu", {"causal": True}, 64, False),
            ("dense", 1024, 1024, "silu", {"head_dim": 128}, 64, True),
            ("dense", 512, 512, "silu", {"head_dim": 128}, 64, False),
            ("packed", 1024, 1024, "silu", {"head_dim": 128}, 64, False),
            ("dense-key", 100, 1024, "silu", {"head_dim": 128}, 64, True),
            ("dense-key", 100, 1024, "gelu", {"head_dim": 128}, 64, False),
            ("dense-key", 100, 512, "silu", {"head_dim": 128}, 64, False),
            ("dense", 1024, 1024, "silu", {"head_dim": 128, "causal": True}, 64, False),
            ("dense", 1024, 1024, "softplus", {"head_dim": 128}, 64, False),
        ],
    )
    def test_how_long_a_step_is(self, form, queries, keys, activation, options, rows, in_order, monkeypatch):
        from gdpa.backends.hopper import launch_backward as launch
        from gdpa.backends.hopper import plan_backward as plan

        monkeypatch.setattr(plan, "LONG_STEPS", True)
        options = {"heads": 4, "head_dim": 64, "dtype": torch.bfloat16, **options}
        deterministic = options.pop("deterministic", False)
        problem = make_case(form, q_lengths=(queries,) * 2, k_lengths=(keys,) * 2, activation=activation, **options).problem
        problem = dataclasses.replace(problem, deterministic=deterministic)
        assert plan.step_rows(problem, True) == rows
        assert plan.step_rows(problem, False) == 64
        assert plan.is_in_order(problem, True) is in_order
        # A counter for every step that a sequence may have, wherever it begins.
        steps = queries // rows + 1
        assert launch._counter_count(problem) >= 2 * steps * 4

    @pytest.mark.parametrize(
        ("form", "options", "same", "taken"),
        [
            ("dense", {"causal": True}, False, True),
            ("packed", {"causal": True}, True, True),
            ("packed", {"causal": True}, False, False),  # as far as the host knows, they may differ in length
            ("packed", {}, False, True),
            ("dense", {"causal": True, "kv_heads": 2}, False, False),
            ("dense", {"window_size": (-1, 1)}, False, False),
            ("dense", {"window_size": (5, 0)}, False, False),
            ("dense", {"causal": True, "k_lengths": (70, 70)}, False, False),
            ("dense-key", {"causal": True}, False, False),
            ("shared-query", {"causal": True}, False, False),
        ],
    )
    def test_which_windows_it_takes(self, form, options, same, taken):
        from gdpa.backends.hopper import plan_backward as plan

        case = make_case(form, **{"q_lengths": (300, 300), "heads": 4, "head_dim": 64, **options})
        k_offsets = case.inputs.cu_seqlens_q if same else case.inputs.cu_seqlens_k
        assert plan.takes_window(case.problem, case.inputs.cu_seqlens_q, k_offsets) is taken

    @pytest.mark.parametrize(
        ("form", "keys", "deterministic", "way", "rounds_long"),
        [
            ("dense", 128, False, "STORE", 0),
            ("dense", 512, False, "RELAY", 0),
            ("dense", 513, False, "SHARED", 0),
            ("dense", 513, True, "RELAY", 0),
            ("packed", 513, False, "RELAY", 512),
            ("packed", 513, True, "RELAY", 0),
        ],
    )
    def test_the_way_of_causal_dq(self, form, keys, deterministic, way, rounds_long):
        from gdpa.backends.hopper import launch_backward as launch
        from gdpa.backends.hopper import plan_backward as plan

        problem = make_case(form, q_lengths=(keys, keys), heads=4, head_dim=64, causal=True).problem
        problem = dataclasses.replace(problem, deterministic=deterministic)
        assert plan.way_of_dq(problem, True) == getattr(plan, way)
        assert launch._rounds_long(problem, plan.way_of_dq(problem, True)) == rounds_long
        assert plan.is_paired(problem, 1) == plan.is_folded(problem)

    @pytest.mark.parametrize(
        ("form", "keys", "folded"),
        [
            ("dense", 128, False),
            ("dense", 256, True),
            ("dense", 257, False),
            ("packed", 191, False),
            ("packed", 192, True),
        ],
    )
    def test_tiles_of_causal_sequences_are_folded_where_none_is_known_to_be_in_the_middle(self, form, keys, folded):
        from gdpa.backends.hopper import launch_backward as launch
        from gdpa.backends.hopper import plan_backward as plan

        problem = make_case(form, q_lengths=(keys, keys), heads=4, head_dim=64, causal=True).problem
        assert plan.is_folded(problem) is folded
        assert launch._listed(problem) == (256 if folded else 128)
        assert not plan.is_folded(dataclasses.replace(problem, deterministic=True))
        assert not plan.is_folded(dataclasses.replace(problem, window=(-1, -1)))

    @pytest.mark.parametrize("together", [False, True])
    @pytest.mark.parametrize(("batch", "heads", "tiles"), [(3, 4, 5), (5, 1, 7), (1, 3, 16)])
    def test_every_tile_has_a_number_and_neighbours_are_of_one_head_where_together(self, batch, heads, tiles, together):
        """tiles.find_tile, run as Python."""
        find_tile = self.find_tile(dense=(10, 128 * tiles, tiles), heads=heads, together=together)
        found = []
        for number in range(batch * heads * tiles):
            head, sequence, k_start, _, row, q_start, _, count = find_tile(number)
            assert (k_start, q_start, count) == (128 * tiles * sequence, 10 * sequence, tiles)
            found.append((sequence, head, row // 128) if together else (sequence, row // 128, head))
        sizes = (heads, tiles) if together else (tiles, heads)
        assert found == [(b, i, j) for b in range(batch) for i in range(sizes[0]) for j in range(sizes[1])]

    @staticmethod
    def find_tile(records=(), dense=(0, 0, 0), heads=1, *, paired=False, together=False, causal=False, ordered=False):
        """As a plain function of a tile's number, of the one program there is; a list's `records`, or `dense` queries, keys and tiles."""
        from types import SimpleNamespace

        from gdpa.backends.hopper.tiles import find_tile

        gl = SimpleNamespace(
            constexpr=None,
            program_id=lambda axis: 0,
            num_programs=lambda axis: 1,
            load=lambda at: records[at],
            minimum=min,
            cdiv=lambda x, y: -(-x // y),
            where=lambda condition, x, y: x if condition else y,
        )
        namespace = {"gl": gl, "TILE": 128, "RECORD": 8}
        exec(inspect.getsource(find_tile.fn).replace("@gluon.jit\n", ""), namespace)
        of_kernel = namespace["find_tile"]
        return lambda taken: of_kernel(taken, 0, *dense, 112, heads, len(records) > 0, paired, together, causal, ordered)

    @pytest.mark.parametrize("tiles", [2, 4, 16])
    def test_two_tiles_of_a_causal_sequence_have_as_many_steps_as_any_two(self, tiles):
        find_tile = self.find_tile(dense=(128 * tiles, 128 * tiles, tiles), heads=2, paired=True, causal=True)
        found = []
        for taken in range(3 * tiles * 2):
            head, sequence, _, k_length, row, _, q_length, count = find_tile(taken)
            assert (k_length, q_length, count) == (128 * tiles, 128 * tiles, tiles)
            found.append((sequence, head, row // 128))
        assert sorted(found) == [(b, h, t) for b in range(3) for h in range(2) for t in range(tiles)]
        for first, second in zip(found[::2], found[1::2], strict=True):
            assert first[:2] == second[:2] and first[2] + second[2] == tiles - 1

    @pytest.mark.parametrize(("tiles", "turned"), [(8, True), (56, True), (57, False)])
    def test_tiles_of_a_causal_sequence_in_a_fixed_order_turn_where_all_run_at_once(self, tiles, turned):
        """Else they wait for those before them, which must stand before them in the list too."""
        find_tile = self.find_tile(dense=(128 * tiles, 128 * tiles, tiles), heads=2, causal=True, ordered=True)
        rows: dict[int, list[int]] = {}
        for taken in range(3 * tiles * 2):
            head, sequence, _, _, row, *_ = find_tile(taken)
            if head == 0:
                rows.setdefault(sequence, []).append(row // 128)
        for sequence, found in rows.items():
            first = sequence if turned else 0
            assert found == [*range(first, tiles), *range(first)]

    @pytest.mark.parametrize("lengths", [(1, 128, 129, 2048, 300, 0, 700, 256), (900,)])
    def test_the_tile_in_the_middle_of_a_causal_sequence_is_followed_by_nothing(self, lengths):
        from gdpa import schedule

        offsets = offsets_of(lengths)
        records = schedule.records(offsets, offsets, len(lengths), sum(lengths), sum(lengths), 256)
        find_tile = self.find_tile(records.flatten().tolist(), paired=True, causal=True)
        found = []
        for taken in range(2 * int(records[0, 0])):
            _, sequence, k_start, k_length, row, q_start, q_length, count = find_tile(taken)
            if q_length == 0:
                assert (k_length, row, taken % 2) == (0, 0, 1)
                continue
            assert k_length == q_length == lengths[sequence]
            assert k_start == q_start == sum(lengths[:sequence])
            assert count == -(-k_length // 128)
            found.append((sequence, row // 128))
        assert sorted(found) == [(b, t) for b, length in enumerate(lengths) for t in range(-(-length // 128))]

    def test_what_is_deterministic_does_not_depend_on_the_device(self):
        from gdpa.backends.hopper import launch_backward as launch

        problem = make_case("packed", q_lengths=(3,) * 4, k_lengths=(250,) * 4, heads=4, head_dim=8).problem
        ordered = dataclasses.replace(problem, deterministic=True)
        assert launch._numbers(problem, 132) != launch._numbers(problem, 114)
        assert launch._numbers(ordered, 132) == launch._numbers(ordered, 114)


class TestRelay:
    """Who passes what on to whom, as relay.find_relay and find_rank say; the kernel's own arithmetic, run as Python."""

    @pytest.fixture
    def kernels(self, monkeypatch):
        """find_relay and find_rank as plain functions of numbers."""
        from types import SimpleNamespace

        from gdpa.backends.hopper import relay

        def where(condition, x, y):
            return x if condition else y

        namespace = {
            "gl": SimpleNamespace(where=where, int64=None, int32=None, constexpr=None),
            "TILE": 128,
            "RELAY": relay.RELAY,
        }
        namespace |= {name: getattr(relay, name).value for name in ("ROUNDED", "COMES_BACK", "CODE_BITS")}
        namespace["gl"].minimum = min
        for name in ("first_step", "find_relay", "find_rank", "find_causal", "causal_rank", "fate"):
            source = inspect.getsource(getattr(relay, name).fn).replace("@gluon.jit\n", "")
            source = source.replace(
                "(((here + 1).to(gl.int64) * count - 1) // steps).to(gl.int32)", "((here + 1) * count - 1) // steps"
            )
            exec(source, namespace)
        names = ("find_relay", "find_rank", "find_causal", "causal_rank", "fate")
        return SimpleNamespace(**{name: namespace[name] for name in names}, relay=relay.RELAY)

    @pytest.mark.parametrize("apart", [1, 4])
    @pytest.mark.parametrize("rotating", [0, 132])
    @pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 32, 33])
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 16, 33, 34])
    def test_every_step_has_one_first_and_one_last_and_nobody_waits_in_a_circle(self, kernels, apart, rotating, steps, count):
        visits: dict[int, dict[int, tuple[int, bool, bool]]] = {step: {} for step in range(steps)}
        ranks: dict[int, dict[int, int]] = {step: {} for step in range(steps)}
        for tile in range(count):
            start, first_until, last_from = kernels.find_relay(128 * tile, 64, count, steps, rotating, apart, kernels.relay)
            assert 0 <= start < steps
            for step in range(steps):
                here = (start + step) % steps
                visits[here][tile] = (step, step < first_until, step >= last_from)
                ranks[here][tile] = kernels.find_rank(128 * tile, count, here, steps, rotating, apart)
        done: set[tuple[int, int]] = set()  # (tile, its own step)
        waiting = {(tile, visits[here][tile][0]): here for here in visits for tile in visits[here]}
        for here in range(steps):
            assert sum(first for _, first, _ in visits[here].values()) == 1
            assert sum(last for _, _, last in visits[here].values()) == 1
            assert sorted(ranks[here].values()) == list(range(count))
            for tile, (_, first, last) in visits[here].items():
                assert first == (ranks[here][tile] == 0)
                assert last == (ranks[here][tile] == count - 1)
        while waiting:  # every tile takes its steps in order, each after those of lower rank there
            ready = [
                (tile, step)
                for (tile, step), here in waiting.items()
                if (step == 0 or (tile, step - 1) in done)
                and all((other, visits[here][other][0]) in done for other in ranks[here] if ranks[here][other] < ranks[here][tile])
            ]
            assert ready, "tiles wait for each other"
            for visit in ready:
                del waiting[visit]
                done.add(visit)

    def test_sequences_that_do_not_turn_wait_for_earlier_tiles_alone(self, kernels):
        for tile in range(40):
            assert kernels.find_relay(128 * tile, 64, 40, 5, 132, 4, kernels.relay)[0] == 0
            assert kernels.find_rank(128 * tile, 40, 3, 5, 132, 4) == tile
        assert kernels.find_relay(128 * 39, 64, 40, 40, 132, 1, kernels.relay)[0] == 39  # within 132 numbers: it turns

    @pytest.mark.parametrize("apart", [1, 4])
    @pytest.mark.parametrize("rotating", [0, 132])
    @pytest.mark.parametrize("queries", [1, 64, 65, 128, 129, 300, 640, 1000, 4224, 4300])
    @pytest.mark.parametrize("rows", [64, 128])
    def test_causal_steps_have_one_tile_that_rounds_and_nobody_waits_in_a_circle(self, kernels, apart, rotating, queries, rows):
        """In a fixed order, with dQ passed on from two tiles on."""
        steps, count, few = -(-queries // rows), -(-queries // 128), 1
        ranks: dict[int, dict[int, int]] = {step: {} for step in range(steps)}
        rounding: dict[int, list[int]] = {step: [] for step in range(steps)}
        own = {}  # (tile, step of the sequence): the tile's own step
        for tile in range(count):
            start, code = kernels.find_causal(128 * tile, queries, count, rotating, few, apart, True, rows)
            assert start * rows == tile * 128  # the first query that sees its first key
            for here in range(start, steps):
                rank, there = kernels.causal_rank(128 * tile, count, here, rotating, apart, rows)
                assert there == len([t for t in range(count) if 128 * t <= here * rows])
                own[tile, here], ranks[here][tile] = here - start, rank
                is_rounded, comes_back = kernels.fate(code, here - start + 1, True, rows)
                assert is_rounded == (rank == there - 1)
                assert (comes_back >= 0) == (is_rounded and rank > 0)
                if is_rounded:
                    rounding[here].append(tile)
        assert all(sorted(ranks[here].values()) == list(range(len(ranks[here]))) for here in ranks)
        assert all(len(tiles) == 1 for tiles in rounding.values())
        waiting, done = set(own), set()
        while waiting:
            ready = {
                (tile, here)
                for tile, here in waiting
                if (own[tile, here] == 0 or (tile, here - 1) in done)
                and all((other, here) in done for other in ranks[here] if ranks[here][other] < ranks[here][tile])
            }
            assert ready, "tiles wait for each other"
            waiting -= ready
            done |= ready

    @pytest.mark.parametrize("rows", [64, 128])
    def test_causal_tiles_that_are_not_few_add_up_where_the_order_does_not_matter(self, kernels, rows):
        for count in (1, 4, 5, 16):
            for tile in range(count):
                _, code = kernels.find_causal(128 * tile, 64, count, 132, 4, 1, False, rows)
                fates = {kernels.fate(code, done, True, rows) for done in (1, 2, 3, 9)}
                assert fates == ({(True, -1)} if count <= 4 else {(False, -1)})

    @pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
    @pytest.mark.parametrize("rows_of_step", [64, 128])
    @pytest.mark.parametrize(
        "offsets",
        [
            (0, 1, 129, 400, 400, 700),
            (0, 100, 200),  # 700 rows belong to no sequence
            (0, 0, 0),
            (0, 100, 5000, 2**31 - 1),
            (-7, 100, 200, 493),
            (-(2**31), -5, 0, 493),
            (0, 300, 100, 493),
            (493, 493, 493, 493),
            (493, 300, 100, 0),
            (2**30, -(2**30), 12345678, -1),
        ],
    )
    def test_every_causal_tile_has_a_step_and_keys_inside_the_buffer_whatever_the_offsets_hold(
        self, kernels, offsets, ordered, rows_of_step
    ):
        """A tile of fewer steps than none would keep its program waiting for ever."""
        from gdpa import schedule

        rows, batch = 900, len(offsets) - 1
        cu = torch.tensor(offsets, dtype=torch.int64)
        records = schedule.records(cu, cu, batch, rows, rows, 128 if ordered else 256)
        find_tile = TestPlan.find_tile(records.flatten().tolist(), paired=not ordered, causal=True, ordered=ordered)
        for taken in range(int(records[0, 0]) * (1 if ordered else 2)):
            _, _, k_start, k_length, row, q_start, q_length, count = find_tile(taken)
            start, _ = kernels.find_causal(row, q_length, count, 132, 4, 1, ordered, rows_of_step)
            assert max(1, -(-q_length // rows_of_step)) - start >= 1
            assert k_start >= 0 and k_start + k_length <= rows and q_start >= 0 and q_start + q_length <= rows
            assert 0 <= row < max(k_length, 1)

    @pytest.mark.parametrize("queries", [64, 129, 300, 512])
    @pytest.mark.parametrize("programs", [1, 2, 5])
    def test_by_tickets_nobody_waits_in_a_circle_whoever_is_late(self, kernels, programs, queries):
        """Programs with tiles of a causal sequence in any order; each holds one ticket at a time, and waits for a first part, if not its
        own, to be written."""
        steps, count = -(-queries // 64), -(-queries // 128)
        for seed in range(50):
            draw = random.Random(seed)
            work: list[list[int]] = [[] for _ in range(programs)]  # the steps of the sequence that each is to go through
            for tile in draw.sample(range(count), count):
                start, _ = kernels.find_causal(128 * tile, queries, count, 132, 4, 1, False, 64)
                draw.choice(work).extend(range(start, steps))
            tickets, written = [0] * steps, [False] * steps
            held: list[int | None] = [None] * programs
            while any(work):
                able = [i for i in range(programs) if work[i] and (not held[i] or written[work[i][0]])]
                assert able, "programs wait for each other"
                i = draw.choice(able)
                here = work[i][0]
                if held[i] is None:
                    held[i] = tickets[here]
                    tickets[here] += 1
                else:
                    written[here] |= held[i] == 0
                    held[i] = None
                    work[i].pop(0)
            assert tickets == [kernels.causal_rank(0, count, here, 132, 1, 64)[1] for here in range(steps)]

    def test_tiles_without_queries_are_alone(self, kernels):
        assert kernels.find_relay(128, 0, 4, 1, 132, 4, kernels.relay) == (0, 1, 0)
        for ordered in (False, True):
            for tile in range(9):
                start, code = kernels.find_causal(128 * tile, 0, 9, 132, 4, 1, ordered, 64)
                assert start == 0  # they have one step, of zeros
                assert kernels.fate(code, 1, True, 64) == (True, -1)


class TestUnattended:
    """Rows of dQ that no tile of keys reaches."""

    LENGTHS = ((5, 0, 70, 3, 40), (600, 700, 0, 100, 513))

    @pytest.mark.parametrize("form", ["packed", "dense-key"])
    @pytest.mark.parametrize("tail", [0, 1, 300])
    def test_sequences_without_keys_and_uncovered_rows(self, form, tail):
        from gdpa.backends.hopper import partial

        case = make_case(form, q_lengths=self.LENGTHS[0], k_lengths=self.LENGTHS[1], heads=3, head_dim=16, tail=(tail, 4))
        q, _, _, cu_q, cu_k, _ = case.inputs
        problem = case.problem
        k_lengths = self.LENGTHS[1] if cu_k is not None else (problem.key_rows,) * problem.batch
        dq = torch.full(q.shape, NAN, dtype=torch.bfloat16)
        partial.zero_unattended(dq, cu_q, cu_k, problem.batch, problem.query_rows, problem.key_rows)
        starts = cu_q.tolist()
        for sequence, keys in enumerate(k_lengths):
            mine = dq[starts[sequence] : starts[sequence + 1]]
            assert (mine == 0).all() if keys == 0 else mine.isnan().all()
        assert (dq[starts[-1] :] == 0).all()

    def test_dense_queries_with_packed_keys(self):
        from gdpa.backends.hopper import partial
        from gdpa.jagged import offsets_from_lengths

        cu_k = offsets_from_lengths(torch.tensor([600, 0, 100]))
        dq = torch.full((3, 40, 2, 8), NAN, dtype=torch.float16)
        partial.zero_unattended(dq, None, cu_k, 3, 40, 700)
        assert (dq[1] == 0).all()
        assert dq[0].isnan().all() and dq[2].isnan().all()

    def test_sums_of_programs(self):
        from gdpa.backends.hopper import partial

        sums = exact(5, 33, 3, 16)
        assert torch.equal(partial.sum_programs(placed(sums), torch.bfloat16), sums.sum(0).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", [2, 3, 4])
@pytest.mark.parametrize(("queries", "mean"), [(64, 0.0), (64, 1.0), (1000, 0.0)])
def test_parts_of_dq_that_are_rounded_and_added_stay_in_the_budget(queries, mean, tiles, dtype):
    """What the kernel does with dQ of a few tiles, every rounding made here; a mean makes the parts add up instead of averaging out."""
    from gdpa.backends.hopper import plan_backward as plan
    from gdpa.numerics import verdict_on

    assert tiles <= plan.MOST_ROUNDED_TILES
    for seed in range(20):
        torch.manual_seed(seed)
        ds = torch.randn(queries, 128 * tiles, dtype=torch.float64) + mean
        k = (torch.randn(128 * tiles, 64) + mean).to(dtype).double()
        rounded = ds.to(dtype).double()
        total = None
        for rows in torch.arange(128 * tiles).split(128):
            part = (rounded[:, rows] @ k[rows]).float().to(dtype)
            total = part if total is None else (total.float() + part.float()).to(dtype)
        verdict = verdict_on("dq", total, ds @ k, [(rounded @ k).float().to(dtype)])
        assert verdict.budget_used <= 1, verdict


@pytest.fixture
def backward_launched(monkeypatch):
    """The backward's launches, of a kernel that stands in for its own; on a CPU, whose tensors have no device index."""
    from gdpa.backends.hopper import launch_backward as launch

    kernel = Launched()
    monkeypatch.setattr(launch, "backward_kernel", kernel)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    return kernel


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out_scale", [None, "per-sequence"], ids=["one scale", "a scale each"])
def test_a_remembered_launch_is_what_a_first_one_would_be(backward_launched, monkeypatch, form, out_scale):
    from gdpa.backends.hopper import launch_backward as launch

    kernel = backward_launched
    options = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "out_scale": out_scale}
    small = make_case(form, q_lengths=(130, 7), k_lengths=(5, 300), **options)
    large = make_case(form, q_lengths=(300, 0, 65), k_lengths=(64, 129, 700), scale=0.25, seed=1, **options)

    def call(case: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, cu_q, cu_k, scales = case.inputs
        return launch.backward(case.problem, case.d_out, q, k, v, cu_q, cu_k, scales, (True, True, True))

    call(small)
    results = [call(large)]
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_launch", lambda *arguments: pytest.fail("a batch that is ready was launched anew"))
        results.append(call(large))
        patch.undo()
        patch.setattr(launch, "prepare", lambda *arguments: None)
        results.append(call(large))
    launch._recipes.clear()
    results.append(call(dataclasses.replace(large, problem=dataclasses.replace(large.problem))))
    for grads in results:
        assert [tuple(x.shape) for x in grads] == [tuple(x.shape) for x in large.inputs[:3]]
        assert all(x.is_contiguous() and x.dtype == torch.bfloat16 for x in grads)
    assert [how for how, _, _ in kernel.calls] == ["first", "remembered", "remembered", "remembered", "first"]
    assert len({grid for _, grid, _ in kernel.calls[1:]}) == 1
    seen = [comparable(arguments) for _, _, arguments in kernel.calls[1:]]
    for arguments, (dq, dk, dv) in zip(seen, results, strict=True):
        outputs = {4: dq, 6: dk, 7: dv}  # each call writes to tensors of its own
        for place in range(4, 8):
            kind, address, *rest = arguments[place]
            assert place == 5 or (place == 4 and form == "shared-query") or address == outputs[place].data_ptr()
            arguments[place] = (kind, *rest)
        del arguments[9]  # the counters
    assert seen[0] == seen[1] == seen[2] == seen[3]


@pytest.mark.parametrize(
    "changes",
    [{"needs": (False, True, True)}, {"needs": (True, True, False)}, {"out_scale": torch.ones(2)}, {"deterministic": True}],
    ids=["no dQ", "no dV", "scales", "order"],
)
def test_what_differs_has_a_kernel_of_its_own(backward_launched, changes):
    from gdpa.backends.hopper import launch_backward as launch

    case = make_case("dense", q_lengths=(130, 130), k_lengths=(300, 300), heads=4, head_dim=64, dtype=torch.bfloat16)
    problem = dataclasses.replace(case.problem, deterministic=changes.get("deterministic", False))
    q, k, v = case.inputs[:3]
    for _ in range(2):
        launch.backward(case.problem, case.d_out, q, k, v, None, None, None, (True, True, True))
    for _ in range(2):
        needs = changes.get("needs", (True, True, True))
        grads = launch.backward(problem, case.d_out, q, k, v, None, None, changes.get("out_scale"), needs)
        assert tuple(x is not None for x in grads) == needs
    assert [how for how, _, _ in backward_launched.calls] == ["first", "remembered"] * 2


def test_tensors_that_must_be_copied_are(backward_launched):
    from gdpa.backends.hopper import launch_backward as launch

    case = make_case("dense", q_lengths=(100, 100), heads=2, head_dim=64, dtype=torch.bfloat16)
    q, k, v = case.inputs[:3]
    apart = torch.ones(2, 110, 2, 64, dtype=torch.bfloat16)[:, :100]
    unaligned = torch.ones(2 * 100 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 100, 2, 64)
    expanded = torch.ones((), dtype=torch.bfloat16).expand(2, 100, 2, 64)
    for d_out in (case.d_out, apart, unaligned, expanded):
        for _ in range(2):
            launch.backward(case.problem, d_out, q, k, v, None, None, None, (True, True, True))
    assert [how for how, _, _ in backward_launched.calls] == ["first"] + ["remembered"] * 7
    for _, _, arguments in backward_launched.calls[2:]:
        read = arguments[3].base
        assert read.is_contiguous()
        assert read.data_ptr() % 16 == 0
        assert (read == 1).all()


@pytest.mark.parametrize("lengths", [((0, 0), (3, 4)), ((3, 4), (0, 0))])
def test_nothing_is_launched_without_queries_or_keys(backward_launched, lengths):
    from gdpa.backends.hopper import launch_backward as launch

    case = make_case(q_lengths=lengths[0], k_lengths=lengths[1], head_dim=64, dtype=torch.bfloat16)
    q, k, v, cu_q, cu_k, _ = case.inputs
    grads = launch.backward(case.problem, case.d_out, q, k, v, cu_q, cu_k, None, (True, True, False))
    assert backward_launched.calls == []
    assert grads[2] is None
    assert all(not x.any() for x in grads[:2])

"""The hopper backward's host side, without a GPU: which way dQ takes, its fp32 copy's kernels (interpreted), remembered launches.

What the kernel computes is tested in tests/gpu, how it compiles in test_compile_kernels.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FORMS, make_case, needs_triton
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
    """Short keys of many sequences go by items; long ones, or few sequences, tile by tile."""

    @pytest.mark.parametrize(
        ("form", "keys", "batch", "expected"),
        [
            ("dense", 128, 4, "STORE 128"),
            ("dense", 129, 400, "MIXED 256"),
            ("dense", 256, 400, "MIXED 256"),
            ("dense", 256, 4, "ADD 128"),
            ("dense", 257, 400, "ADD 128"),
            ("dense-key", 100, 4, "STORE 128"),
            ("packed", 100, 4, "MIXED 128"),
            ("packed", 100, 400, "MIXED 128"),
            ("packed", 600, 400, "MIXED 128"),
            ("shared-query", 100, 400, "ADD 128"),
        ],
    )
    def test_by_form_length_and_number(self, form, keys, batch, expected):
        from gdpa.backends.hopper import launch_backward as launch

        case = make_case(form, q_lengths=(3,) * batch, k_lengths=(keys,) * batch, heads=4, head_dim=8)
        names = {getattr(launch, name): name for name in ("ADD", "STORE", "MIXED", "NONE")}
        way, item = launch.plan(case.problem, True, 132)
        assert f"{names[way]} {item}" == expected
        assert launch.plan(case.problem, False, 132) == (launch.NONE, 128)

    def test_deterministic_calls_of_few_sequences_still_go_by_items(self):
        import dataclasses

        from gdpa.backends.hopper import launch_backward as launch

        case = make_case("dense", q_lengths=(3,) * 4, k_lengths=(250,) * 4, heads=4, head_dim=8)
        deterministic = dataclasses.replace(case.problem, deterministic=True)
        assert launch.is_deterministic(deterministic)
        assert launch.plan(deterministic, True, 132) == (launch.MIXED, 256)


class TestCopy:
    """The kernels around the backward: zeros before it, rounding after."""

    LENGTHS = ((5, 0, 70, 3, 40), (600, 700, 0, 100, 513))

    @pytest.mark.parametrize("form", ["packed", "dense-key"])
    def test_prepare_and_finish_touch_the_rows_that_need_it(self, form):
        from gdpa.backends.hopper import partial

        case = make_case(form, q_lengths=self.LENGTHS[0], k_lengths=self.LENGTHS[1], heads=3, head_dim=16, tail=(9, 4))
        q, _, _, cu_q, cu_k, _ = case.inputs
        problem = case.problem
        k_lengths = self.LENGTHS[1] if cu_k is not None else (problem.key_rows,) * problem.batch
        rows = (problem.batch, problem.query_rows, problem.key_rows, 512)
        sums = exact(*q.shape)
        copy, dq = torch.full(q.shape, NAN), torch.full(q.shape, NAN, dtype=torch.bfloat16)
        partial.prepare(copy, cu_q, cu_k, *rows)
        starts = cu_q.tolist()
        for sequence, keys in enumerate(k_lengths):
            mine = copy[starts[sequence] : starts[sequence + 1]]
            assert (mine == 0).all() if keys > 512 else mine.isnan().all()
        assert copy[starts[-1] :].isnan().all()

        partial.finish(dq, placed(sums), cu_q, cu_k, *rows)
        for sequence, keys in enumerate(k_lengths):
            mine = slice(starts[sequence], starts[sequence + 1])
            if keys > 512:
                assert torch.equal(dq[mine], sums[mine].bfloat16())
            else:
                assert (dq[mine] == 0).all() if keys == 0 else dq[mine].isnan().all()
        assert (dq[starts[-1] :] == 0).all()

    def test_dense_queries_with_packed_keys(self):
        from gdpa.backends.hopper import partial
        from gdpa.jagged import offsets_from_lengths

        cu_k = offsets_from_lengths(torch.tensor([600, 0, 100]))
        sums = exact(3, 40, 2, 8)
        dq = torch.full(sums.shape, NAN, dtype=torch.float16)
        partial.finish(dq, placed(sums), None, cu_k, 3, 40, 700, 512)
        assert torch.equal(dq[0].float(), sums[0].half().float())
        assert (dq[1] == 0).all()
        assert dq[2].isnan().all()

    def test_round_all_and_sum_programs(self):
        from gdpa.backends.hopper import partial

        sums = exact(5, 33, 3, 16)
        dq = torch.empty(33, 3, 16, dtype=torch.bfloat16)
        partial.round_all(dq, placed(sums[0]))
        assert torch.equal(dq, sums[0].bfloat16())
        assert torch.equal(partial.sum_programs(placed(sums), torch.bfloat16), sums.sum(0).bfloat16())

    @pytest.mark.parametrize("tail", [0, 1, 50])
    def test_uncovered_rows(self, tail):
        from gdpa.backends.hopper import partial
        from gdpa.jagged import offsets_from_lengths

        dq = torch.full((30 + tail, 3, 16), NAN)
        partial.zero_uncovered(dq, offsets_from_lengths(torch.tensor([10, 0, 20])))
        assert dq[:30].isnan().all()
        assert (dq[30:] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out_scale", [None, "per-sequence"], ids=["one scale", "a scale each"])
def test_a_remembered_launch_is_what_a_first_one_would_be(monkeypatch, form, out_scale):
    from gdpa.backends.hopper import launch_backward as launch

    kernel = Launched()
    monkeypatch.setattr(launch, "backward_kernel", kernel)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    options = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "out_scale": out_scale}
    small = make_case(form, q_lengths=(130, 7), k_lengths=(5, 300), **options)
    large = make_case(form, q_lengths=(300, 0, 65), k_lengths=(64, 129, 700), scale=0.25, seed=1, **options)

    def call(case: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, cu_q, cu_k, scales = case.inputs
        return launch.backward(case.problem, case.d_out, q, k, v, cu_q, cu_k, scales, (True, True, True))

    call(small)
    call(large)
    launch._recipes.clear()
    grads = call(large)
    assert [tuple(x.shape) for x in grads] == [tuple(x.shape) for x in large.inputs[:3]]
    (first, _, _), (short, short_grid, short_arguments), (again, grid, arguments) = kernel.calls
    assert (first, short, again) == ("first", "remembered", "first")
    assert short_grid == grid
    theirs, ours = comparable(arguments), comparable(short_arguments)
    for seen in (theirs, ours):
        for output in range(4, 8):  # each call writes to tensors of its own
            seen[output] = (*seen[output][:1], *seen[output][2:])
    assert ours == theirs


@pytest.mark.parametrize("lengths", [((0, 0), (3, 4)), ((3, 4), (0, 0))])
def test_nothing_is_launched_without_queries_or_keys(monkeypatch, lengths):
    from gdpa.backends.hopper import launch_backward as launch

    kernel = Launched()
    monkeypatch.setattr(launch, "backward_kernel", kernel)
    case = make_case(q_lengths=lengths[0], k_lengths=lengths[1], head_dim=64, dtype=torch.bfloat16)
    q, k, v, cu_q, cu_k, _ = case.inputs
    grads = launch.backward(case.problem, case.d_out, q, k, v, cu_q, cu_k, None, (True, True, False))
    assert kernel.calls == []
    assert grads[2] is None
    assert all(not x.any() for x in grads[:2])

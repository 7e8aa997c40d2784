"""The way back of calls that went the short way (gdpa/shortcut.py): their gradients, by a backend that is ready or the ordinary way."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import FORMS, Case, assert_same, gradients, leaves, make_case, spy
from test_shortcut import SMALL, Named, Watching
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from gdpa import dispatch, shortcut
from gdpa.backends import reference
from gdpa.numerics import Results


class TestTheWayBack:
    """Gradients of calls that went the short way, from the second time on: a backend is ready once it has compiled for the first."""

    @pytest.fixture
    def backs(self, ways, monkeypatch) -> list[str]:
        """Which way each backward went."""
        taken: list[str] = []
        seen: set[Any] = set()
        module = dispatch.choose(None)

        def backward(problem: Any, d_out: torch.Tensor, *arguments: Any) -> Any:
            taken.append("ordinary")
            seen.add((d_out.stride(), arguments[-1]))
            return reference.backward(problem, d_out, *arguments)

        def prepare_backward(problem: Any, d_out: torch.Tensor, *rest: Any) -> Any:
            strides, needs = d_out.stride(), rest[-1]

            def run(d_out: torch.Tensor, *arguments: Any) -> Any:
                taken.append("short")
                assert d_out.stride() == strides
                return reference.backward(problem, d_out, *arguments, needs)

            return SimpleNamespace(run=run) if (strides, needs) in seen else None

        monkeypatch.setattr(module, "backward", backward)
        monkeypatch.setattr(module, "prepare_backward", prepare_backward, raising=False)
        return taken

    @pytest.fixture
    def case(self, backs) -> Case:
        """Calls of it go the short way, and back."""
        case = make_case(**SMALL)
        self.back_and_forth(case, 3)
        assert backs == ["ordinary", "short", "short"]
        backs.clear()
        return case

    def back_and_forth(self, case: Case, times: int = 1) -> list[Results]:
        inputs = leaves(case.inputs)
        return [gradients(case, case.call(*inputs), inputs) for _ in range(times)]

    @pytest.mark.parametrize("out_scale", [None, 0.5, "per-sequence"], ids=str)
    @pytest.mark.parametrize("form", FORMS)
    def test_gives_the_same_gradients(self, ways, backs, form, out_scale):
        case = make_case(form, **SMALL, out_scale=out_scale)
        results = self.back_and_forth(case, 4)
        assert ways == ["ordinary", "short", "short", "short"]
        assert backs == ["ordinary", "short", "short", "short"]
        for result in results[1:]:
            assert_same(result, results[0])

    def test_of_other_rows(self, case, backs):
        for rows in (1, 4, 9):
            other = make_case(q_lengths=(rows, 3, 2), k_lengths=(2, rows, 5), heads=2, head_dim=8, seed=rows)
            (short,) = self.back_and_forth(other)
            expected = reference.backward(other.problem, other.d_out, *other.inputs, (True, True, True))
            assert_same(short, Results(reference.forward(other.problem, *other.inputs), *expected))
        assert backs == ["short"] * 3

    def test_only_the_gradients_that_are_needed(self, case, backs):
        q, k, v = leaves(case.inputs)
        _, dk, _ = torch.autograd.grad(case.call(q, k, v), (q, k, v), case.d_out)
        assert backs.pop() == "short"
        q.requires_grad_(False)
        case.call(q, k, v)
        for way in ("ordinary", "short", "short"):
            out = case.call(q, k, v)
            dk_and_dv = torch.autograd.grad(out, (k, v), case.d_out)
            assert torch.equal(dk_and_dv[0], dk)
            assert backs.pop() == way

    def test_more_than_once_of_one_call(self, case, backs):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        grads = [torch.autograd.grad(out, inputs, case.d_out, retain_graph=True) for _ in range(2)]
        assert backs == ["short"] * 2
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)
            assert one.data_ptr() != other.data_ptr()

    def test_a_d_out_that_lies_otherwise_is_not_taken_for_one_that_does_not(self, case, backs):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        expected = torch.autograd.grad(out, inputs, case.d_out, retain_graph=True)
        assert backs == ["short"]
        d_out = case.d_out.transpose(0, 1).contiguous().transpose(0, 1)
        assert d_out.stride() != case.d_out.stride()
        for _ in range(2):
            for grad, same in zip(torch.autograd.grad(out, inputs, d_out, retain_graph=True), expected, strict=True):
                assert torch.equal(grad, same)
        assert backs == ["short", "ordinary", "short"]
        ones = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        assert backs.pop() == "ordinary"
        for grad, same in zip(ones, torch.autograd.grad(out, inputs, torch.ones_like(out)), strict=True):
            assert torch.equal(grad, same)
        assert backs.pop() == "short"

    def test_dispatch_modes_see_the_operator(self, case, backs):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        with Watching() as mode:
            torch.autograd.grad(out, inputs, case.d_out)
        assert "gdpa.backward.default" in mode.seen
        assert backs == ["ordinary"]

    def test_flop_counters_count(self, case, backs):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(out, inputs, case.d_out)
        assert counter.get_total_flops() == 2 * (3 * 8 + 2 * 8) * 2 * (5 * 4 + 3 * 7)

    def test_profilers_see_the_operator(self, case, backs):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(out, inputs, case.d_out)
        assert "gdpa::backward" in {event.key for event in profile.key_averages()}
        assert backs == ["ordinary"]

    def test_gradients_are_not_differentiated_again(self, case, backs):
        inputs = leaves(case.inputs)
        grads = torch.autograd.grad(case.call(*inputs), inputs, case.d_out, create_graph=True)
        with pytest.raises(gdpa.GdpaError, match="double backward"):
            grads[0].sum().backward()
        assert backs == ["ordinary"]

    def test_many_d_outs_at_once(self, case, backs):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        several = torch.stack((case.d_out, 2 * case.d_out))
        grads = torch.autograd.grad(out, inputs, several, is_grads_batched=True, retain_graph=True)
        assert "short" not in backs
        for grad, single in zip(grads, torch.autograd.grad(out, inputs, case.d_out), strict=True):
            assert torch.equal(grad[0], single)

    def test_a_d_out_of_a_subclass(self, case, backs):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        for _ in range(2):
            torch.autograd.grad(out, inputs, case.d_out.as_subclass(Named), retain_graph=True)
        assert backs == ["ordinary"] * 2

    def test_a_d_out_that_is_saved_too(self, case, backs):
        """The guard takes no tensor twice."""
        inputs = leaves(case.inputs)
        for _ in range(2):
            torch.autograd.grad(case.call(*inputs), inputs, inputs[0])
        assert backs == ["ordinary"] * 2

    def test_saved_tensors_that_come_back_otherwise(self, case, backs):
        """Hooks may give back others than were saved: copies in another layout here."""
        inputs = leaves(case.inputs)
        expected = torch.autograd.grad(case.call(*inputs), inputs, case.d_out)
        assert backs == ["short"]

        def unpack(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), unpack):
            out = case.call(*inputs)
        prepared = spy(self.patch, dispatch.choose(None), "prepare_backward")
        for grad, same in zip(torch.autograd.grad(out, inputs, case.d_out), expected, strict=True):
            assert torch.equal(grad, same)
        assert [x.stride() for x in prepared[0][2:5]] == [unpack(x).stride() for x in inputs]

    def test_saved_offsets_that_come_back_as_two_tensors(self, backs):
        """As from torch.autograd.graph.save_on_cpu, of calls whose sides have one tensor of offsets."""
        case = make_case(q_lengths=(5, 3), heads=2, head_dim=8)
        case = case.with_inputs(cu_seqlens_k=case.inputs.cu_seqlens_q)
        inputs = leaves(case.inputs)
        *_, expected = self.back_and_forth(case, 3)
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
                out = case.call(*inputs)
            assert_same(gradients(case, out, inputs), expected)
            (again,) = self.back_and_forth(case)
            assert_same(again, expected)
        assert backs == ["ordinary"] + ["short"] * 6

    @pytest.fixture(autouse=True)
    def _patch(self, monkeypatch) -> None:
        self.patch = monkeypatch

    def test_offsets_that_are_to_be_checked(self, case, backs, monkeypatch):
        inputs = leaves(case.inputs)
        out = case.call(*inputs)
        monkeypatch.setenv("GDPA_CHECK", "1")
        torch.autograd.grad(out, inputs, case.d_out)
        assert backs == ["ordinary"]

    def test_where_the_backend_declines_it_goes_the_ordinary_way(self, case, backs, monkeypatch):
        declined = SimpleNamespace(run=lambda *_: backs.append("declined"))
        monkeypatch.setattr(dispatch.choose(None), "prepare_backward", lambda *_: declined)
        inputs = leaves(case.inputs)
        expected = torch.autograd.grad(case.call(*inputs), inputs, case.d_out)
        out = make_case(q_lengths=(6, 3), k_lengths=(4, 8), heads=2, head_dim=8)
        (result,) = self.back_and_forth(out)
        assert backs == ["short", "declined", "ordinary"]
        assert len(expected) == 3
        same = reference.backward(out.problem, out.d_out, *out.inputs, (True, True, True))
        assert_same(result, Results(reference.forward(out.problem, *out.inputs), *same))

    def test_nothing_keeps_an_output_alive_that_nobody_has(self, case):
        inputs = leaves(case.inputs)
        gc.collect()
        gc.disable()
        try:
            out = weakref.ref(case.call(*inputs))
            assert out() is None
        finally:
            gc.enable()

    def test_what_is_remembered_is_bounded(self, case, backs, monkeypatch):
        monkeypatch.setattr(shortcut, "_MOST_CALLS", 2)
        monkeypatch.setattr(shortcut.Call, "MOST_ROWS", 2)
        for rows in range(1, 6):
            other = make_case(q_lengths=(rows, 3), k_lengths=(2, rows), heads=2, head_dim=8, seed=rows)
            inputs = leaves(other.inputs)
            for needed in ((0,), (1,), (2,), (0, 1)):
                for _ in range(3):
                    torch.autograd.grad(other.call(*inputs), [inputs[i] for i in needed], other.d_out)
        calls = [call for found in shortcut._calls.values() for call in found]
        assert any(call.backs for call in calls)
        for call in calls:
            assert len(call.backs) <= 2
            assert all(1 <= len(back.by_rows) <= 2 for back in call.backs)

"""The short way of a call (gdpa/shortcut.py): taken by calls like one before, by nothing else, with the same results.

A backend that computes by the reference, and takes notes, stands in for the one on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import FORMS, Case, assert_same, gradients, leaves, make_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from gdpa import dispatch, shortcut
from gdpa.backends import reference
from gdpa.numerics import Results

SMALL: dict[str, Any] = {"q_lengths": (5, 3), "k_lengths": (4, 7), "heads": 2, "head_dim": 8}


def test_this_torch_has_the_guards_it_needs():
    assert shortcut._guards_hold()


class TestCallsAlike:
    @pytest.mark.parametrize("out_scale", [None, 0.5, "per-sequence"], ids=str)
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
    def test_take_it_with_the_same_results(self, ways, form, out_scale, grad):
        case = make_case(form, **SMALL, out_scale=out_scale)
        inputs = leaves(case.inputs) if grad else case.inputs[:3]
        first, second = (case.call(*inputs) for _ in range(2))
        assert ways == ["ordinary", "short"]
        assert torch.equal(first, second)
        assert second.requires_grad == grad
        if grad:
            assert type(second.grad_fn) is type(first.grad_fn)
            assert_same(gradients(case, second, inputs), gradients(case, first, inputs))

    @pytest.mark.parametrize("form", ["packed", "dense-key", "shared-query"])
    def test_of_other_rows_and_batches_take_it_too(self, ways, form):
        make_case(form, **SMALL).call(*make_case(form, **SMALL).inputs[:3])
        batch = (2,) if form == "dense-key" else (2, 3, 1)  # of dense keys the batch is a size like others
        for size in batch:
            case = make_case(form, q_lengths=(6, 1, 2)[:size], k_lengths=(4, 9, 3)[:size], heads=2, head_dim=8, seed=size)
            if form != "packed":
                case = make_case(form, q_lengths=(5, 1, 2)[:size], k_lengths=(4, 9, 3)[:size], heads=2, head_dim=8, seed=size)
            short = case.call(*case.inputs[:3])
            assert torch.equal(short, reference.forward(case.problem, *case.inputs))
        assert ways == ["ordinary", *["short"] * len(batch)]

    def test_by_name_or_by_object(self, ways):
        case = make_case(**SMALL, activation="silu")
        q, k, v, cu_q, cu_k, _ = case.inputs
        for activation in ("silu", gdpa.Activation("silu"), gdpa.Activation("relu")):
            gdpa.attention_varlen(q, k, v, cu_q, cu_k, activation=activation)
        assert ways == ["ordinary", "short", "ordinary"]

    def test_whether_both_sides_have_one_tensor_of_offsets_or_two(self, ways):
        case = make_case(q_lengths=(5, 3), heads=2, head_dim=8)
        q, k, v, cu_q, cu_k, _ = case.inputs
        expected = reference.forward(case.problem, *case.inputs)
        for offsets in ((cu_q, cu_q), (cu_q, cu_q), (cu_q, cu_k), (cu_q, cu_k)):
            assert torch.equal(gdpa.attention_varlen(q, k, v, *offsets, backend="reference"), expected)
        assert ways == ["ordinary", "short"] * 2

    def test_parameters_are_tensors(self, ways):
        case = make_case("shared-query", q_lengths=(5,), k_lengths=(4, 7), heads=2, head_dim=8)
        seeds = torch.nn.Parameter(case.inputs.q)
        for _ in range(2):
            out = case.call(seeds, *case.inputs[1:3])
        assert ways == ["ordinary", "short"]
        (grad,) = torch.autograd.grad(out, seeds, case.d_out)
        inputs = leaves(case.inputs)
        assert torch.equal(grad, gradients(case, case.call(*inputs), inputs).dq)

    def test_bounds_of_the_lengths_may_change(self, ways):
        case = make_case(**SMALL)
        q, k, v, cu_q, cu_k, _ = case.inputs
        for bounds in ((None, None), (5, 7), (100, None)):
            gdpa.attention_varlen(q, k, v, cu_q, cu_k, *bounds)
        assert ways == ["ordinary", "short", "short"]

    def test_only_the_gradients_that_are_needed(self, ways, monkeypatch):
        case = make_case(**SMALL)
        q, k, v = case.inputs[:3]
        k = k.clone().requires_grad_()
        for _ in range(2):
            out = case.call(q, k, v)
        calls = []
        module = dispatch.choose(case.problem)
        monkeypatch.setattr(module, "backward", lambda *a: calls.append(a[-1]) or reference.backward(*a))
        out.sum().backward()
        assert ways == ["ordinary", "short"]
        assert calls == [(False, True, False)]

    def test_under_autocast_that_casts_nothing(self, ways):
        case = make_case(**SMALL, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            outs = [case.call(*case.inputs[:3]) for _ in range(2)]
        assert ways == ["ordinary", "short"]
        assert torch.equal(*outs)
        with torch.autocast("cpu", torch.float16):
            assert case.call(*case.inputs[:3]).dtype == torch.float16
        assert ways == ["ordinary", "short", "ordinary"]
        assert case.call(*case.inputs[:3]).dtype == torch.bfloat16
        assert ways == ["ordinary", "short", "ordinary", "ordinary"]

    def test_with_a_default_device(self, ways):
        """It is a mode of torch functions, but of those that make tensors."""
        case = make_case(**SMALL)
        with torch.device("cpu"):
            for _ in range(2):
                case.call(*case.inputs[:3])
        assert ways == ["ordinary", "short"]

    def test_in_inference_mode(self, ways):
        case = make_case(**SMALL)
        inputs = leaves(case.inputs)
        expected = case.call(*inputs)
        case.call(*inputs)
        with torch.inference_mode():
            outs = [case.call(*inputs) for _ in range(2)]
        assert ways == ["ordinary", "short"] * 2
        for out in outs:
            assert torch.equal(out, expected)
            assert not out.requires_grad

    def test_checkpointing_gives_the_same_gradients(self, ways):
        case = make_case(**SMALL)
        inputs = leaves(case.inputs)
        expected = gradients(case, case.call(*inputs), inputs)
        out = checkpoint(case.call, *inputs, use_reentrant=False)
        assert_same(gradients(case, out, inputs), expected)
        assert ways == ["ordinary", "short", "short"]

    def test_an_input_changed_in_place_is_noticed(self, ways):
        case = make_case(**SMALL)
        q, k, v = (x * 1.0 for x in leaves(case.inputs))
        case.call(q, k, v)
        out = case.call(q, k, v)
        k.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        assert ways == ["ordinary", "short"]

    def test_what_is_remembered_is_bounded(self, ways, monkeypatch):
        monkeypatch.setattr(shortcut, "_MOST_KEYS", 2)
        monkeypatch.setattr(shortcut, "_MOST_CALLS", 2)
        monkeypatch.setattr(shortcut.Call, "MOST_ROWS", 2)
        for head_dim in (8, 16, 24, 32):
            for scale in (0.5, 0.25, 0.125):
                for rows in (1, 2, 3, 4):
                    case = make_case(q_lengths=(rows, 3), heads=2, head_dim=head_dim, scale=scale)
                    assert torch.equal(case.call(*case.inputs[:3]), reference.forward(case.problem, *case.inputs))
        assert 1 <= len(shortcut._calls) <= 2
        for calls in shortcut._calls.values():
            assert 1 <= len(calls) <= 2
            assert all(1 <= len(call.by_rows) <= 2 for call in calls)


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class WatchingFunctions(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class TestWhatMustSeeTheOperator:
    """Each is tried after calls that went the short way, and is followed by one that does."""

    @pytest.fixture
    def case(self, ways) -> Case:
        case = make_case(**SMALL)
        for _ in range(2):
            case.call(*case.inputs[:3])
        assert ways == ["ordinary", "short"]
        ways.clear()
        yield case
        ways.clear()
        case.call(*case.inputs[:3])
        assert ways == ["short"]

    def test_dispatch_modes(self, case, ways):
        with Watching() as mode:
            case.call(*case.inputs[:3])
            case.call(*case.inputs[:3])
        assert mode.seen.count("gdpa.forward.default") == 2
        assert ways == ["ordinary"] * 2

    def test_flop_counters(self, case, ways):
        with FlopCounterMode(display=False) as counter:
            case.call(*case.inputs[:3])
        assert counter.get_total_flops() == 2 * (8 + 8) * 2 * (5 * 4 + 3 * 7)

    def test_modes_of_torch_functions(self, case, ways):
        with WatchingFunctions() as mode, torch.device("cpu"):
            case.call(*case.inputs[:3])
        assert "gdpa.forward.default" in mode.seen
        assert ways == ["ordinary"]

    def test_profilers(self, case, ways):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            case.call(*case.inputs[:3])
        assert "gdpa::forward" in {event.key for event in profile.key_averages()}
        assert ways == ["ordinary"]

    def test_fake_tensors(self, case, ways):
        with torch._subclasses.FakeTensorMode() as mode:
            inputs = [mode.from_tensor(x) for x in case.inputs[:5]]
            out = gdpa.attention_varlen(*inputs)
        assert isinstance(out, torch._subclasses.FakeTensor)
        assert ways == []

    def test_tracers(self, case, ways):
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(lambda q, k, v: case.call(q, k, v))(*case.inputs[:3])
        assert torch.ops.gdpa.forward.default in {node.target for node in graph.graph.nodes}

    def test_compilers(self, case, ways):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(case.call, backend=backend, fullgraph=True)
        assert torch.equal(compiled(*case.inputs[:3]), reference.forward(case.problem, *case.inputs))
        assert torch.ops.gdpa.forward.default in {node.target for node in graphs[0].graph.nodes}
        assert ways == ["ordinary"]

    def test_vmap(self, case, ways):
        q, k, v = (torch.stack((x, 2 * x)) for x in case.inputs[:3])
        out = torch.func.vmap(case.call)(q, k, v)
        assert torch.equal(
            out, torch.stack([reference.forward(case.problem, *x, *case.inputs[3:]) for x in zip(q, k, v, strict=True)])
        )
        assert "short" not in ways

    def test_functional_grad_is_refused_rather_than_wrong(self, case, ways):
        q, k, v = case.inputs[:3]
        with pytest.raises(gdpa.GdpaError, match=r"torch\.func"):
            torch.func.grad(lambda q: case.call(q, k, v).sum())(q)
        assert "short" not in ways

    def test_forward_mode_is_refused_rather_than_wrong(self, case, ways):
        q, k, v = case.inputs[:3]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, q)
            with pytest.raises(gdpa.GdpaError, match="forward-mode"):
                case.call(dual, k, v)

    def test_autocast(self, case, ways):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                assert case.call(*case.inputs[:3]).dtype == torch.bfloat16
        assert ways == ["ordinary"] * 2

    def test_subclasses(self, case, ways):
        q, k, v = case.inputs[:3]
        for _ in range(2):
            assert type(case.call(q.as_subclass(Named), k, v)) is Named
        assert ways == ["ordinary"] * 2

    def test_views_that_negate(self, case, ways):
        q, k, v = case.inputs[:3]
        for _ in range(2):
            out = case.call(torch._neg_view(q), k, v)
        assert torch.equal(out, reference.forward(case.problem, -q, *case.inputs[1:]))
        assert ways == ["ordinary"] * 2

    def test_a_tensor_that_stands_twice(self, case, ways):
        k = case.inputs.k
        for _ in range(2):
            case.call(case.inputs.q, k, k)
        assert ways == ["ordinary"] * 2

    def test_inference_tensors_as_offsets(self, case, ways):
        """They have no version by which a schedule could be told to be theirs."""
        q, k, v, cu_q, cu_k, _ = case.inputs
        with torch.inference_mode():
            cu_q, cu_k = cu_q.clone(), cu_k.clone()
        for _ in range(2):
            gdpa.attention_varlen(q, k, v, cu_q, cu_k)
        assert ways == ["ordinary"] * 2

    def test_below_autograd_nothing_is_recorded(self, case, ways):
        """As in the body of another operator."""
        inputs = leaves(case.inputs)
        with torch._C._AutoDispatchBelowAutograd():
            for _ in range(2):
                assert not case.call(*inputs).requires_grad
        assert ways == ["ordinary", "short"]
        for _ in range(2):
            assert case.call(*inputs).requires_grad
        assert ways == ["ordinary", "short"] * 2

    def test_offsets_that_are_to_be_checked(self, case, ways, monkeypatch):
        q, k, v, _, cu_k, _ = case.inputs
        wrong = torch.tensor([0, 9, 8], dtype=torch.int32)
        with monkeypatch.context() as patch:
            patch.setenv("GDPA_CHECK", "1")
            with pytest.raises(gdpa.GdpaError, match="never to decrease"):
                gdpa.attention_varlen(q, k, v, wrong, cu_k, deterministic=False)

    def test_determinism_is_asked_anew(self, case, ways):
        q, k, v, cu_q, cu_k, _ = case.inputs
        for _ in range(2):
            gdpa.attention_varlen(q, k, v, cu_q, cu_k)
        torch.use_deterministic_algorithms(True)
        try:
            for _ in range(2):
                gdpa.attention_varlen(q, k, v, cu_q, cu_k)
        finally:
            torch.use_deterministic_algorithms(False)
        assert ways == ["short", "short", "ordinary", "short"]


def test_a_process_may_begin_under_vmap(ways):
    """Where the guards cannot be tried out: torch.func refuses requires_grad_()."""
    shortcut._guards_hold.cache_clear()
    case = make_case(**SMALL)
    q, k, v = (torch.stack((x, 2 * x)) for x in case.inputs[:3])
    assert torch.func.vmap(case.call)(q, k, v).shape == (2, *case.problem.output_shape)
    for _ in range(2):
        case.call(*case.inputs[:3])
    assert ways[-2:] == ["ordinary", "short"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": 0}, "causal: expected a bool"),
    "window": ({"window_size": (-1.0, -1.0)}, "window_size: expected an integer"),
    "scale": ({"scale": True}, "scale: expected a number"),
    "deterministic": ({"deterministic": 0}, "deterministic: expected True, False or None"),
    "backend": ({"backend": ["hopper"]}, "backend: expected None or one of"),
    "activation": ({"activation": "sillu"}, "activation: unknown name"),
    "bound": ({"max_seqlen_q": -1}, "max_seqlen_q: expected at least 0"),
    "bound's type": ({"max_seqlen_k": 7.0}, "max_seqlen_k: expected an integer"),
    "fewer values": ({"v": torch.ones(10, 2, 8)}, "v: expected the batch and rows of k"),
    "fewer offsets": ({"cu_seqlens_k": torch.tensor([0, 11], dtype=torch.int32)}, "cu_seqlens_k: expected 3 offsets"),
    "no tensor": ({"k": "k"}, "k: expected a torch.Tensor"),
    "another dtype": ({"v": torch.ones(11, 2, 8, dtype=torch.float64)}, "v: expected dtype"),
    "out_scale": ({"out_scale": torch.ones(3)}, "out_scale: expected a number or a tensor of shape"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_are_refused_as_ever(ways, changes, message):
    """Each is like a remembered one but for what is wrong, where the two would compare equal."""
    case = make_case(**SMALL)
    good = {"q": case.inputs.q, "k": case.inputs.k, "v": case.inputs.v} | {
        "cu_seqlens_q": case.inputs.cu_seqlens_q,
        "cu_seqlens_k": case.inputs.cu_seqlens_k,
    }
    for options in ({}, {"scale": 1.0}, {"deterministic": False}, {"out_scale": torch.ones(2)}):
        for _ in range(2):
            gdpa.attention_varlen(**good, **options)
    assert ways == ["ordinary", "short", "ordinary", "short", "short", "short", "ordinary", "short"]
    with pytest.raises(gdpa.GdpaError, match=message):
        gdpa.attention_varlen(**(good | changes))
    assert len(ways) == 8


def test_forms_are_not_mixed_up(ways):
    dense = make_case("dense", q_lengths=(5, 5), k_lengths=(4, 4), heads=2, head_dim=8)
    for _ in range(2):
        dense.call(*dense.inputs[:3])
    with pytest.raises(gdpa.GdpaError, match="expected offsets for at least one"):
        gdpa.attention_varlen(*dense.inputs[:3], None, None)
    packed = make_case(q_lengths=(5, 3), heads=2, head_dim=8)
    for _ in range(2):
        packed.call(*packed.inputs[:3])
    with pytest.raises(gdpa.GdpaError, match=r"q: expected \(B, Sq, H, D\)"):
        gdpa.attention(*packed.inputs[:3])
    assert ways == ["ordinary", "short"] * 2


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window_size": (3, 0)}, {"activation": ["silu", "relu"]}, {"activation": torch.relu}, {"scale": 1}],
    ids=["causal", "window", "activations of heads", "callable", "integer"],
)
def test_options_that_are_not_plain_go_the_ordinary_way(ways, options):
    case = make_case(**SMALL)
    q, k, v, cu_q, cu_k, _ = case.inputs
    for _ in range(3):
        gdpa.attention_varlen(q, k, v, cu_q, cu_k, **options)
    assert ways == ["ordinary"] * 3


def test_without_the_guards_all_go_the_ordinary_way(ways, monkeypatch):
    monkeypatch.setattr(shortcut, "_guards_hold", lambda: False)
    case = make_case(**SMALL)
    for _ in range(3):
        case.call(*case.inputs[:3])
    assert ways == ["ordinary"] * 3


def test_without_what_sees_watchers_all_go_the_ordinary_way(ways, monkeypatch):
    monkeypatch.delattr(torch._C, "_get_function_stack_at")
    shortcut._watchers_are_seen.cache_clear()
    case = make_case(**SMALL)
    try:
        with torch.device("cpu"):
            for _ in range(3):
                case.call(*case.inputs[:3])
    finally:
        shortcut._watchers_are_seen.cache_clear()
    assert ways == ["ordinary"] * 3


def test_where_the_backend_declines_the_call_goes_the_ordinary_way(ways, monkeypatch):
    case = make_case(**SMALL)
    inputs = leaves(case.inputs)
    module = dispatch.choose(case.problem)
    monkeypatch.setattr(module, "prepare", lambda *_: SimpleNamespace(run=lambda *_: ways.append("declined")))
    outs = [case.call(*inputs) for _ in range(2)]
    assert ways == ["ordinary", "declined", "ordinary"]
    assert_same(*(gradients(case, out, inputs) for out in outs))


def test_cpu_tensors_are_not_remembered(monkeypatch):
    monkeypatch.setattr(shortcut, "_calls", {})
    case = make_case(**SMALL)
    for _ in range(2):
        case.call(*case.inputs[:3])
    assert not shortcut._calls


def test_results_are_the_reference_s(ways):
    """The notes of the stand-in are of its forward alone."""
    case = make_case(**SMALL, activation="silu")
    inputs = leaves(case.inputs)
    for _ in range(2):
        out = case.call(*inputs)
    expected = Results(
        reference.forward(case.problem, *case.inputs),
        *reference.backward(case.problem, case.d_out, *case.inputs, (True, True, True)),
    )
    assert_same(gradients(case, out, inputs), expected)
    assert ways == ["ordinary", "short"]

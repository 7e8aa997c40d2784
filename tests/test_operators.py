"""What PyTorch makes of the operators: opcheck, compilation, export, autocast, checkpointing, FLOPs, DDP and FSDP2."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo.testing
import torch.multiprocessing
from helpers import (
    FORMS,
    Case,
    backend_params,
    clean_env,
    leaves,
    make_case,
    needs_compiler,
    offsets_of,
    spy,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from gdpa import dispatch, numerics
from gdpa.backends import reference
from gdpa.numerics import Results
from gdpa.problem import allowed_pairs

SMALL: dict[str, Any] = {"q_lengths": (5, 3), "k_lengths": (4, 7), "heads": 2, "head_dim": 8}


def operator_arguments(case: Case, backend: str = "") -> tuple[Any, ...]:
    """The arguments of torch.ops.gdpa.forward for a case."""
    problem = case.problem
    return (
        *case.inputs,
        None,
        None,
        list(problem.activations),
        problem.scale,
        problem.out_scale,
        *problem.window,
        False,
        backend,
    )


def gradients(case: Case, out: Tensor, inputs: tuple[Tensor, ...]) -> Results:
    return Results(out.detach(), *torch.autograd.grad(out, inputs, case.d_out))


def assert_same(results: Results, expected: Results) -> None:
    for name, x, y in zip(Results._fields, results, expected, strict=True):
        assert torch.equal(x, y), f"{name} differs by {(x - y).abs().max()}"


class TestOpcheck:
    """torch.library.opcheck: schema, autograd registration, fakes, and AOT dispatch with dynamic shapes."""

    CASES: ClassVar[dict[str, Any]] = {
        **{form: {"form": form, **SMALL} for form in FORMS},
        "per-sequence out_scale": {**SMALL, "out_scale": "per-sequence"},
        "grouped queries, causal, Dv": {**SMALL, "heads": 4, "kv_heads": 2, "value_dim": 16, "causal": True},
        "bf16": {**SMALL, "dtype": torch.bfloat16},
        "empty sequences": {"q_lengths": (0, 4), "k_lengths": (3, 0)},
        "custom activation": {**SMALL, "activation": lambda s: torch.relu(s) ** 2 / 3},
    }

    @pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
    @pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
    def test_forward(self, options, grad):
        case = make_case(**options)
        q, k, v = (x.clone().requires_grad_(grad) for x in case.inputs[:3])
        torch.library.opcheck(torch.ops.gdpa.forward.default, (q, k, v, *operator_arguments(case)[3:]))

    @pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
    @pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
    def test_backward(self, options, needs):
        case = make_case(**options)
        torch.library.opcheck(torch.ops.gdpa.backward.default, (case.d_out, *operator_arguments(case), *needs))

    def test_strided_inputs(self):
        case = make_case(q_lengths=(5, 3), heads=2, head_dim=8)
        q, k, v = torch.randn(8, 2, 24, requires_grad=True).split(8, dim=-1)
        torch.library.opcheck(torch.ops.gdpa.forward.default, (q, k, v, *operator_arguments(case)[3:]))

    @pytest.mark.parametrize("backend", backend_params())
    def test_every_backend(self, backend):
        case = make_case(**SMALL)
        q, k, v = leaves(case.inputs)
        torch.library.opcheck(torch.ops.gdpa.forward.default, (q, k, v, *operator_arguments(case, backend)[3:]))


COMPILERS = [pytest.param("aot_eager"), pytest.param("inductor", marks=needs_compiler)]
GLOBAL_ALPHA = 0.5


def double_relu(s: Tensor) -> Tensor:
    return torch.relu(s) * 2


ACTIVATIONS = {
    "named": "silu",
    "Activation": gdpa.Activation(lambda s: torch.tanh(s) * 0.5),
    "capture-free lambda": lambda s: torch.relu(s) ** 2 / 64,
    "capture-free function": double_relu,
    "torch function": torch.sin,
    "per head": ["relu", gdpa.Activation(torch.cos)],
}


class TestCompile:
    @pytest.mark.parametrize("compiler", COMPILERS)
    @pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
    def test_matches_eager_forward_and_gradients(self, compiler, activation):
        case = make_case(**SMALL, activation=activation, causal=True)
        cu_q, cu_k = case.inputs[3:5]

        def function(q, k, v):
            return gdpa.attention_varlen(q, k, v, cu_q, cu_k, activation=activation, causal=True)

        inputs = leaves(case.inputs)
        compiled = torch.compile(function, backend=compiler, fullgraph=True)
        assert_same(gradients(case, compiled(*inputs), inputs), gradients(case, function(*inputs), inputs))

    @pytest.mark.parametrize("compiler", COMPILERS)
    @pytest.mark.parametrize("form", FORMS)
    def test_every_form(self, compiler, form):
        case = make_case(form, **SMALL, out_scale="per-sequence")
        inputs = leaves(case.inputs)
        compiled = torch.compile(case.call, backend=compiler, fullgraph=True)
        assert_same(gradients(case, compiled(*inputs), inputs), gradients(case, case.call(*inputs), inputs))

    @pytest.mark.parametrize("compiler", COMPILERS)
    def test_among_other_operators(self, compiler):
        """A projection before and after, so that strides and fusions around the operator are real."""
        offsets = offsets_of((5, 0, 9))

        def block(x, w):
            q, k, v = (x @ w).view(-1, 2, 24).split(8, dim=-1)
            return gdpa.attention_varlen(q, k, v, offsets, offsets, activation="gelu", out_scale=0.5).flatten(1).relu()

        x, w = torch.randn(14, 6, requires_grad=True), torch.randn(6, 48, requires_grad=True)
        compiled = torch.compile(block, backend=compiler, fullgraph=True)(x, w)
        expected = block(x, w)
        torch.testing.assert_close(compiled, expected)
        for result, right in zip(
            torch.autograd.grad(compiled.sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w)), strict=True
        ):
            torch.testing.assert_close(result, right)

    @pytest.mark.parametrize("form", FORMS)
    def test_batch_and_lengths_change_without_a_recompile(self, form):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=counter, fullgraph=True, dynamic=True)
        def compiled(q, k, v, cu_q, cu_k):
            if form == "dense":
                return gdpa.attention(q, k, v, activation="silu", causal=True)
            return gdpa.attention_varlen(q, k, v, cu_q, cu_k, activation="silu", causal=True)

        for seed, (q_lengths, k_lengths) in enumerate(
            # The first batch has no size in common with another dimension: dynamo would tie the two.
            [((5, 3, 3), (6, 7, 9)), ((6, 2), (8, 3)), ((3, 0, 4, 4, 2), (2, 5, 0, 6, 1)), ((40,) * 6, (30,) * 6)]
        ):
            if form == "shared-query":
                q_lengths = (7 + seed,)
            case = make_case(form, q_lengths=q_lengths, k_lengths=k_lengths, activation="silu", causal=True, seed=seed)
            inputs = leaves(case.inputs)
            out = compiled(*inputs, *case.inputs[3:5])
            assert_same(gradients(case, out, inputs), gradients(case, case.call(*inputs), inputs))
        assert counter.frame_count == 1

    def test_offsets_are_checked_inside_the_compiled_program(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def compiled(q, offsets):
            return gdpa.attention_varlen(q, q, q, offsets, offsets)

        q = torch.randn(8, 2, 8)
        assert compiled(q, offsets_of((5, 3))).isfinite().all()
        with pytest.raises(gdpa.GdpaError, match="cu_seqlens_q: expected to end at most at 8"):
            compiled(q, offsets_of((5, 4)))

    def test_a_wrong_argument_is_named_inside_a_compiled_function(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def compiled(q):
            return gdpa.attention(q, q, q, activation="gelo")

        with pytest.raises(Exception, match=r"activation: .*gelo.*gelu"):
            compiled(torch.randn(1, 4, 2, 8))

    def test_a_callable_that_captures_is_refused_and_never_stale(self):
        """The refusal must stand on every call, whatever was compiled before."""
        q = torch.randn(1, 4, 2, 8)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def by_argument(q, alpha):
            return gdpa.attention(q, q, q, activation=lambda s: torch.relu(s) * alpha)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def by_global(q):
            return gdpa.attention(q, q, q, activation=lambda s: torch.relu(s) * GLOBAL_ALPHA)

        for alpha in (2.0, 3.0, 4):
            with pytest.raises(Exception, match=r"build gdpa\.Activation\(fn\) outside the compiled region"):
                by_argument(q, alpha)
            with pytest.raises(Exception, match=r"build gdpa\.Activation\(fn\) outside the compiled region"):
                by_global(q)

    def test_an_activation_swapped_between_calls_changes_the_result(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def compiled(q, f):
            return gdpa.attention(q, q, q, activation=f)

        q = torch.randn(1, 4, 2, 8)
        for power in (2, 3, 2.5):
            f = gdpa.Activation(lambda s, power=power: torch.relu(s) ** power)
            assert torch.equal(compiled(q, f), gdpa.attention(q, q, q, activation=f))

    def test_nested_tensors(self):
        offsets = offsets_of((5, 1, 7), torch.int64)
        values = torch.randn(13, 2, 8, requires_grad=True)

        def function(values):
            x = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
            return gdpa.attention(x, x, x, activation="silu").values()

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(values)
        expected = function(values)
        assert torch.equal(compiled, expected)
        (grad,) = torch.autograd.grad(compiled.sum(), values)
        (right,) = torch.autograd.grad(expected.sum(), values)
        assert torch.equal(grad, right)


class TestCapturedNumbers:
    """A number read from a closure, a default or a global is frozen at the call; a changed one changes the result."""

    @pytest.mark.parametrize("numbers", [(2, 3), (2.0, 3.0), (2, 2.5), (1, True)], ids=str)
    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_a_closure_that_changes_changes_the_result(self, numbers, backend):
        q = torch.randn(1, 6, 2, 8)
        captured = numbers[0]

        def f(s):
            return torch.tanh(s * captured) + captured

        for captured in numbers:
            out = gdpa.attention(q, q, q, activation=f, backend=backend)
            fixed = float(captured)
            expected = gdpa.attention(
                q,
                q,
                q,
                activation=gdpa.Activation(lambda s, fixed=fixed: torch.tanh(s * fixed) + fixed),
                backend=backend,
            )
            torch.testing.assert_close(out, expected)

    def test_a_global_that_changes_changes_the_result(self, monkeypatch):
        q = torch.randn(1, 6, 2, 8)

        def f(s):
            return torch.relu(s) * GLOBAL_ALPHA

        once = gdpa.attention(q, q, q, activation="relu")
        for alpha in (0.5, 2, 4.0):
            monkeypatch.setitem(globals(), "GLOBAL_ALPHA", alpha)
            torch.testing.assert_close(gdpa.attention(q, q, q, activation=f), once * alpha)

    def test_a_default_that_changes_changes_the_result(self):
        q = torch.randn(1, 6, 2, 8)
        once = gdpa.attention(q, q, q, activation="relu")
        for alpha in (1, 2, 0.5):

            def f(s, alpha=alpha):
                return torch.relu(s) * alpha

            torch.testing.assert_close(gdpa.attention(q, q, q, activation=f), once * alpha)


class TestExport:
    def test_a_saved_program_with_a_custom_activation_runs_in_a_new_process(self, tmp_path: Path):
        slope = 0.3
        f = gdpa.Activation(lambda s: torch.where(s > 0, s, slope * s) ** 2)

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.project = torch.nn.Linear(16, 48)

            def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
                q, k, v = self.project(x).view(-1, 2, 24).split(8, dim=-1)
                return gdpa.attention_varlen(q, k, v, offsets, offsets, activation=f, causal=True)

        block = Block()
        rows, batch = torch.export.Dim("rows", min=2, max=4096), torch.export.Dim("entries", min=2, max=512)
        program = torch.export.export(
            block,
            (torch.randn(9, 16), offsets_of((4, 5))),
            dynamic_shapes={"x": {0: rows}, "offsets": {0: batch}},
        )
        torch.export.save(program, tmp_path / "block.pt2")
        x, offsets = torch.randn(23, 16), offsets_of((3, 0, 12, 8))
        torch.save({"x": x, "offsets": offsets, "expected": block(x, offsets).detach()}, tmp_path / "data.pt")
        script = textwrap.dedent("""
            import sys, torch, gdpa
            folder = sys.argv[1]
            data = torch.load(f"{folder}/data.pt")
            out = torch.export.load(f"{folder}/block.pt2").module()(data["x"], data["offsets"])
            torch.testing.assert_close(out, data["expected"])
            print("ran", tuple(out.shape))
        """)
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], env=clean_env(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "ran (23, 2, 8)"

    def test_a_callable_first_seen_during_the_export(self):
        class Call(torch.nn.Module):
            def forward(self, q: Tensor) -> Tensor:
                return gdpa.attention(q, q, q, activation=lambda s: torch.relu(s) * 1.75)

        q = torch.randn(1, 4, 2, 8)
        assert torch.equal(torch.export.export(Call(), (q,)).module()(q), Call()(q))

    @pytest.mark.parametrize("form", FORMS)
    def test_every_form_exports(self, form):
        case = make_case(form, **SMALL)

        class Call(torch.nn.Module):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return case.call(q, k, v)

        program = torch.export.export(Call(), case.inputs[:3])
        assert torch.equal(program.module()(*case.inputs[:3]), case.call(*case.inputs[:3]))
        assert any(node.target is torch.ops.gdpa.forward.default for node in program.graph.nodes)


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_inputs_are_cast_and_gradients_come_back_in_their_dtype(self, backend, dtype):
        case = make_case(**SMALL)
        inputs = leaves(case.inputs)
        with torch.autocast("cpu", dtype=dtype):
            out = case.call(*inputs, backend)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out, inputs, case.d_out.to(dtype))
        assert all(grad.dtype == torch.float32 for grad in grads)
        cast = case.with_inputs(**{name: getattr(case.inputs, name).to(dtype) for name in "qkv"})
        results = Results(out.detach(), *(grad.to(dtype) for grad in grads))
        numerics.check(cast.problem, cast.inputs, case.d_out.to(dtype), results)

    def test_mixed_inputs_meet_in_the_autocast_dtype(self):
        case = make_case(**SMALL)
        q, k, v = case.inputs[:3]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = case.call(q, k.bfloat16(), v.half())
            plain = case.call(q, k, v.half().float())
        assert mixed.dtype == torch.bfloat16
        assert torch.equal(mixed, plain)

    def test_float64_stays(self):
        case = make_case(**SMALL, dtype=torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert case.call(*case.inputs[:3]).dtype == torch.float64

    def test_out_scale_keeps_its_precision(self):
        case = make_case(**SMALL, out_scale="per-sequence")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = case.call(*case.inputs[:3])
        cast = case.with_inputs(**{name: getattr(case.inputs, name).bfloat16() for name in "qkv"})
        assert torch.equal(out, cast.call(*cast.inputs[:3]))

    def test_disabled_autocast_changes_nothing(self):
        case = make_case(**SMALL)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            assert case.call(*case.inputs[:3]).dtype == torch.float32

    def test_inside_a_compiled_function(self):
        case = make_case(**SMALL)

        def function(q, k, v):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return case.call(q, k, v)

        inputs = leaves(case.inputs)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
        assert compiled.dtype == torch.bfloat16
        for result, expected in zip(
            torch.autograd.grad(compiled.float().sum(), inputs),
            torch.autograd.grad(function(*inputs).float().sum(), inputs),
            strict=True,
        ):
            assert torch.equal(result, expected)


class TestAutograd:
    @pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
    def test_checkpointing_gives_the_same_gradients(self, reentrant):
        case = make_case(**SMALL, causal=True)
        inputs = leaves(case.inputs)
        out = checkpoint(case.call, *inputs, use_reentrant=reentrant)
        if reentrant:  # torch.autograd.grad is not supported there
            out.backward(case.d_out)
            results = Results(out.detach(), *(x.grad for x in inputs))
        else:
            results = gradients(case, out, inputs)
        assert_same(results, gradients(case, case.call(*inputs), inputs))

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize("through", ["q", "k", "v"])
    def test_double_backward_raises(self, backend, through):
        case = make_case(**SMALL)
        inputs = leaves(case.inputs)
        out = case.call(*inputs, backend)
        grads = dict(zip("qkv", torch.autograd.grad(out, inputs, case.d_out, create_graph=True), strict=True))
        with pytest.raises(gdpa.GdpaError, match=r"double backward: .*cannot be differentiated again"):
            grads[through].square().sum().backward()

    def test_double_backward_through_the_upstream_gradient_raises(self):
        case = make_case(**SMALL)
        inputs = leaves(case.inputs)
        d_out = case.d_out.clone().requires_grad_()
        grads = torch.autograd.grad(case.call(*inputs), inputs, d_out, create_graph=True)
        with pytest.raises(gdpa.GdpaError, match="double backward"):
            torch.autograd.grad(grads[0].sum(), d_out)

    def test_create_graph_without_a_second_derivative_is_fine(self):
        case = make_case(**SMALL)
        inputs = leaves(case.inputs)
        grads = torch.autograd.grad(case.call(*inputs), inputs, case.d_out, create_graph=True)
        expected = torch.autograd.grad(case.call(*inputs), inputs, case.d_out)
        assert all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))

    @pytest.mark.parametrize(
        "needs", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)], ids=str
    )
    @pytest.mark.parametrize("backend", backend_params())
    def test_gradients_nobody_asked_for_are_not_computed(self, backend, needs, monkeypatch):
        case = make_case(**SMALL)
        calls = spy(monkeypatch, dispatch.choose(case.problem, backend), "backward")
        q, k, v = (x.clone().requires_grad_(need) for x, need in zip(case.inputs[:3], needs, strict=True))
        case.call(q, k, v, backend).backward(case.d_out)
        assert [call[-1] for call in calls] == [needs]
        expected = gradients(case, case.call(*(inputs := leaves(case.inputs)), backend), inputs)
        for x, need, right in zip((q, k, v), needs, expected[1:], strict=True):
            assert torch.equal(x.grad, right) if need else x.grad is None

    @pytest.mark.parametrize("backend", backend_params())
    def test_a_backend_returns_nothing_for_what_is_not_needed(self, backend):
        case = make_case(**SMALL)
        module = dispatch.choose(case.problem, backend)
        _, _, _, cu_q, cu_k, out_scale = case.inputs
        grads = module.backward(case.problem, case.d_out, *case.inputs[:3], cu_q, cu_k, out_scale, (False, True, False))
        assert grads[0] is None
        assert grads[2] is None
        assert grads[1].shape == case.inputs.k.shape

    def test_no_backward_runs_without_a_gradient(self, monkeypatch):
        case = make_case(**SMALL)
        calls = spy(monkeypatch, dispatch.load("cpu"), "backward")
        assert not case.call(*case.inputs[:3]).requires_grad
        with torch.no_grad():
            assert not case.call(*leaves(case.inputs)).requires_grad
        assert calls == []

    def test_nothing_but_the_inputs_is_saved(self):
        case = make_case(**SMALL)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
            case.call(*leaves(case.inputs))
        assert set(saved) == {x.data_ptr() for x in case.inputs if x is not None}

    def test_gradients_accumulate_over_calls(self):
        case = make_case(**SMALL)
        inputs = leaves(case.inputs)
        for _ in range(2):
            case.call(*inputs).backward(case.d_out)
        expected = gradients(case, case.call(*inputs), inputs)
        for x, right in zip(inputs, expected[1:], strict=True):
            torch.testing.assert_close(x.grad, 2 * right)

    def test_one_tensor_for_q_k_and_v(self):
        x = torch.randn(2, 5, 2, 8, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(lambda x: gdpa.attention(x, x, x, activation="silu"), x, fast_mode=True)

    def test_an_input_changed_in_place_is_noticed(self):
        case = make_case(**SMALL)
        q, k, v = (x * 1.0 for x in leaves(case.inputs))
        out = case.call(q, k, v)
        k.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    @pytest.mark.parametrize("backend", backend_params())
    def test_inference_mode(self, backend):
        case = make_case(**SMALL)
        expected = case.call(*case.inputs[:3], backend)
        with torch.inference_mode():
            out = case.call(*case.inputs[:3], backend)
            inside = [x.clone() for x in case.inputs[:3]]
            again = case.call(*inside, backend)
        assert out.is_inference()
        assert torch.equal(out, expected)
        assert torch.equal(again, expected)

    def test_functional_grad_is_refused_rather_than_wrong(self):
        """torch.func.grad does not reach operators written in Python, torch.library.custom_op's included."""
        q = torch.randn(1, 4, 2, 8)
        with pytest.raises((NotImplementedError, RuntimeError)):
            torch.func.grad(lambda q: gdpa.attention(q, q, q).sum())(q)

    def test_vmap(self):
        q = torch.randn(3, 2, 4, 2, 8)
        out = torch.func.vmap(lambda q: gdpa.attention(q, q, q, activation="silu"))(q)
        assert torch.equal(out, torch.stack([gdpa.attention(x, x, x, activation="silu") for x in q]))


class TestFlops:
    """2 (D + Dv) per allowed (query, key, head) forward, 2 (3 D + 2 Dv) backward."""

    CASES: ClassVar[dict[str, Any]] = {
        "dense": ({"form": "dense", "q_lengths": (6, 6), "k_lengths": (5, 5)}, 2 * 6 * 5),
        "jagged": ({"q_lengths": (5, 0, 9), "k_lengths": (2, 4, 3)}, 5 * 2 + 9 * 3),
        "causal": ({"q_lengths": (4, 3), "causal": True}, 10 + 6),
        "causal, more keys": ({"q_lengths": (2,), "k_lengths": (5,), "causal": True}, 4 + 5),
        "window": ({"q_lengths": (5,), "window_size": (1, 0)}, 9),
        "dense keys": ({"form": "dense-key", "q_lengths": (3, 4), "k_lengths": (6, 6)}, 7 * 6),
        "shared queries": ({"form": "shared-query", "q_lengths": (3,), "k_lengths": (2, 7)}, 3 * 9),
    }

    @pytest.mark.parametrize(("options", "pairs"), CASES.values(), ids=CASES.keys())
    def test_counts(self, options, pairs):
        heads, head_dim, value_dim = 4, 16, 24
        case = make_case(**options, heads=heads, kv_heads=2, head_dim=head_dim, value_dim=value_dim)
        assert allowed_pairs(case.problem, *case.inputs[3:5]) == pairs
        inputs = leaves(case.inputs)
        with FlopCounterMode(display=False) as forward:
            out = case.call(*inputs)
        assert forward.get_total_flops() == 2 * (head_dim + value_dim) * heads * pairs
        with FlopCounterMode(display=False) as backward:
            out.backward(case.d_out)
        assert backward.get_total_flops() == 2 * (3 * head_dim + 2 * value_dim) * heads * pairs

    def test_the_backend_makes_no_difference(self):
        case = make_case(**SMALL)
        totals = []
        for backend in ("reference", "cpu"):
            with FlopCounterMode(display=False) as counter:
                case.call(*case.inputs[:3], backend)
            totals.append(counter.get_total_flops())
        assert totals[0] == totals[1] > 0


class TestActivationObjects:
    @pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
    @pytest.mark.parametrize("fn", ["silu", lambda s: torch.relu(s) ** 3 / 7], ids=["named", "custom"])
    def test_copies_and_pickles_are_equal_and_compute_the_same(self, again, fn):
        f = gdpa.Activation(fn)
        other = again(f)
        assert other == f
        assert hash(other) == hash(f)
        assert other.key == f.key
        q = torch.randn(1, 4, 2, 8)
        assert torch.equal(gdpa.attention(q, q, q, activation=other), gdpa.attention(q, q, q, activation=f))

    def test_a_module_that_holds_one_can_be_copied_and_saved(self, tmp_path: Path):
        module = torch.nn.Linear(2, 2)
        module.f = gdpa.Activation(lambda s: s.abs() + 0.25)
        torch.save(module, tmp_path / "module.pt")
        loaded = torch.load(tmp_path / "module.pt", weights_only=False)
        assert loaded.f == copy.deepcopy(module).f == module.f


class Block(torch.nn.Module):
    """A residual attention block over a packed batch."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        return x + self.out(gdpa.attention_varlen(q, k, v, offsets, offsets, activation="silu").flatten(1))


def rank_batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    lengths = ((5, 0, 7), (3, 8, 1))[rank]
    return torch.randn(sum(lengths), 16, generator=generator), offsets_of(lengths)


def train_worker(rank: int, folder: str, kind: str) -> None:
    """One rank: a step of a two-layer model whose gradients are averaged over the ranks; rank 0 saves them."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList([Block(), Block()])
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(Chain(blocks))
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        model = fully_shard(Chain(blocks), mesh=mesh)
    x, offsets = rank_batch(rank)
    model(x, offsets).square().sum().backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    if rank == 0:
        torch.save(grads, f"{folder}/grads.pt")
    dist.barrier()
    dist.destroy_process_group()


class Chain(torch.nn.Module):
    def __init__(self, blocks: torch.nn.ModuleList):
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, offsets)
        return x


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_distributed_gradients_are_the_mean_over_the_ranks(kind, tmp_path: Path):
    torch.multiprocessing.spawn(train_worker, args=(str(tmp_path), kind), nprocs=2)
    torch.manual_seed(0)
    model = Chain(torch.nn.ModuleList([Block(), Block()]))
    for rank in range(2):
        x, offsets = rank_batch(rank)
        (model(x, offsets).square().sum() / 2).backward()
    for grad, parameter in zip(torch.load(tmp_path / "grads.pt"), model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


class TestImports:
    def python(self, script: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=clean_env(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def test_importing_gdpa_and_running_on_a_cpu_loads_no_kernels_and_no_compiler(self):
        """torch's FLOP counter, which the operators register with, imports triton where it can; gdpa does not."""
        loaded = self.python("""
            import sys, torch, torch.utils.flop_counter
            before = set(sys.modules)
            import gdpa
            q = torch.randn(1, 4, 2, 8, requires_grad=True)
            gdpa.attention(q, q, q).sum().backward()
            heavy = "triton", "gdpa.backends.triton.launch", "torch._dynamo", "torch._inductor", "gdpa.tracing", "rich"
            print([name for name in heavy if name in set(sys.modules) - before])
        """)
        assert loaded == "[]"

    def test_with_triton_absent_cpu_runs_and_triton_says_why_not(self):
        out = self.python("""
            import sys
            sys.modules["triton"] = None  # what an import of a missing package looks like
            import torch, gdpa
            q = torch.randn(1, 4, 2, 8, requires_grad=True)
            gdpa.attention(q, q, q, activation=lambda s: torch.relu(s) ** 2 / 64).sum().backward()
            assert q.grad.isfinite().all()
            explanation = gdpa.explain(q, q, q)
            print(explanation.backend, "|", explanation.why_not["triton"])
            try:
                gdpa.attention(q, q, q, backend="triton")
            except gdpa.BackendUnavailable as error:
                print(error)
        """)
        first, second = out.splitlines()
        assert first.startswith("cpu | ")
        assert "not installed" in first
        assert second.startswith("backend: 'triton' cannot run this call: ")
        assert "not installed" in second


def test_reference_attend_is_the_way_to_second_derivatives():
    """What the error of double backward recommends works."""
    case = make_case(**SMALL, dtype=torch.float64, activation="silu")
    cu_q, cu_k = case.inputs[3:5]
    torch.autograd.gradgradcheck(
        lambda q, k, v: reference.attend(case.problem, q, k, v, cu_q, cu_k), leaves(case.inputs), fast_mode=True
    )


def test_forward_mode_is_refused_rather_than_wrong():
    x = torch.randn(1, 5, 2, 8)
    with pytest.raises(gdpa.GdpaError, match="forward-mode"):
        torch.func.jvp(lambda q: gdpa.attention(q, x, x), (x,), (x,))

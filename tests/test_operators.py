"""What PyTorch makes of the operators: opcheck, autocast, autograd, checkpointing, FLOPs, pickling, importing.

Compilation and distributed training have files of their own: test_compilation.py, test_distributed.py.
"""

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
from helpers import (
    FORMS,
    Case,
    assert_same,
    backend_params,
    clean_env,
    gradients,
    leaves,
    make_case,
    spy,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
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

    @pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
    @pytest.mark.parametrize("operator", ["activation", "activation_pair"])
    def test_a_call_of_an_activation(self, operator, grad):
        s = torch.randn(3, 5).requires_grad_(grad)
        f = gdpa.Activation(lambda s: torch.tanh(s) ** 3)
        torch.library.opcheck(getattr(torch.ops.gdpa, operator).default, (s, f.key))

    def test_strided_inputs(self):
        case = make_case(q_lengths=(5, 3), heads=2, head_dim=8)
        q, k, v = torch.randn(8, 2, 24, requires_grad=True).split(8, dim=-1)
        torch.library.opcheck(torch.ops.gdpa.forward.default, (q, k, v, *operator_arguments(case)[3:]))

    @pytest.mark.parametrize("backend", backend_params())
    def test_every_backend(self, backend):
        case = make_case(**SMALL)
        q, k, v = leaves(case.inputs)
        torch.library.opcheck(torch.ops.gdpa.forward.default, (q, k, v, *operator_arguments(case, backend)[3:]))


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

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_a_backward_inside_autocast_computes_as_one_outside(self, backend):
        # Many short sequences: the cpu backend computes them by products that autocast knows, in float32.
        case = make_case(q_lengths=range(1, 13), dtype=torch.float16, activation=lambda s: torch.tanh(s) * s)
        inputs = leaves(case.inputs)
        expected = torch.autograd.grad(case.call(*inputs, backend), inputs, case.d_out)
        out = case.call(*inputs, backend)
        with torch.autocast("cpu", dtype=torch.float16):
            found = torch.autograd.grad(out, inputs, case.d_out)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

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

    def test_a_gradient_of_out_scale_is_refused_wherever_it_would_be_lost(self):
        """Eager calls are checked in Python; an exported program and vmap come to the operator alone."""

        class Scaled(torch.nn.Module):
            def forward(self, q, scales):
                return gdpa.attention(q, q, q, "silu", out_scale=scales)

        q, scales = torch.randn(2, 5, 2, 8), torch.ones(2)
        exported = torch.export.export(Scaled(), (q, scales)).module()
        assert torch.equal(exported(q, scales), Scaled()(q, scales))
        scales.requires_grad_()
        with pytest.raises(gdpa.GdpaError, match="^out_scale: .* its gradient is not implemented"):
            exported(q, scales)
        with pytest.raises(gdpa.GdpaError, match="^out_scale: .* its gradient is not implemented"):
            torch.func.vmap(Scaled(), (None, 0))(q, scales.expand(3, 2))
        with torch.no_grad():
            assert torch.equal(Scaled()(q, scales), Scaled()(q, scales.detach()))
        with pytest.raises(gdpa.GdpaError, match="^out_scale: .* its gradient is not implemented"):
            Scaled()(q, scales)

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
        with pytest.raises(gdpa.GdpaError, match=r"torch\.func"):
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

    def test_offsets_without_numbers_are_taken_for_the_longest_sequences(self):
        q = torch.empty(8, 4, 16, device="meta")
        offsets = torch.empty(4, dtype=torch.int64, device="meta")
        for longest, rows in ((5, 5), (None, 8)):
            with FlopCounterMode(display=False) as counter:
                gdpa.attention_varlen(q, q, q, offsets, offsets, longest, longest)
            assert counter.get_total_flops() == 2 * (16 + 16) * 4 * 3 * rows**2
        with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
            q, offsets = (mode.from_tensor(x) for x in (torch.zeros(8, 4, 16), torch.tensor([0, 3, 8])))
            gdpa.attention_varlen(q, q, q, offsets, offsets, 5, 5)
        assert counter.get_total_flops() == 2 * (16 + 16) * 4 * 2 * 5**2

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

    @pytest.mark.parametrize("absent", ["missing", "kept from being imported"])
    def test_with_triton_absent_cpu_runs_and_triton_says_why_not(self, absent):
        out = self.python(
            """
            import sys

            class Refuses:
                def find_spec(self, name, path=None, target=None):
                    if name.partition(".")[0] == "triton":
                        raise ImportError("refused")

            if ABSENT == "missing":
                sys.modules["triton"] = None  # what an import of a missing package looks like
            else:
                import torch  # which looks for it itself, from 2.15 on
                sys.meta_path.insert(0, Refuses())
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
        """.replace("ABSENT", repr(absent))
        )
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


def test_forward_mode_of_out_scale_is_refused_too():
    case = make_case(**SMALL)
    ones = torch.ones(case.problem.batch)
    with forward_ad.dual_level(), pytest.raises(gdpa.GdpaError, match="forward-mode"):
        gdpa.attention_varlen(*case.inputs[:5], out_scale=forward_ad.make_dual(ones, ones))

"""What torch.compile and torch.export make of the operators, and of numbers that an activation captures."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from helpers import (
    FORMS,
    assert_same,
    clean_env,
    gradients,
    leaves,
    make_case,
    needs_compiler,
    needs_interpreter,
    offsets_of,
)
from torch import Tensor

import gdpa
from gdpa import inductor, schedule

SMALL: dict[str, Any] = {"q_lengths": (5, 3), "k_lengths": (4, 7), "heads": 2, "head_dim": 8}


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

    @needs_compiler
    @needs_interpreter
    def test_offsets_of_one_region_are_not_taken_for_each_other(self):
        """Inductor writes the second ones where the first were, and a schedule knows offsets by their tensor."""

        def function(x, lengths):
            for these in (lengths, lengths.flip(0)):
                offsets = torch.nn.functional.pad(these.cumsum(0), (1, 0))
                x = gdpa.attention_varlen(x, x, x, offsets, offsets, activation="silu", backend="triton")
            return x

        x, lengths = torch.randn(8, 1, 16), torch.tensor([5, 1, 2])
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(function, fullgraph=True)(x, lengths)
            assert torch.equal(compiled, function(x, lengths))

    def test_where_inductor_cannot_be_told_no_schedule_is_shared(self, monkeypatch):
        monkeypatch.setattr(schedule, "_is_shared", True)
        offsets = offsets_of((5, 3))
        assert schedule.bounds(offsets, 8) is schedule.bounds(offsets, 8)
        monkeypatch.setitem(sys.modules, "torch._inductor.lowering", SimpleNamespace(lowerings={}))
        inductor.keep_offsets()
        assert schedule.bounds(offsets, 8) is not schedule.bounds(offsets, 8)

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

    @pytest.mark.parametrize("of", ["a size", "an argument"])
    def test_scales_that_depend_on_a_length_change_without_a_recompile(self, of):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def attend(q, length):
            length = q.shape[1] if of == "a size" else length
            return gdpa.attention(q, q, q, "silu", scale=length**-0.5, out_scale=1 / length)

        compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
        for rows in range(3, 14):
            q = torch.randn(2, rows, 2, 8, requires_grad=True)
            out, expected = compiled(q, rows + 1), attend(q, rows + 1)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q))
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

    def test_a_wrong_backend_is_named_inside_a_compiled_function(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def compiled(q):
            return gdpa.attention(q, q, q, backend="tritn")

        with pytest.raises(Exception, match="backend: expected None or one of .*, got 'tritn'; did you mean 'triton'"):
            compiled(torch.randn(2, 5, 2, 8))

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

    def test_an_activation_built_where_a_graph_breaks(self):
        @torch.compile(backend="eager")
        def compiled(q, power):
            return gdpa.attention(q, q, q, activation=gdpa.Activation(lambda s: torch.relu(s) ** power))

        q = torch.randn(1, 4, 2, 8)
        for power in (2, 3, 2.5):
            f = gdpa.Activation(lambda s, power=power: torch.relu(s) ** power)
            assert torch.equal(compiled(q, power), gdpa.attention(q, q, q, activation=f))

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

    @pytest.mark.parametrize("strict", [False, True])
    def test_scales_that_depend_on_a_length(self, strict):
        class Model(torch.nn.Module):
            def forward(self, q):
                return gdpa.attention(q, q, q, "silu", scale=q.shape[1] ** -0.5, out_scale=1 / q.shape[1])

        sizes = {"q": {1: torch.export.Dim("rows", min=2, max=64)}}
        program = torch.export.export(Model(), (torch.randn(2, 5, 2, 8),), dynamic_shapes=sizes, strict=strict)
        for rows in (2, 11):
            q = torch.randn(2, rows, 2, 8)
            torch.testing.assert_close(program.module()(q), Model()(q))

    def test_a_callable_first_seen_during_the_export(self):
        class Call(torch.nn.Module):
            def forward(self, q: Tensor) -> Tensor:
                return gdpa.attention(q, q, q, activation=lambda s: torch.relu(s) * 1.75)

        q = torch.randn(1, 4, 2, 8)
        with torch.no_grad():
            program = torch.export.export(Call(), (q,))
        assert torch.equal(program.module()(q), Call()(q))
        # What the trace does to autocast and grad mode is not the program's; one that had it could not be loaded.
        assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [torch.ops.gdpa.forward.default]
        saved = io.BytesIO()
        torch.export.save(program, saved)
        saved.seek(0)
        assert torch.equal(torch.export.load(saved).module()(q), Call()(q))

    @pytest.mark.parametrize("form", FORMS)
    def test_every_form_exports(self, form):
        case = make_case(form, **SMALL)

        class Call(torch.nn.Module):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return case.call(q, k, v)

        program = torch.export.export(Call(), case.inputs[:3])
        assert torch.equal(program.module()(*case.inputs[:3]), case.call(*case.inputs[:3]))
        assert any(node.target is torch.ops.gdpa.forward.default for node in program.graph.nodes)


CALLED: dict[str, gdpa.Activation] = {
    "gelu": gdpa.Activation("gelu"),
    "relu2": gdpa.Activation("relu2"),
    "custom": gdpa.Activation(lambda s: torch.tanh(s) ** 3 + s / 7),
    "constant": gdpa.Activation(lambda s: 0.75),
    "step": gdpa.Activation(lambda s: (s > 0).to(s.dtype)),
}


class TestAnActivationThatIsCalled:
    @pytest.mark.parametrize("compiler", COMPILERS)
    @pytest.mark.parametrize("f", CALLED.values(), ids=CALLED.keys())
    def test_has_the_values_and_gradients_of_a_call_outside(self, compiler, f):
        def function(x):
            return f(x * 2) * x

        x = torch.randn(3, 5, requires_grad=True)
        compiled = torch.compile(function, backend=compiler, fullgraph=True)(x)
        expected = function(x)
        torch.testing.assert_close(compiled, expected)
        weights = torch.randn(3, 5)
        found, right = (torch.autograd.grad(out, x, weights)[0] for out in (compiled, expected))
        torch.testing.assert_close(found, right)

    def test_has_a_derivative_that_is_none_of_autograds(self):
        x = torch.randn(5, requires_grad=True)
        f = CALLED["custom"]
        compiled = torch.compile(f.value_and_derivative, backend="aot_eager", fullgraph=True)(x)
        for found, right in zip(compiled, f.value_and_derivative(x), strict=True):
            assert not found.requires_grad
            torch.testing.assert_close(found, right)

    @pytest.mark.parametrize("fn", ["gelu", double_relu, torch.sin, CALLED["custom"], CALLED["custom"].key])
    def test_may_be_made_in_the_region(self, fn):
        def function(x):
            f = gdpa.Activation(fn)
            return f(x), f.name, gdpa.attention(x, x, x, f)

        x = torch.randn(1, 3, 2, 8)
        compiled, expected = torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x)
        assert compiled[1] == expected[1]
        assert torch.equal(compiled[0], expected[0]) and torch.equal(compiled[2], expected[2])

    def test_made_in_the_region_of_what_captures_is_refused(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x, alpha):
            return gdpa.Activation(lambda s: s * alpha)(x)

        with pytest.raises(Exception, match=r"build gdpa\.Activation\(fn\) outside the compiled region"):
            function(torch.randn(3), 2.0)

    def test_is_compiled_anew_for_another_and_for_no_other_rows(self):
        counter = torch._dynamo.testing.CompileCounter()

        @torch.compile(backend=counter, fullgraph=True, dynamic=True)
        def function(x, f):
            return f(x)

        for rows in (3, 4, 9):
            for f in (CALLED["gelu"], CALLED["custom"]):
                x = torch.randn(rows, 2)
                assert torch.equal(function(x, f), f(x))
        assert counter.frame_count == 2

    def test_is_exported(self):
        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return CALLED["custom"](x) + 1

        x = torch.randn(2, 3)
        program = torch.export.export(Model(), (x,))
        saved = io.BytesIO()
        torch.export.save(program, saved)
        saved.seek(0)
        assert torch.equal(torch.export.load(saved).module()(x), Model()(x))


def test_a_max_seqlen_that_is_known_when_the_program_runs() -> None:
    """As flash-attn's users have it: the longest length, read from the offsets."""
    q, offsets = torch.randn(8, 4, 8), torch.tensor([0, 3, 3, 8])

    def attend(q: Tensor, offsets: Tensor) -> Tensor:
        longest = int(offsets.diff().max())
        return gdpa.attention_varlen(q, q, q, offsets, offsets, longest, longest)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, offsets)
    assert torch.equal(out, attend(q, offsets))

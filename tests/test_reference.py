"""The oracle against a computation that shares nothing with it: Python floats, element by element, by formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import FORMS, Case, leaves, make_case, poisoned_memory

import gdpa
from gdpa import numerics
from gdpa.backends import reference
from gdpa.numerics import Results

Scalar = Callable[[float], float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# name: f and f' on Python floats
SCALARS: dict[str, tuple[Scalar, Scalar]] = {
    "identity": (lambda x: x, lambda x: 1.0),
    "relu": (lambda x: max(x, 0.0), lambda x: float(x > 0)),
    "relu2": (lambda x: max(x, 0.0) ** 2, lambda x: 2 * max(x, 0.0)),
    "leaky_relu": (lambda x: x if x > 0 else 0.01 * x, lambda x: 1.0 if x > 0 else 0.01),
    "gelu": (
        lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
        lambda x: 0.5 * math.erfc(-x / math.sqrt(2)) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    ),
    "silu": (lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
    "sigmoid": (sigmoid, lambda x: sigmoid(x) * (1 - sigmoid(x))),
    "tanh": (math.tanh, lambda x: 1 - math.tanh(x) ** 2),
    "softplus": (lambda x: math.log1p(math.exp(x)), sigmoid),
    "elu": (lambda x: x if x > 0 else math.expm1(x), lambda x: 1.0 if x > 0 else math.exp(x)),
    "hardswish": (
        lambda x: x * min(max(x + 3, 0), 6) / 6,
        lambda x: 0.0 if x < -3 else 1.0 if x > 3 else (2 * x + 3) / 6,
    ),
    "exp": (math.exp, math.exp),
}


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_tanh_slope(x: float) -> float:
    t = math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


SCALARS["gelu_tanh"] = gelu_tanh, gelu_tanh_slope


def elementwise(case: Case, functions: list[tuple[Scalar, Scalar]]) -> Results:
    """The operator and its gradients by their formulas, in Python floats; `functions` holds (f, f') per head."""
    problem, (q, k, v, cu_q, cu_k, factors) = case.problem, case.inputs
    left, right = problem.window
    out = torch.zeros(problem.output_shape, dtype=torch.float64)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for b in range(problem.batch):
        q_start, q_end = (0, problem.query_rows) if cu_q is None else (int(cu_q[b]), int(cu_q[b + 1]))
        k_start, k_end = (0, problem.key_rows) if cu_k is None else (int(cu_k[b]), int(cu_k[b + 1]))
        q_b, dq_b = (x[b] if problem.query_side == "dense" else x for x in (q, dq))
        k_b, v_b, dk_b, dv_b = (x[b] if problem.key_side == "dense" else x for x in (k, v, dk, dv))
        out_b, d_out_b = (x if problem.query_side == "packed" else x[b] for x in (out, case.d_out))
        out_scale = problem.out_scale if factors is None else float(factors[b])
        for h in range(problem.heads):
            g = h * problem.kv_heads // problem.heads
            f, slope = functions[h]
            for i in range(q_start, q_end):
                for j in range(k_start, k_end):
                    distance = (j - k_start) - (i - q_start + (k_end - k_start) - (q_end - q_start))
                    if (left >= 0 and distance < -left) or (right >= 0 and distance > right):
                        continue
                    s = problem.scale * sum(a * b for a, b in zip(q_b[i, h].tolist(), k_b[j, g].tolist(), strict=True))
                    dp = out_scale * sum(a * b for a, b in zip(d_out_b[i, h].tolist(), v_b[j, g].tolist(), strict=True))
                    out_b[i, h] += out_scale * f(s) * v_b[j, g]
                    dv_b[j, g] += out_scale * f(s) * d_out_b[i, h]
                    dq_b[i, h] += problem.scale * slope(s) * dp * k_b[j, g]
                    dk_b[j, g] += problem.scale * slope(s) * dp * q_b[i, h]
    return Results(out, dq, dk, dv)


SMALL: dict[str, Any] = {
    "q_lengths": (3, 0, 4),
    "k_lengths": (2, 3, 3),
    "heads": 2,
    "head_dim": 8,
    "value_dim": 5,
    "dtype": torch.float64,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.3},
    "out_scale number": {"out_scale": 0.25},
    "out_scale per sequence": {"out_scale": "per-sequence"},
    "grouped queries": {"heads": 6, "kv_heads": 2},
    "one key head": {"heads": 3, "kv_heads": 1},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "window left": {"window_size": (1, -1)},
    "window right": {"window_size": (-1, 1)},
    "causal window": {"window_size": (1, 7), "causal": True},
    "more queries than keys, causal": {"q_lengths": (5, 4, 4), "k_lengths": (2, 2, 0), "causal": True},
    "uncovered tails": {"tail": (2, 3)},
    "everything": {
        "heads": 4,
        "kv_heads": 2,
        "scale": 0.6,
        "out_scale": "per-sequence",
        "window_size": (2, 1),
        "offset_dtypes": (torch.int64, torch.int32),
    },
}


def assert_equal_in_float64(results: Results, expected: Results) -> None:
    for name, result, right in zip(Results._fields, results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def differentiate(case: Case) -> Results:
    """`attend` and its gradients, by autograd alone."""
    q, k, v = leaves(case.inputs)
    _, _, _, cu_q, cu_k, out_scale = case.inputs
    out = reference.attend(case.problem, q, k, v, cu_q, cu_k, out_scale)
    grads = torch.autograd.grad(out, (q, k, v), case.d_out)
    return Results(out.detach(), *grads)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_oracle_equals_the_formulas_element_by_element(form, options):
    case = make_case(form, **{**SMALL, "activation": "silu", **options})
    assert_equal_in_float64(differentiate(case), elementwise(case, [SCALARS["silu"]] * case.problem.heads))


@pytest.mark.parametrize("name", gdpa.activations())
def test_oracle_equals_the_formulas_for_every_named_activation(name):
    case = make_case(**{**SMALL, "activation": name, "causal": True, "spread": 1.5})
    assert_equal_in_float64(differentiate(case), elementwise(case, [SCALARS[name]] * 2))


def test_oracle_equals_the_formulas_with_one_activation_per_head():
    names = ["relu", "sigmoid", "gelu", "exp"]
    case = make_case(**{**SMALL, "heads": 4, "kv_heads": 2, "activation": names})
    assert_equal_in_float64(differentiate(case), elementwise(case, [SCALARS[name] for name in names]))


def test_oracle_equals_the_formulas_for_a_callable():
    case = make_case(**{**SMALL, "activation": lambda s: torch.exp(-s * s) / 4})
    gaussian: tuple[Scalar, Scalar] = (lambda x: math.exp(-x * x) / 4, lambda x: -x * math.exp(-x * x) / 2)
    assert_equal_in_float64(differentiate(case), elementwise(case, [gaussian] * 2))


def test_a_masked_pair_contributes_nothing_whatever_the_activation_gives_there():
    """log of a masked negative score is NaN; sigmoid(0) is a half. Neither reaches the output or a gradient."""
    case = make_case(q_lengths=(4,), heads=1, head_dim=2, dtype=torch.float64, activation=torch.log, causal=True, scale=1.0)
    position = torch.arange(4.0, dtype=torch.float64)
    one = torch.ones(4, dtype=torch.float64)
    q = torch.stack([position + 0.5, one], dim=1)[:, None]  # q_i . k_j = i + 0.5 - j: negative where j > i
    k = torch.stack([one, -position], dim=1)[:, None]
    case = case.with_inputs(q=q, k=k)
    results = differentiate(case)
    assert all(x.isfinite().all() for x in results)
    assert_equal_in_float64(results, elementwise(case, [(math.log, lambda x: 1 / x)]))

    sigmoid_case = make_case(q_lengths=(1, 2), k_lengths=(3, 1), activation="sigmoid", window_size=(0, 0), dtype=torch.float64)
    zeros = torch.zeros_like(sigmoid_case.inputs.q)
    out = differentiate(sigmoid_case.with_inputs(q=zeros)).out
    v = sigmoid_case.inputs.v
    assert torch.equal(out, torch.stack([0.5 * v[2], torch.zeros_like(v[0]), 0.5 * v[3]]))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_of_the_oracle(form, options):
    case = make_case(form, **{**SMALL, "activation": "gelu", **options})
    _, _, _, cu_q, cu_k, out_scale = case.inputs
    torch.autograd.gradcheck(
        lambda q, k, v: reference.attend(case.problem, q, k, v, cu_q, cu_k, out_scale),
        leaves(case.inputs),
        fast_mode=True,
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_through_the_public_functions_in_float64(form, options, backend):
    case = make_case(form, **{**SMALL, "activation": "silu", **options})
    assert case.explain(backend).backend == backend
    torch.autograd.gradcheck(lambda q, k, v: case.call(q, k, v, backend), leaves(case.inputs), fast_mode=True)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradcheck_with_one_activation_per_head(backend):
    case = make_case(**{**SMALL, "heads": 4, "kv_heads": 2, "activation": ["tanh", "exp", gdpa.Activation(torch.sin), "softplus"]})
    torch.autograd.gradcheck(lambda q, k, v: case.call(q, k, v, backend), leaves(case.inputs), fast_mode=True)


def test_reference_backend_returns_the_oracles_gradients_bit_for_bit():
    case = make_case(**{**SMALL, "heads": 4, "kv_heads": 2, "causal": True})
    q, k, v = leaves(case.inputs)
    with poisoned_memory():
        out = case.call(q, k, v, "reference")
        grads = torch.autograd.grad(out, (q, k, v), case.d_out)
    for result, expected in zip((out, *grads), differentiate(case), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)])
def test_reference_backward_gives_only_what_is_asked(needs):
    case = make_case(**SMALL)
    _, _, _, cu_q, cu_k, out_scale = case.inputs
    full = reference.backward(case.problem, case.d_out, *case.inputs[:3], cu_q, cu_k, out_scale, (True, True, True))
    some = reference.backward(case.problem, case.d_out, *case.inputs[:3], cu_q, cu_k, out_scale, needs)
    for grad, all_of_it, need in zip(some, full, needs, strict=True):
        assert torch.equal(grad, all_of_it) if need else grad is None


class TestTheBudget:
    """`gdpa.numerics` passes the ideal computation and fails what is wrong by little more than a rounding."""

    def case(self, dtype: torch.dtype = torch.bfloat16) -> Case:
        return make_case(q_lengths=(33, 17), heads=2, head_dim=32, dtype=dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
    def test_the_yardstick_passes(self, dtype):
        case = self.case(dtype)
        numerics.check(case.problem, case.inputs, case.d_out, numerics.yardstick(case.problem, case.inputs, case.d_out))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_the_rounded_truth_uses_less_than_the_budget(self, dtype):
        case = self.case(dtype)
        exact = numerics.truth(case.problem, case.inputs, case.d_out)
        for verdict in numerics.judge(case.problem, case.inputs, case.d_out, Results(*(x.to(dtype) for x in exact))):
            assert verdict.passed
            assert verdict.budget_used <= 1

    @pytest.mark.parametrize("name", Results._fields)
    def test_an_error_of_one_percent_fails_and_is_named(self, name):
        case = self.case()
        exact = numerics.yardstick(case.problem, case.inputs, case.d_out)
        wrong = exact._replace(**{name: getattr(exact, name) * 1.02})
        with pytest.raises(AssertionError, match=rf"^{name}: relative error"):
            numerics.check(case.problem, case.inputs, case.d_out, wrong)

    def test_one_wrong_element_fails(self):
        case = self.case()
        exact = numerics.yardstick(case.problem, case.inputs, case.d_out)
        exact.dk[3, 1, 5] += 0.1 * exact.dk.abs().max()
        with pytest.raises(AssertionError, match=r"^dk: "):
            numerics.check(case.problem, case.inputs, case.d_out, exact)

    def test_a_nan_fails(self):
        case = self.case()
        exact = numerics.yardstick(case.problem, case.inputs, case.d_out)
        exact.out[0, 0, 0] = math.nan
        with pytest.raises(AssertionError, match=r"^out: "):
            numerics.check(case.problem, case.inputs, case.d_out, exact)

    def test_an_uncovered_row_that_is_not_zero_fails(self):
        case = make_case(q_lengths=(5,), tail=(1, 0), dtype=torch.float32)
        exact = numerics.yardstick(case.problem, case.inputs, case.d_out)
        exact.out[5] = 1e-3
        with pytest.raises(AssertionError, match=r"^out: "):
            numerics.check(case.problem, case.inputs, case.d_out, exact)

    def test_a_wrong_shape_or_dtype_fails(self):
        case = self.case()
        exact = numerics.yardstick(case.problem, case.inputs, case.d_out)
        with pytest.raises(AssertionError, match="dq: dtype"):
            numerics.check(case.problem, case.inputs, case.d_out, exact._replace(dq=exact.dq.float()))
        with pytest.raises(AssertionError, match="dv: shape"):
            numerics.check(case.problem, case.inputs, case.d_out, exact._replace(dv=exact.dv[:-1]))

    def test_scores_in_low_precision_fail(self):
        """S rounded to bf16 before the activation: what a kernel without fp32 scores would do."""
        case = make_case(q_lengths=(64,), heads=2, head_dim=64, dtype=torch.bfloat16, activation="exp", spread=1.5)
        q, k, v = (x.float() for x in case.inputs[:3])
        s = case.problem.scale * torch.einsum("ihd,jhd->hij", q, k)
        for scores, passes in ((s, True), (s.bfloat16().float(), False)):
            out = torch.einsum("hij,jhd->ihd", scores.exp().bfloat16().float(), v).bfloat16()
            (verdict,) = numerics.judge(case.problem, case.inputs, None, Results(out))
            assert verdict.passed is passes

"""The cpu backend's bf16 products, on processors that are fast at them: the same budget, S and dP as exact as is needed, nothing added
up in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FORMS, Case, check, make_case, run
from torch import Tensor

import gdpa
from gdpa import numerics
from gdpa.backends import cpu, cpu_plan, cpu_tensors, cpu_whole
from gdpa.bench.plain import broken_cpu_products

PATHS = pytest.mark.parametrize("path", ["whole", "one tile", "query tiles", "key tiles"])


class Products:
    """The products of a test: how many of each dtype made O, dV, dQ and dK, and whether a bf16 one was added to something; and what S and
    dP were made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = {torch.bfloat16: 0, torch.float32: 0}
        self.added_in_bf16 = False
        self.scores: set[tuple[int, torch.dtype]] = set()  # the operands' features and precision
        product, wide_product = cpu_tensors.product, cpu_tensors.wide_product

        def noted(result: Tensor, a: Tensor, b: Tensor, factor: float = 1.0, *, accumulate: bool = False) -> None:
            assert result.dtype == a.dtype == b.dtype
            self.count[a.dtype] += 1
            self.added_in_bf16 |= accumulate and a.dtype == torch.bfloat16
            product(result, a, b, factor, accumulate=accumulate)

        def noted_wide(result: Tensor, a: Tensor, b: Tensor, factor: float, memory: cpu_tensors.Workspace) -> None:
            assert result.dtype == memory.dtype == torch.float32
            assert a.dtype == b.dtype
            self.scores.add((a.shape[-1], a.dtype))
            wide_product(result, a, b, factor, memory)

        for module in (cpu, cpu_whole):
            monkeypatch.setattr(module, "product", noted)
            monkeypatch.setattr(module, "wide_product", noted_wide)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    return Products(monkeypatch)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this processor is, products are bf16, of matrices of any size, padded as much as that takes."""
    broken = broken_cpu_products("bfloat16")
    if broken is not None:
        pytest.skip(broken)
    monkeypatch.setattr(cpu_plan, "multiplies_fast", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(cpu_plan, "LEAST_NARROW_PAIRS", 0)
    monkeypatch.setattr(cpu_whole, "MOST_PADDING", float("inf"))


@pytest.fixture
def on_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences whole, in a tile of their own, or in several tiles: then O and dQ, or dK and dV, are sums of products."""
    if path == "whole":
        monkeypatch.setattr(cpu_whole, "BATCH_SCORES", 0)
        return
    monkeypatch.setattr(cpu_whole, "MOST_SCORES", 0)
    rows, keys = {"one tile": (1024, 1024), "query tiles": (32, 128), "key tiles": (128, 24)}[path]
    for prefix in ("", "MASKED_"):
        monkeypatch.setattr(cpu_plan, f"{prefix}TILE_ROWS", rows)
        monkeypatch.setattr(cpu_plan, f"{prefix}TILE_KEYS", keys)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scales": {"scale": 0.3, "out_scale": 0.7},
    "per sequence": {"out_scale": "per-sequence"},
    "grouped": {"heads": 6, "kv_heads": 2},
    "per head": {"heads": 4, "activation": ["gelu", "gelu", "relu", "tanh"]},
    "traced": {"activation": lambda s: torch.sin(s) * s},
    "window": {"window_size": (40, 3)},
    "exp": {"activation": "exp", "spread": 1.3},
}


def made_by(a: Tensor, b: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """factor * a @ b^T as `wide_product` makes it, which must write all of it, and as an fp32 product."""
    result, exact = (torch.full((a.shape[0], a.shape[1], b.shape[1]), float("nan")) for _ in range(2))
    cpu_tensors.wide_product(result, a, b.mT, factor, cpu_tensors.Workspace({}))
    cpu_tensors.product(exact, a.float(), b.float().mT, factor)
    return result, exact


@pytest.mark.parametrize("factor", [1.0, 0.088, -0.7, 3e5, 0.0])
@pytest.mark.parametrize("layout", ["rows together", "a tile", "rows apart"])
@pytest.mark.parametrize("size", [(3, 96, 64, 32), (1, 256, 512, 128), (2, 65, 130, 24), (1, 64, 64, 1), (1, 16, 16, 8)])
@pytest.mark.usefixtures("fast")
def test_two_bf16_products_are_nearly_an_fp32_product(size: tuple[int, int, int, int], layout: str, factor: float) -> None:
    count, rows, keys, features = size
    generator = torch.Generator().manual_seed(17)
    a = torch.randn(count, rows, features, generator=generator).bfloat16()
    b = torch.randn(count, 2 * keys, 2 * features, generator=generator).bfloat16()
    if layout != "rows apart":
        b = b[:, :, :features].contiguous()
    b = b[:, keys // 2 : keys // 2 + keys, :features]
    if layout == "rows together":
        b = b.contiguous()
    result, _ = made_by(a, b, factor)
    exact = factor * (a.double() @ b.double().mT)
    # 16 bits, and fp32 sums of exact products.
    bound = 2**-16 * exact.abs() + features * 2**-24 * abs(factor) * (a.double().abs() @ b.double().abs().mT)
    assert ((result - exact).abs() <= bound).all()
    assert (result - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("factor", [1.0, -0.5, 0.0])
@pytest.mark.parametrize("kind", ["infinite", "nan", "infinity less infinity", "past fp32", "past bf16"])
@pytest.mark.usefixtures("fast")
def test_two_bf16_products_are_infinite_where_an_fp32_product_is(kind: str, factor: float) -> None:
    """And where they are not finite, nothing but that is made in another way: not the other sequences', heads' and pairs' scores."""
    generator = torch.Generator().manual_seed(18)
    a, b = (torch.randn(2, 64, 32, generator=generator).bfloat16() for _ in range(2))
    clean, _ = made_by(a, b, factor)
    touched = torch.zeros_like(clean, dtype=torch.bool)
    if kind in ("infinite", "nan"):
        a[0, 5, 3], b[1, 7, 2] = (float("inf"), -float("inf")) if kind == "infinite" else (float("nan"),) * 2
        touched[0, 5], touched[1, :, 7] = True, True
    elif kind == "infinity less infinity":
        a[0, 5, 3], a[0, 5, 4] = float("inf"), -float("inf")
        touched[0, 5] = True
    else:
        a[0, 5], b[0, 7] = 0, 0
        touched[0, 5], touched[0, :, 7] = True, True
        # Past the middle between bf16's largest number and infinity, or past fp32's largest.
        a[0, 5, 0], b[0, 7, 0] = (2 - 2**-7) * 2**64, 2.0**63
        a[0, 5, 1], b[0, 7, 1] = 1.5 * 2**60, 2.0 ** (59 if kind == "past bf16" else 70)
    result, exact = made_by(a, b, factor)
    torch.testing.assert_close(result[~touched], clean[~touched], rtol=0, atol=0)
    torch.testing.assert_close(result[~exact.isfinite()], exact[~exact.isfinite()], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.isfinite(), exact.isfinite())
    if kind == "past bf16":
        assert exact.isfinite().all()
        assert result[0, 5, 7] == exact[0, 5, 7] == factor * (2 - 2**-9) * 2.0**127
    elif factor != 0 or kind != "past fp32":
        assert not exact.isfinite().all()


@pytest.mark.parametrize("number", [3.0, 0.0, -3.0, 20.0])
@pytest.mark.usefixtures("fast")
def test_two_bf16_products_keep_the_side_of_a_number_of_bf16(number: float) -> None:
    """Kinks of activations lie at such numbers. The scores are exact in fp32, from one unit in the last place off the number on."""
    generator = torch.Generator().manual_seed(19)
    unit = 2.0 ** (max(1, abs(int(number))).bit_length() - 24)
    a, b = torch.zeros(1, 256, 32), torch.zeros(1, 64, 32)
    a[..., 0], b[..., 0] = 1.0, number
    a[..., 1], b[..., 1] = torch.randint(-128, 129, (256,), generator=generator) * unit, 1.0
    a[..., 2], b[..., 2] = torch.randint(-128, 129, (256,), generator=generator) * unit * 2**7, (torch.arange(64) % 2).float()
    a[0, :4, 1:3] = torch.tensor([[unit, 0], [-unit, 0], [0, 0], [unit, unit * 2**7]])
    exact = a.double() @ b.double().mT
    result, by_fp32 = made_by(a.bfloat16(), b.bfloat16())
    assert torch.equal(by_fp32.double(), exact)
    assert torch.equal((result - number).sign(), (exact - number).sign())
    assert {-1.0, 0.0, 1.0} == set(exact.sub(number).sign().unique().tolist())


@PATHS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.usefixtures("fast", "on_path")
def test_every_option_is_inside_the_budget(option: str, form: str, path: str, products: Products) -> None:
    settings = {"heads": 2, "head_dim": 32, "value_dim": 48, "dtype": torch.bfloat16} | OPTIONS[option]
    # Outside whole sequences, of sizes that are few (test_products_come_in_few_shapes).
    for lengths in ((70, 100, 0, 64), (96, 96, 96)) if path == "whole" else ((64, 160, 0, 96), (96, 96, 96)):
        check(make_case(form, q_lengths=lengths, k_lengths=lengths[::-1], tail=(3, 2), seed=5, **settings), "cpu")
    # Equal sequences that share products and have factors of their own are multiplied by those before they are rounded; and heads
    # of a group that are different query tiles add to one dK.
    never = (option, path) == ("grouped", "key tiles")
    if option == "per sequence":
        never = (form == "dense" and path != "whole") or (form, path) == ("shared-query", "whole")
    assert (products.count[torch.bfloat16] > 0) is not never
    assert not products.added_in_bf16
    # Of 32 features S is made, which a traced function wants in fp32, and of 48 dP, of gradients that such factors have multiplied.
    traced, factors_first = option == "traced", option == "per sequence" and never
    assert ((32, torch.bfloat16) in products.scores) is not traced
    assert ((48, torch.bfloat16) in products.scores) is not factors_first
    if path != "whole":  # where some lengths are few, and others whole sequences
        assert ((32, torch.float32) in products.scores) is traced


@pytest.mark.parametrize("activation", gdpa.activations())
@pytest.mark.usefixtures("fast")
def test_every_named_activation_is_inside_the_budget(activation: str) -> None:
    check(
        make_case(q_lengths=(130, 65), heads=2, head_dim=32, dtype=torch.bfloat16, activation=activation, spread=1.5, seed=3), "cpu"
    )


@PATHS
@pytest.mark.parametrize("activation", gdpa.activations())
@pytest.mark.usefixtures("fast", "on_path")
def test_scores_about_one_number_are_inside_the_budget(activation: str, path: str, products: Products) -> None:
    """They are around -2.8, spread by 0.07, so that most of their errors would go to one side, were they rounded."""
    case = make_case(q_lengths=(96, 64), heads=2, head_dim=128, dtype=torch.bfloat16, activation=activation, spread=0.1, seed=14)
    check(case.with_inputs(q=case.inputs.q + 0.5, k=case.inputs.k - 0.5), "cpu")
    assert products.scores == {(128, torch.bfloat16)}


def scores_around(centre: float, spread: float, activation: str) -> Case:
    """All queries are alike. The centre is in its first 24 bits."""
    case = make_case(q_lengths=(96,), heads=2, head_dim=16, dtype=torch.bfloat16, activation=activation, scale=1.0, seed=15)
    q, k = torch.zeros_like(case.inputs.q), torch.zeros_like(case.inputs.k)
    q[..., :4], rest = 1.0, torch.tensor(centre)
    for feature in range(3):
        k[..., feature] = rest
        rest = rest - rest.bfloat16()
    k[..., 3] = spread * case.inputs.k[..., 3]
    return case.with_inputs(q=q, k=k)


@pytest.mark.parametrize(("activation", "zero"), [("gelu", -0.7517915), ("gelu_tanh", -0.7524614), ("silu", -1.2784645)])
@pytest.mark.usefixtures("fast")
def test_scores_about_a_zero_of_the_slope_are_inside_the_budget(
    activation: str, zero: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/numerics.md: not where they lie within 0.001 of it."""
    monkeypatch.setattr(cpu_whole, "BATCH_SCORES", 0)
    value, slope = gdpa.Activation.from_key(activation).value_and_derivative(torch.tensor(zero, dtype=torch.float64))
    assert abs(slope) < 1e-6 < abs(value)
    for distance in (0.0, 3e-4, -1e-3):
        check(scores_around(zero + distance, 3e-3, activation), "cpu")


@pytest.mark.parametrize("centre", [-70.0, 20.3, 85.3])
@pytest.mark.usefixtures("fast")
def test_the_steepest_named_activation_is_inside_the_budget(centre: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """exp makes an error of a score so many times larger, and at 88.7 it is infinite."""
    monkeypatch.setattr(cpu_whole, "BATCH_SCORES", 0)
    for spread in (0.0, 0.1):
        check(scores_around(centre, spread, "exp"), "cpu")


@PATHS
@pytest.mark.usefixtures("fast", "on_path")
def test_a_steep_traced_function_is_inside_the_budget(path: str, products: Products) -> None:
    """Of scores by two bf16 products it would use 1.7 of it."""
    case = make_case(
        q_lengths=(96, 64),
        heads=2,
        head_dim=32,
        value_dim=48,
        dtype=torch.bfloat16,
        activation=lambda s: torch.sin(3000 * s),
        seed=4,
    )
    check(case, "cpu")
    assert products.scores == {(32, torch.float32), (48, torch.bfloat16)}


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("constant", [1 + 0.49 * 2**-7, 1 + 0.5 * 2**-7, 1.9])
@pytest.mark.usefixtures("fast")
def test_a_gradient_that_rounds_to_one_side_everywhere_is_inside_the_budget(length: int, constant: float) -> None:
    """dP is one number for all pairs, half a unit off the nearest of bf16: rounded, no two of its errors would cancel."""
    case = make_case(q_lengths=(length,), heads=2, head_dim=32, dtype=torch.bfloat16, seed=6)
    d_out, v = torch.zeros_like(case.d_out), torch.zeros_like(case.inputs.v)
    parts = (torch.tensor(constant).bfloat16().float().item(), constant)
    d_out[..., :2], v[..., 0], v[..., 1] = 1.0, parts[0], parts[1] - parts[0]
    case = case.with_inputs(v=v)
    q, k, v = (x.clone().requires_grad_() for x in case.inputs[:3])
    out = case.call(q, k, v, "cpu")
    results = numerics.Results(out.detach(), *torch.autograd.grad(out, (q, k, v), d_out))
    numerics.check(case.problem, case.inputs, d_out, results)


@PATHS
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.usefixtures("fast", "on_path")
def test_a_poisoned_sequence_changes_no_other(merged: bool, poison: float, path: str, products: Products) -> None:
    """Nor those that share its products."""
    q_lengths, k_lengths = ((96,) * 3,) * 2 if merged else ((96, 64, 96), (64, 96, 96))
    if path == "whole" and not merged:
        q_lengths, k_lengths = (95, 65, 90), (66, 94, 91)
    case = make_case(q_lengths=q_lengths, k_lengths=k_lengths, dtype=torch.bfloat16, seed=7)
    clean = run(case, "cpu")
    (_, *q_ends), (_, *k_ends) = (x.tolist() for x in (case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k))
    rows = slice(*q_ends[:2]), slice(*k_ends[:2])
    q, k, v = (x.clone() for x in case.inputs[:3])
    q[rows[0]], k[rows[1]], v[rows[1]] = poison, poison, poison
    poisoned = run(case.with_inputs(q=q, k=k, v=v), "cpu")
    for name, here in (("out", rows[0]), ("dq", rows[0]), ("dk", rows[1]), ("dv", rows[1])):
        before, after = getattr(clean, name), getattr(poisoned, name)
        others = torch.ones(before.shape[0], dtype=torch.bool)
        others[here] = False
        assert torch.equal(before[others], after[others]), name
    assert poisoned.out[rows[0]].isnan().any()
    assert products.count[torch.bfloat16] > 0
    assert products.scores == {(16, torch.bfloat16)}


@PATHS
@pytest.mark.parametrize("activation", ["sigmoid", "relu", "exp"])
@pytest.mark.usefixtures("fast", "on_path")
def test_infinite_scores_give_what_other_processors_give(activation: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(q_lengths=(96, 64, 96), heads=2, head_dim=32, dtype=torch.bfloat16, activation=activation, seed=16)
    q = case.inputs.q.clone()
    q[100, 0, 5], q[101, 1, 7] = float("inf"), -float("inf")  # infinite scores, of either sign
    q[102, 0, 1], q[102, 0, 2] = float("inf"), float("inf")  # infinity may meet infinity
    case = case.with_inputs(q=q)
    fast = run(case, "cpu")
    monkeypatch.setattr(cpu_plan, "multiplies_fast", lambda dtype: False)
    for name, a, b in zip(numerics.Results._fields, fast, run(case, "cpu"), strict=True):
        assert torch.equal(a.isnan(), b.isnan()), name
        assert torch.equal(a.isposinf(), b.isposinf()), name
        assert torch.equal(a.isneginf(), b.isneginf()), name
        a, b = (x[b.isfinite()].double() for x in (a, b))
        # Either may differ from the truth by what the budget allows any bf16 result.
        assert (a - b).norm() <= 2 * 2 * torch.finfo(torch.bfloat16).eps / 12**0.5 * b.norm(), name


@PATHS
@pytest.mark.parametrize("layout", ["heads first", "strided", "rows apart"])
@pytest.mark.usefixtures("fast", "on_path")
def test_any_strides_are_inside_the_budget(layout: str, path: str, products: Products) -> None:
    rows = 70 if path == "whole" else 96
    case = make_case("dense", q_lengths=(rows,) * 3, heads=3, head_dim=16, dtype=torch.bfloat16, seed=8)

    def laid_out(x: Tensor) -> Tensor:
        if layout == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":
            return torch.stack((x, x), -1)[..., 0]
        return torch.cat((x, x), 1)[:, : x.shape[1]]

    q, k, v, d_out = (laid_out(x) for x in (*case.inputs[:3], case.d_out))
    out = cpu.forward(case.problem, q, k, v, None, None, None)
    gradients = cpu.backward(case.problem, d_out, q, k, v, None, None, None, (True,) * 3)
    numerics.check(case.problem, case.inputs, case.d_out, numerics.Results(out, *gradients))
    assert products.count[torch.bfloat16] > 0


@pytest.mark.parametrize("path", ["whole", "one tile"])
@pytest.mark.usefixtures("fast", "on_path")
def test_products_come_in_few_shapes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN compiles and keeps each of them."""
    baddbmm, shapes = torch.baddbmm, set()

    def noted(added: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor) -> Tensor:
        if a.dtype == torch.bfloat16:
            shapes.add((a.shape, b.shape, beta, alpha))
        return baddbmm(added, a, b, beta=beta, alpha=alpha, out=out)

    monkeypatch.setattr(torch, "baddbmm", noted)
    lengths = range(200, 264)
    for length in lengths:
        run(make_case(q_lengths=(length, length - 60), heads=2, kv_heads=2 if path == "whole" else 1, dtype=torch.bfloat16), "cpu")
    sizes = {cpu_tensors.few_sizes(length - cut) for length in lengths for cut in (0, 60)}
    assert 0 < len(shapes) <= 8 * len(sizes)  # O, dV, dQ and dK; S and dP, two each
    if path == "whole":
        assert len(sizes) == 9
        assert len(shapes) == 3 * len(sizes)  # the former four are of one shape, and dP has the factor of S
    assert cpu_tensors.few_sizes(1) == 16
    assert len({cpu_tensors.few_sizes(length) for length in range(1, 1025)}) == 32


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=["dq", "dk", "dv"])
@PATHS
@pytest.mark.usefixtures("fast", "on_path")
def test_a_gradient_by_itself_is_the_one_among_three(needs: tuple[bool, bool, bool]) -> None:
    case = make_case(q_lengths=(96, 70, 160), heads=2, head_dim=32, dtype=torch.bfloat16, seed=9)
    inputs = (*case.inputs[:5], None)
    alone = cpu.backward(case.problem, case.d_out, *inputs, needs)
    all_three = cpu.backward(case.problem, case.d_out, *inputs, (True,) * 3)
    for wanted, a, b in zip(needs, alone, all_three, strict=True):
        assert (a is not None) == wanted
        assert a is None or b is None or torch.equal(a, b)


@PATHS
@pytest.mark.usefixtures("on_path")
def test_other_processors_and_dtypes_multiply_in_fp32_alone(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(q_lengths=(70, 100), heads=2, head_dim=32, dtype=torch.bfloat16, seed=10)
    monkeypatch.setattr(cpu_plan, "multiplies_fast", lambda dtype: False)
    check(case, "cpu")
    monkeypatch.setattr(cpu_plan, "multiplies_fast", cpu_tensors.multiplies_fast)
    for dtype in (torch.float16, torch.float32):
        check(make_case(q_lengths=(70, 100), heads=2, head_dim=32, dtype=dtype, seed=10), "cpu")
    assert products.count[torch.float32] > 0
    assert products.count[torch.bfloat16] == 0
    assert products.scores == {(32, torch.float32)}


@pytest.mark.usefixtures("fast")
def test_short_sequences_multiply_in_fp32(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "LEAST_NARROW_PAIRS", 64 * 64)
    check(make_case(q_lengths=(63,), heads=2, head_dim=32, dtype=torch.bfloat16, seed=11), "cpu")
    assert products.count[torch.bfloat16] == 0
    assert products.scores == {(32, torch.float32)}
    check(make_case(q_lengths=(64,), heads=2, head_dim=32, dtype=torch.bfloat16, seed=11), "cpu")
    assert products.count[torch.bfloat16] > 0
    assert (32, torch.bfloat16) in products.scores


@pytest.mark.parametrize(("lengths", "padded"), [((100, 100), False), ((8, 1000), False), ((110, 140), True), ((96, 112), True)])
@pytest.mark.usefixtures("fast")
def test_sequences_that_would_be_mostly_padding_multiply_in_fp32(
    lengths: tuple[int, int], padded: bool, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_whole, "MOST_PADDING", 1.2)
    monkeypatch.setattr(cpu_whole, "BATCH_SCORES", 0)
    q_length, k_length = lengths
    case = make_case(q_lengths=(q_length,), k_lengths=(k_length,), heads=2, head_dim=32, dtype=torch.bfloat16, seed=12)
    check(case, "cpu")
    assert (products.count[torch.bfloat16] > 0) is padded
    assert products.scores == {(32, torch.bfloat16 if padded else torch.float32)}


@pytest.mark.parametrize("activation", ["sigmoid", lambda s: torch.log(s.abs())], ids=["sigmoid", "log"])
@pytest.mark.usefixtures("fast")
def test_what_an_activation_is_at_zero_does_not_reach_the_padding(activation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded pairs have a score of 0, where f may be 0.5 or infinite."""
    monkeypatch.setattr(cpu_whole, "BATCH_SCORES", 0)
    case = make_case(q_lengths=(70,), k_lengths=(90,), heads=2, head_dim=32, dtype=torch.bfloat16, activation=activation, seed=13)
    check(case, "cpu")


@pytest.mark.parametrize(
    ("about", "fast_at_bf16"),
    [
        ({"cpu_name": "AMD EPYC 9654", "avx512_bf16": True}, True),
        ({"cpu_name": "AMD EPYC 7763", "avx512_bf16": False}, False),
        ({"cpu_name": "Intel(R) Xeon(R) Platinum 8581C", "avx512_bf16": True}, False),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True, "amx_tile": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True, "amx_tile": False}, False),
        ({"cpu_name": "", "architecture": "aarch64"}, False),
    ],
    ids=["zen 4", "zen 3", "xeon", "xeon with AMX", "xeon without its tiles", "arm"],
)
def test_which_processors_are_fast(about: dict[str, Any], fast_at_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: about, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    fast = cpu_tensors.multiplies_fast.__wrapped__
    assert fast(torch.bfloat16) is fast_at_bf16
    assert not fast(torch.float16)
    assert not fast(torch.float32)


@pytest.mark.parametrize(
    ("variable", "value", "fast"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", False),
        ("DNNL_MAX_CPU_ISA", "avx2", False),
        ("ONEDNN_MAX_CPU_ISA", "AVX10_1_512_AMX", True),
        ("ONEDNN_MAX_CPU_ISA", "DEFAULT", True),
    ],
)
def test_amx_that_onednn_may_not_use_is_not_fast(variable: str, value: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"cpu_name": "Intel Xeon", "amx_bf16": True, "amx_tile": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: about, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setenv(variable, value)
    assert cpu_tensors.multiplies_fast.__wrapped__(torch.bfloat16) is fast


def test_a_torch_that_does_not_tell_is_taken_for_a_slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not cpu_tensors.multiplies_fast.__wrapped__(torch.bfloat16)

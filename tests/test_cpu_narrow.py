"""The cpu backend's bf16 products, on processors that are fast at them: the same budget, S in fp32, nothing added up in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FORMS, check, make_case, run
from torch import Tensor

import gdpa
from gdpa import numerics
from gdpa.backends import cpu, cpu_plan, cpu_tensors, cpu_whole
from gdpa.bench.plain import broken_cpu_products

PATHS = pytest.mark.parametrize("path", ["whole", "one tile", "query tiles", "key tiles"])


class Products:
    """The products of a test: how many of each dtype, and whether a bf16 one was added to something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = {torch.bfloat16: 0, torch.float32: 0}
        self.added_in_bf16 = False
        whole = cpu_tensors.product

        def noted(result: Tensor, a: Tensor, b: Tensor, factor: float = 1.0, *, accumulate: bool = False) -> None:
            assert result.dtype == a.dtype == b.dtype
            self.count[a.dtype] += 1
            self.added_in_bf16 |= accumulate and a.dtype == torch.bfloat16
            whole(result, a, b, factor, accumulate=accumulate)

        for module in (cpu, cpu_tensors, cpu_whole):
            monkeypatch.setattr(module, "product", noted)


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
    assert products.count[torch.float32] > 0  # S, always
    assert not products.added_in_bf16


@pytest.mark.parametrize("activation", gdpa.activations())
@pytest.mark.usefixtures("fast")
def test_every_named_activation_is_inside_the_budget(activation: str) -> None:
    check(
        make_case(q_lengths=(130, 65), heads=2, head_dim=32, dtype=torch.bfloat16, activation=activation, spread=1.5, seed=3), "cpu"
    )


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
@pytest.mark.usefixtures("fast", "on_path")
def test_a_poisoned_sequence_changes_no_other(poison: float, path: str, products: Products) -> None:
    case = make_case(q_lengths=(96, 64, 96), k_lengths=(64, 96, 96), dtype=torch.bfloat16, seed=7)
    if path == "whole":
        case = make_case(q_lengths=(95, 65, 90), k_lengths=(66, 94, 91), dtype=torch.bfloat16, seed=7)
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
    whole, shapes = cpu_tensors.product, set()

    def noted(result: Tensor, a: Tensor, b: Tensor, factor: float = 1.0, *, accumulate: bool = False) -> None:
        if a.dtype == torch.bfloat16:
            shapes.add((a.shape, b.shape, factor))
        whole(result, a, b, factor, accumulate=accumulate)

    for module in (cpu, cpu_whole):
        monkeypatch.setattr(module, "product", noted)
    lengths = range(200, 264)
    for length in lengths:
        run(make_case(q_lengths=(length, length - 60), heads=2, kv_heads=2 if path == "whole" else 1, dtype=torch.bfloat16), "cpu")
    sizes = {cpu_tensors.few_sizes(length - cut) for length in lengths for cut in (0, 60)}
    assert 0 < len(shapes) <= 4 * len(sizes)
    if path == "whole":
        assert len(shapes) == len(sizes) == 9
    assert cpu_tensors.few_sizes(1) == 16
    assert len({cpu_tensors.few_sizes(length) for length in range(1, 1025)}) == 48


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
    check(make_case(q_lengths=(70, 100), heads=2, head_dim=32, dtype=torch.float16, seed=10), "cpu")
    assert products.count[torch.float32] > 0
    assert products.count[torch.bfloat16] == 0


@pytest.mark.usefixtures("fast")
def test_short_sequences_multiply_in_fp32(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "LEAST_NARROW_PAIRS", 64 * 64)
    check(make_case(q_lengths=(63,), heads=2, head_dim=32, dtype=torch.bfloat16, seed=11), "cpu")
    assert products.count[torch.bfloat16] == 0
    check(make_case(q_lengths=(64,), heads=2, head_dim=32, dtype=torch.bfloat16, seed=11), "cpu")
    assert products.count[torch.bfloat16] > 0


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

"""The cpu backend against the oracle: every option, tile borders, containment of NaN, and skipped work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check, check_float64, make_case, run, spy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gdpa
from gdpa import numerics
from gdpa.backends import cpu, cpu_plan, cpu_short, cpu_tensors, cpu_whole
from gdpa.backends.cpu_kernels import FUSED, kernel_of
from gdpa.problem import describe, window_mask

BORDERS = (0, 1, 63, 64, 65)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are computed in the caller's memory wherever they can be, which is NaN before."""
    monkeypatch.setattr(cpu_tensors, "LEAST_NUMBERS_IN_PLACE", 0)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(float("nan")))


@DTYPES
@pytest.mark.parametrize("form", ["packed", "dense", "dense-key", "shared-query"])
def test_lengths_at_tile_borders_match_the_oracle(form: str, dtype: torch.dtype) -> None:
    for first in (65, 1, 0):
        lengths = (first, *BORDERS)
        check(make_case(form, q_lengths=lengths, k_lengths=lengths[::-1], dtype=dtype, tail=(3, 2), seed=1), "cpu")


@DTYPES
@pytest.mark.parametrize("form", ["packed", "dense", "dense-key", "shared-query"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, -1), (3, 30)], ids=["full", "causal", "left", "band"])
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles_match_the_oracle(form: str, window: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(
        form,
        q_lengths=(65, 7, 100),
        k_lengths=(70, 64, 33),
        heads=6,
        kv_heads=2,
        head_dim=24,
        value_dim=40,
        dtype=dtype,
        window_size=window,
        out_scale="per-sequence",
        seed=2,
    )
    check(case, "cpu")


@pytest.mark.parametrize("form", ["packed", "dense", "dense-key", "shared-query"])
@pytest.mark.parametrize("lengths", [(65, 7, 100), (40, 40, 40, 40, 40), (3, 3)], ids=["apart", "a run", "a short run"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.usefixtures("small_tiles", "in_place")
def test_results_computed_in_place_match_the_oracle(form: str, lengths: tuple[int, ...], heads: int, kv_heads: int) -> None:
    """Tiles add to the caller's memory; runs of equal lengths are computed head by head where they are long enough."""
    for window in ((-1, -1), (30, 0)):
        case = make_case(
            form,
            q_lengths=lengths,
            k_lengths=lengths if lengths[0] == lengths[1] else lengths[::-1],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=24,
            value_dim=40,
            dtype=torch.float32,
            window_size=window,
            out_scale="per-sequence",
            tail=(3, 2),
            seed=20,
        )
        check(case, "cpu")


@pytest.mark.parametrize("path", ["whole", "tiles"])
@pytest.mark.parametrize("layout", ["heads first", "strided", "rows apart", "expanded"])
@pytest.mark.usefixtures("in_place")
def test_any_strides_of_fp32_inputs_give_the_results_of_contiguous_ones(
    layout: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_whole, "LEAST_SCORES_IF_EQUAL", 0)
    if path == "tiles":
        monkeypatch.setattr(cpu_whole, "MOST_SCORES", 0)
    case = make_case("dense", q_lengths=(70,) * 4, k_lengths=(70,) * 4, heads=3, head_dim=16, dtype=torch.float32, seed=21)

    def laid_out(x: Tensor) -> Tensor:
        if layout == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":
            return torch.stack((x, x), -1)[..., 0]
        if layout == "rows apart":
            return torch.cat((x, x), 1)[:, : x.shape[1]]
        return x[:1, :1, :1, :1].expand(x.shape)

    tensors = [laid_out(x) for x in (*case.inputs[:3], case.d_out)]
    results = []
    for q, k, v, d_out in (tensors, [x.contiguous() for x in tensors]):
        out = cpu.forward(case.problem, q, k, v, None, None, None)
        results.append((out, *cpu.backward(case.problem, d_out, q, k, v, None, None, None, (True,) * 3)))
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        # Other strides may choose another kernel for a product, hence another order of its sum of at most 70 terms.
        assert (a - b).abs().max() <= 70 * torch.finfo(torch.float32).eps * b.abs().max()


@DTYPES
@pytest.mark.parametrize("activation", gdpa.activations())
def test_every_named_activation_has_exact_value_and_slope(activation: str, dtype: torch.dtype) -> None:
    check(
        make_case(q_lengths=(70, 65), heads=2, head_dim=32, dtype=dtype, activation=activation, spread=1.5, seed=3),
        "cpu",
    )


def test_the_fused_table_names_only_built_in_activations_and_agrees_with_them_everywhere() -> None:
    s = torch.cat(
        [
            torch.linspace(-30, 30, 4001, dtype=torch.float64),
            torch.tensor([-3.0, -0.0, 0.0, 3.0, 20.0], dtype=torch.float64),
        ]
    )
    assert set(FUSED) == set(gdpa.activations())
    for name in FUSED:
        value, slope = gdpa.Activation.from_key(name).value_and_derivative(s)
        scores, p, dp = s.clone(), torch.empty_like(s), torch.full_like(s, 2.0)
        kernel = kernel_of(name)
        kernel.prepare(scores, p, slope=True)
        kernel.multiply_by_slope(dp, scores)
        torch.testing.assert_close(p, value, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(dp, 2 * slope, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}': {m}")
        scores = s.clone()
        kernel.value(scores)
        assert torch.equal(scores, p), name


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.usefixtures("small_tiles")
def test_activations_per_head_each_serve_their_head(group: int) -> None:
    def cubic(s: Tensor) -> Tensor:
        return torch.relu(s) ** 3 / 64

    activations: list[Any] = ["gelu", "gelu", "sigmoid", cubic, "exp", "gelu"]
    for form in ("packed", "shared-query"):
        case = make_case(
            form,
            q_lengths=(40, 5, 5),
            k_lengths=(40, 5, 5),
            heads=6,
            kv_heads=6 // group,
            activation=activations,
            seed=4,
        )
        check(case, "cpu")


@DTYPES
def test_any_group_of_query_heads_and_any_widths(dtype: torch.dtype) -> None:
    for heads, kv_heads, head_dim, value_dim in ((8, 1, 8, 16), (6, 3, 40, 8), (4, 4, 136, 72)):
        case = make_case(
            q_lengths=(65, 30),
            k_lengths=(20, 129),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
            scale=0.2,
            out_scale=0.37,
            seed=5,
        )
        check(case, "cpu")


@pytest.mark.parametrize("form", ["packed", "dense", "dense-key", "shared-query"])
@pytest.mark.usefixtures("small_tiles")
def test_float64_is_computed_in_float64(form: str) -> None:
    case = make_case(
        form,
        q_lengths=(65, 3),
        k_lengths=(64, 40),
        heads=4,
        kv_heads=2,
        dtype=torch.float64,
        causal=True,
        out_scale="per-sequence",
        seed=6,
    )
    check_float64(case, "cpu")


@pytest.mark.usefixtures("small_tiles")
def test_strided_inputs_give_the_same_bits_and_contiguous_results() -> None:
    case = make_case(q_lengths=(40, 33), heads=2, head_dim=24, dtype=torch.bfloat16, causal=True, seed=7)
    plain = run(case, "cpu")

    def strided(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    inputs = case.inputs
    moved = case.with_inputs(q=strided(inputs.q), k=inputs.k.transpose(0, 1).contiguous().transpose(0, 1), v=strided(inputs.v))
    needs = (True, True, True)
    options = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, None)
    out = cpu.forward(case.problem, *moved.inputs[:3], *options)
    grads = cpu.backward(case.problem, strided(case.d_out), *moved.inputs[:3], *options, needs)
    for a, b in zip(plain, (out, *grads), strict=True):
        assert b is not None
        assert b.is_contiguous()
        assert torch.equal(a, b)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("lengths", [(20, 20, 20), (40, 20, 33)], ids=["merged", "apart"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_poisoned_sequence_leaves_its_neighbours_bitwise_alone(
    lengths: tuple[int, ...], poison: float, kv_heads: int, dtype: torch.dtype
) -> None:
    case = make_case(q_lengths=lengths, heads=4, kv_heads=kv_heads, dtype=dtype, tail=(5, 5), seed=8)
    clean = run(case, "cpu")
    first, last = lengths[0], lengths[0] + lengths[1]
    poisoned = [x.clone() for x in case.inputs[:3]]
    for x in poisoned:
        x[first:last] = poison
        x[sum(lengths) :] = poison  # rows that no sequence covers
    d_out = case.d_out.clone()
    d_out[first:last] = poison
    d_out[sum(lengths) :] = poison
    options = (*case.inputs[3:5], None)
    results = (
        cpu.forward(case.problem, *poisoned, *options),
        *cpu.backward(case.problem, d_out, *poisoned, *options, (True,) * 3),
    )
    for a, b in zip(clean, results, strict=True):
        assert b is not None
        assert torch.equal(a[:first], b[:first])
        assert torch.equal(a[last:], b[last:])
        assert not b[sum(lengths) :].any()


@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (0, 3)], ids=["causal", "left-2", "right-3"])
def test_nan_of_f_at_masked_pairs_does_not_leak(window: tuple[int, int]) -> None:
    # sqrt is NaN at the negative scores of the last key, which only some rows may see.
    case = make_case(q_lengths=(12,), heads=1, head_dim=8, activation=torch.sqrt, window_size=window, seed=9)
    q, k = (x.abs() + 0.1 for x in case.inputs[:2])
    check(case.with_inputs(q=q, k=k), "cpu")
    k[-1] *= -1
    sees_it = window_mask(12, 12, window, q.device)[:, -1]
    assert sees_it.any()
    assert not sees_it.all()
    options = (*case.inputs[3:5], None)
    out = cpu.forward(case.problem, q, k, case.inputs.v, *options)
    dq, _, _ = cpu.backward(case.problem, case.d_out, q, k, case.inputs.v, *options, (True, False, False))
    assert dq is not None
    for result in (out, dq):
        assert torch.equal(result[:, 0].isnan().any(1), sees_it)


def test_masked_pairs_of_sigmoid_contribute_nothing() -> None:
    case = make_case(q_lengths=(9,), k_lengths=(9,), heads=1, activation="sigmoid", causal=True, seed=10)
    out = case.call(*case.inputs[:3], "cpu")
    q, k, v = (x[:1, 0] for x in case.inputs[:3])
    torch.testing.assert_close(out[0, 0], (torch.sigmoid(case.problem.scale * (q @ k.T)) @ v)[0])


class Largest(TorchDispatchMode):
    """The most elements any operator's result has had, and how many matrix products ran."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.products = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        self.products += "bmm" in function.__name__
        return result


@pytest.fixture
def one_thread():
    """Dispatch modes see the calling thread only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["gelu", lambda s: torch.sin(s) * s], ids=["named", "traced"])
@pytest.mark.usefixtures("one_thread")
def test_no_score_matrix_is_ever_materialised(activation: Any) -> None:
    rows = 8192
    case = make_case(q_lengths=(rows,), heads=1, head_dim=8, activation=activation, seed=11)
    inputs = (*case.inputs[:5], None)
    with Largest() as seen:
        cpu.forward(case.problem, *inputs)
        cpu.backward(case.problem, case.d_out, *inputs, (True,) * 3)
    assert seen.products == 7 * (rows // cpu_plan.TILE_ROWS) * (rows // cpu_plan.TILE_KEYS)
    assert seen.elements <= cpu_plan.TILE_ROWS * cpu_plan.TILE_KEYS
    assert seen.elements < rows * rows / 50


@pytest.mark.usefixtures("one_thread")
def test_a_window_skips_the_tiles_it_excludes() -> None:
    case = make_case(q_lengths=(2048,), heads=1, head_dim=8, window_size=(64, 0), dtype=torch.float32, seed=12)
    with Largest() as seen:
        out = cpu.forward(case.problem, *case.inputs[:5], None)
    # Each of the 4 row tiles of 512 meets 3 key tiles of 256 (the first one 2), where all of them would be 8.
    assert seen.products == 2 * (2 + 3 + 3 + 3)
    numerics.check(case.problem, case.inputs, None, numerics.Results(out))


@pytest.mark.parametrize(
    ("needs", "products"),
    [((1, 0, 0), 3), ((0, 1, 0), 3), ((0, 0, 1), 2), ((1, 1, 0), 4), ((1, 0, 1), 4), ((1, 1, 1), 5), ((0, 0, 0), 0)],
    ids=["q", "k", "v", "qk", "qv", "qkv", "none"],
)
@pytest.mark.usefixtures("one_thread")
def test_gradients_nobody_needs_cost_no_product(needs: tuple[bool, bool, bool], products: int) -> None:
    for form in ("packed", "shared-query"):
        case = make_case(form, q_lengths=(30,), k_lengths=(30,), heads=2, seed=13)
        inputs = (*case.inputs[:5], None)
        everything = cpu.backward(case.problem, case.d_out, *inputs, (True,) * 3)
        with Largest() as seen:
            some = cpu.backward(case.problem, case.d_out, *inputs, needs)
        assert seen.products == products
        for need, a, b in zip(needs, everything, some, strict=True):
            assert (b is None) == (not need)
            assert a is not None
            assert b is None or torch.equal(a, b)


def test_runs_long_enough_are_computed_head_by_head_unless_they_are_copied_anyway() -> None:
    for dtype, expected in ((torch.float32, [(5, True), (2, False)]), (torch.bfloat16, [(5, False), (2, False)])):
        case = make_case(q_lengths=(20,) * 5 + (30,) * 2, heads=3, dtype=dtype, seed=23)
        plan = cpu_plan.Plan.of(case.problem, case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k)
        assert [(block.count, block.by_head) for block in plan.blocks] == expected
        check(case, "cpu")


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_gradient_of_shared_queries_is_summed_in_bounded_parts(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("shared-query", q_lengths=(6,), k_lengths=(40, 7, 0, 7, 33), heads=4, kv_heads=2, seed=24)
    monkeypatch.setattr(cpu, "PARTS_NUMBERS", parts * case.inputs.q.numel())
    seen: list[int | None] = []
    whole_run = cpu_plan.Plan.run

    def run_and_note(plan: cpu_plan.Plan, work: Any, parts: int | None = None) -> None:
        seen.append(parts)
        whole_run(plan, work, parts)

    monkeypatch.setattr(cpu_plan.Plan, "run", run_and_note)
    check(case, "cpu")
    assert seen == [None, parts]


def test_merged_sequences_are_those_of_equal_lengths_in_a_row() -> None:
    case = make_case(q_lengths=(5, 5, 7, 7, 7, 0, 0, 5), k_lengths=(6, 6, 6, 6, 2, 2, 0, 6), heads=1, seed=18)
    plan = cpu_plan.Plan.of(case.problem, case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k)
    assert [(block.count, block.q_len, block.k_len) for block in plan.blocks] == [
        (2, 5, 6),
        (2, 7, 6),
        (1, 7, 2),
        (1, 0, 2),
        (1, 0, 0),
        (1, 5, 6),
    ]
    check(case, "cpu")


def test_an_empty_batch_gives_empty_and_zero_results() -> None:
    for form in ("packed", "dense", "dense-key", "shared-query"):
        case = make_case(form, q_lengths=() if form != "shared-query" else (4,), k_lengths=(), tail=(3, 3), seed=19)
        results = run(case, "cpu")
        assert all(not x.any() for x in results if x is not None)


def test_only_cpu_tensors_are_supported() -> None:
    case = make_case()
    q, k, v = (x.to("meta") for x in case.inputs[:3])
    problem = describe(q, k, v, *case.inputs[3:5], None, None, ["gelu"], None, 1.0, (-1, -1), False)
    reason = cpu.supports(problem)
    assert reason is not None
    assert "meta" in reason
    assert cpu.supports(case.problem) is None


SHORT = ((5, 0, 1, 9, 15, 2, 2, 7, 0, 3, 11, 15, 4), (8, 1, 0, 16, 3, 3, 8, 16, 1, 0, 5, 7, 12))


@DTYPES
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("form", ["packed", "dense-key", "shared-query"])
def test_many_short_sequences_share_products_and_match_the_oracle(
    form: str, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = spy(monkeypatch, cpu_short, "_Run")
    monkeypatch.setattr(cpu_short, "LEAST_IN_RUN", 3)  # so that 13 sequences make several runs
    for seed, (activation, out_scale) in enumerate(
        [("gelu", None), ("sigmoid", "per-sequence"), ("exp", 0.5), (lambda x: torch.log(x.abs()), "per-sequence")]
    ):
        case = make_case(
            form,
            q_lengths=SHORT[0],
            k_lengths=SHORT[1],
            heads=4,
            kv_heads=kv_heads,
            head_dim=8,
            value_dim=12,
            dtype=dtype,
            activation=activation,
            out_scale=out_scale,
            tail=(3, 2),
            seed=seed,
        )
        check(case, "cpu")
    assert len(runs) >= 2 * 4 * 2  # forward and backward of four cases in several runs each


@pytest.mark.parametrize("form", ["packed", "dense-key", "shared-query"])
@pytest.mark.parametrize("empty", ["queries", "keys", "half"])
def test_short_sequences_that_are_all_empty_on_one_side_give_zeros(form: str, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_short, "LEAST_IN_RUN", 4)
    some, none = (3,) * 12, (0,) * 12
    half = (0,) * 8 + (3,) * 4  # whole runs of it are empty
    lengths = {"queries": (none, some), "keys": (some, none), "half": (half, half[::-1])}[empty]
    check(make_case(form, q_lengths=lengths[0], k_lengths=lengths[1], out_scale="per-sequence"), "cpu")


@pytest.mark.parametrize(("form", "empty"), [("packed", "queries"), ("packed", "keys"), ("shared-query", "keys")])
def test_short_sequences_without_pairs_give_zeros_where_out_scale_is_one_over_their_length(form: str, empty: str) -> None:
    lengths = (3, 0, 5, 2, 7, 1, 0, 4, 6, 2)
    others = (2, 4, 3, 5, 1, 2, 3, 4, 5, 1)
    q_lengths, k_lengths = (lengths, others) if empty == "queries" else (others, lengths)
    case = make_case(form, q_lengths=q_lengths, k_lengths=k_lengths, out_scale="per-sequence", activation="sigmoid")
    case = case.with_inputs(out_scale=1 / torch.tensor(lengths))
    assert cpu_short.takes(case.problem, *case.inputs[3:5])
    check(case, "cpu")


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),
        ({"dtype": torch.float64}, False),
        ({"causal": True}, False),
        ({"activation": ["gelu", "relu"]}, False),
        ({"q_lengths": (5,) * 7}, False),
        ({"q_lengths": (5,) * 12}, False),
        ({"q_lengths": (5,) * 12 + (200,)}, False),
    ],
    ids=["short", "float64", "causal", "two-activations", "few", "equal", "one-long"],
)
def test_only_batches_of_many_short_sequences_are_padded(options: dict[str, Any], taken: bool) -> None:
    case = make_case(**{"q_lengths": SHORT[0], **options})
    assert cpu_short.takes(case.problem, case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k) is taken


WHOLE = pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [((40, 3, 0, 65, 17), (33, 40, 5, 0, 64)), ((33, 7), (0, 0)), ((0,), (9,)), ((70, 2), (70, 2))],
    ids=["jagged", "no keys", "no queries", "self"],
)


@DTYPES
@WHOLE
@pytest.mark.parametrize("most_scores", [1 << 20, 64 * 65, 1], ids=["all heads", "some heads", "one head"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "scratch"])
def test_whole_score_matrices_match_the_oracle(
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    most_scores: int,
    in_place: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many heads a product takes; results in the caller's memory or not; empty sequences; rows of no sequence."""
    calls = spy(monkeypatch, cpu_whole, "_Call")
    monkeypatch.setattr(cpu_whole, "takes", lambda *arguments: True)
    monkeypatch.setattr(cpu_whole, "MOST_SCORES", most_scores)
    monkeypatch.setattr(cpu_whole, "LEAST_NUMBERS_IN_PLACE", 0 if in_place else 1 << 30)
    for form in ("packed", "dense", "dense-key"):
        case = make_case(
            form,
            q_lengths=q_lengths,
            k_lengths=k_lengths,
            heads=3,
            head_dim=24,
            value_dim=40,
            dtype=dtype,
            activation="sigmoid",
            out_scale="per-sequence",
            tail=(3, 2),
            seed=25,
        )
        check(case, "cpu")
    assert len(calls) == 2 * 3


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),
        ({"form": "dense-key"}, True),
        ({"dtype": torch.bfloat16}, True),
        ({"form": "shared-query"}, False),
        ({"causal": True}, False),
        ({"heads": 4, "kv_heads": 2}, False),
        ({"activation": ["gelu", "relu"]}, False),
        ({"q_lengths": (4000, 5), "k_lengths": (300, 7)}, False),
        ({"q_lengths": (130, 130), "k_lengths": (130, 130), "heads": 4}, True),
        ({"q_lengths": (130, 130), "k_lengths": (130, 130), "heads": 4, "dtype": torch.bfloat16}, False),
        ({"q_lengths": (100, 100), "k_lengths": (100, 100), "heads": 4}, False),
        ({"q_lengths": (), "k_lengths": ()}, False),
    ],
    ids=[
        *("jagged", "dense keys", "bf16", "shared queries", "causal", "groups", "two activations", "too long"),
        *("equal", "equal bf16", "equal and short", "empty batch"),
    ],
)
def test_which_batches_are_computed_sequence_by_sequence(options: dict[str, Any], taken: bool) -> None:
    case = make_case(**{"q_lengths": (90, 5), "k_lengths": (80, 7), "heads": 2, "dtype": torch.float32, **options})
    assert cpu_whole.takes(case.problem, case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k) is taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("form", ["dense", "dense-key"])
def test_a_factor_for_each_of_several_equal_sequences(form: str, dtype: torch.dtype) -> None:
    """Large enough to be computed in the output's own memory, which is no contiguous block of the sequences' rows."""
    q, k = torch.randn(4, 256, 4, 64, dtype=dtype), torch.randn(4, 32, 4, 64, dtype=dtype)
    factors = torch.tensor([0.5, -1.0, 0.0, 3.0], dtype=dtype)
    if form == "dense":
        out = gdpa.attention(q, k, k, out_scale=factors, backend="cpu")
        expected = gdpa.attention(q, k, k, backend="cpu") * factors[:, None, None, None]
    else:
        offsets = torch.arange(5) * 256
        out = gdpa.attention_varlen(q.flatten(0, 1), k, k, offsets, None, out_scale=factors, backend="cpu").view_as(q)
        expected = gdpa.attention(q, k, k, backend="cpu") * factors[:, None, None, None]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("length", [4, 200])
@pytest.mark.parametrize("option", ["scale", "out_scale"])
def test_a_factor_of_zero_hides_no_nan(option: str, length: int) -> None:
    q, k = torch.randn(1, length, 2, 8), torch.randn(1, length, 2, 8)
    q[0, 1] = float("nan")
    for backend in ("reference", "cpu"):
        out = gdpa.attention(q, k, k, "gelu", backend=backend, **{option: 0.0})
        assert out[0, 1].isnan().all(), backend
        assert not out[0, 2].isnan().any(), backend

"""The public functions, in every form and option, on every backend that this machine can run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    FORMS,
    Case,
    assert_neighbours_untouched,
    backend_params,
    check,
    check_float64,
    leaves,
    make_case,
    offsets_of,
    poison_sequence,
    poisoned_memory,
    run,
)
from torch import Tensor

import gdpa
from gdpa import numerics
from gdpa.numerics import Results

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIMS = (8, 16, 24, 32, 40, 64, 72, 96, 128, 136, 200, 256)

JAGGED: dict[str, Any] = {"q_lengths": (5, 0, 33, 2), "k_lengths": (9, 4, 34, 0)}


@pytest.fixture(params=backend_params())
def backend(request) -> str:
    return request.param


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request) -> torch.dtype:
    return request.param


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.4},
    "out_scale number": {"out_scale": 0.125},
    "out_scale per sequence": {"out_scale": "per-sequence"},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "window left": {"window_size": (5, -1)},
    "causal window": {"window_size": (5, -1), "causal": True},
    "window of one key": {"window_size": (0, 0)},
    "per head": {
        "activation": ["relu", "sigmoid", lambda s: torch.relu(s) ** 2 / 8, "gelu"],
        "heads": 4,
        "kv_heads": 2,
    },
    "uncovered tails": {"tail": (3, 70)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_every_form_takes_every_option(backend, form, options):
    check(make_case(form, **{**JAGGED, "activation": "sigmoid", **options}), backend)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_dtype(backend, form, dtype):
    check(make_case(form, **JAGGED, heads=4, kv_heads=2, dtype=dtype, causal=True, out_scale="per-sequence"), backend)


@pytest.mark.parametrize("name", gdpa.activations())
def test_every_named_activation(backend, name):
    check(make_case(q_lengths=(20, 3), k_lengths=(17, 5), activation=name, dtype=torch.float16, spread=1.5), backend)


CUSTOM = {
    "relu squared over 64": lambda s: torch.relu(s) ** 2 / 64,
    "gaussian": lambda s: torch.exp(-s * s),
    "1 / (1 + |s|)": lambda s: s / (1 + s.abs()),
    "where": lambda s: torch.where(s > 0.5, s, 0.1 * s - 0.2),
    "clamp": lambda s: s.clamp(-1, 1) * torch.sigmoid(s),
    "constant": lambda s: torch.full_like(s, 0.5),
    "log of 2 + s^2": lambda s: torch.log(2 + s * s),
    "module": torch.nn.Mish(),
    "root of what is flat": lambda s: torch.sqrt(torch.nn.functional.hardsigmoid(4 * s)),
    "root of what is flat, again": lambda s: torch.sqrt(torch.nn.functional.hardswish(4 * s).abs()),
    "s^17": lambda s: s**17,
    "s^20": lambda s: s**20,
    "s^-33": lambda s: (s.abs() + 1) ** -33,
    "an Activation inside": lambda s: gdpa.Activation("gelu")(s) * 2,
}


@pytest.mark.parametrize("fn", CUSTOM.values(), ids=CUSTOM.keys())
def test_a_callable_is_an_activation(backend, fn):
    check(make_case(q_lengths=(20, 3), k_lengths=(17, 5), activation=fn), backend)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s: 1 / (1 + torch.exp(100 - 10 * s)),
        lambda s: torch.log(1 + torch.exp(100 - 10 * s)),
        lambda s: torch.sqrt(s * s + 1e-38),
        lambda s: torch.sqrt(torch.nn.functional.hardsigmoid(s - 3)),
    ],
)
def test_what_is_finite_at_zero_in_float64_alone_stays_out_of_the_padding(backend, fn):
    """No score is near 0, where a kernel's tile has rows of nothing."""
    case = make_case(q_lengths=(5, 3), k_lengths=(5, 9), head_dim=8, activation=fn, scale=1.0)
    q, k = (x.abs() + 0.8 for x in case.inputs[:2])
    result = run(replace(case, inputs=case.inputs._replace(q=q, k=k)), backend)
    for x in result:
        assert x is not None and x.isfinite().all()


@pytest.mark.parametrize("head_dim", DIMS)
def test_every_head_dimension(backend, head_dim):
    check(make_case(q_lengths=(17, 4), k_lengths=(20, 3), head_dim=head_dim, dtype=torch.float16), backend)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 256), (256, 8), (40, 72), (64, 24), (136, 200)])
def test_values_of_another_dimension(backend, head_dim, value_dim):
    check(make_case(q_lengths=(17, 4), k_lengths=(20, 3), head_dim=head_dim, value_dim=value_dim), backend)


@pytest.mark.parametrize("any_backend", ["reference", "cpu"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 1), (3, 7), (300, 5)])
def test_dimensions_outside_the_kernels_range_run_on_a_cpu(any_backend, head_dim, value_dim):
    check(make_case(q_lengths=(17, 4), k_lengths=(20, 3), head_dim=head_dim, value_dim=value_dim), any_backend)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 2), (8, 1), (3, 3), (16, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_grouped_queries(backend, form, heads, kv_heads):
    check(
        make_case(form, q_lengths=(9, 5), k_lengths=(7, 20), heads=heads, kv_heads=kv_heads, dtype=torch.float16),
        backend,
    )


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 33, 63, 64, 65])
def test_lengths_around_tile_edges(backend, length):
    check(make_case(q_lengths=(length, 3, length), k_lengths=(length, 2, 65), heads=1), backend)


@pytest.mark.parametrize("offset_dtypes", [(a, b) for a in (torch.int32, torch.int64) for b in (torch.int32, torch.int64)], ids=str)
def test_offsets_of_either_dtype_mixed(backend, offset_dtypes):
    check(make_case(**JAGGED, offset_dtypes=offset_dtypes), backend)


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_batch(backend, form):
    case = make_case(form, q_lengths=(), k_lengths=(), tail=(2, 2))
    results = check(case, backend)
    assert not any(x.any() for x in results)
    assert results.out.shape == case.problem.output_shape
    if form == "shared-query":
        assert results.dq.shape == (3, 2, 16)


@pytest.mark.parametrize("lengths", [((0, 0), (4, 3)), ((4, 3), (0, 0)), ((0, 5), (3, 0)), ((0, 0), (0, 0))], ids=str)
def test_a_sequence_without_queries_or_keys_gives_zeros(backend, lengths):
    results = check(make_case(q_lengths=lengths[0], k_lengths=lengths[1], activation="sigmoid"), backend)
    assert not any(x.any() for x in results)


@pytest.mark.parametrize("form", ["dense", "dense-key", "shared-query"])
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_a_dense_side_of_no_rows_gives_zeros(backend, form, side):
    lengths = {"q_lengths": (0, 0), "k_lengths": (4, 4)} if side == "queries" else {"q_lengths": (4, 4), "k_lengths": (0, 0)}
    assert not any(x.any() for x in check(make_case(form, **lengths), backend))


def test_rows_that_no_sequence_covers_are_zeros(backend):
    case = make_case(q_lengths=(5, 3), k_lengths=(4, 6), tail=(9, 70), activation="sigmoid")
    q, k, v = (x.clone() for x in case.inputs[:3])
    q[8:], k[10:], v[10:], case.d_out[8:] = (float("nan") for _ in range(4))
    results = run(case.with_inputs(q=q, k=k, v=v), backend)
    assert not any(x[covered:].any() for x, covered in zip(results, (8, 8, 10, 10), strict=True))
    clean = run(case, backend)
    assert all(torch.equal(x, y) for x, y in zip(results, clean, strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_one_sequence_never_reaches_another(backend, form, poison):
    """The middle sequence is poisoned; the others are bit for bit what they were."""
    case = make_case(form, q_lengths=(18, 18, 18), k_lengths=(21, 21, 21), heads=2, activation="gelu", causal=True)
    dirty = run(poison_sequence(case, 1, poison), backend)
    assert_neighbours_untouched(case, 1, run(case, backend), dirty)
    assert not all(x.isfinite().all() for x in dirty), "the poison was not seen at all"


class TestStrides:
    """Inputs need not be contiguous, and neither does the gradient that comes back."""

    def check(self, case: Case, backend: str, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None = None) -> None:
        d_out = case.d_out if d_out is None else d_out
        strided = Case(case.form, case.problem, case.inputs._replace(q=q, k=k, v=v), d_out, case.keywords)
        results = check(strided, backend)
        assert results.out.is_contiguous()

    def test_slices_of_one_projection(self, backend):
        case = make_case(q_lengths=(9, 20), heads=2, head_dim=16)
        fused = torch.randn(29, 2, 48)
        q, k, v = fused.split(16, dim=-1)
        assert not q.is_contiguous()
        self.check(case, backend, q, k, v)

    def test_slices_of_one_projection_by_heads(self, backend):
        case = make_case(q_lengths=(9, 20), heads=4, kv_heads=2, head_dim=16)
        fused = torch.randn(29, 8, 16)
        self.check(case, backend, fused[:, :4], fused[:, 4:6], fused[:, 6:])

    def test_gradients_reach_the_fused_projection(self, backend):
        offsets = offsets_of((9, 20))
        weight = torch.randn(29, 2, 48, requires_grad=True)
        with poisoned_memory():
            out = gdpa.attention_varlen(*weight.split(16, dim=-1), offsets, offsets, backend=backend)
            (grad,) = torch.autograd.grad(out.sum(), weight)
        case = make_case(q_lengths=(9, 20), heads=2, head_dim=16)
        q, k, v = weight.detach().split(16, dim=-1)
        case = Case("packed", case.problem, case.inputs._replace(q=q, k=k, v=v), torch.ones(29, 2, 16), case.keywords)
        numerics.check(case.problem, case.inputs, case.d_out, Results(out.detach(), *grad.split(16, dim=-1)))

    @pytest.mark.parametrize("form", FORMS)
    def test_heads_before_rows(self, backend, form):
        """(B, H, S, D) memory, as many projections leave it."""
        case = make_case(form, q_lengths=(9, 9), k_lengths=(11, 11), heads=2, head_dim=16)
        q, k, v = (x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in case.inputs[:3])
        assert not q.is_contiguous()
        self.check(case, backend, q, k, v)

    @pytest.mark.parametrize("form", FORMS)
    def test_features_that_are_not_adjacent(self, backend, form):
        case = make_case(form, q_lengths=(9, 9), k_lengths=(11, 11), heads=2, head_dim=16)
        q, k, v = (x.transpose(-3, -1).contiguous().transpose(-3, -1) for x in case.inputs[:3])
        assert q.stride(-1) != 1
        self.check(case, backend, q, k, v, case.d_out.transpose(-3, -1).contiguous().transpose(-3, -1))

    def test_expanded_inputs(self, backend):
        """Stride 0: one key row and one head's values repeated; the gradients are of the expanded tensors."""
        case = make_case(q_lengths=(9, 20), heads=2, head_dim=16)
        k = torch.randn(1, 2, 16).expand(29, 2, 16)
        v = torch.randn(29, 1, 16).expand(29, 2, 16)
        self.check(case, backend, case.inputs.q, k, v)

    def test_expanded_upstream_gradient(self, backend):
        """What out.sum().backward() sends: one number with stride 0 everywhere."""
        case = make_case(q_lengths=(9, 20), heads=2, head_dim=16)
        self.check(case, backend, *case.inputs[:3], torch.ones(()).expand(case.d_out.shape))

    def test_every_other_row(self, backend):
        case = make_case(q_lengths=(9, 20), heads=2, head_dim=16)
        self.check(case, backend, *(torch.randn(58, 2, 16)[::2] for _ in range(3)))

    def test_strided_offsets_and_out_scale(self, backend):
        case = make_case(q_lengths=(9, 20), heads=2, head_dim=16, out_scale="per-sequence")
        offsets = torch.stack([case.inputs.cu_seqlens_q, torch.full((3,), 99, dtype=torch.int32)], dim=1)[:, 0]
        factors = torch.stack([case.inputs.out_scale, torch.full((2,), 99.0)], dim=1)[:, 0]
        assert not offsets.is_contiguous()
        assert not factors.is_contiguous()
        check(case.with_inputs(cu_seqlens_q=offsets, cu_seqlens_k=offsets, out_scale=factors), backend)


@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_out_scale_of_any_float_dtype_is_used_in_fp32(backend, factors):
    case = make_case(**JAGGED, dtype=torch.float16, out_scale="per-sequence")
    check(case.with_inputs(out_scale=case.inputs.out_scale.to(factors)), backend)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("float64_backend", ["reference", "cpu"])
def test_float64_end_to_end(form, float64_backend):
    case = make_case(form, **JAGGED, dtype=torch.float64, heads=4, kv_heads=2, out_scale="per-sequence")
    check_float64(case, float64_backend)


def test_the_default_backend_of_cpu_tensors_is_cpu():
    case = make_case(**JAGGED)
    assert case.explain().backend == "cpu"
    assert torch.equal(case.call(*case.inputs[:3]), case.call(*case.inputs[:3], "cpu"))


def test_scale_defaults_to_one_over_root_d(backend):
    case = make_case(**JAGGED, head_dim=64)
    explicit = make_case(**JAGGED, head_dim=64, scale=0.125)
    assert torch.equal(case.call(*case.inputs[:3], backend), explicit.call(*case.inputs[:3], backend))


@pytest.mark.parametrize("deterministic", [None, False, True])
def test_repeats_are_bitwise_equal(backend, deterministic):
    case = make_case(**JAGGED, heads=4, kv_heads=2, dtype=torch.bfloat16)
    case.keywords["deterministic"] = deterministic
    first, second = run(case, backend), run(case, backend)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_batch_gives_what_its_sequences_give_alone(backend):
    case = make_case(**JAGGED, causal=True)
    q, k, v, cu_q, cu_k, _ = case.inputs
    out = case.call(q, k, v, backend)
    for b in range(case.problem.batch):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if rows_q.start == rows_q.stop:
            continue
        alone = gdpa.attention(q[rows_q][None], k[rows_k][None], v[rows_k][None], causal=True, backend=backend)[0]
        torch.testing.assert_close(out[rows_q], alone, rtol=1e-5, atol=1e-6)


def test_the_dense_form_equals_the_packed_form_of_equal_lengths(backend):
    case = make_case("dense", q_lengths=(12,) * 3, k_lengths=(15,) * 3, window_size=(4, 2))
    q, k, v = case.inputs[:3]
    packed = gdpa.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)),
        offsets_of((12,) * 3),
        offsets_of((15,) * 3),
        window_size=(4, 2),
        backend=backend,
    )
    torch.testing.assert_close(case.call(q, k, v, backend).flatten(0, 1), packed, rtol=1e-5, atol=1e-6)


def test_a_half_power_of_an_infinite_score_is_torchs(backend):
    q = v = torch.ones(1, 1, 1, 8)
    for score in (-math.inf, math.inf, -8.0):
        k = torch.full((1, 1, 1, 8), score / 8)
        out = gdpa.attention(q, k, v, activation=lambda s: s**1.5, scale=1.0, backend=backend)
        torch.testing.assert_close(out, (torch.full((), score) ** 1.5).expand_as(out), equal_nan=True)


def test_a_shared_query_equals_its_copies_and_its_gradient_is_their_sum(backend):
    case = make_case("shared-query", q_lengths=(6,), k_lengths=(15, 0, 20))
    q, k, v = leaves(case.inputs)
    copies = q.detach().expand(3, 6, 2, 16).flatten(0, 1).clone().requires_grad_()
    out = case.call(q, k, v, backend)
    (dq,) = torch.autograd.grad(out, q, case.d_out)
    packed = gdpa.attention_varlen(copies, k, v, offsets_of((6, 6, 6)), case.inputs.cu_seqlens_k, backend=backend)
    (d_copies,) = torch.autograd.grad(packed, copies, case.d_out.flatten(0, 1))
    torch.testing.assert_close(out.flatten(0, 1), packed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dq, d_copies.unflatten(0, (3, 6)).sum(0), rtol=1e-5, atol=1e-5)


class TestNested:
    """Jagged nested tensors in, q's structure out."""

    LENGTHS = (5, 1, 12)

    def nested(self, *lengths: int, heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.randn(sum(lengths), heads, dim, dtype=dtype)
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets_of(lengths, torch.int64))

    def like(self, other: Tensor, heads: int = 2, dim: int = 16) -> Tensor:
        values = torch.randn(other.values().shape[0], heads, dim)
        return torch.nested.nested_tensor_from_jagged(values, offsets=other.offsets())

    def test_equals_the_packed_call_and_keeps_the_structure(self, backend):
        q = self.nested(*self.LENGTHS, heads=4)
        k = self.nested(3, 7, 2)
        v = self.like(k, dim=24)
        out = gdpa.attention(q, k, v, activation="silu", causal=True, backend=backend)
        packed = gdpa.attention_varlen(
            q.values(),
            k.values(),
            v.values(),
            q.offsets(),
            k.offsets(),
            activation="silu",
            causal=True,
            backend=backend,
        )
        assert out.is_nested
        assert out.layout == torch.jagged
        assert out.shape[1] == q.shape[1], "the output has q's own ragged dimension, so that out + q works"
        assert out.shape[2:] == (4, 24)
        assert torch.equal(out.values(), packed)

    def test_the_result_joins_arithmetic_with_q(self):
        q = self.nested(*self.LENGTHS)
        out = gdpa.attention(q, q, q)
        assert torch.equal((out + q).values(), out.values() + q.values())

    def test_an_empty_sequence(self, backend):
        q = self.nested(5, 0, 3)
        k = self.nested(2, 4, 0)
        out = gdpa.attention(q, k, self.like(k), activation="sigmoid", backend=backend)
        assert out.offsets().tolist() == [0, 5, 5, 8]
        assert out.values()[:5].all()
        assert not out.values()[5:].any()

    def test_gradients_flow_to_nested_inputs(self, backend):
        q, k = self.nested(*self.LENGTHS), self.nested(3, 7, 2)
        v = self.like(k)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        gdpa.attention(q, k, v, activation="tanh", backend=backend).values().sum().backward()
        case = make_case(q_lengths=self.LENGTHS, k_lengths=(3, 7, 2), activation="tanh")
        packed = (x.detach().values() for x in (q, k, v))
        case = case.with_inputs(**dict(zip("qkv", packed, strict=True)))
        d_out = torch.ones_like(case.d_out)
        out = case.call(*case.inputs[:3], backend)
        grads = [x.grad for x in (q, k, v)]
        assert all(grad.is_nested for grad in grads)
        numerics.check(case.problem, case.inputs, d_out, Results(out, *(grad.values() for grad in grads)))

    def test_dense_keys_with_nested_queries(self, backend):
        q, k, v = self.nested(*self.LENGTHS), torch.randn(3, 6, 2, 16), torch.randn(3, 6, 2, 8)
        out = gdpa.attention(q, k, v, backend=backend)
        expected = gdpa.attention_varlen(q.values(), k, v, q.offsets(), None, backend=backend)
        assert out.is_nested
        assert torch.equal(out.values(), expected)

    def test_dense_queries_with_nested_keys(self, backend):
        q, k = torch.randn(3, 6, 2, 16), self.nested(*self.LENGTHS)
        v = self.like(k)
        out = gdpa.attention(q, k, v, causal=True, backend=backend)
        offsets = offsets_of((6, 6, 6))
        expected = gdpa.attention_varlen(
            q.flatten(0, 1), k.values(), v.values(), offsets, k.offsets(), causal=True, backend=backend
        )
        assert not out.is_nested
        assert out.shape == (3, 6, 2, 16)
        torch.testing.assert_close(out.flatten(0, 1), expected, rtol=1e-5, atol=1e-6)

    def test_built_from_a_list_of_tensors(self):
        parts = [torch.randn(n, 2, 16) for n in self.LENGTHS]
        q = torch.nested.nested_tensor(parts, layout=torch.jagged)
        out = gdpa.attention(q, q, q, activation="relu")
        for part, piece in zip(parts, out.unbind(), strict=True):
            alone = gdpa.attention(part[None], part[None], part[None], activation="relu")[0]
            torch.testing.assert_close(piece, alone, rtol=1e-5, atol=1e-6)

    def test_holes_are_refused(self):
        values, offsets = torch.randn(18, 2, 16), offsets_of(self.LENGTHS, torch.int64)
        holed = torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=torch.tensor([4, 1, 9]))
        with pytest.raises(gdpa.GdpaError, match="q: expected a contiguous nested tensor, got one with holes"):
            gdpa.attention(holed, holed, holed)

    def test_a_transposed_one_is_refused(self):
        q = self.nested(*self.LENGTHS)
        with pytest.raises(gdpa.GdpaError, match="k: expected the jagged dimension to be 1, got 2"):
            gdpa.attention(q, q.transpose(1, 2), q)

    def test_the_strided_layout_is_refused(self):
        q = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in self.LENGTHS], layout=torch.strided)
        with pytest.raises(gdpa.GdpaError, match=r"q: expected a nested tensor of layout torch\.jagged"):
            gdpa.attention(q, q, q)

    def test_values_of_another_structure_are_refused(self):
        k = self.nested(*self.LENGTHS)
        with pytest.raises(gdpa.GdpaError, match="v: expected the lengths"):
            gdpa.attention(k, k, self.nested(1, 12, 5))

    def test_nested_keys_with_dense_values_are_refused(self):
        k = self.nested(*self.LENGTHS)
        with pytest.raises(gdpa.GdpaError, match="v: expected a jagged nested tensor as k is"):
            gdpa.attention(k, k, torch.randn(3, 6, 2, 16))

    def test_another_rank_is_refused(self):
        flat = torch.nested.nested_tensor_from_jagged(torch.randn(18, 16), offsets=offsets_of(self.LENGTHS, torch.int64))
        with pytest.raises(gdpa.GdpaError, match=r"q: expected a nested tensor \(B, \*, H, D\), got 3 dimensions"):
            gdpa.attention(flat, flat, flat)

    def test_the_varlen_function_and_explain_refuse_nested_tensors(self):
        q, offsets = self.nested(*self.LENGTHS), offsets_of(self.LENGTHS)
        with pytest.raises(gdpa.GdpaError, match=r"^q: .*nested"):
            gdpa.attention_varlen(q, q, q, offsets, offsets)
        with pytest.raises(gdpa.GdpaError, match=r"^q: .*nested"):
            gdpa.explain(q, q, q)


class TestJaggedHelpers:
    def test_offsets_from_lengths(self):
        assert gdpa.offsets_from_lengths(torch.tensor([3, 0, 5])).tolist() == [0, 3, 3, 8]
        assert gdpa.offsets_from_lengths(torch.tensor([3, 0, 5])).dtype == torch.int32
        assert gdpa.offsets_from_lengths(torch.tensor([3], dtype=torch.int32), torch.int64).dtype == torch.int64
        assert gdpa.offsets_from_lengths(torch.tensor([], dtype=torch.int64)).tolist() == [0]

    def test_offsets_from_many_small_lengths_do_not_overflow_their_dtype(self):
        lengths = torch.full((10,), 100, dtype=torch.uint8)
        assert gdpa.offsets_from_lengths(lengths)[-1] == 1000

    def test_lengths_that_are_negative_or_more_than_their_offsets_hold_are_refused(self):
        with pytest.raises(gdpa.GdpaError, match=r"^lengths: expected none below 0, got -1"):
            gdpa.offsets_from_lengths(torch.tensor([3, -1]))
        long = torch.tensor([2**31, 5])
        with pytest.raises(
            gdpa.GdpaError, match=rf"^dtype: expected one that holds the sum of lengths, {2**31 + 5}, got torch.int32"
        ):
            gdpa.offsets_from_lengths(long)
        assert gdpa.offsets_from_lengths(long, torch.int64).tolist() == [0, 2**31, 2**31 + 5]
        with pytest.raises(gdpa.GdpaError, match=rf"^lengths: expected a sum of at most 2\^63 - 1, got {2**64}"):
            gdpa.offsets_from_lengths(torch.full((4,), 2**62))  # 0 in the arithmetic of int64

    @pytest.mark.parametrize(
        "wrong",
        [
            [3, 4],
            torch.tensor([1.0]),
            torch.tensor(3),
            torch.tensor([True]),
            torch.tensor([1], dtype=torch.uint16),
            torch.tensor([1]).to_sparse(),
            torch.nested.nested_tensor([torch.tensor([1])], layout=torch.jagged),
        ],
        ids=["list", "float", "number", "bool", "uint16", "sparse", "nested"],
    )
    def test_wrong_lengths_are_refused(self, wrong):
        with pytest.raises(gdpa.GdpaError, match=r"^lengths: expected an integer tensor"):
            gdpa.offsets_from_lengths(wrong)

    def test_a_wrong_offset_dtype_is_refused(self):
        with pytest.raises(gdpa.GdpaError, match=r"^dtype: .*int16"):
            gdpa.offsets_from_lengths(torch.tensor([1]), torch.int16)

    def test_pack_takes_the_valid_rows_in_order(self):
        padded = torch.arange(15.0).view(3, 5)
        packed, offsets = gdpa.pack(padded, torch.tensor([2, 0, 5]))
        assert packed.tolist() == [0, 1, 10, 11, 12, 13, 14]
        assert offsets.tolist() == [0, 2, 2, 7]

    def test_unpack_undoes_pack_and_fills(self):
        padded, lengths = torch.randn(3, 5, 2, 4), torch.tensor([2, 0, 5])
        packed, offsets = gdpa.pack(padded, lengths)
        restored = gdpa.unpack(packed, offsets, 5, fill=-7.0)
        valid = torch.arange(5) < lengths[:, None]
        assert torch.equal(restored[valid], padded[valid])
        assert (restored[~valid] == -7.0).all()

    def test_unpack_cuts_at_max_len_and_extends_to_it(self):
        packed = torch.arange(7.0)
        offsets = torch.tensor([0, 2, 7])
        assert gdpa.unpack(packed, offsets, 3).tolist() == [[0, 1, 0], [2, 3, 4]]
        assert gdpa.unpack(packed, offsets, 0).shape == (2, 0)
        assert gdpa.unpack(packed[:0], torch.tensor([0, 0]), 2, fill=1.0).tolist() == [[1, 1]]

    def test_gradients_flow_both_ways(self):
        padded = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
        lengths = torch.tensor([1, 4])
        packed, offsets = gdpa.pack(padded, lengths)
        torch.autograd.gradcheck(lambda x: gdpa.pack(x, lengths)[0], padded)
        torch.autograd.gradcheck(lambda x: gdpa.unpack(x, offsets, 3), packed.detach().requires_grad_())
        none = torch.randn(0, 3, requires_grad=True)
        gdpa.unpack(none, torch.tensor([0, 0, 0]), 2).sum().backward()
        assert none.grad is not None and none.grad.shape == (0, 3)

    def test_padding_that_is_nan_stays_out(self):
        padded = torch.full((2, 3, 1), float("nan"))
        padded[0, :2] = padded[1, :1] = 1.0
        packed, _ = gdpa.pack(padded, torch.tensor([2, 1]))
        assert packed.isfinite().all()

    @pytest.mark.parametrize("lengths", [torch.tensor([6, 1, 1]), torch.tensor([-1, 1, 1])], ids=["too long", "negative"])
    def test_pack_refuses_lengths_outside_the_padding(self, lengths):
        with pytest.raises(gdpa.GdpaError, match=r"^lengths: expected values from 0 to 5"):
            gdpa.pack(torch.randn(3, 5, 2), lengths)

    def test_pack_refuses_another_batch_and_rank(self):
        with pytest.raises(gdpa.GdpaError, match=r"^lengths: expected shape \(3,\)"):
            gdpa.pack(torch.randn(3, 5, 2), torch.tensor([1, 2]))
        nested = torch.nested.nested_tensor([torch.ones(2, 2)], layout=torch.jagged)
        for padded in (torch.randn(3), torch.randn(3, 5).to_sparse(), nested):
            with pytest.raises(gdpa.GdpaError, match=r"^padded: "):
                gdpa.pack(padded, torch.tensor([1, 2, 3]))

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            (([1.0], torch.tensor([0, 1]), 2), "packed"),
            ((torch.randn(4), [0, 4], 2), "offsets"),
            ((torch.randn(4), torch.tensor([0.0, 4.0]), 2), "offsets"),
            ((torch.randn(4), torch.tensor([0, 4]), -1), "max_len"),
            ((torch.randn(4), torch.tensor([0, 4]), 2.0), "max_len"),
            ((torch.ones(4, dtype=torch.int64), torch.tensor([0, 4]), 5, 0.5), "fill"),
            ((torch.ones(4, dtype=torch.int64), torch.tensor([0, 4]), 5, float("inf")), "fill"),
            ((torch.ones(4, dtype=torch.uint8), torch.tensor([0, 4]), 5, -1), "fill"),
            ((torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]), 5, 2), "fill"),
        ],
        ids=[
            *("packed a list", "offsets a list", "offsets of floats", "negative max_len", "max_len a float"),
            *("half in integers", "infinity in integers", "-1 in bytes", "2 in bools"),
        ],
    )
    def test_unpack_refuses_wrong_arguments(self, arguments, name):
        with pytest.raises(gdpa.GdpaError, match=rf"^{name}: expected"):
            gdpa.unpack(*arguments)


@pytest.mark.parametrize("backend", backend_params())
def test_a_small_out_scale_keeps_half_precision_gradients_finite(backend):
    """1 / length under a loss scaler: dS without out_scale would pass fp16's range."""
    case = make_case(q_lengths=(70,), head_dim=64, dtype=torch.float16, out_scale=1 / 256)
    results = run(replace(case, d_out=case.d_out * 4096), backend)
    assert all(torch.isfinite(x).all() for x in results)


@pytest.mark.parametrize("backend", backend_params())
@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (2**31 - 1, 0), (2**40, 3)], ids=str)
def test_a_window_wider_than_any_tensor_is_unbounded(backend, window):
    check(make_case(q_lengths=(40, 3), k_lengths=(33, 50), window_size=window), backend)


def test_jagged_tensors_built_apart_with_equal_lengths():
    q, k, v = (torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged) for _ in range(3))
    out = gdpa.attention(q, k, v)
    expected = gdpa.attention_varlen(q.values(), k.values(), v.values(), q.offsets(), k.offsets())
    assert torch.equal(out.values(), expected)
    other = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (5, 3)], layout=torch.jagged)
    with pytest.raises(gdpa.GdpaError, match="v: expected the lengths"):
        gdpa.attention(q, k, other)


@pytest.mark.parametrize("form", ["packed", "dense", "dense-key", "shared-query"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("any_backend", ["reference", "cpu"])
def test_an_output_can_be_worked_on_in_place(any_backend, form, dtype):
    case = make_case(form, q_lengths=(5, 5), k_lengths=(7, 7), heads=2, head_dim=8, dtype=dtype)
    q, k, v = (x.clone().requires_grad_() for x in case.inputs[:3])
    out = case.call(q, k, v, backend=any_backend)
    expected = torch.autograd.grad(2 * out.sum(), q)[0]
    out = case.call(q, k, v, backend=any_backend)
    out *= 2
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], expected)


def test_explain_takes_tensors_without_data():
    x = torch.empty(2, 5, 2, 8, device="meta")
    assert gdpa.explain(x, x, x).backend == "reference"


def test_unpack_keeps_the_dtype():
    ids = torch.tensor([2**40 + 1, 5, 2**24 + 1])
    assert gdpa.unpack(ids, torch.tensor([0, 2, 3]), 2).tolist() == [[2**40 + 1, 5], [2**24 + 1, 0]]

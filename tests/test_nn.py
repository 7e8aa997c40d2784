"""gdpa.nn: each module against an unfused, padded float64 computation written out here, and what torch makes of the modules."""

from __future__ import annotations

import copy
import doctest
import importlib
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from helpers import clean_env, needs_compiler, offsets_of, spy
from torch import Tensor, nn

import gdpa
from gdpa import dispatch
from gdpa.nn import HSP, PFFN, PMA, RotaryTemporal, SelfAttention, SumKronLinear

WIDTH, HEADS, HEAD_DIM = 12, 3, 4
LENGTHS = (5, 0, 9, 1, 0)
ROWS, BATCH, LONGEST = sum(LENGTHS), len(LENGTHS), max(LENGTHS)
HOUR = 3600.0


# The expected values: padded to (B, LONGEST, ...), one einsum per product, a mask after the activation.


def pad(values: Tensor) -> Tensor:
    """(T, ...) -> (B, LONGEST, ...), by hand."""
    return torch.stack(
        [
            torch.cat((rows, rows.new_zeros(LONGEST - len(rows), *rows.shape[1:])))
            for rows in values[: sum(LENGTHS)].split(list(LENGTHS))
        ]
    )


def unpad(padded: Tensor) -> Tensor:
    return torch.cat([rows[:length] for rows, length in zip(padded, LENGTHS, strict=True)])


def present() -> Tensor:
    """(B, LONGEST): which padded rows are events."""
    return torch.tensor([[position < length for position in range(LONGEST)] for length in LENGTHS])


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, HEAD_DIM)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, f: Callable[[Tensor], Tensor], scale: float) -> Tensor:
    """q (B, S, H, D), k and v (B, K, H, D), mask broadcast to (B, H, S, K) -> (B, S, H * D)."""
    s = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    p = torch.where(mask, f(s), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2)


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def mean_factors() -> Tensor:
    return torch.tensor([1 / max(length, 1) for length in LENGTHS], dtype=torch.float64)[:, None, None]


def expected_self_attention(module: SelfAttention, x: Tensor, dt: Tensor | None = None) -> Tensor:
    weight, bias = module.qkv.weight, module.qkv.bias
    inner, inner_kv = module.heads * HEAD_DIM, module.kv_heads * HEAD_DIM
    projected = []
    for first, last in ((0, inner), (inner, inner + inner_kv), (inner + inner_kv, inner + 2 * inner_kv)):
        rows = x @ weight[first:last].T
        projected.append(heads_of(pad(rows if bias is None else rows + bias[first:last]), (last - first) // HEAD_DIM))
    q, k, v = projected
    if module.rotary is not None:
        q, k = (expected_rotary(module.rotary, y, None if dt is None else pad(dt)) for y in (q, k))
    group = module.heads // module.kv_heads
    k, v = (y.repeat_interleave(group, dim=2) for y in (k, v))
    mask = present()[:, None, None, :].expand(-1, 1, LONGEST, -1)
    if module.window_size == (-1, 0):
        mask = mask & torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
    scale = 1 / math.sqrt(HEAD_DIM) if module.scale is None else module.scale
    out = padded_attention(q, k, v, mask, torch.nn.functional.silu, scale)
    if module.out_scale == "mean":
        out = out * mean_factors()
    out = unpad(out) @ module.out.weight.T
    return out if module.out.bias is None else out + module.out.bias


def expected_rotary(rotary: RotaryTemporal, x: Tensor, dt: Tensor | None) -> Tensor:
    """Each pair as a complex number times e^(i angle); x (B, LONGEST, heads, D), dt (B, LONGEST)."""
    by_position, by_time, half = rotary.position_pairs, rotary.time_pairs, rotary.head_dim // 2
    columns = []
    for j in range(half):
        if j < by_position:
            angle = torch.arange(LONGEST, dtype=x.dtype).expand(len(LENGTHS), -1) * rotary.base ** (-j / by_position)
        else:
            assert dt is not None
            angle = torch.log(1 + dt / rotary.t_scale) * rotary.time_base ** (-(j - by_position) / by_time)
        pair = torch.complex(x[..., j], x[..., j + half])
        columns.append(pair * torch.polar(torch.ones_like(angle), angle)[..., None])
    turned = torch.stack(columns, dim=-1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def expected_pooled(module: PMA | HSP, queries: Tensor, x: Tensor) -> Tensor:
    inner = module.heads * HEAD_DIM
    k = heads_of(pad(x @ module.kv.weight[:inner].T + module.kv.bias[:inner]))
    v = heads_of(pad(x @ module.kv.weight[inner:].T + module.kv.bias[inner:]))
    q = heads_of(queries).expand(len(LENGTHS), -1, -1, -1)
    f = torch.nn.functional.silu
    out = padded_attention(q, k, v, present()[:, None, None, :], f, 1 / math.sqrt(HEAD_DIM))
    return out * mean_factors() if module.out_scale == "mean" else out


def expected_pma(module: PMA, x: Tensor) -> Tensor:
    return expected_pooled(module, module.seeds, x) @ module.out.weight.T + module.out.bias


def expected_kron(module: SumKronLinear, z: Tensor) -> Tensor:
    total = z.new_zeros(*z.shape[:-2], module.out_tokens, module.out_width)
    for i in range(module.terms):
        a = module.token_weight[:, i].T
        total = total + a.T @ z @ module.feature_weight[i]
    return total


def expected_hsp(module: HSP, x: Tensor) -> Tensor:
    queries = layer_norm(module.seeds) @ module.query.weight.T + module.query.bias
    return expected_kron(module.condense, expected_pooled(module, queries, x))


def expected_pffn(module: PFFN, x: Tensor, context: Tensor) -> Tensor:
    """Hidden unit n * u + j of the K and V comes from token n, and is row j of what it yields."""
    units = module.hidden // module.context_tokens
    tokens = context.reshape(len(LENGTHS), module.context_tokens, module.context_width)
    k, v = [], []
    for n in range(module.context_tokens):
        for j in range(units):
            for found, part in ((k, 2 * j), (v, 2 * j + 1)):
                rows = slice(part * WIDTH, (part + 1) * WIDTH)
                found.append(tokens[:, n] @ module.weights.weight[rows].T + module.weights.bias[rows])
    k, v = (heads_of(torch.stack(found, dim=1)) for found in (k, v))
    y = layer_norm(x)
    scale = 1 / math.sqrt(HEAD_DIM) if module.scale is None else module.scale
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    attended = unpad(padded_attention(heads_of(pad(y)), k, v, everything, torch.nn.functional.silu, scale))
    factor = 1 / module.hidden if module.out_scale == "mean" else (module.out_scale or 1.0)
    return rms_norm(factor * attended + y) + x


@dataclass(frozen=True)
class Block:
    """A module, the tensors its forward takes beside x and offsets, and what it should return."""

    make: Callable[..., nn.Module]
    expected: Callable[..., Tensor]
    extra: tuple[tuple[str, tuple[int, ...]], ...] = ()
    pooled: bool = False

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        found = {}
        for name, shape in self.extra:
            if name == "dt":
                found[name] = torch.rand(shape, generator=generator, dtype=torch.float64) * 48 * HOUR
            else:
                found[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return found


def rotary_attention(**keywords: Any) -> SelfAttention:
    return SelfAttention(WIDTH, HEADS, activation="silu", rotary=RotaryTemporal(HEAD_DIM), **keywords)


CONTEXT = ("context", (BATCH, 7))
BLOCKS = {
    "SelfAttention": Block(lambda **k: SelfAttention(WIDTH, HEADS, activation="silu", **k), expected_self_attention),
    "SelfAttention-causal-mean": Block(
        lambda **k: SelfAttention(WIDTH, HEADS, activation="silu", causal=True, out_scale="mean", scale=0.3, bias=False, **k),
        expected_self_attention,
    ),
    "SelfAttention-grouped-wide": Block(
        lambda **k: SelfAttention(10, 6, head_dim=HEAD_DIM, kv_heads=2, activation="silu", **k), expected_self_attention
    ),
    "SelfAttention-rotary": Block(rotary_attention, expected_self_attention, (("dt", (ROWS,)),)),
    "PMA": Block(lambda **k: PMA(WIDTH, HEADS, seeds=2, activation="silu", **k), expected_pma, pooled=True),
    "PMA-mean": Block(lambda **k: PMA(WIDTH, HEADS, seeds=4, activation="silu", out_scale="mean", **k), expected_pma, pooled=True),
    "HSP": Block(lambda **k: HSP(WIDTH, HEADS, seeds=6, tokens=2, terms=3, activation="silu", **k), expected_hsp, pooled=True),
    "PFFN": Block(lambda **k: PFFN(WIDTH, HEADS, hidden=6, context_width=7, activation="silu", **k), expected_pffn, (CONTEXT,)),
    "PFFN-tokens-scaled": Block(
        lambda **k: PFFN(
            WIDTH, HEADS, hidden=6, context_width=7, context_tokens=3, activation="silu", scale=1 / 9, out_scale="mean", **k
        ),
        expected_pffn,
        (("context", (BATCH, 3, 7)),),
    ),
}
EVERY = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
# One of each class, for what does not depend on the options.
ONE_EACH = {name: BLOCKS[name] for name in ("SelfAttention-rotary", "PMA", "HSP", "PFFN")}
EACH = pytest.mark.parametrize("block", ONE_EACH.values(), ids=ONE_EACH.keys())


def build(block: Block, **keywords: Any) -> nn.Module:
    torch.manual_seed(0)
    return block.make(**keywords)


def rows_for(module: nn.Module, dtype: torch.dtype = torch.float64, rows: int = ROWS, seed: int = 2) -> Tensor:
    return torch.randn(rows, module.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of a fixed random projection of the output, so that no gradient is a plain sum."""
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad(out, inputs, d_out))


class TestAgainstThePaddedComputation:
    @EVERY
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_values_and_gradients(self, block, backend, monkeypatch):
        module = build(block, backend=backend, dtype=torch.float64)
        x, extra = rows_for(module).requires_grad_(), block.tensors()
        if "context" in extra:
            extra["context"].requires_grad_()
        inputs = [x, *(tensor for tensor in extra.values() if tensor.requires_grad), *module.parameters()]
        ran = spy(monkeypatch, dispatch.load(backend), "forward")
        out = module(x, offsets_of(LENGTHS), **extra)
        assert len(ran) == 1
        right = block.expected(module, x, **extra)
        torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-11)
        names = ["x", *(name for name, tensor in extra.items() if tensor.requires_grad), *dict(module.named_parameters())]
        for name, found, wanted in zip(names, gradients(out, inputs), gradients(right, inputs), strict=True):
            assert wanted.abs().max() > 0, f"{name}: the expected gradient is zero, which shows nothing"
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")

    @EVERY
    def test_float32_is_close(self, block):
        module = build(block)
        x, extra = rows_for(module, torch.float32), block.tensors(torch.float32)
        exact = build(block, dtype=torch.float64)
        exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
        right = block.expected(exact, x.double(), **{name: tensor.double() for name, tensor in extra.items()})
        out = module(x, offsets_of(LENGTHS), **extra)
        assert out.dtype == torch.float32
        assert (out - right).abs().max() < 2e-5 * right.abs().max()

    def test_sum_kron_linear_with_other_widths_and_leading_dimensions(self):
        torch.manual_seed(0)
        module = SumKronLinear(6, 2, 5, 4, terms=3, dtype=torch.float64)
        z = torch.randn(2, 3, 6, 5, dtype=torch.float64, requires_grad=True)
        out, right = module(z), expected_kron(module, z)
        assert out.shape == (2, 3, 2, 4)
        torch.testing.assert_close(out, right)
        inputs = [z, *module.parameters()]
        torch.testing.assert_close(gradients(out, inputs), gradients(right, inputs))
        assert module(z[:0]).shape == (0, 3, 2, 4)

    def test_sum_kron_linear_keeps_the_variance_at_the_start(self):
        torch.manual_seed(0)
        out = SumKronLinear(64, 16, 48, terms=4)(torch.randn(32, 64, 48))
        assert 0.8 < out.std() < 1.25


class TestRotaryTemporal:
    @pytest.mark.parametrize("time_pairs", [None, 0, 1, 4], ids=str)
    def test_values_and_gradients(self, time_pairs):
        rotary = RotaryTemporal(8, time_pairs=time_pairs, t_scale=60.0, base=500.0, time_base=10.0)
        assert rotary.time_pairs == (2 if time_pairs is None else time_pairs)
        x = torch.randn(ROWS, 3, 8, dtype=torch.float64, requires_grad=True)
        dt = None if time_pairs == 0 else torch.rand(ROWS, dtype=torch.float64) * 1e6
        out = rotary(x, offsets_of(LENGTHS), dt)
        right = unpad(expected_rotary(rotary, pad(x), None if dt is None else pad(dt)))
        torch.testing.assert_close(out, right, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(gradients(out, [x]), gradients(right, [x]))

    def test_scores_depend_on_differences_alone(self):
        """Shifting positions leaves q @ k as it was; so does scaling times far above t_scale."""
        rotary = RotaryTemporal(8, t_scale=1.0)
        q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

        def score(q_place, k_place, q_age, k_age):
            rows = max(q_place, k_place) + 1
            ages = torch.zeros(rows, dtype=torch.float64)
            ages[q_place], ages[k_place] = q_age, k_age
            x = torch.zeros(rows, 2, 8, dtype=torch.float64)
            x[q_place, 0], x[k_place, 1] = q, k
            turned = rotary(x, torch.tensor([0, rows]), ages)
            return turned[q_place, 0] @ turned[k_place, 1]

        torch.testing.assert_close(score(5, 2, 1e9, 3e9), score(9, 6, 1e9, 3e9), rtol=1e-9, atol=0)
        torch.testing.assert_close(score(5, 2, 1e9, 3e9), score(5, 2, 1e11, 3e11), rtol=1e-6, atol=0)
        assert abs(score(5, 2, 1e9, 3e9) - score(5, 2, 1e9, 9e9)) > 1e-4
        assert abs(score(5, 2, 1e9, 3e9) - score(5, 3, 1e9, 3e9)) > 1e-4

    def test_integer_ages_are_taken_and_an_event_after_the_request_counts_as_now(self):
        rotary = RotaryTemporal(8)
        x, offsets = torch.randn(3, 2, 8), torch.tensor([0, 3])
        late = rotary(x, offsets, torch.tensor([-5, 0, 7200]))
        assert torch.equal(late, rotary(x, offsets, torch.tensor([0.0, 0.0, 7200.0])))

    def test_bf16_angles_are_not_rounded(self):
        """Position 1000 in bf16 would be off by up to 2 radians."""
        rotary = RotaryTemporal(8, time_pairs=0).bfloat16()
        x, offsets = torch.randn(1002, 1, 8).bfloat16(), torch.tensor([0, 1002])
        exact = rotary(x.double(), offsets)
        out = rotary(x, offsets)
        assert out.dtype == torch.bfloat16
        assert (out - exact).abs().max() <= 2**-8 * exact.abs().max()

    def test_rows_that_no_sequence_covers_are_harmless(self):
        rotary, x = RotaryTemporal(8, time_pairs=0), torch.randn(7, 1, 8)
        assert torch.equal(rotary(x, torch.tensor([0, 4]))[:4], rotary(x[:4], torch.tensor([0, 4])))
        assert rotary(x, torch.tensor([0])).isfinite().all()

    def test_nested(self):
        rotary, x, dt = RotaryTemporal(8), torch.randn(ROWS, 3, 8), torch.rand(ROWS) * 1e5
        offsets = offsets_of(LENGTHS, torch.int64)
        nested, nested_dt = (torch.nested.nested_tensor_from_jagged(y, offsets=offsets) for y in (x, dt))
        out = rotary(nested, dt=nested_dt)
        assert out.is_nested and torch.equal(out.values(), rotary(x, offsets, dt))


class TestKindsOfInput:
    @EACH
    def test_nested_in_nested_out(self, block):
        module = build(block)
        offsets = offsets_of(LENGTHS, torch.int64)
        values, extra = rows_for(module, torch.float32).requires_grad_(), block.tensors(torch.float32)
        packed = module(values, offsets, **extra)
        nested = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
        if "dt" in extra:
            extra["dt"] = torch.nested.nested_tensor_from_jagged(extra["dt"], offsets=offsets)
        out = module(nested, **extra)
        assert out.is_nested == (not block.pooled)
        if out.is_nested:
            assert (nested + out).shape[0] == BATCH  # the same structure: torch adds only such
            out = out.values()
        assert torch.equal(out, packed)
        inputs = [values, *module.parameters()]
        torch.testing.assert_close(gradients(out, inputs), gradients(packed, inputs))

    @EACH
    @pytest.mark.parametrize("lengths", [(), (0, 0)], ids=["empty batch", "empty sequences"])
    def test_nothing_to_attend_to(self, block, lengths):
        module = build(block)
        x = rows_for(module, torch.float32, rows=0).requires_grad_()
        extra = {"context": torch.randn(len(lengths), 7)} if "context" in dict(block.extra) else {}
        if "dt" in dict(block.extra):
            extra = {"dt": torch.rand(0)}
        out = module(x, offsets_of(lengths), **extra)
        assert out.shape == ((len(lengths), out.shape[1], WIDTH) if block.pooled else (0, WIDTH))
        for grad in gradients(out, [x, *module.parameters()]):
            assert grad.isfinite().all()
        if isinstance(module, HSP):
            assert not out.any()
        if isinstance(module, PMA):
            assert torch.equal(out, module.out.bias.expand_as(out))

    @EACH
    def test_rows_past_the_last_offset_reach_no_sequence(self, block):
        module = build(block)
        x, extra = rows_for(module, torch.float32, rows=ROWS + 4), block.tensors(torch.float32)
        extra_tail = dict(extra, dt=torch.cat((extra["dt"], torch.ones(4)))) if "dt" in extra else extra
        out, right = module(x, offsets_of(LENGTHS), **extra_tail), module(x[:ROWS], offsets_of(LENGTHS), **extra)
        torch.testing.assert_close(out if block.pooled else out[:ROWS], right)

    def test_slices_reach_the_operator_without_copies(self, monkeypatch):
        calls = spy(monkeypatch, dispatch.load("cpu"), "forward")
        for name in ("SelfAttention", "PMA", "PFFN"):
            module = build(BLOCKS[name])
            module(rows_for(module, torch.float32), offsets_of(LENGTHS), **BLOCKS[name].tensors(torch.float32))
        for _, _, k, v, *_ in calls:
            assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
            assert not k.is_contiguous()
        assert len(calls) == 3
        assert calls[0][1].untyped_storage().data_ptr() == calls[0][2].untyped_storage().data_ptr()


class TestState:
    @EACH
    def test_a_state_dict_holds_parameters_only_and_survives_a_change_of_backend(self, block, monkeypatch):
        one, other = build(block, backend="cpu"), block.make(backend="reference")
        assert set(one.state_dict()) == set(dict(one.named_parameters()))
        other.load_state_dict(one.state_dict(), strict=True)
        x, extra = rows_for(one, torch.float32), block.tensors(torch.float32)
        ran = spy(monkeypatch, dispatch.load("reference"), "forward")
        torch.testing.assert_close(other(x, offsets_of(LENGTHS), **extra), one(x, offsets_of(LENGTHS), **extra))
        assert len(ran) == 1
        one.backend = "reference"
        one(x, offsets_of(LENGTHS), **extra)
        assert len(ran) == 2

    @EACH
    def test_copies_and_pickles(self, block):
        module = build(block)
        x, extra = rows_for(module, torch.float32), block.tensors(torch.float32)
        right = module(x, offsets_of(LENGTHS), **extra)
        for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(again(x, offsets_of(LENGTHS), **extra), right)

    @EACH
    def test_built_on_the_meta_device(self, block):
        module = build(block, device="meta", dtype=torch.bfloat16)
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
        assert len(list(module.buffers())) == 0

    def test_a_callable_activation_is_frozen_at_construction(self):
        factor = 2.0
        module = SelfAttention(WIDTH, HEADS, activation=lambda s: torch.relu(s) * factor)
        x, offsets = torch.randn(ROWS, WIDTH), offsets_of(LENGTHS)
        before = module(x, offsets)
        factor = 5.0
        assert torch.equal(module(x, offsets), before)

    def test_one_activation_per_head(self):
        module = SelfAttention(WIDTH, HEADS, activation=["relu", "gelu", "silu"], bias=False)
        x, offsets = torch.randn(ROWS, WIDTH), offsets_of(LENGTHS)
        qkv = (x @ module.qkv.weight.T).view(ROWS, 3 * HEADS, HEAD_DIM)
        q, k, v = qkv[:, :HEADS], qkv[:, HEADS : 2 * HEADS], qkv[:, 2 * HEADS :]
        heads = [
            gdpa.attention_varlen(*(y[:, h : h + 1] for y in (q, k, v)), offsets, offsets, activation=name)
            for h, name in enumerate(("relu", "gelu", "silu"))
        ]
        torch.testing.assert_close(module(x, offsets), torch.cat(heads, dim=1).flatten(1) @ module.out.weight.T)


class TestCompile:
    @pytest.mark.parametrize(
        ("block", "compiler"),
        [
            *(pytest.param(block, "aot_eager", id=name) for name, block in ONE_EACH.items()),
            pytest.param(BLOCKS["PFFN"], "inductor", id="PFFN-inductor", marks=needs_compiler),
        ],
    )
    def test_the_graphs_of_the_first_batch_serve_every_other(self, block, compiler):
        module = build(block)
        counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
        compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
        graphs = None
        for seed, lengths in enumerate([LENGTHS, (3, 4), (0, 2, 11, 1, 1, 6, 20), (40,) * 6]):
            rows = sum(lengths)
            x = rows_for(module, torch.float32, rows, seed).requires_grad_()
            extra = {}
            if "dt" in dict(block.extra):
                extra["dt"] = torch.rand(rows) * HOUR
            if "context" in dict(block.extra):
                extra["context"] = torch.randn(len(lengths), 7)
            inputs = [x, *module.parameters()]
            out, right = compiled(x, offsets_of(lengths), **extra), module(x, offsets_of(lengths), **extra)
            torch.testing.assert_close(out, right)
            torch.testing.assert_close(gradients(out, inputs), gradients(right, inputs))
            # Dynamo reads a module's numbers as symbols and starts once more where it turns out that they are constants.
            graphs = graphs or counter.frame_count
            assert counter.frame_count == graphs <= 2

    @EACH
    def test_nested(self, block):
        module = build(block)
        offsets, extra = offsets_of(LENGTHS, torch.int64), block.tensors(torch.float32)
        values = rows_for(module, torch.float32).requires_grad_()
        nested = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
        out = torch.compile(module, backend="aot_eager", fullgraph=True)(nested, **extra)
        right = module(nested, **extra)
        assert out.is_nested == right.is_nested == (not block.pooled)
        out, right = (y.values() if y.is_nested else y for y in (out, right))
        torch.testing.assert_close(out, right)

    def test_a_custom_activation(self):
        factor = 0.5
        module = PMA(WIDTH, HEADS, seeds=2, activation=lambda s: torch.tanh(s) * factor, out_scale="mean")
        x, offsets = torch.randn(ROWS, WIDTH), offsets_of(LENGTHS)
        torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x, offsets), module(x, offsets))


def test_a_stack_of_blocks_exports_with_dynamic_batches():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = rotary_attention(out_scale="mean")
            self.personalise = PFFN(WIDTH, HEADS, hidden=6, context_width=7)
            self.pool = HSP(WIDTH, HEADS, seeds=4, tokens=2, terms=2)

        def forward(self, x: Tensor, offsets: Tensor, dt: Tensor, context: Tensor) -> Tensor:
            return self.pool(self.personalise(x + self.attend(x, offsets, dt=dt), offsets, context=context), offsets)

    def batch(lengths):
        rows = sum(lengths)
        return torch.randn(rows, WIDTH), offsets_of(lengths), torch.rand(rows) * HOUR, torch.randn(len(lengths), 7)

    stack = Stack()
    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in ("x", "offsets", "dt", "context")}
    program = torch.export.export(stack, batch(LENGTHS), dynamic_shapes=dynamic).module()
    for lengths in (LENGTHS, (4, 0, 11)):
        inputs = batch(lengths)
        torch.testing.assert_close(program(*inputs), stack(*inputs))
    x, _, dt, context = batch((4, 5))
    with pytest.raises(gdpa.GdpaError, match="expected to end at most at 9"):
        program(x, offsets_of((4, 6)), dt, context)


class TestAutocast:
    @EACH
    def test_half_precision_in_between_and_float32_gradients(self, block, monkeypatch):
        """fp16 rather than bf16: every CPU multiplies it."""
        module = build(block)
        calls = spy(monkeypatch, dispatch.load("cpu"), "forward")
        x, extra = rows_for(module, torch.float32).requires_grad_(), block.tensors(torch.float32)
        right = module(x, offsets_of(LENGTHS), **extra)
        with torch.autocast("cpu", dtype=torch.float16):
            out = module(x, offsets_of(LENGTHS), **extra)
        assert [call[1].dtype for call in calls] == [torch.float32, torch.float16]
        assert out.dtype == (torch.float32 if isinstance(module, PFFN) else torch.float16)
        assert (out - right).abs().max() < 0.01 * right.abs().max()
        assert all(grad.dtype == torch.float32 for grad in gradients(out, [x, *module.parameters()]))


class TestRepr:
    def test_says_what_was_chosen(self):
        text = repr(SelfAttention(64, 4, kv_heads=2, activation="silu", causal=True, out_scale="mean", backend="cpu"))
        first = "width=64, heads=4, head_dim=16, kv_heads=2, window_size=(-1, 0), activation=silu, scale=0.25, out_scale=mean, backend=cpu"
        assert text.splitlines()[1].strip() == first
        pffn = PFFN(64, 4, hidden=32, context_width=8, scale=1 / 2048, activation=lambda s: torch.relu(s) ** 2)
        assert "hidden=32, context_width=8, context_tokens=1, activation=relu(s) ** 2, scale=0.000488281" in repr(pffn)
        assert "seeds=5, activation=[relu, gelu], " in repr(PMA(8, 2, seeds=5, activation=["relu", "gelu"]))
        hsp = repr(HSP(8, 2, seeds=6, tokens=2, terms=3))
        assert "SumKronLinear(in_tokens=6, out_tokens=2, in_width=8, out_width=8, terms=3)" in hsp
        assert repr(RotaryTemporal(8)) == (
            "RotaryTemporal(head_dim=8, position_pairs=2, time_pairs=2, t_scale=3600, base=10000, time_base=100)"
        )


def attention_of_12(**keywords: Any) -> SelfAttention:
    return SelfAttention(WIDTH, HEADS, **keywords)


X, OFFSETS = torch.zeros(4, WIDTH), torch.tensor([0, 4])
NESTED = torch.nested.nested_tensor_from_jagged(X, offsets=OFFSETS)
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "width": (lambda: SelfAttention(0, 1), "width: expected an integer of at least 1, got 0"),
    "heads": (lambda: SelfAttention(12, 5), "heads: expected a divisor of width 12 .* got 5"),
    "head_dim": (lambda: attention_of_12(head_dim=2.5), "head_dim: expected an integer .* got 2.5"),
    "kv_heads": (lambda: attention_of_12(kv_heads=2), "kv_heads: expected a divisor of the 3 heads, got 2"),
    "activation": (lambda: attention_of_12(activation="gelo"), "activation: .*gelo.*gelu"),
    "activations": (lambda: attention_of_12(activation=["relu"]), "activation: .* 3, one per query head, got a list of 1"),
    "scale": (lambda: attention_of_12(scale="big"), "scale: expected a number, got str"),
    "out_scale": (lambda: attention_of_12(out_scale="max"), "out_scale: expected None, a number or 'mean', got 'max'"),
    "backend": (lambda: attention_of_12(backend="tritn"), "backend: .* got 'tritn'; did you mean 'triton'"),
    "window_size": (lambda: attention_of_12(window_size=3), "window_size: expected a pair"),
    "rotary kind": (lambda: attention_of_12(rotary="yes"), "rotary: expected a gdpa.nn.RotaryTemporal or None, got str"),
    "rotary size": (lambda: attention_of_12(rotary=RotaryTemporal(8)), "rotary: expected one of head_dim 4, got head_dim 8"),
    "rotary odd": (lambda: RotaryTemporal(5), "head_dim: expected an even number, got 5"),
    "time_pairs": (lambda: RotaryTemporal(8, time_pairs=5), "time_pairs: expected an integer from 0 to 4 .* got 5"),
    "t_scale": (lambda: RotaryTemporal(8, t_scale=0), "t_scale: expected a finite number above 0, got 0"),
    "seeds": (lambda: PMA(12, 3, seeds=0), "seeds: expected an integer of at least 1, got 0"),
    "tokens": (lambda: HSP(12, 3, seeds=4, tokens=-1), "tokens: expected an integer of at least 1, got -1"),
    "terms": (lambda: SumKronLinear(4, 2, 3, terms=True), "terms: expected an integer of at least 1, got True"),
    "context_tokens": (
        lambda: PFFN(12, 3, hidden=8, context_width=5, context_tokens=3),
        "context_tokens: expected a divisor of hidden 8, got 3",
    ),
    "x kind": (lambda: attention_of_12()([1.0], OFFSETS), "x: expected a torch.Tensor, got list"),
    "x width": (lambda: attention_of_12()(X[:, :5], OFFSETS), r"x: expected packed values .*\(12,\), got .* \(4, 5\)"),
    "x dtype": (lambda: attention_of_12()(X.double(), OFFSETS), "x: expected dtype torch.float32 .* got torch.float64"),
    "x integer": (lambda: attention_of_12()(X.long(), OFFSETS), "x: expected a floating dtype, got torch.int64"),
    "offsets missing": (lambda: attention_of_12()(X), "offsets: expected an int32 or int64 tensor .* got None"),
    "offsets twice": (lambda: attention_of_12()(NESTED, OFFSETS), "offsets: expected None with a nested x"),
    "offsets dtype": (lambda: attention_of_12()(X, OFFSETS.float()), "offsets: expected int32 or int64 .* got torch.float32"),
    "offsets end": (lambda: attention_of_12()(X, OFFSETS + torch.tensor([0, 1])), "offsets: expected to end at most at 4 .* got 5"),
    "offsets start": (lambda: PMA(12, 3, seeds=1)(X, OFFSETS[1:]), "offsets: expected to start at 0, got 4"),
    "strided nested": (
        lambda: attention_of_12()(torch.nested.nested_tensor([X], layout=torch.strided)),
        "x: expected a nested tensor of layout torch.jagged, got torch.strided",
    ),
    "transposed nested": (lambda: attention_of_12()(NESTED.transpose(1, 2)), "x: expected the jagged dimension to be 1, got 2"),
    "max_seqlen": (lambda: attention_of_12()(X, OFFSETS, max_seqlen=2), "offsets: expected lengths up to 2 .* got 4"),
    "max_seqlen kind": (lambda: attention_of_12()(X, OFFSETS, max_seqlen=2.5), "max_seqlen: expected an integer or None, got 2.5"),
    "dt without rotary": (lambda: attention_of_12()(X, OFFSETS, dt=X[:, 0]), "dt: expected None, since this layer has no rotary"),
    "dt missing": (lambda: rotary_attention()(X, OFFSETS), "dt: expected the ages .* got NoneType"),
    "dt rows": (lambda: rotary_attention()(X, OFFSETS, dt=X[:3, 0]), r"dt: expected 4 ages, .* got shape \(3,\)"),
    "dt lengths": (
        lambda: rotary_attention()(NESTED, dt=torch.nested.nested_tensor_from_jagged(X[:, 0], offsets=torch.tensor([0, 1, 4]))),
        "dt: expected the lengths .* of x, got other ones",
    ),
    "dt unused": (
        lambda: RotaryTemporal(12, time_pairs=0)(X[:, None], OFFSETS, X[:, 0]),
        "dt: expected None where time_pairs is 0",
    ),
    "rotary x": (lambda: RotaryTemporal(8)(X, OFFSETS, X[:, 0]), r"x: expected packed values .* got .* \(4, 12\)"),
    "context shape": (
        lambda: PFFN(12, 3, hidden=8, context_width=5)(X, OFFSETS, context=torch.zeros(2, 5)),
        r"context: expected \(1, 1, 5\) or \(1, 5\) for a batch of 1, got \(2, 5\)",
    ),
    "context kind": (
        lambda: PFFN(12, 3, hidden=8, context_width=5)(X, OFFSETS, context=None),
        "context: expected a torch.Tensor, got NoneType",
    ),
    "context dtype": (
        lambda: PFFN(12, 3, hidden=8, context_width=5)(X, OFFSETS, context=torch.zeros(1, 5).double()),
        "context: expected dtype torch.float32 .* got torch.float64",
    ),
    "z": (lambda: SumKronLinear(4, 2, 3)(torch.zeros(5, 3)), r"z: expected \(..., 4, 3\), got shape \(5, 3\)"),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(call, message):
    with pytest.raises(gdpa.GdpaError, match=message):
        call()


def test_importing_gdpa_leaves_the_modules_out():
    script = "import sys, gdpa; assert 'gdpa.nn' not in sys.modules; import gdpa.nn; print(*gdpa.nn.__all__)"
    done = subprocess.run([sys.executable, "-c", script], env=clean_env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["HSP", "PFFN", "PMA", "RotaryTemporal", "SelfAttention", "SumKronLinear"]


@pytest.mark.parametrize("name", ["attention", "feed_forward", "kronecker", "pooling", "rotary"])
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(f"gdpa.nn.{name}")
    failed, ran = doctest.testmod(module, extraglobs={"gdpa": gdpa, "torch": torch})
    assert ran and not failed

"""What a GPU adds: memory safety, determinism, CUDA graphs, streams, compilation, no synchronisation, large tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import Case, check, leaves, make_case, offsets_of, run
from torch import Tensor

import gdpa
from gdpa import numerics
from gdpa.numerics import Inputs, Results

BASE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
LENGTHS: dict[str, Any] = {"q_lengths": (129, 0, 64, 300), "k_lengths": (65, 7, 0, 255)}


@pytest.fixture(params=[False, True], ids=["whole", "causal"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """All pairs under grouped queries, or causal self-attention, whose gradients the hopper backend takes for plain heads alone."""
    return {**BASE, "kv_heads": 4, "causal": True} if request.param else BASE


def self_attention(lengths: tuple[int, ...], **options: Any) -> Case:
    """Packed sequences that attend to themselves, known for that by one tensor of offsets."""
    case = make_case(q_lengths=lengths, **options)
    return case.with_inputs(cu_seqlens_k=case.inputs.cu_seqlens_q)


def guarded(x: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """A copy of `x` in the middle of a larger buffer full of `value`; returns the copy and the buffer."""
    margin = 1 << 16
    buffer = torch.full((x.numel() + 2 * margin,), value, dtype=x.dtype, device=x.device)
    inside = buffer[margin : margin + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside, buffer


def assert_guards(inside: Tensor, buffer: Tensor) -> None:
    before = (inside.data_ptr() - buffer.data_ptr()) // buffer.element_size()
    after = before + inside.numel()
    for guard in (buffer[:before], buffer[after:]):
        assert guard.isnan().all(), "memory around a tensor was written"


GARBAGE = {
    "past the end": (0, 100, 5000, 2**31 - 1),
    "negative": (-7, 100, 200, 493),
    "very negative": (-(2**31), -5, 0, 493),
    "decreasing": (0, 300, 100, 493),
    "all the same": (493, 493, 493, 493),
    "reversed": (493, 300, 100, 0),
    "wild": (2**30, -(2**30), 12345678, -1),
}


@pytest.mark.parametrize("values", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("side", ["queries", "keys", "both"])
def test_garbage_offsets_neither_crash_nor_leave_the_tensors(values, side, options, backend):
    case = self_attention((129, 64, 300), **options)
    garbage = torch.tensor(values, dtype=torch.int32, device="cuda")
    offsets = {
        name: garbage for name in ("cu_seqlens_q", "cu_seqlens_k") if side in ("both", {"q": "queries", "k": "keys"}[name[-1]])
    }
    inside, buffers = zip(*(guarded(getattr(case.inputs, name), float("nan")) for name in "qkv"), strict=True)
    d_out, d_buffer = guarded(case.d_out, float("nan"))
    case = replace(case.with_inputs(**dict(zip("qkv", inside, strict=True)), **offsets), d_out=d_out)

    # The results' own memory comes from freed blocks of their size that lie between guards.
    blocks = [torch.full_like(x, float("nan")) for x in (*inside, d_out) for _ in range(8)]
    guards = blocks[1::2]
    del blocks
    results = run(case, backend)
    torch.cuda.synchronize()
    for x, buffer in zip((*inside, d_out), (*buffers, d_buffer), strict=True):
        assert_guards(x, buffer)
    assert all(guard.isnan().all() for guard in guards), "memory beside a result was written"
    del results


@pytest.mark.parametrize("values", [GARBAGE["past the end"], GARBAGE["negative"]], ids=["past the end", "negative"])
def test_offsets_outside_the_buffer_are_clamped_to_it(values, options, backend):
    case = make_case(**options, q_lengths=(129, 64, 300))
    garbage = torch.tensor(values, dtype=torch.int64, device="cuda")
    check(case.with_inputs(cu_seqlens_q=garbage, cu_seqlens_k=garbage), backend)


def test_offsets_are_refused_where_a_check_is_asked_for(monkeypatch, backend):
    case = make_case(**BASE, q_lengths=(129, 64, 300))
    bad = case.with_inputs(cu_seqlens_k=torch.tensor([0, 100, 50, 493], dtype=torch.int32, device="cuda"))
    run(bad, backend)
    monkeypatch.setenv("GDPA_CHECK", "1")
    with pytest.raises(gdpa.GdpaError, match="cu_seqlens_k: expected never to decrease, got 100 then 50"):
        run(bad, backend)
    check(case, backend)


def test_results_are_bitwise_equal_over_100_runs(options, backend):
    case = make_case(**options, **LENGTHS, deterministic=True)
    first = run(case, backend)
    for _ in range(99):
        assert all(torch.equal(x, y) for x, y in zip(run(case, backend), first, strict=True))


def test_shared_query_gradients_are_bitwise_equal_over_100_runs(backend):
    case = make_case("shared-query", **BASE, q_lengths=(33,), k_lengths=(65, 0, 129, 300) * 20, deterministic=True)
    first = run(case, backend)
    for _ in range(99):
        assert all(torch.equal(x, y) for x, y in zip(run(case, backend), first, strict=True))


def test_results_do_not_depend_on_what_else_is_in_the_batch(options, backend):
    case = self_attention((129, 64, 300), **options, deterministic=True)
    whole = run(case, backend)
    rows = slice(129, 193)
    alone = self_attention((64,), **options, deterministic=True)
    q, k, v = (x[rows].contiguous() for x in case.inputs[:3])
    part = run(replace(alone.with_inputs(q=q, k=k, v=v), d_out=case.d_out[rows].contiguous()), backend)
    assert all(torch.equal(x[rows], y) for x, y in zip(whole, part, strict=True))


def test_a_graph_replays_with_other_offsets_of_the_same_batch(options, backend):
    """The schedule is built inside the capture, so a replay follows what the offsets hold then."""
    case = self_attention((129, 64, 300), **options, tail=(20, 20))
    q, k, v = leaves(case.inputs)
    offsets = case.inputs.cu_seqlens_q.clone()

    def step() -> Results:
        out = gdpa.attention_varlen(q, k, v, offsets, offsets, activation="gelu", window_size=case.problem.window, backend=backend)
        return Results(out, *torch.autograd.grad(out, (q, k, v), case.d_out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((129, 64, 300), (1, 400, 63), (0, 0, 513), (200, 0, 100)):
        with torch.no_grad():
            offsets.copy_(offsets_of(lengths))
            for x in (q, k, v):
                x.normal_()
            for x in captured:
                x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        inputs = Inputs(q.detach(), k.detach(), v.detach(), offsets, offsets)
        numerics.check(case.problem, inputs, case.d_out, Results(*(x.detach() for x in captured)))


def test_offsets_changed_in_place_give_a_new_schedule(options, backend):
    case = self_attention((129, 64, 300), **options)
    offsets = case.inputs.cu_seqlens_q
    check(case, backend)
    offsets.copy_(offsets_of((0, 400, 93)))
    check(case, backend)


def test_two_streams_at_once_give_what_one_gives(options, backend):
    lengths = ((300, 129, 64), (65, 511, 1))
    cases = [self_attention(x, **options, seed=i, deterministic=True) for i, x in enumerate(lengths)]
    others = [self_attention(x, **options, seed=i) for i, x in enumerate(lengths)]  # added up in any order
    expected = [run(case, backend) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(10):
        results: list[tuple[Results, Results]] = []
        for case, other, stream in zip(cases, others, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append((run(case, backend), run(other, backend)))
        torch.cuda.synchronize()
        for other, (result, unordered), right in zip(others, results, expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(result, right, strict=True))
            numerics.check(other.problem, other.inputs, other.d_out, unordered)


@pytest.mark.parametrize("shared", [False, True], ids=["two tensors of offsets", "one"])
def test_a_call_without_bounds_does_not_synchronise(shared, options, backend):
    case = self_attention(LENGTHS["q_lengths"], **options) if shared else make_case(**options, **LENGTHS)
    run(case, backend)  # compiled, and every lazy initialisation done
    q, k, v = leaves(case.inputs)
    for _ in range(2):
        cu_q = case.inputs.cu_seqlens_q.clone()
        fresh = case.with_inputs(cu_seqlens_q=cu_q, cu_seqlens_k=cu_q if shared else case.inputs.cu_seqlens_k.clone())
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = fresh.call(q, k, v, backend)
            torch.autograd.grad(out, (q, k, v), case.d_out)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_matches_eager(mode):
    case = make_case(**BASE, **LENGTHS)
    inputs = leaves(case.inputs)
    cu_q, cu_k = case.inputs[3:5]

    def function(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return gdpa.attention_varlen(q * 1.0, k, v, cu_q, cu_k, activation="gelu") * 2.0

    compiled = torch.compile(function, fullgraph=True, mode=mode)
    for _ in range(3):
        out = compiled(*inputs, cu_q, cu_k)
        grads = torch.autograd.grad(out, inputs, case.d_out)
        expected = function(*inputs, cu_q, cu_k)
        right = torch.autograd.grad(expected, inputs, case.d_out)
        for x, y in zip((out, *grads), (expected, *right), strict=True):
            assert torch.equal(x, y)


def test_offsets_of_one_compiled_region_are_not_taken_for_each_other(backend):
    """Inductor would write the second ones where the first were, and a schedule knows offsets by their tensor."""

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        for these in (lengths, lengths.flip(0)):
            offsets = torch.nn.functional.pad(these.cumsum(0), (1, 0))
            x = gdpa.attention_varlen(x, x, x, offsets, offsets, activation="silu", backend=backend)
        return x

    x = torch.randn(500, 4, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([300, 1, 199], device="cuda")
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        assert torch.equal(torch.compile(function, fullgraph=True)(x, lengths), function(x, lengths))


def test_autocast():
    case = make_case(**{**BASE, "dtype": torch.float32}, **LENGTHS)
    inputs = leaves(case.inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = case.call(*inputs)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, inputs, case.d_out.bfloat16())
    assert all(grad.dtype == torch.float32 for grad in grads)
    cast = make_case(**BASE, **LENGTHS)
    cast = cast.with_inputs(**{name: getattr(case.inputs, name).bfloat16() for name in "qkv"})
    results = Results(out.detach(), *(grad.bfloat16() for grad in grads))
    numerics.check(cast.problem, cast.inputs, case.d_out.bfloat16(), results)


def test_opcheck(backend):
    case = make_case(**BASE, q_lengths=(65, 3))
    q, k, v = leaves(case.inputs)
    cu_q, cu_k = case.inputs[3:5]
    options = (None, None, None, ["gelu"], None, 1.0, -1, -1, False, backend)
    torch.library.opcheck(torch.ops.gdpa.forward.default, (q, k, v, cu_q, cu_k, *options))
    torch.library.opcheck(
        torch.ops.gdpa.backward.default,
        (case.d_out, *(x.detach() for x in (q, k, v)), cu_q, cu_k, *options, True, False, True),
    )


def test_nested_tensors():
    lengths = (65, 1, 129)
    values = torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.nested.nested_tensor_from_jagged(values, offsets=offsets_of(lengths, torch.int64, "cuda"))
    out = gdpa.attention(x, x, x)
    offsets = offsets_of(lengths, device="cuda")
    assert torch.equal(out.values(), gdpa.attention_varlen(values, values, values, offsets, offsets))


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_tensors_of_more_than_two_to_the_31_elements(causal, backend):
    """Rows whose element offsets pass 2^31, on both sides, are as exact as the others."""
    heads, head_dim, length = 8, 128, 1024
    batch = 2**31 // (heads * head_dim * length) + 2
    free, _ = torch.cuda.mem_get_info()
    shape = (batch * length, heads, head_dim)
    assert batch * length * heads * head_dim > 2**31
    if free < 10 * 2 * batch * length * heads * head_dim:
        pytest.skip("not enough free GPU memory for tensors of 2^31 elements")
    q, k, v, d_out = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    offsets = torch.arange(0, (batch + 1) * length, length, device="cuda")
    out = gdpa.attention_varlen(q, k, v, offsets, offsets, activation="gelu", causal=causal, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    case = make_case(heads=heads, head_dim=head_dim, q_lengths=(length,), dtype=torch.bfloat16, device="cuda", causal=causal)
    for sequence in (0, batch // 2, batch - 2, batch - 1):
        rows = slice(sequence * length, (sequence + 1) * length)
        inputs = case.inputs._replace(**{name: x.detach()[rows] for name, x in (("q", q), ("k", k), ("v", v))})
        results = Results(out.detach()[rows], *(grad[rows] for grad in grads))
        numerics.check(case.problem, inputs, d_out[rows], results)

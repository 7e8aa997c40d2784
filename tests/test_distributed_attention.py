"""Attention on DTensors: over heads and batch the numbers are those of one process, and nothing is sent where nothing need be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import offsets_of
from ranks import needs_gloo, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gdpa
from gdpa.nn import SelfAttention

pytestmark = needs_gloo

WHOLE = Replicate()
PER_HEAD = ["silu", "gelu", "relu", "tanh", "identity", "sigmoid", "softplus", "relu2"]
LENGTHS = (5, 0, 7, 1)


@dataclass(frozen=True)
class Case:
    """A call on a mesh: where q, k, v are placed, where the output must be, and whether anything may be sent on the way."""

    form: str
    placements: tuple[tuple[Placement, ...], ...]  # of q, k, v
    expected: tuple[Placement, ...]
    heads: int = 4
    kv_heads: int = 4
    batch: int = 4
    per_head: bool = False
    out_scale: str = "plain"  # or "dtensor", "none"
    causal: bool = False
    mesh: tuple[int, ...] = (2,)
    silent: bool = True


def alike(*placements: Placement) -> tuple[tuple[Placement, ...], ...]:
    return (placements,) * 3


CASES = {
    "packed-heads": Case("packed", alike(Shard(1)), (Shard(1),), causal=True),
    "packed-whole-groups": Case("packed", alike(Shard(1)), (Shard(1),), heads=8, kv_heads=2, per_head=True),
    "packed-split-groups": Case("packed", alike(Shard(1)), (WHOLE,), heads=6, kv_heads=3, silent=False),
    "packed-one-key-head": Case("packed", ((Shard(1),), (WHOLE,), (WHOLE,)), (WHOLE,), kv_heads=1, per_head=True, silent=False),
    "packed-replicated": Case("packed", alike(WHOLE), (Shard(1),), per_head=True, causal=True),
    "packed-replicated-odd": Case("packed", alike(WHOLE), (WHOLE,), heads=3, kv_heads=3, per_head=True),
    "packed-rows": Case("packed", alike(Shard(0)), (Shard(1),), silent=False),
    "packed-mixed": Case("packed", ((Shard(1),), (WHOLE,), (Shard(2),)), (Shard(1),), kv_heads=2, silent=False),
    "packed-partial": Case("packed", ((Partial(),), (WHOLE,), (Shard(1),)), (Shard(1),), silent=False),
    "dense-batch": Case("dense", alike(Shard(0)), (Shard(0),), per_head=True, causal=True),
    "dense-batch-dtensor-scale": Case("dense", alike(Shard(0)), (Shard(0),), out_scale="dtensor"),
    "dense-batch-uneven": Case("dense", alike(Shard(0)), (Shard(0),), batch=3),
    "dense-batch-of-one": Case("dense", alike(Shard(0)), (Shard(0),), batch=1),
    "dense-heads": Case("dense", alike(Shard(2)), (Shard(2),), per_head=True, out_scale="dtensor"),
    "dense-heads-and-batch": Case("dense", ((Shard(2),), (Shard(0),), (Shard(0),)), (Shard(2),), silent=False),
    "dense-key": Case("dense-key", ((Shard(1),), (Shard(2),), (Shard(2),)), (Shard(1),), per_head=True),
    "dense-key-batch": Case("dense-key", ((WHOLE,), (Shard(0),), (Shard(0),)), (Shard(1),), silent=False),
    "shared-query": Case("shared-query", alike(Shard(1)), (Shard(2),), per_head=True),
    "shared-query-replicated": Case("shared-query", alike(WHOLE), (Shard(2),), out_scale="none"),
}
MESH_CASES = {
    "batch-and-heads": Case("dense", alike(Shard(0), Shard(2)), (Shard(0), Shard(2)), per_head=True, mesh=(2, 2)),
    "heads-twice": Case("packed", alike(Shard(1), Shard(1)), (Shard(1), Shard(1)), heads=8, per_head=True, mesh=(2, 2)),
    "heads-once": Case(
        "packed", alike(Shard(1), Shard(1)), (Shard(1), WHOLE), heads=8, kv_heads=2, per_head=True, mesh=(2, 2), silent=False
    ),
    "four-ranks": Case("packed", alike(Shard(1)), (Shard(1),), heads=8, per_head=True, mesh=(4,)),
}


def tensors_of(case: Case) -> tuple[list[Tensor], list[Tensor | None], Tensor | None]:
    """q, k, v; both offsets; out_scale, in float64, so that a difference is a mistake and not rounding."""
    torch.manual_seed(0)
    offsets = offsets_of(LENGTHS)
    rows, features = (int(offsets[-1]) + 2,), (16, 16, 8)  # two rows of no sequence
    dense, batch = (case.batch, 5), case.batch if case.form == "dense" else len(LENGTHS)
    shapes = {
        "packed": (rows, rows),
        "dense": (dense, dense),
        "dense-key": (rows, (len(LENGTHS), 3)),
        "shared-query": ((3,), rows),
    }[case.form]
    leading = (shapes[0], shapes[1], shapes[1])
    heads = (case.heads, case.kv_heads, case.kv_heads)
    qkv = [torch.randn(*a, h, d, dtype=torch.float64) for a, h, d in zip(leading, heads, features, strict=True)]
    both = {"packed": (offsets, offsets), "dense": (None, None), "dense-key": (offsets, None), "shared-query": (None, offsets)}
    out_scale = None if case.out_scale == "none" else torch.rand(batch, dtype=torch.float64)
    return qkv, list(both[case.form]), out_scale


def call(case: Case, qkv: list[Any], offsets: list[Tensor | None], out_scale: Any) -> Any:
    options: dict[str, Any] = {"activation": PER_HEAD[: case.heads] if case.per_head else "gelu", "causal": case.causal}
    if offsets[0] is None and offsets[1] is None:  # a Tensor == None is not traced by torch 2.11
        return gdpa.attention(*qkv, out_scale=out_scale, **options)
    return gdpa.attention_varlen(*qkv, *offsets, out_scale=out_scale, **options)


def attend_on_ranks(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Largest differences from the whole computation, the output's placements, and how often something was sent."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in sorted({case.mesh for case in cases.values()})}
    found = {}
    for name, case in cases.items():
        mesh = meshes[case.mesh]
        qkv, offsets, out_scale = tensors_of(case)
        whole = [tensor.clone().requires_grad_() for tensor in qkv]
        expected = call(case, whole, offsets, out_scale)
        d_out = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
        expected_grads = torch.autograd.grad(expected, whole, d_out)

        parts = [placed(tensor, mesh, where) for tensor, where in zip(qkv, case.placements, strict=True)]
        if case.out_scale == "dtensor":
            out_scale = distribute_tensor(out_scale, mesh, [Replicate()] * mesh.ndim)
        upstream = distribute_tensor(d_out, mesh, case.expected)
        with CommDebugMode() as sent:
            out = call(case, parts, offsets, out_scale)
            grads = torch.autograd.grad(out, parts, upstream)
        pairs = zip((out, *grads), (expected, *expected_grads), strict=True)
        found[name] = {
            "placements": tuple(out.placements),
            "sent": sent.get_total_counts(),
            "differences": [difference(came.full_tensor(), wanted) for came, wanted in pairs],
        }
    return found


def placed(tensor: Tensor, mesh: Any, where: tuple[Placement, ...]) -> DTensor:
    if Partial() in where:  # each rank has a part of the sum
        part = tensor * (0.25 if mesh.get_rank() == 0 else 0.75)
        return DTensor.from_local(part, mesh, where, run_check=False).requires_grad_()
    return distribute_tensor(tensor, mesh, where).requires_grad_()


def difference(came: Tensor, wanted: Tensor) -> float:
    assert came.shape == wanted.shape and came.dtype == wanted.dtype, (came.shape, wanted.shape)
    return float((came - wanted).abs().max()) if came.numel() else 0.0


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(attend_on_ranks, CASES)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(attend_on_ranks, MESH_CASES, ranks=4)


def check_case(case: Case, results: list[dict[str, Any]], name: str) -> None:
    for result in (ranks[name] for ranks in results):
        assert result["placements"] == case.expected
        # Sums of a dozen products of size about 1, in another order at the most: a few units of 2^-52.
        assert max(result["differences"]) < 1e-13
        assert (result["sent"] == 0) == case.silent, result


@pytest.mark.parametrize("name", CASES)
def test_attention_on_two_ranks_is_that_of_one(name: str, two_ranks: list[dict[str, Any]]):
    check_case(CASES[name], two_ranks, name)


@pytest.mark.parametrize("name", MESH_CASES)
def test_attention_on_a_mesh_of_four_is_that_of_one(name: str, four_ranks: list[dict[str, Any]]):
    check_case(MESH_CASES[name], four_ranks, name)


def other_uses(rank: int) -> dict[str, Any]:
    """What is refused, and the modes in which the operator never reaches autograd."""
    mesh = init_device_mesh("cpu", (2,))
    case = CASES["packed-heads"]
    qkv, offsets, out_scale = tensors_of(case)
    expected = call(case, qkv, offsets, out_scale)
    parts = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in qkv]
    found: dict[str, Any] = {}
    for name, wrong in (("plain-k", [parts[0], qkv[1], parts[2]]), ("plain-q", [qkv[0], *parts[1:]])):
        with pytest.raises(gdpa.GdpaError) as error:
            call(case, wrong, offsets, out_scale)
        found[name] = str(error.value)
    other = init_device_mesh("cpu", (1, 2))
    elsewhere = distribute_tensor(qkv[2], other, [Replicate(), Shard(1)])
    with pytest.raises(gdpa.GdpaError) as error:
        call(case, [*parts[:2], elsewhere], offsets, out_scale)
    found["mesh"] = str(error.value)
    with pytest.raises(gdpa.GdpaError) as error:
        call(case, qkv, offsets, distribute_tensor(out_scale, mesh, [Replicate()]))
    found["plain-qkv"] = str(error.value)

    with torch.inference_mode():
        parts = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in qkv]
        out = call(case, parts, offsets, out_scale)
        found["inference"] = difference(out.full_tensor(), expected)

    parts = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in qkv]
    parts[2].requires_grad_()
    (grad,) = torch.autograd.grad(call(case, parts, offsets, out_scale).sum(), [parts[2]])
    whole = qkv[2].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(call(case, [*qkv[:2], whole], offsets, out_scale).sum(), [whole])
    found["only-v"] = difference(grad.full_tensor(), wanted)

    compiled = torch.compile(lambda *qkv: call(case, list(qkv), offsets, out_scale), backend="aot_eager", fullgraph=True)
    out = compiled(*parts)
    found["compiled"] = difference(out.full_tensor(), expected)
    (grad,) = torch.autograd.grad(out.sum(), [parts[2]])
    found["compiled-grad"] = difference(grad.full_tensor(), wanted)
    return found


def test_refusals_and_modes_of_attention_on_dtensors():
    for found in run_ranks(other_uses):
        assert found["plain-k"].startswith("k: expected a DTensor as q is, got Tensor")
        assert found["plain-q"].startswith("q: expected a DTensor as k is, got Tensor")
        assert found["plain-qkv"].startswith("q, k, v: expected DTensors where the offsets or out_scale are")
        assert found["mesh"].startswith("v: expected the device mesh of q")
        for name in ("inference", "only-v", "compiled", "compiled-grad"):
            assert found[name] < 1e-13, name


LAYERS: dict[str, dict[str, Any]] = {
    "mean": {"out_scale": "mean", "activation": "silu"},
    "grouped": {"kv_heads": 2, "activation": PER_HEAD[:4], "window_size": (3, 0), "bias": False},
    "split-groups": {"kv_heads": 1, "activation": "gelu"},
}


def tensor_parallel(rank: int) -> dict[str, float]:
    """A fused qkv by columns and the output by rows, as torch's own plans have it: differences from the undivided layer."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, options in LAYERS.items():
        torch.manual_seed(0)
        layer = SelfAttention(32, 4, dtype=torch.float64, **options)
        x, offsets = torch.randn(sum(LENGTHS), 32, dtype=torch.float64, requires_grad=True), offsets_of(LENGTHS)
        expected = layer(x, offsets)
        expected.square().sum().backward()
        wanted = {"x": x.grad, **{key: parameter.grad for key, parameter in layer.named_parameters()}}
        layer.zero_grad()
        x.grad = None
        plan = {"qkv": ColwiseParallel(use_local_output=False), "out": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
        assert layer.qkv.weight.to_local().shape[0] == layer.qkv.weight.shape[0] // 2
        out = layer(x, offsets)
        out.square().sum().backward()
        came = {"x": x.grad, **{key: parameter.grad.full_tensor() for key, parameter in layer.named_parameters()}}
        found[name] = max(difference(out, expected), *(difference(came[key], wanted[key]) for key in wanted))
    return found


def test_a_tensor_parallel_plan_over_self_attention():
    for found in run_ranks(tensor_parallel):
        assert set(found) == set(LAYERS)
        # Sums of up to 32 products, several of them in a row, of numbers up to a few hundred.
        assert max(found.values()) < 1e-11, found

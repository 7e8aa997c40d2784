"""The attention operators on DTensors: a rule for `gdpa::forward` and `gdpa::backward` over heads and batch.

Heads and sequences are independent of each other, so a mesh dimension may divide either, and no rank needs another's numbers:

    part       q            k, v           out_scale (B,)   offsets        output
    heads      Shard(-2)    Shard(-2)      Replicate        Replicate      Shard(-2)
    batch      Shard(0)     Shard(0)       Shard(0)         none           Shard(0)        dense q, k, v only
    whole      Replicate    Replicate      Replicate        Replicate      Replicate

Each mesh dimension gets one part, decided by `_parts` from the placements of q, k, v; inputs placed otherwise are redistributed
first, as DTensor does. Heads are divided only where every rank keeps whole groups (the query heads of its key heads). The rows of
packed tensors are jagged, so an even division of them would cut sequences: packed forms divide by heads alone. Offsets and
out_scale may be plain tensors, which must then be equal on all ranks. Of activations given per head each rank takes its own.

torch.library.register_torch_dispatch, a public function, puts the rule before DTensor's own dispatch; `register_sharding` could not
give each rank its own activations. `gdpa.attention` and `gdpa.attention_varlen` import this file when they first see a DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gdpa import operators
from gdpa.errors import GdpaError

Part = Literal["heads", "batch", "whole"]

# The place of the activations among the operators' options, which come after q, k, v.
_ACTIVATIONS = [argument.name for argument in torch.ops.gdpa.forward.default._schema.arguments].index("activations") - 3


def _common_mesh(tensors: dict[str, Any]) -> DeviceMesh:
    """The mesh of all these DTensors; a plain tensor among them, or a second mesh, is an error."""
    meshes = {name: tensor.device_mesh for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    if not meshes:
        raise GdpaError("q, k, v: expected DTensors where the offsets or out_scale are, got plain tensors")
    first = next(iter(meshes))
    for name, tensor in tensors.items():
        if name not in meshes:
            raise GdpaError(f"{name}: expected a DTensor as {first} is, got {type(tensor).__name__}; see torch's distribute_tensor")
        if meshes[name] != meshes[first]:
            raise GdpaError(f"{name}: expected the device mesh of {first}, {meshes[first]}, got {meshes[name]}")
    return meshes[first]


def _parts(q: DTensor, k: DTensor, v: DTensor, dense: bool) -> list[Part]:
    """What each mesh dimension divides: the batch where q, k, v are dense and divided by it, otherwise the heads if they can be.

    Replicated tensors are divided by heads too: to take one's own heads of them costs nothing, and otherwise every rank would repeat
    the same work.
    """
    mesh, head_parts, parts = q.device_mesh, 1, list[Part]()
    for dim in range(mesh.ndim):
        placements = [(tensor.placements[dim], tensor.dim()) for tensor in (q, k, v)]
        by_heads = any(placement == Shard(rank - 2) for placement, rank in placements)
        if dense and not by_heads and any(placement == Shard(0) for placement, _ in placements):
            parts.append("batch")
        elif k.shape[-2] % (head_parts * mesh.size(dim)) == 0:
            head_parts *= mesh.size(dim)
            parts.append("heads")
        else:
            parts.append("whole")
    return parts


def _placements(parts: list[Part], head_dim: int | None) -> list[Placement]:
    """Where a tensor whose heads are dimension `head_dim` (None: it has none) and whose dimension 0 is the batch belongs."""
    places: dict[Part, Placement] = {"batch": Shard(0), "whole": Replicate()}
    places["heads"] = Replicate() if head_dim is None else Shard(head_dim)
    return [places[part] for part in parts]


def _local(tensor: Tensor | None, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor | None:
    """This rank's part of a tensor; a plain one counts as replicated."""
    if tensor is None:
        return None
    if not isinstance(tensor, DTensor):
        if all(isinstance(placement, Replicate) for placement in placements):
            return tensor
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # Detached, as what runs inside an autograd function is anyway: redistributing a tensor that wants gradients detaches the result in
    # place there, and DTensors of torch 2.11 have no operator for that.
    if tuple(tensor.placements) != tuple(placements):
        tensor = cast(DTensor, tensor.detach()).redistribute(mesh, placements)
    local: Tensor = tensor.to_local()
    return local


def _own_activations(activations: list[str], parts: list[Part], mesh: DeviceMesh) -> list[str]:
    """The keys of this rank's heads, of one key per head."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise GdpaError(f"q, k, v: expected DTensors on a mesh that this rank belongs to, got {mesh}")
    count, index = 1, 0
    for dim, part in enumerate(parts):
        if part == "heads":
            count, index = count * mesh.size(dim), index * mesh.size(dim) + coordinate[dim]
    own = len(activations) // count
    taken = activations[index * own : (index + 1) * own]
    return taken if len(set(taken)) > 1 else taken[:1]


def _distributed(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    stride, step = list[int](), 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= size
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _run(operator: Any, d_out: tuple[DTensor, ...], q: Any, k: Any, v: Any, options: Sequence[Any]) -> tuple[Any, list[Part]]:
    """The operator on this rank's parts, and what the mesh dimensions divide."""
    names = dict(zip(("q", "k", "v", "d_out"), (q, k, v, *d_out), strict=False))
    mesh = _common_mesh(names)
    cu_seqlens_q, cu_seqlens_k, out_scale = options[:3]
    parts = _parts(q, k, v, dense=q.dim() == k.dim() == 4 and cu_seqlens_q is None and cu_seqlens_k is None)
    tensors = [_local(tensor, mesh, _placements(parts, tensor.dim() - 2)) for tensor in (*d_out, q, k, v)]
    whole = [Replicate()] * mesh.ndim
    offsets = [_local(cu_seqlens, mesh, whole) for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)]
    own = list(options)
    own[:3] = *offsets, _local(out_scale, mesh, _placements(parts, None))
    if len(own[_ACTIVATIONS]) > 1 and "heads" in parts:
        own[_ACTIVATIONS] = _own_activations(own[_ACTIVATIONS], parts, mesh)
    return operator(*tensors, *own), parts


def _forward(cls: type, operator: Any, types: Any, args: Sequence[Any], kwargs: Any) -> DTensor:
    q, k, v, *options = args
    out, parts = _run(operator, (), q, k, v, options)
    shape = [*q.shape[:-1], v.shape[-1]]
    if out.dim() > q.dim():  # queries shared by the batch
        shape.insert(0, out.shape[0])
    return _distributed(out, q.device_mesh, _placements(parts, out.dim() - 2), shape)


def _backward(cls: type, operator: Any, types: Any, args: Sequence[Any], kwargs: Any) -> tuple[DTensor, ...]:
    d_out, q, k, v, *options = args
    grads, parts = _run(operator, (d_out,), q, k, v, options)
    mesh = q.device_mesh
    whole = [Replicate()] * mesh.ndim
    return tuple(
        _distributed(grad, mesh, _placements(parts, tensor.dim() - 2), tensor.shape)
        if needed
        else _distributed(grad, mesh, whole, grad.shape)
        for grad, tensor, needed in zip(grads, (q, k, v), options[-3:], strict=True)
    )


torch.library.register_torch_dispatch("gdpa::forward", DTensor, _forward, lib=operators.library)
torch.library.register_torch_dispatch("gdpa::backward", DTensor, _backward, lib=operators.library)

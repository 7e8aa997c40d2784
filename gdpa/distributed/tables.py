"""Embedding tables divided by rows: each rank holds its own, and looks the others' up where they are.

    rank r holds rows r * share : (r + 1) * share,  share = ceil(rows / ranks), the last ranks fewer or none (DTensor's Shard(0))

A lookup is three exchanges: how many ids each rank wants of each other, the ids, and the rows. Every distinct id travels once per
rank that asks for it, so a rank receives at most (distinct ids) * width numbers forward and sends as many back; a masked lookup and
a reduction over the ranks would move ranks times that. The numbers of ids are read on the host, which waits for the device.

Gradients go back the same way and are divided by the number of ranks, as DistributedDataParallel averages: with equal batches and
losses that are means, the sum over the ranks is the gradient of the mean over all examples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gdpa.errors import GdpaError
from gdpa.models.tables import Table, check_ids


class ShardedTable(nn.Module):
    """A `gdpa.models.tables.Table` whose rows are divided among the ranks of a mesh of one dimension.

    Every rank of the mesh must call it, with whatever ids it has (none is a number too), as often and in the same order as the
    others: in the forward pass and in the backward.

    Attributes:
        weight: (rows, width), a DTensor parameter placed Shard(0). Its gradient is one too. With `sparse`, the local part of the
            gradient is a sparse tensor of the rows that any rank asked for, which torch's optimisers do not take; look at it by
            `to_local()` under torch.no_grad().

    Forward:
        ids: integers of any shape -> (*ids.shape, width), bitwise the rows of the undivided table.
    """

    def __init__(self, table: Table, mesh: DeviceMesh) -> None:
        super().__init__()
        if mesh.ndim != 1:
            raise GdpaError(f"mesh: expected one dimension, got {mesh.ndim} ({mesh}); take one of them by its name: mesh['data']")
        self.name, self.rows, self.width, self.sparse = table.name, table.rows, table.width, table.sparse
        self.mesh = mesh
        # The values are those of the mesh's first rank.
        self.weight = nn.Parameter(distribute_tensor(table.weight.detach(), mesh, [Shard(0)]))

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(self.name, ids, self.rows)
        found: Tensor = _Lookup.apply(self.weight, ids.reshape(-1), self.sparse)  # type: ignore[no-untyped-call]
        return found.view(*ids.shape, self.width)

    def extra_repr(self) -> str:
        return f"{self.name!r}, rows={self.rows}, width={self.width}, sparse={self.sparse}, ranks={self.mesh.size()}"


class _Lookup(torch.autograd.Function):
    """weight (rows, width), a DTensor; ids (n,) -> (n, width)."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, ids: Tensor, sparse: bool) -> Tensor:
        group = weight.device_mesh.get_group()
        ranks = dist.get_world_size(group)
        share = -(-weight.shape[0] // ranks)
        # Sorted, so that each owner's ids lie together.
        distinct, place = ids.unique(return_inverse=True)
        counts = torch.bincount(distinct // share, minlength=ranks)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        asked, wanted = torch.stack((counts, theirs)).tolist()
        rows = _exchange(distinct, asked, wanted, group) - dist.get_rank(group) * share
        found = _exchange(weight.to_local().index_select(0, rows), wanted, asked, group)
        ctx.save_for_backward(place, rows)
        ctx.weight, ctx.options = weight, (asked, wanted, group, sparse)
        return found.index_select(0, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        place, rows = ctx.saved_tensors
        weight, (asked, wanted, group, sparse) = ctx.weight, ctx.options
        shape = weight.to_local().shape
        own = grad.new_zeros(sum(asked), shape[1]).index_add_(0, place, grad)
        arrived = _exchange(own, asked, wanted, group) / dist.get_world_size(group)
        if not sparse:
            return DTensor(grad.new_zeros(shape).index_add_(0, rows, arrived), weight._spec, requires_grad=False), None, None
        local = torch.sparse_coo_tensor(rows[None], arrived, shape, check_invariants=False)
        # Autograd cannot accumulate a DTensor whose local part is sparse (it asks the DTensor for its indices), so it is done here.
        if weight.grad is not None:
            local = weight.grad.to_local() + local
        weight.grad = DTensor(local, weight._spec, requires_grad=False)
        return None, None, None


def _exchange(sent: Tensor, sizes_sent: list[int], sizes_received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first `sizes_sent[0]` rows to rank 0, the next to rank 1, ...; return what they sent here, rank 0's first."""
    received = sent.new_empty(sum(sizes_received), *sent.shape[1:])
    dist.all_to_all_single(received, sent.contiguous(), sizes_received, sizes_sent, group=group)
    return received


def shard_tables(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every table in `model.tables` by its `ShardedTable`. All ranks call it; the values are those of the mesh's first."""
    tables = getattr(model, "tables", None)
    if not isinstance(tables, nn.ModuleDict):
        raise GdpaError(f"model: expected one with `tables`, an nn.ModuleDict, got {type(model).__name__}")
    for name, table in tables.items():
        if not isinstance(table, Table):
            raise GdpaError(f"model.tables[{name!r}]: expected a gdpa.models.tables.Table, got {type(table).__name__}")
        tables[name] = ShardedTable(table, mesh)

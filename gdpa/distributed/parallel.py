"""A model on several ranks, each with its own examples.

    tables    by rows (gdpa.distributed.tables): a row has one owner, so a table takes 1 / ranks of its memory on each
    dense     "ddp": every rank has all of it and gradients are averaged, while the backward pass goes on
              "fsdp": every rank has a part of each parameter, of its gradient and of the optimiser's state, and gathers a layer's
              weights when the layer runs (torch's fully_shard)

Either way the gradient is the mean over the ranks. With losses that are means over equally many examples on each rank, a step is the
step of one rank with all the examples, but for the order of summation.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gdpa.distributed.tables import shard_tables
from gdpa.errors import GdpaError


def parallelize(model: Any, mesh: DeviceMesh, dense: Literal["ddp", "fsdp"] = "ddp") -> nn.Module:
    """Spread a model over the ranks of a mesh. Every rank calls it, with the same model on its own device.

    Args:
        model: of `gdpa.models`: it has `tables` and `dense`. Changed in place; the values are those of the mesh's first rank.
        mesh: of one dimension, the ranks that share the examples: `init_device_mesh(device_type, (ranks,))`.
        dense: "ddp" or "fsdp", see above.

    Returns:
        The module to call with a batch. `model` itself keeps its methods, the names of its parameters and its state dict, in which
        divided tensors are DTensors. Parameters are replaced: make optimisers afterwards. Every rank must run the same lookups and the
        backward pass in each step; a batch may be empty.
    """
    if dense not in ("ddp", "fsdp"):
        raise GdpaError(f"dense: expected 'ddp' or 'fsdp', got {dense!r}")
    if mesh.ndim != 1:
        raise GdpaError(f"mesh: expected one dimension, got {mesh.ndim} ({mesh}); take one of them by its name: mesh['data']")
    if not isinstance(getattr(model, "dense", None), nn.Module):
        raise GdpaError(f"model: expected one of gdpa.models, with `dense` and `tables`, got {type(model).__name__}")
    shard_tables(model, mesh)
    if dense == "fsdp":
        _same_everywhere(model.dense, mesh)
        for layer in _layers(model.dense):
            fully_shard(layer, mesh=mesh)
        # The logits are a view, and an in-place operation on a view would drop the hook that fully_shard puts on its output.
        model.dense.register_forward_hook(_copied)
        fully_shard(model.dense, mesh=mesh)
        return model  # type: ignore[no-any-return]
    # DDP wraps the whole model, so that its parameters keep their names. It leaves the tables' gradients to the tables; buffers are
    # constants, which need not be sent before every step.
    left_alone = [f"tables.{name}" for name, _ in model.tables.named_parameters()] + [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_alone)
    return DistributedDataParallel(model, process_group=mesh.get_group())


def _copied(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.clone()


def _same_everywhere(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the values of the mesh's first, as DDP does by itself."""
    group = mesh.get_group()
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=dist.get_global_rank(group, 0), group=group)


def _layers(module: nn.Module) -> list[nn.Module]:
    """The outermost entries of module lists that are called themselves. Entries that only group others are looked into."""
    found = []
    for child in module.children():
        if isinstance(module, nn.ModuleList) and type(child).forward is not nn.Module.forward:
            found.append(child)
        else:
            found.extend(_layers(child))
    return found

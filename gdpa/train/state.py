"""The tensors of a training run, by name: what a checkpoint holds besides its JSON.

    model.<name>              parameters and buffers
    optimizer.<name>.<key>    the optimisers' state of a parameter
    random.<rank>.<device>    torch's generators of a rank

They are written by gdpa.distributed.storage, so that a run on some number of ranks is resumed on any other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from gdpa.distributed.storage import load_tensors, save_tensors, saved_tensors
from gdpa.errors import GdpaError
from gdpa.train.updates import Updates
from gdpa.train.world import World


def write(folder: Path, model: nn.Module, updates: Updates, world: World) -> None:
    """Every rank writes its part."""
    save_tensors(folder, _tensors(model, updates) | _generators(world))


def restore(folder: Path, model: nn.Module, updates: Updates, world: World) -> None:
    """Put the tensors of a checkpoint in their places. Where one does not fit, nothing is changed."""
    saved, own, random = saved_tensors(folder), _tensors(model, updates), _generators(world)
    unknown = [name for name in saved if name not in own and not name.startswith("random.")]
    if unknown:
        raise GdpaError(
            f"{folder}: expected the tensors of this model and its optimisers, got {unknown[0]!r}, which they do not have"
        )
    # A rank or a device that the checkpoint does not know keeps the generators that the seed gave it.
    random = {name: tensor for name, tensor in random.items() if name in saved}
    load_tensors(folder, own | random)
    for name, value in random.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, world.device)


def _tensors(model: nn.Module, updates: Updates) -> dict[str, Tensor]:
    """The tensors themselves, not copies."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in updates.parameters().items():
        for optimizer in updates.optimizers.values():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{key}"] = value
    return found


def _generators(world: World) -> dict[str, Tensor]:
    states = {f"random.{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"random.{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return states

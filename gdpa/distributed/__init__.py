"""More than one process.

    parallelize      a model of gdpa.models over a device mesh: tables divided by rows, the dense part by DDP or FSDP2
    ShardedTable     an embedding table whose rows are divided among the ranks
    save_tensors     tensors and DTensors of all ranks into a folder, without pickles
    load_tensors     back, on any number of ranks

and, in gdpa.distributed.attention, what `gdpa.attention` does with DTensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpa.distributed.parallel import parallelize
    from gdpa.distributed.storage import load_tensors, save_tensors, saved_tensors
    from gdpa.distributed.tables import ShardedTable, shard_tables

__all__ = ["ShardedTable", "load_tensors", "parallelize", "save_tensors", "saved_tensors", "shard_tables"]

_HOMES = {
    "parallelize": "parallel",
    "load_tensors": "storage",
    "save_tensors": "storage",
    "saved_tensors": "storage",
    "ShardedTable": "tables",
    "shard_tables": "tables",
}


def __getattr__(name: str) -> Any:
    """Import on first use: attention on DTensors needs neither the models nor torch's checkpoints."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Embedding tables of sparse features."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdpa.data.schema import Schema
from gdpa.errors import GdpaError

ITEMS = "history_item"  # the table of the items in histories, and of the candidate where the schema names one


class Table(nn.Module):
    """ids -> rows of `weight` (rows, width), drawn from a normal of variance 1 / width.

    An id below 0 or past the last row is a GdpaError that names the feature, where ids are on a CPU. On a GPU a look would
    synchronise, so `gdpa.data.schema.Batch.check` refuses such data when it is loaded; CUDA itself stops at one that gets by.

    Args:
        name: the feature, for errors.
        sparse: whether the weight's gradient is a sparse tensor of the rows that were read. The attribute may be changed later.
    """

    def __init__(self, name: str, rows: int, width: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.name, self.rows, self.width, self.sparse = name, rows, width, sparse
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.width))

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(self.name, ids, self.rows)
        return functional.embedding(ids, self.weight, sparse=self.sparse)

    def extra_repr(self) -> str:
        return f"{self.name!r}, rows={self.rows}, width={self.width}, sparse={self.sparse}"


def is_readable(tensor: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and type(tensor) is Tensor


def check_ids(name: str, ids: Tensor, rows: int) -> None:
    """Refuse ids that the table has no row for, where they can be read."""
    if not is_readable(ids) or ids.numel() == 0:
        return
    least, most = ids.aminmax()
    if int(least) < 0 or int(most) >= rows:
        wrong = int(least) if int(least) < 0 else int(most)
        raise GdpaError(f"{name}: expected ids from 0 to {rows - 1}, the rows of its table, got {wrong}")


def table_name(schema: Schema, feature: str) -> str:
    """The table that holds a sparse feature. A module's name may not contain a dot."""
    if feature == schema.candidate:
        return ITEMS
    return "sparse_" + feature.replace("%", "%25").replace(".", "%2E")


def make_tables(schema: Schema, width: int) -> nn.ModuleDict:
    """One table for the items, one for each sparse feature that is not an item."""
    tables = {ITEMS: Table(ITEMS, schema.items, width)}
    for feature, rows in schema.sparse:
        if feature != schema.candidate:
            tables[table_name(schema, feature)] = Table(f"sparse_{feature}", rows, width)
    return nn.ModuleDict(tables)

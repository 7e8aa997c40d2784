"""What both models share: the tables, the path from a batch to the dense part, and the accounts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gdpa.data.schema import Batch, Schema, check_offsets, check_shapes
from gdpa.errors import GdpaError
from gdpa.models.config import Config
from gdpa.models.sequences import Arrangement, Events, arrange
from gdpa.models.tables import ITEMS, check_ids, is_readable, make_tables, table_name
from gdpa.models.work import Part, Summary
from gdpa.nn.base import AttentionModule


class DensePart(nn.Module):
    """What a model is besides its tables; tensors in, tensors out, so that it can be compiled, wrapped and sharded by itself."""

    def parts(self, lengths: Sequence[Tensor]) -> Iterator[Part]:
        """Parameters and forward operations of its parts, for the lengths of each group's sequences, on the CPU."""
        raise NotImplementedError


class ClickModel(nn.Module):
    """A batch of examples -> the logits of their labels.

    Attributes:
        tables: `Table`s by name: "history_item" for the items, which the schema's candidate shares, and "sparse_<name>".
        dense: everything else; `model.dense.compile(dynamic=True)` compiles it.
        config, schema: what the model was made of.

    Forward:
        batch: a `gdpa.data.schema.Batch` of `schema`, on the model's device, of any size; histories may be empty.
        Returns (B,) float32 logits. Where `Batch.to` brought the batch to a GPU, nothing waits for the GPU.
    """

    config: Config
    dense: DensePart
    event_groups: Tensor

    def __init__(self, config: Config, schema: Schema, group_of: list[int]) -> None:
        super().__init__()
        self.config, self.schema = config, schema
        self.tables = make_tables(schema, config.embedding)
        self.group_of = group_of
        index_of = [group_of[:kind].count(group) for kind, group in enumerate(group_of)]
        self.register_buffer("event_groups", torch.tensor((group_of, index_of)), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        sparse, sequences = self.embed(batch)
        logits: Tensor = self.dense(batch.dense, sparse, sequences)
        return logits.float()

    def embed(self, batch: Batch) -> tuple[Tensor, tuple[Events, ...]]:
        """The inputs of the dense part besides the dense features: rows of the tables and the sequences of events."""
        self._check(batch)
        arranged = arrange(batch, self.group_of, self.event_groups)
        names = [table_name(self.schema, feature) for feature, _ in self.schema.sparse]
        rows: dict[str, Tensor] = {}
        for index, name in enumerate(names):
            if name != ITEMS:
                rows[name] = self.tables[name](batch.sparse[:, index])
        if ITEMS in names:
            # One lookup for the candidates and the histories: a sharded table communicates once.
            ids = torch.cat((batch.sparse[:, names.index(ITEMS)], arranged.items))
            rows[ITEMS], events = self.tables[ITEMS](ids).split((len(batch), len(arranged.items)))
        else:
            events = self.tables[ITEMS](arranged.items)
        empty = events.new_empty(len(batch), 0, self.config.embedding)
        sparse = torch.stack([rows[name] for name in names], dim=1) if names else empty
        return sparse, arranged.sequences(events)

    def table_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The tables' parameters, with their names in the state dict."""
        return ((name, parameter) for name, parameter in self.named_parameters() if name.startswith("tables."))

    def dense_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All other parameters, with their names in the state dict."""
        return ((name, parameter) for name, parameter in self.named_parameters() if not name.startswith("tables."))

    def flops(self, batch: Batch) -> int:
        """Operations of a forward over `batch`; a training step has three times as many. Reads the batch on the host: ask with the
        batch as it is before `to`, or the call waits for the GPU."""
        return self.summary(batch).forward_flops

    def summary(self, batch: Batch | None = None) -> Summary:
        """Parameters of each part and, for the lengths of a batch, its operations; `print` it."""
        groups = max(self.group_of) + 1
        if batch is None:
            lengths = [torch.zeros(0, dtype=torch.int64)] * groups
        else:
            lengths = [offsets.diff() for offsets in self._arranged_on_host(batch).offsets]
        tables = Part("tables", sum(parameter.numel() for _, parameter in self.table_parameters()), 0)
        parts = (tables, *self.dense.parts(lengths))
        if batch is None:
            parts = tuple(replace(part, flops=0) for part in parts)
        counts = (None, None) if batch is None else (len(batch), batch.history.items.shape[0])
        return Summary(f"{type(self).__name__}, {sum(p.parameters for p in parts):,} parameters", parts, *counts)

    def set_attention(self, attention: Callable[..., Tensor]) -> None:
        """Replace `gdpa.attention_varlen` in every module of the model that calls it by a callable that takes its arguments."""
        for module in self.modules():
            if isinstance(module, AttentionModule):
                module.operator = attention

    def _arranged_on_host(self, batch: Batch) -> Arrangement:
        return arrange(batch.to("cpu"), self.group_of, self.event_groups.cpu())

    def _check(self, batch: Batch) -> None:
        schema, history = self.schema, batch.history
        check_shapes(batch, schema, exact=False)
        if batch.dense.device != self.event_groups.device:
            raise GdpaError(f"batch: expected device {self.event_groups.device} (that of the model), got {batch.dense.device}")
        if is_readable(history.offsets):
            check_offsets(history)
        for index, (feature, size) in enumerate(schema.sparse):
            check_ids(f"sparse_{feature}", batch.sparse[:, index], size)
        check_ids("history_item", history.items, schema.items)
        check_ids("history_type", history.types, len(schema.event_types))

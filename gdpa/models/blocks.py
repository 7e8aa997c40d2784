"""The parts that both models are made of, besides the attention modules of gdpa.nn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdpa.models.sequences import Events

HOUR = 3600.0

M = TypeVar("M", bound=nn.Module)


class FeatureTokens(nn.Module):
    """Dense features, the lengths of the histories and the rows of the tables -> tokens (B, tokens, width).

    The dense features and log(1 + events) of every sequence make one token by a linear map; each sparse feature makes one by a linear
    map of its own; a linear map over the tokens, and a LayerNorm, bring them to `tokens`.
    """

    regions = ("forward",)

    def __init__(self, dense: int, sparse: int, sequences: int, embedding: int, tokens: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dense + sequences, width)
        self.sparse = nn.Parameter(torch.empty(sparse, embedding, width))
        with torch.no_grad():
            self.sparse.copy_(carry(embedding, width).T)
        self.mix = nn.Linear(1 + sparse, tokens, bias=False)  # LayerNorm would remove one number for a whole token
        self.norm = nn.LayerNorm(width)
        keep_tokens(self.mix)

    def forward(self, dense: Tensor, sparse: Tensor, sequences: tuple[Events, ...]) -> Tensor:
        dense = dense.to(self.dense.weight.dtype)
        lengths = torch.stack([events.offsets.diff() for events in sequences], dim=1)
        first = self.dense(torch.cat((dense, torch.log1p(lengths.to(dense.dtype))), dim=1))
        # One product per feature: [features, B, embedding] @ [features, embedding, width].
        others = (sparse.transpose(0, 1) @ self.sparse).transpose(0, 1)
        tokens = torch.cat((first[:, None], others), dim=1)
        out: Tensor = self.norm(self.mix(tokens.transpose(1, 2)).transpose(1, 2))
        return out

    def flops(self, batch: int) -> int:
        features, embedding, width = self.sparse.shape
        per_example = self.dense.in_features * width + features * embedding * width
        return 2 * batch * (per_example + (1 + features) * self.mix.out_features * width)


class TokenMixer(nn.Module):
    """(B, in_tokens, width) -> (B, out_tokens, width): Y = A X over the tokens, then LayerNorm(Y + W_2 gelu(W_1 Y))."""

    regions = ("forward",)

    def __init__(self, in_tokens: int, out_tokens: int, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(in_tokens, out_tokens)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        keep_tokens(self.mix)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.norm(y + self.outer(functional.gelu(self.inner(y))))
        return out

    def flops(self, batch: int) -> int:
        width = self.inner.in_features
        return 2 * batch * width * self.mix.out_features * (self.mix.in_features + 2 * width)


class Head(nn.Module):
    """The tokens X (B, n, width) of the last layer, the X_0 before the first, and the summaries H (B, m, width) of the finished
    sequences -> logits (B,).

        logit = w . gelu(LayerNorm(W [X | H] + b)) + c + u . (H X_0^T) / width

    w starts as zeros, so that the first steps do not push the tables at random, and u as ones over all its products. W has thousands of
    inputs, most of each the same in all examples: without the LayerNorm a step of AdamW may move all of its outputs by several times
    what they differ by. The last sums are in float32, so that logits are not rounded to the 8 bits of bf16.
    """

    regions = ("forward",)

    def __init__(self, tokens: int, summaries: int, width: int, hidden: int) -> None:
        super().__init__()
        self.width = width
        self.hidden = nn.Linear((tokens + summaries) * width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, 1)
        self.dots = nn.Linear(tokens * summaries, 1, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.dots.weight, 1.0 / (tokens * summaries) ** 0.5)

    def forward(self, tokens: Tensor, first: Tensor, summaries: Tensor) -> Tensor:
        joined = torch.cat((tokens, summaries), dim=1).flatten(1)
        dots = (summaries @ first.transpose(1, 2)).flatten(1) / self.width
        hidden = functional.gelu(self.norm(self.hidden(joined)))
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits: Tensor = (hidden.to(wide) * self.out.weight).sum(1) + (dots.to(wide) * self.dots.weight).sum(1) + self.out.bias
        return logits

    def flops(self, batch: int) -> int:
        return 2 * batch * (self.hidden.in_features * self.hidden.out_features + self.dots.in_features * self.width)


def module_list(modules: Iterable[M]) -> Sequence[M]:
    """An nn.ModuleList, typed by what it holds."""
    return nn.ModuleList(modules)  # type: ignore[return-value]


def carry(inputs: int, outputs: int) -> Tensor:
    """Initial weights (outputs, inputs) of a linear map that takes rows of a table, which have length 1, to features of unit variance
    and leaves their directions alone. A candidate's token and a history's summary are then compared in one space from the first
    step on, where random maps would have to be learned away first."""
    return math.sqrt(inputs) * torch.eye(outputs, inputs)


def keep_tokens(mix: nn.Linear) -> None:
    """Let a linear map over tokens start as the tokens that come in, as far as they go. The other weights stay the random ones that they
    are. Rows of zeros would be tokens without variance: the LayerNorm after the map multiplies their gradients by 1 / sqrt(eps) = 316,
    and these were 95 to 99.9 % of the whole gradient's norm, by which it is clipped. Columns of zeros would be inputs that nobody reads:
    gradients behind them were 1e-8 in the first steps."""
    kept = min(mix.weight.shape)
    with torch.no_grad():
        mix.weight[:kept, :kept] = torch.eye(kept)


def event_columns(events: Events, types: int) -> Tensor:
    """(T, columns) in the dtype of the items: what an event's token is a linear map of.

        items | one column for each of the types, 1 at the event's | event_scalars | zeros

    The number of columns is a multiple of COLUMNS. A lookup of the type would say the same, but on a GPU its gradient adds up the
    events of a type one after the other; here it is part of one product, as are the narrow ones of the scalars.
    """
    kinds = (events.types[:, None] == torch.arange(types, device=events.types.device)).to(events.items.dtype)
    return _padded(torch.cat((events.items, kinds, event_scalars(events)), dim=1))


def column_weight(*blocks: Tensor, diagonal: bool = False) -> Tensor:
    """The weight of a linear map of `event_columns`, from those of its three parts (outputs, columns of the part): side by side, or
    each with outputs of its own."""
    return _padded(torch.block_diag(*blocks) if diagonal else torch.cat(blocks, dim=1))


# Tensor cores read rows whose size is a multiple of 16 bytes, 8 numbers in bf16.
COLUMNS = 8


def _padded(x: Tensor) -> Tensor:
    return functional.pad(x, (0, -x.shape[1] % COLUMNS))


def event_scalars(events: Events) -> Tensor:
    """(T, 1 or 2) in the dtype of the items: log(1 + age in hours) and, where events have values, sign(v) log(1 + |v|).

    A quarter of each, so that they are of the size of the other features of an event.
    """
    columns = [torch.log1p(events.ages.clamp(min=0) / HOUR)]
    if events.values is not None:
        columns.append(events.values.sign() * torch.log1p(events.values.abs()))
    return torch.stack(columns, dim=1).to(events.items.dtype) / 4


def stream_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the sequence between layers: autocast's where it is on, since the stream is most of a step's memory."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else x.dtype

"""Kunlun (arXiv 2602.10016): layers that personalise a sequence, pool it by learned seeds, and let the pooled tokens interact.

For each layer, X the tokens of the request and S the sequence of one group of event types:

    X_sum = WeightGeneration(X)
    H     = HSP(S)                                      even layers; odd ones reuse it (CompSkip)
    X'    = Interaction(X, [X_sum | H of every group])
    S'    = PFFN(S, X_sum)                              even layers
    S'    = S + WindowAttention(LayerNorm(S))           odd layers, softmax, with ROTE

Choices that the definition leaves open are in the docstrings and in docs/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdpa.data.schema import Schema
from gdpa.errors import GdpaError
from gdpa.models.base import ClickModel, DensePart
from gdpa.models.blocks import FeatureTokens, Head, TokenMixer, carry, column_weight, event_columns, module_list, stream_dtype
from gdpa.models.config import EventConfig, KunlunConfig
from gdpa.models.sequences import Events
from gdpa.models.windows import WindowAttention
from gdpa.models.work import Part, hsp_flops, linear_flops, part, pffn_flops, window_attention_flops
from gdpa.nn import HSP, PFFN


class Kunlun(ClickModel):
    """Kunlun over the features and histories of a schema. See `gdpa.models.base.ClickModel` for what it takes and gives.

    Example:
        >>> from gdpa.data.synthetic import SyntheticClicks
        >>> clicks = SyntheticClicks(batch_size=4)
        >>> gdpa.models.build("kunlun", "tiny", clicks.schema)(clicks.batch(0)).shape
        torch.Size([4])
    """

    config: KunlunConfig

    def __init__(self, config: KunlunConfig, schema: Schema, *, backend: str | None = None) -> None:
        groups, group_of = event_groups(config, schema)
        super().__init__(config, schema, group_of)
        sizes = [group_of.count(group) for group in range(len(groups))]
        self.dense = KunlunDense(config, schema, groups, sizes, backend)


class KunlunDense(DensePart):
    """All of the model but its tables."""

    stages = ("start", "layer", "finish")

    def __init__(
        self, config: KunlunConfig, schema: Schema, groups: list[EventConfig], types: list[int], backend: str | None
    ) -> None:
        super().__init__()
        self.features = FeatureTokens(schema.dense, len(schema.sparse), len(groups), config.embedding, config.tokens, config.width)
        self.groups = module_list(
            EventStack(group, config, count, schema.values, backend) for group, count in zip(groups, types, strict=True)
        )
        layers = max(group.layers for group in groups)
        summary = sum(group.tokens for group in groups)
        self.generate = module_list(TokenMixer(config.tokens, config.context_tokens, config.width) for _ in range(layers))
        self.interact = module_list(
            Interaction(config.tokens, config.context_tokens + summary, config.width, config.experts, config.fm_rank)
            for _ in range(layers)
        )
        self.head = Head(config.tokens, summary, config.width, config.head_hidden)

    def forward(self, dense: Tensor, sparse: Tensor, sequences: tuple[Events, ...]) -> Tensor:
        first, streams, turns = self.start(dense, sparse, sequences)
        x = first
        cached: tuple[Tensor | None, ...] = (None,) * len(streams)
        for layer, (generate, interact) in enumerate(zip(self.generate, self.interact, strict=True)):
            pools = tuple(stack.pool(layer) for stack in self.groups)
            steps = tuple(stack.step(layer) for stack in self.groups)
            x, streams, fresh = self.layer(generate, interact, pools, steps, x, streams, sequences, turns, _reused(pools, cached))
            cached = tuple(map(_newer, fresh, cached))
        pools = tuple(stack.pool(len(self.generate)) for stack in self.groups)
        return self.finish(pools, x, first, streams, sequences, _reused(pools, cached))

    def start(
        self, dense: Tensor, sparse: Tensor, sequences: tuple[Events, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[tuple[Tensor, Tensor] | None, ...]]:
        """X, S of every group, and the turns of its self-attentions where it has any."""
        streams = tuple(stack.encode(events) for stack, events in zip(self.groups, sequences, strict=True))
        turns = tuple(
            stack.turns(stream, events.offsets, events.ages) if len(stack.windows) else None
            for stack, stream, events in zip(self.groups, streams, sequences, strict=True)
        )
        return self.features(dense, sparse, sequences), streams, turns

    def layer(
        self,
        generate: TokenMixer,
        interact: Interaction,
        pools: tuple[SummaryPool | None, ...],
        steps: tuple[PFFN | WindowLayer | None, ...],
        x: Tensor,
        streams: tuple[Tensor, ...],
        sequences: tuple[Events, ...],
        turns: tuple[tuple[Tensor, Tensor] | None, ...],
        cached: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """X', S' of every group, and its H where this layer pools it; `cached` are the others'."""
        context = generate(x)
        fresh = _pooled(pools, streams, sequences)
        streams = tuple(map(partial(_stepped, context), steps, streams, sequences, turns))
        return interact(x, torch.cat((context, *map(_newer, fresh, cached)), dim=1)), streams, fresh

    def finish(
        self,
        pools: tuple[SummaryPool | None, ...],
        x: Tensor,
        first: Tensor,
        streams: tuple[Tensor, ...],
        sequences: tuple[Events, ...],
        cached: tuple[Tensor | None, ...],
    ) -> Tensor:
        """The logits."""
        finished = tuple(map(_newer, _pooled(pools, streams, sequences), cached))
        logits: Tensor = self.head(x, first, torch.cat(finished, dim=1))
        return logits

    def parts(self, lengths: Sequence[Tensor]) -> Iterator[Part]:
        batch = len(lengths[0])
        yield part("features", [self.features], self.features.flops(batch))
        for group, (stack, own) in enumerate(zip(self.groups, lengths, strict=True)):
            yield from stack.parts(f"group {group}", own)
        yield part("weight generation", self.generate, sum(mixer.flops(batch) for mixer in self.generate))
        yield part("interaction", self.interact, sum(layer.flops(batch) for layer in self.interact))
        yield part("head", [self.head], self.head.flops(batch))


class EventStack(nn.Module):
    """The layers of one group's sequence.

    Before layer l the sequence is S_l. An even layer pools S_l and then applies PFFN; an odd one applies self-attention and gives the last
    summary again. The finished sequence is pooled once more, for the next layer of a deeper group and for the head, so that nothing
    computed goes unread.
    """

    regions = ("turns",)

    def __init__(self, group: EventConfig, config: KunlunConfig, types: int, values: bool, backend: str | None) -> None:
        super().__init__()
        self.depth = group.layers
        self.encode = EventEncoder(config.embedding, types, values, group.width)
        self.personalise = module_list(
            PFFN(
                group.width,
                group.heads,
                hidden=config.hidden,
                context_width=config.width,
                context_tokens=config.context_tokens,
                scale=None if config.tau is None else 1 / config.tau,
                backend=backend,
            )
            for _ in range((group.layers + 1) // 2)
        )
        self.windows = module_list(WindowLayer(group.width, group.heads, group.window) for _ in range(group.layers // 2))
        self.pools = module_list(SummaryPool(group, config.width, backend) for _ in range((group.layers + 1) // 2 + 1))

    def pool(self, layer: int) -> SummaryPool | None:
        """What makes H of a layer, from its S_l; None where H is as it was before (CompSkip)."""
        if layer == self.depth:
            return self.pools[-1]
        return self.pools[layer // 2] if layer < self.depth and layer % 2 == 0 else None

    def step(self, layer: int) -> PFFN | WindowLayer | None:
        """What makes S_l+1 of S_l; None where the group has no such layer."""
        if layer >= self.depth:
            return None
        return self.windows[layer // 2] if layer % 2 else self.personalise[layer // 2]

    def turns(self, stream: Tensor, offsets: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        """Of ROTE, which are those of every self-attention of the stack."""
        return self.windows[0].attend.rotary.turns(stream.shape[0], offsets, ages, stream.dtype)

    def parts(self, name: str, lengths: Tensor) -> Iterator[Part]:
        yield part(f"{name} encoder", [self.encode], self.encode.flops(int(lengths.sum())))
        yield part(f"{name} PFFN", self.personalise, sum(pffn_flops(layer, lengths) for layer in self.personalise))
        if len(self.windows):
            attention = sum(window_attention_flops(layer.attend, lengths) for layer in self.windows)
            yield part(f"{name} window attention", self.windows, attention)
        yield part(f"{name} HSP", self.pools, sum(pool.flops(lengths) for pool in self.pools))


def _pooled(
    pools: tuple[SummaryPool | None, ...], streams: tuple[Tensor, ...], sequences: tuple[Events, ...]
) -> tuple[Tensor | None, ...]:
    """H of every group that has a pool here."""
    groups = zip(pools, streams, sequences, strict=True)
    return tuple(None if pool is None else pool(stream, events) for pool, stream, events in groups)


def _reused(pools: tuple[SummaryPool | None, ...], cached: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The last H of the groups that have no pool here."""
    return tuple(last if pool is None else None for pool, last in zip(pools, cached, strict=True))


def _newer(fresh: Tensor | None, cached: Tensor | None) -> Tensor:
    """H of a layer."""
    summary = cached if fresh is None else fresh
    assert summary is not None, "layer 0 pools"
    return summary


def _stepped(
    context: Tensor, step: PFFN | WindowLayer | None, stream: Tensor, events: Events, turns: tuple[Tensor, Tensor] | None
) -> Tensor:
    """S' of one group."""
    if step is None:
        return stream
    if isinstance(step, PFFN):
        out: Tensor = step(stream, events.offsets, context=context.to(stream.dtype))
    else:
        out = step(stream, events, turns)
    return out


class EventEncoder(nn.Module):
    """LayerNorm(W item + type + W' (age, value)): one event -> one token."""

    regions = ("forward",)

    def __init__(self, embedding: int, types: int, values: bool, width: int) -> None:
        super().__init__()
        self.item = nn.Linear(embedding, width)
        self.scalars = nn.Linear(2 if values else 1, width, bias=False)
        with torch.no_grad():
            self.item.weight.copy_(carry(embedding, width))
        self.types = nn.Parameter(torch.empty(types, width))
        nn.init.normal_(self.types)
        self.norm = nn.LayerNorm(width)

    def forward(self, events: Events) -> Tensor:
        weight = column_weight(self.item.weight, self.types.T, self.scalars.weight)
        x = functional.linear(event_columns(events, self.types.shape[0]), weight, self.item.bias)
        out: Tensor = self.norm(x).to(stream_dtype(events.items))
        return out

    def flops(self, events: int) -> int:
        return 2 * events * (self.item.in_features + self.scalars.in_features) * self.item.out_features


class WindowLayer(nn.Module):
    """S + WindowAttention(LayerNorm(S))."""

    regions = ("enter", "leave")

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = WindowAttention(width, heads, window)

    def forward(self, stream: Tensor, events: Events, turns: tuple[Tensor, Tensor]) -> Tensor:
        attended = self.attend.attend(*self.enter(stream, *turns), events.offsets, events.longest)
        return self.leave(attended, stream)

    def enter(self, stream: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attend.project(self.norm(stream), cos, sin)

    def leave(self, attended: Tensor, stream: Tensor) -> Tensor:
        out: Tensor = stream + self.attend.out(attended.flatten(1))
        return out.to(stream.dtype)


class SummaryPool(nn.Module):
    """HSP, and a linear map to the width of the interaction's tokens, with a LayerNorm."""

    regions = ("finish",)

    def __init__(self, group: EventConfig, width: int, backend: str | None) -> None:
        super().__init__()
        self.pool = HSP(
            group.width,
            group.heads,
            seeds=group.seeds,
            tokens=group.tokens,
            terms=group.terms,
            out_scale="mean",
            backend=backend,
        )
        self.lift = nn.Linear(group.width, width)
        self.norm = nn.LayerNorm(width)
        with torch.no_grad():
            # Values, the first of SumKronLinear's products and the lift start as identities, see blocks.carry.
            nn.init.eye_(self.pool.kv.weight[group.width :])
            nn.init.eye_(self.pool.condense.feature_weight[0])
            nn.init.constant_(self.pool.condense.token_weight[:, 0], 1 / math.sqrt(group.seeds))
            nn.init.eye_(self.lift.weight)

    def forward(self, stream: Tensor, events: Events) -> Tensor:
        return self.finish(self.pool.pooled(stream, events.offsets))

    def finish(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.norm(self.lift(self.pool.condense(pooled)))
        return out

    def flops(self, lengths: Tensor) -> int:
        return hsp_flops(self.pool, lengths) + linear_flops(self.lift, len(lengths) * self.pool.condense.out_tokens)


class Interaction(nn.Module):
    """Wukong's layer with experts: X' = LayerNorm(X + [experts | linear compression]) of the tokens Z.

    Z is split into as many runs of tokens as there are experts. Expert e takes the products of its tokens with all tokens,
    Z_e Z^T, compressed to `rank` columns by Y_e, as Wukong's factorisation machines do, and maps them to one token:

        W_e LayerNorm(flatten(Z_e (Z^T Y_e)))

    The other tokens of X' are linear combinations of those of Z.
    """

    regions = ("forward",)

    def __init__(self, tokens: int, inputs: int, width: int, experts: int, rank: int) -> None:
        super().__init__()
        if experts > inputs:
            raise GdpaError(f"experts: expected at most the {inputs} tokens that interact, got {experts}")
        self.sizes = [inputs // experts + (1 if part < inputs % experts else 0) for part in range(experts)]
        self.compress = nn.Linear(inputs, experts * rank, bias=False)
        self.norms = module_list(nn.LayerNorm(size * rank) for size in self.sizes)
        self.experts = module_list(nn.Linear(size * rank, width) for size in self.sizes)
        self.linear = nn.Linear(inputs, tokens - experts, bias=False)  # LayerNorm would remove one number for a whole token
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        across = z.transpose(1, 2)  # [B, width, inputs]
        compressed = self.compress(across).unflatten(2, (len(self.sizes), -1)).movedim(2, 1)  # [B, experts, width, rank]
        tokens, start, place = [], 0, 0
        for size, alike in groupby(self.sizes):  # of two sizes at the most
            experts = slice(start, start + len(list(alike)))
            count = experts.stop - start
            parts = z[:, place : place + count * size].unflatten(1, (count, size))
            products = (parts @ compressed[:, experts]).flatten(2).transpose(0, 1)  # [experts, B, size * rank]
            tokens.append(self._mapped(products, experts).transpose(0, 1))
            start, place = experts.stop, place + count * size
        out: Tensor = self.norm(x + torch.cat((*tokens, self.linear(across).transpose(1, 2)), dim=1))
        return out

    def _mapped(self, products: Tensor, experts: slice) -> Tensor:
        """W_e LayerNorm(products of e) of experts of one size, [experts, B, width]: one kernel for all of them."""
        norms, maps = self.norms[experts], self.experts[experts]
        scale, shift = torch.stack([norm.weight for norm in norms]), torch.stack([norm.bias for norm in norms])
        normed = functional.layer_norm(products, products.shape[-1:], eps=norms[0].eps) * scale[:, None] + shift[:, None]
        weight, bias = torch.stack([outer.weight for outer in maps]), torch.stack([outer.bias for outer in maps])
        return torch.baddbmm(bias[:, None], normed, weight.transpose(1, 2))

    def flops(self, batch: int) -> int:
        width, inputs = self.norm.normalized_shape[0], sum(self.sizes)
        across = width * inputs * (self.compress.out_features + self.linear.out_features)
        rank = self.compress.out_features // len(self.sizes)
        products = width * rank * inputs
        return 2 * batch * (across + products) + sum(linear_flops(expert, batch) for expert in self.experts)


def event_groups(config: KunlunConfig, schema: Schema) -> tuple[list[EventConfig], list[int]]:
    """The config's groups that the schema has types for, and the group of each type."""
    named = {name: group for group in config.events for name in group.types}
    of_type = []
    for name in schema.event_types:
        group = named.get(name, named.get("*"))
        if group is None:
            raise GdpaError(f"schema: expected event types that the config names ({', '.join(named)}), got {name!r}")
        of_type.append(group)
    groups = [group for group in config.events if group in of_type]
    return groups, [groups.index(group) for group in of_type]

"""InterFormer (arXiv 2411.09852): sequence and non-sequence features summarise each other in every layer.

For each layer, X the tokens of the request and S the sequence of events, which starts with CLS tokens:

    X_sum = Gating(TokenMixer(X))                                  cross arch
    S_sum = Gating([S_CLS | PMA(S) | S_recent])
    X'    = DOT([X | S_sum])                                       interaction arch
    S'    = Z + SelfAttention(LayerNorm(Z)),  Z = PFFN(S, X_sum)   sequence arch, rotary positions

    Gating(Z) = gate(Z * W Z)

Choices that the definition leaves open are in the docstrings and in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdpa.data.schema import Schema
from gdpa.models.base import ClickModel, DensePart
from gdpa.models.blocks import FeatureTokens, Head, TokenMixer, carry, column_weight, event_columns, module_list, stream_dtype
from gdpa.models.config import Gate, InterFormerConfig
from gdpa.models.sequences import Events, end_rows, prepend
from gdpa.models.work import Part, linear_flops, part, pffn_flops, pma_flops, self_attention_flops
from gdpa.nn import PFFN, PMA, RotaryTemporal, SelfAttention


class InterFormer(ClickModel):
    """InterFormer over the features and histories of a schema. See `gdpa.models.base.ClickModel` for what it takes and gives.

    All event types are one sequence.

    Example:
        >>> from gdpa.data.synthetic import SyntheticClicks
        >>> clicks = SyntheticClicks(batch_size=4)
        >>> gdpa.models.build("interformer", "tiny", clicks.schema)(clicks.batch(0)).shape
        torch.Size([4])
    """

    config: InterFormerConfig

    def __init__(self, config: InterFormerConfig, schema: Schema, *, backend: str | None = None) -> None:
        super().__init__(config, schema, [0] * len(schema.event_types))
        self.dense = InterFormerDense(config, schema, backend)


class InterFormerDense(DensePart):
    """All of the model but its tables.

    The CLS tokens are the X_sum of the first layer. After the last layer its sequence is summarised once more, for the head, so that
    nothing computed goes unread.
    """

    regions = ("places",)
    stages = ("start", "context", "layer", "finish")

    def __init__(self, config: InterFormerConfig, schema: Schema, backend: str | None) -> None:
        super().__init__()
        self.features = FeatureTokens(schema.dense, len(schema.sparse), 1, config.embedding, config.tokens, config.width)
        self.encode = MaskNet(config.embedding, len(schema.event_types), schema.values, config.seq_width)
        self.cls = nn.Linear(config.width, config.seq_width)
        layers = range(config.layers)
        self.condense = module_list(CrossSummary(config) for _ in layers)
        self.summarise = module_list(SequenceSummary(config, backend) for _ in range(config.layers + 1))
        self.interact = module_list(Interaction(config) for _ in layers)
        self.advance = module_list(SequenceLayer(config, backend) for _ in layers)
        self.head = Head(config.tokens, summary_tokens(config), config.width, config.head_hidden)

    def forward(self, dense: Tensor, sparse: Tensor, sequences: tuple[Events, ...]) -> Tensor:
        (events,) = sequences
        first, context, stream, *places = self.start(dense, sparse, events)
        x = first
        for layer, modules in enumerate(zip(self.summarise, self.advance, self.interact, strict=False)):
            if layer:
                context = self.context(self.condense[layer], x)
            x, stream = self.layer(*modules, x, context, stream, *places)
        return self.finish(x, first, stream, *places)

    def start(self, dense: Tensor, sparse: Tensor, events: Events) -> tuple[Tensor, ...]:
        """X, the X_sum of the first layer, S, and what every layer needs to know of the sequences: `layer`'s last arguments."""
        x = self.features(dense, sparse, (events,))
        context = self.condense[0](x)
        stream, offsets = prepend(self.encode(events), events.offsets, self.cls(context))
        return x, context, stream, offsets, *self.places(stream, offsets)

    def context(self, condense: CrossSummary, x: Tensor) -> Tensor:
        """X_sum of a later layer."""
        out: Tensor = condense(x)
        return out

    def layer(
        self,
        summarise: SequenceSummary,
        advance: SequenceLayer,
        interact: Interaction,
        x: Tensor,
        context: Tensor,
        stream: Tensor,
        offsets: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        there: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """X' and S'."""
        summary = summarise(stream, offsets, rows, there)
        return interact(x, summary), advance(stream, offsets, (cos, sin), context)

    def finish(
        self, x: Tensor, first: Tensor, stream: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, there: Tensor
    ) -> Tensor:
        """The logits; the turns cos and sin are for layers alone."""
        logits: Tensor = self.head(x, first, self.summarise[-1](stream, offsets, rows, there))
        return logits

    def places(self, stream: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        """What every layer needs to know of the sequences: the turns of the rotary positions, and where the ends are."""
        rotary, summary = self.advance[0].attend.rotary, self.summarise[0]
        assert rotary is not None
        turns = rotary.turns(stream.shape[0], offsets, None, stream.dtype)
        return *turns, *end_rows(offsets, summary.first, summary.recent)

    def parts(self, lengths: Sequence[Tensor]) -> Iterator[Part]:
        batch, events = len(lengths[0]), int(lengths[0].sum())
        rows = lengths[0] + self.summarise[0].first  # with the CLS tokens
        yield part("features", [self.features], self.features.flops(batch))
        yield part("MaskNet", [self.encode], self.encode.flops(events))
        cls = linear_flops(self.cls, batch * self.summarise[0].first)
        yield part("cross arch: X_sum", [*self.condense, self.cls], cls + sum(block.flops(batch) for block in self.condense))
        yield part("cross arch: S_sum", self.summarise, sum(block.flops(rows) for block in self.summarise))
        yield part("interaction arch", self.interact, sum(block.flops(batch) for block in self.interact))
        personal = [block.personalise for block in self.advance]
        yield part("PFFN", personal, sum(pffn_flops(block, rows) for block in personal))
        attention = sum(self_attention_flops(block.attend, rows) for block in self.advance)
        yield part("self-attention", [m for block in self.advance for m in (block.norm, block.attend)], attention)
        yield part("head", [self.head], self.head.flops(batch))


class MaskNet(nn.Module):
    """LayerNorm(MLP_lce(S * MLP_mask(S))): events -> tokens of the sequence.

    S joins, on the embedding axis, three sequences of the same events: the items, the event types, and the ages and values through a
    linear map. MLP_mask has one hidden layer of S's width; MLP_lce is one linear map.
    """

    regions = ("forward",)

    def __init__(self, embedding: int, types: int, values: bool, width: int) -> None:
        super().__init__()
        self.types = nn.Parameter(torch.empty(types, embedding))
        nn.init.normal_(self.types)
        self.scalars = nn.Linear(2 if values else 1, embedding)
        self.items = nn.Linear(embedding, embedding)
        joined = 3 * embedding
        self.inner = nn.Linear(joined, joined)
        self.outer = nn.Linear(joined, joined)
        self.compress = nn.Linear(joined, width)
        self.norm = nn.LayerNorm(width)
        with torch.no_grad():
            self.items.weight.copy_(carry(embedding, embedding))
            nn.init.ones_(self.outer.bias)  # the mask starts near 1
            nn.init.eye_(self.compress.weight)

    def forward(self, events: Events) -> Tensor:
        weight = column_weight(self.items.weight, self.types.T, self.scalars.weight, diagonal=True)
        bias = torch.cat((self.items.bias, torch.zeros_like(self.items.bias), self.scalars.bias))
        s = functional.linear(event_columns(events, self.types.shape[0]), weight, bias)
        mask = self.outer(functional.relu(self.inner(s)))
        out: Tensor = self.norm(self.compress(s * mask)).to(stream_dtype(events.items))
        return out

    def flops(self, events: int) -> int:
        return sum(linear_flops(linear, events) for linear in (self.items, self.scalars, self.inner, self.outer, self.compress))


class Gating(nn.Module):
    """gate(Z * W Z), W applied to each token; gate is the sigmoid, tanh or nothing."""

    def __init__(self, width: int, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.linear = nn.Linear(width, width)
        nn.init.ones_(self.linear.bias)  # starts near gate(Z)

    def forward(self, z: Tensor) -> Tensor:
        gated: Tensor = z * self.linear(z)
        return gated if self.gate == "identity" else getattr(torch, self.gate)(gated)


class CrossSummary(nn.Module):
    """X_sum = Gating(TokenMixer(X)): the tokens that personalise the sequence."""

    regions = ("forward",)

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.mix = TokenMixer(config.tokens, config.context_tokens, config.width)
        self.gating = Gating(config.width, config.gate)
        self.tokens = config.context_tokens

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gating(self.mix(x))
        return out

    def flops(self, batch: int) -> int:
        return self.mix.flops(batch) + linear_flops(self.gating.linear, batch * self.tokens)


def summary_tokens(config: InterFormerConfig) -> int:
    """Tokens of S_sum: CLS, pooled, recent."""
    return config.context_tokens + config.seeds + config.recent


class SequenceSummary(nn.Module):
    """S_sum = Gating([S_CLS | PMA(S) | S_recent]), brought to the width of the other tokens by a linear map and a LayerNorm."""

    regions = ("finish",)

    def __init__(self, config: InterFormerConfig, backend: str | None) -> None:
        super().__init__()
        self.first, self.recent, self.tokens = config.context_tokens, config.recent, summary_tokens(config)
        self.pool = PMA(config.seq_width, config.heads, seeds=config.seeds, out_scale="mean", backend=backend)
        self.lift = nn.Linear(config.seq_width, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.gating = Gating(config.width, config.gate)
        with torch.no_grad():
            # Values and the maps after them start as identities, see blocks.carry.
            nn.init.eye_(self.pool.kv.weight[config.seq_width :])
            nn.init.eye_(self.pool.out.weight)
            nn.init.eye_(self.lift.weight)

    def forward(self, stream: Tensor, offsets: Tensor, rows: Tensor, there: Tensor) -> Tensor:
        """rows and there are those of `end_rows`."""
        ends = stream.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        return self.finish(ends, there, self.pool.pooled(stream, offsets))

    def finish(self, ends: Tensor, there: Tensor, pooled: Tensor) -> Tensor:
        """From the CLS tokens and recent events, and what the seeds found, to S_sum; zeros where there are fewer events."""
        ends = torch.where(there[..., None], ends, 0)
        joined = torch.cat((ends, self.pool.out(pooled).to(ends.dtype)), dim=1)
        out: Tensor = self.gating(self.norm(self.lift(joined)))
        return out

    def flops(self, rows: Tensor) -> int:
        tokens = len(rows) * self.tokens
        return pma_flops(self.pool, rows) + linear_flops(self.lift, tokens) + linear_flops(self.gating.linear, tokens)


class Interaction(nn.Module):
    """X' = LayerNorm(TokenMixer(Z) + MLP(dots of Z)), Z = [X | S_sum]: the DOT interaction, beside a map of the tokens themselves.

    The MLP takes the products of all pairs of tokens, divided by the width, to the tokens of X through one hidden layer.
    """

    regions = ("forward",)

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.tokens, self.inputs, self.width = config.tokens, config.tokens + summary_tokens(config), config.width
        self.mix = TokenMixer(self.inputs, self.tokens, self.width)
        self.inner = nn.Linear(self.inputs * self.inputs, config.dot_hidden)
        self.outer = nn.Linear(config.dot_hidden, self.tokens * self.width)
        self.norm = nn.LayerNorm(self.width)

    def forward(self, x: Tensor, summary: Tensor) -> Tensor:
        z = torch.cat((x, summary), dim=1)
        dots = (z @ z.transpose(1, 2)).flatten(1) / self.width
        crossed = self.outer(functional.gelu(self.inner(dots))).unflatten(1, (self.tokens, self.width))
        out: Tensor = self.norm(self.mix(z) + crossed)
        return out

    def flops(self, batch: int) -> int:
        dots = 2 * batch * self.inputs * self.inputs * self.width
        return dots + linear_flops(self.inner, batch) + linear_flops(self.outer, batch) + self.mix.flops(batch)


class SequenceLayer(nn.Module):
    """S' = Z + SelfAttention(LayerNorm(Z)), Z = PFFN(S, X_sum); GDPA over the whole sequence, rotary positions."""

    regions = ("enter", "leave")

    def __init__(self, config: InterFormerConfig, backend: str | None) -> None:
        super().__init__()
        self.personalise = PFFN(
            config.seq_width,
            config.heads,
            hidden=config.hidden,
            context_width=config.width,
            context_tokens=config.context_tokens,
            scale=None if config.tau is None else 1 / config.tau,
            backend=backend,
        )
        self.norm = nn.LayerNorm(config.seq_width)
        self.attend = SelfAttention(
            config.seq_width,
            config.heads,
            out_scale="mean",
            rotary=RotaryTemporal(config.seq_width // config.heads, time_pairs=0),
            backend=backend,
        )

    def forward(self, stream: Tensor, offsets: Tensor, turns: tuple[Tensor, Tensor], context: Tensor) -> Tensor:
        z = self.personalise(stream, offsets, context=context.to(stream.dtype))
        q, k, v = self.enter(z, *turns)
        return self.leave(self.attend.attend(q, k, v, offsets, offsets), z)

    def enter(self, z: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attend.project(self.norm(z), (cos, sin))

    def leave(self, attended: Tensor, z: Tensor) -> Tensor:
        out: Tensor = z + self.attend.out(attended.flatten(1))
        return out.to(z.dtype)

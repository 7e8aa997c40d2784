"""Both models as float64 computations written out: one example at a time, no packing, no masks, nothing of theirs but their weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gdpa.data.schema import Batch
from gdpa.models import ClickModel

HOUR = 3600.0


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    return x @ module.weight.T + (0 if module.bias is None else module.bias)


def over_tokens(module: nn.Linear, x: Tensor) -> Tensor:
    """x (tokens, width)."""
    return module.weight @ x + (0 if module.bias is None else module.bias[:, None])


def norm(x: Tensor, module: nn.LayerNorm | None = None) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return y if module is None else y * module.weight + module.bias


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.reshape(len(x), heads, x.shape[1] // heads).transpose(0, 1)  # [H, rows, D]


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, *, mean: bool) -> Tensor:
    """gelu(q k^T / sqrt(D)) v, over the number of keys where `mean`; (rows, width) each."""
    q, k, v = (heads_of(x, heads) for x in (q, k, v))
    out = gelu(q @ k.mT / math.sqrt(q.shape[-1])) @ v
    return out.transpose(0, 1).flatten(1) * (1 / max(k.shape[1], 1) if mean else 1)


def turn(x: Tensor, heads: int, ages: Tensor | None) -> Tensor:
    """Rotary positions, and half of the pairs by age where there are ages."""
    rows, width = x.shape
    pairs = width // heads // 2
    timed = pairs // 2 if ages is not None else 0
    placed = pairs - timed
    position = torch.arange(rows, dtype=x.dtype)
    angles = [position * 10000.0 ** (-j / placed) for j in range(placed)]
    if ages is not None:
        tau = torch.log1p(ages.double().clamp(min=0) / HOUR)
        angles += [tau * 100.0 ** (-i / timed) for i in range(timed)]
    angle = torch.stack(angles, dim=1)[None]  # [1, rows, pairs]
    first, second = heads_of(x, heads).chunk(2, dim=-1)
    turned = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)
    return turned.transpose(0, 1).flatten(1)


def pffn(module: Any, x: Tensor, context: Tensor) -> Tensor:
    generated = linear(module.weights, context).reshape(module.hidden, 2, module.width)
    y = norm(x)
    g = attend(y, generated[:, 0], generated[:, 1], module.heads, mean=False) + y
    return g / (g.square().mean(-1, keepdim=True) + 1e-5).sqrt() + x


def mixed(module: Any, x: Tensor) -> Tensor:
    y = over_tokens(module.mix, x)
    return norm(y + linear(module.outer, gelu(linear(module.inner, y))), module.norm)


def scalars(ages: Tensor, values: Tensor) -> Tensor:
    # In float32, as data is; the model widens the result.
    columns = (torch.log1p(ages / HOUR), values.sign() * torch.log1p(values.abs()))
    return torch.stack(columns, dim=1).double() / 4


def features(module: Any, dense: Tensor, sparse: Tensor, lengths: list[int]) -> Tensor:
    counts = torch.log1p(torch.tensor(lengths, dtype=torch.float64))
    tokens = [linear(module.dense, torch.cat((dense.double(), counts)))]
    tokens += [row @ weight for row, weight in zip(sparse, module.sparse, strict=True)]
    return norm(over_tokens(module.mix, torch.stack(tokens)), module.norm)


def head(module: Any, x: Tensor, first: Tensor, summaries: Tensor) -> Tensor:
    joined = torch.cat((x, summaries)).flatten()
    dots = (summaries @ first.T).flatten() / first.shape[1]
    return (linear(module.out, gelu(norm(linear(module.hidden, joined), module.norm))) + linear(module.dots, dots))[0]


def example(model: ClickModel, batch: Batch, index: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Dense features, rows of the tables, and the events of one example."""
    one = batch.rows(index, index + 1)
    tables, schema = model.tables, model.schema
    names = ["history_item" if name == schema.candidate else f"sparse_{name}" for name, _ in schema.sparse]
    sparse = torch.stack([tables[name].weight[one.sparse[0, i]] for i, name in enumerate(names)])
    ages = (one.request_timestamps[0] - one.history.timestamps).float()
    return one.dense[0], sparse, {"ages": ages, **one.history.events}


def window_by_hand(module: Any, x: Tensor, ages: Tensor) -> Tensor:
    width, attention = module.attend.width, module.attend
    qkv = linear(attention.qkv, norm(x, module.norm))
    q, k = (turn(part, attention.heads, ages) for part in (qkv[:, :width], qkv[:, width : 2 * width]))
    q, k, v = (heads_of(part, attention.heads) for part in (q, k, qkv[:, 2 * width :]))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    behind = torch.arange(len(x))[:, None] - torch.arange(len(x))
    scores = scores.masked_fill((behind < 0) | (behind >= attention.window), -math.inf)
    return x + linear(attention.out, (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


def kunlun_by_hand(model: Any, batch: Batch, index: int) -> Tensor:
    dense, sparse, events = example(model, batch, index)
    part, items = model.dense, model.tables["history_item"].weight
    members = [[kind for kind, group in enumerate(model.group_of) if group == g] for g in range(len(part.groups))]
    chosen = [torch.isin(events["types"], torch.tensor(kinds)) for kinds in members]
    x = first = features(part.features, dense, sparse, [int(mask.sum()) for mask in chosen])

    def pooled(pool: Any, stream: Tensor) -> Tensor:
        hsp, width = pool.pool, pool.pool.width
        kv = linear(hsp.kv, stream)
        z = attend(linear(hsp.query, norm(hsp.seeds)), kv[:, :width], kv[:, width:], hsp.heads, mean=True)
        kron = hsp.condense
        y = sum(kron.token_weight[:, i] @ z @ kron.feature_weight[i] for i in range(kron.terms))
        return norm(linear(pool.lift, y), pool.norm)

    streams, summaries = [], [torch.empty(0)] * len(members)
    for stack, mask, kinds in zip(part.groups, chosen, members, strict=True):
        types = torch.tensor([kinds.index(int(kind)) for kind in events["types"][mask]], dtype=torch.int64)
        token = linear(stack.encode.item, items[events["items"][mask]]) + stack.encode.types[types]
        token = token + linear(stack.encode.scalars, scalars(events["ages"][mask], events["values"][mask]))
        streams.append(norm(token, stack.encode.norm))
    for layer in range(len(part.generate) + 1):
        for g, stack in enumerate(part.groups):
            if layer == stack.depth or (layer < stack.depth and layer % 2 == 0):
                summaries[g] = pooled(stack.pools[-1] if layer == stack.depth else stack.pools[layer // 2], streams[g])
        if layer == len(part.generate):
            break
        context = mixed(part.generate[layer], x)
        for g, (stack, mask) in enumerate(zip(part.groups, chosen, strict=True)):
            if layer < stack.depth and layer % 2 == 0:
                streams[g] = pffn(stack.personalise[layer // 2], streams[g], context)
            elif layer < stack.depth:
                streams[g] = window_by_hand(stack.windows[layer // 2], streams[g], events["ages"][mask])
        interact, z = part.interact[layer], torch.cat((context, *summaries))
        rank = len(interact.compress.weight) // len(interact.sizes)
        new, start = [], 0
        for e, size in enumerate(interact.sizes):
            products = z[start : start + size] @ z.T @ interact.compress.weight[e * rank : (e + 1) * rank].T
            new.append(linear(interact.experts[e], norm(products.flatten(), interact.norms[e])))
            start += size
        x = norm(x + torch.cat((torch.stack(new), over_tokens(interact.linear, z))), interact.norm)
    return head(part.head, x, first, torch.cat(summaries))


def interformer_by_hand(model: Any, batch: Batch, index: int) -> Tensor:
    dense, sparse, events = example(model, batch, index)
    part, config, items = model.dense, model.config, model.tables["history_item"].weight
    x = first = features(part.features, dense, sparse, [len(events["items"])])

    def gated(module: Any, z: Tensor) -> Tensor:
        return torch.tanh(z * linear(module.linear, z))

    def summary(module: Any, stream: Tensor) -> Tensor:
        pma, width = module.pool, config.seq_width
        kv = linear(pma.kv, stream)
        pooled = linear(pma.out, attend(pma.seeds, kv[:, :width], kv[:, width:], pma.heads, mean=True))
        cls, rest = stream[: config.context_tokens], stream[config.context_tokens :]
        recent = rest[max(0, len(rest) - config.recent) :]
        padding = torch.zeros(config.recent - len(recent), width, dtype=stream.dtype)
        joined = torch.cat((cls, padding, recent, pooled))
        return gated(module.gating, norm(linear(module.lift, joined), module.norm))

    encode = part.encode
    s = torch.cat(
        (
            linear(encode.items, items[events["items"]]),
            encode.types[events["types"]],
            linear(encode.scalars, scalars(events["ages"], events["values"])),
        ),
        dim=1,
    )
    mask = linear(encode.outer, linear(encode.inner, s).clamp(min=0))
    stream = norm(linear(encode.compress, s * mask), encode.norm)
    context = gated(part.condense[0].gating, mixed(part.condense[0].mix, x))
    stream = torch.cat((linear(part.cls, context), stream))
    for layer in range(config.layers):
        context = gated(part.condense[layer].gating, mixed(part.condense[layer].mix, x))
        z = torch.cat((x, summary(part.summarise[layer], stream)))
        interact = part.interact[layer]
        crossed = linear(interact.outer, gelu(linear(interact.inner, (z @ z.T).flatten() / config.width)))
        x = norm(mixed(interact.mix, z) + crossed.reshape(config.tokens, config.width), interact.norm)
        block, width = part.advance[layer], config.seq_width
        stream = pffn(block.personalise, stream, context)
        qkv = linear(block.attend.qkv, norm(stream, block.norm))
        q, k = (turn(piece, config.heads, None) for piece in (qkv[:, :width], qkv[:, width : 2 * width]))
        stream = stream + linear(block.attend.out, attend(q, k, qkv[:, 2 * width :], config.heads, mean=True))
    return head(part.head, x, first, summary(part.summarise[-1], stream))


BY_HAND = {"interformer": interformer_by_hand, "kunlun": kunlun_by_hand}

"""Pooling by multi-head attention: learned seeds, shared by the batch, read each sequence into a fixed number of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdpa.api import ActivationLike
from gdpa.nn.base import AttentionModule, OutScale
from gdpa.nn.kronecker import SumKronLinear
from gdpa.nn.sequences import check_like, check_size, split


class _SeedAttention(AttentionModule):
    """GDPA(queries, W_k x, W_v x) of queries that the batch shares; k and v are slices of one linear map's result."""

    seeds: nn.Parameter  # (seeds, features), a subclass's

    def __init__(
        self,
        width: int,
        heads: int,
        seeds: int,
        head_dim: int | None,
        activation: ActivationLike,
        scale: float | None,
        out_scale: OutScale,
        bias: bool,
        backend: str | None,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__(width, heads, head_dim, activation=activation, scale=scale, out_scale=out_scale, backend=backend)
        self.n_seeds = check_size("seeds", seeds)
        self.kv = nn.Linear(width, 2 * heads * self.head_dim, bias=bias, device=device, dtype=dtype)

    def pool(self, queries: Tensor, x: Tensor, offsets: Tensor | None, max_seqlen: int | None) -> Tensor:
        """queries (seeds, heads * head_dim) -> (B, seeds, heads * head_dim)."""
        values, offsets = split(x, offsets, (self.width,), "width", max_seqlen)
        check_like("x", values, self.kv.weight)
        k, v = self.kv(values).unflatten(-1, (2, self.heads, self.head_dim)).unbind(1)
        # Under autocast the queries come from a parameter or a linear map, in either dtype; the operator casts the three to one.
        q = queries.unflatten(-1, (self.heads, self.head_dim))
        return self.attend(q, k, v, None, offsets, None, max_seqlen).flatten(2)

    def reset_parameters(self) -> None:
        """The seeds alone; the linear maps have their own."""
        nn.init.normal_(self.seeds)

    def own_repr(self) -> list[str]:
        return [f"seeds={self.n_seeds}"]


class PMA(_SeedAttention):
    """out = W_o GDPA(E, W_k x, W_v x): `seeds` learned queries E pool each sequence into as many tokens.

    E has no projection: that of a learned constant would be another learned constant. A sequence without events gives W_o's bias.

    Args:
        width, heads, head_dim, activation, scale, out_scale, backend: see `gdpa.nn.base.AttentionModule`.
        seeds: how many.
        bias: whether the linear maps have one.

    Attributes:
        seeds: the parameter E, (seeds, heads * head_dim), drawn from a unit normal.

    Forward:
        x: packed values (T, width) with `offsets` (B + 1,), or a jagged nested tensor (B, *, width) alone.
        max_seqlen: an optional upper bound of the lengths.
        Returns (B, seeds, width), dense for both kinds of x; under autocast in the autocast dtype.

    Example:
        >>> pma = PMA(64, 4, seeds=2)
        >>> offsets = gdpa.offsets_from_lengths(torch.tensor([3, 0, 5]))
        >>> pma(torch.randn(8, 64), offsets).shape
        torch.Size([3, 2, 64])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        seeds: int,
        head_dim: int | None = None,
        activation: ActivationLike = "gelu",
        scale: float | None = None,
        out_scale: OutScale = None,
        bias: bool = True,
        backend: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(width, heads, seeds, head_dim, activation, scale, out_scale, bias, backend, device, dtype)
        inner = heads * self.head_dim
        self.seeds = nn.Parameter(torch.empty(seeds, inner, device=device, dtype=dtype))
        self.out = nn.Linear(inner, width, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, x: Tensor, offsets: Tensor | None = None, *, max_seqlen: int | None = None) -> Tensor:
        out: Tensor = self.out(self.pooled(x, offsets, max_seqlen))
        return out

    def pooled(self, x: Tensor, offsets: Tensor | None, max_seqlen: int | None = None) -> Tensor:
        """GDPA(E, W_k x, W_v x), (B, seeds, heads * head_dim): all but W_o."""
        return self.pool(self.seeds, x, offsets, max_seqlen)


class HSP(_SeedAttention):
    """Hierarchical seed pooling: Z = GDPA(W_q LayerNorm(E), W_k x, W_v x), then Y = SumKronLinear(Z), `seeds` -> `tokens`.

    Many seeds read the sequence finely, a structured linear map condenses them. The LayerNorm has no parameters, since W_q follows;
    Z has no output projection, since each W_i of SumKronLinear is one. A sequence without events gives zeros.

    Args:
        width, heads, head_dim, activation, scale, out_scale, backend: see `gdpa.nn.base.AttentionModule`.
        seeds: how many learned queries; more than `tokens` in the models that use it, which is not required.
        tokens: how many come out.
        terms: the terms of SumKronLinear.
        bias: whether W_q and W_k, W_v have one.

    Attributes:
        seeds: the parameter E, (seeds, width), drawn from a unit normal.

    Forward:
        x: packed values (T, width) with `offsets` (B + 1,), or a jagged nested tensor (B, *, width) alone.
        max_seqlen: an optional upper bound of the lengths.
        Returns (B, tokens, width), dense for both kinds of x; under autocast in the autocast dtype.

    Example:
        >>> hsp = HSP(64, 4, seeds=16, tokens=4, terms=2)
        >>> offsets = gdpa.offsets_from_lengths(torch.tensor([3, 0, 5]))
        >>> hsp(torch.randn(8, 64), offsets).shape
        torch.Size([3, 4, 64])
    """

    regions = ("queries",)

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        seeds: int,
        tokens: int,
        terms: int = 8,
        head_dim: int | None = None,
        activation: ActivationLike = "gelu",
        scale: float | None = None,
        out_scale: OutScale = None,
        bias: bool = True,
        backend: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(width, heads, seeds, head_dim, activation, scale, out_scale, bias, backend, device, dtype)
        inner = heads * self.head_dim
        self.seeds = nn.Parameter(torch.empty(seeds, width, device=device, dtype=dtype))
        self.query = nn.Linear(width, inner, bias=bias, device=device, dtype=dtype)
        self.condense = SumKronLinear(seeds, check_size("tokens", tokens), inner, width, terms=terms, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, x: Tensor, offsets: Tensor | None = None, *, max_seqlen: int | None = None) -> Tensor:
        out: Tensor = self.condense(self.pooled(x, offsets, max_seqlen))
        return out

    def pooled(self, x: Tensor, offsets: Tensor | None, max_seqlen: int | None = None) -> Tensor:
        """Z, (B, seeds, heads * head_dim)."""
        return self.pool(self.queries(), x, offsets, max_seqlen)

    def queries(self) -> Tensor:
        out: Tensor = self.query(functional.layer_norm(self.seeds, (self.width,), eps=1e-5))
        return out

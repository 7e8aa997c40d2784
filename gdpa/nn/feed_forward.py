"""The personalised feed-forward: a two-layer network over the tokens whose weights are generated for each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdpa.api import ActivationLike
from gdpa.errors import GdpaError
from gdpa.nn.base import AttentionModule, OutScale
from gdpa.nn.sequences import check_like, check_size, join, split

EPS = 1e-5


class PFFN(AttentionModule):
    """The production block around per-sample weights K = W1(context) and V = W2(context), each (B, hidden, heads, head_dim):

        y   = LayerNorm(x)             over all heads, without parameters
        g   = GDPA(y, K, V) + y
        out = RMSNorm(g) + x           without parameters; eps is 1e-5 in both

    A feed-forward network with `hidden` units is activation(y K^T) V, so each sample's K and V are its own two layers.

    `context` summarises the sample in `context_tokens` tokens. W1 and W2 are one linear map applied to each token, which yields
    hidden / context_tokens rows of K and of V. With one token, every row of K and V sees the whole summary; with `hidden` tokens,
    each token becomes one hidden unit. The map has context_width * 2 * (hidden / context_tokens) * width weights.

    Args:
        width: the features of a token, heads * head_dim.
        heads, activation, scale, out_scale, backend: see `gdpa.nn.base.AttentionModule`. scale=1 / (longest sequence) is the other
            usual choice here. Every sample has `hidden` keys, so out_scale="mean" is 1 / hidden.
        hidden: the rows of K and of V, 128 to 512 in production.
        context_width: the features of a context token.
        context_tokens: how many there are, a divisor of `hidden`.
        bias: whether W1 and W2 have one: weights that all samples share.

    Forward:
        x: packed values (T, width) with `offsets` (B + 1,), or a jagged nested tensor (B, *, width) alone.
        context: (B, context_tokens, context_width), or (B, context_width) where there is one token.
        max_seqlen: an optional upper bound of the lengths.
        Returns x's kind, shape and dtype, under autocast too.

    Example:
        >>> block = PFFN(64, 4, hidden=32, context_width=48)
        >>> offsets = gdpa.offsets_from_lengths(torch.tensor([3, 0, 5]))
        >>> block(torch.randn(8, 64), offsets, context=torch.randn(3, 48)).shape
        torch.Size([8, 64])
    """

    regions = ("enter", "leave")

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int,
        context_width: int,
        context_tokens: int = 1,
        activation: ActivationLike = "gelu",
        scale: float | None = None,
        out_scale: OutScale = None,
        bias: bool = True,
        backend: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(width, heads, None, activation=activation, scale=scale, out_scale=out_scale, backend=backend)
        self.hidden = check_size("hidden", hidden)
        self.context_width = check_size("context_width", context_width)
        self.context_tokens = check_size("context_tokens", context_tokens)
        if hidden % context_tokens != 0:
            raise GdpaError(f"context_tokens: expected a divisor of hidden {hidden}, got {context_tokens}")
        self.weights = nn.Linear(context_width, 2 * (hidden // context_tokens) * width, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, offsets: Tensor | None = None, *, context: Tensor, max_seqlen: int | None = None) -> Tensor:
        values, offsets = split(x, offsets, (self.width,), "width", max_seqlen)
        check_like("x", values, self.weights.weight)
        batch = offsets.shape[0] - 1
        k, v = self._generate(context, batch)
        y = self.enter(values, k.dtype)
        attended = self.attend(y, k, v, offsets, None, max_seqlen)
        return join(x, self.leave(attended, y, values), offsets)

    def enter(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """y, (T, heads, head_dim): the queries, and the residual of the attention."""
        y = functional.layer_norm(values, (self.width,), eps=EPS).to(dtype)
        heads: Tensor = y.unflatten(-1, (self.heads, self.head_dim))
        return heads

    def leave(self, attended: Tensor, y: Tensor, values: Tensor) -> Tensor:
        """RMSNorm(attended + y) + values, in float32 at least and rounded once."""
        g = attended.to(torch.promote_types(attended.dtype, torch.float32)) + y
        out: Tensor = functional.rms_norm(g.flatten(1), (self.width,), eps=EPS) + values
        return out.to(values.dtype)

    def _generate(self, context: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """K and V, (B, hidden, heads, head_dim) each: slices of one result, not copies."""
        if not isinstance(context, Tensor):
            raise GdpaError(f"context: expected a torch.Tensor, got {type(context).__name__}")
        tokens = (self.context_tokens, self.context_width)
        accepted = context.shape[1:] == tokens or (self.context_tokens == 1 and context.shape[1:] == tokens[1:])
        if context.is_nested or not accepted or context.shape[0] != batch:
            also = f" or ({batch}, {self.context_width})" if self.context_tokens == 1 else ""
            raise GdpaError(f"context: expected {(batch, *tokens)}{also} for a batch of {batch}, got {tuple(context.shape)}")
        check_like("context", context, self.weights.weight)
        generated = self.weights(context).view(batch, self.hidden, 2, self.heads, self.head_dim)
        k, v = generated.unbind(2)
        return k, v

    def own_repr(self) -> list[str]:
        return [f"hidden={self.hidden}", f"context_width={self.context_width}", f"context_tokens={self.context_tokens}"]

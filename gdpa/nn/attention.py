"""Self-attention over jagged sequences: one projection, the operator, one projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gdpa.api import ActivationLike
from gdpa.errors import GdpaError
from gdpa.nn.base import AttentionModule, OutScale
from gdpa.nn.rotary import RotaryTemporal, turn
from gdpa.nn.sequences import check_like, check_size, join, split
from gdpa.problem import check_window


class SelfAttention(AttentionModule):
    """out = W_o GDPA(W_q x, W_k x, W_v x) within each sequence; no norm and no residual.

    q, k and v come of one linear map and are slices of its result, which the operator takes as they are, without copies.

    Args:
        width, heads, head_dim, activation, scale, out_scale, backend: see `gdpa.nn.base.AttentionModule`.
        kv_heads: key and value heads, a divisor of `heads`; None means `heads`.
        causal, window_size: as in `gdpa.attention`.
        rotary: a `RotaryTemporal` of this head_dim, applied to q and k.
        bias: whether the two linear maps have one.

    Forward:
        x: packed values (T, width) with `offsets` (B + 1,), or a jagged nested tensor (B, *, width) alone.
        dt: the elapsed times of the events where `rotary` asks for them, (T,) or jagged nested (B, *).
        max_seqlen: an optional upper bound of the lengths.
        Returns x's kind and shape; under autocast in the autocast dtype. Rows past offsets[-1] belong to no sequence and attend to
        nothing.

    Example:
        >>> layer = SelfAttention(64, 4, activation="silu", out_scale="mean")
        >>> offsets = gdpa.offsets_from_lengths(torch.tensor([3, 0, 5]))
        >>> layer(torch.randn(8, 64), offsets).shape
        torch.Size([8, 64])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        activation: ActivationLike = "gelu",
        scale: float | None = None,
        out_scale: OutScale = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        rotary: RotaryTemporal | None = None,
        bias: bool = True,
        backend: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(width, heads, head_dim, activation=activation, scale=scale, out_scale=out_scale, backend=backend)
        self.kv_heads = heads if kv_heads is None else check_size("kv_heads", kv_heads)
        if heads % self.kv_heads != 0:
            raise GdpaError(f"kv_heads: expected a divisor of the {heads} heads, got {kv_heads}")
        self.window_size = check_window(window_size, causal)
        if rotary is not None and not isinstance(rotary, RotaryTemporal):
            raise GdpaError(f"rotary: expected a gdpa.nn.RotaryTemporal or None, got {type(rotary).__name__}")
        if rotary is not None and rotary.head_dim != self.head_dim:
            raise GdpaError(f"rotary: expected one of head_dim {self.head_dim}, got head_dim {rotary.head_dim}")
        self.rotary = rotary
        inner = heads * self.head_dim
        self.qkv = nn.Linear(width, inner + 2 * self.kv_heads * self.head_dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(inner, width, bias=bias, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, offsets: Tensor | None = None, *, dt: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        values, offsets = split(x, offsets, (self.width,), "width", max_seqlen)
        check_like("x", values, self.qkv.weight)
        if self.rotary is None and dt is not None:
            raise GdpaError("dt: expected None, since this layer has no rotary to use it, got a tensor")
        turns = None if self.rotary is None else self.rotary.turns(values.shape[0], offsets, dt, values.dtype)
        q, k, v = self.project(values, turns)
        attended = self.attend(q, k, v, offsets, offsets, max_seqlen, max_seqlen, window_size=self.window_size)
        return join(x, self.out(attended.flatten(1)), offsets)

    def project(self, values: Tensor, turns: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of packed values, turned where there is a rotary (`RotaryTemporal.turns`)."""
        qkv = self.qkv(values).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        # split's backward is one concatenation; that of slices would add three padded tensors.
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if turns is not None:
            q, k = turn(q, *turns), turn(k, *turns)
        return q, k, v

    def own_repr(self) -> list[str]:
        parts = [] if self.kv_heads == self.heads else [f"kv_heads={self.kv_heads}"]
        return parts if self.window_size == (-1, -1) else [*parts, f"window_size={self.window_size}"]

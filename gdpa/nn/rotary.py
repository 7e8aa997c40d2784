"""Rotary embedding of positions and of elapsed time (ROTE)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gdpa.errors import GdpaError
from gdpa.nn.sequences import check_size, join, same_offsets, split, split_nested


class RotaryTemporal(nn.Module):
    """Turns the feature pairs of q and k by angles of the event's position and of its age.

    The head's features form head_dim / 2 pairs (j, j + head_dim / 2). The last `time_pairs` of them turn by the age, the others by the
    position in the sequence, counted from 0:

        pair j by position     angle = position * base^(-j / position_pairs)
        pair i by age          angle = tau * time_base^(-i / time_pairs),    tau = log(1 + dt / t_scale)

    A product q @ k then depends on the difference of positions and on that of the tau, which is near log(dt_q / dt_k) for ages well
    above t_scale. Angles and rotation are computed in float32 (float64 for float64 inputs) whatever the module is cast to; there are
    no parameters and no buffers.

    Args:
        head_dim: even.
        time_pairs: None means half of the pairs, rounded down; 0 is the usual rotary embedding, without times.
        t_scale: in the unit of dt; below it tau is nearly linear in the age, above it logarithmic. The default is an hour in seconds.
        base: sets the slowest frequency of positions.
        time_base: sets that of tau. tau seldom passes 20, so a smaller base than for positions.

    Forward:
        x: (T, heads, head_dim) with `offsets` (B + 1,), or a jagged nested tensor (B, *, heads, head_dim) alone.
        dt: the age of each event, say request time less event time, (T,) or jagged nested (B, *), floats or integers. One below 0, an
            event after the request, counts as 0. Not differentiated.
        Returns x's kind, shape and dtype.

    Example:
        >>> rotary = RotaryTemporal(32)
        >>> offsets = gdpa.offsets_from_lengths(torch.tensor([3, 0, 5]))
        >>> rotary(torch.randn(8, 4, 32), offsets, dt=torch.rand(8) * 86400).shape
        torch.Size([8, 4, 32])
    """

    def __init__(
        self,
        head_dim: int,
        *,
        time_pairs: int | None = None,
        t_scale: float = 3600.0,
        base: float = 10000.0,
        time_base: float = 100.0,
    ) -> None:
        super().__init__()
        if check_size("head_dim", head_dim) % 2 != 0:
            raise GdpaError(f"head_dim: expected an even number, got {head_dim}")
        self.head_dim = head_dim
        pairs = head_dim // 2
        if time_pairs is None:
            time_pairs = pairs // 2
        if isinstance(time_pairs, bool) or not isinstance(time_pairs, int) or not 0 <= time_pairs <= pairs:
            raise GdpaError(f"time_pairs: expected an integer from 0 to {pairs} (half of head_dim), got {time_pairs!r}")
        self.time_pairs = time_pairs
        self.position_pairs = pairs - time_pairs
        for name, value in (("t_scale", t_scale), ("base", base), ("time_base", time_base)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise GdpaError(f"{name}: expected a finite number above 0, got {value!r}")
        self.t_scale = float(t_scale)
        self.base = float(base)
        self.time_base = float(time_base)

    def forward(self, x: Tensor, offsets: Tensor | None = None, dt: Tensor | None = None) -> Tensor:
        heads = x.shape[-2] if isinstance(x, Tensor) and x.dim() > 2 else 1
        values, offsets = split(x, offsets, (heads, self.head_dim), "heads, head_dim")
        return join(x, turn(values, *self.turns(values.shape[0], offsets, dt, values.dtype)), offsets)

    def turns(self, rows: int, offsets: Tensor, dt: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `turn` takes: the cosines and sines of all angles, (rows, head_dim / 2) each, in float32, or float64 for that dtype.
        Layers over the same sequences with the same options can share them."""
        angles = self._angles(rows, offsets, dt, torch.promote_types(dtype, torch.float32))
        return angles.cos(), angles.sin()

    def _angles(self, rows: int, offsets: Tensor, dt: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(rows, head_dim / 2), without a host synchronisation."""
        row = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
        # The last offset that is at most the row starts its sequence: of several equal ones, the sequence that is not empty.
        sequence = torch.searchsorted(offsets, row, right=True) - 1
        position = (row - offsets[sequence]).to(dtype)
        angles = position[:, None] * _frequencies(self.base, self.position_pairs, position)
        if self.time_pairs == 0:
            if dt is not None:
                raise GdpaError("dt: expected None where time_pairs is 0, got a tensor")
            return angles
        ages = _ages(dt, rows, offsets)
        tau = torch.log1p(ages.to(dtype).clamp(min=0) / self.t_scale)
        return torch.cat((angles, tau[:, None] * _frequencies(self.time_base, self.time_pairs, tau)), dim=-1)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, position_pairs={self.position_pairs}, time_pairs={self.time_pairs}, t_scale={self.t_scale:g}, "
            f"base={self.base:g}, time_base={self.time_base:g}"
        )


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (rows, heads, head_dim) by the angles that `RotaryTemporal.turns` gave; the heads of a row turn together."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _frequencies(base: float, pairs: int, like: Tensor) -> Tensor:
    """base^(-j / pairs), made where it is used: a buffer would be rounded when the module is cast to bf16."""
    return base ** (-torch.arange(pairs, device=like.device, dtype=like.dtype) / max(pairs, 1))


def _ages(dt: Tensor | None, rows: int, offsets: Tensor) -> Tensor:
    if not isinstance(dt, Tensor):
        raise GdpaError(f"dt: expected the ages of the events, (T,) or jagged nested (B, *), got {type(dt).__name__}")
    values, own_offsets = split_nested("dt", dt, 2) if dt.is_nested else (dt, offsets)
    if not same_offsets(own_offsets, offsets):
        raise GdpaError("dt: expected the lengths (the offsets) of x, got other ones")
    if values.dim() != 1 or values.shape[0] != rows:
        raise GdpaError(f"dt: expected {rows} ages, one per row of x, got shape {tuple(values.shape)}")
    if values.dtype.is_complex or values.dtype == torch.bool:
        raise GdpaError(f"dt: expected floats or integers, got {values.dtype}")
    if values.device != offsets.device:
        raise GdpaError(f"dt: expected device {offsets.device} (that of x), got {values.device}")
    return values.detach()

"""Softmax self-attention in a causal sliding window, over packed sequences, by PyTorch's own attention.

On CUDA in bf16 or fp16 it is `torch.nn.attention.varlen.varlen_attn`, where it takes a window. Elsewhere each sequence is cut into
chunks of at least the window's size, and each chunk attends to itself and the one before: `scaled_dot_product_attention` over about
2 * window keys per row. Neither pads a sequence to another's length, and neither lets a NaN of one reach another.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdpa.errors import GdpaError
from gdpa.models.sequences import rows_to_sequences
from gdpa.nn import RotaryTemporal
from gdpa.nn.rotary import turn
from gdpa.nn.sequences import check_size

SHORTEST_CHUNK = 32  # shorter ones leave the matrix products too small


class WindowAttention(nn.Module):
    """out = W_o softmax(rotary(W_q x) rotary(W_k x)^T / sqrt(head_dim)) W_v x; an event sees itself and the window - 1 before it.

    Forward:
        x: packed values (T, width) with `offsets` (B + 1,); ages (T,) as RotaryTemporal takes them; `longest` bounds the lengths.
        Returns (T, width); under autocast in the autocast dtype.
    """

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.width, self.heads, self.window = check_size("width", width), check_size("heads", heads), check_size("window", window)
        if width % heads != 0:
            raise GdpaError(f"heads: expected a divisor of width {width}, got {heads}")
        self.takes_windows = varlen_takes_windows()  # asked here, since a compiler cannot read a signature
        self.rotary = RotaryTemporal(width // heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, offsets: Tensor, ages: Tensor, longest: int) -> Tensor:
        attended = self.attend(*self.project(x, *self.rotary.turns(x.shape[0], offsets, ages, x.dtype)), offsets, longest)
        out: Tensor = self.out(attended.flatten(1))
        return out

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; cos and sin are those of `RotaryTemporal.turns`."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, self.width // self.heads)).chunk(3, dim=1)
        return turn(q, cos, sin), turn(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """(T, heads, head_dim) each, and the result."""
        halves = q.dtype in (torch.bfloat16, torch.float16)
        # varlen_attn refuses a batch without rows.
        if q.device.type == "cuda" and halves and q.shape[0] > 0 and self.takes_windows:
            from torch.nn.attention.varlen import varlen_attn

            attended = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(self.window - 1, 0))
            assert isinstance(attended, Tensor)
            return attended
        return banded_attention(q, k, v, offsets, self.window)

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, window={self.window}"


@cache
def varlen_takes_windows() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def banded_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, window: int) -> Tensor:
    """q, k, v (T, H, D) -> (T, H, D): the windowed attention by chunks of rows.

    A chunk holds rows of one sequence. Not a mask but zeros in its place keep the chunk before out where that is another's: what is masked
    is multiplied by 0, and 0 * NaN is NaN."""
    rows, chunk = q.shape[0], max(window, SHORTEST_CHUNK)
    if rows == 0:
        return v  # on CUDA, scaled_dot_product_attention of torch 2.11 returns None for an empty batch
    sequence = rows_to_sequences(offsets, rows)  # rows behind the last sequence are one of their own
    starts = offsets.long()
    stops = torch.cat((starts[1:], starts.new_full((1,), rows)))
    chunks_until = ((stops - starts + chunk - 1) // chunk).cumsum(0)
    chunks = rows // chunk + starts.shape[0]  # as many as there may be: the number of them is known to the device alone
    owner = torch.searchsorted(chunks_until, torch.arange(chunks, device=q.device), right=True)
    follows = functional.pad(
        owner[1:] == owner[:-1], (1, 1), value=False
    )  # whether a chunk goes on with the sequence of the one before
    first = functional.pad(chunks_until[:-1], (1, 0)) * chunk  # row of each sequence
    own = first[sequence] + torch.arange(rows, device=q.device) - starts[sequence]
    # As keys, rows stand behind those of the chunk before, and before those of the chunk after; or behind everything, where none follows.
    after = torch.where(follows[own // chunk + 1], own // chunk + 1, chunks)
    places = torch.cat((own + (own // chunk + 1) * chunk, after * 2 * chunk + own % chunk))

    def queries(x: Tensor) -> Tensor:
        laid_out: Tensor = x.new_zeros(chunks * chunk, *x.shape[1:]).index_copy(0, own, x)
        return laid_out.view(chunks, chunk, *x.shape[1:]).transpose(1, 2)  # [chunks, H, chunk, D]

    def keys(x: Tensor) -> Tensor:
        laid_out: Tensor = x.new_zeros((2 * chunks + 1) * chunk, *x.shape[1:]).index_copy(0, places, torch.cat((x, x)))
        return laid_out[:-chunk].view(chunks, 2 * chunk, *x.shape[1:]).transpose(1, 2)  # [chunks, H, 2 * chunk, D]

    distance = torch.arange(chunk, device=q.device)[:, None] - torch.arange(-chunk, chunk, device=q.device)
    near = (distance >= 0) & (distance < window)  # [chunk, 2 * chunk]
    there = torch.stack((follows[:-1], torch.ones_like(follows[1:])), dim=1).repeat_interleave(chunk, dim=1)  # [chunks, 2 * chunk]
    mask = near & there[:, None, :]
    attended = functional.scaled_dot_product_attention(queries(q), keys(k), keys(v), attn_mask=mask[:, None])
    return attended.transpose(1, 2).flatten(0, 1)[own]


def window_pairs(lengths: Tensor, window: int) -> int:
    """How many (query, key) pairs sequences of these lengths have in a causal window."""
    inside = lengths.long().clamp(max=window)
    return int((inside * (inside + 1) // 2 + (lengths.long() - inside) * window).sum())

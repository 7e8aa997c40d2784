"""Helpers between padded and packed batches. Differentiable, and without a host synchronisation except where said."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from gdpa.errors import GdpaError


def offsets_from_lengths(lengths: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """(B,) lengths -> (B + 1,) offsets that start at 0, on the same device.

    Example:
        >>> gdpa.offsets_from_lengths(torch.tensor([3, 0, 5]))
        tensor([0, 3, 3, 8], dtype=torch.int32)
    """
    _check_lengths(lengths)
    if dtype not in (torch.int32, torch.int64):
        raise GdpaError(f"dtype: expected torch.int32 or torch.int64, got {dtype}")
    # A look at values elsewhere costs a synchronisation, or there are none.
    if type(lengths) is Tensor and lengths.device.type == "cpu" and not torch.compiler.is_compiling() and lengths.numel():
        if int(lengths.min()) < 0:
            raise GdpaError(f"lengths: expected none below 0, got {int(lengths.min())}")
        total = sum(lengths.tolist())  # which a sum of tensors may not hold
        if total > torch.iinfo(torch.int64).max:
            raise GdpaError(f"lengths: expected a sum of at most 2^63 - 1, got {total}")
        if total > torch.iinfo(dtype).max:
            raise GdpaError(f"dtype: expected one that holds the sum of lengths, {total}, got {dtype}")
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(dtype)


def pack(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, ...) padded rows and (B,) lengths -> packed (T, ...) and int32 offsets (B + 1,). Reads T on the host.

    Example:
        >>> packed, offsets = gdpa.pack(torch.randn(3, 5, 4, 32), torch.tensor([3, 0, 5]))
        >>> packed.shape, offsets.tolist()
        (torch.Size([8, 4, 32]), [0, 3, 3, 8])
    """
    if not _is_ordinary(padded) or padded.dim() < 2:
        raise GdpaError(f"padded: expected a tensor of shape (B, S, ...), got {_describe(padded)}")
    _check_lengths(lengths)
    if lengths.shape[0] != padded.shape[0]:
        raise GdpaError(f"lengths: expected shape ({padded.shape[0]},) for the batch of padded, got {_describe(lengths)}")
    if lengths.numel() and (int(lengths.max()) > padded.shape[1] or int(lengths.min()) < 0):
        raise GdpaError(f"lengths: expected values from 0 to {padded.shape[1]}, got {int(lengths.min())} to {int(lengths.max())}")
    offsets = offsets_from_lengths(lengths)
    valid = torch.arange(padded.shape[1], device=padded.device) < lengths.to(padded.device)[:, None]
    return padded[valid], offsets.to(padded.device)


def unpack(packed: Tensor, offsets: Tensor, max_len: int, fill: float = 0.0) -> Tensor:
    """Packed (T, ...) -> (B, max_len, ...), rows past a sequence's length set to `fill`; longer sequences are cut at max_len.

    Example:
        >>> gdpa.unpack(torch.randn(8, 4, 32), torch.tensor([0, 3, 3, 8]), 5).shape
        torch.Size([3, 5, 4, 32])
    """
    if not _is_ordinary(packed) or packed.dim() < 1:
        raise GdpaError(f"packed: expected a tensor of shape (T, ...), got {_describe(packed)}")
    if not _is_ordinary(offsets) or offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise GdpaError(f"offsets: expected an int32 or int64 tensor of shape (B + 1,), got {_describe(offsets)}")
    if isinstance(max_len, bool) or not isinstance(max_len, int) or max_len < 0:
        raise GdpaError(f"max_len: expected an integer of at least 0, got {max_len!r}")
    if not isinstance(fill, (bool, int, float)):
        raise GdpaError(f"fill: expected a number, got {fill!r}")
    if not packed.dtype.is_floating_point and not packed.dtype.is_complex and not _is_of(packed.dtype, fill):
        raise GdpaError(f"fill: expected a number of packed's {packed.dtype}, got {fill!r}")
    offsets = offsets.to(packed.device, torch.int64).clamp(0, packed.shape[0])
    position = torch.arange(max_len, device=packed.device)
    row = offsets[:-1, None] + position
    valid = row < offsets[1:, None]
    if packed.shape[0] == 0:  # a row to look at, of which nothing comes
        packed = torch.cat((packed, packed.new_zeros(1, *packed.shape[1:])))
    padded = packed[row.clamp(max=packed.shape[0] - 1)]
    filler = torch.full((), fill, dtype=packed.dtype, device=packed.device)
    return torch.where(valid.view(*valid.shape, *[1] * (packed.dim() - 1)), padded, filler)


def _check_lengths(lengths: Tensor) -> None:
    # torch does not compare the other unsigned ones.
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not _is_ordinary(lengths) or lengths.dim() != 1 or lengths.dtype not in integers:
        raise GdpaError(f"lengths: expected an integer tensor of shape (B,), of uint8 or signed, got {_describe(lengths)}")


def _is_ordinary(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor that has a shape and strides, neither nested nor sparse."""
    return isinstance(value, Tensor) and not value.is_nested and value.layout == torch.strided


def _is_of(dtype: torch.dtype, number: float) -> bool:
    """Whether an integer dtype, or bool, has a number."""
    if dtype == torch.bool:
        return number in (0, 1)
    bounds = torch.iinfo(dtype)
    return bounds.min <= number <= bounds.max and number == int(number)


def _describe(value: object) -> str:
    if isinstance(value, Tensor) and not _is_ordinary(value):
        return "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

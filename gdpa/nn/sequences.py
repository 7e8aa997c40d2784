"""Sequences as the modules take them: packed values with offsets, or a jagged nested tensor; and checks that name the argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdpa.errors import GdpaError
from gdpa.problem import OFFSET_DTYPES, check_max_seqlen, check_offsets, offsets_are_checked


def check_size(name: str, value: int) -> int:
    """`value` where it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GdpaError(f"{name}: expected an integer of at least 1, got {value!r}")
    return value


def check_like(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Refuse another device or dtype than the parameters'; under autocast, dtypes are cast."""
    if tensor.device != weight.device:
        raise GdpaError(f"{name}: expected device {weight.device} (that of the parameters), got {tensor.device}")
    casts = weight.device.type != "meta" and torch.is_autocast_enabled(weight.device.type)
    if tensor.dtype != weight.dtype and not casts:
        raise GdpaError(f"{name}: expected dtype {weight.dtype} (that of the parameters), got {tensor.dtype}")


def split(
    x: Tensor, offsets: Tensor | None, trailing: tuple[int, ...], shape: str, max_seqlen: int | None = None
) -> tuple[Tensor, Tensor]:
    """The packed values (T, *trailing) and offsets (B + 1,) of x, in either kind. `shape` is `trailing` in the caller's words."""
    check_max_seqlen("max_seqlen", max_seqlen)
    if not isinstance(x, Tensor):
        raise GdpaError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.is_nested:
        if offsets is not None:
            raise GdpaError("offsets: expected None with a nested x, which has its own, got a second set")
        values, offsets = split_nested("x", x, 2 + len(trailing))
    elif offsets is None:
        raise GdpaError(
            "offsets: expected an int32 or int64 tensor (B + 1,) with packed values, got None; or pass a jagged nested x"
        )
    else:
        values = x
        _check_offsets(offsets, x, max_seqlen)
    if values.dim() != 1 + len(trailing) or values.shape[1:] != trailing:
        kind = "a nested tensor (B, *, " if x.is_nested else "packed values (T, "
        raise GdpaError(f"x: expected {kind}{shape}) with {shape} = {trailing}, got values of shape {tuple(values.shape)}")
    if not values.dtype.is_floating_point:
        raise GdpaError(f"x: expected a floating dtype, got {values.dtype}")
    return values, offsets


def split_nested(name: str, tensor: Tensor, dimensions: int) -> tuple[Tensor, Tensor]:
    """The values and offsets of a jagged nested tensor whose second dimension is the jagged one."""
    nested: Any = tensor  # a NestedTensor, whose own attributes Tensor does not declare
    if tensor.layout != torch.jagged:
        raise GdpaError(f"{name}: expected a nested tensor of layout torch.jagged, got {tensor.layout}")
    if tensor.dim() != dimensions:
        raise GdpaError(f"{name}: expected a nested tensor of {dimensions} dimensions, got {tensor.dim()}")
    if nested._ragged_idx != 1:
        raise GdpaError(f"{name}: expected the jagged dimension to be 1, got {nested._ragged_idx}")
    if nested.lengths() is not None:
        raise GdpaError(f"{name}: expected a contiguous nested tensor, got one with holes (its lengths differ from its offsets)")
    return nested.values(), nested.offsets()


def join(x: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """`values` as the kind that x is; nested ones keep x's offsets, and with them its structure."""
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets) if x.is_nested else values


def _check_offsets(offsets: Tensor, x: Tensor, max_seqlen: int | None) -> None:
    if not isinstance(offsets, Tensor):
        raise GdpaError(f"offsets: expected a torch.Tensor, got {type(offsets).__name__}")
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype not in OFFSET_DTYPES:
        raise GdpaError(f"offsets: expected int32 or int64 (B + 1,), got {offsets.dtype} of shape {tuple(offsets.shape)}")
    if offsets.device != x.device:
        raise GdpaError(f"offsets: expected device {x.device} (that of x), got {offsets.device}")
    if _readable(offsets):
        check_offsets("offsets", offsets, x.shape[0], max_seqlen)


def same_offsets(a: Tensor, b: Tensor) -> bool:
    """Whether two sets of offsets agree; where their values cannot be read for free, their batches must do."""
    return a is b or (a.shape == b.shape and (not (_readable(a) and _readable(b)) or torch.equal(a.long(), b.long())))


def _readable(offsets: Tensor) -> bool:
    """A tracer's tensors have no values (the operator looks when the traced program runs); a GPU's cost a synchronisation."""
    return not torch.compiler.is_compiling() and type(offsets) is Tensor and offsets_are_checked(offsets.device)

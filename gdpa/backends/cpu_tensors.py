"""The cpu backend's tensors: tiles of the caller's, whatever their layout, and a thread's scratch memory.

Every view is one `as_strided`. A chain of slices, permutations and reshapes costs microseconds for each of them, and each
gives Python's lock away and takes it again, which the other workers feel.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What a thread keeps of its scratch memory for the next call. Fresh memory costs a page fault for every 4 KiB: a forward
# of 16 sequences of 256 rows took 16.7 ms with it and 13.1 ms without, on two threads.
KEPT_BYTES = 1 << 24
LEAST_NUMBERS_IN_PLACE = 1 << 14
ALONE = slice(0, 1)  # a key head is the only member of its group


@lru_cache
def multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies operands of `dtype`, of 16 bits, well faster than the same widened to fp32.

    AMD's with AVX512_BF16 do: on an EPYC, one thread, 200 GFLOP/s against 80. So do Intel's with AMX: on a Xeon, 460 to 690 against 110. An
    Intel Xeon without AMX did not (140 against 280), nor does one that announces AMX without its tiles, where such a product is an
    illegal instruction, nor one whose AMX the user has taken from oneDNN.
    """
    about: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not every torch has it
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    if "AMD" in about.get("cpu_name", ""):
        return bool(about.get("avx512_bf16"))
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "AMX"))
    return bool(about.get("amx_bf16") and about.get("amx_tile")) and (
        "AMX" in allowed.upper() or allowed.upper() in ("ALL", "DEFAULT")
    )


def few_sizes(rows: int) -> int:
    """The next of 32 sizes up to 1024. oneDNN compiles a bf16 product for every shape it meets, and keeps 1024 of them at 0.7 to 0.9 MB
    each: 64 sequences of 1 to 1024 rows took 167 MB with 48 sizes, 12 % of what padded eager takes, and 117 with these, as fast."""
    step = 16 if rows <= 256 else 32 if rows <= 512 else 64
    return -(-rows // step) * step


class Place(NamedTuple):
    """Where a tile lies in its tensor: [n, h, F, R, D] = sequences, key heads, query heads of each, rows, features."""

    size: tuple[int, int, int, int, int]
    stride: tuple[int, int, int, int, int]
    offset: int

    @property
    def flat(self) -> tuple[tuple[int, int, int], tuple[int, int, int], int] | None:
        """The tile as an operand [n * h, F * R, D] of a product, or None where these strides do not allow it."""
        n, h, f, r, d = self.size
        by_sequence, by_key_head, by_member, by_row, by_feature = self.stride
        if h == 1:
            by_matrix = by_sequence
        elif n == 1 or by_sequence == h * by_key_head:
            by_matrix = by_key_head
        else:
            return None
        if r == 1:
            by_row = by_member
        elif f > 1 and by_member != r * by_row:
            return None
        if by_feature != 1 or by_row < d:
            return None
        return (n * h, f * r, d), (by_matrix, by_row, 1), self.offset


class Rows:
    """A tensor (T, H, D) of packed rows, (B, S, H, D) of dense ones, or (S, H, D) of rows that every sequence shares."""

    def __init__(self, tensor: Tensor, group: int = 1, *, shared: bool = False) -> None:
        self.tensor = tensor
        self._features = tensor.shape[-1]
        self._base = tensor.storage_offset()
        self._row, self._head, self._feature = tensor.stride()[-3:]
        self._key_head = self._head * group
        self._packed = tensor.dim() == 3 and not shared
        self._sequence = tensor.stride(0) if tensor.dim() == 4 else 0

    def place(
        self, first: int, count: int, begin: int, length: int, rows: slice, key_heads: slice, members: slice = ALONE
    ) -> Place:
        """`rows`, counted within each, of `count` sequences from the `first`; packed ones have `length` rows from `begin` on."""
        start = begin * self._row if self._packed else first * self._sequence
        return Place(
            (count, key_heads.stop - key_heads.start, members.stop - members.start, rows.stop - rows.start, self._features),
            (length * self._row if self._packed else self._sequence, self._key_head, self._head, self._row, self._feature),
            self._base + start + rows.start * self._row + key_heads.start * self._key_head + members.start * self._head,
        )

    def at(self, place: Place) -> Tensor:
        return self.tensor.as_strided(*place)


class Scratch(NamedTuple):
    """One piece of memory as a tile [n, h, F, R, D] and as the operand [n * h, F * R, D]."""

    tile: Tensor
    flat: Tensor


class Workspace:
    """A thread's buffers by role and precision. What a role held is gone when it is taken again in that precision."""

    def __init__(self, buffers: dict[tuple[str, torch.dtype], Tensor]) -> None:
        self._buffers = buffers
        self._views: dict[tuple[str, torch.dtype], Tensor] = {}
        self._scratch: dict[tuple[str, torch.dtype], Scratch] = {}
        self._dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def use(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def take(self, role: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised contiguous tensor, in the workspace's precision unless another is named."""
        dtype = dtype or self._dtype
        view = self._views.get((role, dtype))
        if view is None or view.shape != shape:
            size = math.prod(shape)
            buffer = self._buffers.get((role, dtype))
            if buffer is None or buffer.numel() < size:
                # Kept for other calls: memory made in inference mode could not be written to outside it.
                with torch.inference_mode(False):
                    buffer = self._buffers[role, dtype] = torch.empty(size, dtype=dtype)
            view = self._views[role, dtype] = buffer[:size].view(*shape)
        return view

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in `dtype`: itself where it has it."""
        return x if x.dtype == dtype else self.take("rounded", x.shape, dtype).copy_(x)

    def scratch(self, role: str, size: Sequence[int], dtype: torch.dtype | None = None) -> Scratch:
        dtype = dtype or self._dtype
        known = self._scratch.get((role, dtype))
        if known is None or known.tile.shape != size:
            n, h, f, r, d = size
            tile = self.take(role, size, dtype)
            known = self._scratch[role, dtype] = Scratch(tile, tile.view(n * h, f * r, d))
        return known

    def load(self, role: str, rows: Rows, place: Place, dtype: torch.dtype | None = None, *, private: bool = False) -> Tensor:
        """A tile as an operand: the caller's own memory where it has the precision and strides, else (or `private`) a copy.

        In 16 bits rows have no gaps between them: K with gaps made S of 4 x 256 x 256 take 0.27 ms for 0.16, where a copy of K
        takes 0.005.
        """
        dtype = dtype or self._dtype
        if not private and rows.tensor.dtype == dtype:
            flat = place.flat
            if flat is not None and not (dtype.itemsize == 2 and flat[1][1] != flat[0][2]):
                return rows.tensor.as_strided(*flat)
        scratch = self.scratch(role, place.size, dtype)
        scratch.tile.copy_(rows.at(place))
        return scratch.flat

    def result(self, role: str, rows: Rows, place: Place, dtype: torch.dtype | None = None) -> Tensor:
        """Where to compute a tile [n * h, F * R, D]: in the caller's memory if that is possible and pays, else in scratch memory.

        A product into strided memory is computed matrix by matrix, which costs more than a copy does where they are small.
        """
        dtype = dtype or self._dtype
        if rows.tensor.dtype == dtype and place.size[3] * place.size[4] >= LEAST_NUMBERS_IN_PLACE:
            flat = place.flat
            if flat is not None:
                return rows.tensor.as_strided(*flat)
        return self.scratch(role, place.size, dtype).flat

    def store(self, role: str, rows: Rows, place: Place, result: Tensor) -> None:
        """Bring a `result` to its place, if it is not there."""
        scratch = self._scratch.get((role, result.dtype))
        if scratch is not None and result is scratch.flat:
            rows.at(place).copy_(scratch.tile)


def product(result: Tensor, a: Tensor, b: Tensor, factor: float = 1.0, *, accumulate: bool = False) -> None:
    """result = factor * a @ b, or += when accumulating; otherwise its old contents, NaN included, are ignored."""
    if factor == 0:  # which baddbmm takes for a product of zeros, whatever a and b hold
        a, factor = a * 0, 1.0
    torch.baddbmm(result, a, b, beta=1 if accumulate else 0, alpha=factor, out=result)


def wide_product(result: Tensor, a: Tensor, b: Tensor, factor: float, memory: Workspace) -> None:
    """result = factor * a @ b in the workspace's precision, of operands that have it, or of bf16.

    Of bf16 torch's products are bf16. One of them is the result's first 8 bits; a second, from which it is subtracted before that
    is rounded, the next 8. Their sum differs from an fp32 product by 2.5e-6 (relative Frobenius norm), in 0.6 of its time:
    1024 x 1024 scores of D = 128 take 1.27 ms on one thread of an EPYC, and 2.25 in fp32.
    """
    if a.dtype == result.dtype:
        product(result, a, b, factor)
        return
    high, low = memory.take("high", result.shape, a.dtype), memory.take("rounded", result.shape, a.dtype)
    product(high, a, b, factor)
    torch.baddbmm(high, a, b, beta=-1, alpha=factor, out=low)
    result.copy_(high).add_(low)
    if not math.isfinite(low.sum().item()):
        # Infinity less infinity somewhere, where an fp32 product may be infinite, or finite still. Everything else keeps its bits.
        exact = torch.empty_like(result)
        product(exact, a.to(result.dtype), b.to(result.dtype), factor)
        result.copy_(torch.where(low.isfinite(), result, exact))


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


@contextmanager
def workspace() -> Iterator[Workspace]:
    """This thread's workspace. Its memory stays for the next call, up to KEPT_BYTES."""
    buffers = _kept.buffers
    try:
        yield Workspace(buffers)
    finally:
        if sum(buffer.nbytes for buffer in buffers.values()) > KEPT_BYTES:
            buffers.clear()

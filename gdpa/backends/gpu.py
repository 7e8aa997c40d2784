"""What the GPU backends have in common: which device there is, how tensors must lie, descriptors that stop at a sequence's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gdpa.lowering import Precision
from gdpa.problem import Problem

# The rows of a ragged descriptor's third dimension; the kernels know it too.
RAGGED = 2**30
# 128 rows of a tile are addressed in 32 bits.
MOST_ROW_STRIDE = 2**23
# A grid's y and z, where dQ of shared queries has its heads and its tiles, of 16 queries at least. With all in x, as the other kernels have
# it, what is divided to find them spills on Hopper, in every step.
MOST_IN_Y_AND_Z = 65535
LEAST_QUERIES_OF_A_TILE = 16


@cache
def architecture(device: torch.device) -> int:
    """The compute capability as 80, 90, ...; 0 on the CPU (interpreted) and on ROCm."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def precision_of(dtype: torch.dtype, architecture: int) -> Precision:
    """How exact the activations' device code must be for tensors of this dtype; the architecture is 90 for sm_90."""
    if dtype == torch.float16:
        return "float16_sm90" if architecture == 90 else "float16"
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_aligned(x: Tensor) -> bool:
    """Whether x lies as the kernels need: rows contiguous and starting at multiples of 8 elements and of 16 bytes.

    Head strides are compiled in, so heads-first tensors, whose head stride is their length, are not: they would compile anew for every
    batch.
    """
    strides = x.stride()
    row, head, column = strides[-3:]
    return column == 1 and x.data_ptr() % 16 == 0 and (strides[0] | row | head) % 8 == 0 and head <= row < MOST_ROW_STRIDE


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it, laid out as the kernels need."""
    return x if is_aligned(x) or x.numel() == 0 else x.clone(memory_format=torch.contiguous_format)


def mappable(x: Tensor) -> bool:
    """Whether a ragged descriptor can describe x: its rows, those of all sequences, lie at one distance."""
    shape, strides = x.shape, x.stride()
    rows = shape[0] * shape[1] if len(shape) == 4 else shape[0]
    together = len(shape) == 3 or shape[0] == 1 or strides[0] == shape[1] * strides[1]
    return together and 0 < rows < RAGGED and strides[-3] > 0 and x.numel() > 0


def too_large(problem: Problem) -> str | None:
    """Why the portable kernels cannot address a problem's tensors, or count its programs: they count rows, and address those of a tile, in
    32 bits."""
    if max(problem.query_rows, problem.key_rows) >= RAGGED:
        return f"it addresses fewer than {RAGGED} rows"
    if problem.query_side == "shared":
        most = MOST_IN_Y_AND_Z * LEAST_QUERIES_OF_A_TILE
        if problem.heads > MOST_IN_Y_AND_Z or problem.query_rows > most:
            got = f"{problem.heads} and {problem.query_rows}"
            return (
                f"of queries that all sequences share it takes at most {MOST_IN_Y_AND_Z} heads and {most} rows, and they are {got}"
            )
    row = problem.heads * max(problem.head_dim, problem.value_dim)
    if row >= MOST_ROW_STRIDE:
        return f"it takes rows of fewer than {MOST_ROW_STRIDE} elements, all heads counted, and they have {row}"
    return None


@cache
def empty_strided(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """`torch.empty_strided` on this device, which must be the current one, past the dispatcher: what Inductor's code allocates with.

    On a 2-core Xeon 0.9 microseconds of host time, `new_empty` 1.4, or 2.4 in grad mode. It knows nothing of
    `torch.utils.deterministic.fill_uninitialized_memory`.
    """
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)

    def ordinary(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return found or ordinary


class Output:
    """A contiguous tensor on the current device, to be allocated again and again."""

    __slots__ = ("allocate", "device", "dtype", "shape", "strides")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        strides = [1]
        for size in self.shape[:0:-1]:
            strides.append(strides[-1] * max(size, 1))
        self.strides = tuple(strides[::-1])
        self.allocate = empty_strided(device)

    def new(self) -> Tensor:
        # Where uninitialised memory is to be filled, torch's own allocation does it.
        if torch._C._get_deterministic_algorithms():
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.allocate(self.shape, self.strides, self.dtype)


def plain_scales(out_scale: Tensor) -> Tensor:
    """The scales of the sequences as kernels read them: fp32, one after the other, from an address that is a multiple of 16 on, which
    Triton compiles for where it once was one."""
    scales = out_scale.float().contiguous()
    return scales.clone() if scales.data_ptr() % 16 else scales


def ragged_geometry(x: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a descriptor through which the copy engine stops at each sequence's own end: rows past it read as zeros.

    Two more dimensions with wrapping strides move the sequence's end onto the end of the third one, of 2^30 rows, where the hardware
    checks bounds: row r of a sequence (start, length) is [2^30, start + length, 2^30 - length + r, column], whose addresses add up to
    row start + r in 64-bit arithmetic. The tensor's own end is not checked, so start and length must be sound (schedule.bounds).
    """
    row = x.stride(-3)
    columns = x.stride(-2) * (x.shape[-2] - 1) + x.shape[-1]
    return [0x7FFF0000, 0x7FFF0000, RAGGED, columns], [2**34 - row, row, row, 1]


def example(
    form: str,
    batch: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    queries: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, v and both offsets of a call without data, to compile for: form packed, dense, dense-keys or shared-queries; with `rows` keys
    and, unless told, as many queries."""
    packed_q, packed_k = form in ("packed", "dense-keys"), form in ("packed", "shared-queries")
    queries = rows if queries is None else queries

    def tensor(packed: bool, rows: int, lead: tuple[int, ...], heads: int, width: int) -> Tensor:
        return torch.empty((batch * rows, heads, width) if packed else (*lead, rows, heads, width), dtype=dtype, device="meta")

    offsets = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    q = tensor(packed_q, queries, () if form == "shared-queries" else (batch,), heads, head_dim)
    k, v = (tensor(packed_k, rows, (batch,), kv_heads, width) for width in (head_dim, value_dim))
    return q, k, v, offsets if packed_q else None, offsets if packed_k else None


@contextmanager
def on_device(x: Tensor) -> Iterator[None]:
    """Triton launches on the current device, which need not be x's."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            yield
    else:
        yield


@contextmanager
def target_architecture(arch: int) -> Iterator[None]:
    """Compile for compute capability `arch` whatever device there is; nothing can be launched meanwhile."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Target:
        """As much of a Triton driver as compiling asks for."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            # Triton keeps kernels by device; a number that no device has keeps these apart from the real ones.
            return -arch

        def get_current_stream(self, device: int) -> int:
            return 0

    previous = driver._active
    driver.set_active(Target())
    try:
        yield
    finally:
        driver._active = previous

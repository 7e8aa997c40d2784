"""Which tiles there are: lists of non-empty tiles, built on the device without a host synchronisation.

A jagged batch cut into tiles of BLOCK rows has sum(ceil(length / BLOCK)) of them, a number only the device knows. The host knows a
bound, rows // BLOCK + batch + 1, launches that many programs, and those past the end leave at once (or it launches as many as the
device has multiprocessors, which take tiles from the list until its count is reached).

Kernels read (start, length) from here alone, never from the caller's offsets: `bounds` clamps them to the buffer, so that whatever the
offsets hold nothing is read or written outside it. Row `batch` of the bounds is the uncovered tail of the buffer, a sequence that
attends to nothing, so the kernels write its zeros in passing.

On CUDA and ROCm devices each list is built by one kernel of schedule_kernels.py. The torch operations here build the same on other
devices, and where Triton is missing; among tiles with as much to walk, the order may differ.
"""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

Kind: TypeAlias = tuple[Any, ...]  # what something built from offsets is known by, beside the offsets
Lists: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
Built = TypeVar("Built")

_CACHE_SIZE = 128
_cache: OrderedDict[Hashable, tuple[Any, weakref.ref[Tensor], weakref.ref[Tensor]]] = OrderedDict()
_is_shared = True


def bounds(offsets: Tensor, rows: int) -> Tensor:
    """Offsets (B + 1,) -> int32 (B + 1, 2): the (start, length) of each sequence, and of the tail that none covers."""
    return _cached(("bounds", rows), offsets, offsets, lambda: _build_bounds(offsets, rows))


def tiles(owner: Tensor | None, other: Tensor | None, batch: int, rows: int, block: int) -> Tensor:
    """The tiles of `owner`'s rows as int32 (count bound, 2): (sequence, block within it), sequence -1 past the end.

    `owner` and `other` are the bounds of the side that is cut into tiles and of the side each tile walks over; None where that side is
    dense, with `rows` rows a sequence for the owner. Tiles with the most to walk come first: the device takes programs in
    order, so the long ones start early and the short ones fill the end.
    """
    kind = ("tiles", owner is None, other is None, batch, rows, block)
    return _cached(kind, owner, other, lambda: _build_tiles(owner, other, batch, rows, block))


def lists(
    q_offsets: Tensor | None, k_offsets: Tensor | None, batch: int, q_rows: int, k_rows: int, block: int, owner: str
) -> Lists:
    """(`tiles` of the "queries" or "keys" that `owner` says, or of "neither"; `bounds` of the queries; `bounds` of the keys), None where
    there are none: together what a kernel reads, to be found at one look. One side at least has offsets."""

    def build() -> Lists:
        q_bounds = None if q_offsets is None else bounds(q_offsets, q_rows)
        k_bounds = None if k_offsets is None else bounds(k_offsets, k_rows)
        if owner == "neither":
            return None, q_bounds, k_bounds
        sides = (q_bounds, k_bounds, batch, q_rows) if owner == "queries" else (k_bounds, q_bounds, batch, k_rows)
        return tiles(*sides, block), q_bounds, k_bounds

    kind = lists_kind(q_offsets is not None, k_offsets is not None, batch, q_rows, k_rows, block, owner)
    return _cached(kind, q_offsets, k_offsets, build)


def lists_kind(q_packed: bool, k_packed: bool, batch: int, q_rows: int, k_rows: int, block: int, owner: str) -> Kind:
    """What `lists` of some offsets are known by, beside the offsets."""
    return "lists", q_packed, k_packed, batch, q_rows, k_rows, block, owner


def records(q_offsets: Tensor | None, k_offsets: Tensor | None, batch: int, q_rows: int, k_rows: int, block: int) -> Tensor:
    """All that a kernel must know of each tile of queries, as int32 (count bound + 1, 8).

    Row 0 is (count of tiles, 0, ...). Rows 1 to count are (q_start, q_length, first row of the tile within the sequence, k_start,
    k_length, sequence, tiles of the sequence, 0); what follows them is not initialised. A side without offsets has `q_rows` (`k_rows`)
    rows a sequence and starts at sequence * rows; one side at least has offsets. The uncovered tail of a packed q is sequence `batch`,
    without keys. The tiles of a sequence are those in the list: garbage offsets may claim more than it has room for.

    Tiles of a sequence follow one another. Sequences come sorted by ceil(k_length / 128), the longest first; 127 and more count as
    the same. Dealt out in turn, such a list keeps programs equally busy.
    """
    kind = records_kind(q_offsets is not None, k_offsets is not None, batch, q_rows, k_rows, block)
    return _cached(kind, q_offsets, k_offsets, lambda: _build_records(q_offsets, k_offsets, batch, q_rows, k_rows, block))


def records_kind(q_packed: bool, k_packed: bool, batch: int, q_rows: int, k_rows: int, block: int) -> Kind:
    """What `records` of some offsets are known by, beside the offsets."""
    return "records", q_packed, k_packed, batch, q_rows, k_rows, block


def known(kind: Kind, q_offsets: Tensor | None, k_offsets: Tensor | None, stream: int) -> Any:
    """What `records` or `lists` has built on the device's current stream, `stream`; None where it has to be asked."""
    first: Tensor = q_offsets if q_offsets is not None else k_offsets  # type: ignore[assignment]
    second = first if k_offsets is None else k_offsets
    if first.is_inference() or second.is_inference() or _memory_is_a_graphs(first.get_device()):
        return None
    return _find((kind, id(first), first._version, id(second), second._version, stream), first, second)


def stop_sharing() -> None:
    """Build at every call from now on: offsets cannot be known by their tensor (gdpa/inductor.py)."""
    global _is_shared
    _is_shared = False
    # One by one: with a list go those built from it, which would be taken out of a dictionary in the middle of its clear().
    for key in list(_cache):
        _cache.pop(key, None)


def tile_bound(packed: bool, batch: int, rows: int, block: int) -> int:
    """The most tiles there can be: what the host launches."""
    return rows // block + batch + 1 if packed else batch * -(-rows // block)


@cache
def is_installed(module: str) -> bool:
    """Looking for it may itself fail: where something keeps it from being imported, or its package from being found."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _by_kernel(*sides: Tensor | None) -> bool:
    return any(side is not None and side.device.type == "cuda" for side in sides) and is_installed("triton")


def _build_bounds(offsets: Tensor, rows: int) -> Tensor:
    if _by_kernel(offsets):
        from gdpa import schedule_kernels

        return schedule_kernels.build_bounds(offsets, rows)
    return _plain_bounds(offsets, rows)


def _build_tiles(owner: Tensor | None, other: Tensor | None, batch: int, rows: int, block: int) -> Tensor:
    if _by_kernel(owner, other):
        from gdpa import schedule_kernels

        bound = tile_bound(owner is not None, batch, rows, block)
        return schedule_kernels.build_tiles(owner, other, batch, rows, block, bound)
    return _plain_tiles(owner, other, batch, rows, block)


def _build_records(q_offsets: Tensor | None, k_offsets: Tensor | None, batch: int, q_rows: int, k_rows: int, block: int) -> Tensor:
    if _by_kernel(q_offsets, k_offsets):
        from gdpa import schedule_kernels

        bound = tile_bound(q_offsets is not None, batch, q_rows, block)
        return schedule_kernels.build_records(q_offsets, k_offsets, batch, q_rows, k_rows, block, bound)
    return _plain_records(q_offsets, k_offsets, batch, q_rows, k_rows, block)


def _plain_bounds(offsets: Tensor, rows: int) -> Tensor:
    clamped = offsets.clamp(0, rows).int()
    ends = torch.cat((clamped[1:], clamped.new_full((1,), rows)))
    return torch.stack((clamped, (ends - clamped).clamp_(min=0)), dim=1)


def _plain_tiles(owner: Tensor | None, other: Tensor | None, batch: int, rows: int, block: int) -> Tensor:
    device = (owner if owner is not None else other).device  # type: ignore[union-attr]
    bound = tile_bound(owner is not None, batch, rows, block)
    lengths = torch.full((batch,), rows, dtype=torch.int32, device=device) if owner is None else owner[:, 1]
    if other is None:
        order = torch.arange(lengths.shape[0], dtype=torch.int32, device=device)
    else:
        walked = other[:batch, 1]
        if owner is not None:
            walked = torch.nn.functional.pad(walked, (0, 1))  # the tail attends to nothing
        order = torch.argsort(walked, descending=True, stable=True).int()
    counts = (lengths[order] + (block - 1)) // block
    ends = counts.cumsum(0)  # int64: garbage offsets may claim more tiles than 32 bits count
    tile = torch.arange(bound, device=device)
    position = torch.searchsorted(ends, tile, right=True).clamp_(max=max(lengths.shape[0] - 1, 0))
    sequence = torch.where(tile < ends[-1:], order[position], -1)
    return torch.stack((sequence, tile - (ends - counts)[position]), dim=1).int()


def _plain_records(q_offsets: Tensor | None, k_offsets: Tensor | None, batch: int, q_rows: int, k_rows: int, block: int) -> Tensor:
    q_bounds = None if q_offsets is None else _plain_bounds(q_offsets, q_rows)
    k_bounds = None if k_offsets is None else _plain_bounds(k_offsets, k_rows)
    sequence, tile = _plain_tiles(q_bounds, k_bounds, batch, q_rows, block).unbind(1)
    count = (sequence >= 0).sum().int().reshape(1)
    none = torch.zeros_like(sequence)
    listed_of = none.new_zeros(batch + 1).index_add_(0, sequence.clamp(min=0), (sequence >= 0).to(none.dtype))
    sequence = sequence.clamp(min=0)
    q_start, q_length = (sequence * q_rows, none + q_rows) if q_bounds is None else q_bounds[sequence].unbind(1)
    k_start, k_length = (sequence * k_rows, none + k_rows) if k_bounds is None else k_bounds[sequence].unbind(1)
    k_start, k_length = (x.where(sequence < batch, 0) for x in (k_start, k_length))  # the tail attends to nothing
    listed = torch.stack((q_start, q_length, tile * block, k_start, k_length, sequence, listed_of[sequence], none), dim=1)
    return torch.cat((torch.nn.functional.pad(count, (0, 7))[None], listed))


def _memory_is_a_graphs(index: int) -> bool:
    """Whether what is allocated now belongs to a CUDA graph: one being captured, or one torch.compile is warming up for."""
    if torch._C._cuda_isCurrentStreamCapturing():
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_manager(index, create_if_none_exists=False)
    return manager is not None and manager.path_state != trees.ExecutionState.NONE


def _find(key: Hashable, first: Tensor, second: Tensor) -> Any:
    hit = _cache.get(key)
    # A new tensor may have the address of one that is gone.
    if hit is None or hit[1]() is not first or hit[2]() is not second:
        return None
    try:
        _cache.move_to_end(key)
    except KeyError:  # another thread has let go of it: those of autograd look here too
        return None
    return hit[0]


def _cached(kind: Kind, first: Tensor | None, second: Tensor | None, build: Callable[[], Built]) -> Built:
    """Build once per identity and version of the tensors it is built from, so that the layers of a model share a schedule.

    torch counts a version for every in-place operation, but not for writes through `.data`, numpy, a collective, a kernel of the caller's
    or the replay of a CUDA graph: offsets changed that way must come as a new tensor.

    While a CUDA graph is captured it is always built, inside the capture: a replay reads offsets that changed since. Inference
    tensors have no version, so nothing is kept for them either.
    """
    # It stands in the way of every launch: no generators, and not a device's type, a text that is made anew at each look.
    if first is None or second is None:
        first = second = first if first is not None else second
    assert first is not None and second is not None, "one side at least is packed"
    if first.is_inference() or second.is_inference() or not _is_shared:
        return build()
    stream = 0
    if first.is_cuda:
        index = first.get_device()
        if _memory_is_a_graphs(index):
            return build()
        # What one stream builds another may not read yet, so each has its own. The raw call is 10 microseconds cheaper.
        stream = torch._C._cuda_getCurrentRawStream(index)
    key = (kind, id(first), first._version, id(second), second._version, stream)
    built: Built | None = _find(key, first, second)
    if built is None:
        built = build()
        _keep(key, built, first, second)
    return built


def _keep(key: Hashable, built: Any, first: Tensor, second: Tensor) -> None:
    """Until one of the tensors is gone: nobody can ask for it any more. Its memory may be used anew at once, since only work of the
    stream it is known by reads it, and what a CUDA graph reads is never kept here."""
    # Called by whichever thread drops the tensor, between any two steps of others. It needs no lock, and no name of this module's, which
    # are gone when the interpreter ends.
    cache = _cache

    def let_go(_: weakref.ref[Tensor]) -> None:
        cache.pop(key, None)

    lives = weakref.ref(first, let_go)
    cache[key] = built, lives, lives if second is first else weakref.ref(second, let_go)
    while len(cache) > _CACHE_SIZE:
        cache.popitem(last=False)

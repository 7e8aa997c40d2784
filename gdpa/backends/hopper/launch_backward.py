"""From a Problem and its tensors to a launch of the backward kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdpa import launching, schedule, schedule_kernels
from gdpa.backends.gpu import (
    Output,
    example,
    is_aligned,
    mappable,
    multiprocessors,
    on_device,
    plain_scales,
    ragged_geometry,
    target_architecture,
)
from gdpa.backends.hopper import partial
from gdpa.backends.hopper.backward import backward_kernel
from gdpa.backends.hopper.launch import OPTIONS, descriptor, in_place, readable, start
from gdpa.backends.hopper.plan import MANY_KEYS, functions_for, needs_mask, precision_for, same_offsets
from gdpa.backends.hopper.plan_backward import (
    PART,
    RELAY,
    SHARED,
    TILE,
    is_folded,
    is_in_order,
    is_paired,
    is_together,
    rounded_tiles,
    step_rows,
    way_of_dq,
    way_of_dv,
)
from gdpa.launching import Recipe
from gdpa.problem import Problem, describe

# Programs whose tiles may wait for one another where results must not depend on the device: an H100 or H200 has 114 multiprocessors
# or more. Of one that has fewer, an H20's 78 or a part of a divided GPU, all do, and sums may differ. Elsewhere all of the device's do.
FEWEST_MULTIPROCESSORS = 112

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

_MOST_RECIPES = 4096
_recipes: dict[tuple[Any, ...], Recipe] = {}


class Ready:
    """All that backward calls of one problem and one layout, of which the same gradients are needed, have in common; how they run."""

    __slots__ = (
        "copy",
        "counters",
        "device",
        "dk",
        "dq",
        "dv",
        "is_causal",
        "lists_kind",
        "needs",
        "numbers",
        "programs",
        "recipe",
        "rounds_long",
        "zeros",
    )

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, needs: tuple[bool, bool, bool], recipe: Recipe) -> None:
        way = way_of_dq(problem, needs[0])
        self.recipe = recipe
        self.is_causal = problem.masked
        self.needs = needs
        self.device = q.device
        self.numbers = _numbers(problem, multiprocessors(q.device))
        self.programs = _programs(problem, q.device)
        self.counters = _counter_count(problem) if way == RELAY else 0
        self.rounds_long = _rounds_long(problem, way)
        self.dk, self.dv = Output(k.shape, k.dtype, k.device), Output(v.shape, v.dtype, v.device)
        self.dq = Output(q.shape, q.dtype, q.device) if needs[0] and way != SHARED else None
        self.copy = Output(_copy_shape(problem, way, q), torch.float32, q.device)
        packed = problem.query_side == "packed", problem.key_side == "packed"
        rows = problem.query_rows, problem.key_rows
        self.lists_kind: tuple[schedule.Kind, schedule.Kind] | None = None
        self.zeros: partial.Zeros | None = None
        if True in packed:
            records_kind = schedule.records_kind(*packed[::-1], problem.batch, *rows[::-1], _listed(problem))
            self.lists_kind = records_kind, schedule.lists_kind(*packed, problem.batch, *rows, TILE, "neither")
            if self.dq is not None:
                self.zeros = partial.Zeros(*packed, problem.batch, *rows, problem.heads * problem.head_dim)

    def run(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        out_scale: Tensor | None,
    ) -> Gradients | None:
        """The gradients that are needed; None where it is not the way: an address that the copy engine does not take, other offsets, or
        another current device. The tensors lie as the first of them did."""
        q_address = q.data_ptr()
        if (q_address | k.data_ptr() | v.data_ptr() | d_out.data_ptr()) & 15 or torch._C._cuda_getDevice() != self.device.index:
            return None
        if self.is_causal and cu_seqlens_q is not None and not same_offsets(cu_seqlens_q, cu_seqlens_k):
            return None
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        dk, dv, copy = self.dk.new(), self.dv.new(), self.copy.new()
        dq = None if self.dq is None else self.dq.new()
        shared = self.needs[0] and dq is None
        if shared:
            copy.zero_()
        records = counters = scales = q_address  # stands for what is not read
        if self.lists_kind is not None:
            kind = self.lists_kind[0]
            listed = schedule.known(kind, cu_seqlens_k, cu_seqlens_q, stream)
            if listed is None:
                listed = schedule.records(cu_seqlens_k, cu_seqlens_q, *kind[3:])
            records = listed.data_ptr()
        bounds = None
        if self.rounds_long and self.lists_kind is not None:
            bounds = self._lists(cu_seqlens_q, cu_seqlens_k, stream)[1]
            partial.clear_long(copy, bounds, self.rounds_long)
        if self.counters:
            zeroed = torch.zeros(self.counters, dtype=torch.int32, device=self.device)
            counters = zeroed.data_ptr()
        if out_scale is not None:
            out_scale = plain_scales(out_scale)
            scales = out_scale.data_ptr()
        tensors = (q, k, v, d_out, dk if dq is None else dq, copy, dk, dv)
        launching.start(self.recipe, (self.programs, 1, 1), stream, tensors, (records, counters, scales, *self.numbers))
        if shared:
            dq = partial.rounded(copy, q.dtype) if self.is_causal else partial.sum_programs(copy, q.dtype)
        elif self.zeros is not None and dq is not None and self.lists_kind is not None:
            lists = self._lists(cu_seqlens_q, cu_seqlens_k, stream)
            self.zeros.write(dq, lists[1], lists[2])
            if bounds is not None:
                partial.round_long(copy, dq, bounds, self.rounds_long)
        return dq, dk if self.needs[1] else None, dv if self.needs[2] else None

    def _lists(self, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, stream: int) -> tuple[Any, ...]:
        """schedule.lists of the call."""
        assert self.lists_kind is not None
        kind = self.lists_kind[1]
        lists = schedule.known(kind, cu_seqlens_q, cu_seqlens_k, stream)
        return schedule.lists(cu_seqlens_q, cu_seqlens_k, *kind[3:]) if lists is None else lists


def prepare(
    problem: Problem, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out_scale: Tensor | None, needs: tuple[bool, bool, bool]
) -> Ready | None:
    """The way of calls whose tensors lie as these; None where they must be copied, or no kernel has been compiled for them."""
    layout = (
        "hopper backward",
        d_out.stride(),
        q.stride(),
        k.stride(),
        v.stride(),
        out_scale is None,
        needs,
        multiprocessors(q.device),
    )
    ready: Ready | None = problem.notes.get(layout)
    if ready is None:
        tensors = (q, k, v, d_out)
        if not all(is_aligned(x) and mappable(x) for x in tensors):
            return None
        recipe = _recipes.get(_recipe_key(problem, tensors, out_scale, needs))
        if recipe is not None:
            ready = problem.notes[layout] = Ready(problem, q, k, v, needs, recipe)
    return ready


def backward(
    problem: Problem,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """Needs dK or dV, or both; dQ where asked for."""
    ready = prepare(problem, d_out, q, k, v, out_scale, needs)
    if ready is not None:
        found = ready.run(d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
        if found is not None:
            return found
    needs_dq, needs_dk, needs_dv = needs
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if needs_dq else None
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    if q.numel() == 0 or k.numel() == 0 or d_out.numel() == 0:  # a descriptor needs an address; these sums have no terms
        for grad in (dq, dk, dv):
            if grad is not None:
                grad.zero_()
        return dq, dk if needs_dk else None, dv if needs_dv else None
    with on_device(q):
        tensors = tuple(readable(x) for x in (q, k, v, d_out))
        copy = _copy(problem, needs_dq, q)
        least = _rounds_long(problem, way_of_dq(problem, needs_dq))
        bounds = None
        if least:
            rows = problem.query_rows, problem.key_rows
            bounds = schedule.lists(cu_seqlens_q, cu_seqlens_k, problem.batch, *rows, 0, "neither")[1]
            assert bounds is not None
            partial.clear_long(copy, bounds, least)
        # A descriptor of something that is not written still needs an address.
        outputs = (dk if dq is None else dq, copy, dk, dv)
        _launch(problem, tensors, outputs, cu_seqlens_q, cu_seqlens_k, out_scale, needs)
        if dq is not None and way_of_dq(problem, True) == SHARED:
            dq = partial.rounded(copy, dq.dtype) if problem.masked else partial.sum_programs(copy, dq.dtype)
        elif dq is not None and (cu_seqlens_q is not None or cu_seqlens_k is not None):
            partial.zero_unattended(dq, cu_seqlens_q, cu_seqlens_k, problem.batch, problem.query_rows, problem.key_rows)
            if bounds is not None:
                partial.round_long(copy, dq, bounds, least)
    return dq, dk if needs_dk else None, dv if needs_dv else None


def _rounds_long(problem: Problem, way: int) -> int:
    """Of packed causal sequences, beyond how many keys the tiles add to zeros in the fp32 copy, which is rounded afterwards; or 0."""
    added = problem.masked and problem.key_side == "packed" and way == RELAY and not problem.deterministic
    return rounded_tiles(problem) * TILE if added else 0


def _copy(problem: Problem, needs_dq: bool, q: Tensor) -> Tensor:
    """The fp32 copy of dQ that the tiles of a sequence pass on, or add to; of shared queries, the programs' sums."""
    way = way_of_dq(problem, needs_dq)
    copy = q.new_empty(_copy_shape(problem, way, q), dtype=torch.float32)
    return copy.zero_() if way == SHARED else copy


def _copy_shape(problem: Problem, way: int, q: Tensor) -> tuple[int, ...]:
    if way == SHARED and problem.masked:
        return tuple(q.shape)
    if way == SHARED:
        return _programs(problem, q.device), *q.shape
    # Dense keys that are few add up in dQ itself.
    needed = way == RELAY and (problem.key_side == "packed" or problem.key_rows > rounded_tiles(problem) * TILE)
    return tuple(q.shape) if needed else (1, *q.shape[-2:])


def _launch(
    problem: Problem,
    tensors: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> None:
    q = tensors[0]
    way = way_of_dq(problem, needs[0])
    key = _recipe_key(problem, tensors, out_scale, needs)
    pointers = _pointers(problem, way, q, cu_seqlens_q, cu_seqlens_k, out_scale)
    numbers = _numbers(problem, multiprocessors(q.device))
    programs = _programs(problem, q.device)
    recipe = _recipes.get(key)
    if recipe is None or not in_place(*tensors):
        constants = _constants(problem, tensors, outputs, out_scale, needs, multiprocessors(q.device))
        descriptors = _descriptors(problem, tensors, outputs, needs[0])
        kernel = backward_kernel[(programs,)](*descriptors, *pointers, *numbers, **constants, **_options(way))
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        _recipes[key] = Recipe(kernel, tuple(constants.values()), tuple(ragged_geometry(x) for x in (*tensors, *outputs)))
        return
    start(recipe, programs, (*tensors, *outputs), (*pointers, *numbers))


def _recipe_key(
    problem: Problem, tensors: tuple[Tensor, ...], out_scale: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Any, ...]:
    """What a compiled kernel depends on; the outputs are contiguous."""
    q, k = tensors[:2]
    return (
        q.device,
        precision_for(problem),
        problem.activations,
        problem.query_side,
        problem.key_side,
        q.shape[-2:],
        k.shape[-2:],
        *(x.stride()[-3:] for x in tensors),
        out_scale is None,
        way_of_dq(problem, needs[0]),
        way_of_dv(problem, needs[2]),
        is_paired(problem, multiprocessors(q.device)),
        is_together(problem, needs[0]),
        step_rows(problem, needs[0]),
        is_in_order(problem, needs[0]),
        problem.masked,
        problem.deterministic,
        needs,
    )


def _descriptors(problem: Problem, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...], needs_dq: bool) -> list[Any]:
    q, k, v, d_out = tensors
    dq, copy, dk, dv = outputs
    rows = step_rows(problem, needs_dq)
    columns = problem.head_dim if rows > PART else problem.head_dim // 2  # of a consumer's part of dQ
    return [
        descriptor(q, rows),
        descriptor(k, TILE),
        descriptor(v, TILE // 2),
        descriptor(d_out, rows),
        descriptor(dq, PART, columns),
        descriptor(copy, PART, columns),
        descriptor(dk, TILE // 2),
        descriptor(dv, TILE // 2),
    ]


def _options(way: int) -> dict[str, Any]:
    """Programs that wait for one another must all be running."""
    return {**OPTIONS, "launch_cooperative_grid": way == RELAY}


def _pointers(
    problem: Problem, way: int, q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles' records, the counters of the relay and the scales of the sequences; q stands for what is not read."""
    records, counters = q, q
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        records = schedule.records(
            cu_seqlens_k, cu_seqlens_q, problem.batch, problem.key_rows, problem.query_rows, _listed(problem)
        )
    if way == RELAY:
        counters = q.new_zeros(_counter_count(problem), dtype=torch.int32)
    return records, counters, q if out_scale is None else plain_scales(out_scale)


def _counter_count(problem: Problem) -> int:
    """Of the relay: enough for each step of each head, and for tickets where it is causal."""
    rows = problem.query_rows if problem.query_side == "packed" else problem.query_rows * problem.batch
    return (rows // step_rows(problem, True) + problem.batch + 2) * problem.heads * (2 if problem.masked else 1)


def _listed(problem: Problem) -> int:
    """Keys of an entry of the list: a tile's or two tiles'."""
    return 2 * TILE if is_folded(problem) else TILE


def _numbers(problem: Problem, multiprocessor_count: int) -> tuple[int | float, ...]:
    """The kernel's run-time numbers; the first is the most tiles there can be."""
    listed = _listed(problem)
    entries = schedule.tile_bound(problem.key_side == "packed", problem.batch, problem.key_rows, listed)
    tiles = entries * problem.kv_heads * (listed // TILE)
    rotating = min(multiprocessor_count, FEWEST_MULTIPROCESSORS) if problem.deterministic else multiprocessor_count
    if is_paired(problem, multiprocessor_count) and not problem.masked:
        rotating = 0
    k_tiles, few = -(-problem.key_rows // TILE), rounded_tiles(problem)
    return tiles, problem.query_rows, problem.key_rows, k_tiles, rotating, few, problem.scale, problem.out_scale


def _programs(problem: Problem, device: torch.device) -> int:
    tiles, *_, rotating, _, _, _ = _numbers(problem, multiprocessors(device))
    # As many sums of shared queries on every device, if their order counts.
    most = rotating if problem.query_side == "shared" else multiprocessors(device)
    return min(int(tiles), int(most))


def _constants(
    problem: Problem,
    tensors: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
    multiprocessor_count: int,
) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    q, k, v, d_out = tensors
    dq, _, dk, dv = outputs
    functions = functions_for(problem)
    # Sums over the query heads of a key head share their factors, so activations that differ between heads leave none out.
    fold = len(problem.activations) == 1 or problem.group == 1
    return {
        "activate": functions.weighted_pair if fold else functions.pair,
        "factor_of": functions.weighted_factor,
        "FOLD": fold,
        "KV_HEADS": problem.kv_heads,
        "GROUP": problem.group,
        "STRIDE_Q": q.stride(-2),
        "STRIDE_K": k.stride(-2),
        "STRIDE_V": v.stride(-2),
        "STRIDE_DO": d_out.stride(-2),
        "STRIDE_DQ": dq.stride(-2),
        "STRIDE_DK": dk.stride(-2),
        "STRIDE_DV": dv.stride(-2),
        "D": problem.head_dim,
        "ROWS": step_rows(problem, needs[0]),
        "HAS_LIST": problem.query_side == "packed" or problem.key_side == "packed",
        "PAIRED": is_paired(problem, multiprocessor_count),
        "TOGETHER": is_together(problem, needs[0]),
        "CAUSAL": problem.masked,
        "Q_SHARED": problem.query_side == "shared",
        "SCALE_PER_SEQUENCE": out_scale is not None,
        # float16 may not have the range for dS with it: it may be small.
        "SCALE_OUTSIDE": problem.dtype == torch.float16,
        "MASK_TAIL": needs_mask(problem),
        "DQ": way_of_dq(problem, needs[0]),
        "ORDERED": problem.deterministic,
        "WITH_DK": needs[1],
        "DV": way_of_dv(problem, needs[2]),
        "IN_ORDER": is_in_order(problem, needs[0]),
    }


def compile_backward(
    activations: tuple[str, ...],
    head_dim: int,
    dtype: torch.dtype,
    group: int = 1,
    form: str = "packed",
    kv_heads: int = 4,
    rows: int = 256,
    needs: tuple[bool, bool, bool] = (True, True, True),
    deterministic: bool = False,
    window: tuple[int, int] = (-1, -1),
    queries: int | None = None,
) -> Any:
    """Build the kernel without running it, on any machine: form packed, dense, dense-keys or shared-queries, with `rows` a sequence, or as
    many keys and other `queries`."""
    q, k, v, cu_q, cu_k = example(form, 1024, rows, kv_heads * group, kv_heads, head_dim, head_dim, dtype, queries)
    problem = describe(q, k, v, cu_q, cu_k, None, None, activations, None, 1.0, window, deterministic)
    d_out = q.new_empty(problem.output_shape)
    way = way_of_dq(problem, needs[0])
    copy = q.new_empty(q.shape, dtype=torch.float32)
    tensors, outputs = (q, k, v, d_out), (torch.empty_like(q), copy, torch.empty_like(k), torch.empty_like(v))
    arguments = (
        *_descriptors(problem, tensors, outputs, needs[0]),
        *_pointers(problem, way, q, cu_q, cu_k, None),
        *_numbers(problem, 132),
    )
    constants = _constants(problem, tensors, outputs, None, needs, 132)
    with target_architecture(90):
        return backward_kernel.warmup(*arguments, **constants, **_options(way), grid=(1,))


def precompile(
    activations: tuple[str, ...], head_dim: int, dtype: torch.dtype, masked: bool = False, group: int = 1, kv_heads: int = 4
) -> list[str]:
    """Build the kernel into Triton's cache, in every form and for short and long keys, or those of causal calls; a line for each. With
    causal calls of packed sequences, also their lists of tiles by two."""
    lines = []
    forms: tuple[str, ...] = ("packed", "dense", "dense-keys", "shared-queries")
    if masked:
        forms = ("packed", "dense") if group == 1 else ()
    window = (-1, 0) if masked else (-1, -1)
    if forms and masked:
        with target_architecture(90):
            built = list(schedule_kernels.compiled(2 * TILE))
        lines.append(f"sm_90 tile lists of {2 * TILE} rows, {len(built)} kernels, causal")
    for form in forms:
        kernels = set()
        # An even and an odd number of tiles, up to four and more; steps for many queries and for few; few keys.
        for rows in (128, 256, 384, 1024, 1152) if masked else (128, 256, 512, 1024, MANY_KEYS - 1):
            both = head_dim == 64 and rows > TILE and form in ("dense", "dense-keys") and not masked
            for queries in (rows, TILE) if both else (rows,):
                kernel = compile_backward(activations, head_dim, dtype, group, form, kv_heads, rows, window=window, queries=queries)
                if rows < MANY_KEYS and kernel.hash in kernels:
                    continue
                kernels.add(kernel.hash)
                lines.append(
                    f"sm_90 {form:14} {'hopper backward_kernel':28} {queries}x{rows}, tiles of {TILE} keys, 12 warps, "
                    f"{kernel.metadata.shared // 1024} KB shared{', causal' if masked else ''}"
                )
    return lines

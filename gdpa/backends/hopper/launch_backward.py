"""From a Problem and its tensors to a launch of the backward kernel, and of the small ones around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdpa import schedule
from gdpa.activations import Activation
from gdpa.backends.gpu import example, multiprocessors, on_device, ragged_geometry, target_architecture
from gdpa.backends.hopper import backward as kernels
from gdpa.backends.hopper import partial
from gdpa.backends.hopper.backward import backward_kernel
from gdpa.backends.hopper.launch import OPTIONS, Recipe, descriptor, in_place, readable, start
from gdpa.problem import Problem, describe
from gdpa.tracing import device_functions

TILE = 128  # keys of a tile, as the kernel has them
STEP_ROWS = 64  # queries of a step
# The most keys of dense sequences that one program takes tile after tile, so that dQ needs no zeros and no rounding afterwards. With
# more, its queries and its sums leave L2 between two tiles: 512 keys so took 3.99 ms on an H200, where additions left 2.87 for the kernel.
# Jagged keys gain nothing from it (lengths to 512: 1.69 ms against 1.70; median 120: 1.40 against 1.24): there only the sequences of a
# single tile are spared the copy.
LONGEST_ITEM = 256
# Fewer items for each multiprocessor than this leave some of them idle for long; then tiles are dealt out one by one.
LEAST_ITEMS = 4

ADD, STORE, MIXED, NONE = (int(x.value) for x in (kernels.ADD, kernels.STORE, kernels.MIXED, kernels.NONE))


class Plan(NamedTuple):
    """What becomes of dQ, and how many keys make an item."""

    dq: int
    item: int

    def whole(self, problem: Problem) -> bool:
        """Whether every sequence is one item, for all the host knows."""
        return self.dq == STORE or (self.dq == MIXED and problem.key_side != "packed")


def plan(problem: Problem, needs_dq: bool, multiprocessor_count: int) -> Plan:
    if not needs_dq:
        return Plan(NONE, TILE)
    if problem.query_side == "shared":
        return Plan(ADD, TILE)
    if problem.key_side == "packed":
        return Plan(MIXED, TILE)
    if problem.key_rows <= TILE:
        return Plan(STORE, TILE)
    few = problem.batch * problem.kv_heads < LEAST_ITEMS * multiprocessor_count and not problem.deterministic
    return Plan(MIXED, LONGEST_ITEM) if problem.key_rows <= LONGEST_ITEM and not few else Plan(ADD, TILE)


def is_deterministic(problem: Problem) -> bool:
    """Whether dQ comes out bitwise the same every time: one program sums up all of it, in order."""
    return problem.query_side != "shared" and problem.key_side != "packed" and problem.key_rows <= LONGEST_ITEM


_MOST_RECIPES = 4096
_recipes: dict[tuple[Any, ...], Recipe] = {}


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Needs dK or dV, or both; dQ where asked for."""
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
        chosen = plan(problem, needs_dq, multiprocessors(q.device))
        copy = _copy(problem, chosen, q, cu_seqlens_q, cu_seqlens_k)
        # A descriptor of something that is not written still needs an address.
        outputs = (dk if dq is None else dq, copy, dk, dv)
        _launch(problem, chosen, tensors, outputs, cu_seqlens_q, cu_seqlens_k, out_scale, needs)
        if dq is not None:
            dq = _finished(problem, chosen, dq, copy, cu_seqlens_q, cu_seqlens_k)
    return dq, dk if needs_dk else None, dv if needs_dv else None


def _copy(problem: Problem, chosen: Plan, q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """The fp32 copy of dQ, with zeros where they are needed."""
    if chosen.dq in (NONE, STORE):
        return q.new_empty((1, problem.heads, problem.head_dim), dtype=torch.float32)
    if problem.query_side == "shared":
        return q.new_zeros((_programs(problem, chosen, q.device), *q.shape), dtype=torch.float32)
    if chosen.dq == ADD:
        return q.new_zeros(q.shape, dtype=torch.float32)
    copy = q.new_empty(q.shape, dtype=torch.float32)
    if not chosen.whole(problem):
        partial.prepare(copy, cu_seqlens_q, cu_seqlens_k, problem.batch, problem.query_rows, problem.key_rows, chosen.item)
    return copy


def _finished(
    problem: Problem, chosen: Plan, dq: Tensor, copy: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Tensor:
    if problem.query_side == "shared":
        return partial.sum_programs(copy, dq.dtype)
    if chosen.dq == ADD:
        partial.round_all(dq, copy)
    elif not chosen.whole(problem):
        rows = problem.query_rows, problem.key_rows
        partial.finish(dq, copy, cu_seqlens_q, cu_seqlens_k, problem.batch, *rows, chosen.item)
    elif cu_seqlens_q is not None:
        partial.zero_uncovered(dq, cu_seqlens_q)
    return dq


def _launch(
    problem: Problem,
    chosen: Plan,
    tensors: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> None:
    q, k = tensors[:2]
    key = (
        q.device,
        q.dtype,
        problem.activations,
        problem.query_side,
        problem.key_side,
        q.shape[-2:],
        k.shape[-2:],
        *(x.stride()[-3:] for x in tensors),
        out_scale is None,
        chosen,
        needs,
    )
    pointers = _pointers(problem, chosen, q, cu_seqlens_q, cu_seqlens_k, out_scale)
    numbers = _numbers(problem, chosen)
    programs = _programs(problem, chosen, q.device)
    recipe = _recipes.get(key)
    if recipe is None or not in_place(*tensors):
        constants = _constants(problem, chosen, tensors, outputs, out_scale, needs)
        descriptors = _descriptors(tensors, outputs)
        kernel = backward_kernel[(programs,)](*descriptors, *pointers, *numbers, **constants, **OPTIONS)
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        _recipes[key] = Recipe(kernel, tuple(constants.values()), tuple(ragged_geometry(x) for x in (*tensors, *outputs)))
        return
    start(recipe, programs, (*tensors, *outputs), (*pointers, *numbers))


def _descriptors(tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> list[Any]:
    q, k, v, d_out = tensors
    dq, copy, dk, dv = outputs
    half = q.shape[-1] // 2  # a consumer's columns of dQ
    return [
        descriptor(q, STEP_ROWS),
        descriptor(k, TILE),
        descriptor(v, TILE // 2),
        descriptor(d_out, STEP_ROWS),
        descriptor(dq, STEP_ROWS, half),
        descriptor(copy, STEP_ROWS, half),
        descriptor(dk, TILE // 2),
        descriptor(dv, TILE // 2),
    ]


def _pointers(
    problem: Problem, chosen: Plan, q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The items' records and the scales of the sequences; q stands for what is not read."""
    records = q
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        records = schedule.records(cu_seqlens_k, cu_seqlens_q, problem.batch, problem.key_rows, problem.query_rows, chosen.item)
    return records, q if out_scale is None else out_scale.float().contiguous()


def _numbers(problem: Problem, chosen: Plan) -> tuple[int | float, ...]:
    """The kernel's run-time numbers; the first is the most items there can be."""
    items = schedule.tile_bound(problem.key_side == "packed", problem.batch, problem.key_rows, chosen.item) * problem.kv_heads
    k_items = -(-problem.key_rows // chosen.item)
    return items, problem.query_rows, problem.key_rows, k_items, problem.scale, problem.out_scale


def _programs(problem: Problem, chosen: Plan, device: torch.device) -> int:
    return min(int(_numbers(problem, chosen)[0]), multiprocessors(device))


def _constants(
    problem: Problem,
    chosen: Plan,
    tensors: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    q, k, v, d_out = tensors
    dq, _, dk, dv = outputs
    fast = problem.dtype == torch.bfloat16
    functions = device_functions(problem.activations, fast=fast, frontend="gluon")
    # Sums over the query heads of a key head share their factors, so activations that differ between heads leave none out.
    fold = len(problem.activations) == 1 or problem.group == 1
    return {
        "activate": functions.scaled_pair if fold else functions.pair,
        "factors": functions.pair_factors,
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
        "ITEM": chosen.item,
        "HAS_LIST": problem.query_side == "packed" or problem.key_side == "packed",
        "Q_SHARED": problem.query_side == "shared",
        "SCALE_PER_SEQUENCE": out_scale is not None,
        # float16 may not have the range for dS without it.
        "SCALE_INSIDE": not fast,
        "MASK_TAIL": not all(Activation.from_key(key).tail_safe for key in problem.activations),
        "DQ": chosen.dq,
        "WITH_DK": needs[1],
        "WITH_DV": needs[2],
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
) -> Any:
    """Build the kernel without running it, on any machine: form packed, dense, dense-keys or shared-queries, with `rows` a sequence."""
    q, k, v, cu_q, cu_k = example(form, 1024, rows, kv_heads * group, kv_heads, head_dim, head_dim, dtype)
    problem = describe(q, k, v, cu_q, cu_k, None, None, activations, None, 1.0, (-1, -1), False)
    d_out = q.new_empty(problem.output_shape)
    chosen = plan(problem, needs[0], 132)
    copy = q.new_empty(q.shape, dtype=torch.float32)
    tensors, outputs = (q, k, v, d_out), (torch.empty_like(q), copy, torch.empty_like(k), torch.empty_like(v))
    arguments = (*_descriptors(tensors, outputs), *_pointers(problem, chosen, q, cu_q, cu_k, None), *_numbers(problem, chosen))
    constants = _constants(problem, chosen, tensors, outputs, None, needs)
    with target_architecture(90):
        return backward_kernel.warmup(*arguments, **constants, **OPTIONS, grid=(1,))


def precompile(activations: tuple[str, ...], head_dim: int, dtype: torch.dtype, group: int = 1, kv_heads: int = 4) -> list[str]:
    """Build the kernel into Triton's cache, in every form and for short and long keys; a line for each."""
    lines = []
    for form in ("packed", "dense", "dense-keys", "shared-queries"):
        for rows in (128, 256, 1024):
            kernel = compile_backward(activations, head_dim, dtype, group, form, kv_heads, rows)
            lines.append(
                f"sm_90 {form:14} {'hopper backward_kernel':28} {rows} keys, {STEP_ROWS}x{TILE}, 12 warps, "
                f"{kernel.metadata.shared // 1024} KB shared"
            )
    return lines

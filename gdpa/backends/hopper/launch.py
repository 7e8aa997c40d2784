"""From a Problem and its tensors to a launch of the forward kernel.

A call's way is short, since models with small batches wait for it. What stays the same from batch to batch is remembered in a Recipe,
what stays the same while the shapes do in a Ready, noted in the Problem (and by gdpa/shortcut.py, which calls `Ready.run` past all that
lies before), and the kernel is started past Triton's own launcher (gdpa/launching.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdpa import launching, schedule
from gdpa.backends.gpu import (
    aligned,
    empty_strided,
    example,
    is_aligned,
    mappable,
    multiprocessors,
    on_device,
    plain_scales,
    ragged_geometry,
    target_architecture,
)
from gdpa.backends.hopper.forward import UNBOUNDED, forward_kernel, rounded
from gdpa.backends.hopper.plan import MANY_KEYS, functions_for, needs_mask, precision_for, same_offsets
from gdpa.backends.hopper.plan_forward import (
    CONSUMER_ROWS,
    ROWS_FOR_THREE,
    block_keys,
    consumers,
    has_one_loop,
    is_early,
    packed_forms,
    tile_rows,
    way_of_window,
)
from gdpa.launching import Recipe
from gdpa.problem import Problem, describe

OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}
# 12, 16 and 20 warps share the registers.
OPTIONS_BY_CONSUMERS = {2: OPTIONS, 3: OPTIONS | {"maxnreg": 128}, 4: OPTIONS | {"maxnreg": 96}}
_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Ready:
    """All that calls of one problem and one layout have in common, and the way they run."""

    __slots__ = ("allocate", "index", "needs_same", "numbers", "output", "programs", "recipe", "records_kind")

    def __init__(self, problem: Problem, recipe: Recipe, needs_same: bool) -> None:
        self.recipe = recipe
        self.needs_same = needs_same  # offsets of queries and keys
        self.numbers = _numbers(problem)
        self.programs = min(int(self.numbers[0]), multiprocessors(problem.device))
        self.index = problem.device.index
        self.allocate = empty_strided(problem.device)
        shape = problem.output_shape
        strides = (problem.heads * problem.value_dim, problem.value_dim, 1)
        self.output = (shape, strides if len(shape) == 3 else (shape[1] * strides[0], *strides), problem.dtype)
        packed = problem.query_side == "packed", problem.key_side == "packed"
        self.records_kind: schedule.Kind | None = None
        if True in packed:
            rows = problem.query_rows, problem.key_rows
            self.records_kind = schedule.records_kind(*packed, problem.batch, *rows, tile_rows(problem))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
    ) -> Tensor | None:
        """The output; None where it is not the way: an address that the copy engine does not take, other offsets, another current device.

        The tensors lie as the first of them did. Written out, since this is most of what a call costs.
        """
        q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_address | k_address | v_address) & 15 or torch._C._cuda_getDevice() != self.index:
            return None
        if self.needs_same and not same_offsets(cu_seqlens_q, cu_seqlens_k):
            return None
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        records = scales = q_address  # stands for what is not read
        if self.records_kind is not None:
            listed = schedule.known(self.records_kind, cu_seqlens_q, cu_seqlens_k, stream)
            if listed is None:
                _, _, _, batch, q_rows, k_rows, block = self.records_kind
                listed = schedule.records(cu_seqlens_q, cu_seqlens_k, batch, q_rows, k_rows, block)
            records = listed.data_ptr()
        if out_scale is not None:
            out_scale = plain_scales(out_scale)
            scales = out_scale.data_ptr()
        # Where uninitialised memory is to be filled, torch's own allocation does it.
        out = q.new_empty(self.output[0]) if torch._C._get_deterministic_algorithms() else self.allocate(*self.output)
        recipe = self.recipe
        if recipe.launcher is None or launching.is_hooked():
            start(recipe, self.programs, (q, k, v, out), (records, scales, *self.numbers))
            return out
        q_maps, k_maps, v_maps, out_maps = recipe.encoded
        q_at, k_at, v_at, out_at = recipe.places
        arguments = recipe.arguments.copy()
        arguments[0] = self.programs
        arguments[3] = stream
        arguments[q_at] = (q_maps.get(q_address) or q_maps.add(q))[0]
        arguments[k_at] = (k_maps.get(k_address) or k_maps.add(k))[0]
        arguments[v_at] = (v_maps.get(v_address) or v_maps.add(v))[0]
        arguments[out_at] = (out_maps.get(out.data_ptr()) or out_maps.add(out))[0]
        recipe.launcher.launch(*arguments, records, scales, *self.numbers, *recipe.constants)
        return out


_MOST_RECIPES = 4096
_recipes: dict[tuple[Any, ...], Recipe] = {}


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    ready = prepare(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
    if ready is not None:
        out = ready.run(q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
        if out is not None:
            return out
    with on_device(q):
        return _first(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)


def prepare(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Ready | None:
    """The way of calls whose tensors lie as these; None where they must be copied, or no kernel has been compiled for them."""
    same = problem.masked and same_offsets(cu_seqlens_q, cu_seqlens_k)
    layout = ("hopper forward", q.stride(), k.stride(), v.stride(), out_scale is None, same)
    ready: Ready | None = problem.notes.get(layout)
    if ready is None:
        for x in (q, k, v):
            if not is_aligned(x) or not mappable(x):
                return None
        recipe = _recipes.get(_recipe_key(problem, q, k, v, out_scale, same))
        if recipe is not None:
            ready = problem.notes[layout] = Ready(
                problem, recipe, same and way_of_window(problem, True) != way_of_window(problem, False)
            )
    return ready


def start(recipe: Recipe, programs: int, tensors: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> None:
    """Launch a kernel by its recipe on the current stream. `tensors` are what it reads and writes through descriptors."""
    stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
    launching.start(recipe, (programs, 1, 1), stream, tensors, arguments)


def in_place(q: Tensor, *others: Tensor) -> bool:
    """Whether tensors whose last strides have a recipe can take it: their addresses, the distance of dense sequences, the device."""
    return (
        all(x.data_ptr() % 16 == 0 and (x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1)) for x in (q, *others))
        and q.device.index == torch.cuda.current_device()
    )


def _first(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    """The first call of its kind, for which Triton's own way compiles the kernel and launches it, and any whose inputs must be copied."""
    out = q.new_empty(problem.output_shape)
    if out.numel() == 0:
        return out
    if k.numel() == 0:  # a descriptor needs an address
        return out.zero_()
    tensors = (readable(q), readable(k), readable(v), out)
    numbers = _numbers(problem)
    programs = min(int(numbers[0]), multiprocessors(q.device))
    pointers = _pointers(problem, q, cu_seqlens_q, cu_seqlens_k, out_scale)
    same = same_offsets(cu_seqlens_q, cu_seqlens_k)
    key = _recipe_key(problem, *tensors[:3], out_scale, same)
    recipe = _recipes.get(key)
    if recipe is not None:
        start(recipe, programs, tensors, (*pointers, *numbers))
    else:
        constants = _constants(problem, *tensors, out_scale, same)
        kernel = forward_kernel[(programs,)](
            *_descriptors(problem, *tensors), *pointers, *numbers, **constants, **OPTIONS_BY_CONSUMERS[constants["CONSUMERS"]]
        )
        recipe = Recipe(kernel, tuple(constants.values()), tuple(ragged_geometry(x) for x in tensors))
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        _recipes[key] = recipe
    return out


def _recipe_key(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out_scale: Tensor | None, same: bool) -> tuple[Any, ...]:
    """What a compiled kernel depends on; the output is contiguous."""
    return (
        q.device,
        precision_for(problem),
        problem.activations,
        problem.query_side,
        problem.key_side,
        problem.heads,
        problem.kv_heads,
        problem.head_dim,
        q.stride()[-3:],
        k.stride()[-3:],
        v.stride()[-3:],
        out_scale is None,
        consumers(problem),
        packed_forms(problem),
        has_one_loop(problem),
        way_of_window(problem, same),
    )


def readable(x: Tensor) -> Tensor:
    """x, or a copy of it that a ragged descriptor can describe."""
    x = aligned(x)
    # Not contiguous(), to which a dimension of size 1 may have any stride: queries (1, B, H, D), transposed, would stay as they are.
    return x if mappable(x) else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Moves `rows` rows of a sequence at a time, all columns of a head or some, and stops at the sequence's end."""
    block = [1, 1, rows, x.shape[-1] if columns is None else columns]
    return TensorDescriptor(x, *ragged_geometry(x), block, gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[x.dtype]))


def _pointers(
    problem: Problem, q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The tiles' records and the scales of the sequences; q stands for what is not read."""
    records = q
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        rows = problem.query_rows, problem.key_rows
        records = schedule.records(cu_seqlens_q, cu_seqlens_k, problem.batch, *rows, tile_rows(problem))
    return records, q if out_scale is None else plain_scales(out_scale)


def _numbers(problem: Problem) -> tuple[int | float, ...]:
    """The kernel's run-time numbers; the first is the most tiles there can be."""
    tile = tile_rows(problem)
    tiles = schedule.tile_bound(problem.query_side == "packed", problem.batch, problem.query_rows, tile) * problem.heads
    q_blocks = -(-problem.query_rows // tile)
    left, right = (min(side, UNBOUNDED.value) if side >= 0 else UNBOUNDED.value for side in problem.window)
    return tiles, problem.query_rows, problem.key_rows, q_blocks, left, right, problem.scale, problem.out_scale


def _descriptors(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[TensorDescriptor]:
    keys = block_keys(problem)
    return [descriptor(q, CONSUMER_ROWS), descriptor(k, keys), descriptor(v, keys), descriptor(out, CONSUMER_ROWS)]


def _constants(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_scale: Tensor | None, same: bool = False
) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    functions = functions_for(problem)
    forms = packed_forms(problem)
    first, rest = (None, None) if forms is None else (functions.packed[form] for form in forms)
    return {
        "activate": functions.scaled if first is None else first.open,
        "finish": rounded if first is None else first.finish,
        "activate_rest": functions.scaled if rest is None else rest.open,
        "finish_rest": rounded if rest is None else rest.finish,
        "factor": functions.factor,
        "HEADS": problem.heads,
        "GROUP": problem.group,
        "STRIDE_Q": q.stride(-2),
        "STRIDE_K": k.stride(-2),
        "STRIDE_V": v.stride(-2),
        "STRIDE_O": out.stride(-2),
        "BLOCK_N": block_keys(problem),
        "D": problem.head_dim,
        "HAS_LIST": problem.query_side == "packed" or problem.key_side == "packed",
        "Q_SHARED": problem.query_side == "shared",
        "SCALE_PER_SEQUENCE": out_scale is not None,
        "EARLY": is_early(problem),
        "MASK_TAIL": needs_mask(problem),
        "WINDOW": way_of_window(problem, same),
        "CONSUMERS": consumers(problem),
        "ONE_LOOP": has_one_loop(problem),
    }


def compile_forward(
    activations: tuple[str, ...],
    head_dim: int,
    dtype: torch.dtype,
    group: int = 1,
    form: str = "packed",
    kv_heads: int = 4,
    rows: int = 256,
    window: tuple[int, int] = (-1, -1),
    queries: int | None = None,
) -> Any:
    """Build the kernel without running it, on any machine: form packed, dense, dense-keys or shared-queries, with `rows` a sequence, or as
    many keys and other `queries`."""
    q, k, v, cu_q, cu_k = example(form, 1024, rows, kv_heads * group, kv_heads, head_dim, head_dim, dtype, queries)
    problem = describe(q, k, v, cu_q, cu_k, None, None, activations, None, 1.0, window, False)
    out = q.new_empty(problem.output_shape)
    arguments = (*_descriptors(problem, q, k, v, out), *_pointers(problem, q, cu_q, cu_k, None), *_numbers(problem))
    constants = _constants(problem, q, k, v, out, None, same_offsets(cu_q, cu_k))
    with target_architecture(90):
        return forward_kernel.warmup(*arguments, **constants, **OPTIONS_BY_CONSUMERS[constants["CONSUMERS"]], grid=(1,))


def precompile(
    activations: tuple[str, ...], head_dim: int, dtype: torch.dtype, masked: bool = False, group: int = 1, kv_heads: int = 4
) -> list[str]:
    """Build the kernel into Triton's cache, in every form and for short and long sequences, or causal and windowed; a line for each."""
    lines = []
    # Of each kind: few keys; two consumers, three and four, with one loop or not, packed or not.
    lengths = (64, 128, 192, 384, ROWS_FOR_THREE, 576, 1024, 2048) if head_dim == 64 else (256,)
    sizes = [(rows, (-1, -1)) for rows in (*lengths, MANY_KEYS - 1)]
    for form in ("packed", "dense", "dense-keys", "shared-queries"):
        built = set()
        for rows, window in [(256, (-1, 0)), (256, (1, 0))] if masked else sizes:
            kernel = compile_forward(activations, head_dim, dtype, group, form, kv_heads, rows, window)
            if kernel.hash in built and not masked:
                continue
            built.add(kernel.hash)
            lines.append(
                f"sm_90 {form:14} {'hopper forward_kernel':28} {rows} queries, {kernel.metadata.num_warps} warps, "
                f"{kernel.metadata.shared // 1024} KB shared{'' if not masked else ', causal' if window[0] < 0 else ', window'}"
            )
    return lines

"""From a Problem and its tensors to a launch of the forward kernel.

A call's way is short, since models with small batches wait for it. What stays the same from batch to batch is remembered in a Recipe,
what stays the same while the shapes do in a Ready, noted in the Problem (and by gdpa/shortcut.py, which calls `Ready.run` past all that
lies before), and the kernel is started past Triton's own launcher (gdpa/launching.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdpa import launching, schedule
from gdpa.activations import Activation
from gdpa.backends.gpu import (
    aligned,
    empty_strided,
    example,
    is_aligned,
    mappable,
    multiprocessors,
    on_device,
    plain_scales,
    precision_of,
    ragged_geometry,
    target_architecture,
)
from gdpa.backends.hopper.compat import DIVIDES
from gdpa.backends.hopper.forward import BOTH, NO_WINDOW, RIGHT, UNBOUNDED, forward_kernel, rounded
from gdpa.device_source import FEWEST_PACKED_ROWS, DeviceFunctions
from gdpa.launching import Recipe
from gdpa.lowering import Precision
from gdpa.problem import Problem, describe
from gdpa.tracing import device_functions

CONSUMER_ROWS = 64  # queries of a consumer, as the kernel has them
BLOCK_N = 128  # keys of a block
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}
OPTIONS_BY_CONSUMERS = {2: OPTIONS, 3: OPTIONS | {"maxnreg": 128}}  # 12 and 16 warps share the registers
# Three consumers, at D = 64, are mostly the faster where they fill their tiles of 192 rows. Of the floor on an H200, two -> three,
# SiLU and gelu_tanh: 192 rows 0.648 -> 0.822 and 0.578 -> 0.743, 256 rows 0.748 -> 0.724 and 0.692 -> 0.648, 320 rows 0.511 -> 0.665 and
# 0.407 -> 0.495, 384 rows 0.597 -> 0.691 and 0.527 -> 0.607, 512 rows 0.625 -> 0.635 and 0.536 -> 0.555, 768 rows 0.652 -> 0.772 and
# 0.573 -> 0.660; packed lengths to 200 0.646 -> 0.721 and 0.525 -> 0.590, to 512 0.468 -> 0.490 and 0.396 -> 0.420, to 1024
# 0.578 -> 0.654 and 0.507 -> 0.563, with 256 keys 0.527 -> 0.620 and 0.521 -> 0.593; but 256 keys for 1024 rows 0.597 -> 0.567 and
# 0.525 -> 0.529. gelu_tanh has one loop (below) where keys are few. Packed sequences of fewer than 100 rows on average were not timed.
BLOCKS_FOR_TWO = (0, 1, 2, 4)  # of 64 rows, dense
LEAST_AVERAGE_FOR_THREE = 96  # of packed sequences
# Longer activations, by the instructions of f and f' for a score, have three from so many rows on: 512, as all had before. With more
# code than gelu's, three copies of it, warps are likely to wait for instructions where tiles are short.
MOST_INSTRUCTIONS_FOR_THREE = 11
ROWS_FOR_THREE = 512
# gelu in fp16 is such a one. Of two consumers it is packed, and faster so where keys are few: two -> three, these by exp2, ten instructions
# where they have eight now, 256 keys for 1024 rows 0.404 -> 0.296, 1024 rows 0.452 -> 0.441, but 2048 rows 0.462 -> 0.508, lengths to 512
# 0.316 -> 0.315. With eight, three had 0.313, 0.469 and 0.517 in another run. The others in fp16 are as in bf16:
# SiLU 1024 rows 0.669 -> 0.694, 2048 rows 0.728 -> 0.792, 256 keys for 1024 rows 0.559 -> 0.579, lengths to 512 0.471 -> 0.481; gelu_tanh,
# packed of two, 0.559 -> 0.554, 0.576 -> 0.621, 0.518 -> 0.530, 0.390 -> 0.399.
KEYS_FOR_THREE_NOT_PACKED = 1025
# Where a tile has two or three blocks of keys, a consumer is in its first step, which is code of its own, half or a third of the time: the
# kernel has 71 KB with gelu, most of it steps, and warps seem to wait for instructions, as they do in the backward (docs/design.md). In one
# loop for all steps it has 52. Of the floor, apart -> in one, gelu_tanh: 192 rows 0.567 -> 0.743, 256 rows 0.568 -> 0.648, 320 rows
# 0.495 -> 0.495, 384 rows 0.556 -> 0.607, lengths to 200 0.510 -> 0.590, 256 keys for 1024 rows 0.433 -> 0.529 and for lengths to 1024
# 0.470 -> 0.593; but 128 keys 0.680 -> 0.661, 512 rows 0.555 -> 0.548, 2048 rows 0.679 -> 0.663, lengths to 600 0.442 -> 0.432. SiLU's
# steps are shorter: 192 rows 0.822 -> 0.847, 256 keys 0.567 -> 0.603, but 384 rows 0.691 -> 0.686, 2048 rows 0.775 -> 0.759. elu
# and hardswish, with 8 and 11 instructions, were not timed.
LEAST_INSTRUCTIONS_FOR_ONE_LOOP = 8
KEYS_FOR_ONE_LOOP = {False: (129, 384), True: (64, 255)}  # dense, and packed on average

# Of a sequence, packed ones on average, so that few of gelu's scores have the error budget to themselves (gdpa/lowering.py).
MANY_KEYS = 64

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
            tile = CONSUMER_ROWS * consumers(problem)
            self.records_kind = schedule.records_kind(*packed, problem.batch, problem.query_rows, problem.key_rows, tile)

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
            ready = problem.notes[layout] = Ready(problem, recipe, same and _window(problem, True) != _window(problem, False))
    return ready


def start(recipe: Recipe, programs: int, tensors: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> None:
    """Launch a kernel by its recipe on the current stream. `tensors` are what it reads and writes through descriptors."""
    stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
    launching.start(recipe, (programs, 1, 1), stream, tensors, arguments)


def consumers(problem: Problem) -> int:
    """How many share a tile, by the rows to expect of a sequence. Registers allow three at D = 64, for one activation, unmasked.

    Of two consumers gelu's scores may be packed in 16 bits, of three they are not. Where results must be the same every time, a sequence's
    do not depend on the lengths of others either (but for calls of fewer than FEWEST_PACKED_ROWS), so there are always two."""
    fits = problem.head_dim == 64 and len(set(problem.activations)) == 1
    if not fits or needs_mask(problem) or problem.masked or problem.deterministic:
        return 2
    packed = problem.query_side == "packed"
    rows = problem.query_rows // max(problem.batch, 1) if packed else problem.query_rows
    length = instructions(problem.activations[0], precision_for(problem))
    if length is None or length > MOST_INSTRUCTIONS_FOR_THREE:
        few = functions_for(problem).open_packed is not None and _keys(problem) < KEYS_FOR_THREE_NOT_PACKED
        return 3 if rows >= ROWS_FOR_THREE and not few else 2
    many = rows >= LEAST_AVERAGE_FOR_THREE if packed else -(-rows // CONSUMER_ROWS) not in BLOCKS_FOR_TWO
    return 3 if many else 2


def has_one_loop(problem: Problem) -> bool:
    """Whether a tile's first step is one of its loop's."""
    length = instructions(problem.activations[0], precision_for(problem)) if consumers(problem) == 3 else None
    if length is None:
        return False
    least, most = KEYS_FOR_ONE_LOOP[problem.key_side == "packed"]
    return LEAST_INSTRUCTIONS_FOR_ONE_LOOP <= length <= MOST_INSTRUCTIONS_FOR_THREE and least <= _keys(problem) <= most


def _keys(problem: Problem) -> int:
    """Of a sequence, packed ones on average."""
    return problem.key_rows // max(problem.batch, 1) if problem.key_side == "packed" else problem.key_rows


def precision_for(problem: Problem) -> Precision:
    """How exact the activations' device code must be. Where results must be the same every time, a sequence's do not depend on how many
    keys others have."""
    many = problem.dtype == torch.float16 and _keys(problem) >= MANY_KEYS and not problem.deterministic
    return "float16_sm90_many" if many else precision_of(problem.dtype, 90)


def functions_for(problem: Problem) -> DeviceFunctions:
    return device_functions(problem.activations, precision=precision_for(problem), frontend="gluon")


@lru_cache(maxsize=1024)
def instructions(activation: str, precision: Precision) -> int | None:
    """Of f and f' together, for a score; None where they are not known, or masked at a sequence's end."""
    if not Activation.from_key(activation).tail_safe:
        return None
    return device_functions((activation,), precision=precision, frontend="gluon").weighted_instructions


def same_offsets(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> bool:
    """Whether every sequence has as many keys as queries, as far as the host can tell: it does not read them."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return False
    alike = cu_seqlens_q.dtype == cu_seqlens_k.dtype and cu_seqlens_q.stride() == cu_seqlens_k.stride()
    return cu_seqlens_q is cu_seqlens_k or (alike and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr())


def _window(problem: Problem, same: bool) -> int:
    """The kernel's way with windows, with the `same_offsets` of the call."""
    left, right = problem.window
    dense = "packed" not in (problem.query_side, problem.key_side)
    if left < 0 and right < 0:
        return int(NO_WINDOW.value)
    on_edge = (problem.key_rows - problem.query_rows + right) % BLOCK_N == 0 and (dense or same)
    return int((RIGHT if left < 0 and on_edge else BOTH).value)


def needs_mask(problem: Problem) -> bool:
    """Whether rows past a sequence's end must be masked."""
    return not all(Activation.from_key(key).tail_safe for key in problem.activations)


def _has_many_rows(problem: Problem) -> bool:
    """Whether so many rows share the error budget that packed scores, rounded twice, stay inside it."""
    rows = problem.query_rows if problem.query_side == "packed" else problem.query_rows * problem.batch
    return rows * problem.heads >= FEWEST_PACKED_ROWS


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
            *_descriptors(*tensors), *pointers, *numbers, **constants, **OPTIONS_BY_CONSUMERS[constants["CONSUMERS"]]
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
        _has_many_rows(problem),
        consumers(problem),
        has_one_loop(problem),
        _window(problem, same),
    )


def readable(x: Tensor) -> Tensor:
    """x, or a copy of it that a ragged descriptor can describe."""
    x = aligned(x)
    return x if mappable(x) else x.contiguous()


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
        tile = CONSUMER_ROWS * consumers(problem)
        records = schedule.records(cu_seqlens_q, cu_seqlens_k, problem.batch, problem.query_rows, problem.key_rows, tile)
    return records, q if out_scale is None else plain_scales(out_scale)


def _numbers(problem: Problem) -> tuple[int | float, ...]:
    """The kernel's run-time numbers; the first is the most tiles there can be."""
    tile = CONSUMER_ROWS * consumers(problem)
    tiles = schedule.tile_bound(problem.query_side == "packed", problem.batch, problem.query_rows, tile) * problem.heads
    q_blocks = -(-problem.query_rows // tile)
    left, right = (min(side, UNBOUNDED.value) if side >= 0 else UNBOUNDED.value for side in problem.window)
    return tiles, problem.query_rows, problem.key_rows, q_blocks, left, right, problem.scale, problem.out_scale


def _descriptors(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[TensorDescriptor]:
    return [descriptor(q, CONSUMER_ROWS), descriptor(k, BLOCK_N), descriptor(v, BLOCK_N), descriptor(out, CONSUMER_ROWS)]


def _constants(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_scale: Tensor | None, same: bool = False
) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    functions = functions_for(problem)
    mask_tail = needs_mask(problem)
    count = consumers(problem)
    # A mask would part the pairs of packed scores. With three consumers and long sequences they are no faster; short ones were not timed.
    # Of the floor on an H200, gelu_tanh without and with: two consumers, 256 rows 0.627 and 0.666; three, 1024 rows 0.598 and 0.593,
    # 2048 rows 0.682 and 0.667.
    masked = mask_tail or problem.masked
    packed = functions.open_packed is not None and count == 2 and not masked and _has_many_rows(problem)
    # Worth up to 4 %, in fp16 3 to 11 %. A mask has no registers to spare for it, nor has any activation with three consumers.
    early = DIVIDES.value and not mask_tail and count == 2
    return {
        "activate": functions.open_packed if packed else functions.scaled,
        "finish": functions.finish_packed if packed else rounded,
        "factor": functions.factor,
        "HEADS": problem.heads,
        "GROUP": problem.group,
        "STRIDE_Q": q.stride(-2),
        "STRIDE_K": k.stride(-2),
        "STRIDE_V": v.stride(-2),
        "STRIDE_O": out.stride(-2),
        "BLOCK_N": BLOCK_N,
        "D": problem.head_dim,
        "HAS_LIST": problem.query_side == "packed" or problem.key_side == "packed",
        "Q_SHARED": problem.query_side == "shared",
        "SCALE_PER_SEQUENCE": out_scale is not None,
        "EARLY": early,
        "MASK_TAIL": mask_tail,
        "WINDOW": _window(problem, same),
        "CONSUMERS": count,
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
    q, k, v, cu_q, cu_k = example(form, 4, rows, kv_heads * group, kv_heads, head_dim, head_dim, dtype, queries)
    problem = describe(q, k, v, cu_q, cu_k, None, None, activations, None, 1.0, window, False)
    out = q.new_empty(problem.output_shape)
    arguments = (*_descriptors(q, k, v, out), *_pointers(problem, q, cu_q, cu_k, None), *_numbers(problem))
    constants = _constants(problem, q, k, v, out, None, same_offsets(cu_q, cu_k))
    with target_architecture(90):
        return forward_kernel.warmup(*arguments, **constants, **OPTIONS_BY_CONSUMERS[constants["CONSUMERS"]], grid=(1,))


def precompile(
    activations: tuple[str, ...], head_dim: int, dtype: torch.dtype, masked: bool = False, group: int = 1, kv_heads: int = 4
) -> list[str]:
    """Build the kernel into Triton's cache, in every form and for short and long sequences, or causal and windowed; a line for each."""
    lines = []
    # Of each kind: few keys; two consumers, three and perhaps one loop, three, and three where many keys decide it.
    lengths = (64, 192, ROWS_FOR_THREE, KEYS_FOR_THREE_NOT_PACKED) if head_dim == 64 else (256,)
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

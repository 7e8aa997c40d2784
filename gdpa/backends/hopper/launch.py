"""From a Problem and its tensors to a launch of the forward kernel.

A call's way is short, since models with small batches wait for it: what stays the same from batch to batch is remembered in a Recipe,
and the kernel is started past the argument binding of Triton's `kernel[grid](...)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdpa import schedule
from gdpa.activations import Activation
from gdpa.backends.gpu import aligned, example, mappable, multiprocessors, on_device, ragged_geometry, target_architecture
from gdpa.backends.hopper.forward import forward_kernel
from gdpa.problem import Problem, describe
from gdpa.tracing import device_functions

TILE = 128  # query rows of a tile, as the kernel has them
CONSUMER_ROWS = 64
BLOCK_N = 128  # keys of a block
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Recipe(NamedTuple):
    """How calls of one kind run, whatever their addresses and numbers of rows: these change with every jagged batch."""

    kernel: Any
    constants: tuple[Any, ...]
    geometries: tuple[tuple[list[int], list[int]], ...]  # of q, k, v and the output


_MOST_RECIPES = 4096
_recipes: dict[tuple[Any, ...], Recipe] = {}


class Described:
    """As much of a tensor descriptor as a launch reads: made in 0.4 microseconds on a 2-core Xeon, a whole one in 20."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor, geometry: tuple[list[int], list[int]]) -> None:
        self.base = base
        self.shape, self.strides = geometry


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    out = q.new_empty(problem.output_shape)
    if out.numel() == 0:
        return out
    if k.numel() == 0:  # a descriptor needs an address
        return out.zero_()
    key = (
        q.device,
        q.dtype,
        problem.activations,
        problem.query_side,
        problem.key_side,
        q.shape[-2:],
        k.shape[-2:],
        q.stride()[-3:],
        k.stride()[-3:],
        v.stride()[-3:],
        out_scale is None,
        _has_many_rows(problem),
    )
    recipe = _recipes.get(key)
    if recipe is None or not in_place(q, k, v):
        with on_device(q):
            return _first(key, problem, q, k, v, out, cu_seqlens_q, cu_seqlens_k, out_scale)
    numbers = _numbers(problem)
    pointers = _pointers(problem, q, cu_seqlens_q, cu_seqlens_k, out_scale)
    start(recipe, _programs(numbers, q.device), (q, k, v, out), (*pointers, *numbers))
    return out


def start(recipe: Recipe, programs: int, tensors: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> None:
    """Launch a kernel by its recipe, past Triton's argument binding. `tensors` are what it reads and writes through descriptors."""
    described = [Described(x, geometry) for x, geometry in zip(tensors, recipe.geometries, strict=True)]
    kernel = recipe.kernel
    kernel.run(
        programs,
        1,
        1,
        torch._C._cuda_getCurrentRawStream(tensors[0].device.index),
        kernel.function,
        kernel.packed_metadata,
        None,
        knobs.runtime.launch_enter_hook,
        knobs.runtime.launch_exit_hook,
        *described,
        *arguments,
        *recipe.constants,
    )


def _has_many_rows(problem: Problem) -> bool:
    """Whether so many rows share the error budget that packed scores, rounded twice, stay inside it (docs/numerics.md)."""
    rows = problem.query_rows if problem.query_side == "packed" else problem.query_rows * problem.batch
    return rows * problem.heads >= 16


def in_place(q: Tensor, *others: Tensor) -> bool:
    """Whether tensors whose last strides have a recipe can take it: their addresses, the distance of dense sequences, the device."""
    return (
        all(x.data_ptr() % 16 == 0 and (x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1)) for x in (q, *others))
        and q.device.index == torch.cuda.current_device()
    )


def _first(
    key: tuple[Any, ...],
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    """A call of a kind not seen before, or whose inputs must be copied: through Triton's own way to compile and launch."""
    tensors = q, k, v
    q, k, v = (readable(x) for x in tensors)
    arguments = _arguments(problem, q, k, v, out, cu_seqlens_q, cu_seqlens_k, out_scale)
    constants = _constants(problem, q, k, v, out, out_scale)
    kernel = forward_kernel[(_programs(_numbers(problem), q.device),)](*arguments, **constants, **OPTIONS)
    if all(x is given for x, given in zip((q, k, v), tensors, strict=True)):  # read in place
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        geometries = tuple(ragged_geometry(x) for x in (q, k, v, out))
        _recipes[key] = Recipe(kernel, tuple(constants.values()), geometries)
    return out


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
        records = schedule.records(cu_seqlens_q, cu_seqlens_k, problem.batch, problem.query_rows, problem.key_rows, TILE)
    return records, q if out_scale is None else out_scale.float().contiguous()


def _numbers(problem: Problem) -> tuple[int | float, ...]:
    """The kernel's run-time numbers; the first is the most tiles there can be."""
    tiles = schedule.tile_bound(problem.query_side == "packed", problem.batch, problem.query_rows, TILE) * problem.heads
    q_blocks = -(-problem.query_rows // TILE)
    return tiles, problem.query_rows, problem.key_rows, q_blocks, problem.scale, problem.out_scale


def _programs(numbers: tuple[int | float, ...], device: torch.device) -> int:
    return min(int(numbers[0]), multiprocessors(device))


def _arguments(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> tuple[Any, ...]:
    """The kernel's run-time arguments."""
    return (
        descriptor(q, CONSUMER_ROWS),
        descriptor(k, BLOCK_N),
        descriptor(v, BLOCK_N),
        descriptor(out, CONSUMER_ROWS),
        *_pointers(problem, q, cu_seqlens_q, cu_seqlens_k, out_scale),
        *_numbers(problem),
    )


def _constants(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_scale: Tensor | None) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    # bf16 takes the approximate instructions: they err less than its rounding of P. fp16 rounds eight times finer.
    functions = device_functions(problem.activations, fast=problem.dtype == torch.bfloat16, frontend="gluon")
    packed = functions.packed is not None and _has_many_rows(problem)
    return {
        "activate": functions.packed if packed else functions.scaled,
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
        "PACKED": packed,
        "MASK_TAIL": not all(Activation.from_key(key).tail_safe for key in problem.activations),
    }


def compile_forward(
    activations: tuple[str, ...], head_dim: int, dtype: torch.dtype, group: int = 1, form: str = "packed", kv_heads: int = 4
) -> Any:
    """Build the kernel without running it, on any machine: form packed, dense, dense-keys or shared-queries."""
    q, k, v, cu_q, cu_k = example(form, 4, 256, kv_heads * group, kv_heads, head_dim, head_dim, dtype)
    problem = describe(q, k, v, cu_q, cu_k, None, None, activations, None, 1.0, (-1, -1), False)
    out = q.new_empty(problem.output_shape)
    arguments = _arguments(problem, q, k, v, out, cu_q, cu_k, None)
    with target_architecture(90):
        return forward_kernel.warmup(*arguments, **_constants(problem, q, k, v, out, None), **OPTIONS, grid=(1,))


def precompile(activations: tuple[str, ...], head_dim: int, dtype: torch.dtype, group: int = 1, kv_heads: int = 4) -> list[str]:
    """Build the kernel into Triton's cache, in every form; a line for each."""
    lines = []
    for form in ("packed", "dense", "dense-keys", "shared-queries"):
        kernel = compile_forward(activations, head_dim, dtype, group, form, kv_heads)
        lines.append(
            f"sm_90 {form:14} {'hopper forward_kernel':28} {TILE}x{BLOCK_N}, 12 warps, {kernel.metadata.shared // 1024} KB shared"
        )
    return lines

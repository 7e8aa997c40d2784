"""From a Problem and its tensors to a launch of the forward kernel.

A call's way is short, since models with small batches wait for it: a compiled kernel is found by what it was compiled for and started
directly, past the argument binding of Triton's `kernel[grid](...)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdpa import schedule
from gdpa.activations import Activation
from gdpa.backends.gpu import aligned, mappable, multiprocessors, on_device, ragged_geometry, target_architecture
from gdpa.backends.hopper.forward import forward_kernel
from gdpa.problem import Problem, describe
from gdpa.tracing import device_functions

TILE = 128  # query rows of a tile, as the kernel has them
CONSUMER_ROWS = 64
BLOCK_N = 128  # keys of a block
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# What a kernel was compiled for -> the kernel.
_compiled: dict[tuple[Any, ...], Any] = {}
_layouts: dict[tuple[Any, ...], Any] = {}


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
    with on_device(q):
        q, k, v = _readable(q), _readable(k), _readable(v)
        arguments, tiles = _arguments(problem, q, k, v, out, cu_seqlens_q, cu_seqlens_k, out_scale)
        grid = min(tiles, multiprocessors(q.device))
        key = (
            q.device,
            q.dtype,
            problem.activations,
            problem.heads,
            problem.kv_heads,
            problem.head_dim,
            q.stride(-2),
            k.stride(-2),
            v.stride(-2),
            problem.query_side,
            problem.key_side,
            out_scale is None,
        )
        known = _compiled.get(key)
        if known is None:
            constants = _constants(problem, q, k, v, out, out_scale)
            kernel = forward_kernel[(grid,)](*arguments, **constants, **OPTIONS)
            _compiled[key] = kernel, tuple(constants.values())
        else:
            kernel, constants = known
            stream = torch._C._cuda_getCurrentRawStream(q.device.index)
            hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, None, *hooks, *arguments, *constants)
    return out


def _readable(x: Tensor) -> Tensor:
    """x, or a copy of it that a ragged descriptor can describe."""
    x = aligned(x)
    return x if mappable(x) else x.contiguous()


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Moves `rows` rows of a sequence at a time and stops at its end."""
    block = [1, 1, rows, x.shape[-1]]
    key = (rows, x.shape[-1], x.dtype)
    layout = _layouts.get(key)
    if layout is None:
        layout = _layouts[key] = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[x.dtype])
    return TensorDescriptor(x, *ragged_geometry(x), block, layout)


def _arguments(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> tuple[tuple[Any, ...], int]:
    """The kernel's run-time arguments, and the most tiles there can be."""
    q_blocks = -(-problem.query_rows // TILE)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        records = q  # a pointer that is not read
    else:
        records = schedule.records(cu_seqlens_q, cu_seqlens_k, problem.batch, problem.query_rows, problem.key_rows, TILE)
    tiles = schedule.tile_bound(cu_seqlens_q is not None, problem.batch, problem.query_rows, TILE) * problem.heads
    arguments = (
        _descriptor(q, CONSUMER_ROWS),
        _descriptor(k, BLOCK_N),
        _descriptor(v, BLOCK_N),
        _descriptor(out, CONSUMER_ROWS),
        records,
        q if out_scale is None else out_scale.float().contiguous(),
        tiles,
        problem.query_rows,
        problem.key_rows,
        q_blocks,
        problem.scale,
        problem.out_scale,
    )
    return arguments, tiles


def _constants(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_scale: Tensor | None) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    # bf16 takes the approximate instructions: they err less than its rounding of P. fp16 rounds eight times finer.
    functions = device_functions(problem.activations, fast=problem.dtype == torch.bfloat16, frontend="gluon")
    return {
        "activate": functions.scaled,
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
        "MASK_TAIL": not all(Activation.from_key(key).tail_safe for key in problem.activations),
    }


def compile_forward(
    activations: tuple[str, ...], head_dim: int, dtype: torch.dtype, group: int = 1, form: str = "packed", kv_heads: int = 4
) -> Any:
    """Build the kernel without running it, on any machine: form packed, dense, dense-keys or shared-queries."""
    batch, rows, heads = 4, 256, kv_heads * group
    packed_q, packed_k = form in ("packed", "dense-keys"), form in ("packed", "shared-queries")

    def tensor(packed: bool, lead: tuple[int, ...], heads: int) -> Tensor:
        return torch.empty((batch * rows, heads, head_dim) if packed else (*lead, heads, head_dim), dtype=dtype, device="meta")

    offsets = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    q = tensor(packed_q, (rows,) if form == "shared-queries" else (batch, rows), heads)
    k, v = tensor(packed_k, (batch, rows), kv_heads), tensor(packed_k, (batch, rows), kv_heads)
    cu_q, cu_k = offsets if packed_q else None, offsets if packed_k else None
    problem = describe(q, k, v, cu_q, cu_k, None, None, activations, None, 1.0, (-1, -1), False)
    out = q.new_empty(problem.output_shape)
    arguments, _ = _arguments(problem, q, k, v, out, cu_q, cu_k, None)
    with target_architecture(90):
        return forward_kernel.warmup(*arguments, **_constants(problem, q, k, v, out, None), **OPTIONS, grid=(1,))

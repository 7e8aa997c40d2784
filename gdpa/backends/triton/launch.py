"""From a Problem and its tensors to kernel launches.

The `plan_*` functions lay launches out; `forward` and `backward` run them; `precompile` builds the same kernels ahead of time, for
another machine's architecture if asked, under the keys that a later launch looks up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa import schedule, schedule_kernels
from gdpa.activations import Activation
from gdpa.backends.gpu import aligned, architecture, example, mappable, on_device, ragged_geometry, target_architecture
from gdpa.backends.triton.backend import interpreted
from gdpa.backends.triton.backward import key_gradient_kernel, query_gradient_kernel, shared_query_gradient_kernel
from gdpa.backends.triton.configs import INTERPRETED, Config, config
from gdpa.backends.triton.forward import forward_kernel
from gdpa.problem import Problem, describe
from gdpa.tracing import device_functions

# dQ of shared queries is summed in about this many programs; fixed, so that results do not depend on the device.
SHARED_QUERY_PROGRAMS = 1024

# A window wider than any tensor; more would overflow 32 bits where a row is added.
WIDEST_WINDOW = 2**30


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `arguments` are the kernel's parameters in order, `constants` its compile-time ones by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    config: Config

    def options(self) -> dict[str, Any]:
        shape = self.config
        options = {**self.constants, "num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": True}
        return options if shape.registers is None else {**options, "maxnreg": shape.registers}

    def run(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](*self.arguments, **self.options())

    def compile(self) -> Any:
        """Build without running; returns Triton's compiled kernel."""
        return self.kernel.warmup(*self.arguments, grid=(1,), **self.options())


class Call:
    """One call's tensors as the kernels want them: aligned rows, bounds, strides, descriptors."""

    def __init__(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        out_scale: Tensor | None,
        d_out: Tensor | None,
        arch: int,
    ) -> None:
        self.problem = problem
        self.arch = arch
        self.q, self.k, self.v = (aligned(x) for x in (q, k, v))
        self.d_out = self.q if d_out is None else aligned(d_out)
        self.q_bounds = None if cu_seqlens_q is None else schedule.bounds(cu_seqlens_q, problem.query_rows)
        self.k_bounds = None if cu_seqlens_k is None else schedule.bounds(cu_seqlens_k, problem.key_rows)
        self.out_scale = None if out_scale is None else out_scale.float().contiguous()
        # A pointer argument that is not read still needs a tensor of a fixed type.
        self.nothing = q.new_empty(0, dtype=torch.int32)
        self.no_scale = q.new_empty(0, dtype=torch.float32)
        # The copy engine's descriptors need Hopper, whole powers of two and aligned rows; otherwise threads copy.
        self.mapped = (
            90 <= arch < 100
            and problem.dtype.itemsize == 2
            and all(size == _width(size) for size in (problem.head_dim, problem.value_dim))
            and all(mappable(x) for x in (self.q, self.k, self.v, self.d_out))
        )

    def config(self, kernel: str) -> Config:
        if interpreted():
            return INTERPRETED
        problem = self.problem
        return config(kernel, self.arch, problem.dtype.itemsize, max(problem.head_dim, problem.value_dim))

    def tiles(self, queries: bool, block: int) -> tuple[Tensor | None, int]:
        """The list of query (or key) tiles, None where both sides are dense, and how many programs cover them."""
        problem = self.problem
        owner, other = (self.q_bounds, self.k_bounds) if queries else (self.k_bounds, self.q_bounds)
        rows = problem.query_rows if queries else problem.key_rows
        count = schedule.tile_bound(owner is not None, problem.batch, rows, block)
        if owner is None and other is None:
            return None, count
        return schedule.tiles(owner, other, problem.batch, rows, block), count

    def source(self, x: Tensor, block: int) -> Tensor | TensorDescriptor:
        """What a kernel loads `x` through, `block` rows at a time."""
        return ragged_descriptor(x, block) if self.mapped else x

    def inputs(self, shape: Config, with_d_out: bool) -> tuple[Any, ...]:
        """q, k, v (and d_out) as the kernels' first parameters."""
        inputs = (
            self.source(self.q, shape.block_m),
            self.source(self.k, shape.block_n),
            self.source(self.v, shape.block_n),
        )
        return (*inputs, self.source(self.d_out, shape.block_m)) if with_d_out else inputs

    def lists(self, tiles: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tile list, both bounds and the out_scale, with something harmless where there is none."""
        scale = self.no_scale if self.out_scale is None else self.out_scale
        tiles, q_bounds, k_bounds = (self.nothing if x is None else x for x in (tiles, self.q_bounds, self.k_bounds))
        return tiles, q_bounds, k_bounds, scale

    def numbers(self, heads: int, blocks: int) -> tuple[int | float, ...]:
        """The kernels' parameters after the strides; `blocks` is how many tiles a dense sequence has."""
        problem = self.problem
        sizes = (problem.batch, heads, problem.query_rows, problem.key_rows, blocks)
        return (*sizes, problem.scale, problem.out_scale, *_window(problem))

    def constants(self, shape: Config, tiles: Tensor | None) -> dict[str, Any]:
        """The compile-time parameters that every kernel has; each launch adds its activation."""
        problem = self.problem
        tail_safe = all(Activation.from_key(key).tail_safe for key in problem.activations)
        # Only a lone loop keeps its last product running: from one loop into the next ptxas again runs them one by one.
        overlap = shape.overlap and self.mapped and tail_safe and not problem.masked
        return {
            "GROUP": problem.group,
            "D": problem.head_dim,
            "DV": problem.value_dim,
            "WIDTH": _width(problem.head_dim),
            "WIDTH_V": _width(problem.value_dim),
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
            "HAS_LIST": tiles is not None,
            "Q_PACKED": self.q_bounds is not None,
            "K_PACKED": self.k_bounds is not None,
            "SCALE_PER_SEQUENCE": self.out_scale is not None,
            "WINDOW": problem.masked,
            "TAIL_SAFE": tail_safe,
            "MAPPED": self.mapped,
            "SETTLE": (2 if overlap else 1) if 90 <= self.arch < 100 else 0,
            "UPCAST": interpreted() and problem.dtype.itemsize == 2,
        }

    def pair(self, fold: bool = False) -> dict[str, Any]:
        """How a backward kernel computes (f, f'), with common factors left to the end if asked to `fold`. Sums over the query heads of
        a key head share their factors, so activations that differ between heads leave none out."""
        functions = self.activation()
        fold = fold and len(self.problem.activations) == 1
        pair = functions.scaled_pair if fold else functions.pair
        return {"activate_pair": pair, "pair_factors": functions.pair_factors, "FOLD": fold}

    @property
    def fast(self) -> bool:
        return self.problem.dtype == torch.bfloat16 and self.arch >= 80

    def activation(self) -> Any:
        """The device functions. bf16 on NVIDIA takes the approximate instructions: they err less than its rounding
        of P and dS. fp16 rounds eight times finer, and with them passed the error budget by a tenth."""
        return device_functions(self.problem.activations, fast=self.fast)


def _width(size: int) -> int:
    """The power of two a head dimension is padded to; tl.dot takes at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """(sequence / 8, row, head); packed and shared tensors do not move with the sequence."""
    return (x.stride(0) // 8 if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


def ragged_descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """Loads `block` rows of a sequence at a time and stops at its end."""
    return TensorDescriptor(x, *ragged_geometry(x), [1, 1, block, x.shape[-1]])


def _window(problem: Problem) -> tuple[int, int]:
    left, right = problem.window
    return min(left, WIDEST_WINDOW), min(right, WIDEST_WINDOW)


def plan_forward(call: Call, out: Tensor) -> Launch:
    problem, shape = call.problem, call.config("forward")
    tiles, count = call.tiles(True, shape.block_m)
    arguments = (
        *call.inputs(shape, with_d_out=False),
        out,
        *call.lists(tiles),
        *_strides(call.q),
        *_strides(call.k),
        *_strides(call.v),
        *_strides(out),
        *call.numbers(problem.heads, triton.cdiv(problem.query_rows, shape.block_m)),
    )
    constants = {"activate": call.activation().value, **call.constants(shape, tiles)}
    return Launch(forward_kernel, (count * problem.heads,), arguments, constants, shape)


def plan_key_gradients(call: Call, dk: Tensor, dv: Tensor) -> Launch:
    problem, shape = call.problem, call.config("key_gradient")
    tiles, count = call.tiles(False, shape.block_n)
    arguments = (
        *call.inputs(shape, with_d_out=True),
        dk,
        dv,
        *call.lists(tiles),
        *_strides(call.q),
        *_strides(call.k),
        *_strides(call.v),
        *_strides(call.d_out),
        *_strides(dk),
        *_strides(dv),
        *call.numbers(problem.kv_heads, triton.cdiv(problem.key_rows, shape.block_n)),
    )
    # dK/dV gains 2 %; dQ, at 128 registers a thread, would spill.
    constants = {**call.pair(fold=True), **call.constants(shape, tiles)}
    return Launch(key_gradient_kernel, (count * problem.kv_heads,), arguments, constants, shape)


def plan_query_gradient(call: Call, dq: Tensor) -> Launch:
    problem, shape = call.problem, call.config("query_gradient")
    tiles, count = call.tiles(True, shape.block_m)
    arguments = (
        *call.inputs(shape, with_d_out=True),
        dq,
        *call.lists(tiles),
        *_strides(call.q),
        *_strides(call.k),
        *_strides(call.v),
        *_strides(call.d_out),
        *_strides(dq),
        *call.numbers(problem.heads, triton.cdiv(problem.query_rows, shape.block_m)),
    )
    constants = {**call.pair(), **call.constants(shape, tiles)}
    return Launch(query_gradient_kernel, (count * problem.heads,), arguments, constants, shape)


def plan_shared_query_gradient(call: Call, partial: Tensor) -> Launch:
    """`partial` is fp32 (chunks, Sq, H, D); its sum over the chunks is dQ."""
    problem, shape = call.problem, call.config("query_gradient")
    chunks = partial.shape[0]
    arguments = (
        *call.inputs(shape, with_d_out=True),
        partial,
        *call.lists(None)[2:],
        *_strides(call.q),
        *_strides(call.k),
        *_strides(call.v),
        *_strides(call.d_out),
        *_strides(partial),
        problem.batch,
        problem.query_rows,
        problem.key_rows,
        chunks,
        problem.scale,
        problem.out_scale,
        *_window(problem),
    )
    constants = {**call.pair(), **call.constants(shape, None)}
    for absent in ("HAS_LIST", "Q_PACKED"):
        del constants[absent]
    grid = (chunks, problem.heads, triton.cdiv(problem.query_rows, shape.block_m))
    return Launch(shared_query_gradient_kernel, grid, arguments, constants, shape)


def shared_query_chunks(problem: Problem, block: int) -> int:
    programs = problem.heads * max(triton.cdiv(problem.query_rows, block), 1)
    return max(1, min(problem.batch, SHARED_QUERY_PROGRAMS // int(programs)))


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    call = Call(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, None, architecture(q.device))
    out = q.new_empty(problem.output_shape)
    with on_device(q):
        plan_forward(call, out).run()
    return out


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
    call = Call(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, d_out, architecture(q.device))
    needs_dq, needs_dk, needs_dv = needs
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    with on_device(q):
        if needs_dk or needs_dv:
            dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
            plan_key_gradients(call, dk, dv).run()
        if needs_dq and problem.query_side == "shared":
            chunks = shared_query_chunks(problem, call.config("query_gradient").block_m)
            partial = q.new_empty((chunks, *q.shape), dtype=torch.float32)
            plan_shared_query_gradient(call, partial).run()
            dq = partial.sum(0).to(q.dtype)
        elif needs_dq:
            dq = torch.empty_like(q, memory_format=torch.contiguous_format)
            plan_query_gradient(call, dq).run()
    return dq, dk if needs_dk else None, dv if needs_dv else None


def plans(
    activations: tuple[str, ...],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    masked: bool,
    group: int,
    arch: int,
    form: str = "packed",
    kv_heads: int = 4,
) -> list[Launch]:
    """The launches of a forward and a backward on tensors without data, to compile: form packed, dense, dense-keys or shared-queries."""
    q, k, v, cu_q, cu_k = example(form, 4, 256, kv_heads * group, kv_heads, head_dim, value_dim, dtype)
    window = (-1, 0) if masked else (-1, -1)
    problem = describe(q, k, v, cu_q, cu_k, None, None, activations, None, 1.0, window, False)
    out = q.new_empty(problem.output_shape)
    call = Call(problem, q, k, v, cu_q, cu_k, None, torch.empty_like(out), arch)
    if problem.query_side == "shared":
        query_gradient = plan_shared_query_gradient(call, q.new_empty((2, *q.shape), dtype=torch.float32))
    else:
        query_gradient = plan_query_gradient(call, torch.empty_like(q))
    return [plan_forward(call, out), plan_key_gradients(call, torch.empty_like(k), torch.empty_like(v)), query_gradient]


def precompile(
    activations: tuple[str, ...],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    masked: bool = False,
    group: int = 1,
    arch: int | None = None,
    kv_heads: int = 4,
) -> list[str]:
    """Build the kernels of a forward and a backward into Triton's cache, in every form; a line for each kernel built.

    `arch` is a compute capability such as 90; None takes this machine's GPU. `activations` are keys, one or one per head.
    """
    if arch is None:
        arch = architecture(torch.device("cuda", torch.cuda.current_device()))
    lines = []
    with target_architecture(arch):
        shapes = [
            config(name, arch, dtype.itemsize, max(head_dim, value_dim)) for name in ("forward", "key_gradient", "query_gradient")
        ]
        for block in sorted({128, shapes[0].block_m, shapes[1].block_n, shapes[2].block_m}):
            built = list(schedule_kernels.compiled(block))
            lines.append(f"sm_{arch} tile lists of {block} rows, {len(built)} kernels")
        for form in ("packed", "dense", "dense-keys", "shared-queries"):
            for launch in plans(activations, head_dim, value_dim, dtype, masked, group, arch, form, kv_heads):
                kernel = launch.compile()
                shape = launch.config
                lines.append(
                    f"sm_{arch} {form:14} {launch.kernel.__name__:28} {shape.block_m}x{shape.block_n}, {shape.warps} warps, "
                    f"{kernel.metadata.shared // 1024} KB shared"
                )
    return lines

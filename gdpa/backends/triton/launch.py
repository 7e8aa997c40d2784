"""From a Problem and its tensors to kernel launches.

The `plan_*` functions lay launches out; run.py runs them; `precompile` builds the same kernels ahead of time, for another machine's
architecture if asked, under the keys that a later launch looks up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa import launching, schedule, schedule_kernels
from gdpa.activations import Activation
from gdpa.backends.gpu import (
    architecture,
    example,
    mappable,
    precision_of,
    ragged_geometry,
    target_architecture,
)
from gdpa.backends.triton.backend import interpreted
from gdpa.backends.triton.backward import key_gradient_kernel, query_gradient_kernel, shared_query_gradient_kernel
from gdpa.backends.triton.configs import INTERPRETED, Config, config
from gdpa.backends.triton.forward import forward_kernel
from gdpa.launching import Grid
from gdpa.problem import Problem, describe
from gdpa.tracing import device_functions

# dQ of shared queries is summed in about this many programs; fixed, so that results do not depend on the device.
SHARED_QUERY_PROGRAMS = 1024

# A window wider than any tensor; more would overflow 32 bits where a row is added.
WIDEST_WINDOW = 2**30


@dataclass(frozen=True)
class Launch:
    """One kernel launch but for its pointers to the schedule and the scales, which differ between batches of the same shapes.

    The kernel's parameters are, in order, `sources`, read through descriptors of `blocks` rows or, where there are none, by threads;
    `outputs`; the pointers that `run` is given; `numbers`; and `constants`, by name. `owner` says whose tiles the kernel is given, in
    `schedule.lists`' words; one that takes "neither" has no bounds of the queries either.
    """

    kernel: Any
    grid: Grid
    sources: tuple[Tensor, ...]
    blocks: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    owner: str
    block: int
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    config: Config

    def options(self) -> dict[str, Any]:
        shape = self.config
        options = {"num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": True}
        return options if shape.registers is None else {**options, "maxnreg": shape.registers}

    def run(self, pointers: tuple[Tensor, ...]) -> None:
        """By its recipe, or by Triton, which may have to compile, where there is none."""
        if 0 in self.grid:
            return
        device = self.sources[0].device
        recipe = self.recipe()
        if recipe is not None:
            described, plain = (self.sources, ()) if self.blocks else ((), self.sources)
            arguments = (*plain, *self.outputs, *pointers, *self.numbers)
            launching.start(recipe, self.grid, torch._C._cuda_getCurrentRawStream(device.index), described, arguments)
            return
        kernel = self.kernel[self.grid](*self._arguments(pointers), **self.constants, **self.options())
        if launching.is_known(device):
            constants = tuple([self.constants[name] for name in self.kernel.arg_names[-len(self.constants) :]])
            geometries = tuple([ragged_geometry(x) for x in self.sources]) if self.blocks else ()
            launching.remember(self._kind(), launching.Recipe(kernel, constants, geometries))

    def recipe(self) -> launching.Recipe | None:
        return launching.known(self._kind()) if launching.is_known(self.sources[0].device) else None

    def compile(self) -> Any:
        """Build without running; returns Triton's compiled kernel."""
        unread = pointers(self.owner, (None, None, None), None, self.sources[0])
        return self.kernel.warmup(*self._arguments(unread), grid=(1,), **self.constants, **self.options())

    def _arguments(self, pointers: tuple[Tensor, ...]) -> tuple[Any, ...]:
        sources: tuple[Any, ...] = self.sources
        if self.blocks:
            sources = tuple([ragged_descriptor(x, block) for x, block in zip(self.sources, self.blocks, strict=True)])
        return (*sources, *self.outputs, *pointers, *self.numbers)

    def _kind(self) -> tuple[Any, ...]:
        """What the launches that one recipe serves have in common: all that is compiled in, and how the descriptors lie.

        Outputs and pointers are whole tensors of types that follow from the sources', at addresses that are multiples of 16.
        """
        x = self.sources[0]
        sources: tuple[Any, ...]
        if self.blocks:
            sources = tuple([tuple(numbers) for x in self.sources for numbers in ragged_geometry(x)])
        else:
            sources = launching.kinds(self.kernel, self.sources)
        numbers = launching.kinds(self.kernel, self.numbers, len(self.kernel.params) - len(self.constants) - len(self.numbers))
        return (self.kernel, x.device, x.dtype, self.blocks, sources, numbers, *self.constants.values(), *self.options().values())


class Call:
    """One call's tensors as the kernels want them, and what follows from how they lie. They must be `aligned`."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scaled: bool, d_out: Tensor | None, arch: int) -> None:
        self.problem = problem
        self.arch = arch
        self.q, self.k, self.v = q, k, v
        self.d_out = q if d_out is None else d_out
        self.q_packed, self.k_packed = problem.query_side == "packed", problem.key_side == "packed"
        self.scaled = scaled
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

    def tile_count(self, queries: bool, block: int) -> int:
        """How many programs cover the tiles of the queries (or keys)."""
        problem = self.problem
        packed, rows = (self.q_packed, problem.query_rows) if queries else (self.k_packed, problem.key_rows)
        return schedule.tile_bound(packed, problem.batch, rows, block)

    def sources(self, shape: Config, with_d_out: bool) -> dict[str, tuple[Any, ...]]:
        """q, k, v (and d_out) as the kernels' first parameters, and the rows of their descriptors."""
        last = ((self.d_out,), (shape.block_m,)) if with_d_out else ((), ())
        blocks = (shape.block_m, shape.block_n, shape.block_n, *last[1])
        return {"sources": (self.q, self.k, self.v, *last[0]), "blocks": blocks if self.mapped else ()}

    def numbers(self, heads: int, blocks: int) -> tuple[int | float, ...]:
        """The kernels' parameters after the strides; `blocks` is how many tiles a dense sequence has."""
        problem = self.problem
        sizes = (problem.batch, heads, problem.query_rows, problem.key_rows, blocks)
        return (*sizes, problem.scale, problem.out_scale, *_window(problem))

    def constants(self, shape: Config) -> dict[str, Any]:
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
            "HAS_LIST": self.q_packed or self.k_packed,
            "Q_PACKED": self.q_packed,
            "K_PACKED": self.k_packed,
            "SCALE_PER_SEQUENCE": self.scaled,
            "WINDOW": problem.masked,
            "TAIL_SAFE": tail_safe,
            "MAPPED": self.mapped,
            "SETTLE": (2 if overlap else 1) if 90 <= self.arch < 100 else 0,
            "UPCAST": interpreted() and problem.dtype.itemsize == 2,
        }

    def pair(self, shared: bool = False) -> dict[str, Any]:
        """How a backward kernel computes P and dS (`backward.score_gradients`). dS has a weight in float16 and where it is summed over
        sequences, of `shared` queries. Sums over the query heads of a key head share their factors, so activations that differ between
        heads leave none out."""
        functions = self.activation()
        if len(self.problem.activations) > 1:
            return {"activate_pair": functions.pair, "pair_factors": functions.pair_factors, "SLOPE": "plain"}
        if shared or self.problem.dtype == torch.float16:
            return {"activate_pair": functions.weighted_pair, "pair_factors": functions.weighted_factor, "SLOPE": "weighted"}
        slope = "lifted" if functions.lifted else "folded"
        return {"activate_pair": functions.scaled_pair, "pair_factors": functions.pair_factors, "SLOPE": slope}

    def activation(self) -> Any:
        """The device functions: on NVIDIA in approximate instructions that err less than the rounding of P and dS."""
        return device_functions(
            self.problem.activations, precision=precision_of(self.problem.dtype, self.arch) if self.arch >= 80 else "float32"
        )


def _width(size: int) -> int:
    """The power of two a head dimension is padded to; tl.dot takes at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _strides(x: Tensor) -> tuple[int, int, int]:
    """(sequence / 8, row, head); packed and shared tensors do not move with the sequence."""
    return (x.stride(0) // 8 if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


def ragged_descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """Loads `block` rows of a sequence at a time and stops at its end."""
    return TensorDescriptor(x, *ragged_geometry(x), [1, 1, block, x.shape[-1]])


def _window(problem: Problem) -> tuple[int, int]:
    left, right = problem.window
    return min(left, WIDEST_WINDOW), min(right, WIDEST_WINDOW)


def pointers(owner: str, lists: schedule.Lists, scales: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    """The schedule's lists and the scales; a pointer that is not read still needs a tensor of a fixed type."""
    nothing = like.new_empty(0, dtype=torch.int32)
    given = tuple([nothing if x is None else x for x in (lists[2:] if owner == "neither" else lists)])
    return (*given, like.new_empty(0, dtype=torch.float32) if scales is None else scales)


def plan_forward(call: Call, out: Tensor) -> Launch:
    problem, shape = call.problem, call.config("forward")
    numbers = (
        *_strides(call.q),
        *_strides(call.k),
        *_strides(call.v),
        *_strides(out),
        *call.numbers(problem.heads, -(-problem.query_rows // shape.block_m)),
    )
    return Launch(
        forward_kernel,
        (call.tile_count(True, shape.block_m) * problem.heads, 1, 1),
        **call.sources(shape, with_d_out=False),
        outputs=(out,),
        owner="queries",
        block=shape.block_m,
        numbers=numbers,
        constants={"activate": call.activation().value, **call.constants(shape)},
        config=shape,
    )


def plan_key_gradients(call: Call, dk: Tensor, dv: Tensor) -> Launch:
    problem, shape = call.problem, call.config("key_gradient")
    numbers = (
        *_strides(call.q),
        *_strides(call.k),
        *_strides(call.v),
        *_strides(call.d_out),
        *_strides(dk),
        *_strides(dv),
        *call.numbers(problem.kv_heads, -(-problem.key_rows // shape.block_n)),
    )
    return Launch(
        key_gradient_kernel,
        (call.tile_count(False, shape.block_n) * problem.kv_heads, 1, 1),
        **call.sources(shape, with_d_out=True),
        outputs=(dk, dv),
        owner="keys",
        block=shape.block_n,
        numbers=numbers,
        constants={**call.pair(), **call.constants(shape)},
        config=shape,
    )


def plan_query_gradient(call: Call, dq: Tensor) -> Launch:
    problem, shape = call.problem, call.config("query_gradient")
    numbers = (
        *_strides(call.q),
        *_strides(call.k),
        *_strides(call.v),
        *_strides(call.d_out),
        *_strides(dq),
        *call.numbers(problem.heads, -(-problem.query_rows // shape.block_m)),
    )
    return Launch(
        query_gradient_kernel,
        (call.tile_count(True, shape.block_m) * problem.heads, 1, 1),
        **call.sources(shape, with_d_out=True),
        outputs=(dq,),
        owner="queries",
        block=shape.block_m,
        numbers=numbers,
        constants={**call.pair(), **call.constants(shape)},
        config=shape,
    )


def plan_shared_query_gradient(call: Call, partial: Tensor) -> Launch:
    """`partial` is fp32 (chunks, Sq, H, D); its sum over the chunks is dQ."""
    problem, shape = call.problem, call.config("query_gradient")
    chunks = partial.shape[0]
    numbers = (
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
    constants = {**call.pair(shared=True), **call.constants(shape)}
    for absent in ("HAS_LIST", "Q_PACKED"):
        del constants[absent]
    return Launch(
        shared_query_gradient_kernel,
        (chunks, problem.heads, -(-problem.query_rows // shape.block_m)),
        **call.sources(shape, with_d_out=True),
        outputs=(partial,),
        owner="neither",
        block=shape.block_m,
        numbers=numbers,
        constants=constants,
        config=shape,
    )


def shared_query_chunks(problem: Problem, block: int) -> int:
    programs = problem.heads * max(-(-problem.query_rows // block), 1)
    return max(1, min(problem.batch, SHARED_QUERY_PROGRAMS // programs))


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
    call = Call(problem, q, k, v, False, torch.empty_like(out), arch)
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

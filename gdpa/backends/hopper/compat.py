"""Gluon by one set of names. They move between Triton releases, and this is the only file that knows which one is installed.

3.6                                3.9
tma.async_copy_global_to_shared    tma.async_load
tma.async_copy_shared_to_global    tma.async_store
gl.thread_barrier                  gl.barrier
(only in the builder)              tma.async_atomic_add
memory._reinterpret                memory.reinterpret
triton.language.core._aggregate    gluon.aggregate
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

if not hasattr(gluon, "aggregate"):
    from triton.language.core import _aggregate as aggregate
else:
    aggregate = gluon.aggregate

load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
store_wait = tma.store_wait

if hasattr(tma, "async_atomic_add"):
    add_async = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def add_async(tensor_desc, coord, src, _semantic=None):
        """Add a tile in shared memory to global memory, by the copy engine."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory as another type, shape and layout."""
    plain = [getattr(x, "value", x) for x in (dtype, layout)]
    return _semantic.memdesc_reinterpret(memory, plain[0], [getattr(x, "value", x) for x in shape], plain[1])


_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Whether the assembler takes a branch between two products (pipeline.divide). From 3.7 on it waits after each product then.
DIVIDES: gl.constexpr = gl.constexpr(_VERSION < (3, 7))
# Whether the backward's long steps (plan_backward.LONG_STEP) find room in registers. With 3.9 they spill 350 to 650 times; not timed.
LONG_STEPS = _VERSION < (3, 7)
# Every thread of the warps that run the calling partition.
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = [
    "DIVIDES",
    "LONG_STEPS",
    "add_async",
    "aggregate",
    "load_async",
    "partition_barrier",
    "reinterpret",
    "store_async",
    "store_wait",
]

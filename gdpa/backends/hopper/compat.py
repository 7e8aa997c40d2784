"""Gluon by one set of names. They move between Triton releases, and this is the only file that knows which one is installed.

3.6                                3.9
tma.async_copy_global_to_shared    tma.async_load
tma.async_copy_shared_to_global    tma.async_store
gl.thread_barrier                  gl.barrier
triton.language.core._aggregate    gluon.aggregate
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

if not hasattr(gluon, "aggregate"):
    from triton.language.core import _aggregate as aggregate
else:
    aggregate = gluon.aggregate

load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
store_wait = tma.store_wait
# Every thread of the warps that run the calling partition.
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = ["aggregate", "load_async", "partition_barrier", "store_async", "store_wait"]

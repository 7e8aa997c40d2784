"""How the warps of a program wait for each other.

Data on its way into shared memory is announced by mbarriers: the copy engine counts bytes and needs one. Everything else is a named
barrier (`bar.arrive` / `bar.sync`), sixteen of which every program has: a warp arrives without waiting for its three neighbours, whereas
Gluon's mbarrier.arrive joins the warpgroup first. Four such joins an iteration took a sixth of a warpgroup's time (370 of 2,250 cycles).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdpa.backends.hopper.compat import aggregate

# A ragged descriptor's third dimension is 2^30 rows long, and a sequence's end is laid on its end (see gpu.ragged_geometry).
RAGGED: gl.constexpr = gl.constexpr(0x40000000)


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Count this thread in and go on. THREADS is the number of arrivals and waits that open the barrier."""
    gl.inline_asm_elementwise("bar.arrive $1, $2; // $0", "=r,r,n", [barrier, THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def join(barrier, THREADS: gl.constexpr):
    """Count this thread in and wait until the barrier opens."""
    gl.inline_asm_elementwise("bar.sync $1, $2; // $0", "=r,r,n", [barrier, THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _join_after(registers, barrier, threads):
    """The instructions of `join_after`. A grid has one row of programs, which the assembler does not know, so `nothing` is 0."""
    gathered = "".join(f"or.b32 gathered, gathered, ${i}; " for i in range(1, registers))
    return (
        "{ .reg .b32 gathered, nothing; mov.b32 gathered, $0; "
        + gathered
        + "mov.u32 nothing, %nctaid.y; sub.u32 nothing, nothing, 1; and.b32 gathered, gathered, nothing; "
        + f"add.u32 gathered, gathered, {barrier}; bar.sync gathered, {threads}; }}"
    )


@gluon.constexpr_function
def _in_place(halves, floats):
    return ",".join(["=r"] * halves + ["=f"] * floats + [str(i) for i in range(halves + floats)])


@gluon.jit
def join_after(x, y, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """`join` once all of a 16-bit x and an fp32 y is there; returns both. The assembler else moves what they are computed from behind the
    barrier, so that a warpgroup has its turn with the tensor cores while it computes, and the other one waits for it."""
    gl.static_assert(x.dtype.primitive_bitwidth == 16 and y.dtype == gl.float32)
    ELEMENTS: gl.constexpr = x.numel // (32 * gl.num_warps())  # of a thread
    TEXT: gl.constexpr = _join_after(ELEMENTS // 2 + ELEMENTS, BARRIER, THREADS)
    PLACES: gl.constexpr = _in_place(ELEMENTS // 2, ELEMENTS)
    return gl.inline_asm_elementwise(TEXT, PLACES, [x, y], dtype=(x.dtype, gl.float32), is_pure=False, pack=ELEMENTS)


@gluon.jit
def pinned(x):
    """fp32 x, computed before what comes next in the program. Left alone, the compiler moves it down to its first use, past the point
    where most registers are live (140 spills), and waits for the product that it should overlap."""
    gl.static_assert(x.dtype == gl.float32)
    return gl.inline_asm_elementwise("// pinned", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def divide(x, NEVER: gl.constexpr):
    """The assembler moves nothing across: a branch that is never taken (x is not NEVER) ends the block. It otherwise puts three quarters
    of an activation behind the wait that it should precede, pinned or not. NEVER differs from place to place, lest two become one."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, $2; @p trap; mov.b32 $0, $1; }",
        "=r,r,n",
        [x, NEVER],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stores_done():
    """Wait until what the calling warp's copies wrote is there for the whole device. Their own wait, by the thread that sent them, is not
    enough: without the fence a counter that is raised afterwards is seen before what they wrote. The fence comes after the warp has
    met, so that it orders the copies for every thread, whichever raises the counter. It is slow: one warp with it in every step had
    0.61 of the floor at 512 keys, and 0.70, with wrong sums, without it."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; mov.b32 $0, $1;",
        "=r,r",
        [0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count_up(counter):
    """Add one to a counter in global memory, by one thread of the calling warp, after its stores_done."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.relaxed.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
        }
        """,
        "=r,l",
        [counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take_ticket(counter):
    """Add one to a counter in global memory, by one thread of the calling warp; its value before, which all threads get."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred first;
        .reg .b32 lane, ticket;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first atom.relaxed.gpu.global.add.u32 ticket, [$1], 1;
        shfl.sync.idx.b32 $0, ticket, 0, 31, 0xffffffff;
        }
        """,
        "=r,l",
        [counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def look_at(counter):
    """The value of a counter in global memory."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_count(counter, count):
    """Wait until a counter in global memory has come to `count`."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred short;
        .reg .b32 seen;
        again:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.s32 short, seen, $2;
        @short bra again;
        mov.b32 $0, seen;
        }
        """,
        "=r,l,r",
        [counter.to(gl.int64), count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def see_what_was_counted():
    """Copies that begin after this see what was written before the counts that the calling warp has seen. They read and add in L2, where
    the counters are as well."""
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """mbarriers that open when the copy engine has delivered what was announced."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@aggregate
class Buffers:
    """Tiles of equal shape in shared memory, each with the mbarrier that announces its arrival."""

    memory: gl.shared_memory_descriptor  # [COUNT, 1, 1, ROWS, WIDTH], as a ragged descriptor delivers them
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, memory, full):
        self.memory = memory
        self.full = full

    @gluon.jit
    def tile(self, index):
        return self.memory.index(index).reshape([self.memory.shape[3], self.memory.shape[4]])

    @gluon.jit
    def wait_full(self, index, phase):
        """Until the copy into a buffer has landed. `phase` flips each time the buffer is filled."""
        mbarrier.wait(self.full.index(index), phase)

    @gluon.jit
    def expect(self, index):
        """Announce a copy of a whole buffer. Rows that the copy engine fills with zeros count as delivered."""
        mbarrier.expect(self.full.index(index), self.memory.shape[3] * self.memory.shape[4] * 2)


@gluon.jit
def new_buffers(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    return Buffers(gl.allocate_shared_memory(dtype, [COUNT, 1, 1, ROWS, WIDTH], layout), new_barriers(COUNT))


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next of two or four stages, and the phase of its barrier."""
    if STAGES == 2:
        return stage ^ 1, phase ^ stage
    else:
        return (stage + 1) & 3, phase ^ (stage & (stage >> 1))

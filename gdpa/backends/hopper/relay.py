"""How dQ leaves the backward kernel.

dQ of a step sums over the tiles of its sequence, which different programs hold at about the same time. They pass it on, the relay:

    FIRST    stores its part in an fp32 copy of dQ
    ADD      the copy engine adds to it
    LAST     the copy comes back, is added, and the sum stored in dQ
    ALONE    the tile holds all keys of its sequence: stored in dQ

so that nothing is zeroed before or rounded after. Where at most `few` tiles add up, each rounds its part, the first stores it in dQ itself
and the copy engine adds the others there: half the bytes, and nothing comes back (docs/numerics.md has the error of it).

A counter for each step of a query head says how many tiles have been there: ADD waits for one, or, where results must be the same every
time, for all before it; LAST waits for all others. Tiles begin at different steps and go around: tile t of T at step t * steps / T, so
each finds that the one before it was there a while ago. A tile then waits for tiles behind it in the list as well, whose programs must be
running: the launch is cooperative, and no program has two tiles of such a sequence and head, whose numbers lie within as many as there are
programs (`rotating`). Longer sequences do not turn: all their tiles begin at step 0 and wait for those before them in the list.

Dense sequences of two tiles and few queries are PAIRED: one program takes both tiles, one after the other, and waits for itself alone.

CAUSAL tiles of a sequence differ in length, and their programs are not in step. More than `few` of them add to zeros in the copy and wait
for nobody, unless results must be the same every time (find_causal); what the copy holds is rounded by a kernel of its own (partial.py).
Of `few`, the one that comes first to a step stores, whichever it is: it has the first ticket. Programs take tickets in the order of their
steps, and one that waits for a first part waits for a ticket taken before its own, whose program is at work on it or waits for an earlier
one in turn: no two wait for each other, and one program may have several tiles of a sequence (tiles.find_tile).

Shared queries have one dQ for all sequences. There each program adds to a sum of its own.

The fp32 copy has its columns in another order (`place`), which lets warps write it to shared memory without bank conflicts:
columns 8a + 2b + c, c = 0, 1, which one thread holds, lie at 8a + 4c + b.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gdpa.backends.hopper.compat import add_async, load_async, partition_barrier, reinterpret, store_async, store_wait
from gdpa.backends.hopper.pipeline import (
    RAGGED,
    arrive,
    await_count,
    count_up,
    join,
    look_at,
    see_what_was_counted,
    stores_done,
    take_ticket,
)
from gdpa.backends.hopper.tiles import (
    DV_FACTOR,
    KEYS,
    PART,
    TILE,
    block_count,
    find_tile,
    lay_out,
    read_float,
    split,
    tile_count,
    turned,
)

# The way of dQ.
NONE: gl.constexpr = gl.constexpr(0)  # nobody asked for it
STORE: gl.constexpr = gl.constexpr(1)  # every tile is ALONE
RELAY: gl.constexpr = gl.constexpr(2)
SHARED: gl.constexpr = gl.constexpr(3)  # added to the program's own sum, or, of CAUSAL sequences, to zeros in an fp32 copy

# The way of dV, or NONE. Its consumer sends it off through the memory of V, and the next tile's values wait for that; or the key producer
# does, through the staging memory of dQ, and the tile's last dQ waits.
THROUGH_V: gl.constexpr = gl.constexpr(1)
THROUGH_DQ: gl.constexpr = gl.constexpr(2)

# The named barrier of a consumer that has handed dQ over, and the threads that open it: the consumer's and a single warp's.
DQ_FULL: gl.constexpr = gl.constexpr(12)
PAIR: gl.constexpr = gl.constexpr(160)


@gluon.jit
def find_relay(row, q_length, count, steps, rotating, APART: gl.constexpr, DQ: gl.constexpr):
    """(the tile's first step, until when it is FIRST, from when on it is LAST), counted in steps since its first one.
    Two neighbouring tiles of a head are APART numbers apart."""
    if DQ != RELAY:
        return steps * 0, steps, steps * 0
    number = row // TILE
    rotates = count * APART <= rotating
    # Without queries there is nothing to pass on, and a step of nothing to store: ALONE.
    count = gl.where(q_length > 0, count, 1)
    number = gl.where(q_length > 0, number, 0)
    turning = gl.where(rotates, number, 0)
    tiles = gl.where(rotates, count, 1)
    start = first_step(turning, tiles, steps)
    first_until = gl.where(turning == tiles - 1, steps, first_step(turning + 1, tiles, steps)) - start
    before = gl.where(turning == 0, first_step(tiles - 1, tiles, steps) - steps, first_step(turning - 1, tiles, steps))
    last_from = steps - (start - before)
    if not rotates:
        first_until = gl.where(number == 0, steps, 0)
        last_from = gl.where(number == count - 1, 0, steps)
    return start, first_until, last_from


# What becomes of a step's dQ where CAUSAL. A tile's first 128 queries, which see a part of its keys, have a code of their own, which
# lies below that of its others.
ROUNDED: gl.constexpr = gl.constexpr(1)  # rounded by this tile: no other comes after it, or parts are rounded before they are added
COMES_BACK: gl.constexpr = gl.constexpr(2)  # with what the others have added up
CODE_BITS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def find_causal(row, q_length, count, rotating, few, APART: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr):
    """(the tile's first step, its code) where queries see the keys up to their own, and are as many: tiles begin at their own first query.

    Tile t begins at its own queries, so the last tile that a step has comes to it first and the first one last, as where sequences turn;
    sequences that do not turn go the other way around. They differ in length, though, and programs that wait for each other lose more than
    zeros before and a rounding after cost: only ORDERED do more than `few` tiles pass dQ on, else they add to zeros in the fp32 copy.

    Keys that belong to no sequence may fill several tiles without a query: each is like the first tile of a sequence that has no other."""
    number = gl.where(q_length > 0, row // TILE, 0)
    count = gl.where(q_length > 0, count, 1)
    rotates = count * APART <= rotating
    both = ROUNDED + COMES_BACK
    # The first tile is alone at its first 128 queries. Turning, it ends all others; else each tile ends its own, and the last tile all.
    early = gl.where(number == 0, ROUNDED, gl.where(rotates, 0, both))
    late = gl.where(rotates, gl.where(number == 0, both, 0), gl.where(number == count - 1, both, 0))
    if not ORDERED:
        early = number * 0
        late = number * 0
    early = gl.where(count <= few, ROUNDED, early)
    late = gl.where(count <= few, ROUNDED, late)
    return number * (TILE // ROWS), early + late * (1 << CODE_BITS)


@gluon.jit
def fate(code, done, CAUSAL: gl.constexpr, ROWS: gl.constexpr):
    """(whether a tile rounds dQ of its step `done` - 1, a number that is negative where nothing comes back), of what LAST_FROM says."""
    if CAUSAL:
        part = gl.where(done <= TILE // ROWS, code, code >> CODE_BITS)
        return (part & ROUNDED) != 0, (part & COMES_BACK) - 1
    else:
        return done > code, code


@gluon.jit
def causal_rank(row, count, here, rotating, APART: gl.constexpr, ROWS: gl.constexpr):
    """(how many tiles are at a step of the sequence before this one, how many there are)."""
    number = row // TILE
    newest = gl.minimum(here // (TILE // ROWS), count - 1)
    return gl.where(count * APART <= rotating, newest - number, number), newest + 1


@gluon.jit
def first_step(number, count, steps):
    """number * steps // count, without the large product."""
    return number * (steps // count) + number * (steps % count) // count


@gluon.jit
def find_rank(row, count, here, steps, rotating, APART: gl.constexpr):
    """How many tiles are at a step of the sequence before this one."""
    number = row // TILE
    first = (((here + 1).to(gl.int64) * count - 1) // steps).to(gl.int32)  # the tile that begins there, or did so last
    rank = gl.where(first >= number, first - number, first - number + count)
    return gl.where(count * APART <= rotating, rank, number)


@gluon.jit
def rounded_view(memory, desc):
    """The staging memory as rounded values lie in it: a consumer's columns of dQ, or its keys' rows of dV."""
    layout: gl.constexpr = desc.layout
    shape: gl.constexpr = desc.block_type.shape
    return reinterpret(memory, desc.dtype, shape, layout)


@gluon.jit
def handed(stage, slot, DQ: gl.constexpr, DV: gl.constexpr):
    """How often a consumer has handed something over, modulo 2: dQ for every step, dV for every tile."""
    if DQ == NONE:
        return slot
    return stage ^ slot if DV == THROUGH_DQ else stage


@gluon.jit
def hand_over_dv(dv, note, dv_desc, partial, hidden, dq_empty, phase, WHICH: gl.constexpr):
    """Lay dV of this consumer's keys out for the key producer to send, in the staging memory of dQ. In the memory of V, as dK in that of
    K, it would keep the next tile's values waiting, which are needed in its first step: 16 % of the time at 256 keys."""
    mbarrier.wait(dq_empty.index(WHICH), phase)
    rounded = rounded_view(partial.memory.index(WHICH + hidden), dv_desc)
    lay_out(dv, read_float(note, DV_FACTOR), note, rounded.reshape([rounded.shape[2], rounded.shape[3]]))
    fence_async_shared()
    arrive(DQ_FULL + WHICH, PAIR)


@gluon.jit
def place(dq, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns in the order of the fp32 copy: neighbouring threads hold neighbouring values, as the matrix store of a warp wants them."""
    return dq.reshape([ROWS, COLUMNS // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([ROWS, COLUMNS])


@gluon.jit
def unplace(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The columns of the fp32 copy in dQ's order."""
    return x.reshape([ROWS, COLUMNS // 8, 2, 4]).permute((0, 1, 3, 2)).reshape([ROWS, COLUMNS])


@gluon.jit
def hand_over(
    dq, factor, dq_desc, partial, hidden, dq_empty, phase, is_last, last_from, returned, DQ: gl.constexpr, WHICH: gl.constexpr
):
    """Lay this consumer's part of dQ out for the reducer. Returns how many tiles of the fp32 copy have come back, modulo 2.

    `hidden` is 0, which the compiler does not know. The branches on it keep it from moving what dQ becomes to where dP is issued: without
    them, registers of both were spilled (up to 149 instructions a step).
    """
    mbarrier.wait(dq_empty.index(WHICH), phase)
    memory = partial.memory.index(WHICH + hidden)
    COLUMNS: gl.constexpr = memory.shape[3]
    tile = memory.reshape([PART, COLUMNS])
    rounded = rounded_view(memory, dq_desc).reshape([PART, COLUMNS])
    if factor is not None:
        dq = dq * factor
    if DQ == SHARED:
        if hidden == 0:
            tile.store(place(dq, PART, COLUMNS))
    elif DQ == STORE:
        if hidden == 0:
            rounded.store(dq.to(dq_desc.dtype))
    else:
        if is_last:
            if last_from >= 0:  # LAST
                partial.wait_full(WHICH, returned)
                returned ^= 1
                placed = place(dq, PART, COLUMNS)
                came = tile.load(placed.type.layout)
                dq = gl.convert_layout(unplace(placed + came, PART, COLUMNS), dq.type.layout, assert_trivial=True)
                partition_barrier()  # before others' values are written where these lay
            rounded.store(dq.to(dq_desc.dtype))
        else:
            tile.store(place(dq, PART, COLUMNS))
    fence_async_shared()
    arrive(DQ_FULL + WHICH, PAIR)
    return returned


@gluon.jit
def send_dv(
    dv_desc, partial, dq_empty, dq_left, dv_left, steps, where, STRIDE_DV: gl.constexpr, DQ: gl.constexpr, WHICH: gl.constexpr
):
    """Send off what `hand_over_dv` lays out at the end of a tile that ends after `steps` of the stream."""
    end, row, head = where
    if DQ != NONE:  # the dQ that was handed over last has left
        mbarrier.wait(dq_left.index(2 * ((steps - 1) & 1) + WHICH), ((steps - 1) >> 1) & 1)
    mbarrier.arrive(dq_empty.index(WHICH), count=1)
    join(DQ_FULL + WHICH, PAIR)
    store_async(dv_desc, [RAGGED, end, row + WHICH * KEYS, head * STRIDE_DV], rounded_view(partial.memory.index(WHICH), dv_desc))
    store_wait(0)
    if DQ != NONE:
        mbarrier.arrive(dv_left.index(WHICH), count=1)


@gluon.jit
def reducer(
    dq_desc, copy_desc, partial, dq_empty, dq_left, dv_left, records_ptr, counters_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, STRIDE_DQ: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    HAS_LIST: gl.constexpr, PAIRED: gl.constexpr, TOGETHER: gl.constexpr, CAUSAL: gl.constexpr, Q_SHARED: gl.constexpr,
    DQ: gl.constexpr, ORDERED: gl.constexpr, DV: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    # A consumer has half of a step's dQ: of its columns or, where a step has more rows than a part, of its rows.
    DOWN: gl.constexpr = PART if ROWS > PART else 0
    ACROSS: gl.constexpr = 0 if ROWS > PART else D // 2
    COLUMNS: gl.constexpr = partial.memory.shape[4]
    BY_TICKET: gl.constexpr = DQ == RELAY and CAUSAL and not ORDERED
    if DQ == NONE:
        tiles = 0
    if WHO == 0 and tile_count(tiles, PAIRED) > 0:  # dQ of the tile that never was, the first in the stream
        for which in gl.static_range(2):
            mbarrier.arrive(dq_empty.index(which), count=1)
            join(DQ_FULL + which, PAIR)
            mbarrier.arrive(dq_left.index(which), count=1)
    index = 1  # of the tile's first dQ in the stream
    for taken in range(tile_count(tiles, PAIRED)):
        head, sequence, _, _, row, q_start, q_length, count = find_tile(
            taken, records_ptr, q_rows, k_rows, k_tiles, rotating, KV_HEADS, HAS_LIST, PAIRED, TOGETHER, CAUSAL, ORDERED
        )
        # Sequences cover as many steps of rows as they have, and one more where one begins.
        first_counter = q_start // ROWS + sequence
        if Q_SHARED:
            q_start = gl.program_id(0) * q_rows
        blocks = block_count(q_length, ROWS)
        all_steps = blocks * GROUP
        steps = all_steps  # of the tile
        if CAUSAL:
            start, _ = find_causal(row, q_length, count, rotating, few, 1 if TOGETHER else KV_HEADS, ORDERED, ROWS)
            steps = all_steps - start
            row = gl.where(q_length > 0, row, 0)  # as in find_causal
            count = gl.where(q_length > 0, count, 1)
        else:
            start, first_until, last_from = find_relay(row, q_length, count, steps, rotating, 1 if TOGETHER else KV_HEADS, DQ)
        for step in range((index + WHO) & 1, steps, 2):
            here = turned(step, start, all_steps)
            in_group, block = split(here, blocks, GROUP)
            q_head = head * GROUP + in_group
            column = q_head * STRIDE_DQ
            q_row = RAGGED - q_length + block * ROWS
            if CAUSAL:
                rank, tiles_here = causal_rank(row, count, here, rotating, 1 if TOGETHER else KV_HEADS, ROWS)
                passed_on = count <= few
                if ORDERED:
                    passed_on = count > 0
                is_first = passed_on & (rank == 0)
                ends = (rank == tiles_here - 1) | (not passed_on)
                is_last = passed_on & ends & (count > few)
                comes_back = is_last & (rank > 0)
            else:
                tiles_here = count
                is_first = step < first_until
                ends = step >= last_from  # no tile comes after this one
                is_last = ends & (count > few)
                comes_back = is_last & (first_until < steps)
            counter = counters_ptr + ((first_counter + block) * (KV_HEADS * GROUP) + q_head) * (2 if BY_TICKET else 1)
            seen = 0
            if DQ == RELAY:
                seen = look_at(counter)
            # The staging memory, one half a consumer, is free when what was handed over before has left it: the other reducer's dQ,
            # and, before the tile's last dQ, its dV. A barrier tells its last two phases apart, no more, so none is waited for before
            # the one ahead of it is over: hence both waits.
            for which in gl.static_range(2):
                mbarrier.wait(dq_left.index(2 * (1 - WHO) + which), ((index + step - 1) >> 1) & 1)
                if DV == THROUGH_DQ and step == steps - 1:
                    mbarrier.wait(dv_left.index(which), taken & 1)
                if DQ != RELAY or not comes_back:
                    mbarrier.arrive(dq_empty.index(which), count=1)
            if BY_TICKET:
                ticket = tiles_here * 0
                if passed_on & (tiles_here > 1):
                    ticket = take_ticket(counter + 1)
                    if seen < gl.minimum(ticket, 1):
                        await_count(counter, 1)
                is_first = passed_on & (ticket == 0)
                ends = (not is_first) | (tiles_here == 1)  # nobody waits for this part
            elif DQ == RELAY:
                needed = 1
                if ORDERED and CAUSAL:
                    needed = rank
                elif ORDERED:
                    needed = find_rank(row, count, here, steps, rotating, 1 if TOGETHER else KV_HEADS)
                needed = gl.where(is_first, 0, gl.where(is_last, tiles_here - 1, needed))
                waits = seen < needed
                if not CAUSAL:
                    waits = waits & (first_until < steps)
                if waits:
                    await_count(counter, needed)
                if comes_back:
                    see_what_was_counted()
                    for which in gl.static_range(2):
                        mbarrier.expect(partial.full.index(which), PART * COLUMNS * 4)
                        load_async(
                            copy_desc,
                            [RAGGED, q_start + q_length, q_row + which * DOWN, column + which * ACROSS],
                            partial.full.index(which),
                            partial.memory.index(which),
                        )
                        mbarrier.arrive(dq_empty.index(which), count=1)
            for which in gl.static_range(2):
                join(DQ_FULL + which, PAIR)
                where = [RAGGED, q_start + q_length, q_row + which * DOWN, column + which * ACROSS]
                memory = partial.memory.index(which)
                if DQ == SHARED:
                    add_async(copy_desc, where, memory)
                elif DQ == STORE:
                    store_async(dq_desc, where, rounded_view(memory, dq_desc))
                else:
                    if is_last | (is_first & (count <= few)):
                        store_async(dq_desc, where, rounded_view(memory, dq_desc))
                    elif is_first:
                        store_async(copy_desc, where, memory)
                    else:
                        see_what_was_counted()
                        if count <= few:
                            add_async(dq_desc, where, rounded_view(memory, dq_desc))
                        else:
                            add_async(copy_desc, where, memory)
                if DQ == SHARED and ORDERED:
                    stores_done()  # one addition after the other
                store_wait(0)
                mbarrier.arrive(dq_left.index(2 * WHO + which), count=1)
            if DQ == RELAY and not ends:
                stores_done()
                count_up(counter)
        index += steps

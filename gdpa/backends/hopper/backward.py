"""The backward kernel for Hopper.

    S = scale * Q K^T      P = f(S)      dP = dO V^T      dS = dP * f'(S)
    dV = out_scale * P^T dO      dK = out_scale * scale * dS^T Q      dQ = out_scale * scale * dS K

One persistent program a multiprocessor walks over tiles: 128 keys of one (sequence, key head), with the queries of every head of the
group, 64 a step. Nothing but q, k, v and dO is read, and each score is computed once: five products a step. The partitions:

    producer     one warp: copies the keys and values of a tile, and the queries and dO of each step, into shared memory
    consumer 0   a warpgroup that owns keys 0 to 63: their scores, transposed, and their dK and dV, in registers over the whole tile
    consumer 1   the same for keys 64 to 127
    reducer      one warp: sends each step's dQ off

dQ sums over all keys, so the consumers exchange dS through shared memory, and each multiplies it into one half of dQ's columns.

A consumer's steps form one stream that does not stop where a tile ends. In step i it

    issues S(i)^T = K Q(i)^T and dK += dS(i - 1)^T Q(i - 1)
    activates S(i): P, f'(S)
    issues its half of dQ(i - 1) = dS(i - 1) K, and dV += P^T dO(i)
    hands dQ(i - 1) over to the reducer
    issues dP(i)^T = V dO(i)^T
    makes dS(i) and lays it out for the other consumer

where dK(i - 1) and dQ(i - 1) are the tile's before when step i opens one. No product is in flight where the loop closes: there the
compiler would wait after each one. Registers bound the order: dK and dV take 128 of a thread's 240, S, dP and dQ 32 each, f'(S) 32, P
and dS 16. The consumers take turns, each with its first two products, then each with its other three: while one activates or makes dS,
the other multiplies. That dQ lags a step is what lets them: it waits for both.

When step i opens a tile, dV of the tile before is on its way out through the memory of V, whose next tile is not needed before dP(i);
dK leaves when both consumers are done with dQ(i - 1), through the memory of K, which has two slots. The first step of a program
completes a tile that never was: its rows lie past the end of everything, so that nothing is written.

What becomes of dQ is decided for each tile. Programs take items from the list: ITEM keys of a sequence, tile after tile.

    ADD      added to an fp32 copy of dQ, which began as zeros: other programs add to it as well
    STORE    stored in dQ: the tile holds all keys of its sequence
    FIRST    stored in the fp32 copy: the first tile of an item that holds all keys of its sequence; those between ADD
    LAST     the fp32 copy comes back, is added and the sum stored in dQ

The fp32 copy has its columns in another order (`place`), which lets warps write it to shared memory without bank conflicts:
columns 8a + 2b + c, c = 0, 1, which one thread holds, lie at 8a + 4c + b.

    barrier                  opened by                                        for
    queries.full, d_out.full the copy engine                                  both consumers
    keys.full                the copy engine                                  both consumers
    values.full + consumer   the copy engine                                  the consumer
    partial.full + consumer  the copy engine                                  the consumer, to add to what came back (LAST)
    EMPTY + stage            both consumers, dK(i - 1) done                   the producer, to load step i + 1
    DS + 2 * (i % 2) + c     consumer c, dS(i) in shared memory               the other one, for dQ(i)
    DQ_FULL + consumer       the consumer                                     the reducer
    dq_empty + consumer      the reducer, the copy has left                   the consumer, to hand the next one over
    values_free + consumer   the consumer, dV has left                        the producer, to load the next tile's values
    keys_free                both consumers, dK has left                      the producer, to load the keys of the tile after the next
    met                      both consumers, dQ of the tile before done       both, to write dK where its keys were
    TURN + consumer          the other consumer, its products issued          the consumer, to issue its own

Rows past a sequence's end are zeros in shared memory and are not written back (gpu.ragged_geometry): zero rows of dO and K make
masks needless where f(0) and f'(0) are finite; MASK_TAIL compiles one in for the others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from gdpa.backends.hopper.compat import add_async, load_async, partition_barrier, reinterpret, store_async, store_wait
from gdpa.backends.hopper.pipeline import RAGGED, arrive, join, new_barriers, new_buffers, pinned, stores_done

KEYS: gl.constexpr = gl.constexpr(64)  # of a consumer
TILE: gl.constexpr = gl.constexpr(128)  # keys of a tile
ROWS: gl.constexpr = gl.constexpr(64)  # queries of a step
RECORD: gl.constexpr = gl.constexpr(8)  # numbers of an item's record (schedule.records)

# Named barriers. Triton takes the lowest ones for its own partitions.
EMPTY: gl.constexpr = gl.constexpr(6)
DS: gl.constexpr = gl.constexpr(8)
DQ_FULL: gl.constexpr = gl.constexpr(12)
TURN: gl.constexpr = gl.constexpr(14)
# The threads that open them: both consumers' and the producer's; one consumer's and a single warp's; both consumers'.
ALL: gl.constexpr = gl.constexpr(288)
PAIR: gl.constexpr = gl.constexpr(160)
CONSUMERS: gl.constexpr = gl.constexpr(256)

# What becomes of the dQ of a tile, and for the whole kernel: one of these for every tile, none of it (nobody asked for dQ), or MIXED.
ADD: gl.constexpr = gl.constexpr(0)
FIRST: gl.constexpr = gl.constexpr(1)
LAST: gl.constexpr = gl.constexpr(2)
STORE: gl.constexpr = gl.constexpr(3)
MIXED: gl.constexpr = gl.constexpr(4)
NONE: gl.constexpr = gl.constexpr(5)


@gluon.jit
def find_item(item, records_ptr, q_rows, k_rows, k_items, KV_HEADS: gl.constexpr, ITEM: gl.constexpr, HAS_LIST: gl.constexpr):
    """(key head, sequence, its first key, its keys, first of the item's among them, its first query, its queries)."""
    head = item % KV_HEADS
    entry = item // KV_HEADS
    if HAS_LIST:
        record = records_ptr + (entry + 1) * RECORD
        k_start = gl.load(record)
        k_length = gl.load(record + 1)
        row = gl.load(record + 2)
        q_start = gl.load(record + 3)
        q_length = gl.load(record + 4)
        sequence = gl.load(record + 5)
    else:
        sequence = entry // k_items
        row = (entry % k_items) * ITEM
        k_start = sequence * k_rows
        k_length = k_rows
        q_start = sequence * q_rows
        q_length = q_rows
    return head, sequence, k_start, k_length, row, q_start, q_length


@gluon.jit
def tile_count(k_length, row, ITEM: gl.constexpr):
    """Tiles of an item whose first key is `row`."""
    return gl.minimum(gl.cdiv(k_length - row, TILE), ITEM // TILE)


@gluon.jit
def block_count(q_length):
    """Steps for one query head. Keys without queries still have a step, of zeros, so that every tile passes through the stream alike."""
    return gl.maximum(gl.cdiv(q_length, ROWS), 1)


@gluon.jit
def find_fate(number, count, k_length, ITEM: gl.constexpr, DQ: gl.constexpr):
    """What becomes of dQ of tile `number` of `count`."""
    if DQ == MIXED:
        fate = gl.where(number == 0, FIRST, gl.where(number == count - 1, LAST, ADD))
        fate = gl.where(count == 1, STORE, fate)
        return gl.where(k_length <= ITEM, fate, ADD)
    return number * 0 + DQ


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, d_out_desc, queries, d_out, keys, values, values_free, keys_free, records_ptr, items, q_rows, k_rows, k_items,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    STRIDE_Q: gl.constexpr, STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, STRIDE_DO: gl.constexpr,
    ITEM: gl.constexpr, HAS_LIST: gl.constexpr, Q_SHARED: gl.constexpr,
):  # fmt: skip
    index = 0  # of the step in the stream
    taken = 0  # tiles
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, k_start, k_length, first_row, q_start, q_length = find_item(
            item, records_ptr, q_rows, k_rows, k_items, KV_HEADS, ITEM, HAS_LIST
        )
        d_start = q_start
        if Q_SHARED:
            q_start = 0
            d_start = sequence * q_rows
        blocks = block_count(q_length)
        for number in range(tile_count(k_length, first_row, ITEM)):
            k_row = RAGGED - k_length + first_row + number * TILE
            slot = taken & 1
            if taken > 0:
                mbarrier.wait(keys_free, (taken - 1) & 1)
            keys.expect(slot)
            load_async(k_desc, [RAGGED, k_start + k_length, k_row, head * STRIDE_K], keys.full.index(slot), keys.memory.index(slot))
            for step in range(blocks * GROUP):
                q_head = head * GROUP + step // blocks
                q_row = RAGGED - q_length + (step % blocks) * ROWS
                stage = index & 1
                if index > 0:
                    join(EMPTY + stage, ALL)
                queries.expect(stage)
                load_async(
                    q_desc,
                    [RAGGED, q_start + q_length, q_row, q_head * STRIDE_Q],
                    queries.full.index(stage),
                    queries.memory.index(stage),
                )
                d_out.expect(stage)
                load_async(
                    d_out_desc,
                    [RAGGED, d_start + q_length, q_row, q_head * STRIDE_DO],
                    d_out.full.index(stage),
                    d_out.memory.index(stage),
                )
                if step == 0:
                    for which in gl.static_range(2):
                        mbarrier.wait(values_free.index(which), taken & 1)
                        values.expect(which)
                        load_async(
                            v_desc,
                            [RAGGED, k_start + k_length, k_row + which * KEYS, head * STRIDE_V],
                            values.full.index(which),
                            values.memory.index(which),
                        )
                index += 1
            taken += 1


@gluon.jit
def reducer(
    dq_desc, copy_desc, partial, dq_empty, records_ptr, items, q_rows, k_rows, k_items,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, STRIDE_DQ: gl.constexpr, D: gl.constexpr,
    ITEM: gl.constexpr, HAS_LIST: gl.constexpr, Q_SHARED: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    if DQ == NONE:
        items = 0
    if gl.program_id(0) < items:
        for which in gl.static_range(2):
            mbarrier.arrive(dq_empty.index(which), count=1)
            join(DQ_FULL + which, PAIR)  # of the tile that never was
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, _, _, k_length, first_row, q_start, q_length = find_item(
            item, records_ptr, q_rows, k_rows, k_items, KV_HEADS, ITEM, HAS_LIST
        )
        if Q_SHARED:
            q_start = gl.program_id(0) * q_rows  # a sum for each program, over its tiles
        blocks = block_count(q_length)
        count = tile_count(k_length, first_row, ITEM)
        for number in range(count):
            fate = find_fate(number, count, k_length, ITEM, DQ)
            if DQ == MIXED:
                stores_done()  # what the tile before wrote is added to, or read
            for step in range(blocks * GROUP):
                column = (head * GROUP + step // blocks) * STRIDE_DQ
                q_row = RAGGED - q_length + (step % blocks) * ROWS
                if DQ == MIXED and fate == LAST:
                    for which in gl.static_range(2):
                        mbarrier.expect(partial.full.index(which), ROWS * (D // 2) * 4)
                        load_async(
                            copy_desc,
                            [RAGGED, q_start + q_length, q_row, column + which * (D // 2)],
                            partial.full.index(which),
                            partial.memory.index(which),
                        )
                for which in gl.static_range(2):
                    mbarrier.arrive(dq_empty.index(which), count=1)
                for which in gl.static_range(2):
                    join(DQ_FULL + which, PAIR)
                    where = [RAGGED, q_start + q_length, q_row, column + which * (D // 2)]
                    memory = partial.memory.index(which)
                    if DQ == ADD:
                        add_async(copy_desc, where, memory)
                    elif DQ == STORE:
                        store_async(dq_desc, where, rounded_view(memory, dq_desc))
                    else:
                        if fate == ADD:
                            add_async(copy_desc, where, memory)
                        elif fate == FIRST:
                            store_async(copy_desc, where, memory)
                        else:
                            store_async(dq_desc, where, rounded_view(memory, dq_desc))
                store_wait(0)


@gluon.jit
def rounded_view(memory, desc):
    """The staging memory of dQ as its rounded values lie in it."""
    layout: gl.constexpr = desc.layout
    shape: gl.constexpr = [1, 1, memory.shape[2], memory.shape[3]]
    return reinterpret(memory, desc.dtype, shape, layout)


@gluon.jit
def place(dq, ROWS_: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns in the order of the fp32 copy: neighbouring threads hold neighbouring values, as the matrix store of a warp wants them."""
    return dq.reshape([ROWS_, COLUMNS // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([ROWS_, COLUMNS])


@gluon.jit
def unplace(x, ROWS_: gl.constexpr, COLUMNS: gl.constexpr):
    """The columns of the fp32 copy in dQ's order."""
    return x.reshape([ROWS_, COLUMNS // 8, 2, 4]).permute((0, 1, 3, 2)).reshape([ROWS_, COLUMNS])


@gluon.jit
def hand_over(dq, factor, dq_desc, partial, hidden, dq_empty, phase, fate, returned, DQ: gl.constexpr, WHICH: gl.constexpr):
    """Lay this consumer's columns of dQ out for the reducer. Returns how many tiles of the fp32 copy have come back, modulo 2."""
    mbarrier.wait(dq_empty.index(WHICH), phase)
    memory = partial.memory.index(WHICH + hidden)
    COLUMNS: gl.constexpr = memory.shape[3]
    tile = memory.reshape([ROWS, COLUMNS])
    rounded = rounded_view(memory, dq_desc).reshape([ROWS, COLUMNS])
    dq = dq * factor
    if DQ == ADD:
        tile.store(place(dq, ROWS, COLUMNS))
    elif DQ == STORE:
        rounded.store(dq.to(dq_desc.dtype))
    else:
        if fate <= FIRST:
            tile.store(place(dq, ROWS, COLUMNS))
        else:
            if fate == LAST:
                partial.wait_full(WHICH, returned)
                returned ^= 1
                placed = place(dq, ROWS, COLUMNS)
                came = tile.load(placed.type.layout)
                dq = gl.convert_layout(unplace(placed + came, ROWS, COLUMNS), dq.type.layout, assert_trivial=True)
                partition_barrier()  # before others' values are written where these lay
            rounded.store(dq.to(dq_desc.dtype))
    fence_async_shared()
    arrive(DQ_FULL + WHICH, PAIR)
    return returned


@gluon.jit
def send(result, factor, empty, tile, memory, desc, end, row, column):
    """Round dK or dV and send it off: through shared memory, so that the copy engine writes whole rows and stops at the sequence's end."""
    result = gl.where(empty, 0.0, result * factor)  # no queries: zeros, whatever the keys hold
    tile.store(result.to(desc.dtype))
    fence_async_shared()
    partition_barrier()
    store_async(desc, [RAGGED, end, row, column], memory)


@gluon.jit
def issue_scores(ds, dk, continued, keys, queries, old_queries, WITH_DK: gl.constexpr, WHICH: gl.constexpr):
    """The first two products of a step: S^T, and dK of the step before."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    join(TURN + WHICH, CONSUMERS)
    s_token = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    if WITH_DK:
        dk_token = warpgroup_mma(ds, old_queries, dk, use_acc=continued, is_async=True)
        arrive(TURN + (1 - WHICH), CONSUMERS)
        return warpgroup_mma_wait(1, deps=[s_token]), dk_token
    else:
        arrive(TURN + (1 - WHICH), CONSUMERS)
        return warpgroup_mma_wait(0, deps=[s_token]), dk


@gluon.jit
def issue_dq(ds_memory, keys, buffer, WHICH: gl.constexpr, D: gl.constexpr):
    """This consumer's columns of dQ, once both halves of dS are there."""
    q_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D // 2, 16])
    no_dq = gl.zeros([ROWS, D // 2], gl.float32, q_layout)
    join(DS + 2 * buffer + (1 - WHICH), CONSUMERS)
    half = keys.slice(WHICH * (D // 2), D // 2, dim=1)
    return warpgroup_mma(ds_memory.index(buffer).permute((1, 0)), half, no_dq, use_acc=False, is_async=True)


@gluon.jit
def activated(s, scale, head, keys_left, queries_left, activate: gl.constexpr, FOLD: gl.constexpr, MASK_TAIL: gl.constexpr):
    """f and f' of transposed scores, but for the factors that `activate` leaves out where it may."""
    if FOLD:
        y, slope = activate(s, scale, head)
    else:
        y, slope = activate(s * scale, head)
    if MASK_TAIL:
        key = gl.arange(0, KEYS, gl.SliceLayout(1, s.type.layout))
        query = gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
        inside = (key < keys_left)[:, None] & (query < queries_left)[None, :]
        y = gl.where(inside, y, 0.0)
        slope = gl.where(inside, slope, 0.0)
    return y, slope


@gluon.jit
def give_ds(dp, slope, ds_memory, buffer, dtype: gl.constexpr, layout: gl.constexpr, DQ: gl.constexpr, WHICH: gl.constexpr):
    """dS, laid out for the other consumer, and as the operand of dK."""
    ds = (dp * slope).to(dtype)
    if DQ != NONE:
        ds_memory.index(buffer).slice(WHICH * KEYS, KEYS).store(ds)
        fence_async_shared()
        arrive(DS + 2 * buffer + WHICH, CONSUMERS)
    return gl.convert_layout(ds, layout)


@gluon.jit
def consumer(
    dq_desc, dk_desc, dv_desc, queries, d_out, keys, values, ds_memory, partial, dq_empty, values_free, keys_free, met,
    records_ptr, out_scale_ptr, items, q_rows, k_rows, k_items, scale, out_scale,
    activate: gl.constexpr, factors: gl.constexpr, FOLD: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    STRIDE_DK: gl.constexpr, STRIDE_DV: gl.constexpr, D: gl.constexpr, ITEM: gl.constexpr, HAS_LIST: gl.constexpr,
    SCALE_PER_SEQUENCE: gl.constexpr, SCALE_INSIDE: gl.constexpr, MASK_TAIL: gl.constexpr,
    DQ: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    dtype: gl.constexpr = dk_desc.dtype
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    my_values = values.memory.index(WHICH)
    v = values.tile(WHICH)

    ds = gl.zeros([KEYS, ROWS], dtype, p_layout)
    dk = gl.zeros([KEYS, D], gl.float32, o_layout)
    dv = gl.zeros([KEYS, D], gl.float32, o_layout)
    stage = 0  # of the stream's next step, and its phase; dS(i - 1) lies in buffer `stage ^ 1`
    phase = 0
    taken = 0  # tiles
    returned = 0  # tiles of the fp32 copy, modulo 2
    continued = False  # whether dK of the step before adds to its tile's
    last_end = 0  # where the tile before goes, and what is to be done to it: as yet nowhere
    last_row = RAGGED
    last_head = 0
    last_factor = scale
    last_fate = 0
    last_empty = False
    if WHICH == 1:
        arrive(TURN, CONSUMERS)  # consumer 0 has the first turn
    if DQ != NONE:
        arrive(DS + 2 + WHICH, CONSUMERS)
    never = (items < 0).to(gl.int32)

    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, k_start, k_length, first_row, _, q_length = find_item(
            item, records_ptr, q_rows, k_rows, k_items, KV_HEADS, ITEM, HAS_LIST
        )
        blocks = block_count(q_length)
        steps = blocks * GROUP
        tiles = tile_count(k_length, first_row, ITEM)
        c, d = 1.0, 1.0
        if FOLD:
            c, d = factors(scale, head * GROUP)
        inside = out_scale
        if SCALE_PER_SEQUENCE:
            inside *= gl.load(out_scale_ptr + sequence, mask=q_length > 0, other=1.0)
        dv_factor = inside * c
        factor = scale * d  # of dK and dQ
        if not SCALE_INSIDE:
            factor *= inside
        for number in range(tiles):
            row = first_row + number * TILE
            fate = find_fate(number, tiles, k_length, ITEM, DQ)
            keys_left = k_length - row - WHICH * KEYS
            slot = taken & 1

            # The first step, which ends the tile before.
            keys.wait_full(slot, (taken >> 1) & 1)
            queries.wait_full(stage, phase)
            my_keys = keys.tile(slot).slice(WHICH * KEYS, KEYS)
            s, dk_token = issue_scores(ds, dk, continued, my_keys, queries.tile(stage), queries.tile(stage ^ 1), WITH_DK, WHICH)
            y, slope = activated(s, scale, head * GROUP, keys_left, q_length, activate, FOLD, MASK_TAIL)
            p = gl.convert_layout(pinned(y).to(dtype), p_layout)
            if SCALE_INSIDE:
                slope = slope * inside
            slope = pinned(slope)
            if WITH_DK:
                dk = warpgroup_mma_wait(0, deps=[dk_token])
            arrive(EMPTY + (stage ^ 1), ALL)
            store_wait(0)  # dV of the tile before has left
            mbarrier.arrive(values_free.index(WHICH), count=1)
            d_out.wait_full(stage, phase)
            join(TURN + WHICH, CONSUMERS)
            if DQ != NONE:
                dq_token = issue_dq(ds_memory, keys.tile(slot ^ 1), stage ^ 1, WHICH, D)
            if WITH_DV:
                dv = warpgroup_mma(p, d_out.tile(stage), dv, use_acc=False, is_async=True)
            if DQ != NONE:
                dq = warpgroup_mma_wait(1 if WITH_DV else 0, deps=[dq_token])
                mbarrier.arrive(met, count=1)
                returned = hand_over(dq, last_factor, dq_desc, partial, 0, dq_empty, stage, last_fate, returned, DQ, WHICH)
            values.wait_full(WHICH, taken & 1)
            dp_token = warpgroup_mma(v, d_out.tile(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            arrive(TURN + (1 - WHICH), CONSUMERS)
            if WITH_DV:
                dp, dv = warpgroup_mma_wait(0, deps=[dp_token, dv])
            else:
                dp = warpgroup_mma_wait(0, deps=[dp_token])
            ds = give_ds(dp, slope, ds_memory, stage, dtype, p_layout, DQ, WHICH)
            if DQ != NONE:
                mbarrier.wait(met, taken & 1)
            if WITH_DK:
                old_tile = keys.tile(slot ^ 1).slice(WHICH * KEYS, KEYS)
                old = keys.memory.index(slot ^ 1).slice(WHICH * KEYS, KEYS, dim=2)
                send(dk, last_factor, last_empty, old_tile, old, dk_desc, last_end, last_row, last_head * STRIDE_DK)
            phase ^= stage
            stage ^= 1

            current = slot
            for step in range(1, steps):
                # Written so that the addresses of keys and staging memory are not the same in every step for the compiler: it would keep
                # them all ready, sixteen registers, and reload them from local memory, which lies in L2, before the first product.
                current ^= never
                q_head = head * GROUP + step // blocks
                queries.wait_full(stage, phase)
                my_keys = keys.tile(current).slice(WHICH * KEYS, KEYS)
                s, dk_token = issue_scores(ds, dk, step > 1, my_keys, queries.tile(stage), queries.tile(stage ^ 1), WITH_DK, WHICH)
                y, slope = activated(s, scale, q_head, keys_left, q_length - (step % blocks) * ROWS, activate, FOLD, MASK_TAIL)
                p = gl.convert_layout(pinned(y).to(dtype), p_layout)
                if SCALE_INSIDE:
                    slope = slope * inside
                slope = pinned(slope)
                if WITH_DK:
                    dk = warpgroup_mma_wait(0, deps=[dk_token])
                arrive(EMPTY + (stage ^ 1), ALL)
                d_out.wait_full(stage, phase)
                join(TURN + WHICH, CONSUMERS)
                if DQ != NONE:
                    dq_token = issue_dq(ds_memory, keys.tile(current), stage ^ 1, WHICH, D)
                if WITH_DV:
                    dv = warpgroup_mma(p, d_out.tile(stage), dv, is_async=True)
                if DQ != NONE:
                    dq = warpgroup_mma_wait(1 if WITH_DV else 0, deps=[dq_token])
                    returned = hand_over(dq, factor, dq_desc, partial, current ^ slot, dq_empty, stage, fate, returned, DQ, WHICH)
                dp_token = warpgroup_mma(v, d_out.tile(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                arrive(TURN + (1 - WHICH), CONSUMERS)
                if WITH_DV:
                    dp, dv = warpgroup_mma_wait(0, deps=[dp_token, dv])
                else:
                    dp = warpgroup_mma_wait(0, deps=[dp_token])
                ds = give_ds(dp, slope, ds_memory, stage, dtype, p_layout, DQ, WHICH)
                if step == 1:
                    store_wait(0)  # dK of the tile before has left
                    mbarrier.arrive(keys_free, count=1)
                phase ^= stage
                stage ^= 1
            if steps == 1:
                store_wait(0)
                mbarrier.arrive(keys_free, count=1)
            last_end = k_start + k_length
            last_row = RAGGED - k_length + row + WHICH * KEYS
            last_empty = q_length == 0
            if WITH_DV:
                send(dv, dv_factor, last_empty, v, my_values, dv_desc, last_end, last_row, head * STRIDE_DV)
            last_head = head
            last_factor = factor
            last_fate = fate
            continued = steps > 1
            taken += 1
    if taken > 0:
        slot = (taken - 1) & 1
        if WITH_DK:
            dk_token = warpgroup_mma(ds, queries.tile(stage ^ 1), dk, use_acc=continued, is_async=True)
            dk = warpgroup_mma_wait(0, deps=[dk_token])
        if DQ != NONE:
            dq_token = issue_dq(ds_memory, keys.tile(slot), stage ^ 1, WHICH, D)
            dq = warpgroup_mma_wait(0, deps=[dq_token])
            mbarrier.arrive(met, count=1)
            hand_over(dq, last_factor, dq_desc, partial, 0, dq_empty, stage, last_fate, returned, DQ, WHICH)
            mbarrier.wait(met, taken & 1)
        if WITH_DK:
            old_tile = keys.tile(slot).slice(WHICH * KEYS, KEYS)
            old = keys.memory.index(slot).slice(WHICH * KEYS, KEYS, dim=2)
            send(dk, last_factor, last_empty, old_tile, old, dk_desc, last_end, last_row, last_head * STRIDE_DK)
    store_wait(0)


@gluon.jit(do_not_specialize=["records_ptr", "out_scale_ptr", "items", "q_rows", "k_rows", "k_items", "scale", "out_scale"])
def backward_kernel(
    q_desc, k_desc, v_desc, d_out_desc, dq_desc, copy_desc, dk_desc, dv_desc,
    records_ptr, out_scale_ptr, items, q_rows, k_rows, k_items, scale, out_scale,
    activate: gl.constexpr, factors: gl.constexpr, FOLD: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    STRIDE_Q: gl.constexpr, STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, STRIDE_DO: gl.constexpr,
    STRIDE_DQ: gl.constexpr, STRIDE_DK: gl.constexpr, STRIDE_DV: gl.constexpr, D: gl.constexpr, ITEM: gl.constexpr,
    HAS_LIST: gl.constexpr, Q_SHARED: gl.constexpr, SCALE_PER_SEQUENCE: gl.constexpr, SCALE_INSIDE: gl.constexpr,
    MASK_TAIL: gl.constexpr, DQ: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = q_desc.layout
    k_layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    d_out_layout: gl.constexpr = d_out_desc.layout
    copy_layout: gl.constexpr = copy_desc.layout
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROWS], dtype)
    if HAS_LIST:
        items = gl.load(records_ptr) * KV_HEADS
    keys = new_buffers(dtype, 2, TILE, D, k_layout)
    values = new_buffers(dtype, 2, KEYS, D, v_layout)  # one a consumer
    queries = new_buffers(dtype, 2, ROWS, D, q_layout)
    d_out = new_buffers(dtype, 2, ROWS, D, d_out_layout)
    ds_memory = gl.allocate_shared_memory(dtype, [2, TILE, ROWS], ds_layout)
    partial = new_buffers(gl.float32, 2, ROWS, D // 2, copy_layout)  # dQ on its way, one a consumer
    values_free = new_barriers(2)
    dq_empty = new_barriers(2)
    keys_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_free, count=2)
    mbarrier.init(met, count=2)
    gl.warp_specialize(
        [
            (consumer, (
                dq_desc, dk_desc, dv_desc, queries, d_out, keys, values, ds_memory, partial, dq_empty, values_free, keys_free, met,
                records_ptr, out_scale_ptr, items, q_rows, k_rows, k_items, scale, out_scale, activate, factors, FOLD, KV_HEADS, GROUP,
                STRIDE_DK, STRIDE_DV, D, ITEM, HAS_LIST, SCALE_PER_SEQUENCE, SCALE_INSIDE, MASK_TAIL, DQ, WITH_DK, WITH_DV, 0,
            )),
            (consumer, (
                dq_desc, dk_desc, dv_desc, queries, d_out, keys, values, ds_memory, partial, dq_empty, values_free, keys_free, met,
                records_ptr, out_scale_ptr, items, q_rows, k_rows, k_items, scale, out_scale, activate, factors, FOLD, KV_HEADS, GROUP,
                STRIDE_DK, STRIDE_DV, D, ITEM, HAS_LIST, SCALE_PER_SEQUENCE, SCALE_INSIDE, MASK_TAIL, DQ, WITH_DK, WITH_DV, 1,
            )),
            (producer, (
                q_desc, k_desc, v_desc, d_out_desc, queries, d_out, keys, values, values_free, keys_free,
                records_ptr, items, q_rows, k_rows, k_items,
                KV_HEADS, GROUP, STRIDE_Q, STRIDE_K, STRIDE_V, STRIDE_DO, ITEM, HAS_LIST, Q_SHARED,
            )),
            (reducer, (
                dq_desc, copy_desc, partial, dq_empty, records_ptr, items, q_rows, k_rows, k_items,
                KV_HEADS, GROUP, STRIDE_DQ, D, ITEM, HAS_LIST, Q_SHARED, DQ,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],  # registers of a thread: 2 x 128 x 240 + 128 x 24 of 65,536
    )  # fmt: skip

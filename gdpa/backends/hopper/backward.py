"""The backward kernel for Hopper.

    S = scale * Q K^T      P = f(S)      dP = dO V^T      dS = dP * f'(S)
    dV = out_scale * P^T dO      dK = out_scale * scale * dS^T Q      dQ = out_scale * scale * dS K

One persistent program a multiprocessor walks over tiles: 128 keys of one (sequence, key head), with the queries of every head of the
group, 64 a step, or 128 (ROWS; plan_backward.step_rows). Nothing but q, k, v and dO is read, and each score is computed once: five
products a step. The partitions:

    query_producer   one warp: copies the queries and dO of each step into shared memory
    key_producer     one warp: the keys and values of each tile, and a note of all that the consumers must know of it; may send dV off
    consumer 0       a warpgroup that owns keys 0 to 63: their scores, transposed, and their dK and dV, in registers over the whole tile
    consumer 1       the same for keys 64 to 127
    reducer 0, 1     one warp each, every second step: send its dQ off

dQ sums over all keys, so the consumers exchange dS through shared memory, and each multiplies it into its part of dQ: 64 rows of half the
columns, or half of 128 rows.

A consumer's steps form one stream that does not stop where a tile ends. In step i it

    issues S(i)^T = K Q(i)^T and dK += dS(i - 1)^T Q(i - 1)
    activates S(i): P, f'(S)
    issues its half of dQ(i - 1) = dS(i - 1) K, and dV += P^T dO(i)
    hands dQ(i - 1) over to a reducer
    issues dP(i)^T = V dO(i)^T
    makes dS(i) and lays it out for the other consumer

where dK(i - 1) and dQ(i - 1) are the tile's before when step i opens one. No product is in flight where the loop closes: there the
compiler would wait after each one. Registers bound the order: dK and dV take 128 of a thread's 232, S, dP and dQ 32 each, f'(S) 32, P
and dS 16; or, with 128 queries at D = 64, dK and dV 64, S, dP and f'(S) 64 each, dQ, P and dS 32, and dV is waited for before dP is issued,
which frees P. The consumers take turns, each with its first two products, then each with its other three: while one activates or makes dS,
the other multiplies. That dQ lags a step is what lets them: it waits for both.

When step i opens a tile, dV of the tile before is on its way out: through the memory of V, whose next tile is not needed before dP(i), or
through the staging memory of dQ, between those of steps i - 2 and i - 1 (`relay.THROUGH_DQ`). dK leaves when both consumers are done with
dQ(i - 1), through the memory of K, which has two slots. The first step of a program completes a tile that never was: its rows lie past the
end of everything, so that nothing is written.

The factor of dQ and dK is a weight of f', inside constants that f' has anyway (folding.WEIGHT): dQ needs no multiplication of its own.

`relay.py` is how dQ leaves: it sums over the tiles of a sequence, which different programs hold at about the same time. `tiles.py` is which
tile a program takes, and what it must know of it.

    barrier                  opened by                                        for
    queries.full, d_out.full the copy engine                                  both consumers
    keys.full                the copy engine                                  both consumers
    values.full + consumer   the copy engine                                  the consumer
    partial.full + consumer  the copy engine                                  the consumer, to add to what came back (LAST)
    EMPTY + stage            both consumers, dK(i - 1) done                   the query producer, to load step i + 1
    DS + 2 * (i % 2) + c     consumer c, dS(i) in shared memory               the other one, for dQ(i)
    DQ_FULL + consumer       the consumer                                     the step's reducer; the key producer, for dV
    dq_left + 2 * r + c      reducer r, consumer c's columns have left        the other reducer; the key producer, for dV
    dv_left + consumer       the key producer, dV has left (THROUGH_DQ)       the reducer of the tile's last step
    dq_empty + consumer      whose turn is next, after that                   the consumer, to hand the next one over
    counters                 a reducer, a step's dQ is written                the reducers of other programs (in global memory)
    values_free + consumer   the consumer, its dP is done, dV not in the way  the key producer, to load the next tile's values
    keys_free                both consumers, dK has left                      the key producer, to load the keys of the tile after the next
    met                      both consumers, dQ of the tile before done       both, to write dK where its keys were
    TURN + consumer          the other consumer, its products issued          the consumer, to issue its own

Rows past a sequence's end are zeros in shared memory and are not written back (gpu.ragged_geometry): zero rows of dO and K make
masks needless where f(0) and f'(0) are finite; MASK_TAIL compiles one in for the others. CAUSAL is self-attention whose queries see no
later key: a tile begins at the step of its own first query, and masks the steps in which some of its keys are not seen yet.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from gdpa.backends.hopper.compat import load_async, partition_barrier, store_async, store_wait
from gdpa.backends.hopper.pipeline import RAGGED, arrive, join, join_after, new_barriers, new_buffers, pinned
from gdpa.backends.hopper.relay import (
    NONE,
    THROUGH_DQ,
    THROUGH_V,
    fate,
    find_causal,
    find_relay,
    hand_over,
    hand_over_dv,
    handed,
    reducer,
    send_dv,
)
from gdpa.backends.hopper.tiles import (
    DV_FACTOR,
    FIELDS,
    HEAD,
    KEY_END,
    KEY_ROW,
    KEYS,
    LAST_FROM,
    NOTHING,
    PART,
    QUERIES,
    START,
    STEPS,
    TILE,
    WEIGHT,
    block_count,
    find_tile,
    lay_out,
    read,
    read_float,
    split,
    tile_count,
    turned,
    write_note,
)

# Named barriers; relay.DQ_FULL is 12 and 13. Triton takes the lowest ones for its own partitions.
EMPTY: gl.constexpr = gl.constexpr(6)
DS: gl.constexpr = gl.constexpr(8)
TURN: gl.constexpr = gl.constexpr(14)
# The threads that open them: both consumers' and the query producer's; both consumers'.
ALL: gl.constexpr = gl.constexpr(288)
CONSUMERS: gl.constexpr = gl.constexpr(256)


@gluon.jit
def key_producer(
    k_desc, v_desc, dv_desc, keys, values, notes, values_free, keys_free, partial, dq_empty, dq_left, dv_left,
    records_ptr, out_scale_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few, scale, out_scale,
    factor_of: gl.constexpr, FOLD: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, STRIDE_DV: gl.constexpr, HAS_LIST: gl.constexpr, PAIRED: gl.constexpr,
    TOGETHER: gl.constexpr, CAUSAL: gl.constexpr, SCALE_PER_SEQUENCE: gl.constexpr, SCALE_OUTSIDE: gl.constexpr,
    DQ: gl.constexpr, ORDERED: gl.constexpr, DV: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    stream = 0  # steps so far
    old_end, old_row, old_head = 0, 0, 0  # where dV of the tile before goes
    mine = tile_count(tiles, PAIRED)
    for taken in range(mine):
        head, sequence, k_start, k_length, row, _, q_length, count = find_tile(
            taken, records_ptr, q_rows, k_rows, k_tiles, rotating, KV_HEADS, HAS_LIST, PAIRED, TOGETHER, CAUSAL, ORDERED
        )
        steps = block_count(q_length, ROWS) * GROUP
        if CAUSAL:
            start, last_from = find_causal(row, q_length, count, rotating, few, 1 if TOGETHER else KV_HEADS, ORDERED, ROWS)
            steps -= start
        else:
            start, _, last_from = find_relay(row, q_length, count, steps, rotating, 1 if TOGETHER else KV_HEADS, DQ)
            last_from = gl.where((count <= few) | (q_length == 0), -1, last_from)
        k_end = k_start + k_length
        k_row = RAGGED - k_length + row
        # dS has all of dQ's factor, but for the scale in float16, which might not have the range for it.
        weight = out_scale
        if SCALE_PER_SEQUENCE:
            weight *= gl.load(out_scale_ptr + sequence, mask=q_length > 0, other=1.0)
        dv_factor = weight
        if FOLD:
            dv_factor *= factor_of(scale, head * GROUP)
        if not SCALE_OUTSIDE:
            weight *= scale
        slot = taken & 1
        if taken > 0:
            mbarrier.wait(keys_free, (taken - 1) & 1)
        write_note(
            notes.index(slot), steps, last_from, k_end, k_row, head, weight, dv_factor, q_length, start, 1
        )  # fmt: skip
        partition_barrier()  # before one thread announces it, with the keys
        keys.expect(slot)
        load_async(k_desc, [RAGGED, k_end, k_row, head * STRIDE_K], keys.full.index(slot), keys.memory.index(slot))
        for which in gl.static_range(2):
            if DV == THROUGH_V:
                mbarrier.wait(values_free.index(which), taken & 1)
            elif taken > 0:
                mbarrier.wait(values_free.index(which), (taken - 1) & 1)
            values.expect(which)
            load_async(
                v_desc, [RAGGED, k_end, k_row + which * KEYS, head * STRIDE_V], values.full.index(which), values.memory.index(which)
            )
            if DV == THROUGH_DQ and taken > 0:
                old = (old_end, old_row, old_head)
                send_dv(dv_desc, partial, dq_empty, dq_left, dv_left, stream, old, STRIDE_DV, DQ, which)
        stream += steps
        old_end, old_row, old_head = k_end, k_row, head
    if DV == THROUGH_DQ and mine > 0:
        for which in gl.static_range(2):
            mbarrier.wait(values_free.index(which), (mine - 1) & 1)  # the last tile has come to its end
            old = (old_end, old_row, old_head)
            send_dv(dv_desc, partial, dq_empty, dq_left, dv_left, stream, old, STRIDE_DV, DQ, which)


@gluon.jit
def query_producer(
    q_desc, d_out_desc, queries, d_out, records_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, STRIDE_Q: gl.constexpr, STRIDE_DO: gl.constexpr,
    HAS_LIST: gl.constexpr, PAIRED: gl.constexpr, TOGETHER: gl.constexpr, CAUSAL: gl.constexpr, Q_SHARED: gl.constexpr,
    DQ: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    index = 0  # of the step in the stream
    for taken in range(tile_count(tiles, PAIRED)):
        head, sequence, _, _, row, q_start, q_length, count = find_tile(
            taken, records_ptr, q_rows, k_rows, k_tiles, rotating, KV_HEADS, HAS_LIST, PAIRED, TOGETHER, CAUSAL, ORDERED
        )
        d_start = q_start
        if Q_SHARED:
            q_start = 0
            d_start = sequence * q_rows
        blocks = block_count(q_length, ROWS)
        all_steps = blocks * GROUP
        steps = all_steps  # of the tile
        if CAUSAL:
            start, _ = find_causal(row, q_length, count, rotating, few, 1 if TOGETHER else KV_HEADS, ORDERED, ROWS)
            steps -= start
        else:
            start, _, _ = find_relay(row, q_length, count, steps, rotating, 1 if TOGETHER else KV_HEADS, DQ)
        for step in range(steps):
            in_group, block = split(turned(step, start, all_steps), blocks, GROUP)
            q_head = head * GROUP + in_group
            q_row = RAGGED - q_length + block * ROWS
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
            index += 1


@gluon.jit
def send(result, factor, note, tile, memory, desc, STRIDE: gl.constexpr, WHICH: gl.constexpr):
    """Round dK or dV and send it off: through shared memory, so that the copy engine writes whole rows and stops at the sequence's end."""
    lay_out(result, factor, note, tile)
    fence_async_shared()
    partition_barrier()
    store_async(desc, [RAGGED, read(note, KEY_END), read(note, KEY_ROW) + WHICH * KEYS, read(note, HEAD) * STRIDE], memory)


@gluon.jit
def issue_scores(ds, dk, continued, keys, queries, old_queries, ROWS: gl.constexpr, WITH_DK: gl.constexpr, WHICH: gl.constexpr):
    """The first two products of a step: S^T, and dK of the step before."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    join(TURN + WHICH, CONSUMERS)
    s_token = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    if WITH_DK:
        dk = warpgroup_mma(ds, old_queries, dk, use_acc=continued, is_async=True)
    arrive(TURN + (1 - WHICH), CONSUMERS)
    return s_token, dk


@gluon.jit
def issue_dq(ds_memory, keys, buffer, WHICH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr):
    """This consumer's half of dQ, once both halves of dS are there: its columns, or its rows of a step that has more than a part."""
    COLUMNS: gl.constexpr = D if ROWS > PART else D // 2
    q_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    no_dq = gl.zeros([PART, COLUMNS], gl.float32, q_layout)
    join(DS + 2 * buffer + (1 - WHICH), CONSUMERS)
    ds = ds_memory.index(buffer)
    if ROWS > PART:
        ds = ds.slice(WHICH * PART, PART, dim=1)
    else:
        keys = keys.slice(WHICH * COLUMNS, COLUMNS, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), keys, no_dq, use_acc=False, is_async=True)


@gluon.jit
def activated(
    s, scale, weight, note, steps, step,
    activate: gl.constexpr, GROUP: gl.constexpr, FOLD: gl.constexpr, MASK_TAIL: gl.constexpr, CAUSAL: gl.constexpr,
    MASK_LATER: gl.constexpr, ROWS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """f of transposed scores, but for a factor that `activate` may leave out, and the weight times f'."""
    # Compiled in only where activations differ between heads, or need a mask.
    start = read(note, START)
    here = step + start if CAUSAL else turned(step, start, steps)
    in_group, block = split(here, steps // GROUP, GROUP)
    head = read(note, HEAD) * GROUP + in_group
    if FOLD:
        y, slope = activate(s, scale, weight, head)
    else:
        y, slope = activate(s * scale, head)
        slope = slope * weight
    if MASK_TAIL:
        key = gl.arange(0, KEYS, gl.SliceLayout(1, s.type.layout))
        query = gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
        keys_left = RAGGED - read(note, KEY_ROW) - WHICH * KEYS
        queries_left = read(note, QUERIES) - block * ROWS
        inside = (key < keys_left)[:, None] & (query < queries_left)[None, :]
        y = gl.where(inside, y, 0.0)
        slope = gl.where(inside, slope, 0.0)
    if MASK_LATER:  # keys that come after the query
        # The tile's first query is its first key. Consumer 0's keys are seen by all queries after 64 of them, consumer 1's after 128.
        key = gl.arange(0, KEYS, gl.SliceLayout(1, s.type.layout))[:, None]
        query = gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))[None, :]
        seen = key <= query + (step * (ROWS // KEYS) - WHICH) * KEYS
        y = gl.where(seen, y, 0.0)
        slope = gl.where(seen, slope, 0.0)
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
    dq_desc, dk_desc, dv_desc, queries, d_out, keys, values, notes, ds_memory, partial, dq_empty, values_free, keys_free, met,
    tiles, scale,
    activate: gl.constexpr, FOLD: gl.constexpr, GROUP: gl.constexpr, STRIDE_DK: gl.constexpr, STRIDE_DV: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, PAIRED: gl.constexpr, CAUSAL: gl.constexpr, SCALE_OUTSIDE: gl.constexpr, MASK_TAIL: gl.constexpr,
    DQ: gl.constexpr, WITH_DK: gl.constexpr, DV: gl.constexpr, IN_ORDER: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    dtype: gl.constexpr = dk_desc.dtype
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    v = values.tile(WHICH)

    ds = gl.zeros([KEYS, ROWS], dtype, p_layout)
    dk = gl.zeros([KEYS, D], gl.float32, o_layout)
    dv = gl.zeros([KEYS, D], gl.float32, o_layout)
    # Of dQ and dK; None where dS has it.
    factor = scale if SCALE_OUTSIDE else None
    stage = 0  # of the stream's next step, and its phase; dS(i - 1) lies in buffer `stage ^ 1`
    phase = 0
    returned = 0  # tiles of the fp32 copy, modulo 2
    continued = False  # whether dK of the step before adds to its tile's
    if WHICH == 1:
        arrive(TURN, CONSUMERS)  # consumer 0 has the first turn
    if DQ != NONE:
        arrive(DS + 2 + WHICH, CONSUMERS)

    mine = tile_count(tiles, PAIRED)
    for taken in range(mine):
        slot = taken & 1
        note = notes.index(slot)
        old_note = notes.index(slot ^ 1)  # of the tile before

        # The first step, which ends the tile before.
        keys.wait_full(slot, (taken >> 1) & 1)
        queries.wait_full(stage, phase)
        steps = read(note, STEPS)
        my_keys = keys.tile(slot).slice(WHICH * KEYS, KEYS)
        s_token, dk_token = issue_scores(
            ds, dk, continued, my_keys, queries.tile(stage), queries.tile(stage ^ 1), ROWS, WITH_DK, WHICH
        )
        if DV == THROUGH_V:
            store_wait(0)  # dV of the tile before has left
            mbarrier.arrive(values_free.index(WHICH), count=1)
        s = warpgroup_mma_wait(1 if WITH_DK else 0, deps=[s_token])
        weight = read_float(note, WEIGHT)
        y, slope = activated(
            s, scale, weight, note, steps, steps * 0, activate, GROUP, FOLD, MASK_TAIL, CAUSAL, CAUSAL, ROWS, WHICH
        )
        p = pinned(y).to(dtype)
        slope = pinned(slope)
        if WITH_DK:
            dk = warpgroup_mma_wait(0, deps=[dk_token])
        arrive(EMPTY + (stage ^ 1), ALL)
        d_out.wait_full(stage, phase)
        if IN_ORDER:
            p, slope = join_after(p, slope, TURN + WHICH, CONSUMERS)
        else:
            join(TURN + WHICH, CONSUMERS)
        p = gl.convert_layout(p, p_layout)
        if DQ != NONE:
            dq_token = issue_dq(ds_memory, keys.tile(slot ^ 1), stage ^ 1, WHICH, D, ROWS)
        if DV != NONE:
            dv = warpgroup_mma(p, d_out.tile(stage), dv, use_acc=False, is_async=True)
        if DQ != NONE:
            dq = warpgroup_mma_wait(1 if DV != NONE else 0, deps=[dq_token])
            mbarrier.arrive(met, count=1)
            is_last, last_from = fate(read(old_note, LAST_FROM), read(old_note, STEPS), CAUSAL, ROWS)
            returned = hand_over(
                dq, factor, dq_desc, partial, 0, dq_empty, handed(stage, slot, DQ, DV),
                is_last, last_from, returned, DQ, WHICH,
            )  # fmt: skip
        values.wait_full(WHICH, taken & 1)
        if DV != NONE and ROWS > PART:
            dv = warpgroup_mma_wait(0, deps=[dv])
        dp_token = warpgroup_mma(v, d_out.tile(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        arrive(TURN + (1 - WHICH), CONSUMERS)
        if DV != NONE and ROWS <= PART:
            dp, dv = warpgroup_mma_wait(0, deps=[dp_token, dv])
        else:
            dp = warpgroup_mma_wait(0, deps=[dp_token])
        ds = give_ds(dp, slope, ds_memory, stage, dtype, p_layout, DQ, WHICH)
        if DQ != NONE:
            mbarrier.wait(met, taken & 1)
        if WITH_DK:
            old_tile = keys.tile(slot ^ 1).slice(WHICH * KEYS, KEYS)
            old = keys.memory.index(slot ^ 1).slice(WHICH * KEYS, KEYS, dim=2)
            send(dk, factor, old_note, old_tile, old, dk_desc, STRIDE_DK, WHICH)
        phase ^= stage
        stage ^= 1

        current = slot
        code = read(note, LAST_FROM)
        never = read(note, NOTHING)
        for step in range(1, steps):
            # Written so that the addresses of keys and staging memory are not the same in every step for the compiler: it would keep
            # them all ready, sixteen registers, and reload them from local memory, which lies in L2, before the first product.
            current ^= never
            queries.wait_full(stage, phase)
            my_keys = keys.tile(current).slice(WHICH * KEYS, KEYS)
            s_token, dk_token = issue_scores(
                ds, dk, step > 1, my_keys, queries.tile(stage), queries.tile(stage ^ 1), ROWS, WITH_DK, WHICH
            )
            s = warpgroup_mma_wait(1 if WITH_DK else 0, deps=[s_token])
            masked: gl.constexpr = CAUSAL and WHICH == 1 and ROWS < TILE
            y, slope = activated(s, scale, weight, note, steps, step, activate, GROUP, FOLD, MASK_TAIL, CAUSAL, masked, ROWS, WHICH)
            p = gl.convert_layout(pinned(y).to(dtype), p_layout)
            slope = pinned(slope)
            if WITH_DK:
                dk = warpgroup_mma_wait(0, deps=[dk_token])
            arrive(EMPTY + (stage ^ 1), ALL)
            d_out.wait_full(stage, phase)
            join(TURN + WHICH, CONSUMERS)
            if DQ != NONE:
                dq_token = issue_dq(ds_memory, keys.tile(current), stage ^ 1, WHICH, D, ROWS)
            if DV != NONE:
                dv = warpgroup_mma(p, d_out.tile(stage), dv, is_async=True)
            if DQ != NONE:
                dq = warpgroup_mma_wait(1 if DV != NONE else 0, deps=[dq_token])
                is_last, last_from = fate(code, step, CAUSAL, ROWS)
                returned = hand_over(
                    dq, factor, dq_desc, partial, current ^ slot, dq_empty, handed(stage, current, DQ, DV),
                    is_last, last_from, returned, DQ, WHICH,
                )  # fmt: skip
            if DV != NONE and ROWS > PART:
                dv = warpgroup_mma_wait(0, deps=[dv])
            dp_token = warpgroup_mma(v, d_out.tile(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            arrive(TURN + (1 - WHICH), CONSUMERS)
            if DV != NONE and ROWS <= PART:
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
        if DV == THROUGH_V:
            send(dv, read_float(note, DV_FACTOR), note, v, values.memory.index(WHICH), dv_desc, STRIDE_DV, WHICH)
        else:
            mbarrier.arrive(values_free.index(WHICH), count=1)
        if DV == THROUGH_DQ:
            hand_over_dv(dv, note, dv_desc, partial, current ^ slot, dq_empty, handed(stage, current, DQ, DV), WHICH)
        continued = steps > 1
    if mine > 0:
        slot = (mine - 1) & 1
        note = notes.index(slot)
        if WITH_DK:
            dk_token = warpgroup_mma(ds, queries.tile(stage ^ 1), dk, use_acc=continued, is_async=True)
            dk = warpgroup_mma_wait(0, deps=[dk_token])
        if DQ != NONE:
            dq_token = issue_dq(ds_memory, keys.tile(slot), stage ^ 1, WHICH, D, ROWS)
            dq = warpgroup_mma_wait(0, deps=[dq_token])
            mbarrier.arrive(met, count=1)
            is_last, last_from = fate(read(note, LAST_FROM), read(note, STEPS), CAUSAL, ROWS)
            hand_over(
                dq, factor, dq_desc, partial, 0, dq_empty, handed(stage, slot ^ 1, DQ, DV),
                is_last, last_from, returned, DQ, WHICH,
            )  # fmt: skip
            mbarrier.wait(met, mine & 1)
        if WITH_DK:
            old_tile = keys.tile(slot).slice(WHICH * KEYS, KEYS)
            old = keys.memory.index(slot).slice(WHICH * KEYS, KEYS, dim=2)
            send(dk, factor, note, old_tile, old, dk_desc, STRIDE_DK, WHICH)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "records_ptr",
        "counters_ptr",
        "out_scale_ptr",
        "tiles",
        "q_rows",
        "k_rows",
        "k_tiles",
        "rotating",
        "few",
        "scale",
        "out_scale",
    ]
)
def backward_kernel(
    q_desc, k_desc, v_desc, d_out_desc, dq_desc, copy_desc, dk_desc, dv_desc,
    records_ptr, counters_ptr, out_scale_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few, scale, out_scale,
    activate: gl.constexpr, factor_of: gl.constexpr, FOLD: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    STRIDE_Q: gl.constexpr, STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, STRIDE_DO: gl.constexpr,
    STRIDE_DQ: gl.constexpr, STRIDE_DK: gl.constexpr, STRIDE_DV: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    HAS_LIST: gl.constexpr, PAIRED: gl.constexpr, TOGETHER: gl.constexpr, CAUSAL: gl.constexpr, Q_SHARED: gl.constexpr,
    SCALE_PER_SEQUENCE: gl.constexpr, SCALE_OUTSIDE: gl.constexpr, MASK_TAIL: gl.constexpr,
    DQ: gl.constexpr, ORDERED: gl.constexpr, WITH_DK: gl.constexpr, DV: gl.constexpr, IN_ORDER: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = q_desc.layout
    k_layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    d_out_layout: gl.constexpr = d_out_desc.layout
    copy_layout: gl.constexpr = copy_desc.layout
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROWS], dtype)
    if HAS_LIST:
        tiles = gl.load(records_ptr) * KV_HEADS * (2 if PAIRED else 1)
    keys = new_buffers(dtype, 2, TILE, D, k_layout)
    values = new_buffers(dtype, 2, KEYS, D, v_layout)  # one a consumer
    queries = new_buffers(dtype, 2, ROWS, D, q_layout)
    d_out = new_buffers(dtype, 2, ROWS, D, d_out_layout)
    ds_memory = gl.allocate_shared_memory(dtype, [2, TILE, ROWS], ds_layout)
    partial = new_buffers(gl.float32, 2, PART, D if ROWS > PART else D // 2, copy_layout)  # dQ on its way, one a consumer
    notes = gl.allocate_shared_memory(gl.int32, [2, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # The tile that never was: nothing of it is written.
    write_note(notes.index(1), 0, 0, 0, RAGGED, 0, scale, scale, 0, 0, 4)
    values_free = new_barriers(2)
    dq_empty = new_barriers(2)
    dq_left = new_barriers(4)
    dv_left = new_barriers(2)
    keys_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_free, count=2)
    mbarrier.init(met, count=2)
    gl.warp_specialize(
        [
            (consumer, (
                dq_desc, dk_desc, dv_desc, queries, d_out, keys, values, notes, ds_memory, partial, dq_empty, values_free, keys_free, met,
                tiles, scale, activate, FOLD, GROUP, STRIDE_DK, STRIDE_DV, D, ROWS, PAIRED, CAUSAL, SCALE_OUTSIDE, MASK_TAIL,
                DQ, WITH_DK, DV, IN_ORDER, 0,
            )),
            (consumer, (
                dq_desc, dk_desc, dv_desc, queries, d_out, keys, values, notes, ds_memory, partial, dq_empty, values_free, keys_free, met,
                tiles, scale, activate, FOLD, GROUP, STRIDE_DK, STRIDE_DV, D, ROWS, PAIRED, CAUSAL, SCALE_OUTSIDE, MASK_TAIL,
                DQ, WITH_DK, DV, IN_ORDER, 1,
            )),
            (query_producer, (
                q_desc, d_out_desc, queries, d_out, records_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few,
                KV_HEADS, GROUP, STRIDE_Q, STRIDE_DO, HAS_LIST, PAIRED, TOGETHER, CAUSAL, Q_SHARED, DQ, ORDERED, ROWS,
            )),
            (key_producer, (
                k_desc, v_desc, dv_desc, keys, values, notes, values_free, keys_free, partial, dq_empty, dq_left, dv_left,
                records_ptr, out_scale_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few, scale, out_scale, factor_of, FOLD,
                KV_HEADS, GROUP, STRIDE_K, STRIDE_V, STRIDE_DV, HAS_LIST, PAIRED, TOGETHER, CAUSAL, SCALE_PER_SEQUENCE,
                SCALE_OUTSIDE, DQ, ORDERED, DV, ROWS,
            )),
            (reducer, (
                dq_desc, copy_desc, partial, dq_empty, dq_left, dv_left,
                records_ptr, counters_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few,
                KV_HEADS, GROUP, STRIDE_DQ, D, ROWS, HAS_LIST, PAIRED, TOGETHER, CAUSAL, Q_SHARED, DQ, ORDERED, DV, 0,
            )),
            (reducer, (
                dq_desc, copy_desc, partial, dq_empty, dq_left, dv_left,
                records_ptr, counters_ptr, tiles, q_rows, k_rows, k_tiles, rotating, few,
                KV_HEADS, GROUP, STRIDE_DQ, D, ROWS, HAS_LIST, PAIRED, TOGETHER, CAUSAL, Q_SHARED, DQ, ORDERED, DV, 1,
            )),
        ],
        [4, 1, 1, 1, 1],
        [232, 40, 40, 40, 40],  # registers of a thread: 256 x 232 + 128 x 40 of 65,536
    )  # fmt: skip

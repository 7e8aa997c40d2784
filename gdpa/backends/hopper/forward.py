"""The forward kernel for Hopper.

    S = scale * Q K^T      P = where(M, f(S), 0)      O = out_scale * P V

One persistent program a multiprocessor walks over tiles: 64 query rows of one (sequence, head) for each of CONSUMERS warpgroups, which
are two, or, at D = 64, where registers allow it, two to four. Its warps form partitions:

    producer     one warp: copies a tile's queries and, BLOCK_N at a time, its keys and values into shared memory
    consumer 0   a warpgroup that multiplies, activates and stores rows 0 to 63 of the tile
    consumer 1   the same for rows 64 to 127; it sits out a tile that ends before them
    consumer 2   the same for rows 128 to 191
    consumer 3   the same for rows 192 to 255

A consumer's blocks form one stream that does not stop where a tile ends. In step i it

    issues S(i) = Q K(i)^T, with the next tile's queries when block i opens a tile
    issues O += P(i - 1) V(i - 1)
    activates S(i) while the second product runs
    stores O if block i - 1 closed a tile

so V(i - 1) is needed with K(i), and both are in stage i % STAGES of their buffers: two stages of 128 keys, or, with four consumers, who
have registers for half as many scores, four of 64. Two and three consumers issue their products in turns; of four, one nearly always has
products to run. A tile's first step is code of its own, or, where that is too much code (plan_forward.has_one_loop), one of its loop's
(ONE_LOOP).

    barrier                  opened by                                  for
    keys.full, values.full   the copy engine                            the consumers' products of that stage
    queries.full             the copy engine                            the consumer whose slot it is
    KEYS_EMPTY + stage       all consumers, S(i) done                   the producer, to fill the stage with K(i + STAGES)
    VALUES_EMPTY + stage     all consumers, the product done            the producer, to fill the stage with V(i + STAGES - 1)
    QUERIES_EMPTY + slot     the slot's consumer, the tile's S done     the producer, to send the tile after the next
    TURN + consumer          the consumer before, its products issued   the consumer, to issue its own

With more than two consumers the named barriers do not suffice, and mbarriers, `empty`, take the place of QUERIES_EMPTY.

Rows past a sequence's end are zeros in shared memory and are not written back: the descriptors are ragged (gpu.ragged_geometry).
A zero row of V cancels f(0) where that is finite, so no pair is masked; MASK_TAIL compiles a mask in for activations like log.
Windows (WINDOW) leave out blocks of keys that no row of the tile may see. Rows of a tile see different keys, so blocks at the edges are
masked. Where only keys to the right are forbidden, and the window's edge is that of a block for every tile, as in causal attention of
sequences to themselves, blocks come from right to left: the first one is masked and the others are not (RIGHT). Else all are (BOTH).
A second masked step and a loop without was tried: the compiler then has no registers left to interleave the activation's instructions,
and 2048 rows took as long as with a mask in every step.

S and O are fp32. `activate` makes an fp32 tile of S, and `finish` P of that, in the inputs' dtype: it rounds, or takes the last step of
packed activations. Few keys ask for more exact ones, so a tile's first block may have another `activate` and `finish` than the rest; in
one loop they are the same. P may leave a factor out that all of it shares, `factor`, which O is multiplied with in fp32. EARLY keeps the
assembler from moving `activate` behind the wait for the product that runs meanwhile (pipeline.divide).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from gdpa.backends.hopper.compat import load_async, partition_barrier, store_async, store_wait
from gdpa.backends.hopper.pipeline import RAGGED, advance, arrive, divide, join, new_barriers, new_buffers, pinned

ROWS: gl.constexpr = gl.constexpr(64)  # queries of a consumer
RECORD: gl.constexpr = gl.constexpr(8)  # numbers of a tile's record (schedule.records)

# Named barriers. Triton takes the lowest ones for its own partitions.
KEYS_EMPTY: gl.constexpr = gl.constexpr(6)  # one a stage; those of VALUES_EMPTY come after them (`values_empty`)
TURN: gl.constexpr = gl.constexpr(10)  # of two or three consumers, who have two stages
QUERIES_EMPTY: gl.constexpr = gl.constexpr(12)  # of two consumers
# The threads that open them: for KEYS_EMPTY and VALUES_EMPTY all consumers' and the producer's (`all_threads`), else these.
ONE_AND_PRODUCER: gl.constexpr = gl.constexpr(160)
TWO: gl.constexpr = gl.constexpr(256)


# Which pairs a window forbids: none; keys to the right, from a block's edge on for each tile's last row; or any.
NO_WINDOW: gl.constexpr = gl.constexpr(0)
RIGHT: gl.constexpr = gl.constexpr(1)
BOTH: gl.constexpr = gl.constexpr(2)
UNBOUNDED: gl.constexpr = gl.constexpr(0x20000000)  # what a side has that forbids nothing


@gluon.constexpr_function
def all_threads(consumers):
    return 128 * consumers + 32


@gluon.constexpr_function
def stages_of(consumers):
    """Of keys, and of values."""
    return 4 if consumers == 4 else 2


@gluon.constexpr_function
def values_empty(consumers):
    return KEYS_EMPTY.value + stages_of(consumers)


@gluon.jit
def find_tile(
    tile, records_ptr, q_rows, k_rows, q_blocks, HEADS: gl.constexpr, HAS_LIST: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr
):  # fmt: skip
    """(head, sequence, its first row in a packed output, its queries, first of the tile's rows among them, its first key, its keys)."""
    head = tile % HEADS
    entry = tile // HEADS
    if HAS_LIST:
        record = records_ptr + (entry + 1) * RECORD
        start = gl.load(record)
        length = gl.load(record + 1)
        row = gl.load(record + 2)
        k_start = gl.load(record + 3)
        k_length = gl.load(record + 4)
        sequence = gl.load(record + 5)
    else:
        sequence = entry // q_blocks
        block = entry % q_blocks
        if WINDOW != NO_WINDOW:
            block = (block + sequence) % q_blocks  # rows that see few keys are not always the same program's
        row = block * (ROWS * CONSUMERS)
        start = sequence * q_rows
        length = q_rows
        k_start = sequence * k_rows
        k_length = k_rows
    return head, sequence, start, length, row, k_start, k_length


@gluon.jit
def find_blocks(row, length, k_length, left, right, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr):
    """(the tile's first block of keys, how many, whether its rows see none). A tile without keys still has a block, so that every tile
    passes through the stream alike."""
    begin = k_length * 0
    end = k_length
    if WINDOW != NO_WINDOW:
        # Row i sees keys i + diagonal - left to i + diagonal + right.
        diagonal = k_length - length
        last_row = gl.minimum(row + ROWS * CONSUMERS, length) - 1
        end = gl.minimum(end, gl.maximum(last_row + diagonal + right + 1, 0))
        if WINDOW == BOTH:
            begin = gl.maximum(row + diagonal - left, 0)
    first = gl.minimum(begin, gl.maximum(k_length - 1, 0)) // BLOCK_N
    return first, gl.maximum(gl.cdiv(end, BLOCK_N) - first, 1), end <= begin


@gluon.jit
def send_queries(queries, empty, q_desc, start, length, row, column, taken, WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """Copy 64 rows to consumer WHICH, whose two slots alternate; `taken` tiles went there before."""
    slot = WHICH * 2 + (taken & 1)
    if taken >= 2:
        if CONSUMERS == 2:
            join(QUERIES_EMPTY + slot, ONE_AND_PRODUCER)
        else:
            mbarrier.wait(empty.index(slot), ((taken >> 1) & 1) ^ 1)
    queries.expect(slot)
    load_async(
        q_desc, [RAGGED, start + length, RAGGED - length + row, column], queries.full.index(slot), queries.memory.index(slot)
    )


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, queries, empty, keys, values, records_ptr, tiles, q_rows, k_rows, q_blocks, left, right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, STRIDE_Q: gl.constexpr, STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr,
    BLOCK_N: gl.constexpr, HAS_LIST: gl.constexpr, Q_SHARED: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    ALL: gl.constexpr = all_threads(CONSUMERS)
    STAGES: gl.constexpr = stages_of(CONSUMERS)
    VALUES_EMPTY: gl.constexpr = values_empty(CONSUMERS)
    index = 0  # of the block in the stream
    taken_0 = 0  # tiles sent to consumer 0, to consumer 1, and so on
    taken_1 = 0
    taken_2 = 0
    taken_3 = 0
    v_end = 0  # where the values of the block before lie
    v_row = 0
    v_column = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        head, _, start, length, row, k_start, k_length = find_tile(
            tile, records_ptr, q_rows, k_rows, q_blocks, HEADS, HAS_LIST, WINDOW, CONSUMERS
        )
        if Q_SHARED:
            start = 0
        column = head * STRIDE_Q
        send_queries(queries, empty, q_desc, start, length, row, column, taken_0, 0, CONSUMERS)
        taken_0 += 1  # noqa: SIM113
        if row + ROWS < length:
            send_queries(queries, empty, q_desc, start, length, row + ROWS, column, taken_1, 1, CONSUMERS)
            taken_1 += 1
        if CONSUMERS > 2 and row + 2 * ROWS < length:
            send_queries(queries, empty, q_desc, start, length, row + 2 * ROWS, column, taken_2, 2, CONSUMERS)
            taken_2 += 1
        if CONSUMERS > 3 and row + 3 * ROWS < length:
            send_queries(queries, empty, q_desc, start, length, row + 3 * ROWS, column, taken_3, 3, CONSUMERS)
            taken_3 += 1
        kv_head = head // GROUP
        first_block, blocks, _ = find_blocks(row, length, k_length, left, right, BLOCK_N, WINDOW, CONSUMERS)
        for block in range(blocks):
            stage = index & (STAGES - 1)
            k_row = RAGGED - k_length + (first_block + (blocks - 1 - block if WINDOW == RIGHT else block)) * BLOCK_N
            if index >= STAGES:
                join(KEYS_EMPTY + stage, ALL)
            keys.expect(stage)
            load_async(
                k_desc, [RAGGED, k_start + k_length, k_row, kv_head * STRIDE_K], keys.full.index(stage), keys.memory.index(stage)
            )
            if index >= STAGES:
                join(VALUES_EMPTY + stage, ALL)
            if index > 0:
                values.expect(stage)
                load_async(v_desc, [RAGGED, v_end, v_row, v_column], values.full.index(stage), values.memory.index(stage))
            else:
                mbarrier.arrive(values.full.index(stage))  # no block comes before the first
            v_end = k_start + k_length
            v_row = k_row
            v_column = kv_head * STRIDE_V
            index += 1
    if index > 0:
        stage = index & (STAGES - 1)
        if index >= STAGES:
            join(VALUES_EMPTY + stage, ALL)
        values.expect(stage)
        load_async(v_desc, [RAGGED, v_end, v_row, v_column], values.full.index(stage), values.memory.index(stage))


@gluon.jit
def rounded(activated, DTYPE: gl.constexpr):
    """The `finish` of activations that leave nothing to it."""
    return activated.to(DTYPE)


@gluon.jit
def step(
    q, p, accumulator, continued, keys, values, stage, phase, keys_left, from_key, to_key, shared, following, scale, head,
    activate: gl.constexpr, finish: gl.constexpr, BLOCK_N: gl.constexpr, EARLY: gl.constexpr, MASK_TAIL: gl.constexpr,
    WINDOW: gl.constexpr, WHICH: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """One block of the stream: its scores, and the product of the block before. Returns its P and the accumulator. Of the block's keys,
    `keys_left` are the sequence's, and a WINDOW lets the first row see `from_key` to `to_key`, each next row one further."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    ALL: gl.constexpr = all_threads(CONSUMERS)
    keys.wait_full(stage, phase)
    if CONSUMERS < 4 and shared:
        join(TURN + WHICH, TWO)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    s_token = warpgroup_mma(q, keys.tile(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    # Long since there. Waiting here rather than for keys and values at once is worth 1 to 4 %: products queue up one behind the other,
    # and a warp that has one more to issue than the queue takes stands in the way of the other consumers' instructions.
    values.wait_full(stage, phase)
    o_token = warpgroup_mma(p, values.tile(stage), accumulator, use_acc=continued, is_async=True)
    if CONSUMERS < 4 and shared:
        arrive(TURN + following, TWO)
    s = warpgroup_mma_wait(1, deps=[s_token])
    arrive(KEYS_EMPTY + stage, ALL)
    if EARLY and WINDOW == NO_WINDOW:
        divide(keys_left, -RAGGED)
    activated = activate(s, scale, head)  # [ROWS, BLOCK_N]
    if MASK_TAIL:
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        activated = gl.where((column < keys_left)[None, :], activated, 0.0)
    if WINDOW != NO_WINDOW:
        key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))[None, :]
        row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))[:, None]
        allowed = key <= row + to_key
        if WINDOW == BOTH:
            allowed = allowed & (key >= row + from_key)
        activated = gl.where(allowed, activated, 0.0)
    activated = pinned(activated)
    if EARLY and WINDOW == NO_WINDOW:
        divide(keys_left, 1 - RAGGED)
    accumulator = warpgroup_mma_wait(0, deps=[o_token])
    arrive(values_empty(CONSUMERS) + stage, ALL)
    # Not before the wait: until then the product reads the P before, and the new one would have to lie beside it.
    return gl.convert_layout(finish(activated, p.dtype), p.type.layout), accumulator


@gluon.jit
def last_product(p, accumulator, continued, values, stage, phase):
    """The product of a block that no other of mine follows."""
    values.wait_full(stage, phase)
    token = warpgroup_mma(p, values.tile(stage), accumulator, use_acc=continued, is_async=True)
    return warpgroup_mma_wait(0, deps=[token])


@gluon.jit
def store_tile(accumulator, factor, empty, staging, o_desc, end, row, column):
    """Round O and send it off: through shared memory, so that the copy engine writes whole rows and stops at the sequence's end."""
    result = accumulator * factor
    if empty:
        result = gl.zeros_like(result)  # no keys: zeros, whatever the queries hold
    store_wait(0)  # the tile before has left the staging buffer
    partition_barrier()
    staging.reshape([staging.shape[2], staging.shape[3]]).store(result.to(o_desc.dtype))
    fence_async_shared()
    partition_barrier()
    store_async(o_desc, [RAGGED, end, row, column], staging)


@gluon.jit
def consumer(
    o_desc, queries, empty, keys, values, staging, records_ptr, out_scale_ptr, tiles, q_rows, k_rows, q_blocks, left, right,
    scale, out_scale,
    activate: gl.constexpr, finish: gl.constexpr, activate_rest: gl.constexpr, finish_rest: gl.constexpr, factor: gl.constexpr,
    HEADS: gl.constexpr, STRIDE_O: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, HAS_LIST: gl.constexpr,
    SCALE_PER_SEQUENCE: gl.constexpr, EARLY: gl.constexpr, MASK_TAIL: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr,
    ONE_LOOP: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    gl.static_assert(not ONE_LOOP or WINDOW == NO_WINDOW)  # RIGHT masks the first step alone
    ALL: gl.constexpr = all_threads(CONSUMERS)
    STAGES: gl.constexpr = stages_of(CONSUMERS)
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    out = staging.index(WHICH)

    accumulator = gl.zeros([ROWS, D], gl.float32, o_layout)
    p = gl.zeros([ROWS, BLOCK_N], o_desc.dtype, p_layout)
    stage = 0  # of the stream's next block, and its phase
    phase = 0
    taken = 0  # tiles that had rows for me
    pending = False  # whether p is the last block of a tile that is not stored yet
    continued = False  # whether it adds to the accumulator, or starts it
    last_end = 0  # where that tile goes, and what is to be done to it
    last_row = 0
    last_column = 0
    last_factor = scale
    last_empty = False
    if CONSUMERS < 4 and WHICH == 1:
        arrive(TURN, TWO)  # consumer 0 has the first turn

    first = gl.program_id(0)
    programs = gl.num_programs(0)
    head, sequence, start, length, row, _, k_length = find_tile(
        gl.minimum(first, gl.maximum(tiles - 1, 0)), records_ptr, q_rows, k_rows, q_blocks, HEADS, HAS_LIST, WINDOW, CONSUMERS
    )
    for tile in range(first, tiles, programs):
        # Looked up a tile ahead: a record comes from L2, several hundred cycles away.
        next_head, next_sequence, next_start, next_length, next_row, _, next_k_length = find_tile(
            gl.minimum(tile + programs, tiles - 1), records_ptr, q_rows, k_rows, q_blocks, HEADS, HAS_LIST, WINDOW, CONSUMERS
        )
        first_block, blocks, none = find_blocks(row, length, k_length, left, right, BLOCK_N, WINDOW, CONSUMERS)
        # Whether I share this tile: else consumer 0 has it to itself, and another has no rows in it. One condition for both, lest the
        # assembler find a branch around the turns where there is none, and wait after every product.
        shared = row + (WHICH if WHICH > 0 else 1) * ROWS < length
        following = (WHICH + 1) % CONSUMERS  # the consumer whose turn comes after mine
        if CONSUMERS == 3 and WHICH == 1:
            following = gl.where(row + 2 * ROWS < length, 2, 0)
        if WHICH > 0 and not shared:
            # Nothing of mine: finish what is pending and let the blocks pass.
            if pending:
                accumulator = last_product(p, accumulator, continued, values, stage, phase)
            for _ in range(blocks):
                keys.wait_full(stage, phase)
                values.wait_full(stage, phase)
                arrive(KEYS_EMPTY + stage, ALL)
                arrive(values_empty(CONSUMERS) + stage, ALL)
                stage, phase = advance(stage, phase, STAGES)
            if pending:
                store_tile(accumulator, last_factor, last_empty, out, o_desc, last_end, last_row, last_column)
            pending = False
        else:
            slot = WHICH * 2 + (taken & 1)
            queries.wait_full(slot, (taken >> 1) & 1)
            taken += 1
            q = queries.tile(slot)
            # Of the first block, and of my first row there; each next block has `between` less.
            opening = first_block + (blocks - 1 if WINDOW == RIGHT else 0)
            between = -BLOCK_N if WINDOW == RIGHT else BLOCK_N
            keys_left = k_length - opening * BLOCK_N
            own = keys_left - length + row + WHICH * ROWS
            from_key = own - left
            to_key = own + right
            # The tile's first block completes the tile before. Without one p is stale, and nothing is made of its product.
            if not ONE_LOOP:
                p, accumulator = step(
                    q, p, accumulator, continued, keys, values, stage, phase, keys_left, from_key, to_key, shared, following, scale, head,
                    activate, finish, BLOCK_N, EARLY, MASK_TAIL, WINDOW, WHICH, CONSUMERS,
                )  # fmt: skip
                if pending:
                    store_tile(accumulator, last_factor, last_empty, out, o_desc, last_end, last_row, last_column)
                stage, phase = advance(stage, phase, STAGES)
            for block in range(0 if ONE_LOOP else 1, blocks):
                before = block * between
                adds = block > 1
                if ONE_LOOP:
                    adds = adds | (continued & (block == 0))
                p, accumulator = step(
                    q, p, accumulator, adds, keys, values, stage, phase, keys_left - before, from_key - before, to_key - before,
                    shared, following, scale, head,
                    activate_rest, finish_rest, BLOCK_N, EARLY, MASK_TAIL, BOTH if WINDOW == BOTH else NO_WINDOW, WHICH, CONSUMERS,
                )  # fmt: skip
                if ONE_LOOP and pending & (block == 0):
                    store_tile(accumulator, last_factor, last_empty, out, o_desc, last_end, last_row, last_column)
                stage, phase = advance(stage, phase, STAGES)
            if CONSUMERS == 2:
                arrive(QUERIES_EMPTY + slot, ONE_AND_PRODUCER)
            else:
                mbarrier.arrive(empty.index(slot))

            pending = True
            continued = blocks > 1
            last_end = start + length
            last_row = RAGGED - length + row + WHICH * ROWS
            last_column = head * STRIDE_O
            last_empty = none
            last_factor = out_scale * factor(scale, head)
            if SCALE_PER_SEQUENCE:
                last_factor *= gl.load(out_scale_ptr + sequence, mask=k_length > 0, other=1.0)
        head = next_head
        sequence = next_sequence
        start = next_start
        length = next_length
        row = next_row
        k_length = next_k_length
    if pending:
        accumulator = last_product(p, accumulator, continued, values, stage, phase)
        store_tile(accumulator, last_factor, last_empty, out, o_desc, last_end, last_row, last_column)
    store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "records_ptr",
        "out_scale_ptr",
        "tiles",
        "q_rows",
        "k_rows",
        "q_blocks",
        "left",
        "right",
        "scale",
        "out_scale",
    ]
)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, records_ptr, out_scale_ptr, tiles, q_rows, k_rows, q_blocks, left, right, scale, out_scale,
    activate: gl.constexpr, finish: gl.constexpr, activate_rest: gl.constexpr, finish_rest: gl.constexpr, factor: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr,
    STRIDE_Q: gl.constexpr, STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, STRIDE_O: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, HAS_LIST: gl.constexpr, Q_SHARED: gl.constexpr, SCALE_PER_SEQUENCE: gl.constexpr,
    EARLY: gl.constexpr, MASK_TAIL: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr, ONE_LOOP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = q_desc.layout
    k_layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    o_layout: gl.constexpr = o_desc.layout
    if HAS_LIST:
        tiles = gl.load(records_ptr) * HEADS
    queries = new_buffers(dtype, 2 * CONSUMERS, ROWS, D, q_layout)  # two slots a consumer
    empty = queries.full  # of two consumers, who do not look at it
    if CONSUMERS > 2:
        empty = new_barriers(2 * CONSUMERS)
    keys = new_buffers(dtype, stages_of(CONSUMERS), BLOCK_N, D, k_layout)
    values = new_buffers(dtype, stages_of(CONSUMERS), BLOCK_N, D, v_layout)
    staging = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], o_layout)
    gl.warp_specialize(
        [
            (consumer, (
                o_desc, queries, empty, keys, values, staging, records_ptr, out_scale_ptr, tiles, q_rows, k_rows, q_blocks,
                left, right, scale, out_scale, activate, finish, activate_rest, finish_rest, factor, HEADS, STRIDE_O, BLOCK_N, D,
                HAS_LIST, SCALE_PER_SEQUENCE, EARLY, MASK_TAIL, WINDOW, CONSUMERS, ONE_LOOP, which,
            )) if which < CONSUMERS else
            (producer, (
                q_desc, k_desc, v_desc, queries, empty, keys, values, records_ptr, tiles, q_rows, k_rows, q_blocks, left, right,
                HEADS, GROUP, STRIDE_Q, STRIDE_K, STRIDE_V, BLOCK_N, HAS_LIST, Q_SHARED, WINDOW, CONSUMERS,
            ))
            for which in ((0, 1, 2) if CONSUMERS == 2 else (0, 1, 2, 3) if CONSUMERS == 3 else (0, 1, 2, 3, 4))
        ],
        [4, 1] if CONSUMERS == 2 else [4, 4, 1] if CONSUMERS == 3 else [4, 4, 4, 1],
        # Registers of a thread: 2 x 128 x 240 + 128 x 24 of 65,536, 3 x 128 x 160 + 128 x 24, or 4 x 128 x 112 + 128 x 24.
        [240, 24] if CONSUMERS == 2 else [160, 160, 24] if CONSUMERS == 3 else [112, 112, 112, 24],
    )  # fmt: skip

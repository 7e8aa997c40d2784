"""Which tiles of keys a program of the backward takes, the steps of each, and the note of it that its consumers read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS: gl.constexpr = gl.constexpr(64)  # of a consumer
TILE: gl.constexpr = gl.constexpr(128)  # keys of a tile
PART: gl.constexpr = gl.constexpr(64)  # rows of what a consumer has of a step's dQ
RECORD: gl.constexpr = gl.constexpr(8)  # numbers of a tile's record (schedule.records)


# What the producer tells the consumers of a tile, in shared memory. It looks it up while they are at the tile before; a record comes from
# L2, several hundred cycles away, and they have no registers to spare for what they need at a tile's end alone.
STEPS: gl.constexpr = gl.constexpr(0)
LAST_FROM: gl.constexpr = gl.constexpr(1)  # see find_relay; -1 where every step's dQ is rounded at once. CAUSAL: find_causal's code
KEY_END: gl.constexpr = gl.constexpr(2)  # the sequence's end among all keys,
KEY_ROW: gl.constexpr = gl.constexpr(3)  # the tile's first key, as a row of a ragged descriptor,
HEAD: gl.constexpr = gl.constexpr(4)  # and its head
WEIGHT: gl.constexpr = gl.constexpr(5)  # of f', so that dS has it; a float's bits, as the next
DV_FACTOR: gl.constexpr = gl.constexpr(6)
QUERIES: gl.constexpr = gl.constexpr(7)
START: gl.constexpr = gl.constexpr(8)  # the tile's first step
NOTHING: gl.constexpr = gl.constexpr(9)  # 0, which the compiler does not know
FIELDS: gl.constexpr = gl.constexpr(16)


@gluon.jit
def read(note, FIELD: gl.constexpr):
    """One number of a note in shared memory: every thread reads it."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    numbers = note.load(layout)
    return gl.sum(gl.where(gl.arange(0, FIELDS, layout) == FIELD, numbers, 0), 0)


@gluon.jit
def read_float(note, FIELD: gl.constexpr):
    return read(note, FIELD).to(gl.float32, bitcast=True)


@gluon.jit
def lay_out(result, factor, note, memory):
    """Round a tile's dK or dV, with its factor unless None, into shared memory. No queries: zeros, whatever the keys hold. A branch,
    since a select of rounded values, which the compiler makes of one before, takes them apart and costs three instructions each."""
    if read(note, QUERIES) == 0:
        memory.store(gl.zeros_like(result).to(memory.dtype))
    else:
        if factor is not None:
            result = result * factor
        memory.store(result.to(memory.dtype))


@gluon.jit
def write_note(
    note, steps, last_from, k_end, k_row, head, weight, dv_factor, q_length, start, WARPS: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    field = gl.arange(0, FIELDS, layout)
    numbers = gl.where(field == STEPS, steps, 0)
    numbers = gl.where(field == LAST_FROM, last_from, numbers)
    numbers = gl.where(field == KEY_END, k_end, numbers)
    numbers = gl.where(field == KEY_ROW, k_row, numbers)
    numbers = gl.where(field == HEAD, head, numbers)
    numbers = gl.where(field == WEIGHT, weight.to(gl.int32, bitcast=True), numbers)
    numbers = gl.where(field == DV_FACTOR, dv_factor.to(gl.int32, bitcast=True), numbers)
    numbers = gl.where(field == QUERIES, q_length, numbers)
    numbers = gl.where(field == START, start, numbers)
    note.store(numbers)


@gluon.jit
def tile_count(tiles, PAIRED: gl.constexpr):
    """Of this program."""
    if PAIRED:
        return 2 * gl.cdiv(tiles // 2 - gl.program_id(0), gl.num_programs(0))
    else:
        return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def find_tile(
    taken, records_ptr, q_rows, k_rows, k_tiles, rotating,
    KV_HEADS: gl.constexpr, HAS_LIST: gl.constexpr, PAIRED: gl.constexpr, TOGETHER: gl.constexpr, CAUSAL: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Of the program's tile number `taken`: (key head, sequence, its first key, its keys, the tile's first among them, its first query,
    its queries, its tiles). The heads of a tile follow one another in the numbers, or, TOGETHER, the tiles of a head.

    Two tiles with one number are PAIRED. Of CAUSAL ones, a sequence's number p has tile p and then tile p from the end, which together have
    as many steps as any other two: so programs are equally busy. The tile in the middle is followed by one of nothing."""
    number = taken // 2 if PAIRED else taken
    number = gl.program_id(0) + number * gl.num_programs(0)
    head = number % KV_HEADS
    entry = number // KV_HEADS
    if TOGETHER:
        head = number // k_tiles % KV_HEADS
        entry = number // (k_tiles * KV_HEADS) * k_tiles + number % k_tiles
    if PAIRED and not CAUSAL:
        entry = entry * 2 + taken % 2
    if HAS_LIST:
        record = records_ptr + (entry + 1) * RECORD
        k_start = gl.load(record)
        k_length = gl.load(record + 1)
        row = gl.load(record + 2)
        q_start = gl.load(record + 3)
        q_length = gl.load(record + 4)
        sequence = gl.load(record + 5)
        count = gl.load(record + 6)
    else:
        entries = gl.cdiv(k_tiles, 2) if PAIRED and CAUSAL else k_tiles
        sequence = entry // entries
        row = (entry % entries) * TILE
        if PAIRED and CAUSAL:
            row *= 2
        elif CAUSAL:
            turn = sequence  # keys that few queries see are not always the same program's
            if ORDERED:  # but tiles that wait for those before them in the list must come after them (relay.find_causal)
                turn = gl.where(k_tiles * (1 if TOGETHER else KV_HEADS) <= rotating, sequence, 0)
            row = ((entry + turn) % k_tiles) * TILE
        k_start = sequence * k_rows
        k_length = k_rows
        q_start = sequence * q_rows
        q_length = q_rows
        count = entries
    if PAIRED and CAUSAL:
        # As many tiles as the list has entries for: garbage offsets may claim more.
        count = gl.minimum(gl.cdiv(k_length, TILE), 2 * count)
        front = row // (2 * TILE)
        back = count - 1 - front
        row = gl.where(taken % 2 == 0, front, back) * TILE
        if (taken % 2 == 1) & (front == back):
            row = row * 0
            k_length = k_length * 0
            q_length = q_length * 0
    return head, sequence, k_start, k_length, row, q_start, q_length, count


@gluon.jit
def block_count(q_length, ROWS: gl.constexpr):
    """Steps for one query head. Keys without queries still have a step, of zeros, so that every tile passes through the stream alike."""
    return gl.maximum(gl.cdiv(q_length, ROWS), 1)


@gluon.jit
def turned(step, start, steps):
    """The step of the sequence that is the tile's own `step`."""
    here = step + start
    return gl.where(here >= steps, here - steps, here)


@gluon.jit
def split(step, blocks, GROUP: gl.constexpr):
    """(query head of the group, block of its queries) of a sequence's step."""
    if GROUP == 1:
        return step * 0, step
    else:
        return step // blocks, step % blocks

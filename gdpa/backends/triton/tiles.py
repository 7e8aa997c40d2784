"""What the kernels share: where a sequence lies, how a tile of rows is read and written, which blocks a window allows.

Rows are addressed as sequence * stride_b * 8 + (start + row) * stride_t + head * stride_h + column: packed and shared sides have
stride_b = 0, dense ones start = 0. Offsets to a tile are int64 scalars, inside a tile int32, so tensors may pass 2^31 elements.

Row and head strides are compile-time numbers: a thread then reaches all its rows of a tile from one address register, where run-time
strides took one each (243 registers against 191 in the forward's 64x64 tile). Sequence strides come in units of 8 elements, and every
stride is a multiple of 8 (launch.py copies what is not), so that the compiler knows each row to start at 16 bytes and copies it
asynchronously; Triton 3.6.0 gave wrong results where it could know that of neither k nor v (D = 40, Dv = 24).
"""

import triton
import triton.language as tl

# A ragged descriptor's third dimension is 2^30 rows long, and a sequence's end is laid on its end (see gpu.ragged_geometry).
RAGGED: tl.constexpr = tl.constexpr(0x40000000)


@triton.jit
def find_tile(tiles_ptr, tile, blocks, HAS_LIST: tl.constexpr):
    """The (sequence, block) of a tile, from the list or, with both sides dense, by division."""
    if HAS_LIST:
        sequence = tl.load(tiles_ptr + 2 * tile)
        block = tl.load(tiles_ptr + 2 * tile + 1)
    else:
        sequence = tile // blocks
        block = tile % blocks
    return sequence, block


@triton.jit
def find_rows(bounds_ptr, sequence, rows, PACKED: tl.constexpr):
    """The (start, length) of a sequence's rows."""
    if PACKED:
        start = tl.load(bounds_ptr + 2 * sequence)
        length = tl.load(bounds_ptr + 2 * sequence + 1)
    else:
        start = 0
        length = rows
    return start, length


@triton.jit
def tile_origin(sequence, start, head, stride_b, stride_t: tl.constexpr, stride_h: tl.constexpr):
    """Where row 0 of a sequence lies, for one head: elements from the tensor's first."""
    return tl.cast(sequence, tl.int64) * 8 * stride_b + tl.cast(start, tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h


@triton.jit
def load_tile(
    source,
    sequence,
    start,
    head,
    first_row,
    length,
    rows,
    stride_b,
    stride_t: tl.constexpr,
    stride_h: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Rows first_row .. first_row + ROWS of a sequence, [ROWS, WIDTH]. Columns past COLUMNS and rows past `length` are zeros and are
    not read, so a neighbour's NaN stays there; without TAIL the caller knows that no row passes `length`.

    MAPPED: `source` is a ragged descriptor (see gpu.ragged_geometry) and the copy engine does the addressing and the bounds.
    A descriptor has no sequence stride, so a dense tensor's sequences are `rows` apart.
    """
    if MAPPED:
        start = tl.where(stride_b == 0, start, sequence * rows)
        tile = source.load([RAGGED, start + length, RAGGED - length + first_row, head * stride_h])
        return tile.reshape([ROWS, WIDTH])
    else:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        origin = tile_origin(sequence, start + first_row, head, stride_b, stride_t, stride_h)
        pointers = source + origin + (row[:, None] * stride_t + column[None, :])
        if TAIL:
            inside = (first_row + row < length)[:, None]
            if COLUMNS != WIDTH:
                inside = inside & (column < COLUMNS)[None, :]
            return tl.load(pointers, mask=inside, other=0.0)
        elif COLUMNS != WIDTH:
            return tl.load(pointers, mask=(column < COLUMNS)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_tile(
    target,
    values,
    sequence,
    start,
    head,
    first_row,
    length,
    stride_b,
    stride_t: tl.constexpr,
    stride_h: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write [ROWS, WIDTH] values, leaving out rows past `length` and columns past COLUMNS."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    origin = tile_origin(sequence, start + first_row, head, stride_b, stride_t, stride_h)
    pointers = target + origin + (row[:, None] * stride_t + column[None, :])
    inside = (first_row + row < length)[:, None]
    if COLUMNS != WIDTH:
        inside = inside & (column < COLUMNS)[None, :]
    tl.store(pointers, rounded(values, target.dtype.element_ty, UPCAST), mask=inside)


@triton.jit
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 x in another dtype, to nearest even. The interpreter cuts bf16 off instead, so there it is rounded by hand."""
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def product(a, b, accumulator, UPCAST: tl.constexpr):
    """accumulator + a @ b in fp32; fp32 operands in ieee precision, never TF32.

    UPCAST serves the interpreter, whose dot on 16-bit operands is wrong: a wider copy of rounded operands is the same product.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if a.dtype == tl.float32:
        # Each block is summed by itself, then added: one chain of sums over 1000 keys errs three times as much. Written as a
        # subtraction, since Triton folds an addition into the dot's own chain.
        return accumulator - tl.dot(-a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, accumulator)


@triton.jit
def settle(x):
    """x itself, through an empty instruction that the compiler cannot look into: the product that makes x is finished before it.

    Triton lets an iteration's last product run on into the next iteration, and ptxas, seeing registers of a running product start out
    as constants, then runs every product of the loop one by one (as many WARPGROUP.DEPBAR as HGMMA in the machine code). Two ways out
    on Hopper, SETTLE == 1: finish the product in its own iteration; SETTLE == 2: hide that the accumulator starts as zeros, and let
    it run on. Which is faster depends on the registers it takes; configs.py says.
    """
    return tl.inline_asm_elementwise("// settled", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def new_accumulator(ROWS: tl.constexpr, WIDTH: tl.constexpr, SETTLE: tl.constexpr):
    zeros = tl.zeros([ROWS, WIDTH], tl.float32)
    if SETTLE == 2:
        zeros = settle(zeros)
    return zeros


@triton.jit
def window_blocks(first, last, diagonal, length, left, right, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the other side's rows the rows first..last (inclusive) of one side may meet, as multiples of BLOCK:

    begin .. full_begin are blocks partly allowed, full_begin .. full_end wholly, full_end .. end partly (or cut by `length`).
    Row i meets rows i + diagonal - left .. i + diagonal + right; -1 is unbounded.
    """
    begin = 0
    end = length
    full_begin = 0
    full_end = length // BLOCK * BLOCK
    if WINDOW:
        if left >= 0:
            begin = tl.maximum(first + diagonal - left, 0) // BLOCK * BLOCK
            full_begin = (tl.maximum(last + diagonal - left, 0) + BLOCK - 1) // BLOCK * BLOCK
        if right >= 0:
            end = tl.maximum(tl.minimum(last + diagonal + right + 1, length), 0)
            full_end = tl.minimum(full_end, tl.maximum(first + diagonal + right + 1, 0) // BLOCK * BLOCK)
        full_begin = tl.maximum(tl.minimum(full_begin, end), begin)
        # Rounded up: `end` itself may lie inside a block.
        full_begin = (full_begin + BLOCK - 1) // BLOCK * BLOCK
        full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def allowed_pairs(
    query,
    key,
    q_len,
    k_len,
    left,
    right,
    WINDOW: tl.constexpr,
):
    """The mask M of a tile from its query and key positions, broadcast against each other."""
    allowed = (query < q_len) & (key < k_len)
    if WINDOW:
        diagonal = query + (k_len - q_len)
        if left >= 0:
            allowed = allowed & (key >= diagonal - left)
        if right >= 0:
            allowed = allowed & (key <= diagonal + right)
    return allowed

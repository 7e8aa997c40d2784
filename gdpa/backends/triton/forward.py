"""The portable forward kernel.

    S = scale * Q K^T      P = where(M, f(S), 0)      O = out_scale * P V

One program owns BLOCK_M query rows of one (sequence, head) and walks over that sequence's keys, BLOCK_N at a time. There are no row
statistics: each block's contribution is added and forgotten. S and O are fp32; P is rounded to the inputs' dtype for the second product.

What the kernel is compiled for, here and in the backward (launch.py decides it):

    WIDTH, WIDTH_V   D and Dv as the next power of two; columns past them are zeros
    MAPPED           tiles come through Hopper's copy engine, which stops at a sequence's end; else threads load them under masks
    TAIL_SAFE        f(0) and f'(0) are finite, so zero rows past a sequence's end need no mask
    SETTLE           1 or 2, on Hopper: how ptxas is kept from running a loop's products one by one (tiles.settle)
    UPCAST           16-bit operands are widened before a product, whose bf16 ones Triton's interpreter gets wrong
"""

import triton
import triton.language as tl

from gdpa.backends.triton.tiles import (
    allowed_pairs,
    find_rows,
    find_tile,
    load_tile,
    new_accumulator,
    product,
    rounded,
    settle,
    store_tile,
    window_blocks,
)


@triton.jit
def attend_blocks(
    accumulator, q, k_source, v_source, stride_kb, stride_kt: tl.constexpr, stride_kh: tl.constexpr, stride_vb, stride_vt:
    tl.constexpr, stride_vh: tl.constexpr,
    sequence, k_start, k_len, k_rows, kv_head, begin, end, first_query, q_len, head, scale, left, right,
    activate: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr, MAPPED: tl.constexpr,
    SETTLE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """accumulator + P V over the keys begin .. end. TAIL: the last block may pass k_len. MASK: pairs are masked one by one."""
    for first_key in tl.range(begin, end, BLOCK_N):
        k = load_tile(
            k_source, sequence, k_start, kv_head, first_key, k_len, k_rows, stride_kb, stride_kt, stride_kh,
            BLOCK_N, D, WIDTH, TAIL,
            MAPPED,
        )  # fmt: skip
        s = product(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)  # [BLOCK_M, BLOCK_N]
        p = activate(s * scale, head)
        if MASK:
            query = first_query + tl.arange(0, BLOCK_M)[:, None]
            key = first_key + tl.arange(0, BLOCK_N)[None, :]
            p = tl.where(allowed_pairs(query, key, q_len, k_len, left, right, WINDOW), p, 0.0)
        v = load_tile(
            v_source, sequence, k_start, kv_head, first_key, k_len, k_rows, stride_vb, stride_vt, stride_vh, BLOCK_N, DV, WIDTH_V,
            TAIL, MAPPED,
        )  # fmt: skip
        accumulator = product(rounded(p, v.dtype, UPCAST), v, accumulator, UPCAST)
        if SETTLE == 1:
            accumulator = settle(accumulator)
    return accumulator


@triton.jit(do_not_specialize=["batch", "q_rows", "k_rows", "q_blocks", "left", "right"])
def forward_kernel(
    q_source, k_source, v_source, out_ptr, tiles_ptr, q_bounds_ptr, k_bounds_ptr, out_scale_ptr,
    stride_qb, stride_qt: tl.constexpr, stride_qh: tl.constexpr, stride_kb, stride_kt: tl.constexpr, stride_kh: tl.constexpr,
    stride_vb, stride_vt: tl.constexpr, stride_vh: tl.constexpr, stride_ob, stride_ot: tl.constexpr, stride_oh: tl.constexpr,
    batch, heads, q_rows, k_rows, q_blocks, scale, out_scale, left, right,
    activate: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LIST: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr,
    SCALE_PER_SEQUENCE: tl.constexpr, WINDOW: tl.constexpr, TAIL_SAFE: tl.constexpr, MAPPED: tl.constexpr, SETTLE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    # Heads run fastest: the programs in flight then share whole rows of q, k and v, and a sequence's keys stay in L2.
    head = tl.program_id(0) % heads
    kv_head = head // GROUP
    sequence, block = find_tile(tiles_ptr, tl.program_id(0) // heads, q_blocks, HAS_LIST)
    if sequence < 0:
        return
    q_start, q_len = find_rows(q_bounds_ptr, sequence, q_rows, Q_PACKED)
    k_start, k_len = find_rows(k_bounds_ptr, sequence, k_rows, K_PACKED)
    k_len = tl.where(sequence < batch, k_len, 0)  # the uncovered tail attends to nothing
    first_query = block * BLOCK_M
    last_query = tl.minimum(first_query + BLOCK_M, q_len) - 1
    begin, full_begin, full_end, end = window_blocks(first_query, last_query, k_len - q_len, k_len, left, right, BLOCK_N, WINDOW)
    if MAPPED and TAIL_SAFE and not WINDOW:
        full_end = end  # the copy engine fills with zeros past the end, at no cost

    q = load_tile(
        q_source, sequence, q_start, head, first_query, q_len, q_rows, stride_qb, stride_qt, stride_qh, BLOCK_M, D, WIDTH, True, MAPPED
    )  # fmt: skip
    accumulator = new_accumulator(BLOCK_M, WIDTH_V, SETTLE)
    if WINDOW:
        accumulator = attend_blocks(
            accumulator, q, k_source, v_source, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
            sequence, k_start, k_len, k_rows, kv_head, begin, tl.minimum(full_begin, end), first_query, q_len, head,
            scale, left, right,
            activate, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, True, True, MAPPED, SETTLE, UPCAST,
        )  # fmt: skip
    accumulator = attend_blocks(
        accumulator, q, k_source, v_source, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
        sequence, k_start, k_len, k_rows, kv_head, full_begin, full_end, first_query, q_len, head, scale, left, right,
        activate, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, False, False, MAPPED, SETTLE, UPCAST,
    )  # fmt: skip
    if WINDOW or not (MAPPED and TAIL_SAFE):
        # Zeros stand in for keys past the end, and zero rows of V cancel f(0) where that is finite: then no pair needs a mask.
        accumulator = attend_blocks(
            accumulator, q, k_source, v_source, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
            sequence, k_start, k_len, k_rows, kv_head, full_end, end, first_query, q_len, head, scale, left, right,
            activate, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, True, WINDOW or not TAIL_SAFE, MAPPED, SETTLE, UPCAST,
        )  # fmt: skip

    if SCALE_PER_SEQUENCE:
        out_scale = tl.load(out_scale_ptr + sequence, mask=k_len > 0, other=1.0)  # no keys: zeros, though 1 / length is inf
    store_tile(
        out_ptr, accumulator * out_scale, sequence, q_start, head, first_query, q_len, stride_ob, stride_ot, stride_oh, BLOCK_M, DV,
        WIDTH_V, UPCAST,
    )  # fmt: skip

"""The portable backward: two kernels without atomics, so that it is bitwise deterministic.

    dV = out_scale * P^T dO      dP = out_scale * dO V^T      dS = where(M, f'(S) * dP, 0)
    dQ = scale * dS K            dK = scale * dS^T Q

`key_gradient_kernel` owns BLOCK_N keys of one (sequence, key head) and walks over the queries: S, dP, dV, dK, 4 products.
`query_gradient_kernel` owns BLOCK_M queries of one (sequence, head) and walks over the keys: S, dP, dQ, 3 products.
Forming S and dP twice costs 7 products where one kernel needs 5, but nothing is reduced across programs. One kernel with 5 products
whose programs own a whole (sequence, head) and keep dQ's sums in an fp32 buffer ran at half the speed (209 TFLOP/s against 377 at 2048
on an H200): dK, dV and dQ together do not fit the registers.

out_scale and scale multiply the finished sums: dP and dS are formed without them (but for fp16's range, see `split_scale`), and so are
factors that all of f or f' share (`score_gradients`). S, dP and the sums are fp32; P and dS are rounded to the inputs' dtype for the
products they enter.
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
def split_scale(out_scale, dtype: tl.constexpr):
    """(weight of dS, factor of the finished sums). fp16 would overflow without out_scale in dS: 1 / length under a loss scaler."""
    if dtype == tl.float16:
        return out_scale, 1.0
    else:
        return 1.0, out_scale


@triton.jit
def score_gradients(s, dp, scale, weight, head, activate_pair: tl.constexpr, SLOPE: tl.constexpr):
    """(P, dS) of raw scores and dP, dS times `weight`; each lacks a factor (`folded_factors`) that the finished sums are multiplied with.

    SLOPE says how `activate_pair` gives f': "plain" of scaled scores, "weighted" times the weight, and, for weights of 1, "folded" but
    for its factor or "lifted", without a 1 that the last step adds (gdpa/lifting.py).
    """
    if SLOPE == "plain":
        p, slope = activate_pair(s * scale, head)
        return p, slope * dp * weight
    elif SLOPE == "weighted":
        p, slope = activate_pair(s, scale, weight, head)
        return p, slope * dp
    else:
        p, slope = activate_pair(s, scale, head)
        if SLOPE == "lifted":
            return p, slope * dp + dp
        else:
            return p, slope * dp


@triton.jit
def folded_factors(scale, head, pair_factors: tl.constexpr, SLOPE: tl.constexpr):
    if SLOPE == "plain":
        return 1.0, 1.0
    elif SLOPE == "weighted":
        return pair_factors(scale, head), 1.0
    else:
        return pair_factors(scale, head)


@triton.jit
def gather_key_gradients(
    dk, dv, k, v, q_source, d_out_source, stride_qb, stride_qt: tl.constexpr, stride_qh: tl.constexpr, stride_db, stride_dt:
    tl.constexpr, stride_dh: tl.constexpr,
    sequence, q_start, q_len, q_rows, head, begin, end, first_key, k_len, scale, weight, left, right,
    activate_pair: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr,
    MAPPED: tl.constexpr, SETTLE: tl.constexpr, UPCAST: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key block (both without their scales) over the queries begin .. end; dS is multiplied by `weight`."""
    for first_query in tl.range(begin, end, BLOCK_M):
        q = load_tile(
            q_source, sequence, q_start, head, first_query, q_len, q_rows, stride_qb, stride_qt, stride_qh, BLOCK_M, D, WIDTH, TAIL,
            MAPPED,
        )  # fmt: skip
        d_out = load_tile(
            d_out_source, sequence, q_start, head, first_query, q_len, q_rows, stride_db, stride_dt, stride_dh,
            BLOCK_M, DV, WIDTH_V,
            TAIL, MAPPED,
        )  # fmt: skip
        # Transposed, [BLOCK_N, BLOCK_M]: P^T and dS^T are then left operands as they stand, in registers.
        s = product(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), UPCAST)
        dp = product(v, tl.trans(d_out), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), UPCAST)
        p, ds = score_gradients(s, dp, scale, weight, head, activate_pair, SLOPE)
        if MASK:
            query = first_query + tl.arange(0, BLOCK_M)[None, :]
            key = first_key + tl.arange(0, BLOCK_N)[:, None]
            allowed = allowed_pairs(query, key, q_len, k_len, left, right, WINDOW)
            p = tl.where(allowed, p, 0.0)
            ds = tl.where(allowed, ds, 0.0)
        dv = product(rounded(p, k.dtype, UPCAST), d_out, dv, UPCAST)
        dk = product(rounded(ds, k.dtype, UPCAST), q, dk, UPCAST)
        if SETTLE == 1:
            dv = settle(dv)
            dk = settle(dk)
    return dk, dv


@triton.jit(do_not_specialize=["batch", "q_rows", "k_rows", "k_blocks", "left", "right"])
def key_gradient_kernel(
    q_source, k_source, v_source, d_out_source, dk_ptr, dv_ptr, tiles_ptr, q_bounds_ptr, k_bounds_ptr, out_scale_ptr,
    stride_qb, stride_qt: tl.constexpr, stride_qh: tl.constexpr, stride_kb, stride_kt: tl.constexpr, stride_kh: tl.constexpr,
    stride_vb, stride_vt: tl.constexpr, stride_vh: tl.constexpr, stride_db, stride_dt: tl.constexpr, stride_dh: tl.constexpr,
    stride_dkb, stride_dkt: tl.constexpr, stride_dkh: tl.constexpr, stride_dvb, stride_dvt: tl.constexpr, stride_dvh: tl.constexpr,
    batch, kv_heads, q_rows, k_rows, k_blocks, scale, out_scale, left, right,
    activate_pair: tl.constexpr, pair_factors: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LIST: tl.constexpr,
    Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr, SCALE_PER_SEQUENCE: tl.constexpr, WINDOW: tl.constexpr,
    TAIL_SAFE: tl.constexpr, MAPPED: tl.constexpr, SETTLE: tl.constexpr, UPCAST: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % kv_heads
    sequence, block = find_tile(tiles_ptr, tl.program_id(0) // kv_heads, k_blocks, HAS_LIST)
    if sequence < 0:
        return
    k_start, k_len = find_rows(k_bounds_ptr, sequence, k_rows, K_PACKED)
    q_start, q_len = find_rows(q_bounds_ptr, sequence, q_rows, Q_PACKED)
    q_len = tl.where(sequence < batch, q_len, 0)  # no query attends to the uncovered tail
    first_key = block * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, k_len) - 1
    # Seen from the keys the window is mirrored: its left side bounds the queries above, its right side those below.
    begin, full_begin, full_end, end = window_blocks(first_key, last_key, q_len - k_len, q_len, right, left, BLOCK_M, WINDOW)
    if MAPPED and TAIL_SAFE and not WINDOW:
        full_end = end  # the copy engine fills with zeros past the end, at no cost

    k = load_tile(
        k_source, sequence, k_start, kv_head, first_key, k_len, k_rows, stride_kb, stride_kt, stride_kh, BLOCK_N, D, WIDTH, True, MAPPED
    )  # fmt: skip
    v = load_tile(
        v_source, sequence, k_start, kv_head, first_key, k_len, k_rows, stride_vb, stride_vt, stride_vh, BLOCK_N, DV, WIDTH_V, True,
        MAPPED,
    )  # fmt: skip
    if SCALE_PER_SEQUENCE:
        out_scale = tl.load(out_scale_ptr + sequence, mask=q_len > 0, other=1.0)
    early, late = split_scale(out_scale, k.dtype)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    for head in tl.range(kv_head * GROUP, (kv_head + 1) * GROUP):
        if WINDOW:
            dk, dv = gather_key_gradients(
                dk, dv, k, v, q_source, d_out_source, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
                sequence, q_start, q_len, q_rows, head, begin, tl.minimum(full_begin, end), first_key, k_len, scale, early, left, right,
                activate_pair, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, True, True, MAPPED, SETTLE, UPCAST, SLOPE,
            )  # fmt: skip
        dk, dv = gather_key_gradients(
            dk, dv, k, v, q_source, d_out_source, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
            sequence, q_start, q_len, q_rows, head, full_begin, full_end, first_key, k_len, scale, early, left, right,
            activate_pair, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, False, False, MAPPED, SETTLE, UPCAST, SLOPE,
        )  # fmt: skip
        if WINDOW or not (MAPPED and TAIL_SAFE):
            # Zero rows of dO stand in for queries past the end and cancel f(0) and f'(0) where those are finite.
            dk, dv = gather_key_gradients(
                dk, dv, k, v, q_source, d_out_source, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
                sequence, q_start, q_len, q_rows, head, full_end, end, first_key, k_len, scale, early, left, right,
                activate_pair, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, True, WINDOW or not TAIL_SAFE,
                MAPPED, SETTLE, UPCAST, SLOPE,
            )  # fmt: skip

    value_factor, slope_factor = folded_factors(scale, kv_head * GROUP, pair_factors, SLOPE)
    store_tile(
        dk_ptr, dk * (scale * late * slope_factor), sequence, k_start, kv_head, first_key, k_len, stride_dkb, stride_dkt,
        stride_dkh, BLOCK_N, D,
        WIDTH, UPCAST,
    )  # fmt: skip
    store_tile(
        dv_ptr, dv * (out_scale * value_factor), sequence, k_start, kv_head, first_key, k_len, stride_dvb, stride_dvt, stride_dvh,
        BLOCK_N, DV, WIDTH_V,
        UPCAST,
    )  # fmt: skip


@triton.jit
def gather_query_gradient(
    dq, q, d_out, k_source, v_source, stride_kb, stride_kt: tl.constexpr, stride_kh: tl.constexpr, stride_vb, stride_vt:
    tl.constexpr, stride_vh: tl.constexpr,
    sequence, k_start, k_len, k_rows, kv_head, begin, end, first_query, q_len, head, scale, weight, left, right,
    activate_pair: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr,
    MAPPED: tl.constexpr, SETTLE: tl.constexpr, UPCAST: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """dQ of one query block (without its scale) over the keys begin .. end; dS is multiplied by `weight`."""
    for first_key in tl.range(begin, end, BLOCK_N):
        k = load_tile(
            k_source, sequence, k_start, kv_head, first_key, k_len, k_rows, stride_kb, stride_kt, stride_kh,
            BLOCK_N, D, WIDTH, TAIL,
            MAPPED,
        )  # fmt: skip
        v = load_tile(
            v_source, sequence, k_start, kv_head, first_key, k_len, k_rows, stride_vb, stride_vt, stride_vh, BLOCK_N, DV, WIDTH_V,
            TAIL, MAPPED,
        )  # fmt: skip
        s = product(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)  # [BLOCK_M, BLOCK_N]
        dp = product(d_out, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
        _, ds = score_gradients(s, dp, scale, weight, head, activate_pair, SLOPE)
        if MASK:
            query = first_query + tl.arange(0, BLOCK_M)[:, None]
            key = first_key + tl.arange(0, BLOCK_N)[None, :]
            ds = tl.where(allowed_pairs(query, key, q_len, k_len, left, right, WINDOW), ds, 0.0)
        dq = product(rounded(ds, k.dtype, UPCAST), k, dq, UPCAST)
        if SETTLE == 1:
            dq = settle(dq)
    return dq


@triton.jit
def query_gradient(
    dq, q_source, k_source, v_source, d_out_source, stride_qb, stride_qt: tl.constexpr, stride_qh: tl.constexpr, stride_kb,
    stride_kt: tl.constexpr,
    stride_kh: tl.constexpr, stride_vb, stride_vt: tl.constexpr, stride_vh: tl.constexpr, stride_db, stride_dt:
    tl.constexpr, stride_dh: tl.constexpr,
    sequence, q_start, q_len, q_rows, k_start, k_len, k_rows, head, first_query, scale, weight, left, right,
    activate_pair: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, TAIL_SAFE: tl.constexpr, MAPPED: tl.constexpr,
    SETTLE: tl.constexpr, UPCAST: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """dQ of one query block (without its scale) over all the keys of one sequence, added to `dq`."""
    kv_head = head // GROUP
    q = load_tile(
        q_source, sequence, q_start, head, first_query, q_len, q_rows, stride_qb, stride_qt, stride_qh, BLOCK_M, D, WIDTH, True, MAPPED
    )  # fmt: skip
    d_out = load_tile(
        d_out_source, sequence, q_start, head, first_query, q_len, q_rows, stride_db, stride_dt, stride_dh, BLOCK_M, DV,
        WIDTH_V, True,
        MAPPED,
    )  # fmt: skip
    last_query = tl.minimum(first_query + BLOCK_M, q_len) - 1
    begin, full_begin, full_end, end = window_blocks(first_query, last_query, k_len - q_len, k_len, left, right, BLOCK_N, WINDOW)
    if MAPPED and TAIL_SAFE and not WINDOW:
        full_end = end  # the copy engine fills with zeros past the end, at no cost
    if WINDOW:
        dq = gather_query_gradient(
            dq, q, d_out, k_source, v_source, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
            sequence, k_start, k_len, k_rows, kv_head, begin, tl.minimum(full_begin, end), first_query, q_len, head, scale, weight,
            left, right, activate_pair, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, True, True, MAPPED, SETTLE, UPCAST, SLOPE,
        )  # fmt: skip
    dq = gather_query_gradient(
        dq, q, d_out, k_source, v_source, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
        sequence, k_start, k_len, k_rows, kv_head, full_begin, full_end, first_query, q_len, head, scale, weight,
        left, right, activate_pair, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, False, False, MAPPED, SETTLE, UPCAST, SLOPE,
    )  # fmt: skip
    if WINDOW or not (MAPPED and TAIL_SAFE):
        # Zero rows of V and K stand in for keys past the end: dP is zero there, and so is dS where f'(0) is finite.
        dq = gather_query_gradient(
            dq, q, d_out, k_source, v_source, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
            sequence, k_start, k_len, k_rows, kv_head, full_end, end, first_query, q_len, head, scale, weight,
            left, right, activate_pair, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, True, WINDOW or not
            TAIL_SAFE, MAPPED, SETTLE,
            UPCAST, SLOPE,
        )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["batch", "q_rows", "k_rows", "q_blocks", "left", "right"])
def query_gradient_kernel(
    q_source, k_source, v_source, d_out_source, dq_ptr, tiles_ptr, q_bounds_ptr, k_bounds_ptr, out_scale_ptr,
    stride_qb, stride_qt: tl.constexpr, stride_qh: tl.constexpr, stride_kb, stride_kt: tl.constexpr, stride_kh: tl.constexpr,
    stride_vb, stride_vt: tl.constexpr, stride_vh: tl.constexpr, stride_db, stride_dt: tl.constexpr, stride_dh: tl.constexpr,
    stride_dqb, stride_dqt: tl.constexpr, stride_dqh: tl.constexpr, batch, heads, q_rows, k_rows, q_blocks, scale,
    out_scale, left, right,
    activate_pair: tl.constexpr, pair_factors: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LIST: tl.constexpr,
    Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr, SCALE_PER_SEQUENCE: tl.constexpr, WINDOW: tl.constexpr,
    TAIL_SAFE: tl.constexpr, MAPPED: tl.constexpr, SETTLE: tl.constexpr, UPCAST: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    sequence, block = find_tile(tiles_ptr, tl.program_id(0) // heads, q_blocks, HAS_LIST)
    if sequence < 0:
        return
    q_start, q_len = find_rows(q_bounds_ptr, sequence, q_rows, Q_PACKED)
    k_start, k_len = find_rows(k_bounds_ptr, sequence, k_rows, K_PACKED)
    k_len = tl.where(sequence < batch, k_len, 0)
    first_query = block * BLOCK_M
    if SCALE_PER_SEQUENCE:
        out_scale = tl.load(out_scale_ptr + sequence, mask=k_len > 0, other=1.0)
    early, late = split_scale(out_scale, dq_ptr.dtype.element_ty)
    dq = query_gradient(
        new_accumulator(BLOCK_M, WIDTH, SETTLE), q_source, k_source, v_source, d_out_source, stride_qb, stride_qt, stride_qh,
        stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_db, stride_dt, stride_dh,
        sequence, q_start, q_len, q_rows, k_start, k_len, k_rows, head, first_query, scale, early, left, right,
        activate_pair, GROUP, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, TAIL_SAFE, MAPPED, SETTLE, UPCAST, SLOPE,
    )  # fmt: skip
    _, slope_factor = folded_factors(scale, head, pair_factors, SLOPE)
    store_tile(
        dq_ptr, dq * (scale * late * slope_factor), sequence, q_start, head, first_query, q_len, stride_dqb, stride_dqt,
        stride_dqh, BLOCK_M, D,
        WIDTH, UPCAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "q_rows", "k_rows", "chunks", "left", "right"])
def shared_query_gradient_kernel(
    q_source, k_source, v_source, d_out_source, partial_ptr, k_bounds_ptr, out_scale_ptr,
    stride_qb, stride_qt: tl.constexpr, stride_qh: tl.constexpr, stride_kb, stride_kt: tl.constexpr, stride_kh: tl.constexpr,
    stride_vb, stride_vt: tl.constexpr, stride_vh: tl.constexpr, stride_db, stride_dt: tl.constexpr, stride_dh: tl.constexpr,
    stride_pb, stride_pt: tl.constexpr, stride_ph: tl.constexpr, batch, q_rows, k_rows, chunks, scale, out_scale, left, right,
    activate_pair: tl.constexpr, pair_factors: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, K_PACKED: tl.constexpr,
    SCALE_PER_SEQUENCE: tl.constexpr, WINDOW: tl.constexpr, TAIL_SAFE: tl.constexpr, MAPPED: tl.constexpr, SETTLE: tl.constexpr,
    UPCAST: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """dQ of queries that every sequence shares: a program sums over every `chunks`-th sequence, in fp32; the host adds the chunks."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first_query = tl.program_id(2) * BLOCK_M
    dq = new_accumulator(BLOCK_M, WIDTH, SETTLE)
    for sequence in tl.range(chunk, batch, chunks):
        k_start, k_len = find_rows(k_bounds_ptr, sequence, k_rows, K_PACKED)
        weight = out_scale
        if SCALE_PER_SEQUENCE:
            weight = tl.load(out_scale_ptr + sequence)
        dq = query_gradient(
            dq, q_source, k_source, v_source, d_out_source, stride_qb, stride_qt, stride_qh,
            stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_db, stride_dt, stride_dh,
            sequence, 0, q_rows, q_rows, k_start, k_len, k_rows, head, first_query, scale, weight, left, right,
            activate_pair, GROUP, D, DV, WIDTH, WIDTH_V, BLOCK_M, BLOCK_N, WINDOW, TAIL_SAFE, MAPPED, SETTLE, UPCAST, SLOPE,
        )  # fmt: skip
    _, slope_factor = folded_factors(scale, head, pair_factors, SLOPE)
    store_tile(
        partial_ptr, dq * (scale * slope_factor), chunk, 0, head, first_query, q_rows, stride_pb, stride_pt, stride_ph, BLOCK_M, D, WIDTH,
        UPCAST,
    )  # fmt: skip

"""Which form of the backward kernel a problem gets: how dQ and dV leave it, which tiles a program takes, how long a step is. Each was
chosen by measurement, which stands beside it, as fractions of the floor on an H200 (docs/benchmarking.md), B = 1152, H = 4, and D = 128
unless another is named; before -> after, each pair in one run."""

from __future__ import annotations

from torch import Tensor

from gdpa.backends.hopper import relay
from gdpa.backends.hopper.compat import LONG_STEPS
from gdpa.backends.hopper.plan import instructions, precision_for, queries_of_a_sequence, same_offsets
from gdpa.problem import Problem

TILE = 128  # keys of a tile, as the kernel has them
PART = 64  # rows of what a consumer has of a step's dQ
NONE, STORE, RELAY, SHARED = (int(x.value) for x in (relay.NONE, relay.STORE, relay.RELAY, relay.SHARED))
THROUGH_V, THROUGH_DQ = (int(x.value) for x in (relay.THROUGH_V, relay.THROUGH_DQ))


def takes_window(problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> bool:
    """Whether it has the call's window: none, or the causal one of sequences that attend to themselves, head by head."""
    if not problem.masked:
        return True
    dense = problem.query_side == problem.key_side == "dense"
    alike = problem.query_rows == problem.key_rows and (dense or same_offsets(cu_seqlens_q, cu_seqlens_k))
    return alike and problem.window == (-1, 0) and problem.group == 1


def way_of_dq(problem: Problem, needs_dq: bool) -> int:
    if not needs_dq:
        return NONE
    if problem.query_side == "shared":
        return SHARED
    # Tiles of causal sequences do not pass dQ on (relay.find_causal), but for few of them, or in a fixed order.
    if (
        problem.masked
        and problem.key_side != "packed"
        and problem.key_rows > MOST_ROUNDED_TILES * TILE
        and not problem.deterministic
    ):
        return SHARED
    # Packed sequences of a single tile find out on the device.
    return STORE if problem.key_side != "packed" and problem.key_rows <= TILE else RELAY


# Tiles that are short and alike end often and together: the next one's values should not wait for dV. Where dQ waits for other programs,
# dV should not wait for dQ. Through V -> through dQ:
#
#                         SiLU               gelu_tanh
#   512 keys              0.775 -> 0.795     0.739 -> 0.747
#   1024 keys             0.783 -> 0.758     0.722 -> 0.762     but is_together
#   packed, to 2048       0.775 -> 0.740     0.724 -> 0.682
MOST_KEYS_THROUGH_DQ = 512


def way_of_dv(problem: Problem, needs_dv: bool) -> int:
    if not needs_dv:
        return NONE
    return THROUGH_V if problem.key_side == "packed" or problem.key_rows > MOST_KEYS_THROUGH_DQ else THROUGH_DQ


def is_together(problem: Problem, needs_dq: bool) -> bool:
    """Whether neighbouring programs take the tiles of a head, which pass dQ on to each other, rather than the heads of a tile.

    Worth 1 to 5 % where all sequences are alike, and dV does not wait for dQ:

                              SiLU               gelu_tanh
        640 keys              0.749 -> 0.774     0.720 -> 0.729
        1024 keys             0.787 -> 0.801     0.774 -> 0.779
        2048 keys             0.815 -> 0.826     0.745 -> 0.785
        4096 keys             0.822 -> 0.830     0.764 -> 0.784
        packed, to 2048       0.767 -> 0.747     0.703 -> 0.684
        512 keys, through dQ  0.796 -> 0.792     0.747 -> 0.668
    """
    dense = problem.key_side != "packed" and problem.query_side == "dense"
    relayed = way_of_dq(problem, needs_dq) == RELAY and problem.key_rows > MOST_KEYS_THROUGH_DQ
    return dense and relayed and not is_folded(problem)  # whose numbers are of two tiles


# Two tiles of short sequences pass dQ on after two steps, too soon for programs that are not quite in step: 256 keys and queries took
# 0.97 to 1.01 ms so, 0.93 and 0.94 in pairs. The queries of a pair are few enough for what it reads twice to stay in L2, and
# the pairs many enough to keep all programs busy.
MOST_PAIRED_QUERIES = 256
LEAST_PAIRS = 4  # for each multiprocessor


def is_paired(problem: Problem, multiprocessor_count: int) -> bool:
    """Whether one program takes both tiles of a sequence, or two tiles of a causal one."""
    if problem.masked:
        return is_folded(problem)
    dense = problem.key_side != "packed" and problem.query_side == "dense"
    many = problem.batch * problem.kv_heads >= LEAST_PAIRS * multiprocessor_count
    return dense and many and TILE < problem.key_rows <= 2 * TILE and problem.query_rows * problem.group <= MOST_PAIRED_QUERIES


# A tile that has none to go with it is followed by one of nothing, which takes a step, and the time of a tile's end. Of sequences with few
# tiles too many are such: by count, a tile's end as one more step, the busiest of 132 programs has 1.2 times as much to do with lengths
# uniform to 256, 1.02 times with lengths to 320, 0.96 times with lengths to 384; but 1.03 to 1.09 times with lognormal ones to 1024, whose
# mean is 203. Where pairs were timed against tiles one by one they gained more than by count; lengths like these were timed in pairs alone.
LEAST_FOLDED_ROWS = 192  # of packed sequences, on average


def is_folded(problem: Problem) -> bool:
    """Whether one program takes two tiles of a causal sequence that together have as many steps as any two: the first and the last, the
    second and the last but one. SiLU, in TFLOP/s: 2048 keys 447 -> 488, packed lengths to 2048 319 -> 411.

    Not where the order in which dQ is passed on is fixed, and not where the host knows that there is a tile in the middle."""
    if not problem.masked or problem.deterministic:
        return False
    if problem.key_side == "packed":
        return problem.key_rows >= LEAST_FOLDED_ROWS * problem.batch
    return -(-problem.key_rows // TILE) % 2 == 0


# Tiles whose parts of dQ are rounded before they are added. With what dS's rounding costs, two have 1.2 times the error of the ideal
# computation, which rounds the sum once, and four 1.5 times; eight would have 1.8, close to the 2 that are allowed. A few rows may have
# more than their share of that (a row of 64 numbers had up to 1.9 in 60 draws), so they are summed in fp32.
MOST_ROUNDED_TILES = 4
FEWEST_ROUNDED_ROWS = 64  # heads counted


def rounded_tiles(problem: Problem) -> int:
    """Up to how many tiles add dQ up in its own dtype."""
    rows = problem.query_rows if problem.query_side == "packed" else problem.query_rows * problem.batch
    return MOST_ROUNDED_TILES if rows * problem.heads >= FEWEST_ROUNDED_ROWS else 1


# Queries of a step. With 128 its waits are half as many; at D = 128 the registers have room for 64 alone. D = 64, 64 -> 128:
#
#                               SiLU               gelu_tanh
#   512 keys                    0.517 -> 0.602     0.456 -> 0.484
#   1024 keys                   0.519 -> 0.644     0.478 -> 0.540
#   2048 keys                   0.554 -> 0.658     0.496 -> 0.571
#   packed, lengths to 512      0.370 -> 0.380     0.341 -> 0.213
#   packed, to 2048             0.499 -> 0.540     0.448 -> 0.493
#   packed, to 1024, 256 keys   0.468 -> 0.522
#   causal, 1024 keys           0.381 -> 0.476
LONG_STEP = 128
# Of f and f' for a score, gelu's, whose loops are 16 KB for each consumer. More seem not to fit the instruction cache: where the first step
# was longer too, warps waited for instructions in 12 % of their time, and 1024 keys had 0.434.
MOST_INSTRUCTIONS = 9
# Up to so many, the first step is in order too (is_in_order): with fewer instructions than silu's there are else up to 100 spill
# instructions in every step, and short sequences gain only so. gelu_tanh has no room for it: 1024 0.540 -> 0.434, 2048 0.571 -> 0.491.
MOST_IN_ORDER = 8
# Queries of a sequence, dense ones and packed ones on average, from which on a longer step pays: in order, and not.
LEAST_QUERIES = {True: (MOST_PAIRED_QUERIES + 1, 240), False: (512, 960)}


def step_rows(problem: Problem, needs_dq: bool) -> int:
    """Queries of a step. Without dQ, 128 would have 70 spill instructions in every step, 64 have none."""
    count = _instructions(problem)
    if problem.head_dim != 64 or not needs_dq or not LONG_STEPS or count is None:
        return PART
    in_order, way = count <= MOST_IN_ORDER, way_of_dq(problem, True)
    if problem.masked:
        return LONG_STEP if in_order and way == SHARED else PART
    packed = problem.query_side == "packed"
    long = queries_of_a_sequence(problem) >= LEAST_QUERIES[in_order][packed]
    return LONG_STEP if way == RELAY and long else PART


def is_in_order(problem: Problem, needs_dq: bool) -> bool:
    """Whether a tile's first step activates before its consumer takes its turn with the tensor cores. The assembler would have it the other
    way around (pipeline.join_after), while the other consumer waits. As the assembler has it -> in order:

                                      SiLU               gelu_tanh          gelu_tanh, fp16
        256 keys                      0.669 -> 0.664     0.628 -> 0.623
        1024 keys                     0.807 -> 0.811     0.768 -> 0.782     0.716 -> 0.742
        2048 keys                     0.805 -> 0.814     0.773 -> 0.802     0.754 -> 0.758
        2048 keys, lengths to 2048    0.721 -> 0.744     0.672 -> 0.655
        packed, lengths to 2048       0.771 -> 0.771     0.716 -> 0.680
        causal, 1024 keys             0.569 -> 0.549     0.545 -> 0.518

    Longer activations are not: of gelu in fp16, 14 instructions, 1024 keys took 15.1 ms in order and 13.5 before, though in two runs."""
    count = _instructions(problem)
    if count is None:
        return False
    short = count <= MOST_IN_ORDER
    if step_rows(problem, needs_dq) == LONG_STEP:
        return short
    many_keys = problem.key_side != "packed" and problem.key_rows > MOST_KEYS_THROUGH_DQ and way_of_dq(problem, needs_dq) == RELAY
    return problem.head_dim == 128 and (is_together(problem, needs_dq) or (many_keys and short))


def _instructions(problem: Problem) -> int | None:
    """Of f and f' together, for a score; None where they are more than MOST_INSTRUCTIONS, or the problem is not of the kind that the two
    above were timed with."""
    if problem.group != 1 or problem.deterministic:
        return None
    count = instructions(problem.activations[0], precision_for(problem)) if len(problem.activations) == 1 else None
    return None if count is None or count > MOST_INSTRUCTIONS else count

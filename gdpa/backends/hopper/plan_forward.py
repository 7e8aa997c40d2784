"""Which form of the forward kernel a problem gets: how many consumers share a tile, whether a tile's steps are one loop, whether its
scores are packed, how it goes about a window. Each was chosen by measurement, which stands beside it, as fractions of the floor on an
H200 (docs/benchmarking.md), B = 1152, H = 4."""

from __future__ import annotations

from gdpa.backends.hopper.compat import DIVIDES
from gdpa.backends.hopper.forward import BOTH, NO_WINDOW, RIGHT
from gdpa.backends.hopper.plan import (
    functions_for,
    instructions,
    keys_of_a_sequence,
    needs_mask,
    precision_for,
    queries_of_a_sequence,
)
from gdpa.device_source import FEWEST_PACKED_ROWS
from gdpa.problem import Problem

CONSUMER_ROWS = 64  # queries of a consumer, as the kernel has them
BLOCK_N = 128  # keys of a block, but with four consumers

# Three consumers, at D = 64, are mostly the faster where they fill their tiles of 192 rows. Two -> three:
#
#                               SiLU               gelu_tanh, in one loop (below) where keys are few
#   192 rows                    0.648 -> 0.822     0.578 -> 0.743
#   256 rows                    0.748 -> 0.724     0.692 -> 0.648
#   320 rows                    0.511 -> 0.665     0.407 -> 0.495
#   384 rows                    0.597 -> 0.691     0.527 -> 0.607
#   512 rows                    0.625 -> 0.635     0.536 -> 0.555
#   768 rows                    0.652 -> 0.772     0.573 -> 0.660
#   1024 rows, 256 keys         0.597 -> 0.567     0.525 -> 0.529
#   packed, lengths to 200      0.646 -> 0.721     0.525 -> 0.590
#   packed, to 512              0.468 -> 0.490     0.396 -> 0.420
#   packed, to 1024             0.578 -> 0.654     0.507 -> 0.563
#   packed, to 1024, 256 keys   0.527 -> 0.620     0.521 -> 0.593
#
# Packed sequences of fewer than 100 rows on average were not timed.
BLOCKS_FOR_TWO = (0, 1, 2, 4)  # of 64 rows, dense
LEAST_AVERAGE_FOR_THREE = 96  # of packed sequences
# Longer activations, by the instructions of f and f' for a score, have three from so many rows on: 512, as all had before. With more
# code than gelu's, three copies of it, warps are likely to wait for instructions where tiles are short.
MOST_INSTRUCTIONS_FOR_THREE = 11
ROWS_FOR_THREE = 512
# gelu in fp16 is such a one. Of two consumers it is packed, and faster so where keys are few. In fp16, two -> three; gelu by exp2, ten
# instructions where it has eight now, with which three had 0.469, 0.517 and 0.313 in another run; gelu_tanh of two is packed:
#
#                               SiLU               gelu_tanh          gelu
#   1024 rows                   0.669 -> 0.694     0.559 -> 0.554     0.452 -> 0.441
#   2048 rows                   0.728 -> 0.792     0.576 -> 0.621     0.462 -> 0.508
#   1024 rows, 256 keys         0.559 -> 0.579     0.518 -> 0.530     0.404 -> 0.296
#   packed, lengths to 512      0.471 -> 0.481     0.390 -> 0.399     0.316 -> 0.315
KEYS_FOR_THREE_NOT_PACKED = 1025


# Four, of 256 rows and 64 keys a block, are the faster where that makes fewer tiles. Three -> four:
#
#
LONG_ACTIVATION = 8  # instructions
MOST_KEYS_FOR_FOUR = 1024  # of long activations


def consumers(problem: Problem) -> int:
    """How many share a tile. Registers allow three and four at D = 64, for one activation, unmasked.

    Where results must be the same every time, a sequence's do not depend on the lengths of others (but for calls of fewer than
    FEWEST_PACKED_ROWS), and gelu's scores are packed in 16 bits or not by how many there are: so there are always two."""
    fits = problem.head_dim == 64 and len(set(problem.activations)) == 1
    if not fits or needs_mask(problem) or problem.masked or problem.deterministic:
        return 2
    return fastest(problem)


def fastest(problem: Problem) -> int:
    """Of the numbers of consumers that a problem may have, the fastest, by the rows to expect of a sequence."""
    rows, keys = queries_of_a_sequence(problem), keys_of_a_sequence(problem)
    length = instructions(problem.activations[0], precision_for(problem))
    if length is None or length > MOST_INSTRUCTIONS_FOR_THREE:
        few = functions_for(problem).open_packed is not None and keys < KEYS_FOR_THREE_NOT_PACKED
        return 3 if rows >= ROWS_FOR_THREE and not few else 2
    packed, blocks = problem.query_side == "packed", -(-rows // CONSUMER_ROWS)
    if rows < LEAST_AVERAGE_FOR_THREE if packed else blocks in BLOCKS_FOR_TWO:
        return 2
    fewer_tiles = packed or -(-blocks // 4) < -(-blocks // 3)
    return 4 if fewer_tiles and (length < LONG_ACTIVATION or keys <= MOST_KEYS_FOR_FOUR) else 3


def tile_rows(problem: Problem) -> int:
    """Queries of a tile."""
    return CONSUMER_ROWS * consumers(problem)


def block_keys(problem: Problem) -> int:
    """Keys of a block: four consumers have registers for half as many scores."""
    return BLOCK_N // 2 if consumers(problem) == 4 else BLOCK_N


# Where a tile has two or three blocks of keys, a consumer is in its first step, which is code of its own, half or a third of the time: the
# kernel has 71 KB with gelu, most of it steps, and warps seem to wait for instructions, as they do in the backward (docs/design.md). In one
# loop for all steps it has 52. Apart -> in one:
#
#                                     gelu_tanh          SiLU, whose steps are shorter
#   128 keys                          0.680 -> 0.661
#   192 rows                          0.567 -> 0.743     0.822 -> 0.847
#   256 rows                          0.568 -> 0.648
#   320 rows                          0.495 -> 0.495
#   384 rows                          0.556 -> 0.607     0.691 -> 0.686
#   512 rows                          0.555 -> 0.548
#   2048 rows                         0.679 -> 0.663     0.775 -> 0.759
#   1024 rows, 256 keys               0.433 -> 0.529     0.567 -> 0.603
#   packed, lengths to 200            0.510 -> 0.590
#   packed, to 600                    0.442 -> 0.432
#   packed, to 1024, 256 keys         0.470 -> 0.593
#
# elu and hardswish, with 8 and 11 instructions, were not timed.
LEAST_INSTRUCTIONS_FOR_ONE_LOOP = 8
ONE_LOOP_CONSUMERS = (3,)
KEYS_FOR_ONE_LOOP = {False: (129, 384), True: (64, 255)}  # dense, and packed on average


def has_one_loop(problem: Problem) -> bool:
    """Whether a tile's first step is one of its loop's."""
    length = instructions(problem.activations[0], precision_for(problem)) if consumers(problem) in ONE_LOOP_CONSUMERS else None
    if length is None:
        return False
    least, most = KEYS_FOR_ONE_LOOP[problem.key_side == "packed"]
    few = least <= keys_of_a_sequence(problem) <= most
    return few and LEAST_INSTRUCTIONS_FOR_ONE_LOOP <= length <= MOST_INSTRUCTIONS_FOR_THREE


PACKED_CONSUMERS = (2,)


def is_packed(problem: Problem) -> bool:
    """Whether most of a block's scores are activated two at a time, in 16 bits, where the activation can be.

    A mask would part the pairs. With three consumers and long sequences they are no faster; short ones were not timed. gelu_tanh without
    and with: two consumers, 256 rows 0.627 and 0.666; three, 1024 rows 0.598 and 0.593, 2048 rows 0.682 and 0.667."""
    masked = needs_mask(problem) or problem.masked
    fit = functions_for(problem).open_packed is not None and consumers(problem) in PACKED_CONSUMERS
    return fit and not masked and has_many_rows(problem)


def has_many_rows(problem: Problem) -> bool:
    """Whether so many rows share the error budget that packed scores, rounded twice, stay inside it."""
    rows = problem.query_rows if problem.query_side == "packed" else problem.query_rows * problem.batch
    return rows * problem.heads >= FEWEST_PACKED_ROWS


def is_early(problem: Problem) -> bool:
    """Whether an activation is kept before the wait for the product that runs meanwhile. Worth up to 4 %, in fp16 3 to 11 %. A mask has no
    registers to spare for it, nor has any activation with three consumers."""
    return bool(DIVIDES.value) and not needs_mask(problem) and consumers(problem) == 2


def way_of_window(problem: Problem, same: bool) -> int:
    """The kernel's way with windows, with the `plan.same_offsets` of the call."""
    left, right = problem.window
    dense = "packed" not in (problem.query_side, problem.key_side)
    if left < 0 and right < 0:
        return int(NO_WINDOW.value)
    # Packed buffers may have more rows than their sequences, one more than the other.
    diagonal = problem.key_rows - problem.query_rows if dense else 0
    on_edge = (diagonal + right) % BLOCK_N == 0 and (dense or same)
    return int((RIGHT if left < 0 and on_edge else BOTH).value)

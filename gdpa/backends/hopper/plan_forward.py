"""Which form of the forward kernel a problem gets: how many consumers share a tile, whether a tile's steps are one loop, whether its
scores are packed, how it goes about a window. Each was chosen by measurement, which stands beside it, as fractions of the floor on an
H200 (docs/benchmarking.md), B = 1152, H = 4."""

from __future__ import annotations

import torch

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
from gdpa.packing import FEWEST_PACKED_ROWS, PACKED_SCALES, Form
from gdpa.problem import Problem

CONSUMER_ROWS = 64  # queries of a consumer, as the kernel has them
BLOCK_N = 128  # keys of a block, but with four consumers

# At D = 64 registers allow three consumers, and, with blocks of 64 keys, four. Fractions with two, three and four; gelu_tanh of three is
# in one loop (below) where keys are few, and of two packed:
#
#                               SiLU                   gelu_tanh
#   192 rows                    0.711  0.813  0.948    0.612  0.732  0.838
#   256 rows                    0.777  0.719  0.859    0.668  0.624  0.696
#   320 rows                    0.453  0.590  0.593    0.415  0.489  0.533
#   384 rows                    0.636  0.689  0.619    0.520  0.609  0.526
#   640 rows                    0.653  0.695  0.623    0.551  0.616  0.521
#
# In other runs, with three and four:
#
#   512 rows                    0.648  0.717           0.541  0.611
#   1024 rows                   0.692  0.760           0.600  0.641
#   2048 rows                   0.760  0.777           0.680  0.657
#   1024 rows, 256 keys         0.584  0.664           0.553  0.574
#   packed, lengths to 512      0.538  0.605           0.483  0.524
#   packed, to 2048             0.722  0.722           0.613  0.591
#   packed, to 1024, 256 keys   0.621  0.606           0.570  0.536
#
# So four pay where their tiles of 256 rows and 64 keys hold less that is not there than three's of 192 and 128, and more so where keys are
# few. Packed queries leave a tile's last consumers without rows; there they pay where keys are packed as well, and not many. These
# gelu_tanh's are of before its scores were packed with three and four.
FEW_KEYS = 320
# What is computed with three, over what is computed with four, from which on there are four: where keys are few, and else.
LEAST_GAIN_OF_FOUR = {True: 0.9, False: 1.05}
MOST_AVERAGE_KEYS_FOR_FOUR = 384  # packed
LEAST_TILES_FOR_FOUR = 132  # an H200's multiprocessors: large tiles of a small batch would leave some without any
# Activations of so many instructions have the code of four consumers' steps in the way, if they are not packed: 2048 rows with 128 keys
# had 0.753 with three, and 0.555 with four ("forward at D = 64 at b952885" in results/experiments/h200.json).
LONG_ACTIVATION = 8
KEYS_FOR_FOUR_IF_LONG = (129, 1024)
# Two -> three, by which those that are not for four were decided. Packed sequences of fewer than 100 rows on average were not timed.
#
#                               SiLU               gelu_tanh, in one loop (below) where keys are few
#   256 rows                    0.748 -> 0.724     0.692 -> 0.648
#   384 rows                    0.597 -> 0.691     0.527 -> 0.607
#   512 rows                    0.625 -> 0.635     0.536 -> 0.555
#   768 rows                    0.652 -> 0.772     0.573 -> 0.660
#   packed, lengths to 200      0.646 -> 0.721     0.525 -> 0.590
#   packed, to 1024             0.578 -> 0.654     0.507 -> 0.563
#   packed, to 1024, 256 keys   0.527 -> 0.620     0.521 -> 0.593
BLOCKS_FOR_TWO = (0, 1, 2, 4)  # of 64 rows, dense
LEAST_AVERAGE_FOR_THREE = 96  # of packed sequences
# Longer activations, by the instructions of f and f' for a score, have three from so many rows on: 512, as all had before. With more
# code than gelu's, three copies of it, warps are likely to wait for instructions where tiles are short.
MOST_INSTRUCTIONS_FOR_THREE = 11
ROWS_FOR_THREE = 512
# In fp16 SiLU, two, three and four consumers: 1024 rows 0.674, 0.673, 0.736, with 256 keys 0.552, 0.555, 0.641, packed, lengths to 512
# 0.478, 0.464, 0.544.
#
# gelus have as many as shorter activations since their scores are packed with any number (gdpa/packing.py); what they had before, and then,
# every block with columns in fp32 ("forward at D = 64, gelu_tanh packed with any number of consumers", and in fp16):
#
#                               gelu_tanh              gelu in fp16
#   256 rows                    0.750 -> 0.780         0.607 -> 0.648
#   384 rows                    0.607 -> 0.609         0.471 -> 0.572
#   512 rows                    0.583 -> 0.647
#   640 rows                    0.615 -> 0.655
#   768 rows                    0.647 -> 0.700
#   1024 rows                   0.615 -> 0.725         0.516 -> 0.590
#   2048 rows                   0.679 -> 0.711         0.515 -> 0.626
#   1024 rows, 256 keys         0.548 -> 0.595
#   2048 rows, 128 keys         0.713 -> 0.744         0.539 -> 0.652
#   packed, lengths to 200      0.605 -> 0.608
#   packed, to 512              0.459 -> 0.493         0.344 -> 0.457
#   packed, to 1024             0.531 -> 0.575
#   packed, to 2048             0.613 -> 0.653         0.444 -> 0.579
#   packed, to 1024, 256 keys   0.548 -> 0.547         0.402 -> 0.394
#   packed, to 2048, 128 keys   0.735 -> 0.763


def consumers(problem: Problem) -> int:
    """How many share a tile. Registers allow three and four at D = 64, for one activation, unmasked.

    Where results must be the same every time, a sequence's do not depend on the lengths of others (but for calls of fewer than
    FEWEST_PACKED_ROWS), and which of gelu's scores are packed in 16 bits depends on how many there are: so there are always two."""
    fits = problem.head_dim == 64 and len(set(problem.activations)) == 1
    if not fits or needs_mask(problem) or problem.masked or problem.deterministic:
        return 2
    return fastest(problem)


def fastest(problem: Problem) -> int:
    """Of the numbers of consumers that a problem may have, the fastest."""
    rows = queries_of_a_sequence(problem)
    length = instructions(problem.activations[0], precision_for(problem))
    if length is None or (length > MOST_INSTRUCTIONS_FOR_THREE and not can_pack(problem)):
        return 3 if rows >= ROWS_FOR_THREE else 2
    if four_gain(problem, length >= LONG_ACTIVATION):
        return 4
    if problem.query_side == "packed":
        return 3 if rows >= LEAST_AVERAGE_FOR_THREE else 2
    return 2 if -(-rows // CONSUMER_ROWS) in BLOCKS_FOR_TWO else 3


def four_gain(problem: Problem, long: bool) -> bool:
    """Whether four consumers are faster than fewer, by the lengths to expect and whether the activation is a `long` one."""
    rows, keys = queries_of_a_sequence(problem), keys_of_a_sequence(problem)
    if problem.batch * problem.heads * -(-rows // (4 * CONSUMER_ROWS)) < LEAST_TILES_FOR_FOUR:
        return False
    least, most = KEYS_FOR_FOUR_IF_LONG
    if long and (keys < least or (keys > most and not can_pack(problem))):
        return False
    if problem.query_side == "packed":
        return problem.key_side == "packed" and rows >= LEAST_AVERAGE_FOR_THREE and keys <= MOST_AVERAGE_KEYS_FOR_FOUR
    of_three, of_four = _computed(rows, keys, 3 * CONSUMER_ROWS, BLOCK_N), _computed(rows, keys, 4 * CONSUMER_ROWS, BLOCK_N // 2)
    return rows > 2 * CONSUMER_ROWS and of_three >= LEAST_GAIN_OF_FOUR[keys <= FEW_KEYS] * of_four


def _computed(rows: int, keys: int, tile_rows: int, tile_keys: int) -> int:
    """Scores of a sequence's tiles."""
    return -(-rows // tile_rows) * tile_rows * -(-keys // tile_keys) * tile_keys


def tile_rows(problem: Problem) -> int:
    """Queries of a tile."""
    return CONSUMER_ROWS * consumers(problem)


def block_keys(problem: Problem) -> int:
    """Keys of a block: four consumers have registers for half as many scores."""
    return BLOCK_N // 2 if consumers(problem) == 4 else BLOCK_N


# Where a tile has two or three blocks of keys, a consumer is in its first step, which is code of its own, half or a third of the time:
# three have 71 KB with gelu, most of it steps, and warps seem to wait for instructions, as they do in the backward (docs/design.md). In one
# loop for all steps they have 52. Apart -> in one, none of it packed:
#
#                                     gelu_tanh          SiLU, whose steps are shorter
#   three, 128 keys                   0.680 -> 0.661
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
#   four, 512 rows                    0.611 -> 0.661
#   1024 rows                         0.641 -> 0.640
#   1024 rows, 256 keys               0.574 -> 0.584
#   packed, lengths to 2048           0.591 -> 0.591
#
# elu and hardswish, with 8 and 11 instructions, were not timed.
KEYS_FOR_ONE_LOOP = {3: {False: (129, 384), True: (64, 255)}, 4: {False: (129, 640), True: (0, -1)}}  # dense, and packed on average


def suits_one_loop(problem: Problem) -> bool:
    """Whether a tile's steps, if they are not packed, are better one loop."""
    count = consumers(problem)
    length = instructions(problem.activations[0], precision_for(problem)) if count in KEYS_FOR_ONE_LOOP else None
    if length is None:
        return False
    least, most = KEYS_FOR_ONE_LOOP[count][problem.key_side == "packed"]
    return least <= keys_of_a_sequence(problem) <= most and LONG_ACTIVATION <= length <= MOST_INSTRUCTIONS_FOR_THREE


def has_one_loop(problem: Problem) -> bool:
    """Whether a tile's first step is one of its loop's."""
    return suits_one_loop(problem) and packed_forms(problem) is None


# Of a tile's first block of keys, and of later ones, in bfloat16, by the number of consumers. Three and four are short of registers: they
# read one number of a tile, three with dense keys four, back from memory in each step. By multiplications alone four have 202 instructions
# and no such reads, for 197, but gelu_tanh comes to 0.98 of the error budget, with 64 rows, where scores have a spread of 0.03 and values
# are alike ("gelu packed, on a CPU" in results/experiments/cpu.json).
FORMS = {2: (Form(16, True), Form(0, True)), 3: (Form(32, False), Form(0, True)), 4: (Form(16, True), Form(0, True))}
FORMS_IN_FLOAT16 = (Form(32, False), Form(0, False))
# Of the scores of queries and keys of unit variance. Of small scores gelu's even part, h tanh, is smaller than bfloat16's roundings of
# them, and sums over thousands of keys may be of that part alone: with a spread of 0.003 they are over the error budget.
LEAST_PACKED_SPREAD = 0.125


def packed_forms(problem: Problem) -> tuple[Form, Form] | None:
    """How scores are activated two at a time in 16 bits (gdpa/packing.py): those of a tile's first block of keys, and of later ones. None
    where they are one by one in fp32: a mask would part the pairs."""
    if not can_pack(problem) or needs_mask(problem) or problem.masked or not has_many_rows(problem):
        return None
    count = consumers(problem)
    if count == 3 and suits_one_loop(problem):
        return None
    return FORMS_IN_FLOAT16 if problem.dtype == torch.float16 else FORMS[count]


def can_pack(problem: Problem) -> bool:
    """Whether the activation has such a form, and its scale allows it."""
    least, largest = PACKED_SCALES
    if problem.dtype == torch.bfloat16:
        least = LEAST_PACKED_SPREAD / problem.head_dim**0.5
    return bool(functions_for(problem).packed) and least <= problem.scale <= largest


def has_many_rows(problem: Problem) -> bool:
    """Whether so many rows share the error budget that packed scores, rounded twice, stay inside it."""
    rows = problem.query_rows if problem.query_side == "packed" else problem.query_rows * problem.batch
    return rows * problem.heads >= FEWEST_PACKED_ROWS


def is_early(problem: Problem) -> bool:
    """Whether an activation is kept before the wait for the product that runs meanwhile. Worth up to 4 %, in fp16 3 to 11 %. A mask has no
    registers to spare for it, nor has any activation with three or four consumers."""
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

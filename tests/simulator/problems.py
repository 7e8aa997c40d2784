"""Problems for the Hopper backend on the simulator: `python -m simulator.problems FIRST COUNT` runs random ones, `... known` those that
once failed, `... forms` one for every form of the kernels, and prints a JSON object for each.

A process of its own runs them, whose Triton does not interpret. A problem is drawn with the device it runs on and with the thresholds of
the plans (plan_forward.py, plan_backward.py), so that every form of the kernels comes up with a few hundred rows.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from helpers import FORMS, Case, assert_neighbours_untouched, make_case, poison_sequence, poisoned_memory

from gdpa import numerics
from gdpa.backends.hopper import launch, launch_backward, plan_backward, plan_forward
from simulator.launch import simulated

ACTIVATIONS: tuple[Any, ...] = (
    *("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "exp", "softplus"),
    ["gelu", "relu", "sigmoid", "silu"],
    torch.log,
)
EVERYTHING = (True, True, True)
NOT_EVERYTHING = ((False, True, True), (True, False, True), (True, True, False), (False, True, False), (False, False, True))
TURNS = 4  # of problems with the same options
FEWEST = 2  # multiprocessors of the devices on which deterministic results are to be the same
ALWAYS = {False: (1, 10**6), True: (0, 10**6)}  # numbers of keys, dense and packed
NEVER = {False: (0, -1), True: (0, -1)}
GARBAGE = (-5, 3, 2**31 - 1, -(2**31), 100, 1)


def draw_options(draw: random.Random) -> dict[str, Any]:
    """What kernels are compiled for, which takes longer than to run them."""
    kind = draw.choice(("any", "any", "window", "causal", "causal"))
    kv_heads = draw.choice((1, 2))
    heads = kv_heads * (draw.choice((1, 1, 2, 3)) if kind != "causal" else 1)
    activation = draw.choice(ACTIVATIONS)
    window = (-1, -1)
    if kind == "window":
        window = draw.choice((-1, -1, 0, draw.randint(1, 300))), draw.choice((-1, 0, 128, 256, draw.randint(1, 300)))
    return {
        "form": draw.choice(FORMS if kind != "causal" else ("packed", "dense")),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": draw.choice((64, 64, 128)),
        "dtype": draw.choice((torch.bfloat16, torch.float16)),
        "activation": (activation * 2)[:heads] if isinstance(activation, list) else activation,
        "causal": kind == "causal",
        "window_size": window,
        "scale": draw.choice((None, None, 0.05, 0.125 if activation is torch.log else -0.125)),
        "out_scale": draw.choice((None, 0.5, "per-sequence")),
        "deterministic": draw.random() < 0.3,
        "offset_dtypes": (draw.choice((torch.int32, torch.int64)), draw.choice((torch.int32, torch.int64))),
    }


def wide(x: torch.Tensor) -> torch.Tensor:
    """x as part of a tensor that has a head of NaN before it and one behind it: read in place, and no column too many."""
    nan = torch.full_like(x[..., :1, :], float("nan"))
    return torch.cat((nan, x, nan), -2)[..., 1:-1, :]


def draw_case(draw: random.Random, options: dict[str, Any], layout: tuple[bool, ...]) -> Case:
    most = draw.choice((70, 130, 300, 700))

    def lengths(count: int) -> tuple[int, ...]:
        return tuple(draw.choice((0, 1, 64, 65, 128, 129, draw.randint(2, most), draw.randint(2, most))) for _ in range(count))

    batch = draw.randint(1, 5)
    q_lengths, k_lengths = lengths(batch), lengths(batch)
    tail = draw.choice((0, 7, 200)), draw.choice((0, 7, 200))
    if options["causal"]:
        k_lengths, tail = q_lengths, (tail[0], tail[0])
    elif draw.random() < 0.3:  # windows whose edge is that of a block
        k_lengths = tuple(length + draw.choice((0, 128, 256)) for length in q_lengths)
    case = make_case(**options, q_lengths=q_lengths, k_lengths=k_lengths, tail=tail, seed=draw.randrange(1000))
    if options["activation"] is torch.log:
        case = case.with_inputs(q=case.inputs.q.abs() + 0.1, k=case.inputs.k.abs() + 0.1)
    if options["causal"] and options["form"] == "packed":
        case = case.with_inputs(cu_seqlens_k=case.inputs.cu_seqlens_q)
    laid_out = {name: wide(getattr(case.inputs, name)) for name, is_wide in zip("qkv", layout, strict=False) if is_wide}
    d_out = wide(case.d_out) if layout[3] else case.d_out
    return replace(case.with_inputs(**laid_out), d_out=d_out, problem=replace(case.problem, deterministic=options["deterministic"]))


class Always:
    """A function of whatever, whose text is in the report."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, problem: Any) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"always {self.value}"


@contextmanager
def plans(draw: random.Random) -> Iterator[dict[str, Any]]:
    """Thresholds that let small problems have the forms of large ones, or half of the time the real ones."""
    changes: dict[Any, dict[str, Any]] = {plan_forward: {}, plan_backward: {}, launch_backward: {}}
    if draw.random() < 0.7:
        changes[plan_forward] = {
            "fastest": Always(draw.choice((2, 3, 4))),
            "KEYS_FOR_ONE_LOOP": draw.choice(({3: ALWAYS, 4: ALWAYS}, {3: NEVER, 4: NEVER}, plan_forward.KEYS_FOR_ONE_LOOP)),
        }
        changes[plan_backward] = {
            "MOST_KEYS_THROUGH_DQ": draw.choice((256, 512)),
            "MOST_PAIRED_QUERIES": draw.choice((256, 10**6)),
            "LEAST_PAIRS": draw.choice((0, 4)),
            "LEAST_FOLDED_ROWS": draw.choice((1, 192)),
            "MOST_ROUNDED_TILES": draw.choice((1, 2, 4)),
            "LEAST_QUERIES": draw.choice(({True: (1, 1), False: (1, 1)}, plan_backward.LEAST_QUERIES)),
        }
        changes[launch_backward] = {"FEWEST_MULTIPROCESSORS": draw.choice((FEWEST, 112))}
    with ExitStack() as stack:
        for module, values in changes.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        yield {name: value for values in changes.values() for name, value in values.items()}


def garbage(case: Case, draw: random.Random) -> Case:
    """With offsets that mean nothing: whatever they hold, nothing outside of the tensors is touched, and the kernels end."""
    changes = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        offsets = getattr(case.inputs, name)
        if offsets is not None:
            changes[name] = torch.tensor([draw.choice((*GARBAGE, draw.randint(0, 900))) for _ in offsets], dtype=offsets.dtype)
    if case.inputs.cu_seqlens_q is case.inputs.cu_seqlens_k:
        changes["cu_seqlens_k"] = changes.get("cu_seqlens_q")
    return case.with_inputs(**changes)


def execute(case: Case, needs: tuple[bool, bool, bool]) -> numerics.Results:
    """Forward and, where the Hopper kernel is the one for it, backward."""
    q, k, v, cu_q, cu_k, out_scale = case.inputs
    with poisoned_memory():
        out = launch.forward(case.problem, q, k, v, cu_q, cu_k, out_scale)
        if not (needs[1] or needs[2]) or not plan_backward.takes_window(case.problem, cu_q, cu_k):
            return numerics.Results(out)
        return numerics.Results(out, *launch_backward.backward(case.problem, case.d_out, q, k, v, cu_q, cu_k, out_scale, needs))


def run(index: int) -> Iterator[dict[str, Any]]:
    """Draw options and run problems that have them; of each what it was, and what is wrong with it, if anything."""
    draw = random.Random(f"simulated {index}")
    options = draw_options(draw)
    needs = draw.choice((EVERYTHING, EVERYTHING, *NOT_EVERYTHING))
    layout = tuple(draw.random() < 0.2 for _ in range(4))
    with plans(draw) as thresholds:
        for turn in range(TURNS):
            case = draw_case(draw, options, layout)
            fate = draw.choice(("plain", "plain", "plain", "garbage", "poison"))
            report = run_one(draw, case, needs, fate, draw.choice((1, FEWEST, 3, 5)))
            yield {"index": index, "turn": turn, **report, "thresholds": thresholds}


def known() -> Iterator[dict[str, Any]]:
    """Problems of which each found a fault of its own."""
    for name, form, lengths, multiprocessors in (
        # Tiles of the second sequence waited for tiles behind them in the list of their own program.
        ("causal, in a fixed order, more tiles than programs", "dense", (700, 700), 2),
        ("the same of three sequences and three programs", "dense", (600, 600, 600), 3),
        ("the same, packed", "packed", (700, 300, 700), 2),
    ):
        yield {"name": name, **run_named(form, lengths, None, multiprocessors, causal=True, deterministic=True)}


def forms() -> Iterator[dict[str, Any]]:
    """A problem for every form of the kernels."""
    long, short = (700, 130, 300), (100, 64, 30)
    fp16 = {"dtype": torch.float16}
    for name, form, lengths, k_lengths, programs, needs, options in (
        ("packed", "packed", long, None, 3, EVERYTHING, {}),
        ("short", "packed", short, None, 2, EVERYTHING, {"activation": "gelu_tanh"}),
        ("three consumers", "dense", (384, 384), None, 2, EVERYTHING, {}),
        ("one loop", "dense", (384, 384), None, 2, EVERYTHING, {"activation": "gelu_tanh"}),
        ("one loop of four", "dense", (512,), None, 1, EVERYTHING, {"activation": "gelu"}),
        ("four, packed", "dense", (200, 200), None, 2, EVERYTHING, {"activation": "gelu_tanh"}),
        ("D = 128", "packed", long, None, 2, EVERYTHING, {"head_dim": 128, "kv_heads": 1, "heads": 2, **fp16}),
        ("one tile of keys", "dense", (200, 200), (100, 100), 3, EVERYTHING, {}),
        ("dV through dQ", "dense", (400, 400), (300, 300), 3, EVERYTHING, {"activation": "gelu", "head_dim": 128}),
        ("pairs", "dense", (70,) * 8, (200,) * 8, 2, EVERYTHING, {}),
        ("a head's tiles together", "dense", (700, 700), None, 5, EVERYTHING, {"head_dim": 128}),
        ("long steps", "dense", (600, 600), None, 3, EVERYTHING, {}),
        ("in a fixed order", "packed", long, None, 3, EVERYTHING, {"deterministic": True}),
        ("shared queries", "shared-query", (65,) * 3, long, 3, EVERYTHING, {}),
        ("shared queries in a fixed order", "shared-query", (65,) * 3, long, 2, EVERYTHING, {"deterministic": True}),
        ("causal pairs", "packed", long, None, 3, EVERYTHING, {"causal": True}),
        ("causal, to zeros", "dense", (700, 700), None, 2, EVERYTHING, {"causal": True, "out_scale": 0.5}),
        ("causal, one by one", "packed", short, None, 2, EVERYTHING, {"causal": True}),
        ("a window", "packed", long, None, 3, EVERYTHING, {"window_size": (100, 20)}),
        ("no dQ", "packed", long, None, 3, (False, True, True), {}),
        ("dK alone", "dense", (300, 300), None, 3, (False, True, False), {}),
        ("dQ and dV", "packed", long, None, 3, (True, False, True), {"out_scale": "per-sequence"}),
        (
            "an activation for each head",
            "packed",
            long,
            None,
            2,
            EVERYTHING,
            {"heads": 2, "kv_heads": 1, "activation": ["gelu", "relu"]},
        ),
        ("a mask", "packed", short, (65, 130, 1), 3, EVERYTHING, {"activation": torch.log}),
    ):
        yield {"name": name, **run_named(form, lengths, k_lengths, programs, needs, **options)}


def run_named(
    form: str,
    lengths: tuple[int, ...],
    k_lengths: tuple[int, ...] | None,
    multiprocessors: int,
    needs: tuple[bool, bool, bool] = EVERYTHING,
    **options: Any,
) -> dict[str, Any]:
    options = {"heads": 1, "head_dim": 64, "dtype": torch.bfloat16, "activation": "silu", **options}
    case = make_case(form, **options, q_lengths=lengths, k_lengths=k_lengths)
    if options["activation"] is torch.log:
        case = case.with_inputs(q=case.inputs.q.abs() + 0.1, k=case.inputs.k.abs() + 0.1)
    if options.get("causal") and form == "packed":
        case = case.with_inputs(cu_seqlens_k=case.inputs.cu_seqlens_q)
    case = replace(case, problem=replace(case.problem, deterministic=options.get("deterministic", False)))
    return run_one(random.Random(0), case, needs, "plain", multiprocessors)


def run_one(draw: random.Random, case: Case, needs: tuple[bool, bool, bool], fate: str, multiprocessors: int) -> dict[str, Any]:
    problem = case.problem
    report: dict[str, Any] = {"problem": repr(problem), "needs": needs, "fate": fate, "multiprocessors": multiprocessors}
    report["lengths"] = [None if x is None else x.diff().tolist() for x in case.inputs[3:5]]
    start = time.perf_counter()
    with simulated(multiprocessors, draw.randrange(10**6), overlapping=fate == "garbage") as simulation:
        try:
            if fate == "garbage":
                execute(garbage(case, draw), needs)
            elif fate == "poison":
                sequence = draw.randrange(problem.batch)
                clean, dirty = execute(case, needs), execute(poison_sequence(case, sequence, float("nan")), needs)
                assert_neighbours_untouched(case, sequence, clean, dirty, reordered=() if problem.deterministic else ("dq",))
            else:
                results = execute(case, needs)
                judged = any(x is not None for x in results[1:])
                numerics.check(problem, case.inputs, case.d_out if judged else None, results)
                if problem.deterministic and multiprocessors >= launch_backward.FEWEST_MULTIPROCESSORS:
                    again(case, needs, results, draw)
        except Exception as error:
            report["error"] = "".join(traceback.format_exception(error, limit=-3))
    return {**report, "launches": simulation.launches, "forms": simulation.forms, "seconds": round(time.perf_counter() - start, 1)}


def again(case: Case, needs: tuple[bool, bool, bool], results: numerics.Results, draw: random.Random) -> None:
    """Deterministic results are the same on another device, and in another order."""
    with simulated(draw.choice((FEWEST, 3, 4, 7)), draw.randrange(10**6)):
        others = execute(case, needs)
    for name, x, y in zip(numerics.Results._fields, results, others, strict=True):
        assert (x is None and y is None) or torch.equal(x, y), f"{name} is not the same the second time"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] in ("known", "forms"):
        reports = known() if sys.argv[1] == "known" else forms()
    else:
        first, count = map(int, sys.argv[1:])
        reports = (report for index in range(first, first + count) for report in run(index))
    for report in reports:
        print(json.dumps(report, default=repr), flush=True)

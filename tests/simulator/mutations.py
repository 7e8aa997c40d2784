"""Kernels that lack one synchronisation: `python -m simulator.mutations KERNEL EVERY FIRST` leaves out every EVERY-th of a kernel's, one at
a time, from the FIRST one on, and prints a JSON object for each: whether the simulator finds it.

A wait, an arrival, a fence is taken out of the compiled kernel's text, and the kernel simulated with several problems.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from helpers import Case, make_case

from gdpa.backends.hopper import launch, launch_backward
from simulator import launch as simulated_launch
from simulator.launch import simulated
from simulator.races import Fault

SYNCHRONISATION = re.compile(
    r"ttng\.(wait_barrier|arrive_barrier|fence_async_shared|async_tma_store_wait|warp_group_dot_wait)"
    r'|asm "(bar\.(sync|arrive) \$1|cp\.async\.bulk\.wait_group|fence\.proxy)|@short bra|red\.relaxed'
)
OPTIONS: dict[str, Any] = {"heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "activation": "silu"}
# With the number of programs: tiles of one block of keys, several tiles and programs for a sequence, nothing but those, and all kinds.
PROBLEMS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"q_lengths": (100,) * 8, "tail": (10, 10)}),
    (3, {"q_lengths": (100, 0, 300, 64, 700), "tail": (10, 10)}),
    (3, {"q_lengths": (700,)}),
    (2, {"q_lengths": (64, 300, 10, 190, 700, 50, 65)}),
)
SEEDS = 2


def cases() -> Iterator[tuple[int, Case]]:
    for programs, problem in PROBLEMS:
        yield programs, make_case("packed", **OPTIONS, **problem)


def run_all(kernel: str) -> None:
    for seed, (programs, case) in product(range(SEEDS), cases()):
        q, k, v, cu_q, cu_k, _ = case.inputs
        with simulated(programs, seed):
            if kernel == "forward_kernel":
                launch.forward(case.problem, q, k, v, cu_q, cu_k, None)
            else:
                launch_backward.backward(case.problem, case.d_out, q, k, v, cu_q, cu_k, None, (True, True, True))


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """(what is left out, the kernel without it)."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not SYNCHRONISATION.search(line):
            continue
        result = re.match(r"\s*(%[\w.]+)(:\d+)? = ", line)
        if "warp_group_dot_wait" in line:  # one product more may be under way
            left = re.sub(r"pendings = (\d+)", lambda m: f"pendings = {int(m[1]) + 1}", line)
        elif result:  # assembly, whose result is a number that nobody uses, or a count that is there
            left = f"{result[0]}arith.constant 1000000 : i32"
        else:
            left = ""
        yield f"line {i}: {place(text, line)} {line.strip()[:100]}", "\n".join([*lines[:i], left, *lines[i + 1 :]])


def place(text: str, line: str) -> str:
    """Where an instruction comes from: the files and lines of the calls around it."""
    locations = {m[1]: m[2] for m in re.finditer(r"^(#loc\d*) = loc\((.*)\)$", text, re.M)}
    found: list[str] = []
    waiting = re.findall(r"#loc\d*", line)[-1:]
    while waiting and len(found) < 4:
        inside = locations.get(waiting.pop(0), "")
        here = re.search(r"([\w.]+)\":(\d+)", inside)
        if here:
            found.append(f"{here[1]}:{here[2]}")
        waiting += re.findall(r"#loc\d+", inside)
    return " < ".join(found)


def main(kernel: str, every: int, first: int) -> None:
    run_all(kernel)
    key = next(key for key in simulated_launch._compiled if key[0].__name__ == kernel)
    text = simulated_launch._compiled[key].text
    for what, mutant in list(mutants(text))[first::every]:
        simulated_launch._compiled[key] = simulated_launch.Kernel(mutant)
        print(json.dumps({"what": what, "found": finding(lambda: run_all(kernel))}), flush=True)


def finding(run: Callable[[], None]) -> str | None:
    try:
        run()
    except Fault as fault:
        return str(fault)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

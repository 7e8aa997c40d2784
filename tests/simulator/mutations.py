"""Kernels that lack one synchronisation: `python -m simulator.mutations NAME EVERY FIRST` leaves out every EVERY-th of a kernel's, one at
a time, from the FIRST one on, and prints a JSON object for each: whether the simulator finds it.

A wait, an arrival, a fence is taken out of the compiled kernel's text, and the kernel simulated with several problems.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from helpers import make_case

from gdpa.backends.hopper import launch, launch_backward
from simulator import launch as simulated_launch
from simulator.launch import simulated
from simulator.races import Fault

SYNCHRONISATION = re.compile(
    r"ttng\.(wait_barrier|arrive_barrier|fence_async_shared|async_tma_store_wait|warp_group_dot_wait)|gpu\.barrier|ttg\.barrier"
    r'|asm "(bar\.(sync|arrive) \$1|cp\.async\.bulk\.wait_group|fence\.proxy)|@short bra|red\.relaxed|bar\.sync gathered'
)
OPTIONS: dict[str, Any] = {"heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "activation": "silu"}
# Lengths, and the number of programs: tiles of one block of keys, several tiles and programs for a sequence, and all kinds.
PACKED: tuple[tuple[tuple[int, ...], int], ...] = (
    ((100,) * 8, 1),
    ((100, 0, 300, 64, 700), 3),
    ((700, 5, 0, 40, 1), 3),
    ((64, 300, 10, 190, 700, 50, 65), 2),
    ((150,) * 5, 2),
)
LONG = (((700,), 3), ((700, 300), 5), ((600, 129, 700), 2), ((700, 100, 100, 60), 2))
# Kernel, form, what is asked of it, and problems for which it is compiled alike.
KERNELS: dict[str, tuple[str, str, dict[str, Any], tuple[tuple[tuple[int, ...], int], ...]]] = {
    "forward of four": ("forward_kernel", "packed", {}, PACKED),
    "forward of three": (
        "forward_kernel",
        "dense",
        {"activation": "softplus", "k_lengths": (150,)},
        (((520,) * 4, 2), ((640,) * 5, 3), ((700,) * 3, 1), ((580,) * 3, 2)),
    ),
    "forward of two": ("forward_kernel", "packed", {"head_dim": 128}, PACKED),
    "backward": ("backward_kernel", "packed", {}, PACKED),
    "backward of long steps": ("backward_kernel", "packed", {}, LONG),
    "backward through dq": (
        "backward_kernel",
        "dense",
        {"head_dim": 128, "k_lengths": (300,) * 4},
        (((300,) * 4, 2), ((300,) * 4, 3), ((60,) * 4, 2)),
    ),
    "backward, causal": ("backward_kernel", "packed", {"causal": True}, LONG),
    "backward in a fixed order": ("backward_kernel", "packed", {"deterministic": True}, LONG),
}
SEEDS = 2


def run_all(name: str) -> list[simulated_launch.Kernel]:
    """The kernels that ran."""
    kernel, form, options, problems = KERNELS[name]
    ran = []
    for seed, (lengths, programs) in product(range(SEEDS), problems):
        case = make_case(form, **{**OPTIONS, **options}, q_lengths=lengths)
        q, k, v, cu_q, cu_k, _ = case.inputs
        cu_k = cu_q if options.get("causal") else cu_k
        problem = replace(case.problem, deterministic=options.get("deterministic", False))
        with simulated(programs, seed) as simulation:
            if kernel == "forward_kernel":
                launch.forward(problem, q, k, v, cu_q, cu_k, None)
            else:
                launch_backward.backward(problem, case.d_out, q, k, v, cu_q, cu_k, None, (True, True, True))
        ran += [x for x in simulation.kernels if x.translation.function == kernel]
    return ran


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """(what is left out, the kernel without it)."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not SYNCHRONISATION.search(line):
            continue
        result = re.match(r"\s*(%[\w.]+)(:\d+)? = ", line)
        if "warp_group_dot_wait" in line:  # one product more may be under way
            left = re.sub(r"pendings = (\d+)", lambda m: f"pendings = {int(m[1]) + 1}", line)
        elif "bar.sync gathered" in line:
            left = re.sub(r"bar\.sync gathered, \d+;", "", line).replace("is_pure = false", "")
            left = re.sub(r'asm ".*" \{', 'asm "// pinned" {', left)
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


def main(name: str, every: int, first: int) -> None:
    (kernel,) = set(run_all(name))  # the same for all problems
    key = next(key for key, value in simulated_launch._compiled.items() if value is kernel)
    for what, mutant in list(mutants(kernel.text))[first::every]:
        simulated_launch._compiled[key] = simulated_launch.Kernel(mutant)
        print(json.dumps({"what": what, "found": finding(lambda: run_all(name))}), flush=True)


def finding(run: Callable[[], object]) -> str | None:
    try:
        run()
    except Fault as fault:
        return str(fault)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

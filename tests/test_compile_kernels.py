"""Every kernel compiles for every architecture, with the Triton that is installed and the newest declared, inside its budgets."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from compile_kernels import CONFIGURATIONS, HOPPER, HOPPER_BACKWARD
from helpers import clean_env, needs_triton

ROOT = Path(__file__).resolve().parent.parent
NEWEST = ROOT / ".venv" / "triton-newest"
NEWEST_VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["gdpa"]["newest-triton"]

# What a block may hold, in bytes: an A100, an H100, a B200.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
THREADS_TIMES_REGISTERS = 65536

# How many instructions of a kernel may be spills: none in the schedule's, in the hopper backend's, and on Hopper at D = 128, which is
# tuned; elsewhere a handful of the thousands it has, and more where a kernel is known to: dK and dV fill the registers, and a window's
# mask adds to them.
SPILLS = {
    (90, "bf16-64-grouped-window", "key_gradient_kernel"): 48,
    (90, "bf16-96x40-unsafe", "key_gradient_kernel"): 40,
    (90, "fp16-256", "key_gradient_kernel"): 40,
    (90, "bf16-128-per-head", "forward_kernel"): 40,
    (90, "bf16-128-per-head", "query_gradient_kernel"): 24,
    (80, "bf16-64-grouped-window", "key_gradient_kernel"): 40,
    (80, "bf16-128-per-head", "key_gradient_kernel"): 80,
    (100, "bf16-64-grouped-window", "key_gradient_kernel"): 90,
}
A_HANDFUL = 16
SCHEDULE_KERNELS = 11
FIRST_BARRIER = 6  # forward.KEYS_EMPTY: Triton's own stay below
# Products of the hopper forward: two a block, of D / 16 and 8 steps; blocks stand in it twice a consumer, of whom there are two, or three
# or four at D = 64, and last products twice or once more, with three and four once less with the newest Triton. Four have blocks of 64
# keys, and 4 steps. Of the backward: five a step, of D / 16 (S, dP),
# 4 (dK, dV) and 8 (dQ); steps stand in it twice, and the last dK and dQ once more. Steps of 128 queries have 8 for each of dK, dV and dQ.
HOPPER_PRODUCTS = {("forward_kernel", 128): (88,), ("forward_kernel", 64): (72,), ("forward_kernel", "three"): (104, 112)}
HOPPER_PRODUCTS |= {("forward_kernel", "four"): (84, 92), ("forward_kernel", "loop-of-four"): (52, 60)}
HOPPER_PRODUCTS |= {("forward_kernel", "one-loop"): (68, 76)}  # whose blocks stand in it once a consumer
HOPPER_PRODUCTS |= {("backward_kernel", 128): (152,), ("backward_kernel", 64): (120,), ("backward_kernel", "without-dq"): (104,)}
HOPPER_PRODUCTS |= {("backward_kernel", "steps-of-128"): (160,), ("backward_kernel", "64-causal"): (117,)}
# Of causal tiles no query sees consumer 1's keys in its first step of 64 queries, where one product of 8 columns stands for the eight, at
# D = 64 four, of its scores.
HOPPER_PRODUCTS |= {("backward_kernel", "causal"): (145,)}
# What follows depends on the Triton that compiles: up to 3.6, and after it.
# The hopper forward's, of long activations and windows: a few numbers of a tile that its first step has no room for.
LONG_SPILLS = {False: (0, 24), True: (1, 24)}
LONG = ("hopper-gelu_tanh", "hopper-gelu-grouped", "hopper-fp16", "hopper-64-fp16", "hopper-64-shared")
LONG += ("hopper-64-four-fp16", "hopper-64-four-packed-fp16")
# At D = 64 three and four consumers of packed gelus have no register for one or a few numbers of a tile, which each step reads
# (plan_forward.FORMS).
PACKED_SPILLS = {False: (12, 48), True: (12, 48)}
PACKED = ("hopper-64-three-gelu", "hopper-64-four-gelu", "hopper-64-four-packed", "hopper-64-four-shared")
LONG += ("hopper-causal", "hopper-causal-gelu", "hopper-window")
# The hopper backward's spills, in its steps and in all: where a tile begins and ends, dK and dV are in the way.
BACKWARD_SPILLS = {False: (12, 80), True: (40, 240)}
UNSAFE_SPILLS = {False: (12, 80), True: (90, 360)}  # with a mask
LONG_STEP_SPILLS = {False: (40, 140), True: (0, 0)}  # at D = 64, with 128 queries a step, or 64


def spills_allowed(arch: int, configuration: str, kernel: str) -> int:
    if kernel == "backward_kernel":
        return max(most for _, most in UNSAFE_SPILLS.values())
    if configuration in LONG + PACKED:
        return max(most for _, most in (PACKED_SPILLS if configuration in PACKED else LONG_SPILLS).values())
    if configuration == "schedule" or configuration.startswith("hopper-") or (arch == 90 and configuration == "bf16-128"):
        return 0
    return SPILLS.get((arch, configuration, kernel), A_HANDFUL)


def compiled(arch: int, newest: bool) -> list[dict[str, int | str]]:
    env = clean_env()
    if newest:
        if not (NEWEST / "triton").exists():
            pytest.skip(f"Triton {NEWEST_VERSION} is not in .venv/triton-newest (make test installs it)")
        env["PYTHONPATH"] = f"{NEWEST}:{env['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(arch)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
@pytest.mark.parametrize("newest", [False, True], ids=["installed Triton", f"Triton {NEWEST_VERSION}"])
@pytest.mark.parametrize("arch", [80, 90, 100], ids="sm_{}".format)
def test_every_kernel_compiles_inside_its_budgets(arch, newest):
    rows = compiled(arch, newest)
    assert len(rows) == 3 * len(CONFIGURATIONS) + SCHEDULE_KERNELS + (len(HOPPER) + len(HOPPER_BACKWARD) if arch == 90 else 0)
    (version,) = {row["triton"] for row in rows}
    assert version == NEWEST_VERSION or not newest
    later = tuple(map(int, version.split(".")[:2])) > (3, 6)
    over = []
    for row in rows:
        name = (arch, row["configuration"], row["kernel"])
        if row["spills"] > spills_allowed(*name):
            over.append(f"{name}: {row['spills']} spill instructions, at most {spills_allowed(*name)}")
        if row["shared"] > SHARED_MEMORY[arch]:
            over.append(f"{name}: {row['shared']} bytes of shared memory, at most {SHARED_MEMORY[arch]}")
        if row["registers"] * row["threads"] > THREADS_TIMES_REGISTERS:
            over.append(f"{name}: {row['registers']} registers for each of {row['threads']} threads")
        if row["configuration"].startswith("hopper-"):
            width: int | str = 64 if "-64" in row["configuration"] else 128
            width = "without-dq" if "without-dq" in row["configuration"] else width
            width = "three" if "-64-three" in row["configuration"] else width
            width = "loop-of-four" if "-64-loop-of-four" in row["configuration"] else width
            width = "four" if "-64-four" in row["configuration"] else width
            width = "one-loop" if "-64-one-loop" in row["configuration"] else width
            width = "causal" if "backward-causal" in row["configuration"] else width
            if "steps-of-128" in row["configuration"] and later:  # they are of 64
                width = "64-causal" if "causal" in row["configuration"] else 64
            elif "steps-of-128" in row["configuration"]:
                width = "steps-of-128"
            if row["barrier"] >= FIRST_BARRIER:
                over.append(f"{name}: Triton takes barrier {row['barrier']}, and {FIRST_BARRIER} and up are the kernel's own")
            if row["products"] not in HOPPER_PRODUCTS[row["kernel"], width]:
                over.append(
                    f"{name}: {row['products']} warpgroup products, expected one of {HOPPER_PRODUCTS[row['kernel'], width]}"
                )
        if row["kernel"] == "backward_kernel" or row["configuration"] in LONG + PACKED:
            allowed = UNSAFE_SPILLS if row["configuration"].endswith("unsafe") else BACKWARD_SPILLS
            allowed = LONG_SPILLS if row["configuration"] in LONG else allowed
            allowed = PACKED_SPILLS if row["configuration"] in PACKED else allowed
            allowed = LONG_STEP_SPILLS if "steps-of-128" in row["configuration"] else allowed
            found, most = (row["spills_in_loops"], row["spills"]), allowed[later]
            if found[0] > most[0] or found[1] > most[1]:
                over.append(f"{name}: {found} spill instructions in steps and in all, at most {most}")
        if arch == 90 and row["bits"] == 16:
            # A wait after each product means that ptxas runs them one by one (tiles.settle).
            if row["products"] == 0:
                over.append(f"{name}: no warpgroup products")
            elif row["waits"] * 2 > row["products"]:
                over.append(f"{name}: {row['waits']} waits for {row['products']} products")
    assert not over, "\n".join(over)

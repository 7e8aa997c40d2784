"""Compile kernels for one architecture on a machine without it, and say what the assembler made of them.

Run as a script, in a process of its own: Triton's interpreter, which the other tests run under, cannot share it.

    python tests/compile_kernels.py 90 [configuration ...]    prints one JSON line per kernel
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch

# activations, D, Dv, dtype, masked, query heads per key head, form
CONFIGURATIONS: dict[str, tuple[Any, ...]] = {
    "bf16-128": (("silu",), 128, 128, torch.bfloat16, False, 1, "packed"),
    "bf16-64-grouped-window": (("gelu_tanh",), 64, 64, torch.bfloat16, True, 2, "packed"),
    "bf16-96x40-unsafe": (("log",), 96, 40, torch.bfloat16, False, 1, "dense"),
    "bf16-128-per-head": (("relu", "gelu", "silu", "tanh"), 128, 128, torch.bfloat16, False, 1, "dense-keys"),
    "bf16-128-shared": (("gelu",), 128, 128, torch.bfloat16, False, 1, "shared-queries"),
    "fp16-256": (("gelu",), 256, 256, torch.float16, False, 1, "packed"),
    "fp32-64-window": (("sigmoid",), 64, 64, torch.float32, True, 1, "packed"),
    "fp32-128": (("silu",), 128, 128, torch.float32, False, 1, "packed"),
    "fp32-256": (("silu",), 256, 256, torch.float32, False, 1, "packed"),
}


# The hopper backend's: activations, D, dtype, query heads per key head, form, key heads, rows a sequence, window.
HOPPER: dict[str, tuple[Any, ...]] = {
    "silu": (("silu",), 128, torch.bfloat16, 1, "packed"),
    "gelu_tanh": (("gelu_tanh",), 128, torch.bfloat16, 1, "dense"),
    "gelu-grouped": (("gelu",), 128, torch.bfloat16, 4, "dense-keys"),
    "per-head": (("relu", "gelu", "silu", "tanh"), 128, torch.bfloat16, 1, "packed"),
    "unsafe": (("log",), 128, torch.bfloat16, 1, "packed"),
    "fp16": (("gelu",), 128, torch.float16, 1, "packed"),
    "64-shared": (("gelu_tanh",), 64, torch.bfloat16, 1, "shared-queries", 4, 256, (-1, -1), 32),
    "64-fp16": (("gelu",), 64, torch.float16, 1, "packed", 4, 64),
    "64-three": (("silu",), 64, torch.bfloat16, 1, "dense", 4, 384),
    "64-three-gelu": (("gelu",), 64, torch.bfloat16, 1, "dense", 4, 576),
    "64-one-loop": (("gelu",), 64, torch.bfloat16, 1, "dense", 4, 384),
    "64-four": (("silu",), 64, torch.bfloat16, 1, "packed", 4, 256),
    "64-four-fp16": (("silu",), 64, torch.float16, 1, "packed", 4, 256),
    "64-four-gelu": (("gelu",), 64, torch.bfloat16, 1, "dense", 4, 1024),
    "64-four-packed": (("gelu_tanh",), 64, torch.bfloat16, 1, "dense", 4, 256),
    "64-four-packed-fp16": (("gelu",), 64, torch.float16, 1, "dense", 4, 1024),
    "64-loop-of-four": (("elu",), 64, torch.bfloat16, 1, "dense", 4, 512),
    "64-four-shared": (("gelu_tanh",), 64, torch.bfloat16, 2, "shared-queries", 4, 1024),
    "causal": (("silu",), 128, torch.bfloat16, 1, "packed", 4, 256, (-1, 0)),
    "causal-gelu": (("gelu_tanh",), 128, torch.bfloat16, 1, "dense", 4, 256, (-1, 0)),
    "64-causal": (("silu",), 64, torch.bfloat16, 1, "dense", 4, 2048, (-1, 0)),
    "window": (("gelu_tanh",), 128, torch.bfloat16, 2, "dense-keys", 4, 256, (100, 0)),
}


# The hopper backend's gradients: activations, D, dtype, query heads per key head, form, key heads, keys a sequence, gradients,
# whether their order counts, window.
HOPPER_BACKWARD: dict[str, tuple[Any, ...]] = {
    "silu": (("silu",), 128, torch.bfloat16, 1, "packed", 4, 256),
    "gelu_tanh-long": (("gelu_tanh",), 128, torch.bfloat16, 1, "dense", 4, 2048),
    "gelu_tanh-256": (("gelu_tanh",), 128, torch.bfloat16, 1, "dense", 4, 256),
    "gelu-grouped": (("gelu",), 128, torch.bfloat16, 4, "dense-keys", 2, 128),
    "unsafe": (("log",), 128, torch.bfloat16, 1, "packed", 4, 256),
    "shared": (("gelu",), 128, torch.bfloat16, 1, "shared-queries", 4, 64),
    "shared-silu": (("silu",), 128, torch.bfloat16, 1, "shared-queries", 4, 64),
    "fp16": (("gelu_tanh",), 128, torch.float16, 1, "packed", 4, 256),
    "fp16-gelu": (("gelu",), 128, torch.float16, 1, "packed", 4, 256),
    "64-fp16": (("gelu_tanh",), 64, torch.float16, 1, "packed", 4, 256),
    "64-steps-of-128-fp16": (("silu",), 64, torch.float16, 1, "packed", 4, 256),
    "64-steps-of-128": (("silu",), 64, torch.bfloat16, 1, "packed", 4, 1024),
    "64-steps-of-128-gelu": (("gelu_tanh",), 64, torch.bfloat16, 1, "dense", 4, 2048),
    "64-steps-of-128-relu": (("relu",), 64, torch.bfloat16, 1, "dense-keys", 4, 512),
    "64-steps-of-128-causal": (("silu",), 64, torch.bfloat16, 1, "dense", 4, 1024, (True, True, True), False, (-1, 0)),
    "without-dq": (("gelu",), 128, torch.bfloat16, 1, "packed", 4, 256, (False, True, True)),
    "ordered": (("silu",), 128, torch.bfloat16, 1, "packed", 4, 256, (True, True, True), True),
    "long": (("gelu_tanh",), 128, torch.bfloat16, 1, "dense", 4, 2048),
    "causal": (("silu",), 128, torch.bfloat16, 1, "packed", 4, 256, (True, True, True), False, (-1, 0)),
    "causal-short": (("silu",), 128, torch.bfloat16, 1, "dense", 4, 384, (True, True, True), False, (-1, 0)),
    "causal-long": (("gelu_tanh",), 128, torch.bfloat16, 1, "dense", 4, 2048, (True, True, True), False, (-1, 0)),
    "causal-ordered": (("silu",), 128, torch.bfloat16, 1, "packed", 4, 256, (True, True, True), True, (-1, 0)),
}


def cuobjdump(cubin: bytes, *options: str) -> str:
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def spills_in_loops(code: str, products: int | None = None) -> int:
    """Spill instructions in the innermost loops that multiply, or in those with so many products: elsewhere they cost little, there they
    come from L2 in every step."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)]
    place = {address: i for i, (address, _) in enumerate(lines)}
    loops = []
    for end, (address, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target is not None and int(target[1], 16) < address and int(target[1], 16) in place:
            loops.append((place[int(target[1], 16)], end))
    # A longer one is no step: blocks that the assembler moved behind the loop jump back over it.
    counts = {(a, b): sum("HGMMA" in text for _, text in lines[a : b + 1]) for a, b in loops}
    multiply = [x for x in loops if (counts[x] > 0 and x[1] - x[0] < 800 if products is None else counts[x] == products)]
    inner = [x for x in multiply if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in multiply)]
    return sum(bool(re.search(r"\b(?:STL|LDL)\b", text)) for a, b in inner for _, text in lines[a : b + 1])


def facts(kernel: Any, products: int | None = None) -> dict[str, int]:
    """`products` are those of a step, where it is too long to be known as one by its length."""
    usage = cuobjdump(kernel.asm["cubin"], "-res-usage")
    code = cuobjdump(kernel.asm["cubin"], "-sass")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    # Barriers that Triton names by number; the hopper kernels' own are passed in registers.
    barriers = re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive|red)[.\w]*\s+(\d+)", kernel.asm["ptx"])
    return {
        "barrier": max(map(int, barriers), default=0),
        "registers": int(registers[1]),
        "shared": kernel.metadata.shared,
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "spills_in_loops": spills_in_loops(code, products),
        "products": len(re.findall(r"\bHGMMA\b", code)),
        "waits": len(re.findall(r"WARPGROUP\.DEPBAR", code)),
    }


def report(kernel: Any, arch: int, configuration: str, name: str, bits: int, products: int | None = None) -> None:
    import triton

    row = {"triton": triton.__version__, "arch": arch, "configuration": configuration, "kernel": name, "bits": bits}
    print(json.dumps(row | {"threads": 32 * kernel.metadata.num_warps} | facts(kernel, products)), flush=True)


def keys_of(activations: tuple[str, ...]) -> tuple[str, ...]:
    import gdpa

    return tuple(gdpa.Activation(torch.log).key if key == "log" else key for key in activations)


def main(arch: int, names: list[str]) -> None:
    from gdpa import schedule_kernels
    from gdpa.backends.gpu import target_architecture
    from gdpa.backends.triton import launch

    for name in names or CONFIGURATIONS:
        activations, *rest, form = CONFIGURATIONS[name]
        with target_architecture(arch):
            for planned in launch.plans(keys_of(activations), *rest, arch, form):
                report(planned.compile(), arch, name, planned.kernel.__name__, 8 * rest[2].itemsize)
    if names:
        return
    with target_architecture(arch):
        for name, kernel in schedule_kernels.compiled(128):
            report(kernel, arch, "schedule", name, 32)
    if arch == 90:
        from gdpa.backends.hopper.compat import LONG_STEPS
        from gdpa.backends.hopper.launch import compile_forward
        from gdpa.backends.hopper.launch_backward import compile_backward

        for name, (activations, *hopper_rest) in HOPPER.items():
            report(compile_forward(keys_of(activations), *hopper_rest), arch, f"hopper-{name}", "forward_kernel", 16)
        for name, (activations, *backward_rest) in HOPPER_BACKWARD.items():
            kernel = compile_backward(keys_of(activations), *backward_rest)
            products = 32 if "steps-of-128" in name and LONG_STEPS else None
            report(kernel, arch, f"hopper-backward-{name}", "backward_kernel", 16, products)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

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


def cuobjdump(cubin: bytes, *options: str) -> str:
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def facts(kernel: Any) -> dict[str, int]:
    usage = cuobjdump(kernel.asm["cubin"], "-res-usage")
    code = cuobjdump(kernel.asm["cubin"], "-sass")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return {
        "registers": int(registers[1]),
        "shared": kernel.metadata.shared,
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "products": len(re.findall(r"\bHGMMA\b", code)),
        "waits": len(re.findall(r"WARPGROUP\.DEPBAR", code)),
    }


def main(arch: int, names: list[str]) -> None:
    import triton

    import gdpa
    from gdpa.backends.triton import launch

    for name in names:
        activations, *rest, form = CONFIGURATIONS[name]
        keys = tuple(gdpa.Activation(torch.log).key if key == "log" else key for key in activations)
        with launch.target_architecture(arch):
            for planned in launch.plans(keys, *rest, arch, form):
                kernel = planned.compile()
                row = {"triton": triton.__version__, "arch": arch, "configuration": name, "kernel": planned.kernel.__name__}
                print(
                    json.dumps(row | {"threads": 32 * planned.config.warps, "bits": 8 * rest[2].itemsize} | facts(kernel)),
                    flush=True,
                )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or list(CONFIGURATIONS))

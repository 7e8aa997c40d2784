"""Launches of the portable kernels by recipe and by Triton, on a machine without a GPU: test_launching.py runs this in a process of its
own, whose Triton does not interpret, and reads what it prints, a JSON object for each case.

Triton's argument binding and its choice of a compiled kernel are its own; what it compiles is a stand-in that takes notes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch
import triton
from helpers import Case, make_case
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gdpa import launching, schedule
from gdpa.backends.triton import run

BASE: dict[str, Any] = {"q_lengths": (130, 7), "k_lengths": (5, 300), "heads": 4, "kv_heads": 2, "head_dim": 64}
BASE |= {"dtype": torch.bfloat16, "activation": "silu"}
DENSE = {"form": "dense", "q_lengths": (3, 3), "k_lengths": (5, 5)}


def cases() -> Iterator[tuple[str, Case]]:
    """Each differs from one before in what a kernel is compiled for, or in what it is not."""
    yield "packed", make_case(**BASE)
    yield "other rows", make_case(**BASE | {"q_lengths": (64, 64), "k_lengths": (1, 16)})
    yield "another batch", make_case(**BASE | {"q_lengths": (16, 1, 1), "k_lengths": (16, 3, 1)})
    for heads in (1, 2, 16):
        yield f"{heads} heads", make_case(**BASE | {"heads": heads, "kv_heads": 1})
    yield "offsets of both types", make_case(**BASE, offset_dtypes=(torch.int64, torch.int32))
    yield "float16", make_case(**BASE | {"dtype": torch.float16})
    yield "float32", make_case(**BASE | {"dtype": torch.float32})
    yield "threads copy", make_case(**BASE | {"head_dim": 24})
    yield "another width of v", make_case(**BASE, value_dim=128)
    yield "window", make_case(**BASE, causal=True)
    yield "another activation", make_case(**BASE | {"activation": "gelu"})
    yield "other scales", make_case(**BASE, scale=0.5, out_scale=0.25)
    scaled = make_case(**BASE, out_scale="per-sequence")
    yield "scales of sequences", scaled
    apart = torch.ones(3)[1:]
    assert apart.data_ptr() % 16
    yield "scales at another address", dataclasses.replace(scaled, inputs=scaled.inputs._replace(out_scale=apart))
    sliced = make_case(**BASE)
    fused = torch.ones(137, 4, 3, 64, dtype=torch.bfloat16)
    yield "a slice", dataclasses.replace(sliced, inputs=sliced.inputs._replace(q=fused[:, :, 1]))
    wide = torch.ones(137, 3, 6, 64, dtype=torch.bfloat16)
    for heads in (6, 4):  # rows lie alike, and a descriptor of them ends elsewhere
        part = make_case(**BASE | {"heads": heads, "kv_heads": heads, "q_lengths": (130, 7), "k_lengths": (130, 7)})
        q, k, v = wide[:, :, :heads].unbind(1)
        yield f"{heads} of 6 heads", dataclasses.replace(part, inputs=part.inputs._replace(q=q, k=k, v=v))
    whole = torch.ones(137 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(137, 4, 64)
    assert whole.data_ptr() % 16
    yield "an address to copy from", dataclasses.replace(sliced, inputs=sliced.inputs._replace(q=whole))
    # The distance of dense sequences is given in eights of elements: 1, a multiple of 16 or neither.
    for heads, head_dim in ((1, 8), (4, 24), (4, 128), (4, 64)):
        options = {"heads": heads, "kv_heads": heads, "head_dim": head_dim}
        yield f"dense, {heads} x {head_dim}", make_case(**BASE | DENSE | options)
        yield (
            f"dense, {heads} x {head_dim}, four rows",
            make_case(**BASE | DENSE | options | {"q_lengths": (4, 4), "k_lengths": (4, 4)}),
        )
        yield (
            f"dense, {heads} x {head_dim}, one row",
            make_case(**BASE | DENSE | options | {"q_lengths": (1,) * 2, "k_lengths": (1,) * 2}),
        )
    yield "dense keys", make_case("dense-key", **BASE)
    yield "shared queries", make_case("shared-query", **BASE)
    yield "shared queries, other keys", make_case("shared-query", **BASE | {"k_lengths": (7, 0, 9)})


class Compiled:
    """Stands in for what Triton compiles: takes notes of its launches."""

    def __init__(self, name: str, launches: list[Any]) -> None:
        self.name, self.launches = name, launches
        self.function, self.packed_metadata = id(self), (4, 1, 1000)

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        assert stream == 7
        self.launches.append((self, (x, y, z), rest[4:]))


class Driver:
    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


def pretend(launches: list[Any]) -> list[str]:
    """As on a Hopper GPU; returns the names of the kernels that Triton is asked to launch."""
    asked: list[str] = []
    bind = JITFunction.run

    def compile_nothing(self: Any, key: str, signature: Any, device: int, *_: Any) -> Compiled:
        kernel = self.device_caches[device][0][key] = Compiled(self.__name__, launches)
        return kernel

    def ask(self: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(self.__name__)
        return bind(self, *arguments, **options)

    JITFunction._do_compile = compile_nothing
    JITFunction.run = ask
    driver.set_active(Driver())
    run.architecture = lambda device: 90
    launching.is_known = lambda device: True
    schedule._by_kernel = lambda *sides: True
    torch._C._cuda_getDevice = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda index: 7
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    return asked


def call(case: Case, needs: tuple[bool, bool, bool]) -> dict[int, str]:
    """Forward and backward; the names of the tensors by address."""
    out = run.forward(case.problem, *case.inputs)
    grads = run.backward(case.problem, case.d_out, *case.inputs, needs)
    names = {0: "nothing"}
    for name, x in (*case.inputs._asdict().items(), ("d_out", case.d_out)):
        if x is not None:
            names[x.data_ptr()] = name
    for kind, (built, _, _) in ((key[0], entry) for key, entry in schedule._cache.items()):
        if kind[0] != "lists":
            names[built.data_ptr()] = str(kind)
    for name, grad, needed in zip(("dq", "dk", "dv"), grads, needs, strict=True):
        assert (grad is not None) == needed
        if grad is not None:
            names[grad.data_ptr()] = name
    return names | {out.data_ptr(): "out"}


def readable(x: Any, names: dict[int, str]) -> Any:
    """An argument by what it is, wherever it lies: memory that the call has freed again is unnamed."""
    if hasattr(x, "base"):
        return "descriptor", names.get(x.base.data_ptr()), list(x.shape), list(x.strides), x.padding
    if isinstance(x, torch.Tensor):
        x = x.data_ptr()
    if isinstance(x, JITFunction):
        return x.__name__
    if isinstance(x, triton.language.constexpr):
        return x.value
    return names.get(x, "freed") if type(x) is int and (x in names or x > 2**31) else x


def main() -> None:
    launches: list[Any] = []
    asked = pretend(launches)
    for name, case in cases():
        for needs in ((True, True, True), (True, False, False), (False, False, True)):
            passes = {how: observed(case, needs, asked, launches) for how in ("first", "again")}
            kept, launching._recipes = launching._recipes, {}
            forgotten = dataclasses.replace(case, problem=dataclasses.replace(case.problem))
            passes["fresh"] = observed(forgotten, needs, asked, launches)
            launching._recipes = kept
            print(json.dumps({"case": name, "needs": needs, **passes}))


def observed(case: Case, needs: tuple[bool, bool, bool], asked: list[str], launches: list[Any]) -> dict[str, Any]:
    """What Triton was asked to launch, and what was launched, by which compiled kernel, with what."""
    del launches[:], asked[:]
    names = call(case, needs)
    seen = [(kernel.name, id(kernel), grid, [readable(x, names) for x in arguments]) for kernel, grid, arguments in launches]
    return {"asked": list(asked), "launches": seen}


if __name__ == "__main__":
    main()

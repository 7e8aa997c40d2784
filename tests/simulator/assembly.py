"""What inline PTX computes, element by element: the instructions that activations are made of.

A register is an int32 tensor of bits here, whatever its type; 16-bit registers are the low halves. Packed operands hold neighbouring
elements of a tensor's last dimension, the first one in the low half.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from simulator.races import Fault

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def floats(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float32)


def halves(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A packed register as fp32 pairs, in a new last dimension."""
    return x.contiguous().unsqueeze(-1).view(dtype).float()


def packed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous().view(torch.int32).squeeze(-1)


def half(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values as 16-bit registers."""
    return x.to(dtype).view(torch.int16).int() & 0xFFFF


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x: bits(function(floats(x)))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: bits(function(floats(x), floats(y)))


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return bits((floats(x).double() * floats(y).double() + floats(z).double()).float())


def _packed_operation(dtype: torch.dtype, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *operands: packed(function(*(halves(x, dtype).double() for x in operands)).float(), dtype)


def _lop3(x: Tensor, y: Tensor, z: Tensor, table: Tensor) -> Tensor:
    """Bit by bit what the table has for the bits of x, y and z, those of x the most significant of its index."""
    result = torch.zeros_like(x)
    for index in range(8):
        if int(table.flatten()[0]) >> index & 1:
            terms = [operand if index >> place & 1 else ~operand for place, operand in ((2, x), (1, y), (0, z))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def _pair(dtype: torch.dtype, largest: float | None) -> Callable[..., Tensor]:
    def convert(high: Tensor, low: Tensor) -> Tensor:
        pair = torch.stack([floats(low), floats(high)], -1)
        return packed(pair if largest is None else pair.clamp(-largest, largest), dtype)

    return convert


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda x: x,
    "mov.f32": lambda x: x,
    "or.b32": torch.bitwise_or,
    "lop3.b32": _lop3,
    "tanh.approx.f32": _unary(torch.tanh),
    "ex2.approx.ftz.f32": _unary(torch.exp2),
    "ex2.approx.f32": _unary(torch.exp2),
    "lg2.approx.f32": _unary(torch.log2),
    "lg2.approx.ftz.f32": _unary(torch.log2),
    "rcp.approx.ftz.f32": _unary(torch.reciprocal),
    "sqrt.approx.f32": _unary(torch.sqrt),
    "rsqrt.approx.f32": _unary(torch.rsqrt),
    "add.f32": _binary(torch.add),
    "sub.f32": _binary(torch.sub),
    "mul.f32": _binary(torch.mul),
    "fma.rn.f32": _fma,
    "cvt.rn.bf16.f32": lambda x: half(floats(x), torch.bfloat16),
    "cvt.rn.f16.f32": lambda x: half(floats(x), torch.float16),
    "cvt.f32.f16": lambda x: bits(halves(x, torch.float16)[..., 0]),
    "cvt.rn.bf16x2.f32": _pair(torch.bfloat16, None),
    "cvt.rn.f16x2.f32": _pair(torch.float16, None),
    "cvt.rn.satfinite.f16x2.f32": _pair(torch.float16, 65504.0),
}
for _name, _dtype in DTYPES.items():
    OPERATIONS[f"mul.rn.{_name}x2"] = _packed_operation(_dtype, torch.mul)
    OPERATIONS[f"add.rn.{_name}x2"] = _packed_operation(_dtype, torch.add)
    OPERATIONS[f"fma.rn.{_name}x2"] = _packed_operation(_dtype, lambda x, y, z: x * y + z)
    OPERATIONS[f"fma.rn.relu.{_name}x2"] = _packed_operation(_dtype, lambda x, y, z: (x * y + z).clamp(min=0.0))
    OPERATIONS[f"mul.rn.sat.{_name}x2"] = _packed_operation(_dtype, lambda x, y: (x * y).clamp(0.0, 1.0).nan_to_num(0.0))
    OPERATIONS[f"sub.rn.{_name}x2"] = _packed_operation(_dtype, torch.sub)
    OPERATIONS[f"abs.{_name}x2"] = _packed_operation(_dtype, torch.abs)
    OPERATIONS[f"tanh.approx.{_name}x2"] = _packed_operation(_dtype, torch.tanh)


@cache
def parse(text: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """(operation, destination, operands) of each instruction."""
    text = re.sub(r"//[^\n]*", "", text)
    instructions = []
    for line in text.strip().removeprefix("{").removesuffix("}").replace("\n", " ").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        operands = [x.strip() for x in re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest)]
        if name not in OPERATIONS:
            raise Fault(f"the simulator does not know the instruction {line!r}")
        instructions.append((name, operands[0], tuple(operands[1:])))
    return tuple(instructions)


def run(text: str, pack: int, inputs: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """The results of elementwise inline assembly, as tensors of the dtypes. Inputs are tensors of one shape."""
    registers: dict[str, Tensor] = {}
    counts = [max(pack * dtype.itemsize // 4, 1) for dtype in dtypes]
    number = sum(counts)
    shape = inputs[0].shape
    for x in inputs:
        x = x.contiguous()
        if x.element_size() == 4:
            parts = [bits(x)] if pack == 1 else list(bits(x).view(*shape[:-1], -1, pack).unbind(-1))
        elif x.element_size() == 2 and pack % 2 == 0:
            parts = list(x.view(torch.int32).view(*shape[:-1], -1, pack // 2).unbind(-1))
        else:
            raise Fault(f"the simulator does not pack {pack} elements of {x.dtype}")
        for part in parts:
            registers[f"${number}"] = part
            number += 1
    example = next(iter(registers.values()))

    def value(operand: str) -> Tensor:
        if operand.startswith("{"):
            low, high = (x.strip() for x in operand[1:-1].split(","))
            return (value(low) & 0xFFFF) | (value(high) << 16)
        if operand in registers:
            return registers[operand]
        if operand.startswith("0f"):
            operand = f"0x{operand[2:]}"
        word = int(operand, 0)
        return torch.full_like(example, word - (word >> 31 << 32) if word > 0 else word)

    for name, destination, operands in parse(text):
        registers[destination] = OPERATIONS[name](*map(value, operands))
    results = []
    first = 0
    for count, dtype in zip(counts, dtypes, strict=True):
        together = [registers[f"${i}"] for i in range(first, first + count)]
        first += count
        whole = together[0] if pack == 1 else torch.stack(together, -1).reshape(*shape[:-1], -1)
        results.append(whole.contiguous().view(dtype).view(shape))
    return results

"""What the instructions of TTGIR compute. A scalar is a Python number, of its type's range and precision; a tensor is a torch tensor."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulator import assembly
from simulator.machine import Machine, plain
from simulator.races import Fault

DTYPES = {
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}


def dtype_of(kind: str) -> torch.dtype:
    """Of an element type as TTGIR writes it; pointers are addresses."""
    return torch.int64 if kind.startswith("!tt.ptr") else DTYPES[kind]


def number(value: Any, kind: str) -> Any:
    """A scalar as its type holds it."""
    if kind == "i1":
        return bool(value)
    if kind[0] == "i":
        width = int(kind[1:])
        return ((int(value) + (1 << (width - 1))) & ((1 << width) - 1)) - (1 << (width - 1))
    if kind == "f32":
        try:
            return struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            return math.copysign(math.inf, value)
    if kind == "f64":
        return float(value)
    return float(torch.tensor(value, dtype=DTYPES[kind]).item())


def constant(value: Any, shape: tuple[int, ...] | None, kind: str) -> Any:
    if shape is None:
        return number(value, kind)
    return torch.tensor(value, dtype=dtype_of(kind)).expand(shape)


def bit_pattern(value: int, kind: str) -> float:
    """A float that is written as its bits."""
    width = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}[kind]
    return float(torch.frombuffer(bytearray(value.to_bytes(width, "little")), dtype=DTYPES[kind])[0])


def _divide(x: int, y: int) -> int:
    """Towards zero."""
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


def _scalar_divide(x: float, y: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64) / torch.tensor(y, dtype=torch.float64))


def _unsigned(x: int, kind: str) -> int:
    return int(x) & ((1 << int(kind[1:])) - 1)


# name: (of scalars, of tensors)
BINARY: dict[str, tuple[Callable[[Any, Any], Any] | None, Callable[[Any, Any], Any]]] = {
    "addi": (operator.add, torch.add),
    "subi": (operator.sub, torch.sub),
    "muli": (operator.mul, torch.mul),
    "divsi": (_divide, lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    "remsi": (lambda x, y: x - _divide(x, y) * y, torch.fmod),
    "andi": (operator.and_, torch.bitwise_and),
    "ori": (operator.or_, torch.bitwise_or),
    "xori": (operator.xor, torch.bitwise_xor),
    "shli": (operator.lshift, torch.bitwise_left_shift),
    "shrsi": (operator.rshift, torch.bitwise_right_shift),
    "maxsi": (max, torch.maximum),
    "minsi": (min, torch.minimum),
    "addf": (operator.add, torch.add),
    "subf": (operator.sub, torch.sub),
    "mulf": (operator.mul, torch.mul),
    "divf": (_scalar_divide, torch.div),
    "maximumf": (None, torch.maximum),  # of scalars as of tensors: NaN is not Python's business
    "minimumf": (None, torch.minimum),
    "maxnumf": (None, torch.fmax),
    "minnumf": (None, torch.fmin),
}

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "absf": torch.abs,
    "negf": torch.neg,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "precise_sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "sin": torch.sin,
    "cos": torch.cos,
}

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "slt": operator.lt,
    "sle": operator.le,
    "sgt": operator.gt,
    "sge": operator.ge,
    "oeq": operator.eq,
    "une": operator.ne,
    "olt": operator.lt,
    "ole": operator.le,
    "ogt": operator.gt,
    "oge": operator.ge,
}


def binary(name: str, x: Any, y: Any, kind: str) -> Any:
    x, y = plain(x), plain(y)
    of_scalars, of_tensors = BINARY[name]
    if isinstance(x, Tensor):
        return of_tensors(x, y)
    if of_scalars is None:
        return number(of_tensors(torch.tensor(x), torch.tensor(y)).item(), kind)
    return number(of_scalars(x, y), kind)


def unary(name: str, x: Any, kind: str) -> Any:
    x = plain(x)
    if isinstance(x, Tensor):
        return UNARY[name](x)
    return number(UNARY[name](torch.tensor(x, dtype=torch.float64)).item(), kind)


def compare(how: str, x: Any, y: Any, kind: str) -> Any:
    x, y = plain(x), plain(y)
    if how in ("ult", "ule", "ugt", "uge") and kind[0] == "i":
        if isinstance(x, Tensor):
            raise Fault("the simulator compares unsigned scalars, not tensors")
        x, y, how = _unsigned(x, kind), _unsigned(y, kind), "s" + how[1:]
    elif how[0] == "u" and how not in COMPARISONS:  # unordered: true where either is NaN
        ordered = COMPARISONS["o" + how[1:]](x, y)
        return ordered | (x != x) | (y != y)
    elif how == "one":
        return (x < y) | (x > y)
    return COMPARISONS[how](x, y)


def select(condition: Any, x: Any, y: Any) -> Any:
    x, y = plain(x), plain(y)
    if isinstance(condition, Tensor):
        return torch.where(condition, x, y)
    return x if condition else y


def convert(x: Any, source: str, target: str, unsigned: bool = False) -> Any:
    """To another type: rounded to even, or, of integers, cut off or extended."""
    x = plain(x)
    if target == "i1" or (source == "i1" and not unsigned):
        raise Fault(f"the simulator does not make {target} of {source}")
    if isinstance(x, Tensor):
        if target[0] == "i" and source[0] != "i":
            x = x.trunc()
        if unsigned and source not in ("i1",):
            raise Fault("the simulator does not extend unsigned tensors")
        return x.to(dtype_of(target))
    if unsigned:
        x = int(x) if source == "i1" else _unsigned(x, source)
    return number(int(x) if target[0] == "i" else x, target)


def bitcast(x: Any, source: str, target: str) -> Any:
    x = plain(x)
    if source == target or source.startswith("!tt.ptr"):
        return x
    if isinstance(x, Tensor):
        return x.contiguous().view(dtype_of(target))
    return number(torch.tensor(x, dtype=dtype_of(source)).view(dtype_of(target)).item(), target)


def reduce(x: Tensor, axis: int, how: str) -> Any:
    if how == "addi":
        result = x.sum(axis, dtype=x.dtype)
    elif how == "addf":
        result = x.sum(axis)
    elif how in ("maxsi", "maximumf"):
        result = x.amax(axis)
    else:
        raise Fault(f"the simulator does not reduce by {how}")
    return result if result.dim() else result.item()


def inline(text: str, pack: int, shape: tuple[int, ...] | None, dtypes: list[str], operands: list[Any]) -> Any:
    """Elementwise inline assembly."""
    tensors = [x if isinstance(x, Tensor) else _one(x) for x in map(plain, operands)]
    targets = [dtype_of(x) for x in dtypes]
    results = tensors if text.strip() == "// pinned" else assembly.run(text, pack, tensors, targets)
    if shape is None:
        results = [x.item() for x in results]
    return results[0] if len(results) == 1 else tuple(results)


def _one(x: Any) -> Tensor:
    return torch.tensor([x], dtype=torch.float32 if isinstance(x, float) else torch.int32)


# Pointers.


def advance(pointer: Any, offset: Any, size: int) -> Any:
    if isinstance(offset, Tensor):
        offset = offset.long()
    return pointer + offset * size


def _memory(machine: Machine, pointers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor that addresses lie in, as its elements in a row, and their indices."""
    lowest, highest = int(pointers.min()), int(pointers.max())
    memory, first = machine.find(lowest, dtype.itemsize)
    machine.find(highest, dtype.itemsize)
    whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole, (pointers - lowest + first) // dtype.itemsize


def load(machine: Machine, pointer: Any, mask: Any, other: Any, kind: str, shape: tuple[int, ...] | None) -> Any:
    dtype = dtype_of(kind)
    if shape is None:
        if mask is not None and not mask:
            return other if other is not None else number(0, kind)
        memory, at = machine.find(pointer, dtype.itemsize)
        return memory[at : at + dtype.itemsize].view(dtype).item()
    result = torch.zeros(shape, dtype=dtype) if other is None else other.clone(memory_format=torch.contiguous_format)
    chosen = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    if chosen.any():
        memory, at = _memory(machine, pointer[chosen], dtype)
        result[chosen] = memory[at]
    return result


def store(machine: Machine, pointer: Any, value: Any, mask: Any, kind: str) -> None:
    dtype = dtype_of(kind)
    if not isinstance(pointer, Tensor):
        if mask is None or mask:
            memory, at = machine.find(pointer, dtype.itemsize)
            memory[at : at + dtype.itemsize].view(dtype).fill_(value)
        return
    chosen = torch.ones(pointer.shape, dtype=torch.bool) if mask is None else mask
    if chosen.any():
        memory, at = _memory(machine, pointer[chosen], dtype)
        memory[at] = plain(value)[chosen]

"""What a Python function captures: a hashable fingerprint of its code and of every value that the code reads.

Tracing a function costs milliseconds, so results are remembered by fingerprint. Two functions with equal fingerprints
compute the same; what cannot be fingerprinted (an object of a user's class, a list, a bound method) yields None, and
the caller traces afresh.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch

# Packages whose functions are taken to be fixed: the standard library's pure ones, and torch.
_FIXED_PACKAGES = frozenset({"torch", "math", "cmath", "operator", "functools", "itertools", "typing", "builtins"})
_PURE_BUILTINS = frozenset(
    {"abs", "bool", "divmod", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "map", "max", "min"}
    | {"pow", "range", "reversed", "round", "slice", "sorted", "str", "sum", "tuple", "type", "zip", "print"}
    | {"Exception", "ValueError", "TypeError", "RuntimeError", "AssertionError", "NotImplemented", "Ellipsis"}
)
_MISSING = ("missing",)


class _Unknown(Exception):
    """Something captured cannot be fingerprinted."""


def fingerprint(fn: Any) -> Hashable | None:
    """A value that is equal for two callables only if they compute the same; None if that cannot be told."""
    try:
        return _of_value(fn, [])
    except _Unknown:
        return None


def captures(fn: Any) -> str | None:
    """What a callable captures besides fixed modules and functions of torch, in words; None if nothing.

    Where it captures nothing, its code alone says what it computes.
    """
    if _is_fixed(fn):
        return None
    if type(fn) is not types.FunctionType:
        return f"a {type(fn).__name__}, which may hold values"
    if fn.__closure__:
        return f"the closure variable {fn.__code__.co_freevars[0]!r}"
    if fn.__defaults__ or fn.__kwdefaults__:
        return "a default argument"
    if fn.__dict__:
        return f"the attribute {next(iter(fn.__dict__))!r}"
    for kind, path in _reads(fn.__code__):
        if kind == "cell":
            continue  # there is no closure: a variable of this function, seen by one nested in it
        value = getattr(builtins, path[0], None) if path[0] not in fn.__globals__ else fn.__globals__[path[0]]
        if kind == "import":
            value = sys.modules.get(path[0])
        elif path[0] not in fn.__globals__ and path[0] in _PURE_BUILTINS:
            continue
        if not (isinstance(value, types.ModuleType) and _package(value.__name__) in _FIXED_PACKAGES):
            return f"the global {'.'.join(path)!r}"
    return None


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_fixed(value: Any) -> bool:
    """A function or class of torch or the standard library, with no object bound to it."""
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        owner = getattr(value, "__self__", None)
        if isinstance(owner, types.ModuleType):
            return _package(owner.__name__).removeprefix("_") in _FIXED_PACKAGES  # time.time is not; operator's are of _operator
        return owner is None or isinstance(owner, type)
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return True
    if isinstance(value, types.FunctionType):
        # functools.wraps copies the wrapped function's module, which a partial has of functools, and not the globals that the code reads.
        # What a closure holds may be of any module.
        return (
            not value.__closure__ and {_package(value.__module__), _package(value.__globals__.get("__name__"))} <= _FIXED_PACKAGES
        )
    if isinstance(value, type):
        return _package(value.__module__) in _FIXED_PACKAGES
    return isinstance(value, (torch.dtype, torch.device, torch.layout))


def _of_value(value: Any, seen: list[Any]) -> Hashable:
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind in (int, bool, str, bytes, type(None)):
        return kind, value
    if kind in (tuple, frozenset):
        return kind, tuple(_of_value(item, seen) for item in value)
    if _is_fixed(value):
        return "fixed", value
    if getattr(kind, "gdpa_fingerprint", None) is not None:
        return kind, value.gdpa_fingerprint
    if kind is functools.partial:
        parts = (value.func, *value.args), tuple(value.keywords), tuple(value.keywords.values())
        return kind, *(tuple(_of_value(item, seen) for item in part) for part in parts)
    if kind is types.FunctionType:
        return _of_function(value, seen)
    if isinstance(value, torch.nn.Module) and _package(kind.__module__) == "torch":
        return _of_module(value, seen)
    raise _Unknown


def _of_module(layer: torch.nn.Module, seen: list[Any]) -> Hashable:
    """A module of torch (GELU, LeakyReLU, a Sequential of these): its class, its attributes, and its children."""
    parts: list[Any] = [type(layer)]
    for name, value in vars(layer).items():
        if name == "_modules":
            parts.append(tuple((child, _of_value(inner, seen)) for child, inner in value.items()))
        elif not (isinstance(value, (dict, set)) and not value):  # no parameters, buffers or hooks
            parts.append((name, _of_value(value, seen)))
    return tuple(parts)


def _of_function(fn: types.FunctionType, seen: list[Any]) -> Hashable:
    for place, earlier in enumerate(seen):
        if earlier is fn:
            return "recursion", place
    seen.append(fn)
    parts: list[Hashable] = [fn.__code__]
    kwdefaults = fn.__kwdefaults__ or {}
    attributes = {name: value for name, value in vars(fn).items() if name != "__annotations__"}
    parts.append(_of_value((fn.__defaults__, tuple(kwdefaults), tuple(kwdefaults.values())), seen))
    parts.append(_of_value((tuple(attributes), tuple(attributes.values())), seen))
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    read: set[str] = set()
    for kind, path in _reads(fn.__code__):
        if kind == "cell" and path[0] not in cells:
            continue  # a variable of this function, seen by one nested in it
        read.add(path[0])
        parts.append((path, _of_path(fn, kind, path, cells, seen)))
    for name, cell in cells.items():
        if name not in read:
            parts.append((name, _of_value(_contents(cell), seen)))
    return tuple(parts)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise _Unknown from None


def _of_path(
    fn: types.FunctionType, kind: str, path: tuple[str, ...], cells: dict[str, types.CellType], seen: list[Any]
) -> Hashable:
    """The fingerprint of what `name.attribute...` reads, following the attributes of modules."""
    name = path[0]
    if kind == "cell":
        value = _contents(cells[name])
    elif kind == "import":
        value = sys.modules.get(name)
        if not isinstance(value, types.ModuleType) or _package(name) not in _FIXED_PACKAGES:
            raise _Unknown
        return "import", name
    elif name in fn.__globals__:
        value = fn.__globals__[name]
    elif name in _PURE_BUILTINS:
        return "builtin", name
    elif hasattr(builtins, name):
        raise _Unknown  # eval, globals, getattr, open: what they read cannot be told
    else:
        return _MISSING
    for attribute in path[1:]:
        if not isinstance(value, types.ModuleType):
            break  # numbers and functions: their own fingerprints cover their attributes
        if not hasattr(value, attribute):
            return _MISSING
        value = getattr(value, attribute)
    if isinstance(value, types.ModuleType):
        if _package(value.__name__) in _FIXED_PACKAGES:
            return "module", value.__name__
        raise _Unknown  # passed on as an object: what is read of it cannot be told
    return _of_value(value, seen)


@functools.lru_cache(maxsize=1024)
def _reads(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The globals, cells and imports that a code object reads, each with the attributes taken of it: (kind, path)."""
    return tuple(dict.fromkeys(_scan(code)))


def _scan(code: types.CodeType) -> Iterator[tuple[str, tuple[str, ...]]]:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PUSH_NULL", "NOP", "EXTENDED_ARG")]
    for place, instruction in enumerate(instructions):
        operation, name = instruction.opname, instruction.argval
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            kind = "global"
        elif operation in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            kind = "cell"
        elif operation == "IMPORT_NAME":
            kind = "import"
        else:
            continue
        path = [name]
        if kind != "import":
            for following in instructions[place + 1 :]:
                if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    break
                path.append(following.argval)
        yield kind, tuple(path)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _scan(constant)

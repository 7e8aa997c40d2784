"""Graphs: straight lines of elementwise operations over the score `s`, in SSA form.

Two levels share one vocabulary, `OPERATIONS`:

- the *torch level*, whose operations are the ones autograd differentiates (`relu`, `silu`, `silu_backward`, ...).
  Evaluating it runs torch's own kernels, so derivatives at kinks follow torch's conventions.
- the *primitive level* (`gdpa.lowering`), where those are spelled out in `exp`, `where`, `mul`, ... for device code.

A graph has a text, which `parse_graph` reads back; it accepts nothing but that grammar and those operations:

    t0=relu(s); t1=pow(t0,2.0); t2=mul(t0,2.0); t3=threshold_backward(t2,t0,0.0); -> t1, t3
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gdpa.errors import GdpaError


@dataclass(frozen=True, slots=True)
class Ref:
    """A value computed by a graph: the result of its statement `index`, or the score where `index` is -1."""

    index: int


SCORE = Ref(-1)
Operand = Ref | float | bool


@dataclass(frozen=True)
class Operation:
    """One entry of the vocabulary.

    `operands` has a letter per operand: `f` a float tensor or number, `b` a boolean, `n` a number that is part of
    the operation (a slope, a threshold). `result` is `f` or `b`. `torch` evaluates it on tensors; where
    `takes_numbers` is true a float operand may also be a Python number, as long as one of them is a tensor.
    """

    name: str
    operands: str
    result: str
    torch: Callable[..., Any]
    takes_numbers: bool = False


def _log_sigmoid_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad * torch.sigmoid(-x)


def _gelu_backward_kernel(grad: torch.Tensor, x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    # oneDNN, behind this one on CPU, takes no broadcast gradient.
    return torch.ops.aten.gelu_backward(grad.expand_as(x).contiguous(), x, approximate=approximate)  # type: ignore[no-any-return]


def _operations() -> dict[str, Operation]:
    aten = torch.ops.aten
    functional = torch.nn.functional
    table: list[Operation] = []

    def add(names: str, operands: str, result: str = "f") -> None:
        table.extend(Operation(name, operands, result, getattr(aten, name)) for name in names.split())

    def add_python(operands: str, result: str, takes_numbers: bool, **functions: Callable[..., Any]) -> None:
        table.extend(Operation(name, operands, result, fn, takes_numbers) for name, fn in functions.items())

    add("neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal tanh sinh cosh tan sin cos", "f")
    add("sigmoid erf erfc floor ceil round trunc relu silu hardswish hardsigmoid mish detach", "f")
    add_python("f", "f", False, log_sigmoid=functional.logsigmoid, normal_cdf=torch.special.ndtr, exact_erf=torch.erf)
    add_python("ff", "f", True, add=operator.add, sub=operator.sub, mul=operator.mul, div=operator.truediv)
    add_python("ff", "f", True, pow=torch.pow)
    add_python("ff", "b", True, lt=operator.lt, le=operator.le, gt=operator.gt, ge=operator.ge)
    add_python("ff", "b", True, eq=operator.eq, ne=operator.ne)
    add("maximum minimum", "ff")
    add("logical_and logical_or", "bb", "b")
    add("logical_not", "b", "b")
    add_python("bff", "f", True, where=torch.where)
    # Its result takes the dtype of the score, so the evaluator passes that in.
    add_python("b", "f", False, to_float=lambda condition, dtype: condition.to(dtype))

    add("clamp_min clamp_max leaky_relu softshrink hardshrink celu", "fn")
    add("clamp hardtanh softplus threshold", "fnn")
    add("elu", "fnnn")
    add_python("f", "f", False, gelu=functional.gelu, gelu_tanh=lambda x: functional.gelu(x, approximate="tanh"))

    add("silu_backward hardswish_backward hardsigmoid_backward mish_backward", "ff")
    add("tanh_backward sigmoid_backward", "ff")
    add("threshold_backward hardshrink_backward softshrink_backward", "ffn")
    add("softplus_backward hardtanh_backward", "ffnn")
    add_python(
        "ff",
        "f",
        False,
        gelu_backward=_gelu_backward_kernel,
        gelu_tanh_backward=lambda grad, x: _gelu_backward_kernel(grad, x, "tanh"),
        log_sigmoid_backward=_log_sigmoid_backward,
    )
    add_python("ffn", "f", False, leaky_relu_backward=lambda g, x, slope: aten.leaky_relu_backward(g, x, slope, False))
    add_python(
        "ffnnn",
        "f",
        False,
        elu_backward=lambda grad, x, alpha, scale, input_scale: aten.elu_backward(grad, alpha, scale, input_scale, False, x),
    )
    return {operation.name: operation for operation in table}


OPERATIONS = _operations()


class Statement(NamedTuple):
    """`t<i> = operation(*operands)`, i being its place in the graph."""

    operation: str
    operands: tuple[Operand, ...]


def operand_text(operand: Operand) -> str:
    """`s`, `t3`, `true`, or a number that `float` reads back exactly."""
    if isinstance(operand, Ref):
        return "s" if operand.index < 0 else f"t{operand.index}"
    if isinstance(operand, bool):
        return "true" if operand else "false"
    return repr(float(operand))


@dataclass(frozen=True)
class Graph:
    """Statements in order, and the operands that are its results."""

    statements: tuple[Statement, ...]
    outputs: tuple[Operand, ...]

    @cached_property
    def text(self) -> str:
        """One line; `parse_graph` reads it back exactly."""
        lines = [
            f"t{i}={operation}({','.join(map(operand_text, operands))});" for i, (operation, operands) in enumerate(self.statements)
        ]
        return " ".join([*lines, "->", ", ".join(map(operand_text, self.outputs))])

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        # By text: 1.0 == True and nan != nan among Python's numbers.
        return isinstance(other, Graph) and self.text == other.text

    def flushed(self) -> Graph:
        """With zeros for numbers below float32's normal ones, as device code has them."""
        tiny = torch.finfo(torch.float32).tiny

        def kept(x: Operand) -> Operand:
            return x if isinstance(x, (Ref, bool)) or not abs(x) < tiny else 0.0

        statements = tuple([Statement(name, tuple(map(kept, operands))) for name, operands in self.statements])
        return Graph(statements, tuple(map(kept, self.outputs)))

    def select(self, *outputs: int) -> Graph:
        """The graph of those outputs alone, without what only the others need."""
        return pruned(self.statements, [self.outputs[i] for i in outputs])

    @cached_property
    def _last_use(self) -> tuple[tuple[int, ...], ...]:
        """For each statement, the earlier results that nothing after it reads: they are freed there."""
        last: dict[int, int] = {}
        for i, statement in enumerate(self.statements):
            last.update((operand.index, i) for operand in statement.operands if isinstance(operand, Ref))
        kept = {output.index for output in self.outputs if isinstance(output, Ref)}
        frees: list[list[int]] = [[] for _ in self.statements]
        for index, i in last.items():
            if index >= 0 and index not in kept:
                frees[i].append(index)
        return tuple(map(tuple, frees))

    def evaluate(self, s: torch.Tensor, *, flushing: bool = False) -> tuple[torch.Tensor, ...]:
        """The outputs at `s`, a tensor of any float dtype, shape and device; each has the shape and dtype of `s`.

        With `flushing`, a result of a statement that is below the normal numbers of the dtype is zero, as a device's may be.
        """
        results: dict[int, torch.Tensor] = {-1: s}
        for i, (name, operands) in enumerate(self.statements):
            operation = OPERATIONS[name]
            arguments: list[Any] = [results[x.index] if isinstance(x, Ref) else x for x in operands]
            _materialise(operation, arguments, s)
            if name == "to_float":
                arguments.append(s.dtype)
            results[i] = operation.torch(*arguments)
            if flushing and operation.result == "f":
                results[i] = results[i].masked_fill(results[i].abs() < torch.finfo(s.dtype).tiny, 0.0)
            for index in self._last_use[i]:
                del results[index]
        return tuple(
            results[x.index] if isinstance(x, Ref) else torch.full_like(s, _fitted(x, s), requires_grad=False) for x in self.outputs
        )


def _materialise(operation: Operation, arguments: list[Any], s: torch.Tensor) -> None:
    """Turn into 0-dimensional tensors, in place, the numbers that the operation does not take as they are."""
    for i, kind in enumerate(operation.operands):
        if kind == "b" and isinstance(arguments[i], bool):
            arguments[i] = torch.full((), arguments[i], dtype=torch.bool, device=s.device)
    floats = [i for i, kind in enumerate(operation.operands) if kind == "f"]
    if operation.takes_numbers:
        if any(isinstance(arguments[i], torch.Tensor) for i in floats):
            return
        floats = floats[:1]
    for i in floats:
        if not isinstance(arguments[i], torch.Tensor):
            arguments[i] = torch.full((), _fitted(arguments[i], s), dtype=s.dtype, device=s.device)


def _fitted(number: float, s: torch.Tensor) -> float:
    """The number, or infinity where the dtype of `s` overflows: torch's arithmetic overflows too, but `full` raises."""
    return math.copysign(math.inf, number) if abs(number) > torch.finfo(s.dtype).max else float(number)


def pruned(statements: Sequence[Statement], outputs: Sequence[Operand]) -> Graph:
    """The graph of `outputs`: dead statements removed, the others renumbered in order."""
    live = {x.index for x in outputs if isinstance(x, Ref)}
    for i in range(len(statements) - 1, -1, -1):
        if i in live:
            live.update(x.index for x in statements[i].operands if isinstance(x, Ref))
    numbers = {old: new for new, old in enumerate(sorted(live - {-1}))}
    numbers[-1] = -1

    def renumber(operands: Iterable[Operand]) -> tuple[Operand, ...]:
        return tuple(Ref(numbers[x.index]) if isinstance(x, Ref) else x for x in operands)

    kept = tuple(Statement(statements[i].operation, renumber(statements[i].operands)) for i in sorted(live - {-1}))
    return Graph(kept, renumber(outputs))


class Builder:
    """Appends statements to a graph, folding constants and computing equal subexpressions once.

    A product with 0 is not folded (0 * inf is nan); a sum with 0 is, although that keeps the sign of a negative zero.
    """

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self._known: dict[str, Ref] = {}

    def kind(self, operand: Operand) -> str:
        """`f` or `b`."""
        if isinstance(operand, Ref):
            return "f" if operand.index < 0 else OPERATIONS[self.statements[operand.index].operation].result
        return "b" if isinstance(operand, bool) else "f"

    def emit(self, name: str, *operands: Operand) -> Operand:
        """The operand that holds `name(*operands)`, simplified."""
        operation = OPERATIONS[name]
        inputs = [x for x, kind in zip(operands, operation.operands, strict=True) if kind != "n"]
        if not any(isinstance(x, Ref) for x in inputs):
            return _fold(operation, operands)
        simple = self._simplify(name, operands)
        if simple is not None:
            return simple
        text = f"{name}({','.join(map(operand_text, operands))})"
        if text not in self._known:
            self.statements.append(Statement(name, operands))
            self._known[text] = Ref(len(self.statements) - 1)
        return self._known[text]

    def definition(self, operand: Operand) -> Statement | None:
        """The statement that computes `operand`; None for the score and for constants."""
        return self.statements[operand.index] if isinstance(operand, Ref) and operand.index >= 0 else None

    def _simplify(self, name: str, operands: tuple[Operand, ...]) -> Operand | None:
        if name == "where":
            condition, chosen, other = operands
            if isinstance(condition, bool):
                return chosen if condition else other
            return chosen if operand_text(chosen) == operand_text(other) else None
        if name == "neg":
            return self._negate(operands[0])
        if name in ("logical_and", "logical_or"):
            constant, other = operands if isinstance(operands[0], bool) else operands[::-1]
            if isinstance(constant, bool):
                return other if constant == (name == "logical_and") else constant
        if name not in ("add", "sub", "mul", "div", "pow"):
            return None
        left, right = operands
        if name == "add" and not isinstance(left, Ref) and left == 0.0:
            return right
        if name == "mul" and not isinstance(left, Ref):
            if left == 1.0:
                return right
            if left == -1.0:
                return self.emit("neg", right)
        if isinstance(right, Ref):
            return None
        if right == 0.0:
            return {"add": left, "sub": left, "pow": 1.0}.get(name)
        if right == 1.0 and name in ("mul", "div", "pow"):
            return left
        return self.emit("neg", left) if right == -1.0 and name == "mul" else None

    def _negate(self, operand: Operand) -> Operand | None:
        inner = self.definition(operand)
        if inner is not None and inner.operation == "neg":
            return inner.operands[0]
        if inner is not None and inner.operation == "mul":
            left, right = inner.operands
            if not isinstance(left, Ref):
                return self.emit("mul", -left, right)
            if not isinstance(right, Ref):
                return self.emit("mul", left, -right)
        return None


def _fold(operation: Operation, operands: tuple[Operand, ...]) -> Operand:
    arguments = [
        torch.tensor(x, dtype=torch.bool if kind == "b" else torch.float64) if kind != "n" else x
        for x, kind in zip(operands, operation.operands, strict=True)
    ]
    if operation.name == "to_float":
        arguments.append(torch.float64)  # type: ignore[arg-type]
    result = operation.torch(*arguments).item()
    return bool(result) if operation.result == "b" else float(result)


_STATEMENT = re.compile(r"t(\d+)=([a-z_0-9]+)\(([^()]*)\)")
_NUMBER = re.compile(r"-?(\d+\.\d+|\d+(\.\d+)?e[+-]\d+|inf)|nan")


def parse_graph(text: str) -> Graph:
    """The graph whose `Graph.text` is `text`; raises GdpaError naming the part that is malformed."""
    body, arrow, results = text.partition("-> ")
    if not arrow or (body and not body.endswith("; ")):
        raise GdpaError(f"activation key: expected 'statement; ... -> results', got {text!r:.120}")
    statements: list[Statement] = []
    kinds: list[str] = []

    def operand(part: str, where: str) -> tuple[Operand, str]:
        if part == "s":
            return SCORE, "f"
        if part in ("true", "false"):
            return part == "true", "b"
        if re.fullmatch(r"t(0|[1-9]\d{0,6})", part):
            index = int(part[1:])
            if index >= len(statements):
                raise GdpaError(f"activation key: {part!r} is read before it is computed, in {where!r}")
            return Ref(index), kinds[index]
        if _NUMBER.fullmatch(part):
            return float(part), "f"
        raise GdpaError(f"activation key: {part!r} is no operand, in {where!r}")

    for line in body.split("; ")[:-1]:
        match = _STATEMENT.fullmatch(line)
        if match is None or match[1] != str(len(statements)):
            raise GdpaError(f"activation key: expected 't{len(statements)}=operation(operands)', got {line!r:.120}")
        operation = OPERATIONS.get(match[2])
        if operation is None:
            raise GdpaError(f"activation key: unknown operation {match[2]!r}")
        operands = [operand(part, line) for part in match[3].split(",")]
        if len(operands) != len(operation.operands):
            raise GdpaError(f"activation key: {operation.name} takes {len(operation.operands)} operands, got {len(operands)}")
        for (value, kind), expected in zip(operands, operation.operands, strict=True):
            literal = not isinstance(value, Ref)
            if kind != ("f" if expected == "n" else expected) or (expected == "n" and not literal):
                raise GdpaError(f"activation key: {operand_text(value)} does not fit {operation.name}, in {line!r:.120}")
        statements.append(Statement(operation.name, tuple(value for value, _ in operands)))
        kinds.append(operation.result)
    outputs = [operand(part, results) for part in results.split(", ")]
    if any(kind != "f" for _, kind in outputs):
        raise GdpaError(f"activation key: a result is boolean, in {results!r}")
    return Graph(tuple(statements), tuple(value for value, _ in outputs))


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}
_INFIX |= {
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "logical_and": "and",
    "logical_or": "or",
}
_BINDING = {"**": 6, "*": 4, "/": 4, "+": 3, "-": 3, "and": 1, "or": 1}


def formulas(graph: Graph) -> tuple[str, ...]:
    """Each output of `graph` in infix notation; what is used twice is named and written out once, after `with`."""
    uses: dict[int, int] = {}
    for operand in [x for statement in graph.statements for x in statement.operands] + list(graph.outputs):
        if isinstance(operand, Ref):
            uses[operand.index] = uses.get(operand.index, 0) + 1
    names: dict[int, str] = {}
    definitions: list[str] = []
    texts: dict[int, tuple[str, int]] = {-1: ("s", 9)}

    def show(operand: Operand, binding: int = 0) -> str:
        if not isinstance(operand, Ref):
            text = operand_text(operand).removesuffix(".0")
            return f"({text})" if text.startswith("-") and binding > 3 else text
        text, own = texts[operand.index]
        return f"({text})" if own < binding else text

    for i, (name, operands) in enumerate(graph.statements):
        symbol = _INFIX.get(name)
        if symbol is not None:
            own = _BINDING.get(symbol, 2)
            left = show(operands[0], own + (symbol == "**"))
            texts[i] = (f"{left} {symbol} {show(operands[1], own + (symbol != '**'))}", own)
        elif name == "neg":
            texts[i] = (f"-{show(operands[0], 4)}", 3)
        else:
            texts[i] = (f"{name}({', '.join(show(x) for x in operands)})", 9)
        if uses.get(i, 0) > 1:
            names[i] = _letter(len(names))
            definitions.append(f"{names[i]} = {texts[i][0]}")
            texts[i] = (names[i], 9)
    results = []
    for output in graph.outputs:
        text = show(output)
        needed: list[str] = []
        pending = set(re.findall(r"\b[a-r](?:\d+)?\b", text))
        for definition in reversed(definitions):
            letter, _, right = definition.partition(" = ")
            if letter in pending:
                needed.insert(0, definition)
                pending |= set(re.findall(r"\b[a-r](?:\d+)?\b", right))
        results.append(f"{text} with {', '.join(needed)}" if needed else text)
    return tuple(results)


def _letter(index: int) -> str:
    """a, b, ... r, a1, b1, ...: never `s`, the score."""
    turn, place = divmod(index, 18)
    return chr(ord("a") + place) + (str(turn) if turn else "")

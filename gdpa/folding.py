"""f(scale * s) in the fewest vector instructions: the scale, and constants, folded into an activation's steps.

Kernels have raw scores s and want f(scale * s). Multiplying a whole result by a number costs them nothing, since it can wait for
the sum over the keys, and a product costs nothing where a sum follows (a fused multiply-add). So a value is kept unevaluated while
its form is simple, with coefficients that are a number times a power of the scale (scalars, computed once outside the loops):

    Scaled    factor * node
    Affine    slope * node + offset
    Product   node * (slope * inner + offset)

and an operation that needs the number itself (tanh, a comparison) has it evaluated. silu, s * (0.5 * tanh(0.5 s) + 0.5), becomes

    t = tanh(s * (0.5 scale)),  f(scale * s) = (0.5 scale) * (s * t + s)

which is three instructions. Nothing is divided by the scale, which may be zero or of either sign. Where there are several ways to
evaluate a form, `fold` tries them and counts.

A result may also be wanted whole (float16 may not have the range for one without its factor), or times a weight, another scalar: the
backward kernel's f', with the factor that dQ and dK want. The weight goes into the coefficients of the last sum, for nothing in silu
and gelu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from gdpa.graph import OPERATIONS, SCORE, Graph, Operand, Ref

# A scale of 1e-12 to the third is still a normal float32, and so is a score of 1e12.
_LARGEST_POWER = 3
_LARGEST_NUMBER = 1e12
# Adding and subtracting a large number rounds, which may be what the author wants.
_LARGEST_OFFSET = 4096.0
# More found nothing better for any activation of the tests; this many take a tenth of a second, of graphs of a dozen statements. Every
# attempt goes through all of them, so long graphs have fewer: of a polynomial of 60 steps, 300 statements, 128 took 23 s in six searches.
_MOST_ATTEMPTS = 128
_LEAST_ATTEMPTS = 8
_MOST_STATEMENTS = 8192  # in all attempts together


@dataclass(frozen=True)
class Coefficient:
    """number * scale ** power * weight ** weights."""

    number: float
    power: int = 0
    weights: int = 0

    @property
    def usable(self) -> bool:
        """Within float32's range for every reasonable scale; zero stands for nothing to add."""
        magnitude = abs(self.number)
        fits = 1.0 / _LARGEST_NUMBER <= magnitude <= _LARGEST_NUMBER
        return self.number == 0.0 or (fits and 0 <= self.power <= _LARGEST_POWER and 0 <= self.weights <= 1)

    @property
    def is_number(self) -> bool:
        """Whether it is known without the scale and the weight."""
        return not (self.power or self.weights)

    def __mul__(self, other: Coefficient) -> Coefficient:
        if not (self.number and other.number):
            return ZERO
        return Coefficient(self.number * other.number, self.power + other.power, self.weights + other.weights)

    def __truediv__(self, other: Coefficient) -> Coefficient:
        """Not `usable` where a negative power of the scale would remain."""
        return (
            Coefficient(self.number / other.number, self.power - other.power, self.weights - other.weights) if self.number else ZERO
        )

    def __neg__(self) -> Coefficient:
        return Coefficient(-self.number, self.power, self.weights)

    def _is_like(self, other: Coefficient) -> bool:
        return (self.power, self.weights) == (other.power, other.weights)

    def plus(self, other: Coefficient) -> Coefficient | None:
        """The sum, None where it is no single power of the scale and the weight."""
        if not (self.number and other.number):
            return self if self.number else other
        if not self._is_like(other):
            return None
        total = self.number + other.number
        return ZERO if abs(total) < 1e-12 * abs(self.number) else Coefficient(total, self.power, self.weights)

    def equals(self, other: Coefficient) -> bool:
        """The same but for the rounding of its computation."""
        return self._is_like(other) and math.isclose(self.number, other.number, rel_tol=1e-12)


ZERO = Coefficient(0.0)
ONE = Coefficient(1.0)
TWO = Coefficient(2.0)
HALF = Coefficient(0.5)
SCALE = Coefficient(1.0, 1)
WEIGHT = Coefficient(1.0, 0, 1)

StepOperand = Ref | Coefficient | float | bool


@dataclass(frozen=True)
class Step:
    """`t<i> = operation(*operands)`; a coefficient among the operands is a scalar."""

    operation: str
    operands: tuple[StepOperand, ...]

    @property
    def references(self) -> list[int]:
        """The steps it reads, the score as -1."""
        return [x.index for x in self.operands if isinstance(x, Ref)]


@dataclass(frozen=True)
class Folded:
    """Steps over the raw score, and for each output of the graph the operand that is it but for a factor."""

    steps: tuple[Step, ...]
    outputs: tuple[Ref | float | Coefficient, ...]
    factors: tuple[Coefficient, ...]

    @cached_property
    def fused(self) -> dict[int, int]:
        """Sums that take a product nobody else reads: one fused multiply-add. The sum's index -> the product's."""
        uses: dict[int, int] = {}
        for index in [x for step in self.steps for x in step.references] + [x.index for x in self.outputs if isinstance(x, Ref)]:
            uses[index] = uses.get(index, 0) + 1
        result: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            if step.operation in ("add", "sub"):
                alone = [x for x in step.references if x >= 0 and self.steps[x].operation == "mul" and uses[x] == 1]
                if alone:
                    result[i] = alone[0]
        return result

    @cached_property
    def instructions(self) -> int:
        """Vector instructions, a fused multiply-add and a call of a function counting as one."""
        return len(self.steps) - len(self.fused)

    @cached_property
    def depth(self) -> int:
        """The longest chain of instructions, each of which waits for the one before."""
        depths = {-1: 0}
        inside = set(self.fused.values())  # a product's turn is that of its sum
        for i, step in enumerate(self.steps):
            depths[i] = max((depths[x] for x in step.references), default=0) + (i not in inside)
        return max(depths.values())

    @cached_property
    def scalars(self) -> tuple[Coefficient, ...]:
        """The coefficients that depend on the scale or the weight, in order of use."""
        used = [x for step in self.steps for x in step.operands] + list(self.outputs)
        return tuple(dict.fromkeys(x for x in used if isinstance(x, Coefficient) and not x.is_number))

    @property
    def cost(self) -> tuple[int, int, int]:
        """Fewer instructions first, then the shorter chain: of two forms of silu's weighted pair, six instructions each, the one with the
        shorter chain ran up to 5 % faster in the backward kernel on an H200, though it has a scalar more."""
        return self.instructions, self.depth, len(self.scalars)

    @cached_property
    def gate(self) -> tuple[float, ...] | None:
        """The coefficients of p, lowest first, where it is h * tanh(u) + h, u = h * p(h * h), for a scale of 1: gelu and its like. h is the
        score, or the first step makes it, a multiple of the score; the terms of p, a polynomial, do not cancel.

        Then u changes by no more than a multiple of what the relative errors of its steps are, and so does f.
        """
        start = self.steps[0].operands if self.steps else ()
        whole = len(start) == 2 and start[0] == SCORE and isinstance(start[1], Coefficient)
        h, first = (Ref(0), 1) if whole else (SCORE, 0)
        steps = self.steps[first:]
        if len(steps) < 7 or len(steps) % 2 == 0 or steps[0] != Step("mul", (h, h)):
            return None
        square, inner = Ref(first), Ref(first)
        numbers: list[float] = []
        for product, total in zip(steps[1:-4:2], steps[2:-4:2], strict=True):
            # The first product is square's and a coefficient's, the others square's and the sum's before.
            factor = product.operands[-1] if not numbers else inner
            if product.operation != "mul" or set(product.operands) != {square, factor}:
                return None
            if total.operation != "add" or total.operands[0] != Ref(inner.index + 1):
                return None
            coefficients = total.operands[-1:] if numbers else (factor, total.operands[-1])
            if not all(isinstance(x, Coefficient) for x in coefficients):
                return None
            numbers += [x.number for x in coefficients if isinstance(x, Coefficient)]
            inner = Ref(inner.index + 2)
        last = inner.index
        ends = [("mul", {h, inner}), ("tanh", {Ref(last + 1)}), ("mul", {h, Ref(last + 2)}), ("add", {h, Ref(last + 3)})]
        matches = [(step.operation, set(step.operands)) for step in steps[-4:]] == ends and self.outputs == (Ref(last + 4),)
        return tuple(numbers[::-1]) if matches and _is_steady(numbers[::-1]) else None


def _is_steady(coefficients: list[float]) -> bool:
    """Whether h * (c0 + c1 h^2 + ...) errs by about what its terms do, relatively, wherever its tanh is not 1."""
    for exponent in range(-100, 200):
        h = 10.0 ** (exponent / 20)
        terms = [c * h ** (2 * i) for i, c in enumerate(coefficients)]
        if h * sum(terms) < 9.0 and sum(map(abs, terms)) > 1.5 * sum(terms):
            return False
    return True


@dataclass(frozen=True)
class Scaled:
    """factor * node."""

    node: Ref
    factor: Coefficient


@dataclass(frozen=True)
class Affine:
    """slope * node + offset."""

    node: Ref
    slope: Coefficient
    offset: Coefficient


@dataclass(frozen=True)
class Product:
    """node * (slope * inner + offset)."""

    node: Ref
    inner: Ref
    slope: Coefficient
    offset: Coefficient


Form = Scaled | Affine | Product
_Chosen = TypeVar("_Chosen")
# What a statement of the graph amounts to; a condition is a plain reference.
Value = Form | Ref | float | bool


@lru_cache(maxsize=256)
def fold(graph: Graph, multiples: tuple[Coefficient | None, ...] | None = None) -> Folded:
    """The outputs of a `spelled` graph at scale * s in the fewest instructions that were found. An output's multiple is ONE or WEIGHT,
    for the output times that, or None (all are, unless told): the output but for a factor.

    The search tries the first way of every choice, then other ways of one of them, of two, and so on, up to a fixed number of
    attempts; of equals the first found wins. It never takes more instructions than `unfolded`.
    """
    if multiples is None:
        multiples = (None,) * len(graph.outputs)
    best = unfolded(graph, multiples)
    attempts: list[tuple[int, ...]] = [()]
    most = most_attempts(graph)
    for decisions in attempts:  # grows meanwhile
        folder = _Folder(decisions)
        folded = folder.run(graph, multiples)
        if folded.cost < best.cost:
            best = folded
        for place in range(len(decisions), len(folder.counts)):
            if len(attempts) >= most:
                break
            first = decisions + (0,) * (place - len(decisions))
            attempts += [(*first, way) for way in range(1, folder.counts[place])][: most - len(attempts)]
    return best


def most_attempts(graph: Graph) -> int:
    """How many ways of folding it are tried."""
    return max(_LEAST_ATTEMPTS, min(_MOST_ATTEMPTS, _MOST_STATEMENTS // max(len(graph.statements), 1)))


def unfolded(graph: Graph, multiples: tuple[Coefficient | None, ...] | None = None) -> Folded:
    """The graph as it stands, at scale * s: every factor is 1."""
    steps = _Steps()
    results: dict[int, Ref] = {-1: steps.emit("mul", SCORE, SCALE) if _reads_score(graph) else SCORE}
    for i, (name, operands) in enumerate(graph.statements):
        results[i] = steps.emit(name, *(results[x.index] if isinstance(x, Ref) else x for x in operands))
    outputs: list[Ref | float | Coefficient] = []
    for output, multiple in zip(graph.outputs, multiples or (None,) * len(graph.outputs), strict=True):
        if multiple is None or multiple == ONE:
            outputs.append(results[output.index] if isinstance(output, Ref) else float(output))
        else:
            outputs.append(
                steps.emit("mul", results[output.index], multiple) if isinstance(output, Ref) else _multiple(output, multiple)
            )
    return steps.finish(outputs, [ONE for _ in outputs])


def _multiple(number: float, multiple: Coefficient) -> float | Coefficient:
    """A number that is an output, times its multiple."""
    if multiple.is_number:
        return number * multiple.number
    return Coefficient(float(number)) * multiple if number else 0.0


def _reads_score(graph: Graph) -> bool:
    return SCORE in graph.outputs or any(SCORE in statement.operands for statement in graph.statements)


class _Steps:
    """Collects steps; equal ones are one."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._known: dict[object, Ref] = {}

    def emit(self, operation: str, *operands: StepOperand) -> Ref:
        # repr tells -0.0 from 0.0 and True from 1.0, which compare equal. Most operands are steps, whose own is slow.
        names = [f"t{x.index}" if isinstance(x, Ref) else repr(x) for x in operands]
        key = (operation, *(sorted(names) if operation in ("add", "mul") else names))
        if key not in self._known:
            self.steps.append(Step(operation, operands))
            self._known[key] = Ref(len(self.steps) - 1)
        return self._known[key]

    def finish(self, outputs: Sequence[Ref | float | Coefficient], factors: Sequence[Coefficient]) -> Folded:
        """Without the steps that no output needs, the others renumbered in order."""
        live = {x.index for x in outputs if isinstance(x, Ref)}
        for i in range(len(self.steps) - 1, -1, -1):
            if i in live:
                live.update(self.steps[i].references)
        numbers = {old: Ref(new) for new, old in enumerate(sorted(live - {-1}))} | {-1: SCORE}
        kept = []
        for i in sorted(live - {-1}):
            operands = tuple(numbers[x.index] if isinstance(x, Ref) else x for x in self.steps[i].operands)
            kept.append(Step(self.steps[i].operation, operands))
        return Folded(tuple(kept), tuple(numbers[x.index] if isinstance(x, Ref) else x for x in outputs), tuple(factors))


class _Folder(_Steps):
    """One attempt: `decisions` says which way to go at the first choices; the later ones go the first way."""

    def __init__(self, decisions: tuple[int, ...]) -> None:
        super().__init__()
        self._decisions = decisions
        self.counts: list[int] = []  # of the ways there were at each choice
        self._evaluated: dict[Form, Scaled] = {}
        self._rules: dict[str, Callable[..., Form | None]] = {
            "neg": self._negated,
            "mul": self._product,
            "add": self._sum,
            "sub": self._difference,
            "reciprocal": self._reciprocal,
            "where": self._where,
        }

    def _choose(self, *ways: Callable[[], _Chosen]) -> _Chosen:
        if len(ways) == 1:
            return ways[0]()
        place = len(self.counts)
        self.counts.append(len(ways))
        return ways[self._decisions[place] if place < len(self._decisions) else 0]()

    def run(self, graph: Graph, multiples: tuple[Coefficient | None, ...]) -> Folded:
        raw = Scaled(SCORE, SCALE)
        ways = [lambda: raw, lambda: Scaled(self._number(raw), ONE)]
        if ONE in multiples:
            # f whole, s (t + 1) / 2 with t = tanh(s / 2), is h t + h of h = s / 2.
            ways.append(lambda: Scaled(self._number(Scaled(SCORE, SCALE * HALF)), TWO))
        values: dict[int, Value] = {-1: self._choose(*ways)}

        def find(operand: Operand) -> Value:
            return values[operand.index] if isinstance(operand, Ref) else operand

        for i, (name, operands) in enumerate(graph.statements):
            values[i] = self._value(name, [find(x) for x in operands])
        outputs: list[Ref | float | Coefficient] = []
        factors: list[Coefficient] = []
        for output, multiple in zip(graph.outputs, multiples, strict=True):
            value = find(output)
            factor = ONE
            if not isinstance(value, (Scaled, Affine, Product)):
                assert not isinstance(value, Ref), "a condition is no output"
                outputs.append(_multiple(float(value), multiple or ONE))
            elif multiple is None:
                scaled = self._scaled(value)
                outputs.append(scaled.node)
                factor = scaled.factor
            else:
                assert isinstance(output, Ref), "a constant is no form"
                name, operands = graph.statements[output.index] if output.index >= 0 else ("", ())
                outputs.append(self._times_output(value, multiple, name, [find(x) for x in operands]))
            factors.append(factor)
        return self.finish(outputs, factors)

    def _times_output(self, value: Form, multiple: Coefficient, name: str, operands: list[Value]) -> Ref:
        """multiple * value, whose last operation was this one."""
        ways: list[Callable[[], Ref]] = [lambda: self._number(self._times(value, multiple))]
        constants = [Coefficient(float(x)) for x in operands if not isinstance(x, (Scaled, Affine, Product, Ref))]
        if multiple != ONE and all(x.usable and abs(x.number) <= _LARGEST_OFFSET for x in constants):
            if name in ("add", "sub"):
                ways.insert(0, lambda: self._times_sum(operands[0], operands[1], multiple, name == "sub"))
            elif name == "where":
                ways.insert(0, lambda: self._times_where(operands, multiple))
        return self._choose(*ways)

    def _times_sum(self, x: Value, y: Value, multiple: Coefficient, negated: bool) -> Ref:
        """multiple * x + multiple * y, or minus that."""
        terms: list[Form | Coefficient] = []
        for value, sign in ((x, ONE), (y, -ONE if negated else ONE)):
            if isinstance(value, (Scaled, Affine, Product)):
                terms.append(self._times(value, multiple * sign))
            else:
                assert not isinstance(value, Ref), "a condition is no summand"
                terms.append(Coefficient(float(value)) * multiple * sign)
        if isinstance(terms[0], Coefficient):
            terms.reverse()
        form, other = terms
        assert not isinstance(form, Coefficient), "constants are folded before"
        return self._number(self._raised(form, other) if isinstance(other, Coefficient) else self._sum(form, other))

    def _times_where(self, operands: list[Value], multiple: Coefficient) -> Ref:
        """The condition's choice between multiples."""
        condition, *branches = operands
        assert isinstance(condition, Ref), "a constant condition is folded before"
        chosen: list[StepOperand] = []
        for branch in branches:
            if isinstance(branch, (Scaled, Affine, Product)):
                chosen.append(self._number(self._times(branch, multiple)))
            else:
                assert not isinstance(branch, Ref), "a condition is no branch"
                chosen.append(_multiple(float(branch), multiple))
        return self.emit("where", condition, *chosen)

    def _value(self, name: str, operands: list[Value]) -> Value:
        rule = self._rules.get(name)
        folded = rule(*operands) if rule is not None else None
        if folded is not None:
            return folded
        node = self.emit(name, *(self._number(x) if isinstance(x, (Scaled, Affine, Product)) else x for x in operands))
        return node if OPERATIONS[name].result == "b" else Scaled(node, ONE)

    def _number(self, form: Form) -> Ref:
        """A node with the value of the form itself."""
        scaled = self._scaled(form)
        if scaled.factor == ONE:
            return scaled.node
        return self.emit("neg", scaled.node) if scaled.factor == -ONE else self.emit("mul", scaled.node, scaled.factor)

    def _scaled(self, form: Form) -> Scaled:
        """The form evaluated but for a factor, in the same way every time it is asked for."""
        if form not in self._evaluated:
            self._evaluated[form] = self._evaluate(form)
        return self._evaluated[form]

    def _evaluate(self, form: Form) -> Scaled:
        if isinstance(form, Scaled):
            return form
        node, slope, offset = form.node, form.slope, form.offset
        if isinstance(form, Product) and not offset.number:
            return Scaled(self.emit("mul", node, form.inner), slope)
        ratio = offset / slope
        ways: list[Callable[[], Scaled]]
        if isinstance(form, Affine):
            ways = [lambda: Scaled(self._line(node, slope, offset), ONE)]
            if ratio.usable and slope != ONE:
                ways.append(lambda: Scaled(self._line(node, ONE, ratio), slope))
            return self._choose(*ways)
        inner = form.inner
        ways = [lambda: Scaled(self.emit("mul", node, self._line(inner, slope, offset)), ONE)]
        if ratio.usable and slope != ONE:
            ways.append(lambda: Scaled(self.emit("mul", node, self._line(inner, ONE, ratio)), slope))
        if offset.equals(slope):
            ways.insert(0, lambda: Scaled(self.emit("add", self.emit("mul", node, inner), node), slope))
        elif offset.equals(-slope):
            ways.insert(0, lambda: Scaled(self.emit("sub", node, self.emit("mul", node, inner)), offset))
        return self._choose(*ways)

    def _line(self, node: Ref, slope: Coefficient, offset: Coefficient) -> Ref:
        """slope * node + offset."""
        if slope == -ONE:
            return self.emit("sub", offset, node)
        if slope != ONE and offset.equals(-slope):  # one scalar
            return self.emit("sub", offset, self.emit("mul", node, offset))
        return self.emit("add", node if slope == ONE else self.emit("mul", node, slope), offset)

    def _times(self, form: Form, factor: Coefficient) -> Form:
        if isinstance(form, Scaled):
            scaled: Form = Scaled(form.node, form.factor * factor)
        elif isinstance(form, Affine):
            scaled = Affine(form.node, form.slope * factor, form.offset * factor)
        else:
            scaled = Product(form.node, form.inner, form.slope * factor, form.offset * factor)
        return scaled if _usable(scaled) else Scaled(self._number(form), factor)

    def _negated(self, x: Form) -> Form:
        return self._times(x, -ONE)

    def _product(self, x: Value, y: Value) -> Form:
        if not isinstance(x, (Scaled, Affine, Product)):
            x, y = y, x
        assert isinstance(x, (Scaled, Affine, Product)), "constants are folded before"
        if not isinstance(y, (Scaled, Affine, Product)):
            assert not isinstance(y, Ref), "a condition is no factor"
            factor = Coefficient(float(y))
            if factor.number and factor.usable:
                return self._times(x, factor)
            return Scaled(self.emit("mul", self._number(x), float(y)), ONE)
        if isinstance(x, Product):
            x = self._scaled(x)
        if isinstance(y, Product):
            y = self._scaled(y)
        if isinstance(x, Affine) and isinstance(y, Affine):
            return self._product_of_lines(x, y)
        return self._scaled_product(x, y) if isinstance(x, Scaled) else self._scaled_product(self._scaled(y), x)

    def _product_of_lines(self, x: Affine, y: Affine) -> Form:
        if x.node == y.node and (x.slope * y.offset).plus(y.slope * x.offset) == ZERO:
            # (a + b t) (a - b t)
            square = Affine(self.emit("mul", x.node, x.node), x.slope * y.slope, x.offset * y.offset)
            if _usable(square):
                return square
        return self._choose(lambda: self._scaled_product(self._scaled(x), y), lambda: self._scaled_product(self._scaled(y), x))

    def _scaled_product(self, x: Scaled, y: Scaled | Affine) -> Form:
        if isinstance(y, Affine):
            line = y
            return self._choose(
                lambda: self._form(x, line.node, line.slope, line.offset), lambda: self._scaled_product(x, self._scaled(line))
            )
        return self._form(x, y.node, y.factor, ZERO)

    def _form(self, x: Scaled, inner: Ref, slope: Coefficient, offset: Coefficient) -> Product:
        """x * (slope * inner + offset)."""
        product = Product(x.node, inner, slope * x.factor, offset * x.factor)
        return product if _usable(product) else Product(self._number(x), inner, slope, offset)

    def _sum(self, x: Value, y: Value) -> Form:
        if not isinstance(x, (Scaled, Affine, Product)):
            x, y = y, x
        assert isinstance(x, (Scaled, Affine, Product)), "constants are folded before"
        if not isinstance(y, (Scaled, Affine, Product)):
            assert not isinstance(y, Ref), "a condition is no summand"
            offset = Coefficient(float(y))
            if offset.number and offset.usable and abs(offset.number) <= _LARGEST_OFFSET:
                return self._raised(x, offset)
            return Scaled(self.emit("add", self._number(x), float(y)), ONE)
        left, right, factored = x, y, _factored(x, y) or _factored(self._as_evaluated(x), self._as_evaluated(y))
        if factored is None:
            return self._sum_of_forms(left, right)
        return self._choose(lambda: factored, lambda: self._sum_of_forms(left, right))

    def _as_evaluated(self, form: Form) -> Form:
        """The form as it was evaluated, if it was: what multiplied it has that node."""
        return self._evaluated.get(form, form)

    def _difference(self, x: Value, y: Value) -> Form:
        return self._sum(x, self._negated(y) if isinstance(y, (Scaled, Affine, Product)) else -float(y))  # type: ignore[arg-type]

    def _raised(self, x: Form, offset: Coefficient) -> Form:
        """x + offset."""
        if isinstance(x, Affine):
            total = x.offset.plus(offset)
            if total is not None and total.usable:
                return Affine(x.node, x.slope, total) if total.number else Scaled(x.node, x.slope)
        scaled = self._scaled(x)
        return Affine(scaled.node, scaled.factor, offset)

    def _sum_of_forms(self, x: Form, y: Form) -> Form:
        left, right = (form if isinstance(form, Affine) else self._scaled(form) for form in (x, y))
        if isinstance(left, Scaled) and isinstance(right, Scaled):
            return self._sum_of_scaled(left, right)
        ways: list[Callable[[], Form]] = [lambda: self._sum_of_scaled(self._scaled(left), self._scaled(right))]
        parts = [(f, ZERO) if isinstance(f, Scaled) else (Scaled(f.node, f.slope), f.offset) for f in (left, right)]
        total = parts[0][1].plus(parts[1][1])
        if total is not None and total.number and total.usable:
            ways.append(lambda: self._raised(self._sum_of_scaled(parts[0][0], parts[1][0]), total))
        return self._choose(*ways)

    def _sum_of_scaled(self, x: Scaled, y: Scaled) -> Scaled:
        if x.factor.equals(y.factor):
            return Scaled(self.emit("add", x.node, y.node), x.factor)
        if x.factor.equals(-y.factor):
            return Scaled(self.emit("sub", x.node, y.node), x.factor)
        ways: list[Callable[[], Scaled]] = []
        for first, second in ((x, y), (y, x)):
            ratio = second.factor / first.factor
            if ratio.usable:
                ways.append(lambda first=first, second=second, ratio=ratio: self._with_multiple(first, second, ratio))  # type: ignore[misc]
        if ONE not in (x.factor, y.factor):
            ways.append(lambda: Scaled(self.emit("add", self._number(x), self._number(y)), ONE))
        return self._choose(*ways)

    def _with_multiple(self, x: Scaled, y: Scaled, ratio: Coefficient) -> Scaled:
        """x + y, where the factor of y is `ratio` times that of x."""
        operation, multiple = ("add", ratio) if ratio.number > 0.0 else ("sub", -ratio)
        return Scaled(self.emit(operation, x.node, self.emit("mul", y.node, multiple)), x.factor)

    def _reciprocal(self, x: Form) -> Form | None:
        scaled = self._scaled(x)
        inverse = ONE / scaled.factor
        return Scaled(self.emit("reciprocal", scaled.node), inverse) if inverse.usable else None

    def _where(self, condition: Value, x: Value, y: Value) -> Form | None:
        """A factor common to both branches stays outside; zero has any factor."""
        nodes: list[Ref | float] = []
        factors: list[Coefficient] = []
        for branch in (x, y):
            if isinstance(branch, (Scaled, Affine, Product)):
                scaled = self._scaled(branch)
                nodes.append(scaled.node)
                factors.append(scaled.factor)
            elif branch == 0.0:
                nodes.append(0.0)
            else:
                return None
        if not factors or not all(factor.equals(factors[0]) for factor in factors) or factors[0] == ONE:
            return None  # without factors, both are zeros, of either sign
        assert isinstance(condition, Ref), "a constant condition is folded before"
        return self._choose(lambda: Scaled(self.emit("where", condition, *nodes), factors[0]), lambda: None)


def _usable(form: Form) -> bool:
    coefficients = (form.factor,) if isinstance(form, Scaled) else (form.slope, form.offset)
    return all(coefficient.usable for coefficient in coefficients)


def _factored(x: Form, y: Form) -> Form | None:
    """x + y as one form where both are multiples of the same node, or lines over the same; None where there is none."""
    for node, inner, slope, offset in _views(x):
        for other_node, other_inner, other_slope, other_offset in _views(y):
            if node != other_node or not (inner is None or other_inner is None or inner == other_inner):
                continue
            common = inner if inner is not None else other_inner
            rise, shift = slope.plus(other_slope), offset.plus(other_offset)
            form: Form | None = None
            if rise is None or shift is None:
                continue
            if common is not None and rise.number:
                line = Affine(common, rise, shift) if shift.number else Scaled(common, rise)
                form = line if node is None else Product(node, common, rise, shift)
            elif node is not None and shift.number:
                form = Scaled(node, shift)
            if form is not None and _usable(form):
                return form
    return None


_View = tuple[Ref | None, Ref | None, Coefficient, Coefficient]


def _views(form: Form) -> list[_View]:
    """The ways to read the form as node * (slope * inner + offset), None for 1."""
    if isinstance(form, Scaled):
        return [(form.node, None, ZERO, form.factor), (None, form.node, form.factor, ZERO)]
    if isinstance(form, Affine):
        return [(None, form.node, form.slope, form.offset)]
    views: list[_View] = [(form.node, form.inner, form.slope, form.offset)]
    return views if form.offset.number else [*views, (form.inner, form.node, form.slope, ZERO)]

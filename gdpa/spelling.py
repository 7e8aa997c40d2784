"""Primitive-level graphs in the operations that a GPU has instructions for: the last step before device code, and before folding.

Below float32 most functions become one special-function instruction and a product or two. Some of these err absolutely, by a share of 1,
which a result that is rounded to 16 bits takes where it is a sum; beneath a logarithm or a root, or in a quotient, it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gdpa.graph import SCORE, Builder, Graph, Operand, Ref, pruned
from gdpa.lowering import Precision, Term, at_minus_infinity

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
# Those whose tanh is one instruction.
WITH_TANH = ("bfloat16", "float16_sm90", "float16_sm90_many")


def spelled(graph: Graph, precision: Precision) -> Graph:
    """A primitive-level graph with powers written out in steps, and below float32 exp, log, sigmoid and division too."""
    rules = _SPELLINGS | _OWN_SPELLINGS[precision]
    builder = Builder()
    results: dict[int, Operand] = {-1: SCORE}
    for i, (name, operands) in enumerate(graph.statements):
        arguments = [results[x.index] if isinstance(x, Ref) else x for x in operands]
        rule = rules.get(name)
        if precision in WITH_TANH and name == "sigmoid" and _centred(graph, operands[0]) and _in_sums_alone(graph, i):
            rule = _centred_sigmoid
        if precision != "float32" and name in _FINER and not _in_sums_alone(graph, i):
            rule = _FINER[name]
        terms = [Term(builder, x) for x in arguments]
        results[i] = builder.emit(name, *arguments) if rule is None else rule(*terms).operand
    return pruned(builder.statements, [results[x.index] if isinstance(x, Ref) else x for x in graph.outputs])


def _centred(graph: Graph, operand: Operand) -> bool:
    """Whether the operand is the score times a number: scores are small or of either sign, and so is their multiple."""
    if not isinstance(operand, Ref):
        return False
    if operand.index < 0:
        return True
    name, operands = graph.statements[operand.index]
    return (
        name in ("mul", "neg", "div")
        and sum(isinstance(x, Ref) for x in operands) == 1
        and any(_centred(graph, x) for x in operands)
    )


# What makes of a small number, and its error beside it, a large one.
_MAGNIFYING = frozenset({"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"})


def _in_sums_alone(graph: Graph, statement: int) -> bool:
    """Whether what is made of a statement's result takes an absolute error of it: no logarithm, root or quotient of it does."""
    made = {statement}
    for i, (name, operands) in enumerate(graph.statements):
        if any(isinstance(x, Ref) and x.index in made for x in operands):
            # A divisor of its own may be as small as it is, like that of expm1(s) / s.
            if name in _MAGNIFYING or name == "pow" or (name == "div" and isinstance(operands[1], Ref)):
                return False
            made.add(i)
    return True


def _centred_sigmoid(x: Term) -> Term:
    # One special-function instruction; absolute error below 2^-12, on sm_90 5e-6, so not for arguments far below 0.
    return (x * 0.5).tanh() * 0.5 + 0.5


def _finer_tanh(x: Term) -> Term:
    # Exact to a few units in the last place, also near 0. From 20 on it is 1, and beyond 44 the quotient would be of infinities.
    small = (x.minimum(20.0) * 2.0).expm1()
    return small * (small + 2.0).reciprocal()


# What is spelled otherwise where an error beside 1 is too large. Of erf and tanh these are not the approximations of their names.
_FINER: dict[str, Callable[..., Term]] = {
    "log1p": lambda x: x.log1p(),
    "expm1": lambda x: x.expm1(),
    "tanh": _finer_tanh,
    "erf": lambda x: x.exact_erf(),
}


def _divide(x: Term, y: Term) -> Term:
    divisor = y.operand
    if isinstance(divisor, Ref):
        return x * y.reciprocal()
    return x * (1.0 / divisor if divisor else math.copysign(math.inf, divisor))


def _power(x: Term, y: Term) -> Term:
    exponent = y.operand
    if isinstance(exponent, Ref) or not math.isfinite(exponent):
        return x.pow(y)
    if exponent != int(exponent):
        return at_minus_infinity(x, math.inf if exponent > 0 else 0.0, (x.log2() * exponent).exp2())
    magnitude = (x.abs().log2() * exponent).exp2()
    return magnitude if exponent % 2 == 0 else x.lt(0.0).choose(-magnitude, magnitude)


_SPELLINGS: dict[str, Callable[..., Term]] = {"pow": _power}
_FAST_SPELLINGS: dict[str, Callable[..., Term]] = {
    "exp": lambda x: (x * _LOG2_E).exp2(),
    "expm1": lambda x: (x * _LOG2_E).exp2() - 1.0,
    "log": lambda x: x.log2() * _LN_2,
    "log1p": lambda x: (x + 1.0).log2() * _LN_2,
    # A relative error of a few units in the last place, also far below 0.
    "sigmoid": lambda x: ((x * -_LOG2_E).exp2() + 1.0).reciprocal(),
    "div": _divide,
}
_OWN_SPELLINGS: dict[Precision, dict[str, Callable[..., Term]]] = {
    "float32": {},
    "bfloat16": _FAST_SPELLINGS,
    "float16_sm90": _FAST_SPELLINGS,
    "float16_sm90_many": _FAST_SPELLINGS,
    # The one-instruction tanh may err as much as float16's rounding. This one is exact to 1e-7.
    "float16": _FAST_SPELLINGS | {"tanh": lambda x: ((x * (-2.0 * _LOG2_E)).exp2() + 1.0).reciprocal() * 2.0 - 1.0},
}

"""Activations with less use of the special-function unit, for kernels that wait for it.

silu, gelu and their like are x (1 + T(|x|) sign(x)) / 2 with a T that rises from 0 to 1. Here 1 - T is the fourth or eighth power of a
polynomial h of low degree: it decays as T's complement does, its errors shrink with it, and all is multiplications and additions,

    v = min(|x| / reach, 1)        one instruction, as the multiplication saturates
    h = h0 + h1 v + h2 v^2 + ...
    T = ceiling - h^power          1 at most, likewise saturated: from |x| = reach on f is x or 0 exactly
    f = (x + |x| T) / 2

T of a NaN is some number, and f is NaN; T of an infinity is 1. T errs as much where f is small, far below 0, as it does elsewhere, so the
first columns stay as they were: a sum over few keys has no others. The fits minimise the largest error of f, weighed by sqrt(|x|) above 1,
and by 1 / |x| near 0 so that the slope of T is right there too, which decides sums over many small scores. tests/test_gates.py holds
their errors.

A logistic function in exp2 and a reciprocal, as float16 has it, can share the reciprocal with its neighbour instead (`paired`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gdpa.expression import Expression
from gdpa.folding import ONE, Coefficient, Folded, Step, fold, spelled
from gdpa.graph import SCORE, Ref
from gdpa.lowering import FITTED_GELU, GELU_TANH, Precision

EIGHTHS = 8  # the shares that columns are divided into, in groups of so many


@dataclass(frozen=True)
class Fit:
    """T by its steps. `coefficients` are those of h, the constant first; `squarings` make the power."""

    reach: float
    ceiling: float
    coefficients: tuple[float, ...]
    squarings: int


@dataclass(frozen=True)
class Gate:
    """f(scale * s) = factor * (s + |s| T(stretch |scale s|) sign(scale)), where the factor is that of the folded form."""

    fit: Fit
    stretch: float
    factor: Coefficient


# The largest errors of T / 2: bfloat16 6.3e-4, 3.7e-4 and 4.4e-4; float16 1.2e-5 and 4.2e-6. A tanh for float16 takes seven powers.
_TANH = Fit(4.3453886, 1.0, (1.0, -1.0889345, -1.86550078, 4.61605271, -2.66453072), 2)
_FITS: dict[tuple[Precision, str], Fit] = {
    ("bfloat16", "tanh"): _TANH,
    ("bfloat16", "gelu_tanh"): Fit(4.0295502, 1.0001745, (1.00004361, -0.801922636, -1.05149739, 0.968299486), 2),
    ("bfloat16", "gelu"): Fit(3.9665239, 1.0002932, (1.00007327, -0.788932025, -1.02981357, 0.949516549), 2),
    ("float16", "gelu_tanh"): Fit(
        5.4623069, 1.0, (1.0, -0.544749972, -1.04093861, -0.0961951732, 1.65713977, -1.01181102), 3
    ),
    ("float16", "gelu"): Fit(
        4.5736471, 1.0000058, (1.00000072, -0.456165535, -0.726893711, -0.0949209741, 0.876174483, -0.377032447), 3
    ),
}  # fmt: skip


def gate_of(expression: Expression, precision: Precision) -> Gate | None:
    """The gate of f, None where it has none or no fit. Read off the folded form of bfloat16: s * tanh(u) + s, u odd in s."""
    folded = fold(spelled(expression.pair_for("bfloat16").select(0), "bfloat16"))
    (factor,) = folded.factors
    if factor.power != 1 or factor.number <= 0.0:
        return None
    name, stretch = "", 0.0
    if folded.gated:
        slope, offset = folded.steps[1].operands[-1], folded.steps[2].operands[-1]
        assert isinstance(slope, Coefficient) and isinstance(offset, Coefficient), "Folded.gated says so"
        if (slope.power, offset.power) != (3, 1):
            return None
        for name_of_fit, (linear, cubic) in (("gelu_tanh", GELU_TANH), ("gelu", FITTED_GELU)):
            if math.isclose(slope.number / offset.number**3, cubic / linear**3, rel_tol=1e-9):
                name, stretch = name_of_fit, offset.number / linear
    elif [step.operation for step in folded.steps] == ["mul", "tanh", "mul", "add"]:
        inner, tanh, product, total = (step.operands for step in folded.steps)
        factors = [x for x in inner if isinstance(x, Coefficient)]
        forms = tanh == (Ref(0),) and set(product) == {SCORE, Ref(1)} and set(total) == {SCORE, Ref(2)} and SCORE in inner
        if forms and len(factors) == 1 and factors[0].power == 1 and factors[0].number > 0.0:
            name, stretch = "tanh", factors[0].number
    # bfloat16 has a tanh in gelu's place, which float16 would tell from it: there the fit is that of gelu itself.
    if precision == "float16" and name == "gelu" and all(x[0] != "normal_cdf" for x in expression.pair.select(0).statements):
        return None
    fit = _FITS.get((precision, name))
    return None if fit is None else Gate(fit, stretch, factor)


def paired(folded: Folded) -> Folded | None:
    """The steps with 1 / (2^u + 1) as one, `paired_logistic`, which has one reciprocal for two neighbours; None where there is no such."""
    steps: list[Step] = list(folded.steps)
    for i, step in enumerate(folded.steps):
        if step.operation != "reciprocal" or not isinstance(step.operands[0], Ref) or step.operands[0].index < 0:
            continue
        total = folded.steps[step.operands[0].index]
        exponents = [folded.steps[x] for x in total.references if x >= 0]
        if total.operation == "add" and not {1.0, ONE}.isdisjoint(total.operands) and [x.operation for x in exponents] == ["exp2"]:
            steps[i] = Step("paired_logistic", exponents[0].operands)
    if steps == list(folded.steps):
        return None
    used: set[int] = {x.index for x in folded.outputs if isinstance(x, Ref)}
    for i in reversed(range(len(steps))):
        if i in used:
            used |= set(steps[i].references)
    places = {-1: -1} | {old: new for new, old in enumerate(i for i in range(len(steps)) if i in used)}

    def moved(operands: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(Ref(places[x.index]) if isinstance(x, Ref) else x for x in operands)

    kept = tuple(Step(steps[i].operation, moved(steps[i].operands)) for i in sorted(used) if i >= 0)  # type: ignore[arg-type]
    return Folded(kept, moved(folded.outputs), folded.factors)  # type: ignore[arg-type]


HELPERS = '''
@jit
def saturated(x, k):
    """min(|x| k, 1); 0 of a NaN."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 a;
        abs.f32 a, $1;
        mul.sat.f32 $0, a, $2;
        }
        """,
        "=f,f,f", [x, k], dtype=tl.float32, is_pure=True, pack=1,
    )


@jit
def complement(h, ceiling):
    """ceiling - h h, between 0 and 1."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 n;
        neg.f32 n, $1;
        fma.rn.sat.f32 $0, n, $1, $2;
        }
        """,
        "=f,f,f", [h, ceiling], dtype=tl.float32, is_pure=True, pack=1,
    )
'''.strip()

COLUMNS = '''
@jit
def relieved_columns(x):
    """{count} of 8 groups of 8 columns, evenly spread, but not the first: few keys have none of them."""
    group = {columns} // 8
    return (((group + 1) * {count} % 8 < {count}) & (group > 0))[None, :]
'''.strip()


def gated_function(name: str, gate: Gate, precision: Precision) -> str:
    """The g of the folded function, for columns without the special-function unit."""
    fit = gate.fit
    lines = ["@jit", f"def {name}(s, scale):"]
    if precision == "float16":  # whole: no factor is left out
        lines += [
            f"    x = s * (scale * {gate.factor.number!r})",
            f"    v = saturated(x, {gate.stretch / gate.factor.number / fit.reach:.9g})",
        ]
    else:
        lines += [
            "    x = s",
            f"    v = saturated(s, tl.abs(scale) * {gate.stretch / fit.reach:.9g})",
            "    sign = tl.where(scale < 0.0, -1.0, 1.0)",
        ]
    *lower, highest = fit.coefficients
    polynomial = f"{highest!r}"
    for coefficient in reversed(lower):
        polynomial = f"({polynomial}) * v {'-' if coefficient < 0.0 else '+'} {abs(coefficient)!r}"
    lines.append(f"    h = {polynomial}")
    lines += ["    h = h * h"] * (fit.squarings - 1)
    lines.append(f"    t = complement(h, {fit.ceiling!r})")
    # In this order: with the sign last, tile numbers spill where more than a quarter of the columns are such (Triton 3.6, three consumers).
    lines.append(f"    return tl.abs(x){'' if precision == 'float16' else ' * sign'} * t + x")
    return "\n".join(lines)

"""Torch-level graphs spelled out in primitive operations, for device code.

The rules follow the formulas, and at kinks the conventions, of ATen's kernels. They are written so that f and f' share
subexpressions: the builder computes what is spelled alike once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from gdpa.graph import OPERATIONS, SCORE, Builder, Graph, Operand, Ref, pruned

# What results are rounded to, which says how exact device code must be. sm_90 has its own float16, since its one-instruction tanh is exact
# enough for it: it errs by 1.1e-5 of itself at most on an H200 (docs/numerics.md), where 2^-11 is all that is promised. Sums over many keys
# take a little more error than single scores do.
Precision = Literal["float32", "float16", "float16_sm90", "float16_sm90_many", "bfloat16"]


class Term:
    """An operand with Python's operators, so that the rules below read as formulas."""

    __slots__ = ("builder", "operand")

    def __init__(self, builder: Builder, operand: Operand) -> None:
        self.builder = builder
        self.operand = operand

    def _emit(self, name: str, *operands: Term | float) -> Term:
        plain = [x.operand if isinstance(x, Term) else float(x) for x in operands]
        return Term(self.builder, self.builder.emit(name, *plain))

    def __getattr__(self, name: str) -> Callable[..., Term]:
        if name not in OPERATIONS:
            raise AttributeError(name)
        return lambda *others: self._emit(name, self, *others)

    def __add__(self, other: Term | float) -> Term:
        return self._emit("add", self, other)

    def __sub__(self, other: Term | float) -> Term:
        return self._emit("sub", self, other)

    def __rsub__(self, other: float) -> Term:
        return self._emit("sub", other, self)

    def __mul__(self, other: Term | float) -> Term:
        return self._emit("mul", self, other)

    def __truediv__(self, other: Term | float) -> Term:
        return self._emit("div", self, other)

    def __rtruediv__(self, other: float) -> Term:
        return self._emit("div", other, self)

    def __neg__(self) -> Term:
        return self._emit("neg", self)

    def choose(self, chosen: Term | float, other: Term | float) -> Term:
        """`chosen` where this condition holds, else `other`."""
        return self._emit("where", self, chosen, other)


def _pow(base: Term, exponent: Term) -> Term:
    x, y = base.operand, exponent.operand
    if not isinstance(y, Ref) and abs(y) <= 64 and y == int(y):
        return _integer_power(base, int(y))
    if not isinstance(y, Ref) and abs(y) <= 16:
        if y == -0.5:
            return base.rsqrt()
        if y == 0.5:
            return base.sqrt()
        if 2 * y == int(2 * y) and y > 0:
            return at_minus_infinity(base, math.inf, base.sqrt() * _integer_power(base, int(y)))
        if 2 * y == int(2 * y):
            # nan below zero comes from the root; the magnitudes give a negative zero +inf, as torch's pow does.
            return at_minus_infinity(base, 0.0, 1.0 / (base.sqrt().abs() * _integer_power(base.abs(), int(-y))))
    if not isinstance(x, Ref) and 0.0 < x < math.inf:
        return exponent.exp2() if x == 2.0 else (exponent * math.log2(x)).exp2()
    return base._emit("pow", base, exponent)


def at_minus_infinity(base: Term, result: float, otherwise: Term) -> Term:
    """torch's pow takes -inf to where it takes +inf (0.5 and -0.5, its roots, aside), though what is below zero has no such powers."""
    return otherwise if _is_never_negative(base) else base.eq(-math.inf).choose(result, otherwise)


_NEVER_NEGATIVE = frozenset({"abs", "exp", "exp2", "sigmoid", "sqrt", "rsqrt", "normal_cdf"})


def _is_never_negative(x: Term, looks: int = 3) -> bool:
    """What is known at so few looks: relu(s) ** 1.5 and (s * s + 1) ** -1.5 need no choice."""
    if not isinstance(x.operand, Ref):
        return x.operand >= 0
    definition = x.builder.definition(x.operand)
    if definition is None or looks == 0:
        return False
    name, operands = definition
    if name == "mul" and operands[0] == operands[1]:
        return True
    known = (_is_never_negative(Term(x.builder, operand), looks - 1) for operand in operands)
    return name in _NEVER_NEGATIVE or (name == "maximum" and any(known)) or (name in ("add", "mul", "minimum") and all(known))


def _integer_power(base: Term, exponent: int) -> Term:
    if exponent < 0:
        return 1.0 / _integer_power(base, -exponent)
    result = Term(base.builder, 1.0)
    square = base
    while exponent:
        if exponent & 1:
            result = square if result.operand == 1.0 else result * square
        exponent >>= 1
        if exponent:
            square = square * square
    return result


def _divide(x: Term, y: Term) -> Term:
    divisor = y.operand
    if not isinstance(divisor, Ref) and math.isfinite(divisor) and abs(math.frexp(divisor)[0]) == 0.5:
        return x * (1.0 / divisor)  # a power of two: exact
    return x._emit("div", x, y)


_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _gelu_tanh_parts(x: Term) -> tuple[Term, Term, Term]:
    square = x * x
    tanh = (x * (square * (_SQRT_2_OVER_PI * _CUBIC) + _SQRT_2_OVER_PI)).tanh()
    return square, tanh, x * 0.5


def _gelu_tanh(x: Term) -> Term:
    _, tanh, half = _gelu_tanh_parts(x)
    return half * tanh + half


def _gelu_tanh_backward(grad: Term, x: Term) -> Term:
    square, tanh, half = _gelu_tanh_parts(x)
    slope = square * (3.0 * _SQRT_2_OVER_PI * _CUBIC) + _SQRT_2_OVER_PI
    # Far out the factor of 0 comes before the large ones, whose product is infinite from 1e13 on.
    return grad * (half * ((1.0 - tanh * tanh) * slope) + (tanh * 0.5 + 0.5))


def _gelu_backward(grad: Term, x: Term) -> Term:
    # exp(-x * x / 2) / sqrt(2 pi), its constants inside the exponent.
    density = ((x * x) * (-0.5 * math.log2(math.e)) - 0.5 * math.log2(2.0 * math.pi)).exp2()
    return grad * (x * density + x.normal_cdf())


def _cdf_by_tanh(x: Term, linear: float, cubic: float) -> tuple[Term, Term]:
    square = x * x
    return square, (x * (square * cubic + linear)).tanh() * 0.5 + 0.5


def _gelu_by_tanh(linear: float, cubic: float) -> Callable[[Term], Term]:
    return lambda x: x * _cdf_by_tanh(x, linear, cubic)[1]


def _gelu_by_tanh_backward(linear: float, cubic: float) -> Callable[[Term, Term], Term]:
    """f' = w + 2 y (1 - w) (linear + 3 cubic x^2) with y = x w: two instructions fewer than from tanh, but y - y w cancels."""

    def rule(grad: Term, x: Term) -> Term:
        square, w = _cdf_by_tanh(x, linear, cubic)
        y = x * w
        return grad * ((y - y * w) * (square * (6.0 * cubic) + 2.0 * linear) + w)

    return rule


# For an exact tanh: gelu is h + h tanh(u), h = x / 2, u of odd powers of h, whose coefficients these are. The first is exact: it decides
# sums over many small scores. The value errs 5e-5 at most. The seventh power is there for scores beyond 11, where the fifth would turn the
# sign. f' is (1 + tanh(u)) / 2 + h (1 - tanh(u)^2) v, where v, u's slope but for what f errs, has even powers of h: it errs 9.2e-5.
# Problems of a single key may be over the error budget so, those of 64 keys use less than 0.7 of it (tests/test_half.py).
_ODD_INSIDE_TANH = (1.5957691216, 0.294062155, -0.0104579435, 0.0001536)
_SLOPE_INSIDE_TANH = (0.797511988, 0.44361636, -0.0276732731)


def _gelu_by_finer_tanh_parts(x: Term) -> tuple[Term, Term, Term]:
    """(x / 2)^2, tanh(u) and f."""
    half = x * 0.5
    square = half * half
    c0, c1, c2, c3 = _ODD_INSIDE_TANH
    tanh = (half * (((square * c3 + c2) * square + c1) * square + c0)).tanh()
    return square, tanh, half * tanh + half


def _gelu_by_finer_tanh(x: Term) -> Term:
    return _gelu_by_finer_tanh_parts(x)[2]


def _gelu_by_finer_tanh_backward(grad: Term, x: Term) -> Term:
    square, tanh, y = _gelu_by_finer_tanh_parts(x)
    c0, c1, c2 = _SLOPE_INSIDE_TANH
    return grad * ((y - y * tanh) * ((square * c2 + c1) * square + c0) + (tanh * 0.5 + 0.5))


# The logarithm to 2 of the normal distribution's tail, 1 - cdf(|x|), in powers of |x / 2|. Fitted to err little beside f where f is small,
# and at 0 in its slope, which decides sums over many small scores: f errs 4.4e-6 at most, from -3 on a 15,000th of itself, and f' 7e-6.
_LOG2_OF_TAIL = (-1.0, -2.30201726, -1.83961356, -0.412902898, 0.110758231, -0.0142057187)


# The same of gelu_tanh's, (1 - tanh(sqrt(2 / pi) (|x| + 0.044715 |x|^3))) / 2: f errs 1.1e-5 at most, from -3 on a 5,000th of itself.
_LOG2_OF_TANH_TAIL = (-1.0, -2.30169439, -1.84282434, -0.406453162, 0.157405913, -0.0677269995)


def _gelu_by_exp2_parts(x: Term, log2_of_tail: tuple[float, ...] = _LOG2_OF_TAIL) -> tuple[Term, Term, Term]:
    """x / 2, its magnitude, and 2 cdf(|x|) - 1."""
    half = x * 0.5
    magnitude = half.abs()
    power = magnitude * log2_of_tail[-1]
    for coefficient in log2_of_tail[-2:0:-1]:
        power = (power + coefficient) * magnitude
    return half, magnitude, 1.0 - (power + log2_of_tail[0]).exp2() * 2.0


def _gelu_by_exp2(x: Term) -> Term:
    half, magnitude, gate = _gelu_by_exp2_parts(x)
    return magnitude * gate + half


def _gelu_tanh_by_exp2(x: Term) -> Term:
    half, magnitude, gate = _gelu_by_exp2_parts(x, _LOG2_OF_TANH_TAIL)
    return magnitude * gate + half


def _gelu_by_exp2_backward(grad: Term, x: Term) -> Term:
    half, magnitude, gate = _gelu_by_exp2_parts(x)
    # 4 exp(-x * x / 2) / sqrt(2 pi), its constants inside the exponent. f' is 1 / 2 and an odd function.
    density = ((magnitude * magnitude) * (-2.0 * math.log2(math.e)) + 0.5 * math.log2(8.0 / math.pi)).exp2()
    odd = magnitude * density + gate
    return grad * (half.lt(0.0).choose(-odd, odd) * 0.5 + 0.5)


def _silu_backward(grad: Term, x: Term) -> Term:
    sigmoid = x.sigmoid()
    return grad * ((x * sigmoid) * (1.0 - sigmoid) + sigmoid)


def _mish_parts(x: Term) -> tuple[Term, Term, Term, Term]:
    # tanh(log1p(w)) = n / (n + 2) with n = w(w + 2); beyond 20 it is 1 in float32, and w * w would overflow at 44.
    capped = x.minimum(20.0)
    w = capped.exp()
    n = w * (w + 2.0)
    inverse = 1.0 / (n + 2.0)
    return capped, w, inverse, n * inverse


def _mish_backward(grad: Term, x: Term) -> Term:
    # t + x sigmoid(x) (1 - t^2); 1 - t^2 = 4 (w + 1)^2 / (n + 2)^2 and sigmoid(x) = w / (w + 1) leave no cancellation.
    # Beyond 20 there is nothing left of the product, whatever x is.
    capped, w, inverse, tanh = _mish_parts(x)
    return grad * ((capped * (w * (w + 1.0)) * 4.0) * (inverse * inverse) + tanh)


def _log_sigmoid_derivative(grad: Term, x: Term) -> Term:
    z = (-x.abs()).exp()
    tail = z / (z + 1.0)
    return grad * x.lt(0.0).choose(1.0 - tail, tail)


def _elu(x: Term, alpha: Term, scale: Term, input_scale: Term) -> Term:
    return x.le(0.0).choose((x * input_scale).expm1() * (alpha * scale), x * scale)


def _elu_backward(grad: Term, x: Term, alpha: Term, scale: Term, input_scale: Term) -> Term:
    negative = (x * input_scale).exp() * (alpha * scale * input_scale)
    return grad * x.le(0.0).choose(negative, scale)


def _softplus_backward(grad: Term, x: Term, beta: Term, threshold: Term) -> Term:
    z = (x * beta).exp()
    return grad * (x * beta).gt(threshold).choose(1.0, z / (z + 1.0))


def _inside(x: Term, bound: Term) -> Term:
    """Not where x is NaN, which shrinking keeps."""
    return x.abs().le(bound)


# Operation -> its primitive-level form. The conventions at kinks are those of ATen's kernels.
_RULES: dict[str, Callable[..., Term]] = {
    "detach": lambda x: x,
    "relu": lambda x: x.maximum(0.0),
    "silu": lambda x: x * x.sigmoid(),
    "silu_backward": _silu_backward,
    "gelu": lambda x: x * x.normal_cdf(),
    "gelu_backward": _gelu_backward,
    "gelu_tanh": _gelu_tanh,
    "gelu_tanh_backward": _gelu_tanh_backward,
    "tanh_backward": lambda grad, y: grad * (1.0 - y * y),
    "sigmoid_backward": lambda grad, y: grad * (y * (1.0 - y)),
    "threshold": lambda x, bound, value: x.le(bound).choose(value, x),
    "threshold_backward": lambda grad, x, bound: x.le(bound).choose(0.0, grad),
    "leaky_relu": lambda x, slope: x.gt(0.0).choose(x, x * slope),
    "leaky_relu_backward": lambda grad, x, slope: grad * x.gt(0.0).choose(1.0, slope),
    "elu": _elu,
    "elu_backward": _elu_backward,
    "celu": lambda x, alpha: _elu(x, alpha, Term(x.builder, 1.0), 1.0 / alpha),
    "softplus": lambda x, b, bound: (x * b).gt(bound).choose(x, (x * b).exp().log1p() / b),
    "softplus_backward": _softplus_backward,
    "clamp": lambda x, low, high: x.maximum(low).minimum(high),
    "clamp_min": lambda x, low: x.maximum(low),
    "clamp_max": lambda x, high: x.minimum(high),
    "hardtanh": lambda x, low, high: x.maximum(low).minimum(high),
    "hardtanh_backward": lambda grad, x, low, high: x.le(low).logical_or(x.ge(high)).choose(0.0, grad),
    "hardsigmoid": lambda x: (x + 3.0).maximum(0.0).minimum(6.0) * (1.0 / 6.0),
    "hardsigmoid_backward": lambda grad, x: x.abs().lt(3.0).choose(grad * (1.0 / 6.0), 0.0),
    "hardswish": lambda x: x * ((x + 3.0).maximum(0.0).minimum(6.0) * (1.0 / 6.0)),
    "hardswish_backward": lambda grad, x: x.le(-3.0).choose(0.0, grad * x.lt(3.0).choose(x * (1.0 / 3.0) + 0.5, 1.0)),
    "mish": lambda x: x * _mish_parts(x)[3],
    "mish_backward": _mish_backward,
    "log_sigmoid": lambda x: x.minimum(0.0) - (-x.abs()).exp().log1p(),
    "log_sigmoid_backward": _log_sigmoid_derivative,
    "softshrink": lambda x, bound: x.gt(bound).choose(x - bound, x.lt(-bound).choose(x + bound, x * 0.0)),
    "softshrink_backward": lambda grad, x, bound: _inside(x, bound).choose(0.0, grad),
    "hardshrink": lambda x, bound: _inside(x, bound).choose(0.0, x),
    "hardshrink_backward": lambda grad, x, bound: _inside(x, bound).choose(0.0, grad),
    "pow": _pow,
    "div": _divide,
    "reciprocal": lambda x: 1.0 / x,
    "tan": lambda x: x.sin() / x.cos(),
    "log10": lambda x: x.log() * math.log10(math.e),
}

# Where the rounding of P and dS is coarser than what they lose. For bfloat16 gelu is x w(x), w = (1 + tanh(x (linear + cubic x^2))) / 2
# fitted to the normal distribution: the value errs 2.8e-4 at most and the derivative 9e-4. From exp2 both err less, but cost twice the
# instructions and so many registers that an H200's forward ran at 202 TFLOP/s, against 545 in this form. float16 needs that: a tanh fitted
# with a fifth power of x, which errs 9.4e-5, put one of a thousand drawn problems over the error budget.
_GELU_TANH: dict[str, Callable[..., Term]] = {
    "gelu_tanh": _gelu_by_tanh(_SQRT_2_OVER_PI, _SQRT_2_OVER_PI * _CUBIC),
    "gelu_tanh_backward": _gelu_by_tanh_backward(_SQRT_2_OVER_PI, _SQRT_2_OVER_PI * _CUBIC),
}
_FITTED = (0.80015707, 0.0347008929)
_GELU_BY_EXP2: dict[str, Callable[..., Term]] = {"gelu": _gelu_by_exp2, "gelu_backward": _gelu_by_exp2_backward}
_OWN_RULES: dict[Precision, dict[str, Callable[..., Term]]] = {
    "float32": {},
    "float16": _GELU_TANH | _GELU_BY_EXP2,
    "float16_sm90": _GELU_TANH | _GELU_BY_EXP2,
    "float16_sm90_many": _GELU_TANH | {"gelu": _gelu_by_finer_tanh, "gelu_backward": _gelu_by_finer_tanh_backward},
    "bfloat16": _GELU_TANH | {"gelu": _gelu_by_tanh(*_FITTED), "gelu_backward": _gelu_by_tanh_backward(*_FITTED)},
}
# Of f alone. With f', which takes gelu_tanh's tanh, that is the cheaper; without, one exp2 is, where a tanh takes a reciprocal as well.
_RULES_ALONE: dict[Precision, dict[str, Callable[..., Term]]] = {"float16": {"gelu_tanh": _gelu_tanh_by_exp2}}


@lru_cache(maxsize=256)
def lower(graph: Graph, precision: Precision = "float32") -> Graph:
    """`graph` in primitive operations alone, equal subexpressions computed once; for results of a lower precision in fewer of them."""
    rules = _RULES | _OWN_RULES[precision]
    if not any(name.endswith("_backward") for name, _ in graph.statements):
        rules |= _RULES_ALONE.get(precision, {})
    builder = Builder()
    results: dict[int, Operand] = {-1: SCORE}

    def find(operand: Operand) -> Operand:
        return results[operand.index] if isinstance(operand, Ref) else operand

    for i, (name, operands) in enumerate(graph.statements):
        arguments = [find(x) for x in operands]
        rule = rules.get(name)
        if rule is None:
            results[i] = builder.emit(name, *arguments)
        else:
            results[i] = rule(*(Term(builder, x) for x in arguments)).operand
    return pruned(builder.statements, [find(x) for x in graph.outputs])

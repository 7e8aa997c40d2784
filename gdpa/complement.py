"""What a gate lacks of 1, without the special-function unit.

gelu and its like are f(s) = c (h + h tanh(u(h))), h a multiple of the score and u odd. For a = |h|

    1 - tanh(u(a)) = q(a)^2        q(a) = max(0, 1 + a (q1 + a (q2 + ...)))

nearly, by multiplications of 16-bit pairs, where tanh takes two uses of the special-function unit for a pair, of which a Hopper
multiprocessor has 16 lanes. The root is what a polynomial fits well, and a square errs by no more than twice what it does.

Sums over many keys hold this to two things. Errors of single scores must be small beside f. And where scores are small and values alike,
h cancels in the sum and h tanh(u(h)), which is small there, does not: so tanh must be right relatively, and on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

# What polynomials are chosen from: how much more right tanh is where it is small, and the u up to which q is fitted.
_SLOPES = (1.5, 1.75)
_ENDS = np.linspace(3.5, 5.25, 8)
# Normal scores whose spread is so many times the h at which u is 1, and the multiples of the spread that they are.
_SPREADS = 2.0 ** np.arange(-6.0, 2.5, 0.5)
_SCORES = np.linspace(0.01, 8.0, 800)
_WEIGHTS = np.exp(-(_SCORES**2) / 2)


def roots(odd: Sequence[float], degree: int, largest_error: float) -> tuple[float, ...] | None:
    """q1, q2 and so on for u(h) = h (odd[0] + odd[1] h^2 + ...). None where f would err by more than `largest_error`, as `_error` has
    it."""
    if not odd[0] > 0.0:
        return None
    found = [_fit(odd, degree, slope, _where(odd, end)) for slope, end in product(_SLOPES, _ENDS)]
    error, best = min((_error(q, odd), tuple(q)) for q in found)
    # Rounded, so that all machines generate the same code, whatever order their libraries add in.
    return tuple(float(f"{x:.7g}") for x in best) if error <= largest_error else None


def _gate(odd: Sequence[float], a: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(np.tanh(a * np.polynomial.polynomial.polyval(a * a, odd)))


def _where(odd: Sequence[float], value: float) -> float:
    """The h at which u, which grows, is `value`."""
    low, high = 0.0, 10.0 / odd[0]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _gate(odd, np.array(middle)) < np.tanh(value) else (low, middle)
    return high


def _fit(odd: Sequence[float], degree: int, slope: float, end: float) -> np.ndarray:
    """Weighted least squares."""
    a = np.linspace(end / 1000, end, 1000)
    gate = _gate(odd, a)
    root = np.sqrt(1.0 - gate)
    powers = a[:, None] ** np.arange(1, degree + 1)
    # tanh errs by 2 q times what q does.
    weights = (root + 0.05) / (gate**slope + 1e-3)
    return np.asarray(np.linalg.lstsq(powers * weights[:, None], (root - 1.0) * weights, rcond=None)[0])


def _square(q: np.ndarray, a: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(1.0 + a * np.polynomial.polynomial.polyval(a, q), 0.0) ** 2)


def _error(q: np.ndarray, odd: Sequence[float]) -> float:
    """Of normal scores of any spread, the worst of: the mean of h tanh, relatively; and f, in the root mean square, relatively."""
    turn = _where(odd, 1.0)
    if _square(q, turn * np.logspace(1.0, 6.0, 500)).any():
        return np.inf  # it grows again
    a = turn * _SPREADS[:, None] * _SCORES
    even = a * _gate(odd, a)
    errors = a * (1.0 - _square(q, a)) - even
    mean = np.abs((_WEIGHTS * errors).sum(1)) / (_WEIGHTS * even).sum(1)
    root_mean_square = np.sqrt((_WEIGHTS * errors**2).sum(1) / (_WEIGHTS * (a**2 + even**2)).sum(1))
    return float(max(mean.max(), root_mean_square.max()))

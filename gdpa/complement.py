"""What a gate lacks of 1, without the special-function unit.

gelu and its like are f(s) = c (h + h tanh(u(h))), h a multiple of the score and u odd. For a = |h|

    1 - tanh(u(a)) = q(a)^2        q(a) = max(0, 1 + a (q1 + a (q2 + a (q3 + a q4))))

to some ten-thousandths: six products of 16-bit pairs, where tanh takes two uses of the special-function unit for a pair, of which a Hopper
multiprocessor has 16 lanes. The root is what a polynomial fits well, and a square errs by no more than twice what it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ENDS = np.linspace(3.0, 6.0, 13)  # where q may become 0, as u there: tanh(3) lacks 0.005 of 1, tanh(6) 0.00001


def roots(odd: Sequence[float], degree: int, largest_error: float) -> tuple[float, ...] | None:
    """q1, q2 and so on for u(h) = h (odd[0] + odd[1] h^2 + ...). None where f would err by more than `largest_error` of the h at which
    u is 1."""
    if not odd[0] > 0.0:
        return None
    found = [_fit(odd, degree, _where(odd, end)) for end in _ENDS]
    error, best = min((_error(q, odd), tuple(map(float, q))) for q in found)
    return best if error <= largest_error * _where(odd, 1.0) else None


def _gate(odd: Sequence[float], a: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(a * np.polynomial.polynomial.polyval(a * a, odd))


def _where(odd: Sequence[float], value: float) -> float:
    """The h at which u, which grows, is `value`."""
    low, high = 0.0, 10.0 / odd[0]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _gate(odd, np.array(middle)) < value else (low, middle)
    return high


def _fit(odd: Sequence[float], degree: int, end: float) -> np.ndarray:
    """Least squares of what tanh errs by, relatively: sums over many keys may be of the even part of f alone, which is h tanh."""
    a = np.linspace(end / 4000, end, 4000)
    root = np.sqrt(1.0 - np.tanh(_gate(odd, a)))
    powers = a[:, None] ** np.arange(1, degree + 1)
    weights = root / (1.0 - root * root + 1e-3)
    return np.asarray(np.linalg.lstsq(powers * weights[:, None], (root - 1.0) * weights, rcond=None)[0])


def _error(q: np.ndarray, odd: Sequence[float]) -> float:
    """The most that f, c left out, errs by, near and far."""
    near = 3.0 * _where(odd, _ENDS[-1])
    a = np.concatenate([np.linspace(0.0, near, 20000), near * np.logspace(0.0, 6.0, 100)])
    square = np.maximum(1.0 + a * np.polynomial.polynomial.polyval(a, q), 0.0) ** 2
    return float(np.abs(a * (square - (1.0 - np.tanh(_gate(odd, a)))) / 2).max())

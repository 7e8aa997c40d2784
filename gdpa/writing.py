"""How generated device code spells numbers, and scalars that depend on the scale."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gdpa.folding import Coefficient


def literal(number: float) -> str:
    """The number as Triton reads it into a float32; outside float32's normal range it would make it a float64."""
    value = float(number)
    if math.isfinite(value) and abs(value) > torch.finfo(torch.float32).max:
        value = math.copysign(math.inf, value)
    if not math.isfinite(value):
        return f'float("{value}")'
    return "0.0" if abs(value) < torch.finfo(torch.float32).tiny else repr(value)


def scalar(coefficient: Coefficient, power: str = "scale_{}") -> str:
    factors = [literal(coefficient.number)] if coefficient.number != 1.0 or coefficient.is_number else []
    if coefficient.power:
        factors.insert(0, "scale" if coefficient.power == 1 else power.format(coefficient.power))
    if coefficient.weights:
        factors.append("weight")
    return " * ".join(factors)


def powers(coefficients: Iterable[Coefficient]) -> list[str]:
    """Lines that compute the powers of the scale that `scalar` reads."""
    highest = max((x.power for x in coefficients), default=0)
    return [f"    scale_{n} = {'scale' if n == 2 else f'scale_{n - 1}'} * scale" for n in range(2, highest + 1)]

"""Lengths of a batch's sequences, as recommendation traffic has them. A seed gives the same lengths on every machine.

    uniform     the published GDPA benchmark: at sparsity s, uniform on [max(1, (2 s - 1) L), L]
    lognormal   user histories: most are short, a few reach the cap, some are empty
    power_law   heavier still: P(length > x) falls as x ** -exponent

Every generator returns an int64 tensor (batch,) on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from gdpa.errors import GdpaError


def uniform(batch: int, cap: int, *, sparsity: float = 0.5, seed: int = 0) -> Tensor:
    """Uniform on [max(1, (2 * sparsity - 1) * cap), cap]; sparsity 1 is a dense batch, 0.5 the whole range.

    Example:
        >>> uniform(4, 100, sparsity=1.0).tolist()
        [100, 100, 100, 100]
    """
    _check(batch, cap)
    if not 0.5 <= sparsity <= 1:
        raise GdpaError(f"sparsity: expected a number from 0.5 to 1, got {sparsity!r}")
    first = max(1, int((2 * sparsity - 1) * cap))
    return torch.tensor([first + int(u * (cap - first + 1)) for u in _draws(batch, seed)], dtype=torch.int64)


def lognormal(batch: int, cap: int, *, median: float = 120.0, sigma: float = 1.2, empty: float = 0.05, seed: int = 0) -> Tensor:
    """round(median * exp(sigma * normal)), between 1 and the cap; a fraction `empty` of the sequences has length 0."""
    _check(batch, cap)
    _check_empty(empty)
    if median <= 0 or sigma < 0:
        raise GdpaError(f"median, sigma: expected a positive median and sigma >= 0, got {median!r}, {sigma!r}")
    normal = NormalDist()

    def length(u: float) -> int:
        return round(median * math.exp(sigma * normal.inv_cdf(min(max(u, 1e-12), 1 - 1e-12))))

    return _heavy_tailed(length, batch, cap, empty, seed)


def power_law(batch: int, cap: int, *, exponent: float = 1.0, shortest: int = 8, empty: float = 0.05, seed: int = 0) -> Tensor:
    """Pareto: shortest * u ** (-1 / exponent), up to the cap; a fraction `empty` of the sequences has length 0."""
    _check(batch, cap)
    _check_empty(empty)
    if exponent <= 0 or shortest < 1:
        raise GdpaError(f"exponent, shortest: expected exponent > 0 and shortest >= 1, got {exponent!r}, {shortest!r}")

    def length(u: float) -> int:
        return int(min(shortest * (1 - u) ** (-1 / exponent), float(cap)))

    return _heavy_tailed(length, batch, cap, empty, seed)


def _heavy_tailed(length: Callable[[float], int], batch: int, cap: int, empty: float, seed: int) -> Tensor:
    draws = _draws(2 * batch, seed)
    lengths = [0 if chance < empty else min(max(length(u), 1), cap) for u, chance in zip(draws[:batch], draws[batch:], strict=True)]
    return torch.tensor(lengths, dtype=torch.int64)


def _draws(count: int, seed: int) -> list[float]:
    """Uniform on [0, 1). The transformations on top are Python's: torch's vectorised normal and exp differ between
    processors in the last digit, which would move a length now and then."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    draws: list[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return draws


def _check(batch: int, cap: int) -> None:
    if batch < 0:
        raise GdpaError(f"batch: expected at least 0, got {batch}")
    if cap < 1:
        raise GdpaError(f"cap: expected at least 1, got {cap}")


def _check_empty(empty: float) -> None:
    if not 0 <= empty <= 1:
        raise GdpaError(f"empty: expected a fraction from 0 to 1, got {empty!r}")


GENERATORS: dict[str, Callable[..., Tensor]] = {"uniform": uniform, "lognormal": lognormal, "power-law": power_law}

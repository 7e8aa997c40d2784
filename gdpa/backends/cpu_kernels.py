"""Activations on one tile of scores, in place, for the cpu backend.

The built-in ones have one-pass torch kernels for f(s) and for a gradient times f'(s); anything else is evaluated from
its traced expression, at several passes and temporaries the size of the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from gdpa.activations import Activation

aten = torch.ops.aten


class Kernel(Protocol):
    """An activation on one tile of scores, in place."""

    @property
    def steady(self) -> bool:
        """Whether f and f' make an error of a score a hundred times larger at most: `cpu_tensors.wide_product` may make it."""

    def value(self, s: Tensor) -> None:
        """s = f(s)."""

    def prepare(self, s: Tensor, p: Tensor | None, slope: bool) -> None:
        """p = f(s) where `p` is wanted; where `slope` is, leave in `s` what `multiply_by_slope` reads."""

    def multiply_by_slope(self, dp: Tensor, s: Tensor) -> None:
        """dp *= f'(scores), given what `prepare` left in `s`."""


class Traced:
    """Any activation: f and f' from its traced expression, which allocates temporaries the size of the tile."""

    steady = False  # sin(3000 s) would use 1.7 of the error budget; with fp32 scores it uses 0.5

    def __init__(self, key: str) -> None:
        self._activation = Activation.from_key(key)

    def value(self, s: Tensor) -> None:
        s.copy_(self._activation(s))

    def prepare(self, s: Tensor, p: Tensor | None, slope: bool) -> None:
        if not slope:
            if p is not None:
                p.copy_(self._activation(s))
            return
        value, derivative = self._activation.value_and_derivative(s)
        if p is not None:
            p.copy_(value)
        s.copy_(derivative)

    def multiply_by_slope(self, dp: Tensor, s: Tensor) -> None:
        dp.mul_(s)


@dataclass(frozen=True)
class Fused:
    """A named activation for which torch has one-pass kernels: f(s), and the product of a gradient with f'."""

    forward: Callable[[Tensor, Tensor], object]  # (s, out): out = f(s); out may be s
    backward: Callable[[Tensor, Tensor], object]  # (dp, state): dp *= f'
    state_is_value: bool = False  # f' is had from f(s), not from s
    # exp is the steepest: it makes the error of a score of 88, the largest it takes, 88 times larger. Kinks lie at -3, 0 and 3, and
    # `wide_product` keeps on which side of a number that bf16 has a score lies. f' of gelu and SiLU vanishes at a number that bf16
    # has not: gradients may be over the budget where all scores lie within 0.001 of it (docs/numerics.md).
    steady: bool = True

    def value(self, s: Tensor) -> None:
        self.forward(s, s)

    def prepare(self, s: Tensor, p: Tensor | None, slope: bool) -> None:
        if slope and self.state_is_value:
            self.forward(s, s)
            if p is not None:
                p.copy_(s)
        elif p is not None:
            self.forward(s, p)

    def multiply_by_slope(self, dp: Tensor, s: Tensor) -> None:
        self.backward(dp, s)


def _relu2(s: Tensor, out: Tensor) -> None:
    torch.square(torch.clamp_min(s, 0, out=out), out=out)


def _relu2_backward(dp: Tensor, s: Tensor) -> None:
    dp.mul_(s.relu_()).mul_(2)


def _identity(s: Tensor, out: Tensor) -> None:
    if out is not s:
        out.copy_(s)


FUSED: dict[str, Fused] = {
    "identity": Fused(_identity, lambda dp, s: None),
    "relu": Fused(
        lambda s, out: torch.clamp_min(s, 0, out=out),
        lambda dp, s: aten.threshold_backward.grad_input(dp, s, 0, grad_input=dp),
    ),
    "relu2": Fused(_relu2, _relu2_backward),
    "leaky_relu": Fused(
        lambda s, out: aten.leaky_relu.out(s, out=out),
        lambda dp, s: aten.leaky_relu_backward.grad_input(dp, s, 0.01, False, grad_input=dp),
    ),
    "gelu": Fused(lambda s, out: aten.gelu.out(s, out=out), lambda dp, s: aten.gelu_backward.grad_input(dp, s, grad_input=dp)),
    "gelu_tanh": Fused(
        lambda s, out: aten.gelu.out(s, approximate="tanh", out=out),
        lambda dp, s: aten.gelu_backward.grad_input(dp, s, approximate="tanh", grad_input=dp),
    ),
    "silu": Fused(lambda s, out: aten.silu.out(s, out=out), lambda dp, s: aten.silu_backward.grad_input(dp, s, grad_input=dp)),
    "sigmoid": Fused(
        lambda s, out: torch.sigmoid(s, out=out),
        lambda dp, p: aten.sigmoid_backward.grad_input(dp, p, grad_input=dp),
        state_is_value=True,
    ),
    "tanh": Fused(
        lambda s, out: torch.tanh(s, out=out),
        lambda dp, p: aten.tanh_backward.grad_input(dp, p, grad_input=dp),
        state_is_value=True,
    ),
    "softplus": Fused(
        lambda s, out: aten.softplus.out(s, out=out),
        lambda dp, s: aten.softplus_backward.grad_input(dp, s, 1, 20, grad_input=dp),
    ),
    "elu": Fused(
        lambda s, out: aten.elu.out(s, out=out),
        lambda dp, s: aten.elu_backward.grad_input(dp, 1, 1, 1, False, s, grad_input=dp),
    ),
    "hardswish": Fused(lambda s, out: aten.hardswish.out(s, out=out), lambda dp, s: aten.hardswish_backward.out(dp, s, out=dp)),
    "exp": Fused(lambda s, out: torch.exp(s, out=out), lambda dp, p: dp.mul_(p), state_is_value=True),
}


@lru_cache(maxsize=256)
def kernel_of(key: str) -> Kernel:
    fused = FUSED.get(key)
    return Traced(key) if fused is None else fused

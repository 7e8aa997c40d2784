"""An activation f and its derivative as one expression, and the text that carries it between processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from gdpa.errors import GdpaError
from gdpa.graph import Graph, formulas, parse_graph
from gdpa.lowering import Precision, lower

HEADER = "gdpa-expression-1"


@dataclass(frozen=True)
class Expression:
    """An activation f and its derivative as expressions.

    Attributes:
        joint: the torch-level graph with outputs (f, f').
        shorter: a hand-written graph with the same outputs in fewer operations, to compute both; None uses `joint`.
    """

    joint: Graph
    shorter: Graph | None = None

    @cached_property
    def key(self) -> str:
        """The self-contained text of `joint`; the same for the same expression in every process."""
        return f"{HEADER}: {self.joint.text}"

    @cached_property
    def pair(self) -> Graph:
        """The primitive-level graph with outputs (f, f'), common subexpressions computed once."""
        return lower(self.shorter or self.joint)

    def pair_for(self, precision: Precision) -> Graph:
        """`pair` for results that are rounded to this dtype: in fewer operations, some of them fitted."""
        return lower(self.shorter or self.joint, precision)

    def value_for(self, precision: Precision) -> Graph:
        """The first output of `pair_for`, f; where it is wanted alone it may have another form."""
        return lower((self.shorter or self.joint).select(0), precision)

    @cached_property
    def value_graph(self) -> Graph:
        """The torch-level graph of f alone."""
        return self.joint.select(0)

    @cached_property
    def formula(self) -> str:
        """f as a readable formula of `s`."""
        return formulas(self.value_graph)[0]

    def value(self, s: torch.Tensor) -> torch.Tensor:
        """f(s) for a tensor of any float dtype, shape and device, differentiable by autograd.

        Where f does not depend on `s` (a constant, a step) the result is still attached to `s`, with gradient zero.
        """
        (result,) = self.value_graph.evaluate(s)
        if s.requires_grad and torch.is_grad_enabled() and not result.requires_grad:
            result = torch.where(torch.ones_like(s, dtype=torch.bool), result, s)
        return result

    def value_and_derivative(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(f(s), f'(s)), outside autograd, for a tensor of any float dtype, shape and device."""
        with torch.no_grad():
            value, derivative = (self.shorter or self.joint).evaluate(s)
        return value, derivative


def parse(key: str) -> Expression:
    """The expression whose `Expression.key` is `key`.

    Raises:
        GdpaError: `key` is not such a text; the message says what is wrong with it.
    """
    prefix = f"{HEADER}: "
    if not isinstance(key, str) or not key.startswith(prefix):
        raise GdpaError(f"activation key: expected a text that starts with {prefix!r}, got {key!r:.80}")
    graph = parse_graph(key[len(prefix) :])
    if len(graph.outputs) != 2:
        raise GdpaError(f"activation key: expected 2 results (f, f'), got {len(graph.outputs)}")
    return Expression(graph)

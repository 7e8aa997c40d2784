"""f' as factor * (e + 1): the 1 costs a kernel nothing.

A backward kernel wants f' only for dS = f' * dP. With e in its place that is dP * e + dP, one fused multiply-add in place of the product,
and where f' ends in a sum, e may have an instruction less: silu's f' is (1 + t + u (1 - t^2)) / 2 with u = scale * s / 2, t = tanh(u).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from gdpa.folding import ONE, Coefficient, Folded, fold
from gdpa.graph import SCORE, Builder, Graph, Operand, Ref, pruned


def lift(graph: Graph) -> Folded | None:
    """A `spelled` pair (f, f') folded with e for f', whose factor is that of e + 1; None where that takes no fewer instructions.

    The factor is f'(0), so that e is 0 at 0.
    """
    slope = graph.outputs[1]
    name, operands = graph.statements[slope.index] if isinstance(slope, Ref) and slope.index >= 0 else ("", ())
    factor = float(graph.evaluate(torch.zeros(1, dtype=torch.float64))[1])
    if name != "add" or not factor or not math.isfinite(factor) or not Coefficient(factor).usable:
        return None
    ways = [fold(_lifted(graph, operands, lowered, factor), (None, ONE)) for lowered in range(2)]
    best = min(ways, key=lambda way: way.cost)
    if best.instructions >= fold(graph).instructions:
        return None
    return replace(best, factors=(best.factors[0], Coefficient(factor)))


def _lifted(graph: Graph, summands: tuple[Operand, ...], lowered: int, factor: float) -> Graph:
    """The graph with f' / factor - 1 for f', whose last step adds the summands; the 1 is taken from the summand `lowered`."""
    builder = Builder()
    results: dict[int, Operand] = {-1: SCORE}

    def find(operand: Operand) -> Operand:
        return results[operand.index] if isinstance(operand, Ref) else operand

    for i, (name, operands) in enumerate(graph.statements):
        results[i] = builder.emit(name, *map(find, operands))
    parts = [builder.emit("mul", find(x), 1.0 / factor) for x in summands]
    parts[lowered] = builder.emit("sub", parts[lowered], 1.0)
    return pruned(builder.statements, [find(graph.outputs[0]), builder.emit("add", *parts)])

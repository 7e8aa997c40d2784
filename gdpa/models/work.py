"""What a model costs: parameters and floating-point operations of its parts.

A multiplication and an addition are two operations. Matrix products are counted, on the rows that exist, and attention on the (query,
key) pairs of the real lengths; norms, activations, rotations and lookups are not. A training step is three forwards: the gradients of a
product are two products of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gdpa.models.windows import WindowAttention, window_pairs
from gdpa.nn import HSP, PFFN, PMA, SelfAttention, SumKronLinear


@dataclass(frozen=True)
class Part:
    """One part of a model: its parameters, and the operations of its forward for a given batch."""

    name: str
    parameters: int
    flops: int


@dataclass(frozen=True)
class Summary:
    """The parts of a model; `str` of it is a table. `examples` and `events` are those of the batch, None where there is none."""

    title: str
    parts: tuple[Part, ...]
    examples: int | None = None
    events: int | None = None

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def forward_flops(self) -> int:
        return sum(part.flops for part in self.parts)

    @property
    def step_flops(self) -> int:
        return 3 * self.forward_flops

    def __str__(self) -> str:
        rows = [(part.name, part.parameters, part.flops) for part in self.parts]
        rows.append(("total", self.parameters, self.forward_flops))
        names = max(len(name) for name, _, _ in rows)
        counted = self.examples is not None
        header = f"{'part':<{names}}  {'parameters':>14}" + (f"  {'forward FLOPs':>18}  {'step FLOPs':>18}" if counted else "")
        lines = [self.title, header]
        for name, parameters, flops in rows:
            lines.append(f"{name:<{names}}  {parameters:>14,}" + (f"  {flops:>18,}  {3 * flops:>18,}" if counted else ""))
        if counted:
            lines.append(f"for a batch of {self.examples:,} examples and {self.events:,} events")
        return "\n".join(lines)


def part(name: str, modules: Sequence[nn.Module], flops: int) -> Part:
    return Part(name, sum(parameter.numel() for module in modules for parameter in module.parameters()), flops)


def linear_flops(module: nn.Linear, rows: int) -> int:
    return 2 * rows * module.in_features * module.out_features


def pffn_flops(module: PFFN, lengths: Tensor) -> int:
    generated = linear_flops(module.weights, len(lengths) * module.context_tokens)
    return generated + 4 * module.width * module.hidden * int(lengths.sum())


def self_attention_flops(module: SelfAttention, lengths: Tensor) -> int:
    rows = int(lengths.sum())
    pairs = int(lengths.long().square().sum())  # the models use it without a mask
    inner = module.heads * module.head_dim
    return linear_flops(module.qkv, rows) + linear_flops(module.out, rows) + 4 * inner * pairs


def window_attention_flops(module: WindowAttention, lengths: Tensor) -> int:
    rows = int(lengths.sum())
    products = 4 * module.width * window_pairs(lengths, module.window)
    return linear_flops(module.qkv, rows) + linear_flops(module.out, rows) + products


def pma_flops(module: PMA, lengths: Tensor) -> int:
    return _pooled(module, lengths) + linear_flops(module.out, len(lengths) * module.n_seeds)


def hsp_flops(module: HSP, lengths: Tensor) -> int:
    return linear_flops(module.query, module.n_seeds) + _pooled(module, lengths) + kron_flops(module.condense, len(lengths))


def kron_flops(module: SumKronLinear, batch: int) -> int:
    mixed = module.out_tokens * module.terms * module.in_width
    return 2 * batch * mixed * (module.in_tokens + module.out_width)


def _pooled(module: PMA | HSP, lengths: Tensor) -> int:
    rows = int(lengths.sum())
    return linear_flops(module.kv, rows) + 4 * module.heads * module.head_dim * module.n_seeds * rows

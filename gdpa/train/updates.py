"""From gradients to weights: AdamW on the dense part, row-wise Adagrad on the tables, warm-up, clipping, and a guard.

The guard: a step whose loss or gradients are not finite changes nothing, and neither does any step after it. That is decided on the
device (the optimisers' `found_inf`), so a GPU is not waited for; the host learns of it when it next looks (`Updates.check`), and then the
weights are still those before that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gdpa.errors import GdpaError
from gdpa.train.optimizers import RowwiseAdagrad


class NonFinite(GdpaError):
    """A loss, a gradient or a weight is NaN or infinite."""


@dataclass(frozen=True)
class Rates:
    """learning_rate and weight_decay are AdamW's, of the dense part (decay of matrices alone); table_learning_rate is row-wise Adagrad's.
    Both rise linearly over the first `warmup_steps` and stay. The gradient of the dense part is scaled down to the norm `clip`;
    that of the tables is not, since Adagrad divides by its size."""

    learning_rate: float
    table_learning_rate: float
    warmup_steps: int
    clip: float = 1.0
    weight_decay: float = 0.01

    def share(self, step: int) -> float:
        """Of the rates, at the step of that number, counted from 0."""
        return min(1.0, (step + 1) / (self.warmup_steps + 1))


class Updates:
    """The optimisers of a model. `dense` and `tables` are its named parameters."""

    def __init__(
        self,
        dense: Iterable[tuple[str, nn.Parameter]],
        tables: Iterable[tuple[str, nn.Parameter]],
        rates: Rates,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self.rates, self._group = rates, group
        self._dense, self._tables = dict(dense), dict(tables)
        matrices = [parameter for parameter in self._dense.values() if parameter.dim() > 1]
        others = [parameter for parameter in self._dense.values() if parameter.dim() <= 1]
        decayed = [{"params": matrices, "weight_decay": rates.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([part for part in decayed if part["params"]], lr=rates.learning_rate, fused=True)
        for parameter in self._dense.values():  # AdamW would make its state at the first step; a checkpoint is read before
            moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        self.adagrad = RowwiseAdagrad(list(self._tables.values()), lr=rates.table_learning_rate) if self._tables else None
        names = [*self._dense, *self._tables]
        device = next(iter([*self._dense.values(), *self._tables.values()])).device
        self._names = names
        self._wrong = torch.zeros((), device=device)  # 1 from the first step on that was not finite
        self._wrong_step = torch.full((), -1, dtype=torch.int64, device=device)
        self._wrong_loss = torch.zeros((), device=device)
        self._wrong_parts = torch.zeros(len(names), dtype=torch.bool, device=device)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"adamw": self.adamw} | ({"adagrad": self.adagrad} if self.adagrad is not None else {})

    def parameters(self) -> dict[str, nn.Parameter]:
        return {**self._dense, **self._tables}

    @torch.no_grad()
    def apply(self, step: int, loss: Tensor) -> Tensor:
        """One step, `step` of them done before it, with the gradients that are there, which are then removed. `loss` is the whole
        batch's. Returns the norm of the dense part's gradient before it is clipped."""
        gradients = [parameter.grad for parameter in self._dense.values() if parameter.grad is not None]
        norms = _norms(gradients)
        total: Tensor = torch.linalg.vector_norm(norms)
        self._watch(step, loss, norms)
        # AdamW divides by it as it reads the gradients: clipping takes no pass of its own over them.
        self.adamw.grad_scale = ((total + 1e-6) / self.rates.clip).clamp(min=1.0)  # type: ignore[attr-defined]
        share = self.rates.share(step)
        for name, optimizer in self.optimizers.items():
            optimizer.found_inf = self._wrong  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group["lr"] = share * (self.rates.learning_rate if name == "adamw" else self.rates.table_learning_rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _watch(self, step: int, loss: Tensor, norms: Tensor) -> None:
        """Note the step and the parameters if this is the first that is not finite."""
        parts = torch.zeros_like(self._wrong_parts)
        with_gradient = [place for place, parameter in enumerate(self.parameters().values()) if parameter.grad is not None]
        sizes = [norms, *(_size(parameter.grad)[None] for parameter in self._tables.values() if parameter.grad is not None)]
        wrong = ~torch.cat(sizes).isfinite()
        if len(with_gradient) == len(parts):
            parts = wrong
        else:  # rare: a part of the model that this batch did not reach
            for place, flag in zip(with_gradient, wrong, strict=True):
                parts[place] = flag
        found = (parts.any() | ~loss.isfinite()).float()
        if self._group is not None:  # a rank sees the gradients of its own shards
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self._group)
        first = (found > 0) & (self._wrong == 0)
        self._wrong_step.copy_(torch.where(first, torch.full_like(self._wrong_step, step), self._wrong_step))
        self._wrong_loss.copy_(torch.where(first, loss.float(), self._wrong_loss))
        self._wrong_parts |= parts & first
        self._wrong.copy_(torch.maximum(self._wrong, found))

    def check(self) -> None:
        """Raise NonFinite, naming the first step that was not finite (counted from 1) and the parameters, if there was one. Waits for
        the device."""
        if not bool(self._wrong):
            return
        step, loss = int(self._wrong_step) + 1, float(self._wrong_loss)
        weight = self.non_finite_weight()
        parts = _named(self._names, self._wrong_parts, self._group)
        if weight is not None:
            cause = f"the weights of parameter group {group_of(weight)!r} ({weight}) were not finite before it"
        elif parts:
            cause = (
                f"the weights were finite, the gradient of parameter group {group_of(parts[0])!r} ({parts[0]}) was not, "
                f"{len(parts)} of {len(self._names)} parameters in all"
            )
        else:
            cause = "the weights and gradients were finite"
        raise NonFinite(f"step {step}: expected a finite loss and gradient, got the loss {loss}; {cause}")

    def non_finite_weight(self) -> str | None:
        """The first parameter, on any rank, with a weight that is NaN or infinite. Waits for the device."""
        flags = torch.stack([~_local(parameter.detach()).isfinite().all() for parameter in self.parameters().values()])
        return next(iter(_named(self._names, flags, self._group)), None)


def _named(names: list[str], flags: Tensor, group: torch.distributed.ProcessGroup | None) -> list[str]:
    """The names whose flag is set on any rank: a rank sees its own shards alone."""
    counts = flags.to(torch.int32)
    if group is not None:
        torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX, group=group)
    return [name for name, count in zip(names, counts.tolist(), strict=True) if count]


def group_of(name: str) -> str:
    """The part of the model that a parameter belongs to: `dense.layers.2` of `dense.layers.2.pffn.key.weight`, `dense.head` of
    `dense.head.out.bias`, `tables.item` of `tables.item.weight`."""
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), 1)
    return ".".join(parts[: numbered + 1])


def _norms(gradients: list[Tensor]) -> Tensor:
    """(n,) norms; those of sharded gradients are the whole ones."""
    if not gradients:
        return torch.zeros(0)
    norms = torch.stack(list(torch._foreach_norm(gradients)))
    return norms.full_tensor() if isinstance(norms, DTensor) else norms


def _size(grad: Tensor) -> Tensor:
    """A number that is finite where the gradient of a table is."""
    grad = _local(grad)
    values = grad._values() if grad.is_sparse else grad
    # None of a sparse gradient: no rank asked for a row of this shard.
    return torch.linalg.vector_norm(values.float(), torch.inf) if values.numel() else values.new_zeros(())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

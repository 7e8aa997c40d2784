"""Row-wise Adagrad: the optimiser of embedding tables.

    s[r] += mean_j g[r, j]^2
    w[r] -= lr * g[r] / (sqrt(s[r]) + eps)

One number of state per row, against two per weight of Adam: tables are most of a recommendation model's memory. A row without a
gradient is not changed, and its state neither, so what a rare id has learned stays until it is seen again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gdpa.errors import GdpaError


class RowwiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad for parameters of shape (rows, width).

    Gradients may be dense (the whole table is read) or sparse, as of `nn.Embedding(sparse=True)`: then only the rows in them are
    touched, with no synchronisation of a GPU and the host. A DTensor that is sharded by rows is updated shard by shard: a row's
    arithmetic needs that row alone.

    `found_inf`, where set to a tensor of one element, leaves everything as it is while that element is not 0 (the convention of
    torch's fused optimisers): a step can be called off without the host knowing.

    Example:
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([3, 3, 7])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"].nonzero().flatten().tolist()
        [3, 7]
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], lr: float = 0.05, eps: float = 1e-8) -> None:
        if not lr >= 0:
            raise GdpaError(f"lr: expected a number of at least 0, got {lr!r}")
        if not eps > 0:
            raise GdpaError(f"eps: expected a positive number, got {eps!r}")
        super().__init__(params, {"lr": lr, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2:
                self.param_groups.pop()
                raise GdpaError(f"params: expected tables of shape (rows, width), got the shape {tuple(parameter.shape)}")
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["sum"] = _row_zeros(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimiser's; the sums stay float32, where torch casts state to the parameter's dtype, in which a long sum would stall."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        for parameter, place in zip(parameters, places, strict=True):
            total = self.state[parameter]["sum"]
            if total.dtype != torch.float32:
                self.state[parameter]["sum"] = state_dict["state"][place]["sum"].to(
                    device=total.device, dtype=torch.float32, copy=True
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.shape[1]:
                    weight, grad, total = (_local(t) for t in (parameter, parameter.grad, self.state[parameter]["sum"]))
                    update = self._sparse if grad.is_sparse else self._dense
                    update(weight, grad, total, group["lr"], group["eps"])
        return loss

    def _dense(self, weight: Tensor, grad: Tensor, total: Tensor, lr: float, eps: float) -> None:
        grad = grad.float()
        if self.found_inf is not None:
            grad = torch.where(self.found_inf == 0, grad, torch.zeros_like(grad))
        total += grad.square().mean(1)
        # A row without a gradient moves by 0 / (sqrt(s) + eps), which is 0.
        weight -= (grad * (lr / (total.sqrt() + eps))[:, None]).to(weight.dtype)

    def _sparse(self, weight: Tensor, grad: Tensor, total: Tensor, lr: float, eps: float) -> None:
        rows, values = grad._indices()[0], grad._values().float()
        if not len(rows):
            return
        if self.found_inf is not None:
            values = torch.where(self.found_inf == 0, values, torch.zeros_like(values))
        rows, values = _summed(rows, values)
        total.index_add_(0, rows, values.square().mean(1))
        step = values * (lr / (total[rows].sqrt() + eps))[:, None]
        weight.index_add_(0, rows, step.to(weight.dtype), alpha=-1)


def _summed(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) rows and (n, width) values with the values of a repeated row summed in one place.

    `coalesce` does the same and waits for the device to know how many rows there are; here the number stays n, and the places left
    over name the last row with a value of zero, which adds nothing.
    """
    rows, order = rows.sort(stable=True)
    first = torch.ones_like(rows)
    first[1:] = rows[1:] != rows[:-1]
    place = first.cumsum(0) - 1
    summed = torch.zeros_like(values).index_add_(0, place, values[order])
    distinct = rows[-1:].repeat(len(rows)).scatter_(0, place, rows)
    return distinct, summed


def _row_zeros(parameter: Tensor) -> Tensor:
    """(rows,) float32 zeros, placed as the rows of the parameter are."""
    if isinstance(parameter, DTensor):
        local = torch.zeros(parameter.to_local().shape[0], device=parameter.to_local().device)
        shape = torch.Size([parameter.shape[0]])
        return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(1,))
    return torch.zeros(parameter.shape[0], device=parameter.device)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

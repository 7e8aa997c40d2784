"""The processes of a training run: one, or as many as torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdpa.errors import GdpaError


@dataclass(frozen=True)
class World:
    """This process among the others. `group` is None where it is alone: then nothing here communicates."""

    device: torch.device
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints and writes files."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks, in place. A GPU is not waited for."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Waits for the others."""
        if self.group is None:
            return flag
        value = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return bool(value)

    def wait(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def from_first(self, value: Any) -> Any:
        """The first rank's value, plain JSON, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device)
        return box[0]

    def by_first(self, work: Callable[[], Any]) -> Any:
        """What `work` gives on the first rank, plain JSON, on every rank. Its GdpaError is one of every rank: the others would wait for the
        first in vain."""
        if self.group is None:
            return work()
        value = refusal = None
        if self.first:
            try:
                value = work()
            except GdpaError as error:
                refusal = str(error)
        value, refusal = self.from_first([value, refusal])
        if refusal is not None:
            raise GdpaError(refusal)
        return value

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, (n,) each with an n of its own, one after the other on every rank."""
        if self.group is None:
            return values
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(values)
        counts = self.sum(lengths).tolist()
        padded = torch.zeros(max(counts), dtype=values.dtype, device=self.device)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _given(name: str, otherwise: int) -> int:
    """A number in the environment."""
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise GdpaError(f"{name}: expected a number in the environment, as torchrun sets it, got {text!r}")
    return int(text) if text else otherwise


@contextmanager
def opened(device: torch.device) -> Iterator[World]:
    """The world that torchrun's variables describe, on gloo for CPUs and NCCL for GPUs, closed at the end; or a world of one."""
    size = _given("WORLD_SIZE", 1)
    if size > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise GdpaError(f"{name}: expected in the environment, as torchrun sets it, since WORLD_SIZE is {size}, got none")
    if size == 1:
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            torch.cuda.set_device(device)
        yield World(device)
        return
    if device.type == "cuda":
        local = _given("LOCAL_RANK", 0)
        if local >= torch.cuda.device_count():
            raise GdpaError(f"torchrun: expected at most {torch.cuda.device_count()} processes here, one for each GPU, got more")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(device, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    finally:
        dist.destroy_process_group()

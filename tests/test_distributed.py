"""DDP and FSDP2 over two ranks of gloo: gradients through the operator are the mean over the ranks."""

from __future__ import annotations

import pytest
import torch
from helpers import Block, offsets_of
from ranks import needs_gloo, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def rank_batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    lengths = ((5, 0, 7), (3, 8, 1))[rank]
    return torch.randn(sum(lengths), 16, generator=generator), offsets_of(lengths)


def gradients_on_ranks(rank: int, kind: str) -> list[Tensor]:
    """A backward pass of a two-layer model whose gradients are averaged over the ranks."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList([Block(), Block()])
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(Chain(blocks))
    else:
        mesh = init_device_mesh("cpu", (2,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        model = fully_shard(Chain(blocks), mesh=mesh)
    x, offsets = rank_batch(rank)
    model(x, offsets).square().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


class Chain(torch.nn.Module):
    def __init__(self, blocks: torch.nn.ModuleList):
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, offsets)
        return x


@needs_gloo
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_distributed_gradients_are_the_mean_over_the_ranks(kind: str):
    torch.manual_seed(0)
    model = Chain(torch.nn.ModuleList([Block(), Block()]))
    for rank in range(2):
        x, offsets = rank_batch(rank)
        (model(x, offsets).square().sum() / 2).backward()
    for grads in run_ranks(gradients_on_ranks, kind):
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)

"""DDP and FSDP2 over two ranks of gloo: gradients through the operator are the mean over the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from helpers import (
    Block,
    offsets_of,
)
from torch import Tensor


def rank_batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    lengths = ((5, 0, 7), (3, 8, 1))[rank]
    return torch.randn(sum(lengths), 16, generator=generator), offsets_of(lengths)


def train_worker(rank: int, folder: str, kind: str) -> None:
    """One rank: a step of a two-layer model whose gradients are averaged over the ranks; rank 0 saves them."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList([Block(), Block()])
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(Chain(blocks))
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        model = fully_shard(Chain(blocks), mesh=mesh)
    x, offsets = rank_batch(rank)
    model(x, offsets).square().sum().backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    if rank == 0:
        torch.save(grads, f"{folder}/grads.pt")
    dist.barrier()
    dist.destroy_process_group()


class Chain(torch.nn.Module):
    def __init__(self, blocks: torch.nn.ModuleList):
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, offsets)
        return x


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_distributed_gradients_are_the_mean_over_the_ranks(kind, tmp_path: Path):
    torch.multiprocessing.spawn(train_worker, args=(str(tmp_path), kind), nprocs=2)
    torch.manual_seed(0)
    model = Chain(torch.nn.ModuleList([Block(), Block()]))
    for rank in range(2):
        x, offsets = rank_batch(rank)
        (model(x, offsets).square().sum() / 2).backward()
    for grad, parameter in zip(torch.load(tmp_path / "grads.pt"), model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)

"""gdpa.distributed on a GPU, with the one rank that one GPU makes: NCCL, DTensors and checkpoints of device tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import offsets_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gdpa
import gdpa.models
from gdpa.data.synthetic import SyntheticClicks
from gdpa.distributed import load_tensors, parallelize, save_tensors
from gdpa.train.optimizers import RowwiseAdagrad

CLICKS = SyntheticClicks(batch_size=32)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def made(sparse: bool) -> gdpa.models.ClickModel:
    torch.manual_seed(0)
    model = gdpa.models.build("kunlun", "tiny", CLICKS.schema)
    for table in model.tables.values():
        table.sparse = sparse
    return model.to("cuda")


def optimizers_of(model: gdpa.models.ClickModel) -> list[torch.optim.Optimizer]:
    dense = [parameter for _, parameter in model.dense_parameters()]
    tables = [parameter for _, parameter in model.table_parameters()]
    return [torch.optim.AdamW(dense, lr=1e-3, fused=True), RowwiseAdagrad(tables, lr=0.05)]


def losses_of(called: nn.Module, model: gdpa.models.ClickModel, steps: int) -> list[float]:
    optimizers, losses = optimizers_of(model), []
    for step in range(steps):
        batch = CLICKS.batch(step).to("cuda")
        loss = nn.functional.binary_cross_entropy_with_logits(called(batch), batch.labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_a_parallel_model_learns_as_a_plain_one_and_is_saved(dense: str, sparse: bool, mesh: DeviceMesh, tmp_path: Path):
    plain, parallel = made(sparse), made(sparse)
    expected = losses_of(plain, plain, 4)
    came = losses_of(parallelize(parallel, mesh, dense), parallel, 4)
    # Atomic additions have no order, so float32 sums differ from run to run.
    assert came == pytest.approx(expected, rel=1e-4)

    tensors = parallel.state_dict()
    save_tensors(tmp_path, tensors)
    wanted = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}
    found = plain.state_dict()
    load_tensors(tmp_path, found)
    assert all(value.device.type == "cuda" and torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=["replicated", "heads"])
def test_attention_on_dtensors_runs_the_same_kernels(placement, mesh: DeviceMesh):
    offsets = offsets_of((129, 0, 64)).to("cuda")
    qkv = [torch.randn(193, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)]
    activations = ["gelu", "silu", "relu", "tanh"]
    whole = [tensor.clone().requires_grad_() for tensor in qkv]
    parts = [distribute_tensor(tensor, mesh, [placement]).requires_grad_() for tensor in qkv]
    options = {"activation": activations, "out_scale": torch.rand(3, device="cuda"), "deterministic": True}
    expected = gdpa.attention_varlen(*whole, offsets, offsets, **options)
    out = gdpa.attention_varlen(*parts, offsets, offsets, **options)
    assert out.placements == (Shard(1),) and torch.equal(out.full_tensor(), expected)
    grads = torch.autograd.grad(out.float().square().sum(), parts)
    wanted = torch.autograd.grad(expected.float().square().sum(), whole)
    for grad, wish in zip(grads, wanted, strict=True):
        assert torch.equal(grad.full_tensor(), wish)

"""`gdpa train` on a GPU: nothing in a step waits for the device, a loss that is not finite is still named, a run resumes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gdpa import cli
from gdpa.train import log as logs
from gdpa.train.loop import Loop
from gdpa.train.optimizers import RowwiseAdagrad

SMALL = [
    "train",
    "--device",
    "cuda",
    "--batch-size",
    "64",
    "--log-every",
    "5",
    "--evaluation-examples",
    "128",
    "--checkpoint-every",
    "5",
    "--no-compile",
]


def run(folder: Path, *options: str, status: int = 0) -> Path:
    assert cli.main([*SMALL, "--out", str(folder), *options]) == status
    return folder


def around_steps(monkeypatch: pytest.MonkeyPatch, wrapped: Callable[[Loop, Callable[[], Any]], Any]) -> None:
    train = Loop.train_step
    monkeypatch.setattr(Loop, "train_step", lambda self, *arguments: wrapped(self, lambda: train(self, *arguments)))


@pytest.mark.parametrize("options", [["kunlun"], ["interformer"], ["interformer", "--compile"]], ids=" ".join)
def test_a_step_does_not_wait_for_the_gpu(options, monkeypatch, tmp_path):
    """From the third step on: the first ones compile kernels."""
    guarded = []

    def step(loop: Loop, train: Callable[[], Any]) -> Any:
        if loop.step < 2:
            return train()
        torch.cuda.set_sync_debug_mode("error")
        try:
            guarded.append(loop.step)
            return train()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    around_steps(monkeypatch, step)
    folder = run(tmp_path / "run", "--steps", "12", "--model", *options)
    assert guarded == list(range(2, 12))
    assert all(math.isfinite(loss) for loss in logs.losses(folder / "log.jsonl"))


def test_the_first_step_that_is_not_finite_is_named_though_the_host_looks_later(monkeypatch, tmp_path, capsys):
    def step(loop: Loop, train: Callable[[], Any]) -> Any:
        if loop.step == 6:
            loop.model.dense.head.out.weight.data[0] = math.nan  # type: ignore[union-attr, operator, index]
        return train()

    around_steps(monkeypatch, step)
    folder = run(tmp_path / "run", "--steps", "12", status=1)
    printed = capsys.readouterr().out
    assert "stopped: step 7: expected a finite loss and gradient" in printed
    assert "the weights of parameter group 'dense.head' (dense.head.out.weight) were not finite before it" in printed
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_run_resumes_to_nearly_the_same_losses(tmp_path):
    """Atomic additions make sums differ in their last bits, which AdamW's first steps may enlarge."""
    whole = logs.losses(run(tmp_path / "whole", "--steps", "10") / "log.jsonl")
    run(tmp_path / "parts", "--steps", "5")
    parts = logs.losses(run(tmp_path / "parts", "--steps", "10", "--resume") / "log.jsonl")
    assert parts == pytest.approx(whole, rel=0.05) and len(parts) == 10


def test_rowwise_adagrad_with_sparse_gradients_equals_the_dense_one_and_does_not_wait():
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(1000, 16, sparse=sparse, device="cuda")
        optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
        for seed in range(3):
            ids = torch.randint(1000, (5000,), generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
            table(ids).square().sum().backward()
            torch.cuda.set_sync_debug_mode("error" if sparse else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.zero_grad()
        weights.append(table.weight.detach())
    torch.testing.assert_close(weights[0], weights[1])

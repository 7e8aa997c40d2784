"""The models on a GPU: the logits of the CPU, no synchronisation in a step, windows by torch's variable-length attention."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import gdpa
import gdpa.models
from gdpa.data.schema import Batch
from gdpa.data.synthetic import SyntheticClicks
from gdpa.models import windows
from gdpa.nn.regions import compile_regions, compile_stages

BOTH = pytest.mark.parametrize("name", ["interformer", "kunlun"])


@BOTH
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_logits_are_those_of_the_cpu(name: str, preset: str) -> None:
    clicks = SyntheticClicks(16)
    torch.manual_seed(0)
    model = gdpa.models.build(name, preset, clicks.schema)
    batch = clicks.batch(0)
    right = model(batch)
    moved = copy.deepcopy(model).cuda()
    torch.testing.assert_close(moved(batch.to("cuda")).cpu(), right, rtol=1e-3, atol=1e-3)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = moved(batch.to("cuda"))
    assert logits.dtype == torch.float32
    assert (logits.cpu() - right).abs().max() < 0.1 * right.abs().max() + 0.05


@BOTH
def test_a_step_waits_for_nothing(name: str) -> None:
    clicks = SyntheticClicks(64)
    model = gdpa.models.build(name, "small", clicks.schema).cuda()
    batches = [clicks.batch(index).to("cuda") for index in range(3)]

    def step(batch: Batch) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()

    step(batches[0])  # kernels are compiled and loaded here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [compile_regions, compile_stages])
@BOTH
def test_a_compiled_model_gives_the_gradients_of_eager_mode(name: str, compiled: Callable[..., int]) -> None:
    """Under autocast, for two batches: what is compiled for the first must serve the second."""
    clicks = SyntheticClicks(48)
    torch.manual_seed(0)
    plain = gdpa.models.build(name, "small", clicks.schema).cuda()
    model = copy.deepcopy(plain)
    assert compiled(model.dense) > (20 if compiled is compile_regions else 2)
    for batch in (clicks.batch(0).to("cuda"), clicks.batch(1).to("cuda")):
        for one in (model, plain):
            one.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = one(batch)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        pairs = {
            parameter: (one.grad, other.grad)
            for (parameter, one), other in zip(model.named_parameters(), plain.parameters(), strict=True)
        }
        whole = torch.stack([other.norm() for _, other in pairs.values()]).norm()
        apart = {parameter: (one - other).norm() for parameter, (one, other) in pairs.items()}
        assert torch.stack(list(apart.values())).norm() < 0.03 * whole
        for parameter, (_, other) in pairs.items():  # one that is lost may be a small part of the whole
            assert apart[parameter] < 0.2 * other.norm() + 0.01 * whole, parameter


@BOTH
def test_batches_without_examples_and_without_events(name: str) -> None:
    clicks = SyntheticClicks(8)
    model = gdpa.models.build(name, "tiny", clicks.schema).cuda()
    for batch in (clicks.batch(0).rows(0, 0), clicks.batch(0).without_history()):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch.to("cuda"))
        logits.sum().backward()
        assert logits.shape == (len(batch),) and logits.isfinite().all()


@pytest.mark.skipif(not windows.varlen_takes_windows(), reason="this torch's varlen_attn takes no window")
def test_windows_by_varlen_attn_equal_those_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = windows.WindowAttention(128, 4, 20).cuda()
    offsets = gdpa.offsets_from_lengths(torch.tensor([5, 0, 100, 1, 64])).cuda()
    x, ages = torch.randn(170, 128, device="cuda"), torch.rand(170, device="cuda") * 86400
    right = layer(x, offsets, ages, 100)  # fp32: by chunks
    chunked = []
    monkeypatch.setattr(windows, "banded_attention", lambda *arguments: chunked.append(arguments))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = layer(x, offsets, ages, 100)
    assert chunked == []
    assert (out.float() - right).abs().max() < 0.03 * right.abs().max()

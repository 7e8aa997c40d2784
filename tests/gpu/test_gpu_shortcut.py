"""The short way of a call (gdpa/shortcut.py) on a Hopper GPU: taken, and with the results of the ordinary one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FORMS, assert_same, check, gradients, leaves, make_case, spy

from gdpa import api, shortcut

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the hopper backend needs a Hopper GPU"
)

CASE: dict[str, Any] = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 128,
    "dtype": torch.bfloat16,
    "device": "cuda",
    "q_lengths": (130, 65, 1),
    "k_lengths": (33, 129, 7),
}


@pytest.fixture
def ordinary(monkeypatch) -> list[tuple[Any, ...]]:
    """The calls that go the ordinary way."""
    monkeypatch.setattr(shortcut, "_calls", {})
    return spy(monkeypatch, api, "_call")


def test_this_torch_has_the_guards_it_needs():
    assert shortcut._guards_hold()


@pytest.mark.parametrize("out_scale", [None, "per-sequence"], ids=["one scale", "a scale each"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_taken_from_the_second_call_on_with_the_same_results(ordinary, form, out_scale):
    case = make_case(form, **CASE, out_scale=out_scale, deterministic=True)
    inputs = leaves(case.inputs)
    results = [gradients(case, case.call(*inputs), inputs) for _ in range(3)]
    assert len(ordinary) == 1
    for result in results[1:]:
        assert_same(result, results[0])
    check(case, "hopper")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no grad", "inference"])
def test_without_gradients(ordinary, mode):
    case = make_case(**CASE)
    with mode():
        outs = [case.call(*case.inputs[:3]) for _ in range(3)]
    assert len(ordinary) == 1
    for out in outs:
        assert torch.equal(out, outs[0])
        assert out.is_contiguous()
        assert out.is_inference() == (mode is torch.inference_mode)


def test_rows_never_seen(ordinary):
    for rows in (1, 64, 65, 300):
        case = make_case(**CASE | {"q_lengths": (rows, 7, 130), "k_lengths": (rows, 0, 64)})
        check(case, "hopper")
    assert len(ordinary) == 1


def test_under_autocast(ordinary):
    case = make_case(**CASE)
    for dtype, ways in ((torch.bfloat16, 1), (torch.float16, 3)):
        with torch.autocast("cuda", dtype):
            for _ in range(2):
                assert case.call(*case.inputs[:3]).dtype == dtype
        assert len(ordinary) == ways, "autocast that casts is the operator's"


def test_addresses_that_the_copy_engine_does_not_take(ordinary):
    case = make_case(**CASE)
    expected = case.call(*case.inputs[:3])
    q = torch.empty(case.inputs.q.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(case.inputs.q)
    q.copy_(case.inputs.q)
    assert torch.equal(case.call(q, *case.inputs[1:3]), expected)
    assert len(ordinary) == 2


def test_profilers_see_the_operator(ordinary):
    case = make_case(**CASE)
    for _ in range(2):
        case.call(*case.inputs[:3])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        case.call(*case.inputs[:3])
    assert "gdpa::forward" in {event.key for event in profile.key_averages()}
    assert len(ordinary) == 2

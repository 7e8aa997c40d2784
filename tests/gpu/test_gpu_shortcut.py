"""The short way of a call (gdpa/shortcut.py), and back, on a GPU: taken, and with the results of the ordinary one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import FORMS, assert_same, check, gradients, leaves, make_case, spy

from gdpa import api, dispatch, operators, shortcut

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
    monkeypatch.setattr(operators, "_plans", {})
    return spy(monkeypatch, api, "_call")


def test_this_torch_has_the_guards_it_needs():
    assert shortcut._guards_hold()


@pytest.fixture
def backs(monkeypatch, backend) -> list[tuple[Any, ...]]:
    """The ways back that are ordinary."""
    return spy(monkeypatch, dispatch.load(backend), "backward")


@pytest.fixture
def by_triton(monkeypatch) -> list[str]:
    """The kernels that Triton's own launcher is asked for."""
    from triton.runtime.jit import JITFunction

    asked: list[str] = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: asked.append(self.__name__) or run(self, *a, **k))
    return asked


@pytest.mark.parametrize("out_scale", [None, "per-sequence"], ids=["one scale", "a scale each"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_taken_from_the_second_call_on_with_the_same_results(ordinary, backs, by_triton, backend, form, out_scale):
    case = make_case(form, **CASE, out_scale=out_scale, deterministic=True)
    inputs = leaves(case.inputs)
    results = []
    for _ in range(4):
        by_triton.clear()
        results.append(gradients(case, case.call(*inputs, backend), inputs))
    assert by_triton == []
    assert len(ordinary) == 1
    assert len(backs) == 1
    for result in results[1:]:
        assert_same(result, results[0])
    check(case, backend)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=["dQ", "dK", "dV", "dQ and dV"])
def test_the_gradients_that_are_needed(ordinary, backs, backend, needed):
    case = make_case(**CASE)
    inputs = leaves(case.inputs)
    expected = torch.autograd.grad(case.call(*inputs, backend), inputs, case.d_out)
    for i, x in enumerate(inputs):
        x.requires_grad_(i in needed)
    backs.clear()
    for _ in range(4):
        grads = torch.autograd.grad(case.call(*inputs, backend), [inputs[i] for i in needed], case.d_out)
        for i, grad in zip(needed, grads, strict=True):
            assert (grad - expected[i]).float().norm() <= 0.01 * expected[i].float().norm()
    assert len(backs) == 1


def test_a_d_out_in_another_layout(backend):
    case = make_case(**CASE, deterministic=True)
    inputs = leaves(case.inputs)
    out = case.call(*inputs, backend)
    apart = torch.randn(196, 2, 4, 128, device="cuda", dtype=torch.bfloat16)[:, 1].copy_(case.d_out)
    turned = case.d_out.transpose(0, 1).contiguous().transpose(0, 1)
    expected = torch.autograd.grad(out, inputs, case.d_out, retain_graph=True)
    for d_out in (apart, turned, apart, turned, case.d_out):
        for grad, same in zip(torch.autograd.grad(out, inputs, d_out, retain_graph=True), expected, strict=True):
            assert torch.equal(grad, same)


def test_hooks_are_told_of_every_launch(backend):
    from triton import knobs

    case = make_case(**CASE)
    inputs = leaves(case.inputs)
    for _ in range(3):
        gradients(case, case.call(*inputs, backend), inputs)
    seen: list[str] = []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        gradients(case, case.call(*inputs, backend), inputs)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    kernels = {"hopper": ["forward_kernel", "backward_kernel", "zero_kernel"]}
    kernels["triton"] = ["forward_kernel", "key_gradient_kernel", "query_gradient_kernel"]
    assert seen == kernels[backend]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no grad", "inference"])
def test_without_gradients(ordinary, backend, mode):
    case = make_case(**CASE)
    with mode():
        outs = [case.call(*case.inputs[:3], backend) for _ in range(3)]
    assert len(ordinary) == 1
    for out in outs:
        assert torch.equal(out, outs[0])
        assert out.is_contiguous()
        assert out.is_inference() == (mode is torch.inference_mode)


def test_rows_never_seen(ordinary, backs, by_triton, backend):
    for rows in (1, 64, 65, 300):
        case = make_case(**CASE | {"q_lengths": (rows, 7, 130), "k_lengths": (rows, 0, 64)})
        check(case, backend)
        if rows == 1:
            by_triton.clear()
    assert len(ordinary) == 1
    assert len(backs) == 1
    assert by_triton == []


def test_kinds_of_kernels_in_turns():
    """A kernel compiled for one must not run another: a single head, distances of sequences that are multiples of 16 or not."""
    for _ in range(2):
        for heads in (1, 2):
            for rows in (1, 16, 17):
                shape = {"q_lengths": (rows,) * 3, "k_lengths": (rows,) * 3, "heads": heads, "kv_heads": 1, "head_dim": 24}
                check(make_case("dense", **CASE | shape), "triton")


def test_scales_at_any_address(backend):
    case = make_case(**CASE, out_scale="per-sequence")
    for start in (0, 1, 4, 3):
        scales = torch.empty(7, device="cuda")[start : start + 3].copy_(case.inputs.out_scale)
        check(dataclasses.replace(case, inputs=case.inputs._replace(out_scale=scales)), backend)


def test_inference_tensors_as_offsets(backend):
    """They have no version by which a schedule could be told to be theirs."""
    case = make_case(**CASE)
    q, k, v, cu_q, cu_k, _ = case.inputs
    expected = case.call(q, k, v, backend)
    with torch.inference_mode():
        cu_q, cu_k = cu_q.clone(), cu_k.clone()
    for _ in range(3):
        assert torch.equal(api.attention_varlen(q, k, v, cu_q, cu_k, backend=backend), expected)


def test_under_autocast(ordinary, backend):
    case = make_case(**CASE)
    for dtype, ways in ((torch.bfloat16, 1), (torch.float16, 3)):
        with torch.autocast("cuda", dtype):
            for _ in range(2):
                assert case.call(*case.inputs[:3], backend).dtype == dtype
        assert len(ordinary) == ways, "autocast that casts is the operator's"


def test_addresses_that_kernels_are_not_compiled_for(ordinary, backend):
    case = make_case(**CASE)
    expected = case.call(*case.inputs[:3], backend)
    q = torch.empty(case.inputs.q.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(case.inputs.q)
    q.copy_(case.inputs.q)
    assert torch.equal(case.call(q, *case.inputs[1:3], backend), expected)
    assert len(ordinary) == 2


def test_profilers_see_the_operators(ordinary, backs, backend):
    case = make_case(**CASE)
    inputs = leaves(case.inputs)
    for _ in range(3):
        gradients(case, case.call(*inputs, backend), inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(case, case.call(*inputs, backend), inputs)
    assert {"gdpa::forward", "gdpa::backward"} <= {event.key for event in profile.key_averages()}
    assert len(ordinary) == 2
    assert len(backs) == 2

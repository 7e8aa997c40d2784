"""The hopper backend's host side, without a GPU: what it takes, and that remembered launches are what first ones are.

What the kernel computes is tested in tests/gpu, how it compiles in test_compile_kernels.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import FORMS, make_case, needs_triton

from gdpa.backends.hopper import backend
from gdpa.problem import describe

HOPPER = torch.device("cuda", 0)


@pytest.fixture
def on_hopper(monkeypatch):
    """As on a Hopper GPU, as far as the decision goes."""
    monkeypatch.setattr(backend, "architecture", lambda device: 90 if device.type == "cuda" else 0)
    monkeypatch.setattr(backend, "_missing", lambda: None)


def problem(**changes: Any) -> Any:
    case = make_case(heads=4, head_dim=128, dtype=torch.bfloat16)
    return dataclasses.replace(case.problem, **{"device": HOPPER, **changes})


def test_it_takes_both_16_bit_dtypes_and_head_dimensions(on_hopper):
    for dtype in (torch.bfloat16, torch.float16):
        for size in (64, 128):
            assert backend.supports(problem(dtype=dtype, head_dim=size, value_dim=size)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 96, "value_dim": 96}, "head dimensions 64 and 128"),
        ({"value_dim": 64}, "head dimensions 64 and 128"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"window": (-1, 0)}, "no windows"),
        ({"query_rows": 2**30}, "fewer than"),
        ({"key_side": "dense", "key_rows": 2**20, "batch": 1024}, "fewer than"),
        ({"device": torch.device("cpu")}, "q is on cpu"),
    ],
    ids=["D", "Dv", "dtype", "window", "rows", "rows of all sequences", "device"],
)
def test_it_says_what_it_does_not_take(on_hopper, changes, reason):
    assert reason in backend.supports(problem(**changes))


def test_another_gpu_is_named(monkeypatch):
    monkeypatch.setattr(backend, "architecture", lambda device: 80)
    assert backend.supports(problem()) == "it runs on Hopper GPUs (compute capability 9.0), and this one is 8.0"


@needs_triton
class TestWhichGradientsItsKernelComputes:
    """dQ alone, and a dQ whose order of summation must not vary where it would, come from the portable kernel."""

    @pytest.fixture
    def calls(self, monkeypatch):
        from gdpa.backends.hopper import launch_backward
        from gdpa.backends.triton import launch as portable

        calls = []
        for name, module in (("hopper", launch_backward), ("triton", portable)):
            monkeypatch.setattr(
                module, "backward", lambda *arguments, name=name: calls.append((name, arguments[-1])) or (None,) * 3
            )
        return calls

    @pytest.mark.parametrize(
        ("needs", "expected"),
        [
            ((True, True, True), [("hopper", (True, True, True))]),
            ((False, True, False), [("hopper", (False, True, False))]),
            ((True, False, True), [("hopper", (True, False, True))]),
            ((True, False, False), [("triton", (True, False, False))]),
        ],
    )
    def test_by_what_is_needed(self, calls, needs, expected):
        backend.backward(problem(), *[None] * 7, needs)
        assert calls == expected

    @pytest.mark.parametrize(
        ("keys", "packed", "apart"), [(100, False, False), (256, False, False), (257, False, True), (100, True, True)]
    )
    def test_deterministic(self, calls, keys, packed, apart):
        rows = torch.empty((4, keys, 2, 128), dtype=torch.bfloat16, device="meta")
        offsets = torch.empty(5, dtype=torch.int32, device="meta") if packed else None
        rows = rows.flatten(0, 1) if packed else rows
        asked = describe(rows, rows, rows, offsets, offsets, None, None, ("silu",), None, 1.0, (-1, -1), True)
        backend.backward(asked, *[None] * 7, (True, True, True))
        assert calls == (
            [("hopper", (False, True, True)), ("triton", (True, False, False))] if apart else [("hopper", (True,) * 3)]
        )


class Launched:
    """Stands in for the kernel: keeps what each launch is given, Triton's way and the short one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[Any, ...]]] = []
        self.function = self.packed_metadata = None

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Launched:
            for option in ("num_warps", "maxnreg", "enable_fp_fusion"):
                del constants[option]
            self.calls.append(("first", grid[0], (*arguments, *constants.values())))
            return self

        return launch

    def run(self, grid: int, *rest: Any) -> None:
        self.calls.append(("remembered", grid, rest[8:]))


def comparable(arguments: tuple[Any, ...]) -> list[Any]:
    """Descriptors by what the copy engine is told, tensors by where and what they are."""
    seen: list[Any] = []
    for x in arguments:
        if hasattr(x, "base"):
            seen.append(("descriptor", x.base.data_ptr(), list(x.shape), list(x.strides), x.padding))
        elif isinstance(x, torch.Tensor):
            seen.append(("tensor", x.dtype, x.data_ptr() if x.dtype != torch.int32 else x.tolist()))
        else:
            seen.append(x)
    return seen


@needs_triton
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out_scale", [None, "per-sequence"], ids=["one scale", "a scale each"])
def test_a_remembered_launch_is_what_a_first_one_would_be(monkeypatch, form, out_scale):
    """Jagged batches differ in their rows and addresses; the recipe of one must serve the next."""
    from gdpa.backends.hopper import launch

    kernel = Launched()
    monkeypatch.setattr(launch, "forward_kernel", kernel)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    outputs = []
    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: outputs.append(real(self, *a, **k)) or outputs[-1])

    options = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "out_scale": out_scale}
    small = make_case(form, q_lengths=(130, 7), k_lengths=(5, 300), **options)
    large = make_case(form, q_lengths=(300, 0, 65), k_lengths=(64, 129, 700), scale=0.25, seed=1, **options)

    def call(case: Any) -> None:
        q, k, v, cu_q, cu_k, scales = case.inputs
        launch.forward(case.problem, q, k, v, cu_q, cu_k, scales)

    call(small)
    call(large)
    launch._recipes.clear()
    call(large)
    (first, _, _), (short, short_grid, short_arguments), (again, grid, arguments) = kernel.calls
    assert (first, short, again) == ("first", "remembered", "first")
    assert short_grid == grid
    theirs, ours = comparable(arguments), comparable(short_arguments)
    for seen in (theirs, ours):
        assert seen.pop(3)[1] in {x.data_ptr() for x in outputs}  # each wrote to an output of its own
    assert ours == theirs


@needs_triton
def test_inputs_that_must_be_copied_do_not_take_a_recipe(monkeypatch):
    from gdpa.backends.hopper import launch

    kernel = Launched()
    monkeypatch.setattr(launch, "forward_kernel", kernel)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    case = make_case("dense", q_lengths=(100, 100), heads=2, head_dim=64, dtype=torch.bfloat16)
    q, k, v = case.inputs[:3]
    launch.forward(case.problem, q, k, v, None, None, None)
    apart = torch.zeros(2, 110, 2, 64, dtype=torch.bfloat16)[:, :100]  # the same last strides, sequences further apart
    launch.forward(case.problem, apart, k, v, None, None, None)
    unaligned = torch.zeros(2 * 100 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 100, 2, 64)
    launch.forward(case.problem, unaligned, k, v, None, None, None)
    assert [how for how, _, _ in kernel.calls] == ["first", "first", "first"]
    assert kernel.calls[1][2][0].base.is_contiguous()
    assert kernel.calls[2][2][0].base.data_ptr() % 16 == 0


@needs_triton
def test_nothing_is_launched_without_queries_or_keys(monkeypatch):
    from gdpa.backends.hopper import launch

    kernel = Launched()
    monkeypatch.setattr(launch, "forward_kernel", kernel)
    for q_lengths, k_lengths in (((0, 0), (3, 4)), ((3, 4), (0, 0))):
        case = make_case(q_lengths=q_lengths, k_lengths=k_lengths, head_dim=64, dtype=torch.bfloat16)
        out = launch.forward(case.problem, *case.inputs[:3], case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k, None)
        assert not out.any()
    assert not kernel.calls


@needs_triton
@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({"activation": "gelu"}, True),
        ({"activation": "gelu_tanh", "form": "shared-query", "q_lengths": (2,), "k_lengths": (5, 300)}, True),
        ({"activation": "gelu", "form": "shared-query", "q_lengths": (1,), "k_lengths": (5, 300)}, False),
        ({"activation": "gelu", "q_lengths": (1, 2)}, False),
        ({"activation": "silu"}, False),
        ({"activation": "gelu", "dtype": torch.float16}, False),
        ({"activation": ["gelu", "gelu", "gelu", "relu"]}, False),
    ],
    ids=["gelu", "a few rows for each of several", "a row for each", "few rows", "silu", "fp16", "heads that differ"],
)
def test_gelu_is_packed_where_many_rows_share_the_error_budget(options, packed):
    from gdpa.backends.hopper import launch

    case = make_case(
        **{"q_lengths": (130, 7), "k_lengths": (5, 300), "heads": 4, "head_dim": 64, "dtype": torch.bfloat16} | options
    )
    q, k, v = case.inputs[:3]
    constants = launch._constants(case.problem, q, k, v, q.new_empty(case.problem.output_shape), None)
    assert constants["PACKED"] == packed
    functions = launch.device_functions(case.problem.activations, fast=case.problem.dtype == torch.bfloat16, frontend="gluon")
    assert constants["activate"] is (functions.packed if packed else functions.scaled)

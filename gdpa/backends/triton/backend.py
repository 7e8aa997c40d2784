"""Portable Triton kernels, for any GPU Triton supports; on CPU tensors only under its interpreter, and only by name.

Importing this module needs no Triton: `supports` says so where it is missing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gdpa.backends.gpu import too_large
from gdpa.problem import Problem
from gdpa.schedule import is_installed

if TYPE_CHECKING:
    from gdpa.backends.triton.run import ReadyBackward, ReadyForward


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter. Triton reads the variable when a kernel is defined, so set it before."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def supports(problem: Problem) -> str | None:
    if not is_installed("triton"):
        return "Triton is not installed"
    if problem.device.type == "cpu":
        if not interpreted():
            return "q is on the CPU; Triton runs there only under its interpreter (TRITON_INTERPRET=1)"
    elif problem.device.type != "cuda":
        return f"it runs on CUDA and ROCm devices, and q is on {problem.device.type}"
    if problem.dtype == torch.float64:
        return "it computes in bfloat16, float16 and float32, and q is float64"
    for name, size in (("q", problem.head_dim), ("v", problem.value_dim)):
        if not is_head_dimension(size):
            return f"the head dimension of {name} is {size}, and it takes multiples of 8 from 8 to 256"
    return too_large(problem)


def is_head_dimension(size: int) -> bool:
    return size % 8 == 0 and 8 <= size <= 256


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    from gdpa.backends.triton import run

    return run.forward(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)


def prepare(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> ReadyForward | None:
    """How calls of this problem run whose tensors lie as these; see gdpa/shortcut.py."""
    from gdpa.backends.triton import run

    return run.prepare(problem, q, k, v, out_scale)


def backward(
    problem: Problem,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    from gdpa.backends.triton import run

    return run.backward(problem, d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, needs)


def prepare_backward(
    problem: Problem,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> ReadyBackward | None:
    """How gradients of this problem are computed from tensors that lie as these; see gdpa/shortcut.py."""
    from gdpa.backends.triton import run

    return run.prepare_backward(problem, d_out, q, k, v, out_scale, needs)

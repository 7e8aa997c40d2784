"""Kernels for NVIDIA Hopper (sm_90): warp-specialised, fed by its copy engine.

The backward kernel computes the three gradients at once, of calls without a window and of causal self-attention. Those of other windows
come from the portable kernels, and so does dQ alone, which they sum over the keys in one program.

Importing this module needs no Triton: `supports` says so where it is missing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gdpa.backends.gpu import RAGGED, architecture, too_large
from gdpa.problem import Problem
from gdpa.schedule import is_installed

if TYPE_CHECKING:
    from gdpa.backends.hopper.launch import Ready
    from gdpa.backends.hopper.launch_backward import Ready as ReadyBackward
    from gdpa.backends.triton.run import ReadyBackward as PortableBackward

HEAD_DIMENSIONS = (64, 128)


@cache
def _missing() -> str | None:
    if not is_installed("triton"):
        return "Triton is not installed"
    if not is_installed("triton.experimental.gluon"):
        return "this Triton has no Gluon; it needs Triton 3.6 or later"
    return None


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cuda":
        return f"it runs on Hopper GPUs, and q is on {problem.device.type}"
    if architecture(problem.device) != 90:
        return f"it runs on Hopper GPUs (compute capability 9.0), and this one is {architecture(problem.device) / 10}"
    if _missing() is not None:
        return _missing()
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, and q is {problem.dtype}"
    if problem.head_dim != problem.value_dim or problem.head_dim not in HEAD_DIMENSIONS:
        return f"it takes head dimensions 64 and 128, the same for q and v, and they are {problem.head_dim} and {problem.value_dim}"
    sides = ((problem.query_side, problem.query_rows), (problem.key_side, problem.key_rows))
    if any(rows * (problem.batch if side != "packed" else 1) >= RAGGED for side, rows in sides):
        return f"it addresses fewer than {RAGGED} rows"
    return too_large(problem)


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    from gdpa.backends.hopper import launch

    return launch.forward(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)


def prepare(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Ready | None:
    """How calls of this problem run whose tensors lie as these; see gdpa/shortcut.py."""
    from gdpa.backends.hopper import launch

    return launch.prepare(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)


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
    from gdpa.backends.hopper import launch_backward, plan_backward
    from gdpa.backends.triton import run as portable

    arguments = (problem, d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, needs)
    own = (needs[1] or needs[2]) and plan_backward.takes_window(problem, cu_seqlens_q, cu_seqlens_k)
    return launch_backward.backward(*arguments) if own else portable.backward(*arguments)


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
) -> ReadyBackward | PortableBackward | None:
    """How gradients of this problem are computed from tensors that lie as these; see gdpa/shortcut.py."""
    from gdpa.backends.hopper import launch_backward, plan_backward
    from gdpa.backends.triton import run as portable

    arguments = (problem, d_out, q, k, v, out_scale, needs)
    own = (needs[1] or needs[2]) and plan_backward.takes_window(problem, cu_seqlens_q, cu_seqlens_k)
    return launch_backward.prepare(*arguments) if own else portable.prepare_backward(*arguments)

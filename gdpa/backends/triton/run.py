"""Forward and backward, by the launches that launch.py lays out.

What launches of one problem and layout have in common is noted in the Problem, so that a call repeats them with other addresses: by
recipe (gdpa/launching.py), past the layout of the launches and Triton's own launcher. gdpa/shortcut.py calls `run` of these notes past
all that lies before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdpa import launching, schedule
from gdpa.backends.gpu import Output, aligned, architecture, is_aligned, on_device, plain_scales
from gdpa.backends.triton.launch import (
    Call,
    Launch,
    plan_forward,
    plan_key_gradients,
    plan_query_gradient,
    plan_shared_query_gradient,
    pointers,
    shared_query_chunks,
)
from gdpa.problem import Problem

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Step:
    """A launch to be repeated with other addresses."""

    __slots__ = ("grid", "lists_kind", "mapped", "numbers", "recipe", "unread")

    def __init__(self, launch: Launch, recipe: launching.Recipe, problem: Problem) -> None:
        self.recipe = recipe
        self.grid = launch.grid
        self.mapped = bool(launch.blocks)
        self.numbers = launch.numbers
        self.unread = 2 if launch.owner == "neither" else 0  # lists that the kernel does not take
        packed = problem.query_side == "packed", problem.key_side == "packed"
        rows = problem.batch, problem.query_rows, problem.key_rows
        self.lists_kind = schedule.lists_kind(*packed, *rows, launch.block, launch.owner) if True in packed else None

    def start(
        self,
        stream: int,
        sources: tuple[Tensor, ...],
        outputs: tuple[int, ...],
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        scales: int,
    ) -> None:
        lists: tuple[int, ...] = (0, 0, 0)
        kind = self.lists_kind
        if kind is not None:
            listed = schedule.known(kind, cu_seqlens_q, cu_seqlens_k, stream)
            if listed is None:
                listed = schedule.lists(cu_seqlens_q, cu_seqlens_k, *kind[3:])
            lists = tuple([0 if x is None else x.data_ptr() for x in listed])
        arguments = (*outputs, *lists[self.unread :], scales, *self.numbers)
        if self.mapped:
            launching.start(self.recipe, self.grid, stream, sources, arguments)
        else:
            launching.start(self.recipe, self.grid, stream, (), (*map(Tensor.data_ptr, sources), *arguments))


class ReadyForward:
    """All that forward calls of one problem and one layout have in common, and the way they run."""

    __slots__ = ("index", "output", "step")

    def __init__(self, problem: Problem, step: Step) -> None:
        self.index = problem.device.index
        self.step = step
        self.output = Output(problem.output_shape, problem.dtype, problem.device)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
    ) -> Tensor | None:
        """The output; None where it is not the way: an address that the kernel is not compiled for, or another current device."""
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or torch._C._cuda_getDevice() != self.index:
            return None
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        scales = None if out_scale is None else plain_scales(out_scale)
        out = self.output.new()
        self.step.start(
            stream, (q, k, v), (out.data_ptr(),), cu_seqlens_q, cu_seqlens_k, 0 if scales is None else scales.data_ptr()
        )
        return out


class ReadyBackward:
    """The same of backward calls, of which the same gradients are needed."""

    __slots__ = ("dk", "dq", "dtype", "dv", "index", "key_step", "needs", "partial", "query_step")

    def __init__(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, steps: list[Step], needs: tuple[bool, bool, bool]
    ) -> None:
        self.index = problem.device.index
        self.dtype = problem.dtype
        self.needs = needs
        self.key_step = steps[0] if needs[1] or needs[2] else None
        self.query_step = steps[-1] if needs[0] else None
        self.dq, self.dk, self.dv = (Output(x.shape, x.dtype, x.device) for x in (q, k, v))
        self.partial: Output | None = None
        if needs[0] and problem.query_side == "shared":
            self.partial = Output((steps[-1].grid[0], *q.shape), torch.float32, q.device)

    def run(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        out_scale: Tensor | None,
    ) -> Gradients | None:
        """The gradients that are needed; None where it is not the way."""
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | d_out.data_ptr()
        if addresses & 15 or torch._C._cuda_getDevice() != self.index:
            return None
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        plain = None if out_scale is None else plain_scales(out_scale)
        scales = 0 if plain is None else plain.data_ptr()
        sources = (q, k, v, d_out)
        dq: Tensor | None = None
        dk: Tensor | None = None
        dv: Tensor | None = None
        if self.key_step is not None:
            dk, dv = self.dk.new(), self.dv.new()
            self.key_step.start(stream, sources, (dk.data_ptr(), dv.data_ptr()), cu_seqlens_q, cu_seqlens_k, scales)
        if self.query_step is not None:
            written = (self.partial or self.dq).new()
            self.query_step.start(stream, sources, (written.data_ptr(),), cu_seqlens_q, cu_seqlens_k, scales)
            dq = written if self.partial is None else written.sum(0).to(self.dtype)
        return dq, dk if self.needs[1] else None, dv if self.needs[2] else None


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    q, k, v = aligned(q), aligned(k), aligned(v)
    ready = prepare(problem, q, k, v, out_scale)
    if ready is not None:
        found = ready.run(q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
        if found is not None:
            return found
    call = Call(problem, q, k, v, out_scale is not None, None, architecture(q.device))
    out = q.new_empty(problem.output_shape)
    with on_device(q):
        _run(plan_forward(call, out), problem, cu_seqlens_q, cu_seqlens_k, out_scale)
    return out


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
) -> Gradients:
    d_out, q, k, v = aligned(d_out), aligned(q), aligned(k), aligned(v)
    ready = prepare_backward(problem, d_out, q, k, v, out_scale, needs)
    if ready is not None:
        found = ready.run(d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
        if found is not None:
            return found
    call = Call(problem, q, k, v, out_scale is not None, d_out, architecture(q.device))
    needs_dq, needs_dk, needs_dv = needs
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    schedule_and_scales = (cu_seqlens_q, cu_seqlens_k, out_scale)
    with on_device(q):
        if needs_dk or needs_dv:
            dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
            _run(plan_key_gradients(call, dk, dv), problem, *schedule_and_scales)
        if needs_dq and problem.query_side == "shared":
            partial = q.new_empty(_shape_of_partial(call), dtype=torch.float32)
            _run(plan_shared_query_gradient(call, partial), problem, *schedule_and_scales)
            dq = partial.sum(0).to(q.dtype)
        elif needs_dq:
            dq = q.new_empty(q.shape)
            _run(plan_query_gradient(call, dq), problem, *schedule_and_scales)
    return dq, dk if needs_dk else None, dv if needs_dv else None


def prepare(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out_scale: Tensor | None) -> ReadyForward | None:
    """The way of calls whose tensors lie as these; None where they must be copied, or no kernel has been compiled for them."""
    layout = ("triton forward", q.stride(), k.stride(), v.stride(), out_scale is None)
    ready: ReadyForward | None = problem.notes.get(layout)
    if ready is None and launching.is_known(q.device) and is_aligned(q) and is_aligned(k) and is_aligned(v):
        call = Call(problem, q, k, v, out_scale is not None, None, architecture(q.device))
        step = _step(plan_forward(call, _unwritten(problem.output_shape, problem.dtype)), problem)
        if step is not None:
            ready = problem.notes[layout] = ReadyForward(problem, step)
    return ready


def prepare_backward(
    problem: Problem, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out_scale: Tensor | None, needs: tuple[bool, bool, bool]
) -> ReadyBackward | None:
    """The same of calls that go back, and need these gradients."""
    layout = ("triton backward", d_out.stride(), q.stride(), k.stride(), v.stride(), out_scale is None, *needs)
    ready: ReadyBackward | None = problem.notes.get(layout)
    if ready is None and launching.is_known(q.device) and all(is_aligned(x) for x in (d_out, q, k, v)) and True in needs:
        call = Call(problem, q, k, v, out_scale is not None, d_out, architecture(q.device))
        planned: list[Launch] = []
        if needs[1] or needs[2]:
            planned.append(plan_key_gradients(call, _unwritten(k.shape, k.dtype), _unwritten(v.shape, v.dtype)))
        if needs[0] and problem.query_side == "shared":
            planned.append(plan_shared_query_gradient(call, _unwritten(_shape_of_partial(call), torch.float32)))
        elif needs[0]:
            planned.append(plan_query_gradient(call, _unwritten(q.shape, q.dtype)))
        steps = [step for launch in planned if (step := _step(launch, problem)) is not None]
        if len(steps) == len(planned):
            ready = problem.notes[layout] = ReadyBackward(problem, q, k, v, steps, needs)
    return ready


def _run(
    launch: Launch, problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
) -> None:
    """The first launch of its kind, and those whose tensors have no elements or are not on the current device."""
    lists: schedule.Lists = (None, None, None)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        rows = problem.batch, problem.query_rows, problem.key_rows
        lists = schedule.lists(cu_seqlens_q, cu_seqlens_k, *rows, launch.block, launch.owner)
    scales = None if out_scale is None else plain_scales(out_scale)
    launch.run(pointers(launch.owner, lists, scales, launch.sources[0]))


def _step(launch: Launch, problem: Problem) -> Step | None:
    recipe = None if 0 in launch.grid else launch.recipe()
    return None if recipe is None else Step(launch, recipe, problem)


def _unwritten(shape: Any, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, to lay a launch out with."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _shape_of_partial(call: Call) -> tuple[int, ...]:
    return shared_query_chunks(call.problem, call.config("query_gradient").block_m), *call.q.shape

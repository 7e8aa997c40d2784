"""The short way of a call that is like one before: past the checks, the dispatcher and the choice of a backend, to the launch.

A call of microseconds on the device waits for the host. After a call went the ordinary way, on a backend that can say how calls like it
run (`backend.prepare`), it is remembered here by

    its options                 the key of `_calls`
    how its tensors lie         torch's own guard of compiled code, in one C call of half a microsecond: types, dispatch keys with those
                                that the thread adds and leaves out, dtypes, devices, requires_grad, sizes and strides
    its numbers of rows         the key of `Call.by_rows`: what packed batches differ in, so the guard leaves them open

and `take` runs the next one. Where autograd records it, its gradients go the same way back (`_take_back`), if the backend can say how
(`backend.prepare_backward`): known by which of them are needed, how d_out and the saved tensors lie, and the numbers of rows.

Whatever is unusual goes the ordinary way: subclasses, functorch's tensors, dispatch modes (FLOP counters,
fake tensors, tracers), modes of torch functions, profilers, forward-mode differentiation, autocast that would cast, GDPA_CHECK=1, masks,
options that are not plain values. Those differ in the guard or are looked at in `take`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from gdpa import operators
from gdpa.activations import Activation
from gdpa.problem import PLAIN_TYPES, check_call, checks_are_asked_for

UNBOUNDED = (-1, -1)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Ready(Protocol):
    """How a backend runs calls whose tensors have these shapes and lie so."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
    ) -> Tensor | None:
        """The output, or None where these very tensors must go the ordinary way."""


class ReadyBack(Protocol):
    """The same of the way back, for gradients that are needed."""

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
        """The gradients, or None where these very tensors must go the ordinary way."""


class Back:
    """Ways back of which the same gradients are needed and whose tensors lie alike, whatever their numbers of rows."""

    __slots__ = ("by_rows", "is_like", "known_by")

    def __init__(self, is_like: Callable[..., bool], known_by: tuple[Any, ...]) -> None:
        self.is_like = is_like
        self.known_by = known_by
        self.by_rows: dict[tuple[int, ...], ReadyBack] = {}


class Call:
    """Calls whose options are the same and whose tensors lie alike, whatever their numbers of rows."""

    __slots__ = ("autocast", "backs", "by_rows", "is_like", "numbers", "recorded")
    MOST_ROWS = 1024

    def __init__(
        self, is_like: Callable[..., bool], numbers: tuple[Any, ...], recorded: bool, autocast: torch.dtype | None
    ) -> None:
        self.is_like = is_like
        self.numbers = numbers  # the operator's arguments behind max_seqlen_k
        self.recorded = recorded  # by autograd, where grad mode is on
        self.autocast = autocast  # where it is on, the dtype that it must have: that of the tensors, so that it casts nothing
        self.by_rows: dict[tuple[int, ...], Ready] = {}
        self.backs: list[Back] = []


_MOST_KEYS, _MOST_CALLS = 1024, 16
_calls: dict[Hashable, list[Call]] = {}


def take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    activation: Any,
    scale: float | None,
    out_scale: float | Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool | None,
    backend: str | None,
) -> Tensor | None:
    """The output, where the call is like a remembered one; else None, and nothing has been done."""
    key, tensors, scales = _known_by(
        q, k, v, cu_seqlens_q, cu_seqlens_k, activation, scale, out_scale, causal, window_size, deterministic, backend
    )
    for call in _calls.get(key, ()):
        if call.is_like(*tensors):
            break
    else:
        return None
    if _is_watched() or not (_is_bound(max_seqlen_q) and _is_bound(max_seqlen_k)):
        return None
    if call.autocast is not None and torch.get_autocast_dtype(q.device.type) != call.autocast:
        return None
    rows = tuple(map(Tensor.numel, tensors))  # the other sizes are the guard's
    ready = call.by_rows.get(rows)
    if ready is None:
        # The same checks and the same choice as on the ordinary way, which may compile first.
        check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, scales)
        ready = _prepare(q, k, v, (cu_seqlens_q, cu_seqlens_k, scales, max_seqlen_q, max_seqlen_k, *call.numbers))
        if ready is None:
            return None
        if len(call.by_rows) >= call.MOST_ROWS:
            call.by_rows.clear()
        call.by_rows[rows] = ready
    out = ready.run(q, k, v, cu_seqlens_q, cu_seqlens_k, scales)
    if out is not None and call.recorded and torch.is_grad_enabled():
        others = (cu_seqlens_q, cu_seqlens_k, scales, max_seqlen_q, max_seqlen_k, *call.numbers)
        return operators.record_plain(out, partial(_take_back, call, max_seqlen_q, max_seqlen_k), q, k, v, *others)
    return out


def _take_back(
    call: Call,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    d_out: Tensor,
    saved: tuple[Any, ...],
    needs: tuple[bool, bool, bool],
) -> Gradients | None:
    """The gradients, where going back is like one time before, or the backend is ready for it; else None."""
    if torch.is_grad_enabled() or _is_watched():  # with grad mode on, they are to be differentiated again
        return None
    q, k, v, cu_seqlens_q, cu_seqlens_k, scales = saved
    offsets = (cu_seqlens_q,) if cu_seqlens_k is cu_seqlens_q else (cu_seqlens_q, cu_seqlens_k)
    tensors = (d_out, q, k, v, *[x for x in (*offsets, scales) if x is not None])
    rows = tuple(map(Tensor.numel, tensors))
    # Hooks may give the offsets of both sides back as two tensors where one was saved, and the guard raises for more than it knows.
    known_by = (*needs, len(tensors))
    back = next((x for x in call.backs if x.known_by == known_by and x.is_like(*tensors)), None)
    ready = None if back is None else back.by_rows.get(rows)
    if ready is None:
        # Others than the call's own tensors may have been saved, so that these are looked at as the call's were.
        if back is None and not (all(type(x) in PLAIN_TYPES for x in tensors) and _plain_keys(tensors)):
            return None
        plan = operators.plan(q, k, v, (cu_seqlens_q, cu_seqlens_k, scales, max_seqlen_q, max_seqlen_k, *call.numbers))
        prepare = getattr(plan.backend, "prepare_backward", None)
        ready = None if prepare is None else prepare(plan.problem, d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, scales, needs)
        if ready is None:
            return None
        if back is None:
            packed = [offsets is not None for offsets in (cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)]
            back = Back(_guard(tensors, (*packed, True, True, True)), known_by)
            if not back.is_like(*tensors):
                return None
            call.backs = [back, *call.backs][:_MOST_CALLS]
        if len(back.by_rows) >= call.MOST_ROWS:
            back.by_rows.clear()
        back.by_rows[rows] = ready
    return ready.run(d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, scales)


def remember(
    numbers: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    activation: Any,
    scale: float | None,
    out_scale: float | Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool | None,
    backend: str | None,
) -> None:
    """Note how a call runs that has just gone the ordinary way; `numbers` are the operator's arguments behind max_seqlen_k."""
    if not _is_for(q) or not _watchers_are_seen() or _is_watched():
        return
    if torch._C._are_functorch_transforms_active() or not _guards_hold():
        return
    key, tensors, scales = _known_by(
        q, k, v, cu_seqlens_q, cu_seqlens_k, activation, scale, out_scale, causal, window_size, deterministic, backend
    )
    if key is None or any(call.is_like(*tensors) for call in _calls.get(key, ())):
        return
    # A subclass may ask for what its type alone tells of. The guard refuses a tensor that stands twice; offsets are given to it once.
    if q is k or k is v or q is v or not all(type(x) in PLAIN_TYPES for x in tensors):
        return
    keys = _plain_keys(tensors)
    if keys is None or any(x.is_inference() for x in tensors[3:]):
        return
    autograd, autocast = _of_device(q, "Autograd"), _of_device(q, "Autocast")
    casts_to = torch.get_autocast_dtype(q.device.type) if any(own.has(autocast) for own in keys) else None
    if casts_to is not None and not (q.dtype == k.dtype == v.dtype == casts_to):
        return
    ready = _prepare(q, k, v, (cu_seqlens_q, cu_seqlens_k, scales, max_seqlen_q, max_seqlen_k, *numbers))
    if ready is None:
        return
    recorded = any(x.requires_grad and own.has(autograd) for x, own in zip(tensors, keys, strict=True))
    packed = (cu_seqlens_q is not None, cu_seqlens_k is not None, cu_seqlens_k is not None)
    is_like = _guard(tensors, (*packed, True, True, True))
    if not is_like(*tensors):
        return
    call = Call(is_like, numbers, recorded, casts_to)
    call.by_rows[tuple(map(Tensor.numel, tensors))] = ready
    if len(_calls) >= _MOST_KEYS:
        _calls.clear()
    _calls[key] = [call, *_calls.get(key, ())][:_MOST_CALLS]


def forget() -> None:
    """All calls: whoever changes which backend is chosen must."""
    _calls.clear()


def _known_by(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    activation: Any,
    scale: float | None,
    out_scale: float | Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool | None,
    backend: str | None,
) -> tuple[Hashable, tuple[Any, ...], Tensor | None]:
    """The key of its options (None where they are unusual), its tensors without None and repeated offsets, and out_scale if a tensor.

    Types are exact: True is 1 and 1 is 1.0 where a dictionary compares them, and the ordinary way refuses some of these.
    """
    if type(activation) is Activation:
        activation = activation.key
    if deterministic is None:
        deterministic = torch._C._get_deterministic_algorithms()
    if (
        type(activation) is not str
        or causal is not False
        or type(window_size) is not tuple
        or window_size != UNBOUNDED
        or not type(window_size[0]) is type(window_size[1]) is int
        or not (scale is None or type(scale) is float)
        or type(deterministic) is not bool
        or not (backend is None or type(backend) is str)
    ):
        return None, (), None
    tensors: tuple[Tensor, ...]
    if cu_seqlens_q is None:
        tensors, form = ((q, k, v), 0) if cu_seqlens_k is None else ((q, k, v, cu_seqlens_k), 1)
    elif cu_seqlens_k is None:
        tensors, form = (q, k, v, cu_seqlens_q), 2
    elif cu_seqlens_k is cu_seqlens_q:
        tensors, form = (q, k, v, cu_seqlens_q), 3
    else:
        tensors, form = (q, k, v, cu_seqlens_q, cu_seqlens_k), 4
    if out_scale is None or type(out_scale) is float:
        return (activation, scale, out_scale, deterministic, backend, form), tensors, None
    if type(out_scale) is not Tensor:
        return None, (), None
    return (activation, scale, Tensor, deterministic, backend, form), (*tensors, out_scale), out_scale


def _is_bound(max_seqlen: Any) -> bool:
    return max_seqlen is None or (type(max_seqlen) is int and max_seqlen >= 0)


def _is_for(q: Tensor) -> bool:
    """On a CPU the work takes longer than the way to it."""
    return q.is_cuda


def _is_watched() -> bool:
    """Whether something must see the operator pass the dispatcher, or the offsets looked at. The rest is in the dispatch keys."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and _functions_are_watched())
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
        or checks_are_asked_for()
    )


def _functions_are_watched() -> bool:
    """By more than a default device, which changes where tensors are made from nothing."""
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def _prepare(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Ready | None:
    plan = operators.plan(q, k, v, options)
    prepare = getattr(plan.backend, "prepare", None)
    ready: Ready | None = None if prepare is None else prepare(plan.problem, q, k, v, *options[:3])
    return ready


def _plain_keys(tensors: tuple[Tensor, ...]) -> list[Any] | None:
    """Their dispatch keys, with those that the thread adds and without those that it leaves out; None where there is more to one than its
    device, autograd and autocast."""
    added, left_out = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    keys = [(torch._C._dispatch_keys(x) | added) - left_out for x in tensors]
    kind = tensors[0].device.type.upper()
    passing = _keys("BackendSelect", "ADInplaceOrView", f"Autograd{kind}", f"Autocast{kind}")
    plain = _keys(kind).raw_repr()
    return keys if all((own - passing).raw_repr() == plain for own in keys) else None


def _of_device(x: Tensor, name: str) -> Any:
    return getattr(torch._C.DispatchKey, f"{name}{x.device.type.upper()}")


def _keys(*names: str) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def _guard(tensors: tuple[Tensor, ...], are_open: tuple[bool, ...]) -> Callable[..., bool]:
    """Whether other tensors are as these: exact type, dispatch keys, dtype, device, requires_grad, strides and sizes, but for the first
    size of those that `are_open`."""
    sizes: list[Any] = [list(x.shape) for x in tensors]
    for own, is_open in zip(sizes, are_open, strict=False):
        if is_open:
            own[0] = None
    strides: list[Any] = [list(x.stride()) for x in tensors]
    check: Callable[..., bool] = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


@cache
def _watchers_are_seen() -> bool:
    """Whether this torch has what `_is_watched` asks, which is not public; without it all goes the ordinary way."""
    names = ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_get_function_stack_at")
    return all(hasattr(torch._C, name) for name in names) and hasattr(torch._C._autograd, "_profiler_enabled")


@cache
def _guards_hold() -> bool:
    """Whether this torch's guards, which are not public, are what is thought of them here; without them all goes the ordinary way."""
    zeros = partial(torch.zeros, dtype=torch.float32, device="cpu")
    with torch.inference_mode(False):
        x, y = zeros(4, 2, 8), zeros(4, 2, 8)
        others = (
            (x.to(torch.float16), y),
            (x.to("meta"), y),
            (x.clone().requires_grad_(), y),
            (torch.nn.Parameter(x, requires_grad=False), y),
            (zeros(4, 2, 9), y),
            (zeros(2, 4, 8).transpose(0, 1), y),
            (torch._neg_view(x), y),
            (x[0], y),
            (x, zeros(5, 2, 8)),
            (None, y),
        )
        try:
            is_like = _guard((x, y), (True, False))
            if not is_like(x, y) or not is_like(zeros(9, 2, 8), y) or any(is_like(*other) for other in others):
                return False
            with torch._C._ExcludeDispatchKeyGuard(_keys("AutogradCPU")):
                return not is_like(x, y)
        except (AttributeError, TypeError, RuntimeError):
            return False

"""The operators `gdpa::forward` and `gdpa::backward`: what torch.compile, autograd, autocast, export and the FLOP counter see; and those
that stand for an Activation called by itself in a compiled region.

The two take tensors, numbers and the activations' texts only, so a saved program runs in another process. Everything is decided from
them when the operator runs: the Problem, the backend, and (on a CPU) whether the offsets are sound.
Registered with `Library.define` and `impl`: with gradients the custom_op decorator costs about 110 microseconds a call, this 10.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from gdpa import dispatch, inductor
from gdpa.activations import Activation
from gdpa.errors import GdpaError
from gdpa.problem import (
    NO_SCALE_GRADIENT,
    Problem,
    allowed_pairs,
    batch_size,
    check_offsets,
    checks_are_asked_for,
    describe,
    output_shape,
    sides,
)

# Scalar, not float, which torch.compile would take for constant: 1 / length may change with every call.
_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? out_scale, SymInt? max_seqlen_q, SymInt? max_seqlen_k, str[] activations, "
    "Scalar? scale, Scalar out_scale_value, SymInt window_left, SymInt window_right, bool deterministic, str backend"
)

library = torch.library.Library("gdpa", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor")
library.define(
    f"backward(Tensor d_out, Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool needs_dq, bool needs_dk, bool needs_dv) "
    "-> (Tensor, Tensor, Tensor)"
)
# An Activation that is called in a compiled region: one node of Dynamo's graph, and torch's own operations in what is compiled of it.
library.define("activation(Tensor s, str key) -> Tensor")
library.define("activation_pair(Tensor s, str key) -> (Tensor, Tensor)")
library.impl("activation", lambda s, key: Activation.from_key(key)(s), "CompositeImplicitAutograd")
library.impl("activation_pair", lambda s, key: Activation.from_key(key).value_and_derivative(s), "CompositeImplicitAutograd")


class Plan(NamedTuple):
    """What is decided about a call from all but its data."""

    problem: Problem
    backend: ModuleType
    on_cpu: bool


_MOST_PLANS = 4096
_plans: dict[Hashable, Plan] = {}


def plan(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Plan:
    """Decide, or remember, with what backends note in the Problem.

    Describing a call and choosing its backend takes 5 to 8 microseconds on a 2-core Xeon, looking it up 1.4.
    """
    cu_seqlens_q, cu_seqlens_k, _, max_seqlen_q, max_seqlen_k, activations = options[:6]
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        q.device,
        None if cu_seqlens_q is None else cu_seqlens_q.shape,
        None if cu_seqlens_k is None else cu_seqlens_k.shape,
        max_seqlen_q,
        max_seqlen_k,
        *activations,
        *options[6:],
    )
    found = _plans.get(key)
    if found is None:
        scale, out_scale, left, right, deterministic, backend = options[6:]
        problem = describe(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            activations,
            scale,
            out_scale,
            (left, right),
            deterministic,
        )
        found = Plan(problem, dispatch.choose(problem, backend or None), q.device.type == "cpu")
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = found
    if found.on_cpu or checks_are_asked_for():
        if cu_seqlens_q is not None:
            check_offsets("cu_seqlens_q", cu_seqlens_q, found.problem.query_rows, max_seqlen_q)
        if cu_seqlens_k is not None:
            check_offsets("cu_seqlens_k", cu_seqlens_k, found.problem.key_rows, max_seqlen_k)
    return found


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    found = plan(q, k, v, options)
    out: Tensor = found.backend.forward(found.problem, q, k, v, *options[:3])
    return out


def _backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    options, needs = options[:-3], options[-3:]
    found = plan(q, k, v, options)
    grads = found.backend.backward(found.problem, d_out, q, k, v, *options[:3], needs)
    dq, dk, dv = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dv


library.impl("forward", _forward, "CompositeExplicitAutograd")
library.impl("backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("gdpa::forward", lib=library)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    inductor.keep_offsets()
    cu_seqlens_q, cu_seqlens_k = options[:2]
    query_side, key_side = sides(q, k, cu_seqlens_q, cu_seqlens_k)
    batch = batch_size(query_side, key_side, q, k, cu_seqlens_q, cu_seqlens_k)
    return q.new_empty(output_shape(query_side, batch, q.shape[-3], q.shape[-2], v.shape[-1]))


@torch.library.register_fake("gdpa::backward", lib=library)
def _fake_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    inductor.keep_offsets()
    dq, dk, dv = (x.new_empty(x.shape if needed else 0) for x, needed in zip((q, k, v), options[-3:], strict=True))
    return dq, dk, dv


class Back(Protocol):
    """A way back past the operator (gdpa/shortcut.py)."""

    def __call__(
        self, d_out: Tensor, saved: tuple[Tensor | None, ...], needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """dq, dk and dv, None for those that nobody needs; None where the gradients must go the ordinary way."""


class _Attention(torch.autograd.Function):
    """Nothing but the inputs is saved: there are no row statistics.

    `ctx` is forward's own argument: a Function with a setup_context has its signature inspected at every call, 35 microseconds of it.
    What is not differentiated comes as one tuple, the operator's arguments behind v: each argument of a Function costs at every call.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], back: Back | None, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *options[:3])
        ctx.numbers = options[3:]
        ctx.back = back
        return run(q, k, v, *options)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        needs, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
        if ctx.back is not None and not torch.compiler.is_dynamo_compiling():
            found = ctx.back(d_out, saved, needs)
            if found is not None:
                return (None, None, None, *found)
        grads = torch.ops.gdpa.backward.default(d_out, *saved, *ctx.numbers, *needs)
        wanted = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
        return (None, None, None, *wanted)


# Function.apply looks for functorch's tensors among the arguments, 3 of 9 microseconds; the caller has seen that there are none.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Attention).apply


def record_plain(out: Tensor, back: Back, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """`out`, as what `gdpa::forward` has computed of these arguments, plain tensors, for autograd to go back from, by `back` or not."""
    return _apply(lambda *_: out, back, options, q, k, v)


class _AttentionBackward(torch.autograd.Function):
    """The backward is not differentiable again; it says so rather than giving wrong numbers."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., tuple[Tensor, Tensor, Tensor]], back: None, options: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return run(*tensors, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise GdpaError(
            "double backward: the gradients of gdpa.attention cannot be differentiated again; "
            "expected a first-order use (create_graph=False), or call gdpa.backends.reference.attend, which autograd differentiates"
        )


# The dispatch keys of a call that has nothing between autograd and its backend: no subclass, mode, fake or functionalised tensor.
_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_PLAIN = tuple(torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU))


def _below_autograd(run: Callable[..., Any]) -> Callable[..., Any]:
    def below(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return run(*arguments)

    return below


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _autograd(function: type[torch.autograd.Function], operator: str, implementation: Callable[..., Any], tensors: int) -> None:
    """The operator's first `tensors` arguments are differentiated."""
    overload = getattr(torch.ops.gdpa, operator).default
    runs: dict[int, Callable[..., Any]] = {}  # by dispatch keys, of which a process sees a few sets

    def record(keys: Any, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in arguments):
            raise GdpaError("forward-mode differentiation of gdpa.attention is not implemented; expected reverse mode (backward)")
        run = runs.get(keys.raw_repr())
        if run is None:
            # Dispatching once more would find `implementation` alone, and takes as long as all that is done for a call here.
            run = _below_autograd(implementation if (keys & _BELOW_AUTOGRAD).raw_repr() in _PLAIN else overload)
            runs[keys.raw_repr()] = run
        if torch.is_grad_enabled():
            scales = arguments[tensors + 2]
            if scales is not None and scales.requires_grad:  # an exported program, or under vmap, where no call was checked
                raise GdpaError(NO_SCALE_GRADIENT)
            for x in arguments[:tensors]:
                if x.requires_grad:
                    if torch._C._are_functorch_transforms_active():
                        raise GdpaError(
                            "torch.func (grad, vjp, jacrev, or vmap of tensors that require grad) is not implemented for "
                            "gdpa.attention; expected torch.autograd (backward)"
                        )
                    return function.apply(run, None, arguments[tensors:], *arguments[:tensors])
        return run(*arguments)

    library.impl(operator, record, "Autograd", with_keyset=True)


_autograd(_Attention, "forward", _forward, 3)
_autograd(_AttentionBackward, "backward", _backward, 4)


def _autocast(device_type: str, key: str) -> None:
    """Under autocast q, k, v are cast and the output has the autocast dtype. float64 stays, as in torch's own rules.

    The backward casts nothing: like the forward it runs without autocast, which would cast the operands of the products inside it.
    """
    without_autocast = partial(torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))

    def cast(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        if not q.dtype == k.dtype == v.dtype:
            raise GdpaError(f"q, k, v: expected one dtype after autocast to {dtype}, got {q.dtype}, {k.dtype}, {v.dtype}")
        with without_autocast():
            return torch.ops.gdpa.forward.default(q, k, v, *options)

    def keep(*arguments: Any) -> Any:
        with without_autocast():
            return torch.ops.gdpa.backward.default(*arguments)

    library.impl("forward", cast, key)
    library.impl("backward", keep, key)


_autocast("cpu", "AutocastCPU")
_autocast("cuda", "AutocastCUDA")


def _flops(products: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> int:
    """`products` = how many matrix products have the depth D and how many Dv; each costs 2 per (query, key, head)."""
    cu_seqlens_q, cu_seqlens_k, _, max_seqlen_q, max_seqlen_k, activations, scale, out_scale, left, right, *_ = options
    problem = describe(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, activations, scale, out_scale, (left, right), False
    )
    pairs = allowed_pairs(problem, cu_seqlens_q, cu_seqlens_k)
    return 2 * (products[0] * problem.head_dim + products[1] * problem.value_dim) * problem.heads * pairs


@register_flop_formula(torch.ops.gdpa.forward, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: Any = None, **_: Any) -> int:
    return _flops((1, 1), q, k, v, options)


@register_flop_formula(torch.ops.gdpa.backward, get_raw=True)
def _backward_flops(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: Any = None, **_: Any) -> int:
    return _flops((3, 2), q, k, v, options)

"""The public functions: arguments -> checks -> operator.

For every sequence b and head h, with g = h // (H / Hkv):

    S = scale * Q[b,h] @ K[b,g]^T
    P = where(M, f_h(S), 0)              the mask M acts after the activation
    O = out_scale[b] * P @ V[b,g]

Read next: gdpa/backends/reference.py, the same three lines as code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gdpa import dispatch, operators, shortcut  # noqa: F401  (importing operators registers them)
from gdpa.activations import Activation, resolve
from gdpa.dispatch import Explanation
from gdpa.errors import GdpaError
from gdpa.problem import check_call, check_max_seqlen, check_number, check_window, describe, offsets_are_checked

OneActivation: TypeAlias = str | Activation | Callable[[Tensor], Tensor]
ActivationLike: TypeAlias = OneActivation | Sequence[OneActivation]

_forward = torch.ops.gdpa.forward.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    activation: ActivationLike = "gelu",
    *,
    scale: float | None = None,
    out_scale: float | Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor:
    """Generalized dot-product attention over a dense batch, or over jagged nested tensors.

    Args:
        q: (B, Sq, H, D), or a jagged nested tensor (B, *, H, D).
        k: (B, Sk, Hkv, D), or jagged nested. H is a multiple of Hkv (grouped queries).
        v: (B, Sk, Hkv, Dv), or jagged nested with the structure of k.
        activation: a name from `gdpa.activations()`, a `gdpa.Activation`, a callable on tensors, or H of these, one per head.
        scale: the factor on q @ k^T; None means 1 / sqrt(D).
        out_scale: the factor on the output: None (1), a number, or a float tensor (B,), one per sequence.
        causal: query i sees keys up to i + Sk - Sq (bottom-right aligned); sets the window's right side to 0.
        window_size: (left, right) keys seen around that diagonal, -1 unbounded.
        deterministic: None follows `torch.are_deterministic_algorithms_enabled()`.
        backend: None picks the fastest that supports the call; a name runs that one or raises `BackendUnavailable`.

    Returns:
        (B, Sq, H, Dv) in the dtype of q (under autocast, the autocast dtype); nested where q is nested, with q's structure.

    Raises:
        GdpaError: an argument is wrong; the message names it.

    Example:
        >>> q = k = v = torch.randn(2, 16, 4, 32)
        >>> gdpa.attention(q, k, v, activation="silu").shape
        torch.Size([2, 16, 4, 32])
    """
    options = (activation, scale, out_scale, causal, window_size, deterministic, backend)
    if not torch.compiler.is_dynamo_compiling():
        known = shortcut.take(q, k, v, None, None, None, None, *options)
        if known is not None:
            return known
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise GdpaError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if not (q.is_nested or k.is_nested or v.is_nested):
        if q.dim() != 4:
            raise GdpaError(f"q: expected (B, Sq, H, D), got shape {tuple(q.shape)}")
        return _call(q, k, v, None, None, None, None, *options)

    q_values, q_offsets = _jagged("q", q)
    k_values, k_offsets = _jagged("k", k)
    v_values, v_offsets = _jagged("v", v)
    if k.is_nested != v.is_nested:
        raise GdpaError(f"v: expected a {'jagged nested' if k.is_nested else 'dense'} tensor as k is, got the other kind")
    if not q.is_nested and q.dim() != 4:
        raise GdpaError(f"q: expected (B, Sq, H, D), got shape {tuple(q.shape)}")
    if k.is_nested and k.shape[1] != v.shape[1] and not _same_lengths(k_offsets, v_offsets):
        raise GdpaError("v: expected the lengths (the offsets) of k, got other ones")
    if q.is_nested and k.is_nested and q_offsets.shape[0] != k_offsets.shape[0]:  # type: ignore[union-attr]
        raise GdpaError(f"k: expected a batch of {q.shape[0]} (that of q), got {k.shape[0]}")
    out = _call(q_values, k_values, v_values, q_offsets, k_offsets, None, None, *options)
    if not q.is_nested:
        return out
    # With what q knows of its lengths, or its padded form would have another shape.
    lengths = {"min_seqlen": q._maybe_min_seqlen, "max_seqlen": q._maybe_max_seqlen}  # type: ignore[attr-defined]
    return torch.nested.nested_tensor_from_jagged(out, offsets=q_offsets, **lengths)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    activation: ActivationLike = "gelu",
    *,
    scale: float | None = None,
    out_scale: float | Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor:
    """Generalized dot-product attention over a packed, jagged batch.

    Three forms:
        packed        q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), both offsets given            -> (Tq, H, Dv)
        dense keys    cu_seqlens_k=None, k (B, F, Hkv, D), v (B, F, Hkv, Dv): each sequence has its
                      own F keys, as a personalised feed-forward                                      -> (Tq, H, Dv)
        shared query  cu_seqlens_q=None, q (Sq, H, D): the same queries attend to every sequence,
                      as pooling by multi-head attention; dq is summed over the batch                 -> (B, Sq, H, Dv)

    Args:
        cu_seqlens_q, cu_seqlens_k: offsets (B + 1,), int32 or int64, on q's device: sequence b is rows offsets[b]:offsets[b + 1].
            They may differ in dtype. What is derived from them is kept while the tensor lives and its version stands, so do not
            change them through `.data`, numpy, a collective, a kernel of your own or the replay of a CUDA graph. Rows past offsets[-1]
            belong to no sequence; they are zeros in the output and gradients.
        max_seqlen_q, max_seqlen_k: optional upper bounds of the lengths. Leaving them out costs no host synchronisation.
        The others are those of `gdpa.attention`.

    Raises:
        GdpaError: an argument is wrong; the message names it. Offsets that do not start at 0, decrease or end past the buffer are
            refused on a CPU, and on a GPU where GDPA_CHECK=1; elsewhere they are clamped, so that nothing reads out of bounds.

    Example:
        >>> offsets = gdpa.offsets_from_lengths(torch.tensor([3, 0, 5]))
        >>> q = k = v = torch.randn(8, 4, 32)
        >>> gdpa.attention_varlen(q, k, v, offsets, offsets, activation="relu").shape
        torch.Size([8, 4, 32])
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        raise GdpaError(
            "cu_seqlens_q, cu_seqlens_k: expected offsets for at least one of them, got None for both; dense: gdpa.attention"
        )
    if cu_seqlens_q is None and isinstance(q, Tensor) and q.dim() != 3:
        raise GdpaError(f"q: expected (Sq, H, D), shared by the batch, where cu_seqlens_q is None, got shape {tuple(q.shape)}")
    others = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        activation,
        scale,
        out_scale,
        causal,
        window_size,
        deterministic,
        backend,
    )
    if not torch.compiler.is_dynamo_compiling():
        known = shortcut.take(q, k, v, *others)
        if known is not None:
            return known
    return _call(q, k, v, *others)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    activation: ActivationLike = "gelu",
    *,
    scale: float | None = None,
    out_scale: float | Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Explanation:
    """Which backend would run this call, and why not the others. Takes the arguments of `attention_varlen` (or, with both offsets
    left out and 4-D tensors, of `attention`); runs nothing.

    Example:
        >>> q = k = v = torch.randn(2, 16, 4, 32)
        >>> gdpa.explain(q, k, v).backend
        'cpu'
    """
    if isinstance(q, Tensor) and cu_seqlens_q is None and q.dim() != (4 if cu_seqlens_k is None else 3):
        expected = "(B, Sq, H, D) without offsets" if cu_seqlens_k is None else "(Sq, H, D) where cu_seqlens_q is None"
        raise GdpaError(f"q: expected {expected}, got shape {tuple(q.shape)}")
    _, numbers = _arguments(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        activation,
        scale,
        out_scale,
        causal,
        window_size,
        deterministic,
        backend,
    )
    keys, scale, out_scale_value, left, right, deterministic, _ = numbers
    problem = describe(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, keys, scale, out_scale_value, (left, right), deterministic
    )
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        problem = replace(problem, dtype=torch.get_autocast_dtype(q.device.type))
    return dispatch.explain(problem, backend)


def _jagged(name: str, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """The values (T, H, D) and offsets of a jagged nested tensor; a dense tensor passes with no offsets."""
    if not tensor.is_nested:
        return tensor, None
    nested: Any = tensor  # a NestedTensor, whose own attributes Tensor does not declare
    if tensor.layout != torch.jagged:
        raise GdpaError(f"{name}: expected a nested tensor of layout torch.jagged, got {tensor.layout}")
    if tensor.dim() != 4:
        raise GdpaError(f"{name}: expected a nested tensor (B, *, H, D), got {tensor.dim()} dimensions")
    if nested._ragged_idx != 1:
        raise GdpaError(
            f"{name}: expected the jagged dimension to be 1, got {nested._ragged_idx}; call .contiguous() after transposing back"
        )
    if nested.lengths() is not None:
        raise GdpaError(f"{name}: expected a contiguous nested tensor, got one with holes (its lengths differ from its offsets)")
    return nested.values(), nested.offsets()


def _same_lengths(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two jagged tensors built apart have the same lengths; where a look costs a synchronisation, their batches must do."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return not offsets_are_checked(a.device) or torch.equal(a, b)


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    activation: ActivationLike,
    scale: float | None,
    out_scale: float | Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool | None,
    backend: str | None,
) -> tuple[Tensor | None, tuple[list[str], float | None, float, int, int, bool, str]]:
    """Check every argument; return the per-sequence out_scale tensor and the operator's options after max_seqlen_k."""
    out_scale_tensor, out_scale_number = (out_scale, None) if isinstance(out_scale, Tensor) else (None, out_scale)
    check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale_tensor)
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    check_number("scale", scale)
    check_number("out_scale", out_scale_number)
    left, right = check_window(window_size, causal)
    dispatch.check_name(backend)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        raise GdpaError(f"deterministic: expected True, False or None, got {deterministic!r}")
    keys = list(resolve(activation, q.shape[-2]))
    out_scale_value = 1.0 if out_scale_number is None else _float(out_scale_number)
    scale = None if scale is None else _float(scale)
    return out_scale_tensor, (keys, scale, out_scale_value, left, right, deterministic, backend or "")


def _float(number: Any) -> Any:
    """A traced program's number, such as one over a length, stays one that changes with its inputs."""
    return float(number) if type(number) in (int, float) else torch.sym_float(number)


def _call(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """Run the operator on the parameters of `_arguments`, once they are checked."""
    out_scale_tensor, options = _arguments(q, k, v, *others)
    if not (type(q) is type(k) is type(v) is Tensor):
        _add_distributed_rule((q, k, v))
    out: Tensor = _forward(q, k, v, *others[:2], out_scale_tensor, *others[2:4], *options)
    if not torch.compiler.is_dynamo_compiling():
        shortcut.remember(options, q, k, v, *others)
    return out


def _add_distributed_rule(tensors: Sequence[Tensor]) -> None:
    """Where one of the tensors is a DTensor, see that the operators know what to do with it.

    torch.distributed.tensor takes half as long to import as torch itself, so that a process without DTensors leaves it alone.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors):
        import gdpa.distributed.attention  # noqa: F401

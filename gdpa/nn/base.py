"""What the attention modules share: the operator's options, checked once at construction, and the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gdpa import dispatch
from gdpa.activations import Activation, resolve
from gdpa.api import ActivationLike, attention_varlen
from gdpa.errors import GdpaError
from gdpa.nn.sequences import check_size
from gdpa.problem import check_number

OutScale: TypeAlias = float | Literal["mean"] | None


class AttentionModule(nn.Module):
    """The base of the modules that call the operator. It holds no parameters of its own.

    Args:
        width: the features of a token.
        heads: query heads.
        head_dim: features of a head; None divides `width` by `heads`.
        activation: as in `gdpa.attention`; a callable is traced here, and the numbers it reads are frozen.
        scale: the factor on q @ k^T; None means 1 / sqrt(head_dim).
        out_scale: the factor on the attention's output: None (1), a number, or "mean", which divides by the number of keys of each
            sequence. Without a softmax the output grows with that number; "mean" keeps long histories at the size of short ones.
        backend: as in `gdpa.attention`. The attribute may be changed later; parameters and state dicts do not depend on it.

    Attributes:
        activation: one `gdpa.Activation`, or a tuple of one per head.
        operator: what computes the attention, `gdpa.attention_varlen`. Another callable that takes its arguments may be set in its
            place, as a benchmark does to run the same weights on another implementation; it gets `backend` too.
    """

    activation: Activation | tuple[Activation, ...]
    operator: Callable[..., Tensor]

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int | None,
        *,
        activation: ActivationLike,
        scale: float | None,
        out_scale: OutScale,
        backend: str | None,
    ) -> None:
        super().__init__()
        self.width = check_size("width", width)
        self.heads = check_size("heads", heads)
        if head_dim is None:
            if width % heads != 0:
                raise GdpaError(f"heads: expected a divisor of width {width} where head_dim is None, got {heads}")
            head_dim = width // heads
        self.head_dim = check_size("head_dim", head_dim)
        distinct = len(resolve(activation, heads))  # 1 where all heads have the same
        entries: Sequence[Any] = activation if isinstance(activation, (list, tuple)) else [activation]
        found = tuple(Activation(entry) for entry in entries[:distinct])
        self.activation = found if len(found) > 1 else found[0]
        check_number("scale", scale)
        self.scale = scale
        if isinstance(out_scale, str):
            if out_scale != "mean":
                raise GdpaError(f"out_scale: expected None, a number or 'mean', got {out_scale!r}")
        else:
            check_number("out_scale", out_scale)
        self.out_scale: OutScale = out_scale
        dispatch.check_name(backend)
        self.backend = backend
        self.operator = attention_varlen

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **mask: Any,
    ) -> Tensor:
        """The operator with this module's options."""
        out_scale: float | Tensor | None
        if self.out_scale != "mean":
            out_scale = self.out_scale
        elif cu_seqlens_k is None:
            out_scale = 1.0 / k.shape[1]
        else:
            # A sequence without keys has zeros for its output, whatever the factor.
            out_scale = 1.0 / torch.diff(cu_seqlens_k).clamp(min=1).to(torch.promote_types(q.dtype, torch.float32))
        return self.operator(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            self.activation,
            scale=self.scale,
            out_scale=out_scale,
            backend=self.backend,
            **mask,
        )

    def extra_repr(self) -> str:
        entries = self.activation if isinstance(self.activation, tuple) else (self.activation,)
        names = [entry.expression.formula if entry.name == "<lambda>" else entry.name for entry in entries]
        parts = [f"width={self.width}", f"heads={self.heads}", f"head_dim={self.head_dim}", *self.own_repr()]
        parts.append(f"activation={names[0] if len(names) == 1 else '[' + ', '.join(names) + ']'}")
        parts.append(f"scale={1 / math.sqrt(self.head_dim) if self.scale is None else self.scale:.6g}")
        if self.out_scale is not None:
            parts.append(f"out_scale={self.out_scale}")
        if self.backend is not None:
            parts.append(f"backend={self.backend}")
        return ", ".join(parts)

    def own_repr(self) -> list[str]:
        """The parts of a subclass's repr, between the sizes and the options."""
        return []

"""The oracle: what every other backend must agree with. Eager, any device, any float dtype, float64 included.

For every sequence b and head h, with g = h // (H / Hkv):

    S = scale * Q[b,h] @ K[b,g]^T
    P = where(M, f_h(S), 0)              the mask acts after the activation
    O = out_scale[b] * P @ V[b,g]

`attend` is ordinary differentiable PyTorch: autograd alone gives its gradients, so they prove the hand-written ones.
It computes in the dtype of its inputs; call it on float64 for the truth. As a backend it widens bf16 and fp16 to fp32
and rounds each result once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdpa.activations import Activation
from gdpa.problem import Problem, row_ranges, window_mask


def supports(problem: Problem) -> str | None:
    return None


def attend(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor:
    """The operator, one sequence at a time. Rows that no sequence covers are zeros."""
    outputs = []
    queries = row_ranges(cu_seqlens_q, problem.batch, problem.query_rows)
    keys = row_ranges(cu_seqlens_k, problem.batch, problem.key_rows)
    for b, ((q_start, q_len), (k_start, k_len)) in enumerate(zip(queries, keys, strict=True)):
        q_b = (q[b] if problem.query_side == "dense" else q)[q_start : q_start + q_len].transpose(0, 1)  # [H, Sq, D]
        k_b = (k[b] if problem.key_side == "dense" else k)[k_start : k_start + k_len].transpose(0, 1)  # [Hkv, Sk, D]
        v_b = (v[b] if problem.key_side == "dense" else v)[k_start : k_start + k_len].transpose(0, 1)
        k_b = k_b.repeat_interleave(problem.group, dim=0)  # [H, Sk, D]
        v_b = v_b.repeat_interleave(problem.group, dim=0)

        s = problem.scale * (q_b @ k_b.transpose(1, 2))  # [H, Sq, Sk]
        p = activate(problem, s)
        o = p @ v_b  # [H, Sq, Dv]
        if k_len:  # no keys: zeros, also where out_scale is 1 / length
            o = o * (problem.out_scale if out_scale is None else out_scale[b].to(o.dtype))
        outputs.append(o.transpose(0, 1))

    if problem.query_side != "packed":
        if not outputs:
            return q.new_zeros(problem.output_shape)
        return torch.stack(outputs)
    covered = queries[-1][0] + queries[-1][1] if queries else 0
    outputs.append(q.new_zeros(problem.query_rows - covered, problem.heads, problem.value_dim))
    return torch.cat(outputs)


def activate(problem: Problem, s: Tensor) -> Tensor:
    """P = where(M, f_h(S), 0) for one sequence's scores [H, Sq, Sk].

    Only allowed pairs are evaluated: `where(M, f(S), 0)` would let autograd compute 0 * f'(S) at masked pairs, NaN for a log.
    """
    per_head = []
    allowed = None
    if problem.masked:
        allowed = window_mask(s.shape[1], s.shape[2], problem.window, s.device)
    for h in range(problem.heads):
        f = Activation.from_key(problem.activation_of(h))
        if allowed is None:
            per_head.append(f(s[h]))
        else:
            per_head.append(torch.zeros_like(s[h]).masked_scatter(allowed, f(s[h][allowed])))
    return torch.stack(per_head)


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    wide_q, wide_k, wide_v = _widened(q, k, v)
    out = attend(problem, wide_q, wide_k, wide_v, cu_seqlens_q, cu_seqlens_k, out_scale).to(q.dtype)
    # torch.stack returns a view, of which autograd would not have the caller write into it.
    return out.clone() if out._is_view() else out


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
    """Gradients by autograd through `attend`."""
    with recording():
        leaves = [x.detach().requires_grad_(need) for x, need in zip(_widened(q, k, v), needs, strict=True)]
        out = attend(problem, leaves[0], leaves[1], leaves[2], cu_seqlens_q, cu_seqlens_k, out_scale)
        wanted = [x for x in leaves if x.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if out.requires_grad:
            found = torch.autograd.grad(out, wanted, d_out.to(out.dtype), allow_unused=True)
    # An empty batch or empty sequences leave inputs unused: their gradient is zero.
    grads = iter(found)
    full: list[Tensor | None] = []
    for x, need in zip((q, k, v), needs, strict=True):
        grad = next(grads) if need else None
        if need and grad is None:
            grad = torch.zeros_like(x, memory_format=torch.contiguous_format)
        full.append(None if grad is None else grad.to(x.dtype).contiguous())
    return full[0], full[1], full[2]


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.to(wide), k.to(wide), v.to(wide)


class recording:
    """Let autograd record inside an operator's body, where the dispatcher has excluded its keys."""

    def __enter__(self) -> None:
        keys = torch._C._dispatch_tls_local_exclude_set()
        for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
            keys = keys.remove(getattr(torch._C.DispatchKey, key))
        self._guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys)
        self._guard.__enter__()
        self._grad = torch.enable_grad()
        self._grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self._grad.__exit__(*error)
        self._guard.__exit__(*error)

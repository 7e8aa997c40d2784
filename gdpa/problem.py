"""What one attention call is: a frozen `Problem`, and the checks that refuse a wrong call before anything runs.

The public API has several forms, and every one of them is a pair of *sides*:

    side      query tensor      key tensor          rows of sequence b
    packed    (T, H, D)         (T, Hkv, D)         offsets[b] : offsets[b + 1]
    dense     (B, S, H, D)      (B, S, Hkv, D)      [b, 0:S]
    shared    (S, H, D)         -                   0 : S for every b

`check_call` looks at Python values, ranks, dtypes and sizes only, so that it can be traced by torch.compile with dynamic shapes;
what must look at the offsets' values is `check_offsets`, called inside the operator.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from gdpa.errors import GdpaError

QuerySide = Literal["packed", "dense", "shared"]
KeySide = Literal["packed", "dense"]

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OFFSET_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Problem:
    """One call, described without its data. Backends decide from this alone whether and how they run."""

    query_side: QuerySide
    key_side: KeySide
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query_rows: int  # rows of the buffer when packed, rows per sequence otherwise
    key_rows: int
    dtype: torch.dtype
    device: torch.device
    activations: tuple[str, ...]  # one key, or one per head
    scale: float
    out_scale: float  # 1.0 where a per-sequence tensor is given
    window: tuple[int, int]  # (left, right), -1 unbounded; causal is (left, 0)
    deterministic: bool
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    # What a backend has worked out from the above, to find it again at the next such call.
    notes: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def masked(self) -> bool:
        return self.window != (-1, -1)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return output_shape(self.query_side, self.batch, self.query_rows, self.heads, self.value_dim)

    def activation_of(self, head: int) -> str:
        return self.activations[head if len(self.activations) > 1 else 0]


def output_shape(side: QuerySide, batch: int, query_rows: int, heads: int, value_dim: int) -> tuple[int, ...]:
    """Packed queries give (T, H, Dv); dense and shared ones (B, S, H, Dv)."""
    return (query_rows, heads, value_dim) if side == "packed" else (batch, query_rows, heads, value_dim)


def sides(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> tuple[QuerySide, KeySide]:
    if cu_seqlens_q is not None:
        query_side: QuerySide = "packed"
    else:
        query_side = "dense" if q.dim() == 4 else "shared"
    return query_side, "packed" if cu_seqlens_k is not None else "dense"


def batch_size(query_side: QuerySide, key_side: KeySide, q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> int:
    if cu_q is not None:
        return cu_q.shape[0] - 1
    if cu_k is not None:
        return cu_k.shape[0] - 1
    return k.shape[0] if query_side == "shared" else q.shape[0]


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    activations: list[str] | tuple[str, ...],
    scale: float | None,
    out_scale: float,
    window: tuple[int, int],
    deterministic: bool,
) -> Problem:
    """The `Problem` of tensors that have passed `check_call`."""
    query_side, key_side = sides(q, k, cu_seqlens_q, cu_seqlens_k)
    head_dim = q.shape[-1]
    return Problem(
        query_side=query_side,
        key_side=key_side,
        batch=batch_size(query_side, key_side, q, k, cu_seqlens_q, cu_seqlens_k),
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        head_dim=head_dim,
        value_dim=v.shape[-1],
        query_rows=q.shape[-3],
        key_rows=k.shape[-3],
        dtype=q.dtype,
        device=q.device,
        activations=tuple(activations),
        scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        out_scale=out_scale,
        window=window,
        deterministic=deterministic,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def _shape(t: Tensor) -> str:
    return f"shape {tuple(t.shape)}"


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise GdpaError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def check_window(window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    """flash-attn's rule: (left, right), -1 unbounded, `causal` sets right to 0. Returns the effective pair."""
    if not isinstance(causal, bool):
        raise GdpaError(f"causal: expected a bool, got {causal!r}")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise GdpaError(f"window_size: expected a pair (left, right) of integers, got {window_size!r}")
    left, right = window_size
    for name, size in (("left", left), ("right", right)):
        if type(size) is not int and (isinstance(size, bool) or not isinstance(size, (int, torch.SymInt))):
            raise GdpaError(f"window_size: expected an integer for {name}, got {size!r}")
        if size < -1 or _is_past(size, 2**63):
            raise GdpaError(f"window_size: expected {name} to be -1 (unbounded) or from 0 to 2^63 - 1, got {size}")
    return (left, 0) if causal else (left, right)


def _is_past(value: Any, bound: int) -> bool:
    """Of Python's integers, which have no largest; a traced program's have."""
    return type(value) is int and not torch.compiler.is_compiling() and abs(value) >= bound


def check_number(name: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat))):
        raise GdpaError(f"{name}: expected a number, got {type(value).__name__}")
    if _is_past(value, 2**1023):
        raise GdpaError(f"{name}: expected a number that a float holds, got an integer of more than 1,000 bits")


def check_max_seqlen(name: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise GdpaError(f"{name}: expected an integer or None, got {value!r}")
    if _is_negative(value):
        raise GdpaError(f"{name}: expected at least 0, got {value}")
    if _is_past(value, 2**63):
        raise GdpaError(f"{name}: expected at most 2^63 - 1, got {value}")


def _is_negative(value: int | torch.SymInt) -> bool:
    """False of a number that a traced program will know only when it runs."""
    if not torch.compiler.is_compiling() and isinstance(value, int):
        return value < 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes half a second, which a program that traces has spent

    return guard_or_false(value < 0)


def _check_side_offsets(name: str, offsets: Tensor, q: Tensor) -> None:
    _require_tensor(name, offsets)
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise GdpaError(f"{name}: expected shape (B + 1,), got {_shape(offsets)}")
    if offsets.dtype not in OFFSET_DTYPES:
        raise GdpaError(f"{name}: expected int32 or int64, got {offsets.dtype}")
    if offsets.device != q.device:
        raise GdpaError(f"{name}: expected device {q.device} (that of q), got {offsets.device}")


PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_PLAIN_OR_NONE = frozenset((Tensor, type(None)))
_MOST_SOUND = 4096
_sound: set[Hashable] = set()


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> None:
    """Refuse wrong ranks, dtypes, devices, head counts and offsets' shapes, naming the argument.

    All that the checks read of a usual call is remembered once it has passed: looking it up takes 2 microseconds, checking it 8.
    """
    usual = (
        not torch.compiler.is_compiling()
        and out_scale is None
        and type(q) in PLAIN_TYPES
        and type(k) in PLAIN_TYPES
        and type(v) in PLAIN_TYPES
        and type(cu_seqlens_q) in _PLAIN_OR_NONE
        and type(cu_seqlens_k) in _PLAIN_OR_NONE
        and not (q.is_nested or k.is_nested or v.is_nested)
        and q.layout == k.layout == v.layout == torch.strided
        and (cu_seqlens_q is None or (cu_seqlens_q.layout == torch.strided and not cu_seqlens_q.is_nested))
        and (cu_seqlens_k is None or (cu_seqlens_k.layout == torch.strided and not cu_seqlens_k.is_nested))
        and q.dtype == k.dtype == v.dtype
    )
    if usual:
        call = (
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            q.device,
            k.device,
            v.device,
            None if cu_seqlens_q is None else (cu_seqlens_q.shape, cu_seqlens_q.dtype, cu_seqlens_q.device),
            cu_seqlens_k
            if cu_seqlens_k is None
            else cu_seqlens_k is cu_seqlens_q or (cu_seqlens_k.shape, cu_seqlens_k.dtype, cu_seqlens_k.device),
        )
        if call in _sound:
            return
    _check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
    if usual:
        if len(_sound) >= _MOST_SOUND:
            _sound.clear()
        _sound.add(call)


NO_SCALE_GRADIENT = "out_scale: expected a tensor that does not require grad; its gradient is not implemented"


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require_tensor(name, tensor)
        if tensor.is_nested:
            raise GdpaError(f"{name}: expected an ordinary tensor, got a nested one; gdpa.attention takes nested tensors")
    others = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("out_scale", out_scale))
    for name, given in (("q", q), ("k", k), ("v", v), *others):
        if isinstance(given, Tensor) and given.layout != torch.strided:
            raise GdpaError(f"{name}: expected a tensor of layout torch.strided, got {given.layout}")
        if isinstance(given, Tensor) and given.is_nested:
            raise GdpaError(f"{name}: expected an ordinary tensor, got a nested one")
    # Under autocast the three are cast to one dtype before the operator runs.
    casts = q.device.type != "meta" and torch.is_autocast_enabled(q.device.type)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise GdpaError(f"{name}: expected dtype bfloat16, float16, float32 or float64, got {tensor.dtype}")
        if tensor.device != q.device:
            raise GdpaError(f"{name}: expected device {q.device} (that of q), got {tensor.device}")
        if tensor.dtype != q.dtype and not casts:
            raise GdpaError(f"{name}: expected dtype {q.dtype} (that of q), got {tensor.dtype}")

    if cu_seqlens_q is None:
        if q.dim() not in (3, 4):
            raise GdpaError(f"q: expected (B, S, H, D), or (S, H, D) shared by the batch, got {_shape(q)}")
    else:
        if q.dim() != 3:
            raise GdpaError(f"q: expected packed (T, H, D) with cu_seqlens_q, got {_shape(q)}")
        _check_side_offsets("cu_seqlens_q", cu_seqlens_q, q)
    if cu_seqlens_k is None:
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dim() != 4:
                raise GdpaError(f"{name}: expected (B, S, Hkv, D) where there is no cu_seqlens_k, got {_shape(tensor)}")
    else:
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dim() != 3:
                raise GdpaError(f"{name}: expected packed (T, Hkv, D) with cu_seqlens_k, got {_shape(tensor)}")
        _check_side_offsets("cu_seqlens_k", cu_seqlens_k, q)

    if k.shape[:-2] != v.shape[:-2]:
        raise GdpaError(f"v: expected the batch and rows of k, {tuple(k.shape[:-2])}, got {_shape(v)}")
    if k.shape[-2] != v.shape[-2]:
        raise GdpaError(f"v: expected {k.shape[-2]} heads (those of k), got {_shape(v)}")
    if q.shape[-1] != k.shape[-1]:
        raise GdpaError(f"k: expected head dimension {q.shape[-1]} (that of q), got {_shape(k)}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[-1] < 1 or tensor.shape[-2] < 1:
            raise GdpaError(f"{name}: expected at least one head and one feature, got {_shape(tensor)}")
    if q.shape[-2] % k.shape[-2] != 0:
        raise GdpaError(f"q: expected a number of heads that is a multiple of k's {k.shape[-2]}, got {q.shape[-2]} ({_shape(q)})")

    query_side, key_side = sides(q, k, cu_seqlens_q, cu_seqlens_k)
    batch = batch_size(query_side, key_side, q, k, cu_seqlens_q, cu_seqlens_k)
    if key_side == "packed" and cu_seqlens_k is not None:
        if query_side == "packed" and cu_seqlens_k.shape[0] - 1 != batch:
            raise GdpaError(f"cu_seqlens_k: expected {batch + 1} offsets (as cu_seqlens_q), got {_shape(cu_seqlens_k)}")
        if query_side == "dense" and q.shape[0] != batch:
            raise GdpaError(f"cu_seqlens_k: expected {q.shape[0] + 1} offsets for q's batch, got {_shape(cu_seqlens_k)}")
    elif k.shape[0] != batch:
        raise GdpaError(f"k: expected a batch of {batch}, got {_shape(k)}")

    if out_scale is not None:
        if out_scale.dim() != 1 or out_scale.shape[0] != batch:
            raise GdpaError(f"out_scale: expected a number or a tensor of shape ({batch},), got {_shape(out_scale)}")
        if not out_scale.dtype.is_floating_point:
            raise GdpaError(f"out_scale: expected a floating dtype, got {out_scale.dtype}")
        if out_scale.device != q.device:
            raise GdpaError(f"out_scale: expected device {q.device} (that of q), got {out_scale.device}")
        if out_scale.requires_grad and torch.is_grad_enabled():
            raise GdpaError(NO_SCALE_GRADIENT)


# What os.environ keeps its variables in: its own look-up encodes, raises and catches, a microsecond of every call.
_variables: Any = os.environ._data  # type: ignore[attr-defined]
_CHECK, _YES = os.environ.encodekey("GDPA_CHECK"), os.environ.encodevalue("1")


def checks_are_asked_for() -> bool:
    asked: bool = _variables.get(_CHECK) == _YES
    return asked


def offsets_are_checked(device: torch.device) -> bool:
    """Offsets' values are always checked on the CPU; elsewhere a look costs a synchronisation, so GDPA_CHECK=1 asks for it."""
    return device.type == "cpu" or checks_are_asked_for()


def check_offsets(name: str, offsets: Tensor, rows: int, max_seqlen: int | None) -> list[int]:
    """Refuse offsets that do not start at 0, decrease, or end past the buffer. Returns them as Python integers."""
    values: list[int] = offsets.tolist()
    if values[0] != 0:
        raise GdpaError(f"{name}: expected to start at 0, got {values[0]}")
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise GdpaError(f"{name}: expected never to decrease, got {values[i - 1]} then {values[i]} at position {i}")
        if max_seqlen is not None and values[i] - values[i - 1] > max_seqlen:
            length = values[i] - values[i - 1]
            raise GdpaError(f"{name}: expected lengths up to {max_seqlen} (its max_seqlen), got {length} for sequence {i - 1}")
    if values[-1] > rows:
        raise GdpaError(f"{name}: expected to end at most at {rows} (the rows of the buffer), got {values[-1]}")
    return values


def row_ranges(offsets: Tensor | None, batch: int, rows: int) -> list[tuple[int, int]]:
    """(start, length) of every sequence, clamped to the buffer; on the host, for the backends that loop in Python.

    Dense and shared sides (`offsets` None) give (0, rows).
    """
    if offsets is None:
        return [(0, rows)] * batch
    ends = [min(max(int(o), 0), rows) for o in offsets.tolist()]
    return [(start, max(end - start, 0)) for start, end in pairwise(ends)]


def allowed_pairs(problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    """How many (query, key) pairs the masks allow, over the batch: what FLOP counts rest on. Offsets that hold no numbers, on the meta
    device or fake, are taken for sequences of the longest length, or of the whole buffer where that is not known."""
    from torch._subclasses.fake_tensor import is_fake  # takes a while to import, which a program with fake tensors has spent

    left, right = problem.window
    total = 0
    queries, keys = (
        [(0, rows if longest is None else min(longest, rows))] * problem.batch
        if offsets is not None and (offsets.is_meta or is_fake(offsets))
        else row_ranges(offsets, problem.batch, rows)
        for offsets, rows, longest in (
            (cu_seqlens_q, problem.query_rows, problem.max_seqlen_q),
            (cu_seqlens_k, problem.key_rows, problem.max_seqlen_k),
        )
    )
    for (_, q_len), (_, k_len) in zip(queries, keys, strict=True):
        if not problem.masked:
            total += q_len * k_len
            continue
        for first, last in _allowed_keys(q_len, k_len, left, right):
            total += max(last - first, 0)
    return total


def _allowed_keys(q_len: int, k_len: int, left: int, right: int) -> Iterator[tuple[int, int]]:
    """For each query, the half-open range of keys its window allows (bottom-right aligned)."""
    for row in range(q_len):
        diagonal = row + k_len - q_len
        first = 0 if left < 0 else max(diagonal - left, 0)
        last = k_len if right < 0 else min(diagonal + right + 1, k_len)
        yield first, last


def window_mask(q_len: int, k_len: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """The mask M of one sequence, (q_len, k_len) bool: key j is allowed for query i when
    i + k_len - q_len - left <= j <= i + k_len - q_len + right."""
    left, right = (min(side, q_len + k_len) for side in window)  # more than that would be past what an int64 holds
    diagonal = torch.arange(q_len, device=device)[:, None] + (k_len - q_len)
    key = torch.arange(k_len, device=device)[None, :]
    mask = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= key >= diagonal - left
    if right >= 0:
        mask &= key <= diagonal + right
    return mask

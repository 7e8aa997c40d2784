"""The attention of a training step, by provider: callables that take the arguments of `gdpa.attention_varlen`, set in every GDPA
module of a model (`ClickModel.set_attention`).

The padded ones write jagged rows into tensors of the batch's longest sequence, compute f(scale q k^T) v there, under a mask, and read the
rows back, all of it inside the step. The softmax one is `torch.nn.attention.varlen`: another function, with the same products.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import gdpa
from gdpa import dispatch, operators, shortcut
from gdpa.activations import Activation
from gdpa.bench.plain import FUNCTIONS, compiled, missing_compiler
from gdpa.bench.providers import free_bytes
from gdpa.dispatch import BACKENDS
from gdpa.errors import GdpaError
from gdpa.models.sequences import rows_to_sequences

NAMES = ("gdpa", *(f"gdpa-{backend}" for backend in BACKENDS), "eager", "compile", "varlen")
GPU_DEFAULT = ("gdpa", "gdpa-triton", "eager", "compile", "varlen")
CPU_DEFAULT = ("gdpa", "eager")


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


class Attention:
    """One way to compute the attention of a model.

    A padded or a variable-length kernel must be told the longest sequence. A model's calls come in one order, so a first step, with
    `learn`, reads it for each of them, and the steps after it on the same batch wait for no device.
    """

    same_function = True  # whether the gradients must be those of the others
    in_graphs = False  # whether it is an operator that compiled code calls, so that a whole layer can be compiled around it
    note: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._longest: list[int] = []
        self._place, self._learning = 0, False
        self.padded_scores: list[int] = []  # of each call, B H Sq Sk with both sides padded; known after `learn`
        self.backends: list[str] = []  # of gdpa, those that ran; known after `learn`

    def reason_against(self, device: torch.device, bf16: bool) -> str | None:
        """Why it cannot run here, or None."""
        return None

    def begin(self, learn: bool = False) -> None:
        """Before every step."""
        self._place, self._learning = 0, learn
        if learn:
            self._longest, self.padded_scores, self.backends = [], [], []

    def longest(self, offsets: Tensor) -> int:
        if self._learning:
            self._longest.append(int(offsets.diff().max()) if offsets.shape[0] > 1 else 0)
        self._place += 1
        return self._longest[self._place - 1]

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        raise NotImplementedError


class Gdpa(Attention):
    """`gdpa.attention_varlen`, on the backend that it chooses or on a named one."""

    in_graphs = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.backend = None if name == "gdpa" else name.removeprefix("gdpa-")

    def reason_against(self, device: torch.device, bf16: bool) -> str | None:
        if self.backend in ("triton", "hopper") and os.environ.get("TRITON_INTERPRET", "0") == "1":
            return "TRITON_INTERPRET=1: the interpreter is for tests, its times mean nothing"
        return None

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        options["backend"] = self.backend
        if self._learning:
            # `explain` is not under autocast, which the operator casts by.
            q, k, v = _of_one_dtype(*arguments[:3])
            self.backends.append(gdpa.explain(q, k, v, *arguments[3:], **options).backend)
        return gdpa.attention_varlen(*arguments, **options)


class Padded(Attention):
    """f(scale q k^T) v on padded tensors, as one writes it in plain PyTorch; under torch.compile where the name says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Writing and reading rows are gathers that would gain nothing; what is compiled is all between them.
        self.dense: Callable[..., Tensor] = compiled(dense_attention) if name == "compile" else dense_attention

    def reason_against(self, device: torch.device, bf16: bool) -> str | None:
        return missing_compiler(device) if self.name == "compile" else None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        activation: Activation,
        *,
        scale: float | None = None,
        out_scale: float | Tensor | None = None,
        backend: str | None = None,
        **mask: Any,
    ) -> Tensor:
        _refuse_masks(mask)
        if not isinstance(activation, Activation) or activation.name not in FUNCTIONS:
            raise GdpaError(f"activation: expected one of {', '.join(FUNCTIONS)} for all heads, got {activation!r}")
        q, k, v = _of_one_dtype(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        rows = q.shape[0]
        places = q_longest = None
        if cu_seqlens_q is not None:
            q_longest = self.longest(cu_seqlens_q)
            places = padded_places(cu_seqlens_q, rows, q_longest)
            q = pad(q, places, cu_seqlens_q.shape[0] - 1, q_longest)
        inside = None
        if cu_seqlens_k is not None:
            longest = self.longest(cu_seqlens_k)
            # Self-attention has the same rows on both sides.
            key_places = places if cu_seqlens_k is cu_seqlens_q else padded_places(cu_seqlens_k, k.shape[0], longest)
            assert key_places is not None
            k, v = (pad(x, key_places, cu_seqlens_k.shape[0] - 1, longest) for x in (k, v))
            inside = (torch.arange(longest, device=k.device) < cu_seqlens_k.diff()[:, None])[:, None, None, :]
        if isinstance(out_scale, Tensor):
            out_scale = out_scale.to(q.dtype)[:, None, None, None]
        if self._learning:
            self._learn_scores(k.shape[0] * q.shape[-2] * q.shape[-3] * k.shape[-3], q)
        heads_first = (x.transpose(-3, -2) for x in (q, k, v))
        out = self.dense(*heads_first, inside, FUNCTIONS[activation.name], scale, out_scale).transpose(-3, -2)
        return out if places is None else unpad(out, places)

    def _learn_scores(self, scores: int, q: Tensor) -> None:
        """Note the size of a call, and on a CPU refuse one that does not fit: the system would end the process."""
        self.padded_scores.append(scores)
        needed, free = 5 * scores * q.element_size(), free_bytes(q.device)
        if q.device.type == "cpu" and free is not None and needed > free:
            raise MemoryError(f"needs {needed / 1e9:.3g} GB for its score matrices, {free / 1e9:.3g} GB are free")

    def estimated_bytes(self, itemsize: int) -> int:
        """Of the score matrices in a step: each call keeps S and the masked P for its backward, and the largest backward holds three
        gradients of that size. Compiled code may keep one of the two."""
        kept = sum(self.padded_scores) * (1 if self.name == "compile" else 2)
        return itemsize * (kept + 3 * max(self.padded_scores, default=0))


class Varlen(Attention):
    """Softmax in the place of the activation and of out_scale, by torch.nn.attention.varlen. Seeds that the batch shares are repeated for
    each sequence, inside the step."""

    same_function = False
    note = "softmax, not the activation: a yardstick of speed"

    def reason_against(self, device: torch.device, bf16: bool) -> str | None:
        if device.type != "cuda":
            return "torch.nn.attention.varlen runs on a CUDA device only"
        return None if bf16 else "torch.nn.attention.varlen takes bf16 and fp16 only"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        *unused: Any,
        **options: Any,
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        _refuse_masks({name: value for name, value in options.items() if name in ("causal", "window_size")})
        q, k, v = _of_one_dtype(q, k, v)
        seeds = q.shape[0]
        if cu_seqlens_q is None:
            assert cu_seqlens_k is not None
            batch, max_q = cu_seqlens_k.shape[0] - 1, seeds
            q = q.expand(batch, *q.shape).flatten(0, 1)
            offsets_q = _regular_offsets(batch, seeds, q.device)
        else:
            batch, max_q, offsets_q = cu_seqlens_q.shape[0] - 1, self.longest(cu_seqlens_q), cu_seqlens_q.int()
        if cu_seqlens_k is None:
            max_k = k.shape[1]
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            offsets_k = _regular_offsets(batch, max_k, k.device)
        else:
            max_k, offsets_k = self.longest(cu_seqlens_k), cu_seqlens_k.int()
        out = varlen_attn(q, k, v, offsets_q, offsets_k, max_q, max_k)
        assert isinstance(out, Tensor)
        return out.unflatten(0, (batch, seeds)) if cu_seqlens_q is None else out


def by_name(name: str) -> Attention:
    if name == "varlen":
        return Varlen(name)
    return Padded(name) if name in ("eager", "compile") else Gdpa(name)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inside: Tensor | None,
    function: Callable[[Tensor], Tensor],
    scale: float,
    out_scale: float | Tensor | None,
) -> Tensor:
    """q [B, H, Sq, D], or [H, Sq, D] shared by the batch; k and v [B, H, Sk, D]; inside [B, 1, 1, Sk] is False at padded keys."""
    # The scale goes into q: one pass less over the scores.
    p = function((scale * q) @ k.transpose(-1, -2))
    if inside is not None:
        p = p.masked_fill(~inside, 0)
    out = p @ v
    return out if out_scale is None else out * out_scale


def padded_places(offsets: Tensor, rows: int, longest: int) -> Tensor:
    """(rows,) int64: where each packed row stands among B * longest padded ones."""
    sequence = rows_to_sequences(offsets, rows)
    return sequence * longest + torch.arange(rows, device=offsets.device) - offsets[sequence]


def pad(packed: Tensor, places: Tensor, batch: int, longest: int) -> Tensor:
    """(T, H, D) -> (B, longest, H, D), zeros where there is no row."""
    padded: Tensor = _Pad.apply(packed, places, batch * longest)  # type: ignore[no-untyped-call]
    return padded.view(batch, longest, *packed.shape[1:])


def unpad(padded: Tensor, places: Tensor) -> Tensor:
    """(B, longest, H, D) -> (T, H, D)."""
    packed: Tensor = _Unpad.apply(padded.flatten(0, 1), places)  # type: ignore[no-untyped-call]
    return packed


class _Pad(torch.autograd.Function):
    """Rows to their places. The gradient is one gather; that of plain indexing would sort or add atomically."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return packed.new_zeros((rows, *packed.shape[1:])).index_copy_(0, places, packed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class _Unpad(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = padded.shape[0]
        return padded.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros((ctx.rows, *gradient.shape[1:])).index_copy_(0, places, gradient), None


def run_on(backend: str | None) -> None:
    """From now on the operator's calls that name no backend run on this one; None: on the fastest. A compiled model names none, so
    that one compilation serves all backends."""
    dispatch.choose = _choose if backend is None else lambda problem, name=None: _choose(problem, name or backend)
    operators._plans.clear()  # what has been chosen so far
    shortcut.forget()


_choose = dispatch.choose


class Marks:
    """Points of time before and after calls, where they run: CUDA events on a GPU, the clock on a CPU."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.forward_marks: list[Any] = []
        self.backward_marks: list[Any] = []

    def now(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> tuple[float, float]:
        """Of all forward and all backward calls. Waits for the device."""
        if self.gpu:
            torch.cuda.synchronize()
        return self._sum(self.forward_marks), self._sum(self.backward_marks)

    def _sum(self, marks: list[Any]) -> float:
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if self.gpu:
            return sum(float(start.elapsed_time(end)) for start, end in pairs)
        return 1e3 * float(sum(end - start for start, end in pairs))


@contextmanager
def watched_backends(names: Iterable[str], gpu: bool) -> Iterator[Marks]:
    """Mark the operator's calls of these backends, from compiled code too."""
    marks = Marks(gpu)

    def marked(function: Callable[..., Any], into: list[Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            into.append(marks.now())
            result = function(*arguments)
            into.append(marks.now())
            return result

        return call

    modules = [dispatch.load(name) for name in set(names)]
    plain = [(module.forward, module.backward) for module in modules]
    try:
        for module, (forward, backward) in zip(modules, plain, strict=True):
            module.forward = marked(forward, marks.forward_marks)  # type: ignore[attr-defined]
            module.backward = marked(backward, marks.backward_marks)  # type: ignore[attr-defined]
        yield marks
    finally:
        for module, (forward, backward) in zip(modules, plain, strict=True):
            module.forward, module.backward = forward, backward  # type: ignore[attr-defined]


class Watched(Marks):
    """An attention whose calls are marked, forward and backward.

    Identities around the call mark its backward: that of the output's runs just before it, that of the inputs' right after it, since
    autograd runs what was recorded last first.
    """

    def __init__(self, attention: Attention, gpu: bool) -> None:
        super().__init__(gpu)
        self.attention = attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
        q, k, v = _MarkInputs.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        self.forward_marks.append(self.now())
        out = self.attention(q, k, v, *arguments, **options)
        self.forward_marks.append(self.now())
        return _MarkOutput.apply(self, out)  # type: ignore[no-untyped-call, no-any-return]


class _MarkInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, watched: Watched, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.watched = watched
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.watched.backward_marks.append(ctx.watched.now())
        return None, *gradients


class _MarkOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, watched: Watched, out: Tensor) -> Tensor:
        ctx.watched = watched
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.watched.backward_marks.append(ctx.watched.now())
        return None, gradient


def _of_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As gdpa's operator casts them under autocast."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _refuse_masks(mask: dict[str, Any]) -> None:
    if mask.get("causal", False) or tuple(mask.get("window_size", (-1, -1))) != (-1, -1):
        raise GdpaError(f"window_size: expected none, since this benchmark's baselines have no masks, got {mask}")


def _regular_offsets(batch: int, rows: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * rows

"""Which backend runs a Problem, and why not the others.

Each backend is a module with

    supports(problem) -> None | reason
    forward(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale) -> out
    backward(problem, d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, needs) -> (dq, dk, dv)

and, where its forward (and its backward) is to be called past the operator (gdpa/shortcut.py),

    prepare(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale) -> None | an object whose run(q, k, v, cu_seqlens_q, cu_seqlens_k,
            out_scale) is that forward
    prepare_backward(problem, d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, needs) -> None | the same, run(d_out, q, k, ...), of
            that backward

imported when it is first considered, so that `import gdpa` needs neither a GPU nor Triton.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import NoReturn

from gdpa.errors import BackendUnavailable
from gdpa.problem import Problem

# Fastest first. cpu takes every CPU tensor, so triton (there under its interpreter) runs on one only when named; the
# reference runs anything, and so ends the list.
BACKENDS = ("cpu", "hopper", "triton", "reference")
_MODULES = {
    "hopper": "gdpa.backends.hopper.backend",
    "triton": "gdpa.backends.triton.backend",
    "cpu": "gdpa.backends.cpu",
    "reference": "gdpa.backends.reference",
}


@dataclass(frozen=True)
class Explanation:
    """Which backend a call runs on, and for each of the others the reason why it is not that one."""

    backend: str
    why_not: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"runs on {self.backend}"] + [f"  not on {name}: {reason}" for name, reason in self.why_not.items()]
        return "\n".join(lines)


@cache
def load(name: str) -> ModuleType:
    return importlib.import_module(_MODULES[name])


def check_name(name: str | None) -> None:
    if name is None or name in BACKENDS:
        return
    _fail_unknown(name)


def _fail_unknown(name: str) -> NoReturn:
    close = difflib.get_close_matches(str(name), BACKENDS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise BackendUnavailable(f"backend: expected None or one of {', '.join(BACKENDS)}, got {name!r}{hint}")


# Dynamo calls it as it is, and the error keeps its text; what torch.compiler.assume_constant_result does, without importing Dynamo.
vars(_fail_unknown)["_dynamo_marked_constant"] = True


def reason_against(name: str, problem: Problem) -> str | None:
    """None where the backend runs this problem, else why it does not."""
    reason: str | None = load(name).supports(problem)
    return reason


def choose(problem: Problem, name: str | None = None) -> ModuleType:
    """The module that runs this problem. A backend asked for by name runs or raises; it is never replaced by another."""
    check_name(name)
    for candidate in BACKENDS if name is None else (name,):
        reason = reason_against(candidate, problem)
        if reason is None:
            return load(candidate)
    raise BackendUnavailable(f"backend: {name!r} cannot run this call: {reason}")


def explain(problem: Problem, name: str | None = None) -> Explanation:
    """What `choose` would do, with its reasons."""
    why_not: dict[str, str] = {}
    chosen: str | None = None
    if name is not None:
        choose(problem, name)
        chosen = name
    for candidate in BACKENDS:
        if candidate == chosen:
            continue
        reason = reason_against(candidate, problem)
        if reason is not None:
            why_not[candidate] = reason
        elif chosen is None:
            chosen = candidate
        else:
            why_not[candidate] = f"{chosen} was asked for" if name is not None else f"{chosen} is faster"
    assert chosen is not None, "the reference supports every problem"
    return Explanation(chosen, why_not)

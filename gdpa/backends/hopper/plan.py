"""What the plans of both kernels ask of a problem: how exact its activations must be, how long they are, whether ends need a mask."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gdpa.activations import Activation
from gdpa.backends.gpu import precision_of
from gdpa.device_source import DeviceFunctions
from gdpa.lowering import Precision
from gdpa.problem import Problem
from gdpa.tracing import device_functions

# Of a sequence, packed ones on average, so that few of gelu's scores have the error budget to themselves (gdpa/lowering.py).
MANY_KEYS = 64


def keys_of_a_sequence(problem: Problem) -> int:
    """Packed ones on average."""
    return problem.key_rows // max(problem.batch, 1) if problem.key_side == "packed" else problem.key_rows


def queries_of_a_sequence(problem: Problem) -> int:
    """Packed ones on average."""
    return problem.query_rows // max(problem.batch, 1) if problem.query_side == "packed" else problem.query_rows


def precision_for(problem: Problem) -> Precision:
    """How exact the activations' device code must be. Where results must be the same every time, a sequence's do not depend on how many
    keys others have."""
    many = problem.dtype == torch.float16 and keys_of_a_sequence(problem) >= MANY_KEYS and not problem.deterministic
    return "float16_sm90_many" if many else precision_of(problem.dtype, 90)


def functions_for(problem: Problem) -> DeviceFunctions:
    return device_functions(problem.activations, precision=precision_for(problem), frontend="gluon")


@lru_cache(maxsize=1024)
def instructions(activation: str, precision: Precision) -> int | None:
    """Of f and f' together, for a score; None where they are not known, or masked at a sequence's end."""
    if not Activation.from_key(activation).tail_safe:
        return None
    return device_functions((activation,), precision=precision, frontend="gluon").weighted_instructions


def needs_mask(problem: Problem) -> bool:
    """Whether rows past a sequence's end must be masked."""
    return not all(Activation.from_key(key).tail_safe for key in problem.activations)


def same_offsets(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> bool:
    """Whether every sequence has as many keys as queries, as far as the host can tell: it does not read them."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return False
    alike = cu_seqlens_q.dtype == cu_seqlens_k.dtype and cu_seqlens_q.stride() == cu_seqlens_k.stride()
    return cu_seqlens_q is cu_seqlens_k or (alike and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr())

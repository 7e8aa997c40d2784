"""Libraries that may be installed beside gdpa. None is a dependency: one that cannot be imported says so in its cell.

fa3           flash_attn_interface              FlashAttention 3, softmax
fa4           flash_attn.cute                   FlashAttention 4, softmax
hstu          generative_recommenders           silu(scale * Q K^T) / max_seq_len, its CUTLASS operator
meta-triton   ads_mkl                           Meta's Triton GDPA: f(Q K^T) without a scale on the scores
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from gdpa.bench.cases import Workload, problem_of
from gdpa.bench.providers import Call, Provider
from gdpa.bench.softmax import Packed, Softmax
from gdpa.numerics import Inputs, Results, Verdict, judge


@cache
def function(name: str, *modules: str) -> Callable[..., Any] | str:
    """The function of this name in the first of the modules that can be imported, or why there is none."""
    reason = "not installed"
    for module in modules:
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return found
        except ModuleNotFoundError as error:
            # A package that is there but lacks something says what it lacks.
            if error.name is not None and not module.startswith(error.name):
                reason = f"installed, but {error}"
        except Exception as error:
            # A compiled extension that does not load may raise anything.
            reason = f"installed, but {type(error).__name__}: {str(error).split(chr(10))[0]}"
    return reason


def accepted(callee: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that this release of the function has."""
    known = inspect.signature(callee).parameters
    return {name: value for name, value in arguments.items() if name in known}


def first(result: Any) -> Tensor:
    """The output of a function that may return more beside it."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


class FlashAttention(Softmax):
    """flash_attn_varlen_func on packed tensors."""

    modules: tuple[str, ...]

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        found = function("flash_attn_varlen_func", *self.modules)
        return found if isinstance(found, str) else super().reason_against(workload, gradients)

    def prepare(self, workload: Workload) -> Call:
        found = function("flash_attn_varlen_func", *self.modules)
        assert not isinstance(found, str)
        packed = Packed(workload)
        leaves = packed.leaves()
        cu_seqlens_q, cu_seqlens_k = packed.offsets()
        max_seqlen_q, max_seqlen_k = workload.longest
        # FlashAttention 4's early releases take no max_seqlen.
        lengths = accepted(found, {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
        lengths |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        causal = {"causal": True} if workload.case.causal else {}
        return packed.call(leaves, lambda: first(found(*leaves, **lengths, **causal)))


class FlashAttention3(FlashAttention):
    name = "fa3"
    modules = ("flash_attn_interface",)


class FlashAttention4(FlashAttention):
    name = "fa4"
    modules = ("flash_attn.cute", "flash_attn.cute.interface")


class Hstu(Provider):
    """generative_recommenders' CUTLASS operator."""

    name = "hstu"
    note = "divides by its max_seq_len"
    module = "generative_recommenders.ops.cpp.cuda_hstu_attention"

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        found = function("cuda_hstu_mha", self.module)
        if isinstance(found, str):
            return found
        if workload.activation != "silu":
            return "computes SiLU only"
        if workload.problem.device.type != "cuda":
            return "runs on a CUDA device only"
        if not workload.case.of_itself and "seq_offsets_q" not in inspect.signature(found).parameters:
            return "this release takes one offsets tensor for both sides"
        return None

    def prepare(self, workload: Workload) -> Call:
        found = function("cuda_hstu_mha", self.module)
        assert not isinstance(found, str)
        packed = Packed(workload)
        leaves = packed.leaves()
        q_offsets, k_offsets = packed.offsets()
        longest_q, longest_k = workload.longest
        arguments: dict[str, Any] = {"seq_offsets": k_offsets, "causal": workload.case.causal}
        if not workload.case.of_itself:
            arguments |= {"max_q_len": longest_q, "seq_offsets_q": q_offsets}
        scale = workload.problem.scale
        return packed.call(leaves, lambda: first(found(longest_k, scale, *leaves, **arguments)))

    def judge(self, workload: Workload, inputs: Inputs, d_out: Tensor | None, results: Results) -> list[Verdict]:
        problem = problem_of(inputs, workload.activation, workload.case.causal)
        problem = replace(problem, out_scale=1 / workload.longest[1])
        return judge(problem, inputs, d_out, results)


# gdpa's name -> Meta's.
META_ACTIVATIONS = {
    "identity": "raw",
    "gelu": "gelu",
    "gelu_tanh": "fast_gelu",
    "silu": "fast_silu",
    "relu": "relu",
    "relu2": "relu_square",
    "leaky_relu": "leaky_relu",
    "hardswish": "hardswish",
}


class MetaTriton(Provider):
    """ads_mkl's generalized_dot_product_attention. Its qk_scale multiplies P, so the scores are left unscaled."""

    name = "meta-triton"
    note = "scores not scaled"
    modules = (
        "ads_mkl.ops.oss.gdpa.triton.triton_generalized_dot_product_attention",
        "ads_mkl.ops.cute_dsl.gdpa.triton.triton_generalized_dot_product_attention",
    )

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        found = function("generalized_dot_product_attention", *self.modules)
        if isinstance(found, str):
            return found
        if workload.activation not in META_ACTIVATIONS:
            return f"has no {workload.activation}"
        if workload.case.causal:
            return "has no causal mask"
        if workload.problem.device.type != "cuda":
            return "runs on a CUDA device only"
        return None

    def prepare(self, workload: Workload) -> Call:
        found = function("generalized_dot_product_attention", *self.modules)
        assert not isinstance(found, str)
        packed = Packed(workload)
        leaves = packed.leaves()
        arguments = (*packed.offsets(), *workload.longest)
        activation = META_ACTIVATIONS[workload.activation]
        return packed.call(leaves, lambda: first(found(*leaves, *arguments, activation=activation, qk_scale=1.0)))

    def judge(self, workload: Workload, inputs: Inputs, d_out: Tensor | None, results: Results) -> list[Verdict]:
        return judge(replace(problem_of(inputs, workload.activation), scale=1.0), inputs, d_out, results)

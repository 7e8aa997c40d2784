"""torch.compile of parts of a model, each compiled once for all layers that are alike, so that a deep model compiles as fast as one layer.

A module names its regions: methods without a call of the operator, tensors in and tensors out, which a compiler can join into few
kernels. Between them the operator, and every other kernel that is not the compiler's, is called as ever, so that what computes the
attention may be exchanged without compiling anew.

A model names its stages: methods that run a whole layer, the calls of the operator inside. There are few of them, and what a call of
compiled code costs the host, which at small batches is more than the device takes, is paid as many times; gradients of branches are
added where they are computed. The modules of a layer are arguments of its stage.

Outputs of either are tensors of their own, or at most one view of an intermediate: autograd adds up the gradients of several views of one
tensor outside the compiled code, each padded to that tensor's size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# Sizes of 0 and 1 would each be compiled for, since a symbolic size stands for at least 2.
LEAST_SIZE = 2


def compile_regions(module: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile the regions of a module and of the modules in it, for sizes that may change from call to call.

    A region is compiled when it is first called, once for all modules of its class and shapes; anew under autocast, and without
    gradients. Parameters and state dicts stay as they are; a module with compiled regions is not pickled.

    Args:
        module: any; those of `gdpa.nn` and `gdpa.models` have regions. What is inside a module that is a region as a whole is part of it.
        backend: of torch.compile.

    Returns:
        How many regions there are.

    Example:
        >>> from gdpa.nn import PFFN
        >>> compile_regions(PFFN(64, 4, hidden=32, context_width=48))
        2
    """
    names: tuple[str, ...] = getattr(type(module), "regions", ())
    for name in names:
        method = getattr(type(module), name)
        shapes = tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters())
        module.__dict__[name] = _Region(module, method, _compiled(method, shapes, backend))
    inside = () if "forward" in names else module.children()
    return len(names) + sum(compile_regions(child, backend=backend) for child in inside)


def compile_stages(module: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile the stages of a model's dense part, for sizes that may change from call to call; see `compile_regions`.

    Compiled anew for another `backend` of the attention. Modules whose `operator` is not `gdpa.attention_varlen`, and those that
    `fully_shard` has put hooks on, want `compile_regions`.

    Returns:
        How many stages there are.
    """
    names: tuple[str, ...] = getattr(type(module), "stages", ())
    for name in names:
        method = getattr(type(module), name)
        shapes = tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters())
        module.__dict__[name] = _Stage(module, method, shapes, backend)
    return len(names) + sum(compile_stages(child, backend=backend) for child in module.children())


def plain_regions(module: nn.Module) -> None:
    """Undo `compile_regions`."""
    _remove(module, "regions")


def plain_stages(module: nn.Module) -> None:
    """Undo `compile_stages`."""
    _remove(module, "stages")


def _remove(module: nn.Module, kind: str) -> None:
    for child in module.modules():
        for name in getattr(type(child), kind, ()):
            child.__dict__.pop(name, None)


def _options() -> dict[str, Any]:
    """An analysis of torch 2.11 fails on some graphs with symbolic sizes, for which it does nothing anyway (`get_pw_red_splits` in
    InterFormer)."""
    from torch._inductor import config

    return {"triton.coalesce_tiling_analysis": False} if hasattr(config.triton, "coalesce_tiling_analysis") else {}


@cache
def _compiled(method: FunctionType, shapes: Hashable, backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The method, compiled. Each set of shapes has a code object of its own, by which torch counts how often it compiles anew: it
    refuses after 8, and a model may have more sizes than that."""
    own = FunctionType(method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=True, backend=backend, options=_options() if backend == "inductor" else None)


class _Region:
    """A method in the place of the module's own."""

    def __init__(self, module: nn.Module, method: FunctionType, compiled: Callable[..., Any]) -> None:
        self.module, self.method, self.compiled = module, method, compiled

    def __call__(self, *arguments: Any) -> Any:
        # A compiler that is at work already takes the plain method into its own graph.
        plain = torch.compiler.is_compiling() or any(map(_small, arguments))
        return (self.method if plain else self.compiled)(self.module, *arguments)


class _Stage:
    """A method in the place of the module's own, whose arguments are modules too."""

    def __init__(self, module: nn.Module, method: FunctionType, shapes: Hashable, backend: str | Callable[..., Any]) -> None:
        self.module, self.method, self.shapes, self.backend = module, method, shapes, backend

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or any(map(_small, arguments)):
            return self.method(self.module, *arguments)
        return _compiled(self.method, (self.shapes, _kind(arguments)), self.backend)(self.module, *arguments)


def _kind(argument: Any) -> Any:
    """Layers of other modules have code of their own, see `_compiled`."""
    return tuple(map(_kind, argument)) if isinstance(argument, tuple) else type(argument)


def _small(argument: Any) -> bool:
    if isinstance(argument, Tensor):
        return argument.dim() > 0 and argument.shape[0] < LEAST_SIZE
    return isinstance(argument, tuple) and any(map(_small, argument))

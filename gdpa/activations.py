"""Activations: the built-in table, user-written ones, and what the public API accepts as `activation`."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, get_args

import torch
from torch.nn import functional

from gdpa.errors import GdpaError
from gdpa.expression import HEADER, Expression, parse
from gdpa.fingerprint import captures, fingerprint
from gdpa.graph import parse_graph
from gdpa.lowering import Precision
from gdpa.spelling import spelled

Function = Callable[[torch.Tensor], Any]

# The largest magnitude that every dtype of P can hold (float16's).
_LARGEST = 65504.0


@dataclass(frozen=True)
class _BuiltIn:
    """A named activation.

    `joint` is the text of the graph that tracing `function` yields (the tests hold it to that), kept here so that
    naming an activation costs no tracing. `shorter` is one with the same results in fewer operations, or None.
    """

    function: Function
    joint: str
    shorter: str | None = None


def _identity(s: torch.Tensor) -> torch.Tensor:
    return s


def _relu2(s: torch.Tensor) -> torch.Tensor:
    return functional.relu(s) ** 2


def _gelu_tanh(s: torch.Tensor) -> torch.Tensor:
    return functional.gelu(s, approximate="tanh")


_BUILT_INS: dict[str, _BuiltIn] = {
    "identity": _BuiltIn(_identity, "-> s, 1.0"),
    "relu": _BuiltIn(functional.relu, "t0=relu(s); t1=threshold_backward(1.0,t0,0.0); -> t0, t1"),
    "relu2": _BuiltIn(
        _relu2,
        "t0=relu(s); t1=pow(t0,2.0); t2=mul(t0,2.0); t3=threshold_backward(t2,t0,0.0); -> t1, t3",
        # Where relu is 0 its double already is.
        shorter="t0=relu(s); t1=mul(t0,t0); t2=add(t0,t0); -> t1, t2",
    ),
    "leaky_relu": _BuiltIn(functional.leaky_relu, "t0=leaky_relu(s,0.01); t1=leaky_relu_backward(1.0,s,0.01); -> t0, t1"),
    "gelu": _BuiltIn(functional.gelu, "t0=gelu(s); t1=gelu_backward(1.0,s); -> t0, t1"),
    "gelu_tanh": _BuiltIn(_gelu_tanh, "t0=gelu_tanh(s); t1=gelu_tanh_backward(1.0,s); -> t0, t1"),
    "silu": _BuiltIn(functional.silu, "t0=silu(s); t1=silu_backward(1.0,s); -> t0, t1"),
    "sigmoid": _BuiltIn(torch.sigmoid, "t0=sigmoid(s); t1=sigmoid_backward(1.0,t0); -> t0, t1"),
    "tanh": _BuiltIn(torch.tanh, "t0=tanh(s); t1=tanh_backward(1.0,t0); -> t0, t1"),
    "softplus": _BuiltIn(functional.softplus, "t0=softplus(s,1.0,20.0); t1=softplus_backward(1.0,s,1.0,20.0); -> t0, t1"),
    "elu": _BuiltIn(functional.elu, "t0=elu(s,1.0,1.0,1.0); t1=elu_backward(1.0,s,1.0,1.0,1.0); -> t0, t1"),
    "hardswish": _BuiltIn(functional.hardswish, "t0=hardswish(s); t1=hardswish_backward(1.0,s); -> t0, t1"),
    "exp": _BuiltIn(torch.exp, "t0=exp(s); -> t0, t0"),
}


def activations() -> tuple[str, ...]:
    """The names that `activation` accepts."""
    return tuple(_BUILT_INS)


@lru_cache(maxsize=1024)
def _expression(key: str) -> Expression:
    built_in = _BUILT_INS.get(key)
    if built_in is None:
        return parse(key)
    shorter = None if built_in.shorter is None else parse_graph(built_in.shorter)
    return Expression(parse_graph(built_in.joint), shorter)


def _unknown(name: str) -> GdpaError:
    near = difflib.get_close_matches(name.lower(), activations(), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return GdpaError(f"activation: unknown name {name!r:.80}.{hint} Names: {', '.join(activations())}.")


class Activation:
    """An elementwise activation f with its derivative, as attention takes it.

    Args:
        fn: a function of a float tensor that returns one of the same shape, built of elementwise torch operations and
            numbers; or a built-in name; or another Activation. Numbers that it reads are frozen here, and so is what it reads of its
            argument's dtype: it is called with float32.
        name: what to call it; by default the function's own name.

    Attributes:
        key: a text that holds the whole expression (a built-in's name); equal keys are equal activations.
        name: the name.

    Raises:
        UnsupportedActivation: `fn` cannot be translated; the message names the operation and lists what can be used.
        GdpaError: `fn` is an unknown name, or neither a name nor a callable.

    Example:
        >>> squared = Activation(lambda s: torch.relu(s) ** 2 / 64, name="squared")
        >>> squared(torch.tensor([-1.0, 8.0]))
        tensor([0., 1.])
    """

    __slots__ = ("key", "name")

    key: str
    name: str

    def __init__(self, fn: str | Activation | Function, name: str | None = None) -> None:
        if name is not None and not isinstance(name, str):
            raise GdpaError(f"name: expected a string or None, got {name!r}")
        if isinstance(fn, Activation):
            self._fill(fn.key, name or fn.name)
        elif isinstance(fn, str):
            if fn not in _BUILT_INS and not fn.startswith(HEADER):
                raise _unknown(fn)
            self._fill(fn, name)
        elif callable(fn):
            compiling = torch.compiler.is_dynamo_compiling()
            if compiling and _has_state(fn):  # built where the graph ends, outside of what is compiled; refused under fullgraph
                torch._dynamo.graph_break(_CAPTURES.format("state or closure variables"))
                compiling = False
            key = _key(fn) if compiling else _traced_key(fn)
            self._fill(key, name or str(getattr(fn, "__name__", type(fn).__name__)))
        else:
            raise GdpaError(f"fn: expected a callable, a name or an Activation, got {type(fn).__name__}")

    def _fill(self, key: str, name: str | None) -> None:
        called = _called(key, name)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "name", called)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Activation cannot be changed, got an assignment to {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an Activation cannot be changed, got a deletion of {name!r}")

    @classmethod
    def from_key(cls, key: str) -> Activation:
        """The activation whose `key` this is, a built-in's name included; raises GdpaError where it is malformed."""
        return _from_key(key)

    @property
    def tail_safe(self) -> bool:
        """f(0) and f'(0) are finite and at most 65504 in magnitude, so they fit every dtype of P.

        Found when asked: inside torch.export, where a callable may be traced, tensors have no values to look at.
        """
        return _tail_safe(self.key)

    @property
    def gdpa_fingerprint(self) -> str:
        """What `gdpa.fingerprint` knows it by inside a function that calls it."""
        return self.key

    @property
    def expression(self) -> Expression:
        """The graphs of f and f'."""
        return _expression(self.key)

    def __call__(self, s: torch.Tensor) -> torch.Tensor:
        """f(s), any float dtype, shape and device; differentiable, and compiled with what is around it by torch.compile."""
        if torch.compiler.is_dynamo_compiling():  # which need not follow how an expression is found and evaluated
            result: torch.Tensor = torch.ops.gdpa.activation.default(s, self.key)
            return result
        return _expression(self.key).value(s)

    def value_and_derivative(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(f(s), f'(s)), any float dtype, shape and device; outside autograd."""
        if torch.compiler.is_dynamo_compiling():
            value, derivative = torch.ops.gdpa.activation_pair.default(s, self.key)
            return value, derivative
        return _expression(self.key).value_and_derivative(s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activation) and self.key == other.key

    def __hash__(self) -> int:
        return hash(getattr(self, "key", None))  # Dynamo asks for it while __init__ runs

    def __repr__(self) -> str:
        return f"Activation({self.name}: {_expression(self.key).formula})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.key, self.name)


def _traced_key(fn: Function) -> str:
    from gdpa.tracing import trace  # its torch.fx is not needed for names

    return trace(fn).key


def _restore(key: str, name: str) -> Activation:
    return Activation(key, name)


@lru_cache(maxsize=1024)
def _from_key(key: str) -> Activation:
    return Activation(key)


@lru_cache(maxsize=1024)
def _tail_safe(key: str) -> bool:
    zeros = torch.tensor([0.0, -0.0])
    expression = _expression(key)
    results = [*expression.value_and_derivative(zeros.double())]
    # And as the kernels compute it, in fp32: exp(100) is infinite there, and what its reciprocal is multiplied with is not a number.
    for precision in get_args(Precision):
        for graph in (expression.pair_for(precision), expression.value_for(precision)):
            steps = spelled(graph, precision).flushed()
            # A device may make zeros, whose logarithms are infinite, of numbers too small to be normal.
            results += [*steps.evaluate(zeros), *steps.evaluate(zeros, flushing=True)]
    return all(bool((x.abs() <= _LARGEST).all()) for x in results)


def resolve(activation: Any, heads: int) -> tuple[str, ...]:
    """The keys of what a caller passed as `activation`: one for all heads, or one for each.

    A bare callable is traced at its first use; later calls remember it by its code and the values it captures, so a
    captured number that has changed is seen. Where those cannot be told (a module, a bound method) it is traced anew.
    Under torch.compile a callable may capture nothing, since Dynamo would not notice a change.

    Args:
        activation: a name, an Activation, a callable, or a list or tuple of `heads` of these.
        heads: the number of query heads.

    Raises:
        GdpaError: it is none of these, a name is unknown, the list does not have `heads` entries, or, while compiling,
            a callable captures something.
        UnsupportedActivation: a callable cannot be translated.
    """
    if not isinstance(activation, (list, tuple)):
        return (_key(activation),)
    if len(activation) != heads:
        _fail_length(len(activation), None if torch.compiler.is_dynamo_compiling() else heads)
    keys = tuple([_key(entry) for entry in activation])
    for key in keys:
        if key != keys[0]:
            return keys
    return keys[:1]


def _key(entry: Any) -> str:
    if isinstance(entry, Activation):
        return entry.key
    if isinstance(entry, str):
        if entry not in _BUILT_INS and not entry.startswith(HEADER):
            _fail_unknown(entry)
        return entry
    if not callable(entry):
        _fail(
            "activation: expected a name, an Activation, a callable or a list of these, one per query head, "
            f"got {type(entry).__name__}"
        )
    if torch.compiler.is_dynamo_compiling():
        if _has_state(entry):
            _fail_capture("closure variables" if isinstance(entry, types.FunctionType) else "an object with state")
        return _compiled_key(entry)
    return _callable_key(entry)


def _has_state(fn: Function) -> bool:
    """Whether Dynamo, which reads this, would have to hand more than a function to those that it calls."""
    if isinstance(fn, types.FunctionType):
        return bool(fn.__code__.co_freevars)
    return isinstance(fn, (torch.nn.Module, functools.partial, types.MethodType))


_MEMO_SIZE = 1024
_memo: dict[Hashable, str] = {}


def _callable_key(fn: Function) -> str:
    captured = fingerprint(fn)
    if captured is None:
        return Activation(fn).key
    key = _memo.get(captured)
    if key is None:
        key = Activation(fn).key
        while len(_memo) >= _MEMO_SIZE:
            _memo.pop(next(iter(_memo), None), None)
        _memo[captured] = key
    return key


# Dynamo calls the functions below as they are while it compiles, and takes what they return for constant. Errors raised
# in them keep their text; those that Dynamo sees raised in the code it reads do not.


def _called(key: str, name: str | None) -> str:
    """The name of an activation with this key, which is refused where it is malformed."""
    expression = _expression(key)
    return name or (key if key in _BUILT_INS else expression.formula)


def _compiled_key(fn: Function) -> str:
    if isinstance(fn, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        _fail(
            f"activation: a method of a class ({fn.__qualname__}) is not accepted inside torch.compile, which would not notice "
            f"another one in its place; expected a function, such as torch.{fn.__name__.strip('_')}, or lambda s: s.{fn.__name__}()"
        )
    captured = captures(fn)
    if captured is not None:
        _fail_capture(captured)
    return _callable_key(fn)


def _fail(message: str) -> NoReturn:
    raise GdpaError(message)


def _fail_length(length: int, heads: int | None) -> NoReturn:
    # None: a number that Dynamo carries as a symbol is no constant.
    expected = "one" if heads is None else f"{heads}, one"
    raise GdpaError(f"activation: expected one activation or {expected} per query head, got a list of {length}")


def _fail_unknown(name: str) -> NoReturn:
    raise _unknown(name)


_CAPTURES = (
    "activation: a callable that captures values ({}) is not accepted inside torch.compile, which would not "
    "notice a change of them; build gdpa.Activation(fn) outside the compiled region and pass that"
)


def _fail_capture(what: str) -> NoReturn:
    raise GdpaError(_CAPTURES.format(what))


for _constant in (_called, _compiled_key, _fail, _fail_length, _fail_unknown, _fail_capture):
    # What torch.compiler.assume_constant_result does, without importing Dynamo, which takes a second.
    vars(_constant)["_dynamo_marked_constant"] = True

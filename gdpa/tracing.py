"""A Python function of the scores -> an `Expression` of f and f'.

`trace` runs the function under torch's tracer (`make_fx`), first alone, which decides whether it can be translated,
then together with `torch.autograd.grad`, which yields the graph of (f, f') with torch's own derivatives.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx import _symbolic_trace
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from gdpa.errors import UnsupportedActivation
from gdpa.expression import Expression, parse
from gdpa.graph import OPERATIONS, SCORE, Builder, Graph, Operand, Ref, pruned
from gdpa.lowering import Precision

if TYPE_CHECKING:
    from gdpa.device_source import DeviceFunctions

__all__ = ["Expression", "device_functions", "parse", "trace"]

USABLE = (
    "arithmetic (+ - * / **) with numbers, exp, exp2, expm1, log, log2, log10, log1p, sqrt, rsqrt, reciprocal, tanh, "
    "sinh, cosh, sigmoid, erf, erfc, sin, cos, tan, abs, sign, neg, floor, ceil, round, trunc, square, pow, maximum, "
    "minimum, clamp, where, masked_fill, comparisons, logical and/or/not, zeros_like, ones_like, full_like, and the "
    "elementwise activations of torch.nn.functional"
)

# make_fx patches process-wide state while it traces.
_LOCK = threading.RLock()


def _renew_lock() -> None:
    """A child process has no thread that would give back a lock held when it was forked."""
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def trace(fn: Callable[[torch.Tensor], Any]) -> Expression:
    """The expression of `fn` and of its derivative.

    `fn` takes a float tensor and returns one of the same shape and dtype, or a constant; it is called a few times,
    on small float32 CPU tensors. Numbers it reads are frozen into the result.

    Raises:
        UnsupportedActivation: `fn` does something that is not elementwise and deterministic in its argument; the
            message names the operation and lists what can be used.
    """
    if "torch._dynamo" not in sys.modules:
        return _trace(fn)
    # Where it has broken off a graph, it would compile what is called here too, and not be told meanwhile how compiled functions run.
    expression: Expression = torch.compiler.disable(_trace)(fn)
    return expression


def _trace(fn: Callable[[torch.Tensor], Any]) -> Expression:
    with _LOCK, _isolated():
        _keep_stand_in()
        recorded, result = _record(fn)
        value = _Translation(recorded).graph
        _check_result(result)
        if isinstance(value.outputs[0], Ref):
            recorded, _ = _record(fn, derivative=True)
            expression = Expression(_Translation(recorded, allow_mutation=True).graph)
        else:
            expression = Expression(Graph((), (value.outputs[0], 0.0)))
        _verify(fn, expression, value)
    return expression


def device_functions(keys: tuple[str, ...], *, precision: Precision = "float32", frontend: str = "triton") -> DeviceFunctions:
    """Triton device code of the activations `keys`; see `gdpa.device_source.device_functions`."""
    from gdpa.device_source import device_functions as generate  # needs Triton, which this module does not

    return generate(keys, precision=precision, frontend=frontend)


def _refuse(what: str) -> UnsupportedActivation:
    return UnsupportedActivation(f"activation: {what}. An activation can use {USABLE}.")


@contextmanager
def _isolated() -> Iterator[None]:
    """Trace the same expression whatever surrounds the call: no_grad, autocast, a default device or dtype, dispatch modes, modes of torch
    functions (torch.export's would write the autocast below into its program), anomaly mode, hooks on saved tensors (checkpointing has
    some, which would count the trace's tensors among the caller's), transforms of torch.func. Compiled functions run as what was
    compiled: compiled inside a trace, Dynamo's own looks at tensors would pass for the function's. Other threads' do meanwhile, too."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
        if torch._C._are_functorch_transforms_active():
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch.get_default_dtype() != torch.float32:  # of the whole process: other threads see it too
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        yield


def _call(fn: Callable[[torch.Tensor], Any], s: torch.Tensor) -> Any:
    """fn(s), with what fn itself raises wrapped."""
    try:
        return fn(s)
    except UnsupportedActivation:
        raise
    except Exception as error:
        raise _refuse(f"calling it on a float32 tensor raised {type(error).__name__}: {error}") from error


_SHAPE = (3, 3)


def _record(fn: Callable[[torch.Tensor], Any], *, derivative: bool = False) -> tuple[torch.fx.Graph, Any]:
    """The fx graph of `fn`, with its derivative as a second output if asked for, and what `fn` returned."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy, which takes a second or two

    returned: list[Any] = []
    detaches: list[bool] = []

    def traced(s: torch.Tensor) -> tuple[Any, ...]:
        _say_that_nothing_is_traced()
        with _Watch(s) as watch:
            value = _call(fn, s)
        detaches.append(watch.detaches)
        if isinstance(value, bool) or not isinstance(value, (torch.Tensor, int, float)):
            raise _refuse(f"it must return one float tensor of the shape of its argument, got {type(value).__name__}")
        returned.append(value)
        if not derivative:
            return (value,)
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value, 0.0
        (slope,) = torch.autograd.grad(value, s, torch.ones_like(value), allow_unused=True)
        return value, 0.0 if slope is None else slope

    sample = torch.linspace(0.125, 1.0, 9, dtype=torch.float32).reshape(_SHAPE).requires_grad_(derivative)
    graph: torch.fx.Graph = make_fx(traced)(sample).graph
    if detaches[0]:
        for node in graph.nodes:
            if node.target is torch.ops.aten.alias.default:  # how torch 2.15 records it
                node.target = torch.ops.aten.detach.default
    return graph, returned[0]


@cache
def _keep_stand_in() -> None:
    """Keep from crashing what is traced or compiled after a thread that traced has ended.

    Where torch is built for GPUs and finds none, the first FakeTensorMode (make_fx enters some) puts a stand-in for the GPU's device
    guard into the process's registry. Torch 2.11 frees it with the thread that put it there, and the next mode reads it. So one that
    stays puts it.
    """
    if torch.__version__ >= (2, 12) or torch.cuda.is_available():  # type: ignore[operator]  # a TorchVersion
        return
    if threading.current_thread() is threading.main_thread():
        torch._C._ensureCUDADeviceGuardSet()
        return
    is_there = threading.Event()

    def put_and_stay() -> None:
        try:
            torch._C._ensureCUDADeviceGuardSet()
        finally:
            is_there.set()
        threading.Event().wait()

    threading.Thread(target=put_and_stay, name="gdpa-keeps-device-guard", daemon=True).start()
    is_there.wait()


def _say_that_nothing_is_traced() -> None:
    """make_fx has just set a flag by which compiled functions refuse to run: up to torch 2.13 of the process, so other threads' too."""
    if hasattr(_symbolic_trace, "_is_fx_tracing_flag"):
        _symbolic_trace._is_fx_tracing_flag = False
    elif hasattr(_symbolic_trace, "_set_is_fx_tracing"):
        _symbolic_trace._set_is_fx_tracing(False)


def _check_result(result: Any) -> None:
    if not isinstance(result, torch.Tensor):
        return
    if result.dtype is not torch.float32 and result.dim():
        hint = "; write .to(s.dtype)" if result.dtype is torch.bool else ""
        raise _refuse(f"it must return the dtype of its argument (float32 while tracing), got {result.dtype}{hint}")
    if result.dim() and result.shape != _SHAPE:
        raise _refuse("its result does not have the shape of its argument")


def _verify(fn: Callable[[torch.Tensor], Any], expression: Expression, alone: Graph) -> None:
    """Refuse a function whose graph does not reproduce it: state, hidden randomness, a hand-written backward, another function where no
    gradient is wanted, which `alone` was recorded of."""
    points = [-30.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 6.0, 30.0]
    s = torch.tensor(points, dtype=torch.float32).requires_grad_()

    def slope(value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            return torch.zeros_like(s)
        (result,) = torch.autograd.grad(value, s, torch.ones_like(value), allow_unused=True)
        return torch.zeros_like(s) if result is None else result

    again = torch.as_tensor(_call(fn, s))
    again = again if again.dim() else again.to(s.dtype).expand_as(s)  # a constant
    value, derivative = expression.value_and_derivative(s.detach())
    pairs = [(again, value), (slope(again), derivative), (slope(expression.value(s)), derivative)]
    pairs.append((alone.evaluate(s.detach())[0], value))
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs):
        raise _refuse(
            "calling it again, or differentiating its operations, gave other numbers. It may keep state, draw random "
            "numbers, switch gradients off or define its own backward"
        )


class _Watch(TorchFunctionMode):
    """Refuses what must be caught where the function's own code does it: shape reads, branches, captured tensors."""

    _READABLE = frozenset({"dtype", "device", "layout", "requires_grad"})
    _SHAPE = frozenset({"size", "numel", "nelement", "dim", "ndimension", "stride", "__len__", "element_size"})
    _SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "T", "mT", "H", "mH", "nbytes", "itemsize"})
    _VALUES = frozenset({"__bool__", "__float__", "__int__", "__index__", "__complex__", "item", "tolist", "numpy"})
    _VALUES |= {"is_nonzero", "__array__", "equal", "allclose", "__contains__", "nonzero", "__iter__"}

    def __init__(self, s: torch.Tensor) -> None:
        super().__init__()
        self._made = [s]  # kept alive, so that an id stays that of one tensor
        self._ids = {id(s)}
        self.detaches = False  # whether the function uses Tensor.detach

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._ids:
                kind = "parameter" if isinstance(leaf, torch.nn.Parameter) else "tensor"
                raise _refuse(f"it uses a captured {kind} (in {name}); only numbers can be captured")
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "?")
            if attribute in self._SHAPE_ATTRIBUTES:
                raise _refuse(f"it reads the shape of its argument (Tensor.{attribute})")
            if attribute not in self._READABLE or name == "__set__":
                raise _refuse(f"it uses Tensor.{attribute}")
        elif name in self._SHAPE:
            raise _refuse(f"it reads the shape of its argument (Tensor.{name})")
        elif name in self._VALUES:
            raise _refuse(
                f"it reads values of its argument (Tensor.{name}): control flow that depends on data cannot be "
                "translated, use torch.where"
            )
        self.detaches |= name == "detach"
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._ids:
                self._made.append(leaf)
                self._ids.add(id(leaf))
        return result


_RANDOM = torch.Tag.nondeterministic_seeded
_MATRIX = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "dot", "vdot", "convolution", "linear"})
_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "norm", "linalg_vector_norm", "logsumexp"}
    | {"softmax", "log_softmax", "cumsum", "cumprod", "any", "all", "argmax", "argmin", "sort", "topk", "median"}
    | {"var_mean", "std_mean", "native_layer_norm", "native_group_norm", "aminmax", "logcumsumexp", "nansum"}
)
# aten's names for operations of the vocabulary.
_RENAMED = {"sgn": "sign", "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_not": "logical_not"}
# Exact on the small integers that arithmetic on booleans yields, so those are carried as floats.
_ON_INTEGERS = frozenset({"add", "sub", "mul", "rsub", "neg", "where", "_to_copy", "scalar_tensor", "lift_fresh_copy"})
_ON_INTEGERS |= {"full_like", "zeros_like", "ones_like", "full", "zeros", "ones", "detach", "clone", "pow"}


class _Translation:
    """An fx graph of aten operations -> a torch-level `Graph`.

    `allow_mutation` is for graphs that contain a derivative: autograd works in place on temporaries of its own. A
    function's own in-place operations are refused in the graph of the function alone.
    """

    def __init__(self, recorded: torch.fx.Graph, *, allow_mutation: bool = False) -> None:
        self._allow_mutation = allow_mutation
        self._builder = Builder()
        self._operands: dict[torch.fx.Node, Operand] = {}
        self._forward = _ancestors(recorded, 1)
        self.graph = self._run(recorded)

    def _run(self, recorded: torch.fx.Graph) -> Graph:
        for node in recorded.nodes:
            # First, because what leads up to them (an empty tensor to fill) cannot be translated either.
            if _RANDOM in getattr(node.target, "tags", ()) and not _is_settled_rrelu(node):
                raise _refuse(f"it draws random numbers ({node.target.overloadpacket.__name__.strip('_')})")
        # Autograd may leave something behind that nothing is made of: that of sgn looks at shapes on a device of their own.
        needed = _ancestors(recorded, None) if self._allow_mutation else set(recorded.nodes)
        for node in recorded.nodes:
            if node.op == "call_function" and node not in needed and not _mutates(node):
                continue
            if all(_is_settled_rrelu(user) for user in node.users) and _name(node) == "empty_like":
                self._operands[node] = 0.0  # the noise, which it does not read
            elif node.op == "placeholder":
                self._operands[node] = SCORE
            elif node.op == "output":
                outputs = [self._float(self._find(x)) for x in node.args[0]]
                return pruned(self._builder.statements, outputs)
            elif node.op == "get_attr":
                constant = getattr(recorded.owning_module, node.target)
                # What is made inside the function passes through lift_fresh; a captured tensor does not.
                if any("lift_fresh" not in str(user.target) for user in node.users) or constant.dim():
                    raise _refuse("it uses a captured tensor, or makes one that has a shape")
                self._operands[node] = _number(constant.item())
            elif node.target is operator.getitem:
                if node.args[1] == 0:
                    self._operands[node] = self._find(node.args[0])
            else:
                self._operands[node] = self._call(node)
        raise AssertionError("a traced graph ends with its output")

    def _find(self, argument: Any) -> Operand:
        if isinstance(argument, torch.fx.Node):
            return self._operands[argument]
        return _number(argument)

    def _float(self, operand: Operand) -> Operand:
        return self._builder.emit("to_float", operand) if self._builder.kind(operand) == "b" else operand

    def _call(self, node: torch.fx.Node) -> Operand:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        schema = target._schema
        name = target.overloadpacket.__name__
        if _mutates(node):
            if not self._allow_mutation:
                raise _refuse(f"it works in place ({name})")
            name = name.removesuffix("_")
        arguments = {a.name: a.default_value if a.has_default_value() else None for a in schema.arguments}
        arguments |= dict(zip(arguments, node.args, strict=False)) | node.kwargs
        self._check_result_type(node, name)
        result: Operand
        method = getattr(self, f"_on_{name}", None)
        if node not in self._forward and (name == "detach" or _is_same_shape(node)):
            result = self._find(node.args[0])  # autograd's own, around what it saves, or to be sure of a shape
        elif method is not None:
            result = method(arguments)
        elif _RENAMED.get(name, name) in OPERATIONS:
            result = self._plain(_RENAMED.get(name, name), target, arguments)
        else:
            raise self._unsupported(name, target)
        if _mutates(node):
            self._operands[node.args[0]] = result  # type: ignore[index]
        return result

    def _check_result_type(self, node: torch.fx.Node, name: str) -> None:
        result = node.meta.get("val")
        if not isinstance(result, torch.Tensor) or not result.dim():
            return  # 0-dimensional: a constant; several: the operation's own method knows
        if result.dtype is torch.float32 or result.dtype is torch.bool:
            return
        if result.dtype is torch.int64 and name in _ON_INTEGERS:
            return
        what = "a cast" if name == "_to_copy" else name
        raise _refuse(f"{what} yields {result.dtype}: scores stay in the dtype of the argument (float32 while tracing)")

    def _unsupported(self, name: str, target: torch._ops.OpOverload) -> UnsupportedActivation:
        plain = name.strip("_")
        if plain in _MATRIX:
            return _refuse(f"{plain} is a matrix product, not an elementwise operation")
        if plain in _REDUCTIONS:
            return _refuse(f"{plain} is a reduction, not an elementwise operation")
        if any(r.alias_info is not None for r in target._schema.returns) or plain in ("cat", "stack", "reshape_copy"):
            return _refuse(f"{plain} changes the shape of, or views, its argument")
        return _refuse(f"the operation {plain} cannot be translated")

    def _plain(self, name: str, target: torch._ops.OpOverload, arguments: dict[str, Any]) -> Operand:
        operation = OPERATIONS[name]
        values = list(arguments.values())[: len(operation.operands)]
        extra = list(arguments)[len(operation.operands) :]
        if any(arguments[x] not in (None, False) for x in extra) or len(values) < len(operation.operands):
            raise _refuse(f"{name} with {', '.join(extra)} cannot be translated")
        operands = []
        for value, kind in zip(values, operation.operands, strict=True):
            operand = self._find(value)
            if kind == "f":
                operand = self._float(operand)
            elif kind == "b" and self._builder.kind(operand) != "b":
                operand = self._builder.emit("ne", operand, 0.0)
            elif kind == "n" and isinstance(operand, Ref):
                raise _refuse(f"{name} takes numbers only, besides its argument")
            operands.append(float(operand) if kind == "n" and not isinstance(operand, Ref) else operand)
        return self._builder.emit(name, *operands)

    # Operations whose arguments are not simply the operands, by aten's name.

    def _identity(self, arguments: dict[str, Any]) -> Operand:
        return self._find(next(iter(arguments.values())))

    _on_clone = _on_alias = _on_lift_fresh = _on_lift_fresh_copy = _identity

    def _on__to_copy(self, arguments: dict[str, Any]) -> Operand:
        operand, dtype = self._find(arguments["self"]), arguments["dtype"]
        if dtype is torch.int64 and self._builder.kind(operand) == "f":
            raise _refuse("a cast of the scores to torch.int64 cannot be translated; use floor, ceil, round or trunc")
        return self._cast(operand, dtype)

    def _cast(self, operand: Operand, dtype: torch.dtype | None) -> Operand:
        if dtype is torch.bool:
            return operand if self._builder.kind(operand) == "b" else self._builder.emit("ne", operand, 0.0)
        return self._float(operand) if dtype is not None else operand

    def _constant(self, value: Any, arguments: dict[str, Any], like: bool) -> Operand:
        size = arguments.get("size")
        if not like and size:
            raise _refuse("it makes a tensor that has a shape; use a number, or zeros_like, ones_like, full_like")
        operand = self._find(value)
        if isinstance(operand, Ref):
            raise _refuse("full_like takes a number")
        return self._cast(operand, arguments.get("dtype"))

    def _on_zeros_like(self, arguments: dict[str, Any]) -> Operand:
        return self._constant(0.0, arguments, like=True)

    def _on_ones_like(self, arguments: dict[str, Any]) -> Operand:
        return self._constant(1.0, arguments, like=True)

    def _on_full_like(self, arguments: dict[str, Any]) -> Operand:
        return self._constant(arguments["fill_value"], arguments, like=True)

    def _on_full(self, arguments: dict[str, Any]) -> Operand:
        return self._constant(arguments["fill_value"], arguments, like=False)

    def _on_zeros(self, arguments: dict[str, Any]) -> Operand:
        return self._constant(0.0, arguments, like=False)

    def _on_ones(self, arguments: dict[str, Any]) -> Operand:
        return self._constant(1.0, arguments, like=False)

    _on_new_full, _on_new_zeros, _on_new_ones = _on_full, _on_zeros, _on_ones

    def _on_scalar_tensor(self, arguments: dict[str, Any]) -> Operand:
        return self._constant(arguments["s"], arguments, like=False)

    def _scaled(self, arguments: dict[str, Any]) -> tuple[Operand, Operand]:
        left, right = self._find(arguments["self"]), self._find(arguments["other"])
        left, right = self._float(left), self._float(right)
        return left, self._builder.emit("mul", right, _number(arguments.get("alpha", 1)))

    def _on_add(self, arguments: dict[str, Any]) -> Operand:
        if self._both_boolean(arguments):
            return self._builder.emit("logical_or", self._find(arguments["self"]), self._find(arguments["other"]))
        return self._builder.emit("add", *self._scaled(arguments))

    def _on_sub(self, arguments: dict[str, Any]) -> Operand:
        return self._builder.emit("sub", *self._scaled(arguments))

    def _on__efficientzerotensor(self, arguments: dict[str, Any]) -> Operand:
        return 0.0  # autograd's, where nothing depends on the scores

    def _on_rsub(self, arguments: dict[str, Any]) -> Operand:
        swapped = {"self": arguments["other"], "other": arguments["self"], "alpha": arguments.get("alpha", 1)}
        return self._on_sub(swapped)

    def _on_mul(self, arguments: dict[str, Any]) -> Operand:
        left, right = self._find(arguments["self"]), self._find(arguments["other"])
        if self._both_boolean(arguments):
            return self._builder.emit("logical_and", left, right)
        return self._builder.emit("mul", self._float(left), self._float(right))

    def _both_boolean(self, arguments: dict[str, Any]) -> bool:
        return all(self._builder.kind(self._find(arguments[name])) == "b" for name in ("self", "other"))

    def _on_pow(self, arguments: dict[str, Any]) -> Operand:
        base, exponent = self._find(arguments["self"]), self._find(arguments["exponent"])
        return self._builder.emit("pow", self._float(base), self._float(exponent))

    def _on_where(self, arguments: dict[str, Any]) -> Operand:
        condition, chosen, other = (self._find(arguments[name]) for name in ("condition", "self", "other"))
        if self._both_boolean(arguments):
            emit = self._builder.emit
            inverse = emit("logical_not", condition)
            return emit("logical_or", emit("logical_and", condition, chosen), emit("logical_and", inverse, other))
        return self._builder.emit("where", condition, self._float(chosen), self._float(other))

    def _on_masked_fill(self, arguments: dict[str, Any]) -> Operand:
        mask, value, other = (self._find(arguments[name]) for name in ("mask", "value", "self"))
        return self._builder.emit("where", mask, self._float(value), self._float(other))

    def _on_clamp(self, arguments: dict[str, Any]) -> Operand:
        x = self._float(self._find(arguments["self"]))
        bounds = {name: arguments.get(name) for name in ("min", "max")}
        given = {name: self._find(bound) for name, bound in bounds.items() if bound is not None}
        if any(isinstance(bound, Ref) for bound in given.values()):
            raise _refuse("clamp takes numbers as its bounds; use torch.maximum and torch.minimum")
        if isinstance(bounds["min"], torch.fx.Node) or isinstance(bounds["max"], torch.fx.Node):
            return self._clamp_to_tensors(x, given)
        return self._builder.emit(_clamp_name(given), x, *(float(bound) for bound in given.values() if not isinstance(bound, Ref)))

    def _clamp_to_tensors(self, x: Operand, given: dict[str, Operand]) -> Operand:
        """By the operations that have the slope which this torch gives clamp at a bound that is a tensor."""
        if not _halves_slopes_at_tensor_bounds():
            return self._builder.emit(_clamp_name(given), x, *given.values())
        for name, bound in given.items():
            x = self._builder.emit("maximum" if name == "min" else "minimum", x, bound)
        return x

    _on_clamp_min = _on_clamp_max = _on_clamp

    def _on_logical_xor(self, arguments: dict[str, Any]) -> Operand:
        left, right = self._find(arguments["self"]), self._find(arguments["other"])
        return self._builder.emit("ne", self._float(left), self._float(right))

    _on_bitwise_xor = _on_logical_xor

    def _on_isnan(self, arguments: dict[str, Any]) -> Operand:
        x = self._find(arguments["self"])
        return self._builder.emit("ne", x, x)

    def _gelu(self, name: str, arguments: dict[str, Any], *operands: str) -> Operand:
        name = name if arguments["approximate"] == "none" else name.replace("gelu", "gelu_tanh")
        return self._builder.emit(name, *(self._find(arguments[x]) for x in operands))

    def _on_gelu(self, arguments: dict[str, Any]) -> Operand:
        return self._gelu("gelu", arguments, "self")

    def _on_gelu_backward(self, arguments: dict[str, Any]) -> Operand:
        return self._gelu("gelu_backward", arguments, "grad_output", "self")

    def _on_rrelu_with_noise(self, arguments: dict[str, Any]) -> Operand:
        return self._builder.emit("leaky_relu", self._find(arguments["self"]), _mean_slope(arguments))

    def _on_rrelu_with_noise_backward(self, arguments: dict[str, Any]) -> Operand:
        grad, x = (self._find(arguments[name]) for name in ("grad_output", "self"))
        return self._builder.emit("leaky_relu_backward", grad, x, _mean_slope(arguments))

    def _on_elu_backward(self, arguments: dict[str, Any]) -> Operand:
        x = self._find(arguments["self_or_result"])
        numbers = (_number(arguments[name]) for name in ("alpha", "scale", "input_scale"))
        return self._builder.emit("elu_backward", self._find(arguments["grad_output"]), x, *numbers)

    def _on_log_sigmoid_forward(self, arguments: dict[str, Any]) -> Operand:
        return self._builder.emit("log_sigmoid", self._find(arguments["self"]))

    def _on_log_sigmoid_backward(self, arguments: dict[str, Any]) -> Operand:
        return self._builder.emit("log_sigmoid_backward", self._find(arguments["grad_output"]), self._find(arguments["self"]))


def _name(node: torch.fx.Node) -> str:
    """aten's, without the overload's; that of what is no operation is empty."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def _mutates(node: torch.fx.Node) -> bool:
    works_in_place = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return works_in_place and not _is_settled_rrelu(node)


def _is_settled_rrelu(node: torch.fx.Node) -> bool:
    """Whether it is rrelu outside of training, or its gradient: a leaky relu of the mean slope, which draws nothing."""
    if not _name(node).startswith("rrelu_with_noise"):
        return False
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    names = [argument.name for argument in target._schema.arguments]
    return not (dict(zip(names, node.args, strict=False)) | node.kwargs).get("training", False)


def _is_same_shape(node: torch.fx.Node) -> bool:
    """Whether it expands something to the shape that it has."""
    before = getattr(node.args[0], "meta", {}).get("val") if node.args else None
    return _name(node) == "expand" and before is not None and list(before.shape) == node.args[1]


def _clamp_name(bounds: dict[str, Any]) -> str:
    return "clamp" if len(bounds) == 2 else f"clamp_{next(iter(bounds))}"


@cache
def _halves_slopes_at_tensor_bounds() -> bool:
    """Whether clamp to tensors has the slope of maximum and minimum at its bounds, as in torch 2.15, or that of clamp to numbers."""
    x = torch.zeros((), requires_grad=True)
    (slope,) = torch.autograd.grad(torch.clamp(x, torch.zeros(()), torch.ones(())), x)
    return slope.item() == 0.5


def _mean_slope(arguments: dict[str, Any]) -> float:
    lower, upper = (_number(arguments[name]) for name in ("lower", "upper"))
    return (lower + upper) / 2


def _ancestors(recorded: torch.fx.Graph, outputs: int | None) -> set[torch.fx.Node]:
    """What the first so many outputs are computed from, or all of them, and what works in place."""
    output = next(node for node in reversed(recorded.nodes) if node.op == "output")
    pending = list(output.args[0][:outputs])
    if outputs is None:
        pending += [node for node in recorded.nodes if _mutates(node)]
    found: set[torch.fx.Node] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, torch.fx.Node) and node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _number(value: Any) -> float | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    raise _refuse(f"it uses {value!r}, which is not a real number")

"""Activation, the built-in table, and what the public API accepts as `activation`."""

import functools
import math
import operator
import pickle
import subprocess
import sys
import types

import pytest
import torch
from helpers import clean_env
from torch.nn import functional

from gdpa.activations import Activation, activations, resolve
from gdpa.errors import GdpaError, UnsupportedActivation
from gdpa.fingerprint import captures, fingerprint
from gdpa.tracing import trace

module = sys.modules["gdpa.activations"]  # the package's own attribute of that name is the function

NAMES = ("identity", "relu", "relu2", "leaky_relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus", "elu")
NAMES += ("hardswish", "exp")

FUNCTIONS = {
    "identity": lambda s: s,
    "relu": functional.relu,
    "relu2": lambda s: functional.relu(s).square(),
    "leaky_relu": functional.leaky_relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda s: functional.gelu(s, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": functional.sigmoid,
    "tanh": functional.tanh,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "hardswish": functional.hardswish,
    "exp": torch.exp,
}

POINTS = [-25.0, -6.0, -3.0, -1.5, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0, 21.0]


def test_the_names_are_these_in_this_order():
    assert activations() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_expression_of_a_name_is_what_tracing_its_function_gives(name):
    built_in = module._BUILT_INS[name]
    assert Activation(name).expression.joint == trace(built_in.function).joint


@pytest.mark.parametrize("name", NAMES)
def test_named_activations_are_torchs_with_autograds_derivative(name):
    s = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    expected = FUNCTIONS[name](s)
    (slope,) = torch.autograd.grad(expected.sum(), s)
    activation = Activation(name)
    torch.testing.assert_close(activation(s), expected, rtol=1e-12, atol=1e-12)
    (own,) = torch.autograd.grad(activation(s).sum(), s)
    torch.testing.assert_close(own, slope, rtol=1e-12, atol=1e-12)
    # The pair in torch's kernels, and the pair that device code is made of.
    for value, derivative in (activation.value_and_derivative(s), activation.expression.pair.evaluate(s.detach())):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(derivative, slope, rtol=1e-8, atol=1e-8)


def test_a_built_ins_key_is_its_name():
    for name in NAMES:
        assert Activation(name).key == Activation(name).name == name
        assert Activation.from_key(name) == Activation(name)


def test_activations_are_equal_by_key_and_hash_alike():
    one, two = Activation(lambda s: torch.relu(s) * 2), Activation(lambda s: torch.relu(s) + torch.relu(s))
    three = Activation(lambda s: torch.relu(s) * 2)
    assert one == three
    assert hash(one) == hash(three)
    assert one != two, "other operations are another expression"
    assert one != "relu"
    assert len({one, three, Activation("relu")}) == 2


def test_name_and_repr_show_the_function_and_its_formula():
    def squared(s):
        return torch.relu(s) ** 2 / 64

    assert Activation(squared).name == "squared"
    assert repr(Activation(squared)) == "Activation(squared: relu(s) ** 2 / 64)"
    assert Activation(squared, name="mine").name == "mine"
    assert Activation(torch.nn.GELU()).name == "GELU"
    assert Activation(Activation(squared)).name == "squared"
    assert Activation(lambda s: s + 1).name == "<lambda>"
    assert repr(Activation("silu")) == "Activation(silu: silu(s))"


def test_pickles_by_key():
    activation = Activation(lambda s: s.exp() - 1, name="mine")
    again = pickle.loads(pickle.dumps(activation))
    assert again == activation
    assert again.name == "mine"
    assert len(pickle.dumps(Activation("gelu"))) < 120


@pytest.mark.parametrize("name", [3, b"gelu", True])
def test_a_name_is_a_string(name):
    with pytest.raises(GdpaError, match="name: expected a string or None, got"):
        Activation(torch.relu, name=name)


def test_an_activation_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot be changed"):
        Activation("gelu").key = "relu"


@pytest.mark.parametrize(
    ("fn", "safe"),
    [
        (torch.log, False),
        (torch.sqrt, False),
        (lambda s: 1 / s, False),
        (lambda s: s + 7e4, False),
        (lambda s: s * 7e4, False),
        (lambda s: s * float("nan"), False),
        (lambda s: s + 6e4, True),
        (torch.exp, True),
        (lambda s: torch.log(s + 1), True),
        (lambda s: s.abs().clamp(min=1e-3).log(), True),
        # Finite in float64 alone.
        (lambda s: 1 / (1 + torch.exp(100 - 10 * s)), False),
        (lambda s: torch.log(1 + torch.exp(100 - 10 * s)), False),
        (lambda s: torch.sqrt(s * s + 1e-38), False),  # device code has no such numbers
        (lambda s: torch.sqrt(s * s + 1e-30), True),
        (lambda s: torch.log(torch.exp(s - 88)), False),  # nor keeps exp(-88), below the normal ones
        (lambda s: torch.sqrt(torch.exp(s - 88)), False),  # whose root has no slope
        (lambda s: torch.log(torch.exp(s - 80)), True),
        (lambda s: torch.sqrt(functional.hardsigmoid(s - 4)), True),
        *((name, True) for name in NAMES),
    ],
)
def test_tail_safe_says_whether_zero_can_be_fed(fn, safe):
    assert Activation(fn).tail_safe is safe


def test_from_key_is_memoised_and_refuses_malformed_text():
    key = Activation(lambda s: s * 3).key
    assert Activation.from_key(key) is Activation.from_key(key)
    assert Activation.from_key(key)(torch.tensor(2.0)) == 6
    for wrong in ("gdpa-expression-1: nonsense", "gdpa-expression-9: -> s, 1.0", "gellu", ""):
        with pytest.raises(GdpaError):
            Activation.from_key(wrong)


def test_wrong_arguments_of_activation():
    with pytest.raises(GdpaError, match="fn: expected a callable, a name or an Activation, got int"):
        Activation(3)
    with pytest.raises(GdpaError, match="unknown name 'gellu'"):
        Activation("gellu")
    with pytest.raises(UnsupportedActivation, match="sum is a reduction"):
        Activation(lambda s: s.sum())


def test_resolve_accepts_names_activations_callables_and_lists():
    custom = Activation(lambda s: s * 3)
    assert resolve("gelu", 4) == ("gelu",)
    assert resolve(custom, 4) == (custom.key,)
    assert resolve(custom.key, 4) == (custom.key,)
    assert resolve(lambda s: s * 3, 4) == (custom.key,)
    assert resolve(["gelu", custom, lambda s: s * 3], 3) == ("gelu", custom.key, custom.key)
    assert resolve(("silu", "silu"), 2) == ("silu",)
    assert resolve([custom, lambda s: s * 3], 2) == (custom.key,)
    assert resolve(torch.nn.GELU(), 4) == (Activation(functional.gelu).key,)


def test_resolve_names_what_is_wrong():
    with pytest.raises(GdpaError, match=r"unknown name 'Gelu_tan'. Did you mean 'gelu_tanh'.* Names: identity, relu,"):
        resolve("Gelu_tan", 4)
    with pytest.raises(GdpaError, match=r"activation: expected one activation or 4, .*, got a list of 3"):
        resolve(["gelu"] * 3, 4)
    with pytest.raises(GdpaError, match=r"activation: expected a name, .*, got int"):
        resolve(3, 4)
    with pytest.raises(GdpaError, match=r"activation: .*, got NoneType"):
        resolve(["gelu", None], 2)


ALPHA = 2
config = types.ModuleType("config")
config.ALPHA = 2.0
config.deep = types.ModuleType("config.deep")
config.deep.BETA = 3


def uses_global(s):
    return s * ALPHA


def uses_module(s):
    return s * config.ALPHA


def uses_deep_module(s):
    return s * config.deep.BETA


def helper(s):
    return s * ALPHA + 1


def calls_helper(s):
    return helper(s)


def calls_in_a_lambda(s):
    return (lambda x: x * ALPHA)(s)


def aliases_module(s):
    settings = config
    return s * settings.ALPHA


def calls_a_local_function(s):
    factor = 2.0

    def inner(x):
        return x * factor

    return inner(s)


def dynamic_global(s):
    return s * globals()["ALPHA"]


def value_at_one(activation):
    (key,) = resolve(activation, 1)
    return Activation.from_key(key)(torch.tensor(1.0, dtype=torch.float64)).item()


@pytest.mark.parametrize("number", [3, 0.5, True, -4, 2.0, math.nan])
@pytest.mark.parametrize("fn", [uses_global, calls_helper, calls_in_a_lambda, dynamic_global])
def test_a_changed_global_number_is_seen(monkeypatch, fn, number):
    before = value_at_one(fn)
    monkeypatch.setitem(globals(), "ALPHA", number)
    expected = fn(torch.tensor(1.0, dtype=torch.float64)).item()
    for _ in range(2):
        assert value_at_one(fn) == pytest.approx(expected, nan_ok=True)
    monkeypatch.undo()
    assert value_at_one(fn) == before


@pytest.mark.parametrize("fn", [uses_module, uses_deep_module, aliases_module])
def test_a_changed_module_attribute_is_seen(monkeypatch, fn):
    before = value_at_one(fn)
    monkeypatch.setattr(config, "ALPHA", 5)
    monkeypatch.setattr(config.deep, "BETA", 5.5)
    assert value_at_one(fn) == fn(1.0) != before


def test_changed_closures_defaults_attributes_and_helpers_are_seen(monkeypatch):
    factor = 2

    def closure(s):
        return s * factor

    def default(s, power=2, *, offset=1):
        return s * power + offset

    def attribute(s):
        return s * attribute.scale

    attribute.scale = 2
    assert value_at_one(closure) == 2
    factor = 2.5
    assert value_at_one(closure) == 2.5
    assert value_at_one(default) == 3
    default.__defaults__ = (4,)
    assert value_at_one(default) == 5
    default.__kwdefaults__ = {"offset": 7}
    assert value_at_one(default) == 11
    assert value_at_one(attribute) == 2
    attribute.scale = 6
    assert value_at_one(attribute) == 6
    assert value_at_one(calls_helper) == 3
    monkeypatch.setitem(globals(), "helper", lambda s: s - 9)
    assert value_at_one(calls_helper) == -8
    assert value_at_one(functools.partial(default, power=3)) == 10
    assert value_at_one(functools.partial(default, power=4)) == 11


def test_state_that_cannot_be_fingerprinted_is_traced_anew():
    class Scale:
        def __init__(self):
            self.factor = 2

        def __call__(self, s):
            return s * self.factor

    scale, numbers = Scale(), [2]
    by_object, by_list = (lambda s: s * scale.factor), (lambda s: s * numbers[0])
    for fn in (scale, scale.__call__, by_object, by_list):
        assert fingerprint(fn) is None
        assert value_at_one(fn) == 2
    scale.factor, numbers[0] = 7, 7
    for fn in (scale, scale.__call__, by_object, by_list):
        assert value_at_one(fn) == 7


def test_what_a_function_of_the_interpreter_tells_is_asked_anew():
    before = sys.getswitchinterval()
    try:
        for seconds in (0.25, 0.5):
            sys.setswitchinterval(seconds)
            assert value_at_one(lambda s: s * sys.getswitchinterval()) == seconds
    finally:
        sys.setswitchinterval(before)
    assert fingerprint(operator.neg) is not None
    assert fingerprint(lambda s: s * math.sin(2.0)) is not None


def test_modules_of_torch_are_known_by_their_attributes():
    leaky = torch.nn.LeakyReLU(0.5)
    layers = torch.nn.Sequential(torch.nn.Tanh(), leaky)
    keys = resolve(leaky, 1), resolve(layers, 1)
    assert fingerprint(torch.nn.GELU()) == fingerprint(torch.nn.GELU()) != fingerprint(torch.nn.GELU("tanh"))
    leaky.negative_slope = 0.25
    assert resolve(leaky, 1) != keys[0]
    assert resolve(layers, 1) != keys[1]
    layers.append(torch.nn.ReLU())
    assert "relu" in resolve(layers, 1)[0].rpartition("leaky_relu(")[2]
    leaky.register_forward_hook(lambda layer, inputs, output: output * 2)
    assert fingerprint(leaky) is None
    assert "mul" in resolve(leaky, 1)[0]


def test_fingerprints_tell_types_of_numbers_apart():
    def make(number):
        return lambda s: s * number

    different = [1, 1.0, True, -0.0, 0.0, math.nan, math.inf, (1, 2), (1.0, 2)]
    assert len({fingerprint(make(number)) for number in different}) == len(different)
    assert fingerprint(make(math.nan)) == fingerprint(make(math.nan))
    assert fingerprint(lambda s: s * 1) != fingerprint(lambda s: s * 1.0)


def test_fingerprints_exist_for_ordinary_functions():
    for fn in (torch.relu, functional.silu, torch.Tensor.exp, uses_global, uses_module, calls_helper, helper):
        assert fingerprint(fn) is not None
        hash(fingerprint(fn))
    assert fingerprint(functools.partial(functional.leaky_relu, negative_slope=0.1)) is not None
    assert fingerprint(torch.nn.PReLU()) is None
    assert fingerprint(torch.ones(1).mul) is None
    activation = Activation("relu")
    assert fingerprint(lambda s: activation(s) * 2) is not None


def test_a_recursive_function_has_a_fingerprint():
    def power(s, n=3):
        return s if n == 1 else s * power(s, n - 1)

    assert fingerprint(power) is not None
    assert value_at_one(power) == 1


def test_resolving_a_known_callable_does_not_trace_it(monkeypatch):
    import gdpa.tracing

    resolve(uses_global, 1)
    monkeypatch.setattr(gdpa.tracing, "trace", lambda fn: pytest.fail("traced again"))
    resolve(uses_global, 1)


def test_the_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MEMO_SIZE", 4)
    monkeypatch.setattr(module, "_memo", {})
    for number in range(9):
        resolve(lambda s, n=number: s * n, 1)
    assert len(module._memo) == 4


def test_captures_says_what_is_captured():
    x = 3
    assert captures(lambda s: torch.relu(s) ** 2 + math.pi) is None
    assert captures(lambda s: functional.silu(s) * float("2") + max(1, 2)) is None
    assert captures(calls_a_local_function) is None
    assert captures(torch.relu) is None
    assert captures(functional.silu) is None
    assert captures(torch.Tensor.exp) is None
    assert "'x'" in captures(lambda s: s * x)
    assert "default" in captures(lambda s, a=2: s * a)
    assert "'ALPHA'" in captures(uses_global)
    assert "'config.ALPHA'" in captures(uses_module)
    assert "'helper'" in captures(calls_helper)
    assert "'globals'" in captures(dynamic_global)
    assert "GELU" in captures(torch.nn.GELU())


torch.library.define("gdpa_test::apply", "(Tensor x, str[] keys) -> Tensor")


@torch.library.impl("gdpa_test::apply", "CompositeExplicitAutograd")
def _apply(x, keys):
    return torch.stack([Activation.from_key(key)(x) for key in keys])


@torch.library.register_fake("gdpa_test::apply")
def _apply_fake(x, keys):
    return x.new_empty(len(keys), *x.shape)


def attend(x, activation, heads=2):
    return torch.ops.gdpa_test.apply(x * 1, list(resolve(activation, heads)))


BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
X = torch.tensor([-1.0, 0.5, 2.0])


def compiled(fn, backend="eager"):
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)


def no_capture(s):
    return functional.softplus(s) * math.pi


@BACKENDS
@pytest.mark.parametrize(
    "activation",
    [
        "gelu",
        Activation("silu"),
        Activation(lambda s: s * 3),
        torch.relu,
        functional.silu,
        torch.exp,
        no_capture,
        calls_a_local_function,
        lambda s: torch.relu(s) ** 2 / 64,
        ["gelu", lambda s: s * 5],
        [Activation(lambda s: s * 3), torch.tanh],
        [lambda s: s + 1, lambda s: s + 2],
    ],
    ids=lambda a: "list" if isinstance(a, list) else str(getattr(a, "name", None) or getattr(a, "__name__", a)),
)
def test_compiled_with_what_captures_nothing(backend, activation):
    function = compiled(attend, backend)
    assert torch.equal(function(X, activation), attend(X, activation))
    assert torch.equal(function(X[:2], activation), attend(X[:2], activation))


@BACKENDS
def test_compiled_with_a_lambda_written_inside(backend):
    def inside(x):
        return attend(x, [lambda s: torch.exp(s), "relu"])

    assert torch.equal(compiled(inside, backend)(X), inside(X))


def capturing():
    factor = 3
    return {
        "closure": lambda s: s * factor,
        "default": lambda s, factor=2: s * factor,
        "keyword_default": lambda s, *, factor=2: s * factor,
        "global": uses_global,
        "module_attribute": uses_module,
        "helper": calls_helper,
        "partial": functools.partial(functional.leaky_relu, negative_slope=0.3),
        "module": torch.nn.GELU(),
        "method": torch.nn.GELU().forward,
        "in_a_list": ["gelu", lambda s: s * factor],
    }


@BACKENDS
@pytest.mark.parametrize("name", capturing())
def test_compiled_refuses_what_captures_values(backend, name):
    with pytest.raises(Exception, match=r"build gdpa.Activation\(fn\) outside the compiled region"):
        compiled(attend, backend)(X, capturing()[name])


@pytest.mark.parametrize("number", [3, 2.5])
def test_compiled_never_resolves_a_captured_number_to_a_stale_value(monkeypatch, number):
    def inside(x):
        return attend(x, lambda s: s * ALPHA)

    def by_argument(x, factor):
        return attend(x, lambda s: s * factor)

    for _ in range(2):
        with pytest.raises(Exception, match=r"build gdpa\.Activation"):
            compiled(inside)(X)
        with pytest.raises(Exception, match=r"build gdpa\.Activation"):
            compiled(by_argument)(X, number)
        monkeypatch.setitem(globals(), "ALPHA", number)


CURRENT = Activation("relu")


@BACKENDS
def test_compiled_follows_a_global_activation_that_is_rebound(monkeypatch, backend):
    def inside(x):
        return attend(x, CURRENT)

    function = compiled(inside, backend)
    assert torch.equal(function(X), attend(X, "relu"))
    for factor in (3, 4.5):
        monkeypatch.setitem(globals(), "CURRENT", Activation(lambda s, f=factor: s * f))
        assert torch.equal(function(X)[0], X * factor)


@BACKENDS
def test_compiled_follows_an_activation_swapped_between_calls(backend):
    function = compiled(attend, backend)
    for activation in (Activation("relu"), Activation("gelu"), "silu", Activation(lambda s: s * 3), torch.tanh):
        assert torch.equal(function(X, activation), attend(X, activation))


@BACKENDS
def test_compiled_follows_capture_free_functions_swapped_between_calls(backend):
    function = compiled(attend, backend)
    for fn in (lambda s: s + 1, lambda s: s + 2, torch.relu, torch.sigmoid, functional.silu, no_capture):
        assert torch.equal(function(X, fn), attend(X, fn))


@BACKENDS
def test_compiled_refuses_methods_of_a_class_which_dynamo_does_not_guard(backend):
    with pytest.raises(Exception, match=r"a method of a class \(TensorBase.relu\) is not accepted inside torch.compile"):
        compiled(attend, backend)(X, torch.Tensor.relu)
    assert torch.equal(attend(X, torch.Tensor.relu), attend(X, "relu"))


def test_compiled_errors_keep_their_text():
    with pytest.raises(Exception, match="Did you mean 'gelu'"):
        compiled(attend)(X, "gellu")
    with pytest.raises(Exception, match="got a list of 3"):
        compiled(attend)(X, ["gelu"] * 3)
    with pytest.raises(Exception, match="sum is a reduction"):
        compiled(attend)(X, lambda s: s.sum())


def test_exported_program_holds_the_keys():
    class Model(torch.nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.activation = activation

        def forward(self, x):
            return attend(x, self.activation)

    factor = 3
    for activation in ("gelu", Activation(lambda s: s * factor), lambda s: torch.relu(s) * 2):
        program = torch.export.export(Model(activation), (X,))
        assert torch.equal(program.module()(X), attend(X, activation))


IMPORT = """
import sys
import gdpa.activations
assert "sympy" not in sys.modules, "torch's tracer"
assert "torch._dynamo" not in sys.modules, "dynamo"
assert sys.modules["gdpa.activations"]._expression.cache_info().misses == 0, "an expression"
"""


def test_importing_traces_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORT], env=clean_env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]

"""Generated device code: its text, its cache on disk, its numbers in the interpreter, and that it compiles."""

import json
import os
import stat
import subprocess
import sys
from typing import get_args

import pytest
import torch
from helpers import clean_env

from gdpa.activations import Activation, activations
from gdpa.errors import GdpaError
from gdpa.lowering import Precision

pytest.importorskip("triton")

from gdpa.device_source import cache_directory, device_functions, generate

# Between them these use every operation that device code knows.
CUSTOM = {
    "relu_squared": lambda s: torch.relu(s) ** 2 / 64,
    "erfc": lambda s: torch.erfc(s) * s,
    "expm1": lambda s: torch.expm1(s),
    "log1p": lambda s: torch.log1p(s.abs()),
    "sinh": lambda s: torch.sinh(s * 0.5),
    "mish": torch.nn.functional.mish,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "softsign": torch.nn.functional.softsign,
    "rounding": lambda s: torch.round(s) + torch.trunc(s * 0.7) + torch.floor(s) - torch.ceil(s * 1.3),
    "roots": lambda s: torch.sqrt(s.abs() + 1) + torch.rsqrt(s * s + 1) + (s * s + 1) ** -1.5,
    "powers": lambda s: s**17 * 1e-12 + (s * s + 1) ** 0.3 + 3**s * 1e-3 + s**-3 * (s.abs() > 0.5),
    "general_power": lambda s: (s.abs() + 0.5) ** (s * 0.25),
    "logic": lambda s: torch.where(((s > 0) & ~(s >= 1)) | (torch.tensor(-3.0) > s), s, 0.1 * s) + (s != 2) * s,
    "maximum": lambda s: torch.maximum(torch.tensor(0.5), s) - torch.minimum(s, s * s) + s.clamp(-1, 2),
    "trigonometry": lambda s: torch.sin(s) * torch.cos(2 * s) + torch.sign(s),
    "erf": lambda s: torch.erf(s * 0.3) / (1 + s * s) + torch.log2(s * s + 1) + torch.exp2(-s) * 1e-3,
    "constant": lambda s: 0.25,
}


def test_source_is_readable():
    source = generate((Activation(lambda s: s * torch.sigmoid(s)).key,))
    assert "# f(s) = s * sigmoid(s)\n" in source
    assert "# f'(s) = " in source
    value, pair = source[source.index("def value_0") :].split("def pair_0")
    assert pair.count("sigmoid(s)") == 1
    assert "return t1" in value
    assert source.count("tl.exp(") == 1, "one exponential, in the helper"
    assert "if" not in source[source.index("def activate(") :].split(), "one activation needs no branch"
    assert all(len(line) < 200 for line in source.splitlines())


def test_f_alone_does_not_compute_its_derivative():
    source = generate(("gelu",))
    value = source[source.index("def value_0") :].split("\n\n\n")[0]
    assert "exp2" not in value
    assert "exp2" in source


def test_per_head_dispatch_shares_branches_between_equal_keys():
    source = generate(("gelu", "silu", "gelu", "relu", "silu", "gelu"))
    assert source.count("f'(s) = ") == 3
    chain = source[source.index("def activate(") :].split("@triton.jit")[0]
    assert "if (head == 1) | (head == 4):\n        y = value_1(s)" in chain
    assert "elif (head == 3):\n        y = value_2(s)" in chain
    assert "else:\n        y = value_0(s)\n    return y" in chain


def test_flavours_and_frontends_differ_in_what_they_use():
    portable, half, own_half, _, fast = (generate(("tanh", "sigmoid"), precision=name) for name in get_args(Precision))
    assert "asm" not in portable
    assert "libdevice" not in portable + half + own_half + fast
    assert "tanh.approx.f32" in fast and "tanh.approx.f32" in own_half
    assert "ex2.approx" not in own_half
    assert "tanh.approx" not in half, "it may err as much as float16 rounds"
    assert "ex2.approx" in half and "rcp.approx" in half
    gluon = generate(("tanh",), frontend="gluon")
    assert "@gluon.jit" in gluon
    assert "triton.jit" not in gluon
    with pytest.raises(GdpaError, match="frontend: expected one of triton, gluon, got 'cuda'"):
        device_functions(("tanh",), frontend="cuda")
    with pytest.raises(
        GdpaError, match="precision: expected one of float32, float16, float16_sm90, float16_sm90_many, bfloat16, got 'float64'"
    ):
        device_functions(("tanh",), precision="float64")


def test_fast_sigmoid_of_a_shifted_score_keeps_its_relative_accuracy():
    # tanh.approx has 11 bits: sigmoid(s - 8), which is about 3e-4, would drown in its error.
    shifted = generate((Activation(lambda s: torch.sigmoid(s - 8)).key,), precision="bfloat16")
    assert "tanh" not in shifted
    scaled = generate((Activation(lambda s: torch.sigmoid(s * 1.7)).key,), precision="bfloat16")
    assert "tanh(t1)" in scaled
    assert "exp2" not in scaled


def test_constants_outside_float32_are_written_as_what_float32_makes_of_them():
    numbers = {1e300: 'float("inf")', -1e300: 'float("-inf")', 1e-300: "0.0", 0.1: "0.1", float("nan"): 'float("nan")'}
    for number, text in numbers.items():
        body = generate((Activation(lambda s, c=number: s * c).key,)).split("def value_0")[1]
        assert f"t0 = s * {text}\n" in body


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GDPA_CACHE_DIR", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("GDPA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "gdpa"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "gdpa"


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    """A cache directory of the test's own, and an empty in-process memo."""
    import gdpa.device_source

    monkeypatch.setenv("GDPA_CACHE_DIR", str(tmp_path / "cache"))
    gdpa.device_source._load.cache_clear()
    yield tmp_path / "cache"
    gdpa.device_source._load.cache_clear()


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: text.replace("0.5", "0.7"), str.upper])
def test_a_damaged_cache_file_heals(fresh_cache, damage):
    import gdpa.device_source

    first = device_functions(("gelu_tanh",))
    assert first.path.parent == fresh_cache
    assert first.path.read_text() == first.source
    first.path.write_text(damage(first.source))
    gdpa.device_source._load.cache_clear()
    second = device_functions(("gelu_tanh",))
    assert second.path == first.path
    assert second.path.read_text() == first.source
    assert [file.name for file in fresh_cache.iterdir()] == [first.path.name], "no temporary file is left"


def test_functions_are_remembered_in_the_process(fresh_cache):
    assert device_functions(("relu",)).pair is device_functions(("relu",)).pair
    assert device_functions(("relu",)).path != device_functions(("relu",), precision="bfloat16").path


def test_an_unwritable_cache_falls_back_to_a_directory_of_the_process(fresh_cache, monkeypatch):
    blocker = fresh_cache.parent / "file"
    blocker.write_text("")
    monkeypatch.setenv("GDPA_CACHE_DIR", str(blocker / "below"))
    functions = device_functions(("silu",))
    assert functions.path.read_text() == functions.source
    assert blocker not in functions.path.parents
    if os.getuid():  # root writes anywhere
        fresh_cache.mkdir()
        fresh_cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv("GDPA_CACHE_DIR", str(fresh_cache))
        assert device_functions(("elu",)).path.parent != fresh_cache


CONCURRENT = """
import sys, time
from gdpa.device_source import device_functions
from gdpa.activations import activations
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
for round in range(20):
    device_functions.__globals__["_load"].cache_clear()
    for name in activations():
        functions = device_functions((name,))
        if round % 5 == 0:
            functions.path.unlink(missing_ok=True)
print("done")
"""


def test_two_processes_may_generate_at_once(tmp_path):
    import time

    script = tmp_path / "generating.py"
    script.write_text(CONCURRENT)
    start = str(time.time() + 6)
    environment = clean_env(GDPA_CACHE_DIR=str(tmp_path / "cache"))
    command = [sys.executable, str(script), start]
    both = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), err[-2000:]
    assert not list((tmp_path / "cache").glob("*.part"))


INTERPRETED = """
import json, sys
import numpy, torch, triton, triton.language as tl
from gdpa.device_source import device_functions
numpy.seterr(all="ignore")

@triton.jit
def kernel(S, V, Y, D, head, VALUE: tl.constexpr, PAIR: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    s = tl.load(S + i)
    y, d = PAIR(s, head)
    tl.store(V + i, VALUE(s, head))
    tl.store(Y + i, y)
    tl.store(D + i, d)

jobs = torch.load(sys.argv[1])
s = jobs["s"]
results = {}
for name, keys, head in jobs["jobs"]:
    functions = device_functions(tuple(keys))
    value, y, d = (torch.full_like(s, float("nan")) for _ in range(3))
    kernel[(1,)](s, value, y, d, head, functions.value, functions.pair, s.numel())
    results[name] = (value, y, d)
torch.save(results, sys.argv[2])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Results of every activation in Triton's interpreter: one process for all of them."""
    folder = tmp_path_factory.mktemp("interpreted")
    s = torch.cat([torch.linspace(-12, 12, 961), -torch.logspace(-6, 1.9, 31), torch.logspace(-6, 1.9, 31)])
    s = torch.cat([s, torch.tensor([0.0])])
    keys = {name: name for name in activations()} | {name: Activation(fn).key for name, fn in CUSTOM.items()}
    jobs = [(name, [key], 0) for name, key in keys.items()]
    mixed = ["gelu", "silu", "gelu", keys["relu_squared"], "exp"]
    jobs += [(f"head{head}", mixed, head) for head in range(len(mixed))]
    torch.save({"s": s, "jobs": jobs}, folder / "jobs.pt")
    script = folder / "interpreted.py"
    script.write_text(INTERPRETED)
    done = subprocess.run(
        [sys.executable, script, folder / "jobs.pt", folder / "results.pt"],
        env=clean_env(TRITON_INTERPRET="1", GDPA_CACHE_DIR=str(folder / "cache")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return s, torch.load(folder / "results.pt"), {name: Activation(key) for name, key in keys.items()}, mixed


@pytest.mark.parametrize("name", [*activations(), *CUSTOM])
def test_interpreted_code_is_accurate_to_float32(interpreted, name):
    s, results, known, _ = interpreted
    value, y, d = results[name]
    wanted_y, wanted_d = known[name].value_and_derivative(s.double())
    assert torch.equal(value.nan_to_num(), y.nan_to_num())
    for actual, wanted in ((y, wanted_y), (d, wanted_d)):
        finite = wanted.abs() < 1e38
        error = (actual.double() - wanted).abs()[finite] / wanted.abs().clamp(min=1.0)[finite]
        # Large powers and exponentials amplify the rounding of their exponent: 88 * 2^-24.
        limit = 1e-5 if name in ("exp", "powers", "general_power", "sinh", "expm1") else 1e-6
        assert error.max() < limit, (error.max(), s[finite][error.argmax()])
        assert torch.equal(actual.isnan(), wanted.isnan())


@pytest.mark.parametrize("name", ["tanh", "expm1", "log1p", "sinh", "elu", "softsign"])
def test_interpreted_code_keeps_relative_accuracy_near_zero(interpreted, name):
    s, results, known, _ = interpreted
    near = (s.abs() < 1) & (s != 0)
    wanted = known[name](s.double())[near]
    assert ((results[name][0].double()[near] - wanted).abs() / wanted.abs()).max() < 5e-7


def test_interpreted_softplus_keeps_relative_accuracy_in_its_tail(interpreted):
    s, results, known, _ = interpreted
    tail = (s < -2) & (s > -60)
    wanted = known["softplus"](s.double())[tail]
    assert ((results["softplus"][0].double()[tail] - wanted).abs() / wanted).max() < 4e-6


def test_interpreted_dispatch_runs_the_function_of_the_head(interpreted):
    _, results, known, mixed = interpreted
    by_key = {activation.key: name for name, activation in known.items()}
    for head, key in enumerate(mixed):
        for actual, expected in zip(results[f"head{head}"], results[by_key[key]], strict=True):
            assert torch.equal(actual, expected)


COMPILED = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gdpa.device_source import device_functions

@triton.jit
def kernel(S, Y, head, VALUE: tl.constexpr, PAIR: tl.constexpr):
    i = tl.arange(0, 128)
    s = tl.load(S + i)
    y, d = PAIR(s, head)
    tl.store(Y + i, y + VALUE(s, head))
    tl.store(Y + 128 + i, d)

@gluon.jit
def gluon_kernel(S, Y, head, VALUE: gl.constexpr, PAIR: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=layout)
    s = gl.load(S + i)
    y, d = PAIR(s, head)
    gl.store(Y + i, y + VALUE(s, head))
    gl.store(Y + 128 + i, d)

def compiled(functions, arch, gluon_source=False):
    signature = {"S": "*fp32", "Y": "*fp32", "head": "i32", "VALUE": "constexpr", "PAIR": "constexpr"}
    source, body = (GluonASTSource, gluon_kernel) if gluon_source else (ASTSource, kernel)
    source = source(body, signature, {(3,): functions.value, (4,): functions.pair})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True})

keys = json.loads(sys.argv[1])
mixed, everything = tuple(keys["mixed"]), tuple(keys["everything"])
for precision in ("float32", "float16", "bfloat16"):
    for arch in (80, 90, 100):
        assert compiled(device_functions(mixed, precision=precision), arch).asm["cubin"]
    assert compiled(device_functions(mixed, precision=precision, frontend="gluon"), 90, True).asm["cubin"]
    assert compiled(device_functions(everything, precision=precision), 90).asm["cubin"]
    assert compiled(device_functions(everything, precision=precision, frontend="gluon"), 90, True).asm["cubin"]
counts, watched = {}, ("tanh.approx", "ex2.approx", "rcp.approx", "div.", "call.uni", "max.NaN")
for name in ("silu", "gelu", "gelu_tanh", "relu2"):
    text = compiled(device_functions((name,), precision="bfloat16"), 90).asm["ptx"]
    counts[name] = {op: text.count(op) for op in watched}
    text = compiled(device_functions((name,), precision="float16"), 90).asm["ptx"]
    counts["half " + name] = {op: text.count(op) for op in watched}
print(json.dumps(counts))
"""


def test_device_code_compiles_for_every_target_in_both_frontends(tmp_path):
    custom = [Activation(fn).key for fn in CUSTOM.values()]
    keys = {"mixed": ["gelu", "silu", "gelu", "relu2", custom[0]], "everything": [*activations(), *custom]}
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    environment = clean_env(GDPA_CACHE_DIR=str(tmp_path / "cache"), TRITON_CACHE_DIR=str(tmp_path / "triton"))
    done = subprocess.run([sys.executable, script, json.dumps(keys)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout)
    # The kernel calls f and the pair: what they share is computed once there too.
    assert counts["silu"] == {
        "tanh.approx": 1,
        "ex2.approx": 0,
        "rcp.approx": 0,
        "div.": 0,
        "call.uni": 0,
        "max.NaN": 0,
    }
    assert counts["gelu_tanh"]["tanh.approx"] == 1
    assert counts["gelu"]["tanh.approx"] == 1
    assert counts["gelu"]["call.uni"] == 0
    assert counts["half silu"] == {"tanh.approx": 0, "ex2.approx": 1, "rcp.approx": 1, "div.": 0, "call.uni": 0, "max.NaN": 0}
    assert (counts["half gelu"]["ex2.approx"], counts["half gelu"]["rcp.approx"]) == (2, 0)
    assert counts["half gelu"]["call.uni"] == 0
    assert counts["relu2"]["max.NaN"] == 1


@pytest.mark.parametrize(
    "name", [*activations(), torch.nn.functional.mish, torch.nn.functional.selu, torch.nn.functional.logsigmoid]
)
def test_scores_far_out_have_the_values_and_derivatives_that_torch_gives_them(name):
    """In fp32, up to where squares of them are infinite."""
    sizes = torch.tensor([1e4, 1e8, 3e12, 1e13, 1e15, 1e18])
    x = torch.cat((-sizes, sizes))
    for result, exact in zip(
        Activation(name).expression.pair_for("float32").evaluate(x), Activation(name).value_and_derivative(x), strict=True
    ):
        torch.testing.assert_close(result, exact, equal_nan=True)


def test_fast_approximations_are_as_close_as_their_comments_say():
    """The polynomials of the fast flavour, evaluated in float64 as written in the source."""
    x = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    a = x.abs()
    far = torch.tensor([-1e4, -300.0, 300.0, 1e4], dtype=torch.float64)
    gelu, gelu_tanh = Activation("gelu"), Activation("gelu_tanh")
    for precision, bounds in {"bfloat16": (2.8e-4, 9e-4), "float16": (4.4e-6, 7e-6)}.items():
        fitted = gelu.expression.pair_for(precision)
        for result, exact, bound in zip(fitted.evaluate(x), gelu.value_and_derivative(x), bounds, strict=True):
            assert (result - exact).abs().max() < bound
        for result, exact in zip(fitted.evaluate(far), gelu.value_and_derivative(far), strict=True):
            assert torch.equal(result.abs(), exact.abs())
        pair = gelu_tanh.expression.pair_for(precision)
        for result, exact in zip(pair.evaluate(x), gelu_tanh.value_and_derivative(x), strict=True):
            torch.testing.assert_close(result, exact, rtol=1e-9, atol=1e-12)
    source = generate(("gelu", Activation(lambda s: torch.erf(s)).key), precision="bfloat16")
    assert " exp2(a * (a * (a * -0.09103036 - 0.9536531) - 1.62219303))" in source
    magnitude = 1 - torch.exp2(a * (a * (a * -0.09103036 - 0.9536531) - 1.62219303))
    assert (torch.where(x < 0, -magnitude, magnitude) - torch.erf(x)).abs().max() < 1.7e-4

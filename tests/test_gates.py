"""Activations with less use of the special-function unit: which have the form, and what the generated steps err, on a CPU."""

from __future__ import annotations

import math
import re
import types

import numpy as np
import pytest
import torch

from gdpa.activations import Activation, activations
from gdpa.device_source import FEWEST_PACKED_ROWS, device_functions, generate
from gdpa.errors import GdpaError

QUICK = Activation(lambda s: s * torch.sigmoid(1.702 * s)).key
D = 64
SCALE = D**-0.5


def rounded(x):
    """float32 numbers, held in float64 so that a multiply-add rounds once, as the device's does."""
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


class Tile:
    """A tile whose arithmetic is that of float32 instructions: a product that a sum follows is rounded with it."""

    __array_ufunc__ = None

    def __init__(self, values, exact=None):
        self.values = rounded(values)
        self.exact = self.values if exact is None else exact

    def __mul__(self, other):
        product = self.values * rounded(getattr(other, "values", other))
        return Tile(product, product)

    def __add__(self, other):
        return Tile(self.exact + (other.exact if isinstance(other, Tile) and other.exact is not other.values else plain(other)))

    def __sub__(self, other):
        return Tile(self.exact - plain(other))

    __rmul__ = __mul__
    __radd__ = __add__


def plain(x):
    return x.values if isinstance(x, Tile) else rounded(x)


def saturate(x):
    return np.clip(np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf), 0.0, 1.0)


def paired_logistic(u):
    a = rounded(np.exp2(np.minimum(u.values, 62.0)))
    a = rounded(a + 1.0).reshape(-1, 2)
    inverse = rounded(1.0 / rounded(a[:, 0] * a[:, 1]))
    return Tile(np.stack([inverse * a[:, 1], inverse * a[:, 0]], 1).reshape(-1))


def function(key, precision, name="gated_value_0", eighths=4):
    """The generated function over numbers, its assembly as what it stands for; None where there is none."""
    source = generate((key,), precision=precision, frontend="gluon", eighths=eighths)
    if f"def {name}" not in source:
        return None
    body = re.search(rf"def {name}\(.*?(?=\n\n\n)", source, re.DOTALL)
    assert body is not None
    language = types.SimpleNamespace(
        abs=lambda x: Tile(np.abs(x.values)) if isinstance(x, Tile) else abs(x), where=lambda c, x, y: x if c else y
    )
    names = {
        "tl": language,
        "saturated": lambda x, k: Tile(saturate(np.abs(x.values) * rounded(k))),
        "complement": lambda h, ceiling: Tile(saturate(rounded(ceiling) - h.values * h.values)),
        "paired_logistic": paired_logistic,
    }
    exec(body[0], names)

    def run(s, scale):
        with np.errstate(all="ignore"):
            return names[name](Tile(s), float(np.float32(scale))).values

    return run


def factor(precision, scale):
    return 0.5 * scale if precision == "bfloat16" else 1.0


def exact(key, x):
    return Activation.from_key(key)(torch.from_numpy(np.asarray(x, np.float64))).numpy()


def errors(key, precision, scale, limit=16.0):
    """What f errs at scores of every size, and the scores scaled."""
    s = rounded(
        np.concatenate([np.linspace(-limit, limit, 40001), np.geomspace(1e-6, 1, 2000), -np.geomspace(1e-6, 1, 2000)]) / scale
    )
    x = s * float(np.float32(scale))
    return function(key, precision)(s, scale) * factor(precision, float(np.float32(scale))) - exact(key, x), x


# Of the value over |x|: half of what T errs. Rounding to the dtype errs 2^-9 and 2^-12 of |x| near 0.
BOUNDS = {
    ("bfloat16", "silu"): 6.4e-4,
    ("bfloat16", QUICK): 6.4e-4,
    ("bfloat16", "gelu_tanh"): 3.8e-4,
    ("bfloat16", "gelu"): 4.6e-4,
    ("float16", "gelu_tanh"): 1.3e-5,
    ("float16", "gelu"): 5.0e-6,
}


@pytest.mark.parametrize("scale", [SCALE, 1.0, 1e-3, -0.3])
@pytest.mark.parametrize(("precision", "key"), BOUNDS, ids=lambda x: "quick" if x == QUICK else x)
def test_a_gate_errs_as_little_as_its_fit(precision, key, scale):
    error, x = errors(key, precision, scale)
    share = np.abs(error) / np.maximum(np.abs(x), 1e-30)
    assert np.nanmax(share) <= BOUNDS[precision, key]
    # The gate's slope at 0, on which sums over many small scores rest: T = 2 f / x - 1 there, of one to two in a hundred of x.
    small = (np.abs(x) > 0.01) & (np.abs(x) < 0.3)
    gate = np.abs(2.0 * exact(key, x) / np.where(x == 0.0, 1.0, x) - 1.0)
    assert (2.0 * share[small] / gate[small]).max() < (4e-3 if precision == "bfloat16" else 2e-4)


@pytest.mark.parametrize(("precision", "key"), BOUNDS, ids=lambda x: "quick" if x == QUICK else x)
def test_large_scores_are_themselves_or_nothing_and_no_number_stays_none(precision, key):
    run = function(key, precision)
    for scale in (1.0, SCALE, -1.0):
        c = factor(precision, scale)
        s = np.array([30.0, 1e4, 1e30, -30.0, -1e4, -1e30]) / scale
        result = run(s, scale) * c
        assert np.allclose(result[:3], rounded(s[:3]) * scale, rtol=1e-6, atol=0.0)
        assert (result[3:] == 0.0).all()
        special = run(np.array([np.inf, -np.inf, np.nan, 0.0]) / scale, scale) * c
        assert special[0] == np.inf
        assert np.isnan(special[1:3]).all(), "as x * sigmoid(x) has it"
        assert special[3] == 0.0
    zero = run(np.array([3.0, -2.0]), 0.0) * factor(precision, 0.0)
    assert (zero == 0.0).all()


@pytest.mark.parametrize("name", ["silu", "sigmoid", "tanh"])
def test_neighbours_share_a_reciprocal(name):
    run = function(name, "float16", "paired_value_0")
    generator = np.random.default_rng(1)
    for scale in (SCALE, -1.0):
        x = np.concatenate([generator.normal(size=4000) * spread for spread in (0.1, 1.0, 10.0, 1000.0)])
        s = rounded(x / scale)
        right = exact(name, s * float(np.float32(scale)))
        assert np.abs(run(s, scale) - right).max() < 6e-7 * max(1.0, np.abs(right).max())
    # Products of the input dtype's largest numbers: nothing that float16 shows is left of x * 2^-62.
    assert np.abs(run(np.array([-5e11, 3.0, -60.0, -5e11]), 1.0)[[0, 3]] - exact(name, -1e3)).max() < 2e-7
    assert np.isnan(run(np.array([np.nan, 1.0]), 1.0)[0])


def test_which_activations_have_a_form():
    gated = {
        (precision, key) for precision in ("bfloat16", "float16") for key in (*activations(), QUICK) if function(key, precision)
    }
    assert gated == set(BOUNDS)
    paired = {key for key in (*activations(), QUICK) if function(key, "float16", "paired_value_0")}
    assert {"silu", "sigmoid", "tanh", QUICK} <= paired
    assert not paired & {"gelu", "gelu_tanh", "relu", "exp"}
    like_gelu = Activation(lambda s: 0.5 * s * (1 + torch.tanh(s * (0.80015707 + 0.0347008929 * s * s)))).key
    assert function(like_gelu, "bfloat16") is not None
    assert function(like_gelu, "float16") is None, "what bfloat16 takes for gelu is not gelu to float16"
    assert function(Activation(lambda s: torch.nn.functional.silu(-s)).key, "bfloat16") is None
    assert function(Activation(lambda s: torch.nn.functional.silu(s) / 64).key, "bfloat16") is not None


def test_without_a_share_nothing_is_generated():
    for precision in ("bfloat16", "float16"):
        assert "relieved" not in generate(("silu",), precision=precision, frontend="gluon")
        assert "relieved" not in generate(("silu", "gelu"), precision=precision, frontend="gluon", eighths=4), "heads differ"
        assert "relieved" not in generate(("relu",), precision=precision, frontend="gluon", eighths=4)
    assert "relieved" not in generate(("silu",), eighths=4), "float32 is exact"


def test_eighths_are_checked():
    pytest.importorskip("triton")
    with pytest.raises(GdpaError, match="eighths: expected 0 to 8, got 9"):
        device_functions(("silu",), precision="bfloat16", frontend="gluon", eighths=9)


@pytest.mark.parametrize("eighths", range(1, 9))
def test_columns_are_spread_and_the_first_are_not_among_them(eighths):
    source = generate(("silu",), precision="bfloat16", frontend="triton", eighths=eighths)
    text = source[source.index("def relieved_columns") :].split("\n\n\n")[0]
    tile = types.SimpleNamespace(shape=(1, 128))
    names = {"tl": types.SimpleNamespace(arange=lambda a, b: np.arange(a, b))}
    exec(text, names)
    chosen = names["relieved_columns"](tile)[0]
    assert chosen.sum() == min(16 * eighths, 120)
    groups = chosen.reshape(16, 8)
    assert (groups.all(1) | ~groups.any(1)).all(), "a thread has its columns of a group in the same register everywhere"
    assert not chosen[:8].any(), "single scores far below 0 err too much"
    for start in range(1, 8):
        window = groups[start : start + 4, 0].sum()
        assert math.floor(eighths / 2) <= window <= math.ceil(eighths / 2)


def bf16(x):
    return torch.as_tensor(x).float().bfloat16().double()


def fp16(x):
    return torch.as_tensor(x).float().half().double()


# Keys, problems, and whether all columns have the form that can, or half of them.
SIZES = (
    *((1, 20, False), (9, 50, True), (16, 50, True), (17, 50, False)),
    *((24, 50, True), (128, 20, False), (512, 4, False), (512, 4, True)),
)


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["values around 0", "values around 1"])
@pytest.mark.parametrize("spread", [0.03, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize(("precision", "key"), BOUNDS, ids=lambda x: "quick" if x == QUICK else x)
def test_problems_stay_inside_the_budget(precision, key, spread, mean):
    """Every problem judged as gdpa.numerics judges it, of half the rows that the kernel asks for."""
    rows = FEWEST_PACKED_ROWS // 2
    to_dtype, eps = (bf16, 2.0**-7) if precision == "bfloat16" else (fp16, 2.0**-10)
    generator = torch.Generator().manual_seed(5)
    run, c = function(key, precision), factor(precision, float(np.float32(SCALE)))
    worst = 0.0
    for keys, count, whole in SIZES:
        x = torch.randn(count, rows, keys, generator=generator, dtype=torch.float64) * spread
        s = (x / SCALE).float().double()
        v = to_dtype(torch.randn(count, keys, D, generator=generator) * (0.1 if mean else 1.0) + mean)
        f = Activation.from_key(key)(s * SCALE)
        truth, ideal = f @ v, to_dtype(to_dtype(f) @ v)
        gated = torch.from_numpy(run(s.numpy(), SCALE)).reshape(s.shape)
        group = torch.arange(keys) // 8 % 16
        chosen = group > 0 if whole else group % 2 == 1
        p = torch.where(chosen, to_dtype(gated), to_dtype(f / c))
        result = to_dtype(p @ v * c)

        def deviations(y, truth=truth):
            difference = (y - truth).flatten(1)
            return difference.norm(dim=1) / truth.flatten(1).norm(dim=1), difference.abs().amax(1)

        (relative, largest), (relative_best, largest_best) = deviations(result), deviations(ideal)
        peak = truth.flatten(1).abs().amax(1)
        shares = relative / (2 * relative_best.clamp(min=eps / math.sqrt(12.0))), largest / (2 * largest_best + eps * peak)
        worst = max(worst, *(share.max().item() for share in shares))
    assert worst < 0.9


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows", "relieved"),
    [
        (torch.bfloat16, 64, 256, True),
        (torch.bfloat16, 64, 2, False),  # too few of them share the budget
        (torch.bfloat16, 128, 256, False),
        (torch.float16, 128, 256, True),
    ],
)
def test_the_forward_kernel_has_the_form_where_the_table_says(monkeypatch, dtype, head_dim, rows, relieved):
    pytest.importorskip("triton")
    from gdpa.backends.gpu import example, precision_of
    from gdpa.backends.hopper import launch
    from gdpa.problem import describe

    q, k, v, *offsets = example("dense", 4, rows, 4, 4, head_dim, head_dim, dtype)
    problem = describe(q, k, v, *offsets, None, None, ("silu",), None, 1.0, (-1, -1), False)
    functions = device_functions(("silu",), precision=precision_of(dtype), frontend="gluon", eighths=2)
    monkeypatch.setattr(launch, "RELIEVED_EIGHTHS", dict.fromkeys(launch.RELIEVED_EIGHTHS, 2))
    chosen = launch._constants(problem, q, k, v, q, None)["activate"]
    assert (chosen is functions.relieved) == relieved
    monkeypatch.setattr(launch, "RELIEVED_EIGHTHS", dict.fromkeys(launch.RELIEVED_EIGHTHS, 0))
    assert launch._constants(problem, q, k, v, q, None)["activate"].__name__ == "activate_scaled"

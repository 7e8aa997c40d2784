"""Activations in packed bfloat16: which have the form, and what the generated steps err, every rounding of theirs made on the CPU."""

from __future__ import annotations

import math
import re

import pytest
import torch

from gdpa.activations import Activation, activations
from gdpa.device_source import EXACT_COLUMNS, FEWEST_PACKED_ROWS, generate

D = 64
SCALE = D**-0.5
EPS = torch.finfo(torch.bfloat16).eps


def bf16(x):
    return x.float().bfloat16().double()


def written(key):
    """The texts of the functions that open and finish packed scores; None where there are none."""
    source = generate((key,), precision="bfloat16", frontend="gluon")
    if "def open_packed" not in source:
        return None
    names = ("opened_value_0(s, scale)", "finish_packed(x, DTYPE: tl.constexpr)")
    return [source.split(f"def {name}:\n")[1].split("\n\n\n")[0] for name in names]


def both(number):
    """What the device function of that name makes of a number: its two roundings."""
    first = bf16(torch.tensor(number, dtype=torch.float64))
    return torch.stack([first, bf16(2 * torch.tensor(number, dtype=torch.float64) - first)])


def run_steps(texts, s, scale):
    """The assembly of packed functions on the columns of s, rounded after every instruction."""
    opening, finish = texts
    names = {"scale": scale, "scale_2": scale**2, "scale_3": scale**3}
    constants = [both(eval(x, names)) for x in re.findall(r"k\d+ = both\((.*)\)", opening)]
    halves = torch.arange(s.shape[-1]) % 2
    opened = run(opening, {f"${4 + 2 * i}": pair[halves] for i, pair in enumerate(constants)}, s)
    return run(finish, {"$1": opened["$0"], "$2": opened["$1"]})["$0"]


def run(text, values, s=None):
    """All that the instructions of a function compute; s are the scores, $2 and $3, if it converts them."""
    steps = {
        "mul.rn": lambda a, b: a * b,
        "add.rn": lambda a, b: a + b,
        "fma.rn": lambda a, b, c: a * b + c,
        "tanh.approx": torch.tanh,
        "mov": lambda a: a,
    }
    for name, arguments in re.findall(r"^ +([a-z.]+)\.b(?:f16x2|32)(?:\.f32)? (.*);$", text, re.MULTILINE):
        result, *operands = arguments.split(", ")
        if name == "cvt.rn":
            assert operands == ["$3", "$2"]
            values[result] = bf16(s)
        elif name != ".reg":
            values[result] = bf16(steps[name](*(values[x] for x in operands)))
    return values


def test_gelus_have_a_packed_form():
    assert written("gelu") is not None
    assert written("gelu_tanh") is not None
    halved = Activation(lambda s: torch.nn.functional.gelu(s) / 64)
    assert written(halved.key) == written("gelu"), "but for a factor they are the same"


@pytest.mark.parametrize(
    "fn",
    [
        *(name for name in activations() if name not in ("gelu", "gelu_tanh")),
        lambda s: s * torch.tanh(s + 3.0) + s,  # the error of s + 3 is not a share of s
        lambda s: s * torch.tanh(s * (4.0 - s * s)) + s,  # nor that of 4 - s * s one of itself
        lambda s: s * s * torch.nn.functional.gelu(s),
        lambda s: torch.nn.functional.gelu(-s),
    ],
    ids=lambda fn: fn if isinstance(fn, str) else fn.__name__,
)
def test_others_have_none(fn):
    assert written(Activation(fn).key) is None


def test_there_is_none_for_heads_that_differ_nor_for_finer_dtypes():
    assert "open_packed" in generate(("gelu", "gelu"), precision="bfloat16", frontend="gluon")
    assert "open_packed" not in generate(("gelu", "gelu_tanh"), precision="bfloat16", frontend="gluon")
    assert "open_packed" not in generate(("gelu",)), "fp16 and fp32 round finer than these steps"


def test_constants_err_less_together_than_alone():
    for number in torch.logspace(-6, 1, 200, dtype=torch.float64).tolist():
        assert abs(both(number).mean().item() / number - 1) <= EPS / 4


@pytest.mark.parametrize("scale", [SCALE, 1.0, 1e-3])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_the_steps_compute_the_activation(name, scale):
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([1e4, 1e30, 0.0, -40.0])]).double()
    s = (x / scale).float().double()
    result = run_steps(written(name), s, scale) * 0.5 * scale
    exact = Activation(name)(s * scale)
    assert torch.isfinite(result).all()
    # Roundings of the score, of tanh near -1, where the value is small, and of the result.
    assert ((result - exact).abs() / (s * scale).abs().clamp(min=1e-30)).nan_to_num().max() < 1.5 * EPS


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["values around 0", "values around 1"])
@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_problems_of_some_rows_stay_inside_the_budget(name, spread, mean):
    """Every problem judged as gdpa.numerics judges it, of half the rows that the kernel asks for before it packs."""
    generator = torch.Generator().manual_seed(3)
    texts = written(name)
    rows = FEWEST_PACKED_ROWS // 2
    for keys in (1, 7, 15, 16, 17, 18, 24, 33, 65, 128, 300):
        count = 200 if keys < 65 else 40
        x = torch.randn(count, rows, keys, generator=generator, dtype=torch.float64) * spread
        s = (x / SCALE).float().double()
        v = bf16(torch.randn(count, keys, D, generator=generator) * (0.1 if mean else 1.0) + mean)
        f = Activation(name)(s * SCALE)
        truth, ideal = f @ v, bf16(bf16(f) @ v)
        # The exact columns as fp32 has them, but for the factor.
        exact, packed = bf16(f / (0.5 * SCALE)), run_steps(texts, s, SCALE)
        p = torch.where(torch.arange(keys) % 128 < EXACT_COLUMNS, exact, packed)
        result = bf16(p @ v * (0.5 * SCALE))

        def errors(x, truth=truth):
            difference = (x - truth).flatten(1)
            return difference.norm(dim=1) / truth.flatten(1).norm(dim=1), difference.abs().amax(1)

        (relative, largest), (relative_best, largest_best) = errors(result), errors(ideal)
        peak = truth.flatten(1).abs().amax(1)
        shares = relative / (2 * relative_best.clamp(min=EPS / math.sqrt(12.0))), largest / (2 * largest_best + EPS * peak)
        assert max(share.max().item() for share in shares) < 0.9, (rows, keys, [share.max() for share in shares])


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_whole_slices_of_a_product_are_exact(name):
    """P goes to the tensor cores 16 keys at a time; a pair of columns that were not both packed would be read as one that was."""
    assert EXACT_COLUMNS % 16 == 0
    for text in written(name):
        assert "tl.where(exact_columns(" in text.splitlines()[-1]

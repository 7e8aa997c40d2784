"""Activations in packed 16-bit numbers: which have the form, and what the generated steps err, every rounding of theirs made on the CPU."""

from __future__ import annotations

import math
import re

import pytest
import torch

from gdpa.activations import Activation, activations
from gdpa.device_source import EXACT_COLUMNS, FEWEST_PACKED_ROWS, generate

D = 64
SCALE = D**-0.5
DTYPES = {"bfloat16": torch.bfloat16, "float16_sm90_many": torch.float16}
EACH = pytest.mark.parametrize("precision", DTYPES)


class Packed:
    """The packed functions of an activation, run on a CPU."""

    def __init__(self, key: str, precision: str) -> None:
        self.dtype = DTYPES[precision]
        self.eps = torch.finfo(self.dtype).eps
        source = generate((key,), precision=precision, frontend="gluon")
        names = ("opened_value_0(s, scale)", "finish_packed(x, DTYPE: tl.constexpr)")
        # The texts of the functions that open and finish packed scores; None where there are none.
        self.texts = (
            [source.split(f"def {name}:\n")[1].split("\n\n\n")[0] for name in names] if "def open_packed" in source else None
        )
        self.factor = 0.5 if precision == "bfloat16" else None  # of the scale, left out

    def rounded(self, x):
        return x.float().to(self.dtype).double()

    def both(self, number):
        """What the device function of that name makes of a number: its two roundings."""
        number = torch.tensor(number, dtype=torch.float64)
        first = self.rounded(number)
        return torch.stack([first, self.rounded(2 * number - first)])

    def exact(self, f, scale):
        """P of exact values, as the columns that are not packed have it."""
        return self.rounded(f / (self.factor * scale) if self.factor else f)

    def whole(self, p, scale):
        """Of P, or a sum over it, what it is with its factor."""
        return p * (self.factor * scale) if self.factor else p

    def __call__(self, s, scale):
        """The assembly on the columns of s, rounded after every instruction."""
        opening, finish = self.texts
        names = {"scale": scale, "scale_2": scale**2, "scale_3": scale**3}
        constants = [self.both(eval(x, names)) for x in re.findall(r"k\d+ = both\((.*)\)", opening)]
        multiple = re.search(r"h = s \* \((.*)\)", opening)
        halves = torch.arange(s.shape[-1]) % 2
        values = {f"${4 + 2 * i}": pair[halves] for i, pair in enumerate(constants)}
        opened = self._run(opening, values, s * eval(multiple[1], names) if multiple else s)
        return self._run(finish, {"$1": opened["$0"], "$2": opened["$1"]})["$0"]

    def _run(self, text, values, s=None):
        """All that the instructions of a function compute; s are the scores, $2 and $3, if it converts them."""
        steps = {
            "mul.rn": lambda a, b: a * b,
            "add.rn": lambda a, b: a + b,
            "fma.rn": lambda a, b, c: a * b + c,
            "tanh.approx": torch.tanh,
            "mov": lambda a: a,
        }
        for name, arguments in re.findall(r"^ +([a-z.]+)\.b?(?:f16x2|32)(?:\.f32)? (.*);$", text, re.MULTILINE):
            result, *operands = arguments.split(", ")
            if name == "cvt.rn.satfinite":
                assert operands == ["$3", "$2"]
                values[result] = self.rounded(s.clamp(-65504.0, 65504.0))
            elif name == "cvt.rn":
                assert operands == ["$3", "$2"]
                values[result] = self.rounded(s)
            elif name != ".reg":
                values[result] = self.rounded(steps[name](*(values[x] for x in operands)))
        return values


@EACH
def test_gelus_have_a_packed_form(precision):
    assert Packed("gelu", precision).texts is not None
    assert Packed("gelu_tanh", precision).texts is not None


def test_a_multiple_of_gelu_is_packed_where_its_factor_is_left_out():
    halved = Activation(lambda s: torch.nn.functional.gelu(s) / 64)
    assert Packed(halved.key, "bfloat16").texts == Packed("gelu", "bfloat16").texts
    assert Packed(halved.key, "float16_sm90_many").texts is None


@EACH
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
def test_others_have_none(fn, precision):
    assert Packed(Activation(fn).key, precision).texts is None


def test_there_is_none_for_heads_that_differ_nor_for_finer_dtypes():
    assert "open_packed" in generate(("gelu", "gelu"), precision="bfloat16", frontend="gluon")
    assert "open_packed" not in generate(("gelu", "gelu_tanh"), precision="bfloat16", frontend="gluon")
    assert "open_packed" not in generate(("gelu",)), "fp32 rounds finer than these steps"
    assert "open_packed" not in generate(("gelu",), precision="float16_sm90"), "nor has it few keys to spare"
    assert "open_packed" not in generate(("gelu",), precision="float16"), "elsewhere tanh takes two instructions"


@EACH
def test_constants_err_less_together_than_alone(precision):
    packed = Packed("gelu", precision)
    for number in torch.logspace(-4, 1, 200, dtype=torch.float64).tolist():
        assert abs(packed.both(number).mean().item() / number - 1) <= packed.eps / 4


@EACH
@pytest.mark.parametrize("scale", [SCALE, 1.0, 1e-3])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_the_steps_compute_the_activation(name, scale, precision):
    packed = Packed(name, precision)
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([1e4, 6e4, 0.0, -40.0, -6e4])]).double()
    s = (x / scale).float().double()
    result = packed.whole(packed(s, scale), scale)
    exact = Activation(name)(s * scale)
    assert torch.isfinite(result).all()
    # Roundings of the score, of tanh near -1, where the value is small, and of the result.
    assert ((result - exact).abs() / (s * scale).abs().clamp(min=packed.eps)).nan_to_num().max() < 1.5 * packed.eps


@EACH
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_scores_far_out(name, precision):
    """Past the range of fp16, -inf + inf would be no number where f is 0; above it f is infinite in fp16 anyway."""
    packed = Packed(name, precision)
    below, above = packed(torch.tensor([[-1e30, -3e5, 3e5, 1e30]]).double(), 1.0).split(2, dim=1)
    assert below.abs().max() < 1e-3
    assert (above > 2e5).all() if precision == "bfloat16" else above.isinf().all()


@EACH
@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["values around 0", "values around 1"])
@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("block", [128, 64], ids="blocks of {}".format)
def test_problems_of_some_rows_stay_inside_the_budget(block, name, spread, mean, precision):
    """Every problem judged as gdpa.numerics judges it, of half the rows that the kernel asks for before it packs."""
    generator = torch.Generator().manual_seed(3)
    packed = Packed(name, precision)
    rows = FEWEST_PACKED_ROWS // 2
    for keys in (1, 7, 15, 16, 17, 18, 24, 33, 65, 128, 300):
        count = 200 if keys < 65 else 40
        x = torch.randn(count, rows, keys, generator=generator, dtype=torch.float64) * spread
        s = (x / SCALE).float().double()
        v = packed.rounded(torch.randn(count, keys, D, generator=generator) * (0.1 if mean else 1.0) + mean)
        f = Activation(name)(s * SCALE)
        truth, ideal = f @ v, packed.rounded(packed.rounded(f) @ v)
        p = torch.where(torch.arange(keys) % block < EXACT_COLUMNS, packed.exact(f, SCALE), packed(s, SCALE))
        result = packed.rounded(packed.whole(p @ v, SCALE))

        def errors(x, truth=truth):
            difference = (x - truth).flatten(1)
            return difference.norm(dim=1) / truth.flatten(1).norm(dim=1), difference.abs().amax(1)

        (relative, largest), (relative_best, largest_best) = errors(result), errors(ideal)
        peak = truth.flatten(1).abs().amax(1)
        shares = (
            relative / (2 * relative_best.clamp(min=packed.eps / math.sqrt(12.0))),
            largest / (2 * largest_best + packed.eps * peak),
        )
        assert max(share.max().item() for share in shares) < 0.9, (rows, keys, [share.max() for share in shares])


@EACH
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_whole_slices_of_a_product_are_exact(name, precision):
    """P goes to the tensor cores 16 keys at a time; a pair of columns that were not both packed would be read as one that was."""
    assert EXACT_COLUMNS % 16 == 0
    for text in Packed(name, precision).texts:
        assert "tl.where(exact_columns(" in text.splitlines()[-1]

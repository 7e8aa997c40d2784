"""Activations in packed 16-bit numbers: which have the form, and what the generated steps err, every rounding of theirs made on the CPU."""

from __future__ import annotations

import math
import re

import pytest
import torch
from simulator import assembly

from gdpa.activations import Activation, activations
from gdpa.complement import roots
from gdpa.device_source import generate
from gdpa.packing import FEWEST_PACKED_ROWS, FLAVOURS, PACKED_SCALES

D = 64
SCALE = D**-0.5
DTYPES = {"bfloat16": torch.bfloat16, "float16_sm90_many": torch.float16}
EACH = pytest.mark.parametrize("precision", DTYPES)
# Of every precision the numbers of a tile's columns that may be computed in fp32: in later blocks of keys none.
EACH_WAY = pytest.mark.parametrize(
    ("precision", "exact"), [(precision, exact) for precision, flavour in FLAVOURS.items() for exact in flavour.ways]
)


class Packed:
    """The packed functions of an activation, run on a CPU."""

    def __init__(self, key: str, precision: str, exact: int = 0) -> None:
        self.dtype = DTYPES[precision]
        self.eps = torch.finfo(self.dtype).eps
        source = generate((key,), precision=precision, frontend="gluon")
        names = (f"opened_value_0_{exact}(s, scale)", f"finish_packed_{exact}(x, DTYPE: tl.constexpr)", "both(k)")
        # The texts of the functions that open and finish packed scores, and double a constant; None where there are none.
        has_form = f"def open_packed_{exact}" in source
        self.texts = [source.split(f"def {name}:\n")[1].split("\n\n\n")[0] for name in names] if has_form else None
        self.factor = 0.5 if precision == "bfloat16" else None  # of the scale, left out

    def rounded(self, x):
        return x.float().to(self.dtype).double()

    def both(self, number):
        """What the device function of that name makes of a number: its two roundings."""
        return assembly.halves(self._constant(torch.tensor([number])), self.dtype).double()

    def _constant(self, number):
        return self._run(self.texts[2], [number.float()], [torch.int32])[0]

    def exact(self, f, scale):
        """P of exact values, as the columns that are not packed have it."""
        return self.rounded(f / (self.factor * scale) if self.factor else f)

    def whole(self, p, scale):
        """Of P, or a sum over it, what it is with its factor."""
        return p * (self.factor * scale) if self.factor else p

    def __call__(self, s, scale):
        """The assembly on the columns of s, rounded after every instruction."""
        opening, finish, _ = self.texts
        names = {"scale": scale, **{f"scale_{i}": scale**i for i in (2, 3, 4)}}
        constants = [eval(x, names) for x in re.findall(r"k\d+ = both\((.*)\)", opening)]
        multiple = re.search(r"h = s \* \((.*)\)", opening)
        columns = s.shape[-1]
        x = torch.nn.functional.pad(s * eval(multiple[1], names) if multiple else s, (0, -columns % 16)).float()
        words = [self._constant(torch.tensor([k])).expand_as(x) for k in constants]
        (opened,) = self._run(opening, [x, *words], [torch.float32])
        (result,) = self._run(finish, [opened], [self.dtype])
        return result.double()[..., :columns]

    def _run(self, text, inputs, dtypes):
        """The inline assembly of a function."""
        pack = int(re.findall(r"pack=(\d+)", text)[0])
        (instructions,) = re.findall(r'"""\s+(\{.*?\})\s+"""', text, re.DOTALL)
        return assembly.run(instructions, pack, inputs, dtypes)


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


@EACH_WAY
@pytest.mark.parametrize("scale", [SCALE, 1.0, *PACKED_SCALES])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_the_steps_compute_the_activation(name, scale, precision, exact):
    packed = Packed(name, precision, exact)
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([1e4, 6e4, 0.0, -40.0, -6e4])]).double()
    s = (x / scale).float().double()
    result = packed.whole(packed(s, scale), scale)
    exact = Activation(name)(s * scale)
    assert torch.isfinite(result).all()
    # Roundings of the score, of tanh near -1, where the value is small, and of the result.
    assert ((result - exact).abs() / (s * scale).abs().clamp(min=packed.eps)).nan_to_num().max() < 1.5 * packed.eps


@EACH_WAY
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_scores_far_out(name, precision, exact):
    """Past the range of fp16, -inf + inf would be no number where f is 0; above it f is infinite in fp16 anyway."""
    packed = Packed(name, precision, exact)
    scores = torch.tensor([[-1e30, -3e5, -1e4, -7.0]]).repeat(1, 4).double()  # of every way
    assert packed(scores, 1.0).abs().max() < 1e-3
    above = packed(-scores[:, :2].repeat(1, 4), 1.0)
    assert (above > 2e5).all() if precision == "bfloat16" else above.isinf().all()
    assert packed(torch.full((1, 16), torch.nan).double(), 1.0).isnan().all()


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["values around 0", "values around 1"])
@pytest.mark.parametrize("spread", [0.03, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("precision", "exact", "block"),
    [
        ("bfloat16", 16, 64),
        ("bfloat16", 16, 128),
        ("bfloat16", 32, 128),
        ("float16_sm90_many", 32, 64),
        ("float16_sm90_many", 32, 128),
    ],
)
def test_problems_of_some_rows_stay_inside_the_budget(precision, exact, block, name, spread, mean):
    """Every problem judged as gdpa.numerics judges it, of half the rows that the kernel asks for before it packs."""
    generator = torch.Generator().manual_seed(3)
    first, rest = Packed(name, precision, exact), Packed(name, precision)
    rows = FEWEST_PACKED_ROWS // 2
    for keys in (1, 7, 15, 16, 17, 18, 24, 33, 65, 128, 300, 1000):
        count = 200 if keys < 65 else 40 if keys < 1000 else 10
        x = torch.randn(count, rows, keys, generator=generator, dtype=torch.float64) * spread
        s = (x / SCALE).float().double()
        v = rest.rounded(torch.randn(count, keys, D, generator=generator) * (0.1 if mean else 1.0) + mean)
        f = Activation(name)(s * SCALE)
        truth, ideal = f @ v, rest.rounded(rest.rounded(f) @ v)
        opening = torch.where(torch.arange(keys) < exact, rest.exact(f, SCALE), first(s, SCALE))
        p = torch.where(torch.arange(keys) < block, opening, rest(s, SCALE))
        result = rest.rounded(rest.whole(p @ v, SCALE))

        def errors(x, truth=truth):
            difference = (x - truth).flatten(1)
            return difference.norm(dim=1) / truth.flatten(1).norm(dim=1), difference.abs().amax(1)

        (relative, largest), (relative_best, largest_best) = errors(result), errors(ideal)
        peak = truth.flatten(1).abs().amax(1)
        shares = (
            relative / (2 * relative_best.clamp(min=rest.eps / math.sqrt(12.0))),
            largest / (2 * largest_best + rest.eps * peak),
        )
        assert max(share.max().item() for share in shares) < 0.95, (rows, keys, [share.max() for share in shares])


@EACH_WAY
def test_whole_slices_of_a_product_are_exact(precision, exact):
    """P goes to the tensor cores 16 keys at a time; a pair of columns that were not both packed would be read as one that was."""
    assert exact % 16 == 0
    for text in Packed("gelu", precision, exact).texts[:2]:
        assert (f"tl.where(exact_columns_{exact}(" in text.splitlines()[-1]) == (exact > 0)


class TestWhatAGateLacksOfOne:
    @EACH
    @pytest.mark.parametrize("slope", [0.01, 0.7978845608028654, 3.0])
    def test_the_square_of_a_polynomial_is_near_it(self, slope, precision):
        """For gates like gelu's, of any width; relatively where it is small, as sums over many keys ask for."""
        flavour = FLAVOURS[precision]
        odd = (slope, 0.0702 * slope**3)
        root = roots(odd, flavour.degree, flavour.largest_error)
        assert root is not None
        assert len(root) == flavour.degree
        a = torch.linspace(0, 60 / slope, 60001, dtype=torch.float64)
        q = (1 + sum(k * a**i for i, k in enumerate(root, start=1))).clamp(min=0)
        gate = torch.tanh(a * (odd[0] + odd[1] * a**2))
        assert not q[a * slope > 10].any()
        assert (a * (q**2 - (1 - gate)) / 2).abs().max() < 5 * flavour.largest_error / slope
        small = (a > 0) & (a * slope < 1)
        assert ((1 - q**2) / gate - 1)[small].abs().max() < 3 * flavour.largest_error

    @pytest.mark.parametrize("odd", [(0.5,), (2.0,), (-0.8, 0.04), (0.0, 1.0)])
    def test_gates_that_have_no_such_polynomial(self, odd):
        """silu's, which have longer tails, among them; what does not grow at 0 is no gate."""
        assert roots(odd, 4, 1.2e-3) is None

    def test_a_gate_without_one_keeps_its_tanh(self):
        swish = Activation(lambda s: s * torch.tanh(s * (0.5 + 0.0001 * s * s)) + s)
        source = generate((swish.key,), precision="bfloat16", frontend="gluon")
        assert "tanh.approx.bf16x2" in source
        assert "lop3" not in source
        x = torch.linspace(-12, 12, 480).double()
        packed = Packed(swish.key, "bfloat16")
        assert (packed(x, 1.0) - swish(x)).abs().max() < 0.2

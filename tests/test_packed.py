"""Activations in packed 16-bit numbers: which have the form, and what the generated steps err, every rounding of theirs made on the CPU."""

from __future__ import annotations

import math
import re

import pytest
import torch
from helpers import needs_triton
from simulator import assembly

from gdpa.activations import Activation, activations
from gdpa.complement import roots
from gdpa.device_source import generate
from gdpa.packing import FEWEST_PACKED_ROWS, FLAVOURS, PACKED_SCALES, Form

D = 64
SCALE = D**-0.5
DTYPES = {"bfloat16": torch.bfloat16, "float16_sm90_many": torch.float16}
EACH = pytest.mark.parametrize("precision", DTYPES)
# The forms of a tile's first block of keys and of later ones, and the keys of a block.
OF_KERNELS = {
    "bf16, two consumers": ("bfloat16", (Form(16, True), Form(0, True)), 128),
    "bf16, three": ("bfloat16", (Form(32, False), Form(0, True)), 128),
    "bf16, four": ("bfloat16", (Form(16, True), Form(0, True)), 64),
    "fp16, two and three": ("float16_sm90_many", (Form(32, False), Form(0, False)), 128),
    "fp16, four": ("float16_sm90_many", (Form(32, False), Form(0, False)), 64),
}
EACH_FORM = pytest.mark.parametrize(
    ("precision", "form"),
    [
        pytest.param(precision, form, id=f"{precision}-{form.name}")
        for precision, flavour in FLAVOURS.items()
        for form in flavour.forms
    ],
)


class Packed:
    """The packed functions of an activation, run on a CPU."""

    def __init__(self, key: str, precision: str, form: Form | None = None) -> None:
        form = form or FLAVOURS[precision].forms[0]
        self.dtype = DTYPES[precision]
        self.eps = torch.finfo(self.dtype).eps
        source = generate((key,), precision=precision, frontend="gluon")
        names = (f"opened_value_0_{form.name}(s, scale)", f"finish_packed_{form.name}(x, DTYPE: tl.constexpr)", "both(k)")
        # The texts of the functions that open and finish packed scores, and double a constant; None where there are none.
        has_form = f"def open_packed_{form.name}(" in source
        self.texts = [source.split(f"def {name}:\n")[1].split("\n\n\n")[0] for name in names] if has_form else None
        # What of the scale, and of f, is left out: c = 0.5 * scale, or nothing in float16.
        factor = source.split("def factors_of_scaled_value_0(scale):\n")[1].split("    c = ")[1].split("\n")[0]
        self.power = factor.count("scale")
        self.factor = eval(factor, {"scale": 1.0}) if has_form else None

    def rounded(self, x):
        return x.float().to(self.dtype).double()

    def both(self, number):
        """What the device function of that name makes of a number: its two roundings."""
        return assembly.halves(self._constant(torch.tensor([number])), self.dtype).double()

    def _constant(self, number):
        return self._run(self.texts[2], [number.float()], [torch.int32])[0]

    def exact(self, f, scale):
        """P of exact values, as the columns that are not packed have it."""
        return self.rounded(f / (self.factor * scale**self.power))

    def whole(self, p, scale):
        """Of P, or a sum over it, what it is with its factor."""
        return p * (self.factor * scale**self.power)

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


@EACH_FORM
@pytest.mark.parametrize("scale", [SCALE, 1.0, *PACKED_SCALES])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_the_steps_compute_the_activation(name, scale, precision, form):
    packed = Packed(name, precision, form)
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([1e4, 6e4, 0.0, -40.0, -6e4])]).double()
    s = (x / scale).float().double()
    result = packed.whole(packed(s, scale), scale)
    exact = Activation(name)(s * scale)
    assert torch.isfinite(result).all()
    # Roundings of the score, of tanh near -1, where the value is small, and of the result.
    assert ((result - exact).abs() / (s * scale).abs().clamp(min=packed.eps)).nan_to_num().max() < 1.5 * packed.eps


@EACH_FORM
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_scores_far_out(name, precision, form):
    """Past the range of fp16, -inf + inf would be no number where f is 0; above it f is infinite in fp16 anyway."""
    packed = Packed(name, precision, form)
    scores = torch.tensor([[-1e30, -3e5, -1e4, -7.0]]).repeat(1, 4).double()  # of every way
    assert packed(scores, 1.0).abs().max() < 1e-3
    above = packed(-scores[:, :2].repeat(1, 4), 1.0)
    assert (above > 2e5).all() if precision == "bfloat16" else above.isinf().all()
    assert packed(torch.full((1, 16), torch.nan).double(), 1.0).isnan().all()


def largest_share(kernel, name, spread, mean, keys, count):
    """Of the error budget, in `count` problems of half the rows that the kernel asks for before it packs, judged as gdpa.numerics does."""
    precision, forms, block = OF_KERNELS[kernel]
    generator = torch.Generator().manual_seed(keys)
    first, rest = (Packed(name, precision, form) for form in forms)
    x = torch.randn(count, FEWEST_PACKED_ROWS // 2, keys, generator=generator, dtype=torch.float64) * spread
    s = (x / SCALE).float().double()
    v = rest.rounded(torch.randn(count, keys, D, generator=generator) * (0.1 if mean else 1.0) + mean)
    f = Activation(name)(s * SCALE)
    truth, ideal = f @ v, rest.rounded(rest.rounded(f) @ v)
    opening = torch.where(torch.arange(keys) < forms[0].exact, rest.exact(f, SCALE), first(s, SCALE))
    p = torch.where(torch.arange(keys) < block, opening, rest(s, SCALE))
    result = rest.rounded(rest.whole(p @ v, SCALE))

    def errors(x):
        difference = (x - truth).flatten(1)
        return difference.norm(dim=1) / truth.flatten(1).norm(dim=1), difference.abs().amax(1)

    (relative, largest), (relative_best, largest_best) = errors(result), errors(ideal)
    peak = truth.flatten(1).abs().amax(1)
    shares = (
        relative / (2 * relative_best.clamp(min=rest.eps / math.sqrt(12.0))),
        largest / (2 * largest_best + rest.eps * peak),
    )
    return max(share.max().item() for share in shares)


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["values around 0", "values around 1"])
@pytest.mark.parametrize("spread", [0.03, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("kernel", OF_KERNELS)
def test_problems_of_some_rows_stay_inside_the_budget(kernel, name, spread, mean):
    for keys in (1, 7, 15, 16, 17, 18, 24, 33, 65, 128, 300, 1000):
        count = 200 if keys < 65 else 40 if keys < 1000 else 10
        assert largest_share(kernel, name, spread, mean, keys, count) < 0.95, keys


@pytest.mark.parametrize("spread", [0.001, 0.003, 0.01])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_sums_of_many_small_scores_in_float16(name, spread):
    """Where h cancels and values are alike, little but h tanh(u(h)) is left, less than a thousandth of h."""
    assert largest_share("fp16, four", name, spread, 1.0, 4096, 4) < 0.95


@needs_triton
def test_the_forms_of_kernels_are_these():
    from gdpa.backends.hopper.plan_forward import FORMS, FORMS_IN_FLOAT16

    numbers = {"bf16, two consumers": 2, "bf16, three": 3, "bf16, four": 4}
    assert {name: forms for name, (_, forms, _) in OF_KERNELS.items()} == {
        name: FORMS[numbers[name]] if name in numbers else FORMS_IN_FLOAT16 for name in OF_KERNELS
    }


@EACH_FORM
@pytest.mark.parametrize("width", [1 / 64, 1 / 32, 1 / 16, 1 / 3, 3, 16, 24, 64, 1000], ids="{:.3g}".format)
def test_gates_of_any_width(width, precision, form):
    """Where float16 has not the numbers for their constants, there is no such form, or not the one without tanh."""
    for fn in (
        lambda s: torch.nn.functional.gelu(s * width, approximate="tanh") / width,
        lambda s: 3 * torch.nn.functional.gelu(s * width),
    ):
        activation = Activation(fn)
        packed = Packed(activation.key, precision, form)
        assert packed.texts is not None or precision != "bfloat16"
        for scale in (1.0, 0.1, *PACKED_SCALES) if packed.texts is not None else ():
            x = torch.linspace(-12 / width, 12 / width, 4800, dtype=torch.float64)
            s = (x / scale).float().double()
            exact, result = activation(s * scale), packed.whole(packed(s, scale), scale)
            if exact.abs().max() < 6e4 or precision == "bfloat16":
                assert (result - exact).norm() < 2.5 * packed.eps * exact.norm(), (scale, fn)


@EACH_FORM
def test_whole_slices_of_a_product_are_exact(precision, form):
    """P goes to the tensor cores 16 keys at a time; a pair of columns that were not both packed would be read as one that was."""
    assert form.exact % 16 == 0
    for text in Packed("gelu", precision, form).texts[:2]:
        assert (f"tl.where(exact_columns_{form.exact}(" in text.splitlines()[-1]) == (form.exact > 0)


@EACH_FORM
def test_every_other_pair_goes_by_tanh_where_they_take_turns(precision, form):
    opening = Packed("gelu", precision, form).texts[0]
    complements = opening.count("fma.rn.relu" if precision == "bfloat16" else "mul.rn.sat")
    assert (opening.count("tanh.approx"), complements) == ((2, 2) if form.in_turn else (0, 1))


class TestWhatAGateLacksOfOne:
    @EACH
    @pytest.mark.parametrize("slope", [0.01, 0.7978845608028654, 3.0])
    def test_the_square_of_a_polynomial_is_near_it(self, slope, precision):
        """For gates like gelu's, of any width, in exact numbers; relatively where it is small, as sums over many keys ask for."""
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

    @EACH
    @pytest.mark.parametrize("odd", [(0.5,), (2.0,), (-0.8, 0.04), (0.0, 1.0)])
    def test_gates_that_have_no_such_polynomial(self, odd, precision):
        """silu's, which have longer tails, among them; what does not grow at 0 is no gate."""
        flavour = FLAVOURS[precision]
        assert roots(odd, flavour.degree, flavour.largest_error) is None

    def test_a_gate_without_one_keeps_its_tanh(self):
        swish = Activation(lambda s: s * torch.tanh(s * (0.5 + 0.0001 * s * s)) + s)
        source = generate((swish.key,), precision="bfloat16", frontend="gluon")
        assert "tanh.approx.bf16x2" in source
        assert "lop3" not in source
        x = torch.linspace(-12, 12, 480).double()
        packed = Packed(swish.key, "bfloat16")
        assert ((packed(x, 1.0) - swish(x)) / x).abs().max() < 2 * packed.eps

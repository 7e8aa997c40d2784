"""The length generators: their ranges, their shape, and that a seed means the same lengths everywhere."""

import pytest
import torch

import gdpa
from gdpa.data import traffic

GENERATORS = pytest.mark.parametrize("generator", traffic.GENERATORS.values(), ids=traffic.GENERATORS)


@GENERATORS
def test_lengths_are_int64_on_the_cpu_and_within_the_cap(generator):
    lengths = generator(500, 300, seed=3)
    assert lengths.dtype == torch.int64
    assert lengths.device.type == "cpu"
    assert lengths.shape == (500,)
    assert lengths.min() >= 0
    assert lengths.max() <= 300


@GENERATORS
def test_a_seed_gives_the_same_lengths_and_another_seed_others(generator):
    assert torch.equal(generator(64, 512, seed=5), generator(64, 512, seed=5))
    assert not torch.equal(generator(64, 512, seed=5), generator(64, 512, seed=6))


@GENERATORS
def test_drawing_leaves_the_global_generator_alone(generator):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generator(64, 512)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("generator", "expected"),
    [
        (traffic.uniform, [994, 725, 471, 943, 661, 811, 183, 360]),
        (traffic.lognormal, [1024, 231, 106, 652, 188, 317, 40, 76]),
        (traffic.power_law, [267, 27, 14, 100, 22, 38, 9, 12]),
    ],
    ids=["uniform", "lognormal", "power-law"],
)
def test_published_figures_can_be_drawn_again(generator, expected):
    """These values may never change: results/ holds figures measured on them."""
    assert generator(8, 1024, seed=0).tolist() == expected


def test_uniform_covers_the_range_that_its_sparsity_names():
    lengths = traffic.uniform(20_000, 100, sparsity=0.75)
    assert lengths.min() == 50
    assert lengths.max() == 100
    assert lengths.double().mean().item() == pytest.approx(75, abs=0.5)
    assert traffic.uniform(20_000, 100).min() == 1


def test_uniform_at_sparsity_one_is_a_dense_batch():
    assert traffic.uniform(7, 64, sparsity=1.0).tolist() == [64] * 7


def test_lognormal_has_its_median_its_empties_and_reaches_the_cap():
    lengths = traffic.lognormal(20_000, 1024, median=120, empty=0.05)
    present = lengths[lengths > 0]
    assert present.median().item() == pytest.approx(120, rel=0.05)
    assert (lengths == 0).double().mean().item() == pytest.approx(0.05, abs=0.01)
    assert (lengths == 1024).any()


def test_power_law_halves_its_tail_when_the_length_doubles():
    lengths = traffic.power_law(50_000, 4096, exponent=1.0, shortest=8, empty=0.0)
    assert lengths.min() == 8
    longer = [(lengths > bound).double().mean().item() for bound in (32, 64, 128)]
    assert longer[1] / longer[0] == pytest.approx(0.5, abs=0.05)
    assert longer[2] / longer[1] == pytest.approx(0.5, abs=0.05)


def test_an_empty_batch_is_an_empty_tensor():
    assert all(generator(0, 10).shape == (0,) for generator in traffic.GENERATORS.values())


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: traffic.uniform(-1, 4), "batch"),
        (lambda: traffic.uniform(1, 0), "cap"),
        (lambda: traffic.uniform(1, 4, sparsity=0.3), "sparsity"),
        (lambda: traffic.lognormal(1, 4, empty=1.5), "empty"),
        (lambda: traffic.lognormal(1, 4, median=0), "median"),
        (lambda: traffic.power_law(1, 4, exponent=0), "exponent"),
    ],
    ids=["batch", "cap", "sparsity", "empty", "median", "exponent"],
)
def test_a_wrong_argument_is_named(call, argument):
    with pytest.raises(gdpa.GdpaError, match=argument):
        call()

"""The triton backend on a GPU, every option against the oracle, in the dtypes it takes.

A compiled kernel is fixed by the dtype, the activation, both head dimensions, the grouping, the form, and whether there
is a window or a per-sequence scale. The tests share these as far as they can, since compiling takes most of their time.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import FORMS, Case, assert_neighbours_untouched, check, make_case, poison_sequence, run

import gdpa

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FUZZ = int(os.environ.get("GDPA_FUZZ", "100"))

BASE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
Q_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 1000, 5, 0)
K_LENGTHS = (64, 129, 0, 65, 1000, 128, 63, 127, 64, 1, 0)
SHORT = {"q_lengths": (0, 130, 65, 1), "k_lengths": (64, 33, 129, 0)}


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request) -> torch.dtype:
    return request.param


def test_triton_is_what_runs_by_default_what_hopper_does_not():
    case = make_case(**{**BASE, "head_dim": 96})
    explanation = case.explain()
    assert explanation.backend == "triton"
    assert "hopper" in explanation.why_not
    assert "cpu" in explanation.why_not
    assert "reference" in explanation.why_not


@pytest.mark.parametrize("window", [(-1, -1), (100, 30)], ids=["all pairs", "window"])
def test_every_size(dtype, window):
    check(make_case(**{**BASE, "dtype": dtype}, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, window_size=window), "triton")


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (5, -1), (-1, 70), (200, 200), (0, 300)], ids=str)
def test_every_kind_of_window(window):
    check(make_case(**BASE, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, window_size=window), "triton")


def test_all_named_activations_one_per_head(dtype):
    names = list(gdpa.activations())
    options = {**BASE, "dtype": dtype, "heads": len(names), "kv_heads": 1, "head_dim": 32}
    check(make_case(**options, activation=names, q_lengths=(70, 129), k_lengths=(65, 140), spread=0.8), "triton")


@pytest.mark.parametrize("name", ["identity", "relu", "silu", "gelu_tanh", "softplus", "sigmoid"])
def test_a_named_activation_alone(name):
    check(make_case(**BASE, **SHORT, activation=name, spread=2.0), "triton")


CUSTOM = {
    "relu squared over 64": lambda s: torch.relu(s) ** 2 / 64,
    "gaussian": lambda s: torch.exp(-s * s),
    "mish": torch.nn.functional.mish,
}


@pytest.mark.parametrize("fn", CUSTOM.values(), ids=CUSTOM.keys())
def test_a_callable(fn):
    check(make_case(**BASE, **SHORT, activation=fn), "triton")


@pytest.mark.parametrize("fn", [torch.log, torch.rsqrt], ids=["log", "1/sqrt"])
def test_an_activation_that_is_infinite_at_zero(fn):
    """Tiles past a sequence's end hold zeros, where these are not finite; the scores themselves are positive."""
    activation = gdpa.Activation(fn)
    assert not activation.tail_safe
    case = make_case(**{**BASE, "dtype": torch.float16}, **SHORT, activation=activation)
    case = case.with_inputs(**{name: getattr(case.inputs, name).abs() + 0.5 for name in "qk"})
    results = check(case, "triton")
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 96, 128, 136, 200, 256])
def test_head_dimensions(head_dim):
    check(make_case(**{**BASE, "head_dim": head_dim}, **SHORT), "triton")


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"),
    [(128, 24, torch.bfloat16), (64, 256, torch.float16), (256, 256, torch.float32)],
    ids=["128-24-bf16", "64-256-fp16", "256-256-fp32"],
)
def test_value_dimensions(head_dim, value_dim, dtype):
    check(make_case(**{**BASE, "head_dim": head_dim, "dtype": dtype}, value_dim=value_dim, **SHORT), "triton")


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)], ids=["1", "3", "8"])
def test_grouped_queries(heads, kv_heads):
    check(make_case(**{**BASE, "heads": heads, "kv_heads": kv_heads}, **SHORT), "triton")


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    check(make_case(form, **BASE, q_lengths=(100, 3, 0, 129), k_lengths=(70, 129, 64, 0)), "triton")


def scaled(form: str, dtype: torch.dtype, **options: Any) -> Case:
    """Every drawn problem has a window and a per-sequence scale, so that they share kernels."""
    return make_case(form, **{**BASE, "dtype": dtype}, out_scale="per-sequence", **options)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_with_a_window_and_a_scale_per_sequence(form):
    check(scaled(form, torch.bfloat16, q_lengths=(100, 3), k_lengths=(70, 129), window_size=(60, 5)), "triton")


@pytest.mark.parametrize("index", range(FUZZ))
def test_random_problems(index):
    draw = random.Random(index)
    sizes = (0, 1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 300)
    batch = draw.randint(1, 8)
    lengths = [[draw.choice(sizes) for _ in range(batch)] for _ in range(2)]
    dtype = draw.choice(list(DTYPES.values()))
    if dtype == torch.float32:
        lengths = [[65, *side] for side in lengths]  # see test_properties: the yardstick is lucky on a handful of scores
    case = scaled(
        draw.choice(FORMS),
        dtype,
        q_lengths=lengths[0],
        k_lengths=lengths[1],
        scale=draw.choice([None, 0.05, -0.125]),
        causal=draw.random() < 0.3,
        window_size=draw.choice([(0, 0), (4, 100), (1000, 1000), (64, 0), (31, 33), (1000, 128)]),
        offset_dtypes=(draw.choice([torch.int32, torch.int64]), draw.choice([torch.int32, torch.int64])),
        tail=(draw.choice([0, 7, 200]), draw.choice([0, 7, 200])),
        seed=index,
    )
    results = check(case, "triton")
    if draw.random() < 0.4:
        sequence = draw.randrange(case.problem.batch)
        dirty = run(poison_sequence(case, sequence, draw.choice([float("nan"), float("inf"), float("-inf")])), "triton")
        assert_neighbours_untouched(case, sequence, results, dirty)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_one_sequence_never_reaches_another(poison):
    case = make_case(**BASE, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS)
    clean = run(case, "triton")
    for sequence in (3, 5, 8):
        dirty = run(poison_sequence(case, sequence, poison), "triton")
        assert_neighbours_untouched(case, sequence, clean, dirty)
        assert not dirty.out.isfinite().all(), "the poison was not seen at all"


def test_rows_that_no_sequence_covers_are_zeros_and_not_read():
    case = make_case(**BASE, q_lengths=(65, 3), k_lengths=(64, 129), tail=(200, 77))
    clean = run(case, "triton")
    q, k, v, d_out = (x.clone() for x in (*case.inputs[:3], case.d_out))
    q[68:], k[193:], v[193:], d_out[68:] = (float("nan") for _ in range(4))
    results = run(replace(case, inputs=case.inputs._replace(q=q, k=k, v=v), d_out=d_out), "triton")
    for x, was, covered in zip(results, clean, (68, 68, 193, 193), strict=True):
        assert torch.equal(x, was)
        assert not x[covered:].any()


class TestStrides:
    def check(self, case: Case, **tensors: torch.Tensor) -> None:
        check(case.with_inputs(**tensors), "triton")

    def test_slices_of_one_projection(self):
        case = make_case(**{**BASE, "kv_heads": 4}, q_lengths=(100, 65))
        fused = torch.randn(165, 4, 192, device="cuda", dtype=torch.bfloat16)
        self.check(case, **dict(zip("qkv", fused.split(64, dim=-1), strict=True)))

    def test_rows_that_are_not_aligned(self):
        """Row strides of 65 elements: no copy engine, no vector loads."""
        case = make_case(**BASE, q_lengths=(100, 65))
        self.check(
            case,
            **{
                name: torch.randn(165, heads, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
                for name, heads in (("q", 4), ("k", 2), ("v", 2))
            },
        )

    def test_features_that_are_not_adjacent(self):
        case = make_case(**BASE, q_lengths=(100, 65))
        self.check(
            case,
            **{name: getattr(case.inputs, name).transpose(0, 2).contiguous().transpose(0, 2) for name in "qkv"},
        )

    def test_heads_before_rows(self):
        case = make_case("dense", **BASE, q_lengths=(100, 100))
        self.check(
            case,
            **{name: getattr(case.inputs, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"},
        )

    def test_expanded_upstream_gradient(self):
        case = make_case(**BASE, q_lengths=(100, 65))
        ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(case.d_out.shape)
        check(replace(case, d_out=ones), "triton")

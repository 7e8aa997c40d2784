"""The hopper backend on a Hopper GPU: every option it takes against the oracle, forward and gradients."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers import FORMS, Case, assert_neighbours_untouched, check, make_case, offsets_of, poison_sequence, run

import gdpa
from gdpa import numerics

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the hopper backend needs a Hopper GPU"
)

FUZZ = int(os.environ.get("GDPA_FUZZ", "100"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BASE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
Q_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 1000, 5, 0, 191, 192, 193)
K_LENGTHS = (64, 129, 0, 65, 1000, 128, 63, 127, 64, 1, 0, 256, 257, 255)
SHORT: dict[str, Any] = {"q_lengths": (0, 130, 65, 1), "k_lengths": (64, 33, 129, 0)}


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=[64, 128], ids="D={}".format)
def head_dim(request) -> int:
    return request.param


def test_hopper_is_what_runs_by_default():
    explanation = make_case(**BASE).explain()
    assert explanation.backend == "hopper"
    assert explanation.why_not["triton"] == "hopper is faster"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 96}, "head dimensions 64 and 128"),
        ({"value_dim": 64}, "head dimensions 64 and 128"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
    ],
    ids=["D", "Dv", "fp32"],
)
def test_what_it_does_not_take_runs_on_triton_and_is_refused_by_name(options, reason):
    case = make_case(**{**BASE, **options})
    explanation = case.explain()
    assert explanation.backend == "triton"
    assert reason in explanation.why_not["hopper"]
    with pytest.raises(gdpa.BackendUnavailable, match=reason):
        run_by_name(case)


def run_by_name(case: Case) -> torch.Tensor:
    return case.call(*case.inputs[:3], "hopper")


def test_every_size(dtype, head_dim):
    check(make_case(**{**BASE, "dtype": dtype, "head_dim": head_dim}, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS), "hopper")


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form, head_dim):
    check(make_case(form, **{**BASE, "head_dim": head_dim}, q_lengths=(300, 3, 0, 129), k_lengths=(270, 129, 64, 0)), "hopper")


@pytest.mark.parametrize("one_loop", [False, True], ids=["apart", "one-loop"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("consumers", [3, 4])
def test_three_and_four_consumers(consumers, form, activation, one_loop, dtype, monkeypatch):
    """Whatever the lengths, a tile's first step apart or in the loop, gelu_tanh packed but in three's loop. Numbers of heads of their own,
    so that no other's launches are remembered. Dense sides have the first length."""
    from gdpa.backends.hopper import plan_forward

    monkeypatch.setattr(plan_forward, "fastest", lambda problem: consumers)
    monkeypatch.setattr(plan_forward, "LONG_ACTIVATION", 0)
    keys = dict.fromkeys((False, True), (0, 2**31 if one_loop else -1))
    monkeypatch.setattr(plan_forward, "KEYS_FOR_ONE_LOOP", {3: keys, 4: keys})
    options = {
        **BASE,
        "heads": {(3, False): 6, (3, True): 10, (4, False): 12, (4, True): 14}[consumers, one_loop],
        "head_dim": 64,
        "dtype": dtype,
        "activation": activation,
        "out_scale": "per-sequence",
    }
    case = make_case(form, **options, q_lengths=(450, *Q_LENGTHS), k_lengths=(270, *K_LENGTHS))
    assert plan_forward.consumers(case.problem) == consumers
    packed = activation == "gelu_tanh" and not (consumers == 3 and one_loop)
    assert (plan_forward.packed_forms(case.problem) is not None) == packed
    assert plan_forward.has_one_loop(case.problem) == (one_loop and not packed)
    check(case, "hopper")


@pytest.mark.parametrize("activation", ["gelu", "elu", "hardswish", "relu"])
@pytest.mark.parametrize(
    ("form", "rows", "keys"), [("packed", 150, 150), ("dense", 192, 192), ("dense", 300, 300), ("dense-key", 700, 256)]
)
def test_sequences_of_a_few_blocks(form, rows, keys, activation, monkeypatch):
    """As many consumers, one loop or not, packed or not, as the host chooses; sequences that end before, at and past a block's edge."""
    from gdpa.backends.hopper import plan_forward

    monkeypatch.setattr(plan_forward, "LEAST_TILES_FOR_FOUR", 0)
    rows_of = [rows] * 5 if form == "dense" else [rows, rows - 23, 1, 0, 2 * rows + 24]
    keys_of = [keys] * 5 if form != "packed" else [keys, 2 * keys, keys + 1, 128, 1]
    case = make_case(form, **{**BASE, "head_dim": 64, "activation": activation}, q_lengths=rows_of, k_lengths=keys_of)
    packed = form != "dense-key" and activation == "gelu"
    assert plan_forward.consumers(case.problem) == (3 if form == "dense-key" else 4)
    assert (plan_forward.packed_forms(case.problem) is not None) == packed
    assert plan_forward.has_one_loop(case.problem) == (form != "packed" and activation != "relu" and not packed)
    check(case, "hopper")


def test_long_narrow_sequences(dtype):
    check(
        make_case(**{**BASE, "head_dim": 64, "dtype": dtype}, q_lengths=(2048, 1000, 1, 1100), k_lengths=(700, 0, 129, 2048)),
        "hopper",
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_with_a_scale_per_sequence(form):
    check(make_case(form, **BASE, q_lengths=(100, 3, 70), k_lengths=(70, 129, 0), out_scale="per-sequence"), "hopper")


def test_all_named_activations_one_per_head(dtype):
    names = list(gdpa.activations())
    options = {**BASE, "dtype": dtype, "heads": len(names), "kv_heads": 1}
    check(make_case(**options, activation=names, q_lengths=(70, 129), k_lengths=(65, 140), spread=0.8), "hopper")


@pytest.mark.parametrize("name", gdpa.activations())
def test_a_named_activation_alone(name):
    check(make_case(**BASE, **SHORT, activation=name, spread=0.8 if name == "exp" else 2.0), "hopper")


CUSTOM = {
    "relu squared over 64": lambda s: torch.relu(s) ** 2 / 64,
    "gaussian": lambda s: torch.exp(-s * s),
    "mish": torch.nn.functional.mish,
    "constant": lambda s: s * 0 + 0.5,
}


@pytest.mark.parametrize("fn", CUSTOM.values(), ids=CUSTOM.keys())
def test_a_callable(fn):
    check(make_case(**BASE, **SHORT, activation=fn), "hopper")


def test_a_traced_copy_gives_what_the_built_in_gives():
    case = make_case(**BASE, **SHORT, activation="silu")
    copy = replace(case, keywords={**case.keywords, "activation": lambda s: s * torch.sigmoid(s)})
    assert torch.equal(run(case, "hopper").out, run(copy, "hopper").out)


@pytest.mark.parametrize(("head_dim", "consumers"), [(128, 2), (64, 2), (64, 3), (64, 4)], ids=["D=128", "two", "three", "four"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_the_output_for_scores_of_any_spread(activation, head_dim, consumers, dtype, monkeypatch):
    """With steps in 16 bits, for gelus, and the special-function unit's tanh, on values that cancel and on values that do not."""
    from gdpa.backends.hopper import plan_forward

    monkeypatch.setattr(plan_forward, "fastest", lambda problem: consumers)
    options = {**BASE, "heads": 1, "kv_heads": 1, "dtype": dtype, "head_dim": head_dim, "activation": activation}
    draws = product((1, 16, 17, 33, 128, 300, 1000), (0.03, 0.1, 0.3, 1.0, 3.0), (0.0, 1.0))
    for seed, (keys, spread, mean) in enumerate(draws):
        case = make_case(**options, q_lengths=(128, 1), k_lengths=(keys, 1), seed=seed)
        case = case.with_inputs(q=case.inputs.q * spread, v=case.inputs.v * (0.1 if mean else 1.0) + mean)
        numerics.check(case.problem, case.inputs, None, numerics.Results(run_by_name(case)))


@pytest.mark.parametrize("fn", [torch.log, torch.sqrt, torch.reciprocal], ids=["log", "sqrt", "1/x"])
def test_an_activation_that_is_not_finite_at_zero(fn):
    """Tiles past a sequence's end hold zeros, where these or their derivatives are infinite; the scores themselves are positive."""
    activation = gdpa.Activation(fn)
    assert not activation.tail_safe
    case = make_case(**{**BASE, "dtype": torch.float16}, **SHORT, activation=activation)
    case = case.with_inputs(**{name: getattr(case.inputs, name).abs() + 0.5 for name in "qk"})
    results = check(case, "hopper")
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 1), (3, 3)], ids=["1", "3", "8", "odd"])
def test_grouped_queries(heads, kv_heads):
    check(make_case(**{**BASE, "heads": heads, "kv_heads": kv_heads}, **SHORT), "hopper")


@pytest.mark.parametrize("scale", [0.05, -0.125, 0.0, 1.0], ids=str)
def test_scales(scale):
    check(make_case(**BASE, **SHORT, scale=scale, out_scale=0.5), "hopper")


@pytest.mark.parametrize("index", range(FUZZ))
def test_random_problems(index):
    draw = random.Random(index)
    sizes = (0, 1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 191, 193, 300, 511)
    batch = draw.randint(1, 12)
    case = make_case(
        draw.choice(FORMS),
        **{**BASE, "dtype": draw.choice(list(DTYPES.values())), "head_dim": draw.choice([64, 128])},
        q_lengths=[draw.choice(sizes) for _ in range(batch)],
        k_lengths=[draw.choice(sizes) for _ in range(batch)],
        scale=draw.choice([None, 0.05, -0.125]),
        out_scale="per-sequence",
        offset_dtypes=(draw.choice([torch.int32, torch.int64]), draw.choice([torch.int32, torch.int64])),
        tail=(draw.choice([0, 7, 200]), draw.choice([0, 7, 200])),
        seed=index,
    )
    results = check(case, "hopper")
    if draw.random() < 0.4:
        sequence = draw.randrange(case.problem.batch)
        dirty = run(poison_sequence(case, sequence, draw.choice([float("nan"), float("inf"), float("-inf")])), "hopper")
        assert_neighbours_untouched(case, sequence, results, dirty, reordered=("dq",))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_one_sequence_never_reaches_another(poison):
    case = make_case(**BASE, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS)
    clean = run(case, "hopper")
    for sequence in (3, 5, 8, 11):
        dirty = run(poison_sequence(case, sequence, poison), "hopper")
        assert_neighbours_untouched(case, sequence, clean, dirty, reordered=("dq",))
        assert not dirty.out.isfinite().all(), "the poison was not seen at all"


@pytest.mark.parametrize("keys", [(64, 129), (64, 100), (1, 128)], ids=str)
def test_rows_that_no_sequence_covers_are_zeros_and_not_read(keys):
    case = make_case(**BASE, q_lengths=(65, 3), k_lengths=keys, tail=(200, 77), deterministic=max(keys) > 128)
    clean = run(case, "hopper")
    q, k, v, d_out = (x.clone() for x in (*case.inputs[:3], case.d_out))
    covered = sum(keys)
    q[68:], k[covered:], v[covered:], d_out[68:] = (float("nan") for _ in range(4))
    results = run(replace(case, inputs=case.inputs._replace(q=q, k=k, v=v), d_out=d_out), "hopper")
    for x, was, rows in zip(results, clean, (68, 68, covered, covered), strict=True):
        assert torch.equal(x, was)
        assert not x[rows:].any()


def test_a_sequence_without_keys_gives_zeros_whatever_its_queries_hold():
    case = make_case(**BASE, q_lengths=(100, 30), k_lengths=(0, 64), out_scale="per-sequence")
    q = case.inputs.q.clone()
    q[:100] = float("nan")
    scale = torch.tensor([float("inf"), 1.0], device="cuda")
    out = run_by_name(case.with_inputs(q=q, out_scale=scale))
    assert not out[:100].any()
    assert out.isfinite().all()


def test_no_keys_at_all_and_no_queries_at_all():
    for q_lengths, k_lengths in (((5, 70), (0, 0)), ((0, 0), (5, 70))):
        check(make_case(**BASE, q_lengths=q_lengths, k_lengths=k_lengths), "hopper")


@pytest.mark.parametrize("form", FORMS)
def test_other_data_at_other_addresses_and_at_the_same(form):
    """What was worked out for a call serves the next ones: its launch, and its descriptors by the address they point to."""

    from gdpa.backends.hopper import launch

    kept = [make_case(form, **BASE, **SHORT, seed=seed) for seed in range(3)]
    for case in (*kept, *kept):
        check(case, "hopper")
    for seed in range(3, 9):  # each in the memory that the one before has left
        check(make_case(form, **BASE, **SHORT, seed=seed), "hopper")
    recipes = launch._recipes.values()
    assert recipes
    if triton.__version__.startswith("3.6."):
        assert all(recipe.launcher is not None for recipe in recipes)
        known = [[len(addresses) for addresses in recipe.encoded] for recipe in recipes]
        assert any(all(addresses) for addresses in known), f"{known}, hooks {triton.knobs.runtime.launch_enter_hook}"


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """A copy of dense `x` in whose memory row 0 of every sequence comes before any row 1."""
    copy = x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
    return copy.copy_(x)


class TestStrides:
    def test_slices_of_one_projection_are_read_in_place(self):
        offsets = offsets_of((1000, 650), device="cuda")
        fused = torch.randn(1650, 4, 3, 128, device="cuda", dtype=torch.bfloat16)
        q, k, v = fused.unbind(2)
        gdpa.attention_varlen(q, k, v, offsets, offsets, backend="hopper")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = gdpa.attention_varlen(q, k, v, offsets, offsets, backend="hopper")
        assert torch.cuda.max_memory_allocated() - before < 1.5 * out.numel() * out.element_size(), "an input was copied"
        right = gdpa.attention_varlen(*(x.contiguous() for x in (q, k, v)), offsets, offsets, backend="hopper")
        assert torch.equal(out, right)

    def test_rows_that_are_not_aligned_are_copied(self):
        case = make_case(**BASE, q_lengths=(100, 65))
        tensors = {
            name: torch.randn(165, heads, 129, device="cuda", dtype=torch.bfloat16)[..., 1:]
            for name, heads in (("q", 4), ("k", 2), ("v", 2))
        }
        check(case.with_inputs(**tensors), "hopper")

    def test_heads_before_rows_and_sequences_apart(self):
        case = make_case("dense", **BASE, q_lengths=(100, 100, 100))
        check(
            case.with_inputs(**{n: getattr(case.inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}), "hopper"
        )
        apart = {n: torch.randn(3, 110, x.shape[2], 128, device="cuda", dtype=x.dtype)[:, :100] for n, x in
                 ((n, getattr(case.inputs, n)) for n in "qkv")}  # fmt: skip
        check(case.with_inputs(**apart), "hopper")

    @pytest.mark.parametrize(("queries", "keys"), [(1, 70), (130, 1), (1, 1)])
    def test_one_row_a_sequence_with_rows_before_sequences(self, queries, keys):
        """Which torch calls contiguous whatever the distance of rows."""
        case = make_case("dense", **BASE, q_lengths=(queries,) * 5, k_lengths=(keys,) * 5)
        case = case.with_inputs(**{n: rows_first(getattr(case.inputs, n)) for n in "qkv"})
        assert all(x.is_contiguous() == (x.shape[1] == 1) for x in case.inputs[:3])
        check(replace(case, d_out=rows_first(case.d_out)), "hopper")


@triton.jit
def tanh_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [tl.load(x_ptr + place)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y_ptr + place, y)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_tanh_that_fp16_rests_on(sign):
    """Of every float32 from 2^-10 to 64; below that tanh(x) is x, but for 3e-7 of it. 2^-11 of itself is all that is promised."""
    for exponent in range(-10, 6):
        x = (torch.arange(2**23, dtype=torch.int32, device="cuda") | (exponent + 127) << 23).view(torch.float32) * sign
        y = torch.empty_like(x)
        tanh_kernel[(2**13,)](x, y, BLOCK=1024)
        wanted = torch.tanh(x.double())
        error = 1.12e-5 if exponent < 1 else 2.8e-6 if exponent < 3 else 2.5e-7 if exponent < 4 else 1e-12
        assert ((y.double() - wanted) / wanted).abs().max() < error

"""Causal attention and windows on the hopper backend: forwards, and gradients of its own or by the portable kernels."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from helpers import FORMS, Case, assert_neighbours_untouched, check, make_case, poison_sequence, run, spy

from gdpa.backends.triton import run as portable

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the hopper backend needs a Hopper GPU"
)

FUZZ = int(os.environ.get("GDPA_FUZZ", "100"))
BASE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
Q_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 1000, 5, 0, 191, 300, 513)
K_LENGTHS = (64, 129, 0, 65, 1000, 128, 63, 127, 64, 1, 0, 256, 700, 511)
CAUSAL: dict[str, Any] = {"heads": 3, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda", "causal": True}
WINDOWS = {
    "causal": (-1, 0),
    "ahead": (-1, 70),
    "left": (40, -1),
    "sliding": (100, 0),
    "band": (3, 200),
    "self": (0, 0),
    "all of it": (5000, 5000),
}


@pytest.fixture(params=WINDOWS.values(), ids=WINDOWS.keys())
def window(request) -> tuple[int, int]:
    return request.param


def test_hopper_takes_causal_calls_and_the_portable_kernels_their_gradients(monkeypatch):
    case = make_case(**BASE, causal=True)
    explanation = case.explain()
    assert explanation.backend == "hopper"
    called = spy(monkeypatch, portable, "backward")
    check(case, "hopper")
    assert called


@pytest.mark.parametrize("head_dim", [64, 128], ids="D={}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_size(window, head_dim, dtype):
    options = {**BASE, "head_dim": head_dim, "dtype": dtype}
    check(make_case(**options, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, window_size=window), "hopper")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (300, 130), (130, 700), (1, 129)])
def test_every_form(form, window, queries, keys):
    """Five dense sequences: which rows come first differs from one to the next."""
    case = make_case(
        form, **BASE, q_lengths=(queries,) * 5, k_lengths=(keys,) * 5, window_size=window, out_scale="per-sequence", seed=2
    )
    check(case, "hopper")


@pytest.mark.parametrize("activation", ["sigmoid", "exp", "softplus", ["gelu", "relu", "sigmoid", "silu"], torch.log])
def test_activations_that_are_not_zero_at_zero_or_not_finite_there(activation, window):
    options = {**BASE, "activation": activation, "q_lengths": (200, 65), "k_lengths": (200, 300), "window_size": window}
    case = make_case(**options)
    if activation is torch.log:
        case = case.with_inputs(q=case.inputs.q.abs() + 0.1, k=case.inputs.k.abs() + 0.1)
    check(case, "hopper")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_one_sequence_never_reaches_another(poison, window):
    case = make_case(**BASE, q_lengths=(130, 65, 200), k_lengths=(70, 129, 200), window_size=window)
    clean = run(case, "hopper")
    dirty = run(poison_sequence(case, 1, poison), "hopper")
    assert_neighbours_untouched(case, 1, clean, dirty)
    assert not dirty.out.isfinite().all(), "the poison was not seen at all"


@pytest.mark.parametrize("tail", [(0, 100), (0, 128), (200, 0), (28, 100)], ids=str)
def test_sequences_that_share_offsets_in_buffers_that_differ(window, tail):
    """A window's edge is where the lengths have it, not where the ends of the buffers do."""
    case = make_case(**BASE, q_lengths=(130, 0, 300, 513), tail=tail, window_size=window)
    check(case.with_inputs(cu_seqlens_k=case.inputs.cu_seqlens_q), "hopper")


@pytest.mark.parametrize("index", range(FUZZ))
def test_random_problems(index):
    draw = random.Random(f"windows {index}")
    batch = draw.randint(1, 6)
    kv_heads = draw.choice((1, 2))
    case = make_case(
        draw.choice(FORMS),
        q_lengths=[draw.choice((0, 1, draw.randint(2, 700))) for _ in range(batch)],
        k_lengths=[draw.choice((0, 1, draw.randint(2, 700))) for _ in range(batch)],
        heads=kv_heads * draw.choice((1, 2, 3)),
        kv_heads=kv_heads,
        head_dim=draw.choice((64, 128)),
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        activation=draw.choice(("silu", "gelu", "gelu_tanh", "relu", "sigmoid")),
        window_size=(draw.choice((-1, 0, draw.randint(1, 300))), draw.choice((-1, 0, 0, draw.randint(1, 300)))),
        out_scale=draw.choice((None, "per-sequence")),
        device="cuda",
        seed=index,
    )
    check(case, "hopper")


class TestCausalGradients:
    """Of sequences that attend to themselves, which the hopper backward computes: packed ones share one tensor of offsets."""

    @pytest.fixture(autouse=True)
    def portable_not_called(self, monkeypatch):
        monkeypatch.setattr(portable, "backward", lambda *_: pytest.fail("the portable backward ran"))
        monkeypatch.setattr(portable, "prepare_backward", lambda *_: pytest.fail("the portable backward was prepared"))

    @staticmethod
    def case(form: str, lengths: tuple[int, ...], **options: Any) -> Case:
        case = make_case(form, q_lengths=lengths, **{**CAUSAL, **options})
        return case.with_inputs(cu_seqlens_k=case.inputs.cu_seqlens_q) if form == "packed" else case

    @pytest.mark.parametrize("tail", [70, 700])
    @pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "ordered"])
    @pytest.mark.parametrize("head_dim", [64, 128], ids="D={}".format)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_every_size(self, head_dim, dtype, deterministic, tail):
        """Rows behind the last sequence fill a part of a tile, or several."""
        options = {
            "head_dim": head_dim,
            "dtype": dtype,
            "deterministic": deterministic,
            "out_scale": "per-sequence",
            "tail": (tail, tail),
        }
        check(self.case("packed", (0, 1, 63, 64, 65, 127, 128, 129, 1000, 5, 0, 191, 300, 513, 640, 641), **options), "hopper")

    @pytest.mark.parametrize("length", [1, 64, 100, 128, 129, 256, 300, 512, 513, 1000, 1500])
    def test_dense(self, length):
        for batch in (1, 7):
            check(self.case("dense", (length,) * batch, seed=batch), "hopper")

    @pytest.mark.parametrize(
        ("form", "lengths", "heads"), [("packed", (6000,), 3), ("dense", (14500,), 1), ("dense", (5000, 5000), 4)]
    )
    def test_sequences_of_more_tiles_than_can_wait_for_one_another(self, form, lengths, heads):
        """In a fixed order they go through fewer programs than every Hopper GPU has: 38 tiles of three heads, 113 of one, 40 of four."""
        check(self.case(form, lengths, heads=heads, head_dim=64, deterministic=True), "hopper")

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid", "exp", ["gelu", "relu", "sigmoid"], torch.log])
    def test_activations(self, activation):
        case = self.case("packed", (200, 700, 65), activation=activation)
        if activation is torch.log:
            case = case.with_inputs(q=case.inputs.q.abs() + 0.1, k=case.inputs.k.abs() + 0.1)
        check(case, "hopper")

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
    def test_one_sequence_never_reaches_another(self, poison):
        case = self.case("packed", (130, 700, 200), deterministic=True)
        dirty = run(poison_sequence(case, 1, poison), "hopper")
        assert_neighbours_untouched(case, 1, run(case, "hopper"), dirty)

    def test_the_same_every_time_where_asked_to(self):
        case = self.case("packed", (1000, 64, 2000, 513, 300), deterministic=True)
        first = run(case, "hopper")
        for _ in range(20):
            for a, b in zip(first, run(case, "hopper"), strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize("index", range(FUZZ))
    def test_random_problems(self, index):
        draw = random.Random(f"causal {index}")
        form = draw.choice(("packed", "dense"))
        most = draw.choice((130, 700, 1500))
        check(
            self.case(
                form,
                tuple(draw.choice((0, 1, draw.randint(2, most), draw.randint(2, most))) for _ in range(draw.randint(1, 8))),
                heads=draw.choice((1, 2, 5)),
                head_dim=draw.choice((64, 128)),
                dtype=draw.choice((torch.bfloat16, torch.float16)),
                activation=draw.choice(("silu", "gelu", "gelu_tanh", "relu", "sigmoid")),
                deterministic=draw.choice((False, True)),
                out_scale=draw.choice((None, "per-sequence")),
                seed=index,
            ),
            "hopper",
        )


def test_gradients_of_other_offsets_than_before_are_right(monkeypatch):
    """A call whose keys have offsets of their own is like one before but for that, and its gradients come from the portable kernels."""
    case = make_case(heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda", causal=True, q_lengths=(70, 200, 130))
    shared = case.with_inputs(cu_seqlens_k=case.inputs.cu_seqlens_q)
    other = make_case(
        heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda", causal=True, q_lengths=(70, 200, 130), k_lengths=(130, 70, 200)
    )
    for _ in range(2):
        check(shared, "hopper")
        check(case, "hopper")
        check(other, "hopper")

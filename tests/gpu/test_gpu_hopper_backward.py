"""The ways that the hopper backward has for dQ, and what it leaves out.

Which way a call takes depends on its form and the lengths of the keys (plan_backward.way_of_dq, is_paired, step_rows); the tests
of test_gpu_hopper.py are too small for some of them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import Case, Results, assert_neighbours_untouched, check, make_case, poison_sequence, run

import gdpa
from gdpa import shortcut
from gdpa.backends.hopper import launch_backward, plan_backward
from gdpa.backends.hopper.plan_backward import NONE, RELAY, SHARED, STORE

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the hopper backend needs a Hopper GPU"
)

BASE: dict[str, Any] = {"heads": 4, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
MANY = 150  # sequences: enough to be paired


def lengths(longest: int, count: int = MANY, seed: int = 0) -> tuple[int, ...]:
    """Short and long ones, among them none, one and the sizes around a tile and an item."""
    draw = random.Random(seed)
    return tuple(draw.choice((0, 1, 64, 127, 128, 129, 256, 257, longest, draw.randint(0, longest))) for _ in range(count))


@pytest.fixture
def anew(monkeypatch):
    """No launch is a repetition of one before, which would not ask again how it is to be done."""
    shortcut.forget()
    monkeypatch.setattr(launch_backward, "prepare", lambda *_: None)


@pytest.fixture
def ways(monkeypatch, anew):
    """(way of dQ, whether paired) of the launches of a test."""
    taken: list[tuple[int, bool]] = []
    launch = launch_backward._launch

    def noted(problem, tensors, *rest):
        paired = plan_backward.is_paired(problem, launch_backward.multiprocessors(tensors[0].device))
        taken.append((plan_backward.way_of_dq(problem, rest[-1][0]), paired))
        launch(problem, tensors, *rest)

    monkeypatch.setattr(launch_backward, "_launch", noted)
    return taken


@pytest.mark.parametrize(
    ("form", "q_length", "k_length", "expected"),
    [
        ("dense", 200, 100, (STORE, False)),
        ("dense", 200, 128, (STORE, False)),
        ("dense", 70, 129, (RELAY, True)),
        ("dense", 130, 256, (RELAY, True)),
        ("dense", 300, 256, (RELAY, False)),
        ("dense", 65, 257, (RELAY, False)),  # fewer steps than tiles
        ("dense", 1, 2000, (RELAY, False)),
        ("dense", 600, 5000, (RELAY, False)),  # more tiles and heads than programs
        ("dense-key", 0, 128, (STORE, False)),
        ("dense-key", 0, 200, (RELAY, False)),
        ("dense-key", 0, 700, (RELAY, False)),
        ("packed", 0, 256, (RELAY, False)),
        ("packed", 0, 900, (RELAY, False)),
        ("packed", 0, 9000, (RELAY, False)),
        ("shared-query", 33, 700, (SHARED, False)),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "one order"])
def test_every_way_of_dq(ways, form, q_length, k_length, expected, deterministic):
    packed_k = form in ("packed", "shared-query")
    count = MANY if k_length < 4000 else 8
    case = make_case(
        form,
        **BASE,
        q_lengths=(q_length,) * count if q_length else lengths(300, count, seed=1),
        k_lengths=lengths(k_length, count) if packed_k else (k_length,) * count,
        activation="silu",
        deterministic=deterministic,
    )
    check(case, "hopper")
    assert set(ways) == {expected}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_pairs(ways, head_dim, dtype, kv_heads):
    options = {**BASE, "head_dim": head_dim, "dtype": dtype, "kv_heads": kv_heads}
    count = 4 * MANY // kv_heads
    check(make_case("dense", **options, q_lengths=(64,) * count, k_lengths=(200,) * count), "hopper")
    assert ways[0] == (RELAY, True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sequences_of_one_tile_and_of_several(ways, head_dim, dtype, kv_heads):
    options = {**BASE, "head_dim": head_dim, "dtype": dtype, "kv_heads": kv_heads}
    count = 4 * MANY // kv_heads
    check(
        make_case(
            **options, q_lengths=lengths(200, count, 1), k_lengths=lengths(700, count), out_scale="per-sequence", tail=(7, 130)
        ),
        "hopper",
    )
    assert ways[0] == (RELAY, False)


def assert_these_alone(case: Case, needs: tuple[int, int, int], whole: Results) -> None:
    """The gradients that are needed are those of the whole, and there are no others."""
    inputs = [x.detach().clone().requires_grad_(bool(need)) for x, need in zip(case.inputs[:3], needs, strict=True)]
    case.call(*inputs, "hopper").backward(case.d_out)
    for x, need, right in zip(inputs, needs, whole[1:], strict=True):
        assert (x.grad is not None) == bool(need)
        if need:
            assert (x.grad - right).norm() <= 0.01 * right.norm()


@pytest.mark.parametrize("needs", [(q, k, v) for q in (0, 1) for k in (0, 1) for v in (0, 1) if q or k or v])
@pytest.mark.parametrize("keys", [100, 200, 600])
def test_gradients_nobody_asked_for_are_left_out(ways, needs, keys):
    case = make_case("dense", **BASE, q_lengths=(130,) * MANY, k_lengths=(keys,) * MANY)
    whole = run(case, "hopper")
    ways.clear()
    assert_these_alone(case, needs, whole)
    assert len(ways) == (1 if needs[1] or needs[2] else 0)
    if ways and not needs[0]:
        assert ways[0][0] == NONE


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_one_sequence_never_reaches_another(poison):
    case = make_case(**BASE, q_lengths=lengths(200, seed=1), k_lengths=lengths(700))
    clean = run(case, "hopper")
    for sequence in (3, 50, MANY - 1):
        dirty = run(poison_sequence(case, sequence, poison), "hopper")
        assert_neighbours_untouched(case, sequence, clean, dirty, reordered=("dq",))


LONG: dict[str, Any] = {**BASE, "head_dim": 64}  # steps of 128 queries, with this Triton
has_long_steps = pytest.mark.skipif(not plan_backward.LONG_STEPS, reason="this Triton has no registers for them")
LONG_LENGTHS = (1100, 0, 2047, 1, 1500, 129, 2600, 1024, 65, 1537)


@has_long_steps
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("silu", "gelu", "relu", "identity")),
        ("silu", torch.float16),
        ("sigmoid", torch.float16),
    ],
    ids=["silu", "gelu", "relu", "identity", "silu-fp16", "sigmoid-fp16"],
)
@pytest.mark.parametrize(
    ("form", "queries", "keys"),
    [
        ("dense", (600,) * 40, (129,) * 40),
        ("dense", (513,) * 40, (513,) * 40),
        ("dense", (1100,) * 9, (640,) * 9),
        ("dense", (520,) * 3, (6000,) * 3),  # more tiles and heads than programs
        ("dense-key", LONG_LENGTHS, (700,) * 10),
        ("packed", LONG_LENGTHS, LONG_LENGTHS),
        ("packed", LONG_LENGTHS, LONG_LENGTHS[::-1]),
    ],
)
def test_long_steps(form, queries, keys, activation, dtype):
    options = {"out_scale": "per-sequence", "tail": (7, 130)} if form == "packed" else {}
    case = make_case(form, **{**LONG, "dtype": dtype}, q_lengths=queries, k_lengths=keys, activation=activation, **options)
    assert plan_backward.step_rows(case.problem, True) == 128
    check(case, "hopper")


@has_long_steps
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("rows", [513, 640, 1024, 1153])
def test_long_causal_steps(rows, activation):
    case = make_case("dense", **LONG, q_lengths=(rows,) * 9, activation=activation, causal=True)
    assert plan_backward.step_rows(case.problem, True) == 128
    check(case, "hopper")


@has_long_steps
@pytest.mark.parametrize("needs", [(1, 0, 1), (1, 1, 0)], ids=["without dK", "without dV"])
@pytest.mark.parametrize("rows", [300, 600])
def test_long_steps_leave_out_gradients_nobody_asked_for(rows, needs):
    case = make_case("dense", **LONG, q_lengths=(rows,) * 9, activation="silu")
    assert plan_backward.step_rows(case.problem, True) == 128
    assert_these_alone(case, needs, run(case, "hopper"))


@has_long_steps
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_long_steps_keep_a_sequence_from_the_others(activation):
    case = make_case(**LONG, q_lengths=LONG_LENGTHS, activation=activation)
    assert plan_backward.step_rows(case.problem, True) == 128
    clean = run(case, "hopper")
    for sequence in (0, 4, 9):
        dirty = run(poison_sequence(case, sequence, float("nan")), "hopper")
        assert_neighbours_untouched(case, sequence, clean, dirty, reordered=("dq",))


@has_long_steps
@pytest.mark.parametrize(
    "values",
    [(0, 100, 5000, 2**31 - 1), (-(2**31), -5, 0, 900), (0, 900, 100, 1000), (1000, 700, 100, 0), (2**30, -(2**30), 7, -1)],
)
def test_long_steps_with_garbage_for_offsets(values):
    case = make_case(**LONG, q_lengths=(300, 400, 300), activation="silu")
    garbage = torch.tensor(values, dtype=torch.int64, device="cuda")
    case = case.with_inputs(cu_seqlens_q=garbage, cu_seqlens_k=garbage)
    assert plan_backward.step_rows(case.problem, True) == 128
    if sorted(values) == list(values):  # clamped to the buffer, they are offsets
        check(case, "hopper")
    else:  # nothing ends the process
        run(case, "hopper")
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("form", "longest"),
    [("dense", 128), ("dense", 256), ("dense", 1000), ("packed", 700), ("packed", 2000), ("packed", 6000), ("shared-query", 700)],
)
def test_deterministic_results_are_bitwise_equal(form, longest):
    packed_k = form in ("packed", "shared-query")
    case = make_case(
        form,
        **BASE,
        q_lengths=(70,) * MANY if form != "packed" else lengths(300, seed=1),
        k_lengths=lengths(longest) if packed_k else (longest,) * MANY,
        deterministic=True,
    )
    first = check(case, "hopper")
    for _ in range(1000):
        assert all(torch.equal(x, y) for x, y in zip(run(case, "hopper"), first, strict=True))


@pytest.mark.parametrize("flag", [False, True])
def test_torchs_flag_is_followed(monkeypatch, anew, flag):
    asked = []
    launch = launch_backward._launch
    monkeypatch.setattr(
        launch_backward, "_launch", lambda problem, *rest: (asked.append(problem.deterministic), launch(problem, *rest))
    )
    case = make_case(**BASE, q_lengths=lengths(300, seed=1), k_lengths=lengths(700), deterministic=None)
    q, k, v = (x.detach().requires_grad_() for x in case.inputs[:3])
    torch.use_deterministic_algorithms(flag)
    try:
        case.call(q, k, v, "hopper").backward(case.d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [flag]


@pytest.mark.parametrize(
    ("form", "keys"), [("dense", 250), ("dense", 1000), ("packed", 700), ("packed", 6000), ("shared-query", 700)]
)
def test_deterministic_results_do_not_depend_on_the_number_of_multiprocessors(monkeypatch, anew, form, keys):
    count = 150 if keys < 4000 else 8
    k_lengths = (keys,) * count if form == "dense" else lengths(keys, count)
    case = make_case(form, **BASE, q_lengths=(200,) * count, k_lengths=k_lengths, deterministic=True)
    all_of_them = run(case, "hopper")
    monkeypatch.setattr(launch_backward, "multiprocessors", lambda device: 114)
    fewer = run(case, "hopper")
    assert all(torch.equal(x, y) for x, y in zip(all_of_them, fewer, strict=True))


@pytest.mark.parametrize("programs", [1, 3, 20])
def test_few_programs(monkeypatch, anew, programs):
    """Sequences whose tiles do not all run at once."""
    monkeypatch.setattr(launch_backward, "multiprocessors", lambda device: programs)
    check(make_case(**BASE, q_lengths=lengths(300, 20, seed=1), k_lengths=lengths(700, 20)), "hopper")


def test_short_training_follows_the_reference():
    """The same loss curve within bf16's noise: 30 steps of a small attention regression from the same start."""

    def losses(backend: str) -> list[float]:
        generator = torch.Generator("cuda").manual_seed(0)
        cu = torch.tensor([0, 100, 100, 400, 1000], dtype=torch.int32, device="cuda")
        x = torch.randn(1000, 256, generator=generator, device="cuda")
        target = torch.randn(1000, 256, generator=generator, device="cuda")
        weight = (torch.randn(256, 768, generator=generator, device="cuda") / 16).requires_grad_()
        optimizer = torch.optim.Adam([weight], lr=3e-3)
        curve = []
        for _ in range(30):
            q, k, v = (x @ weight).to(torch.bfloat16).view(1000, 3, 2, 128).unbind(1)
            out = gdpa.attention_varlen(q, k, v, cu, cu, activation="gelu", out_scale=0.01, backend=backend)
            loss = (out.float().reshape(1000, 256) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        return curve

    ours, right = losses("hopper"), losses("reference")
    assert right[-1] < 0.97 * right[0]
    assert all(abs(a - b) <= 2e-3 * b for a, b in zip(ours, right, strict=True)), (ours, right)

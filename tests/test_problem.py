"""A wrong call is refused before anything runs, with the argument's name, what came and what was expected."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import make_case, needs_triton, spy

import gdpa
from gdpa import dispatch, problem
from gdpa.problem import (
    allowed_pairs,
    check_offsets,
    check_window,
    offsets_are_checked,
    row_ranges,
    window_mask,
)


def packed_call(**changes: Any) -> dict[str, Any]:
    call = {
        "q": torch.randn(8, 4, 16),
        "k": torch.randn(10, 2, 16),
        "v": torch.randn(10, 2, 24),
        "cu_seqlens_q": torch.tensor([0, 3, 8], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 10], dtype=torch.int32),
    }
    return call | changes


def dense_key_call(**changes: Any) -> dict[str, Any]:
    return packed_call(k=torch.randn(2, 5, 2, 16), v=torch.randn(2, 5, 2, 24), cu_seqlens_k=None) | changes


def shared_query_call(**changes: Any) -> dict[str, Any]:
    return packed_call(q=torch.randn(3, 4, 16), cu_seqlens_q=None) | changes


def dense_call(**changes: Any) -> dict[str, Any]:
    return {"q": torch.randn(2, 6, 4, 16), "k": torch.randn(2, 5, 2, 16), "v": torch.randn(2, 5, 2, 24)} | changes


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="meta")


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def nested(*parts: torch.Tensor) -> torch.Tensor:
    """Of the strided layout, whose tensors have no shape."""
    return torch.nested.nested_tensor(list(parts))


# id: (arguments, the argument the message must begin with, fragments: what came, what was expected)
WRONG_VARLEN: dict[str, tuple[Callable[[], dict[str, Any]], str, tuple[str, ...]]] = {
    "q is a list": (lambda: packed_call(q=[1.0]), "q", ("list", "torch.Tensor")),
    "k is None": (lambda: packed_call(k=None), "k", ("NoneType", "torch.Tensor")),
    "v is an array": (lambda: packed_call(v=torch.zeros(10, 2, 24).numpy()), "v", ("ndarray", "torch.Tensor")),
    "q of rank 2": (lambda: packed_call(q=torch.randn(8, 64)), "q", ("(8, 64)", "(T, H, D)")),
    "q of rank 4": (lambda: packed_call(q=torch.randn(1, 8, 4, 16)), "q", ("(1, 8, 4, 16)", "(T, H, D)")),
    "k of rank 4": (lambda: packed_call(k=torch.randn(1, 10, 2, 16)), "k", ("(1, 10, 2, 16)", "(T, Hkv, D)")),
    "v of rank 2": (lambda: packed_call(v=torch.randn(10, 48)), "v", ("(10, 48)", "(T, Hkv, D)")),
    "q of integers": (lambda: packed_call(q=torch.ones(8, 4, 16, dtype=torch.int64)), "q", ("int64", "bfloat16")),
    "k complex": (lambda: packed_call(k=torch.ones(10, 2, 16, dtype=torch.complex64)), "k", ("complex64", "float32")),
    "q of float8": (lambda: packed_call(q=torch.ones(8, 4, 16).to(torch.float8_e4m3fn)), "q", ("float8", "bfloat16")),
    "k of another dtype": (lambda: packed_call(k=torch.randn(10, 2, 16).half()), "k", ("float16", "float32", "of q")),
    "v of another dtype": (lambda: packed_call(v=torch.randn(10, 2, 24).double()), "v", ("float64", "float32", "of q")),
    "k on another device": (lambda: packed_call(k=meta(10, 2, 16)), "k", ("meta", "cpu", "of q")),
    "v on another device": (lambda: packed_call(v=meta(10, 2, 24)), "v", ("meta", "cpu", "of q")),
    "heads not a multiple": (
        lambda: packed_call(k=torch.randn(10, 3, 16), v=torch.randn(10, 3, 24)),
        "q",
        ("multiple of k's 3", "got 4"),
    ),
    "more key heads than query heads": (
        lambda: packed_call(k=torch.randn(10, 8, 16), v=torch.randn(10, 8, 24)),
        "q",
        ("multiple of k's 8", "got 4"),
    ),
    "v of other heads than k": (lambda: packed_call(v=torch.randn(10, 4, 24)), "v", ("2 heads", "(10, 4, 24)")),
    "no heads": (lambda: packed_call(k=torch.randn(10, 0, 16), v=torch.randn(10, 0, 24)), "k", ("at least one head",)),
    "no features": (lambda: packed_call(v=torch.randn(10, 2, 0)), "v", ("at least one", "(10, 2, 0)")),
    "k of another dimension": (lambda: packed_call(k=torch.randn(10, 2, 8)), "k", ("dimension 16", "(10, 2, 8)")),
    "v of other rows than k": (lambda: packed_call(v=torch.randn(9, 2, 24)), "v", ("(10,)", "(9, 2, 24)")),
    "offsets of q a list": (lambda: packed_call(cu_seqlens_q=[0, 3, 8]), "cu_seqlens_q", ("list", "torch.Tensor")),
    "offsets of k of rank 2": (
        lambda: packed_call(cu_seqlens_k=offsets(0, 4, 10)[None]),
        "cu_seqlens_k",
        ("(1, 3)", "(B + 1,)"),
    ),
    "offsets of q with no entry": (lambda: packed_call(cu_seqlens_q=offsets()), "cu_seqlens_q", ("(0,)", "(B + 1,)")),
    "offsets of q of floats": (
        lambda: packed_call(cu_seqlens_q=torch.tensor([0.0, 3.0, 8.0])),
        "cu_seqlens_q",
        ("float32", "int32 or int64"),
    ),
    "offsets of k of int16": (
        lambda: packed_call(cu_seqlens_k=offsets(0, 4, 10, dtype=torch.int16)),
        "cu_seqlens_k",
        ("int16", "int32 or int64"),
    ),
    "offsets on another device": (
        lambda: packed_call(cu_seqlens_q=meta(3, dtype=torch.int32)),
        "cu_seqlens_q",
        ("meta", "cpu"),
    ),
    "offsets of two batches": (lambda: packed_call(cu_seqlens_k=offsets(0, 10)), "cu_seqlens_k", ("3 offsets", "(2,)")),
    "no offsets": (
        lambda: packed_call(cu_seqlens_q=None, cu_seqlens_k=None),
        "cu_seqlens_q, cu_seqlens_k",
        ("None for both", "at least one"),
    ),
    "shared q of rank 4": (
        lambda: shared_query_call(q=torch.randn(2, 3, 4, 16)),
        "q",
        ("(2, 3, 4, 16)", "(Sq, H, D)"),
    ),
    "dense k of rank 3": (lambda: dense_key_call(k=torch.randn(10, 2, 16)), "k", ("(10, 2, 16)", "(B, S, Hkv, D)")),
    "dense v of rank 3": (lambda: dense_key_call(v=torch.randn(10, 2, 24)), "v", ("(10, 2, 24)", "(B, S, Hkv, D)")),
    "dense k of another batch": (
        lambda: dense_key_call(k=torch.randn(3, 5, 2, 16), v=torch.randn(3, 5, 2, 24)),
        "k",
        ("batch of 2", "(3, 5, 2, 16)"),
    ),
    "out_scale of another batch": (lambda: packed_call(out_scale=torch.ones(3)), "out_scale", ("(2,)", "(3,)")),
    "out_scale without a dimension": (lambda: packed_call(out_scale=torch.tensor(2.0)), "out_scale", ("(2,)", "()")),
    "out_scale of integers": (
        lambda: packed_call(out_scale=torch.ones(2, dtype=torch.int32)),
        "out_scale",
        ("int32", "floating"),
    ),
    "out_scale on another device": (lambda: packed_call(out_scale=meta(2)), "out_scale", ("meta", "cpu")),
    "out_scale that requires grad": (
        lambda: packed_call(out_scale=torch.ones(2, requires_grad=True)),
        "out_scale",
        ("require grad", "not implemented"),
    ),
    "out_scale sparse": (lambda: packed_call(out_scale=torch.ones(2).to_sparse()), "out_scale", ("strided", "sparse_coo")),
    "q sparse": (lambda: packed_call(q=torch.randn(10, 4, 16).to_sparse()), "q", ("strided", "sparse_coo")),
    "offsets sparse": (
        lambda: packed_call(cu_seqlens_k=offsets(0, 4, 9).to_sparse()),
        "cu_seqlens_k",
        ("strided", "sparse"),
    ),
    "offsets nested": (lambda: packed_call(cu_seqlens_q=nested(offsets(0, 3, 8))), "cu_seqlens_q", ("ordinary", "nested")),
    "out_scale nested": (lambda: packed_call(out_scale=nested(torch.ones(2))), "out_scale", ("ordinary", "nested")),
    "scale past every float": (lambda: packed_call(scale=10**400), "scale", ("float",)),
    "window past every integer": (lambda: packed_call(window_size=(2**70, 0)), "window_size", ("left", "2^63", str(2**70))),
    "max_seqlen_q past every integer": (lambda: packed_call(max_seqlen_q=2**63), "max_seqlen_q", ("2^63", str(2**63))),
    "out_scale a word": (lambda: packed_call(out_scale="mean"), "out_scale", ("str", "number")),
    "scale a tensor": (lambda: packed_call(scale=torch.tensor(0.5)), "scale", ("Tensor", "number")),
    "scale a bool": (lambda: packed_call(scale=True), "scale", ("bool", "number")),
    "window below -1": (lambda: packed_call(window_size=(-2, 3)), "window_size", ("left", "-1", "-2")),
    "window below -1 to the right": (lambda: packed_call(window_size=(4, -7)), "window_size", ("right", "-1", "-7")),
    "window of one number": (lambda: packed_call(window_size=4), "window_size", ("pair", "got 4")),
    "window of three": (lambda: packed_call(window_size=(1, 2, 3)), "window_size", ("pair", "(1, 2, 3)")),
    "window of floats": (lambda: packed_call(window_size=(1.5, 2)), "window_size", ("integer", "1.5")),
    "window of bools": (lambda: packed_call(window_size=(True, 2)), "window_size", ("integer", "True")),
    "causal a number": (lambda: packed_call(causal=1), "causal", ("bool", "got 1")),
    "max_seqlen_q negative": (lambda: packed_call(max_seqlen_q=-1), "max_seqlen_q", ("at least 0", "-1")),
    "max_seqlen_k a float": (lambda: packed_call(max_seqlen_k=10.0), "max_seqlen_k", ("integer", "10.0")),
    "max_seqlen_k a bool": (lambda: packed_call(max_seqlen_k=True), "max_seqlen_k", ("integer", "True")),
    "deterministic a word": (lambda: packed_call(deterministic="yes"), "deterministic", ("True, False or None", "yes")),
    "backend unknown": (lambda: packed_call(backend="triten"), "backend", ("triten", "did you mean 'triton'")),
    "backend not a name": (lambda: packed_call(backend=3), "backend", ("got 3", "reference")),
    "activation unknown": (lambda: packed_call(activation="gelo"), "activation", ("gelo", "gelu")),
    "activation far from any name": (lambda: packed_call(activation="zzzz"), "activation", ("zzzz", "hardswish")),
    "activation a number": (lambda: packed_call(activation=3), "activation", ("int",)),
    "activation per head, too few": (lambda: packed_call(activation=["gelu", "relu"]), "activation", ("4", "2")),
    "activation per head, none": (lambda: packed_call(activation=[]), "activation", ("4", "0")),
    "activation per head, one unknown": (
        lambda: packed_call(activation=["gelu", "relu", "silo", "tanh"]),
        "activation",
        ("silo", "silu"),
    ),
}

WRONG_DENSE: dict[str, tuple[Callable[[], dict[str, Any]], str, tuple[str, ...]]] = {
    "q is a list": (lambda: dense_call(q=[1.0]), "q", ("list", "torch.Tensor")),
    "v is None": (lambda: dense_call(v=None), "v", ("NoneType", "torch.Tensor")),
    "q of rank 3": (lambda: dense_call(q=torch.randn(6, 4, 16)), "q", ("(6, 4, 16)", "(B, Sq, H, D)")),
    "k of rank 3": (lambda: dense_call(k=torch.randn(5, 2, 16)), "k", ("(5, 2, 16)", "(B, S, Hkv, D)")),
    "v of rank 5": (lambda: dense_call(v=torch.randn(1, 2, 5, 2, 24)), "v", ("(1, 2, 5, 2, 24)", "(B, S, Hkv, D)")),
    "k of another batch": (
        lambda: dense_call(k=torch.randn(1, 5, 2, 16), v=torch.randn(1, 5, 2, 24)),
        "k",
        ("batch of 2", "(1, 5, 2, 16)"),
    ),
    "v of another length than k": (lambda: dense_call(v=torch.randn(2, 4, 2, 24)), "v", ("(2, 5)", "(2, 4, 2, 24)")),
    "heads not a multiple": (lambda: dense_call(q=torch.randn(2, 6, 5, 16)), "q", ("multiple of k's 2", "got 5")),
    "out_scale of another batch": (lambda: dense_call(out_scale=torch.ones(6)), "out_scale", ("(2,)", "(6,)")),
    "activation unknown": (lambda: dense_call(activation="swish"), "activation", ("swish", "silu")),
}


def assert_refused(call: Callable[[], Any], argument: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(gdpa.GdpaError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert message.startswith(f"{argument}:"), message
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in {message!r}"


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reaching a backend, or choosing one, is a failure."""

    def reached(*arguments: Any, **keywords: Any) -> None:
        pytest.fail("a wrong call reached the dispatcher")

    monkeypatch.setattr(dispatch, "choose", reached)


@pytest.mark.parametrize("case", WRONG_VARLEN.values(), ids=WRONG_VARLEN.keys())
def test_attention_varlen_refuses_before_anything_runs(case, nothing_runs):
    make, argument, fragments = case
    assert_refused(lambda: gdpa.attention_varlen(**make()), argument, fragments)


@pytest.mark.parametrize("case", WRONG_DENSE.values(), ids=WRONG_DENSE.keys())
def test_attention_refuses_before_anything_runs(case, nothing_runs):
    make, argument, fragments = case
    assert_refused(lambda: gdpa.attention(**make()), argument, fragments)


@pytest.mark.parametrize("case", WRONG_VARLEN.values(), ids=WRONG_VARLEN.keys())
def test_explain_refuses_what_attention_varlen_refuses(case):
    make, argument, _ = case
    if argument == "cu_seqlens_q, cu_seqlens_k":
        argument = "q"  # without offsets explain speaks of gdpa.attention, whose q has four dimensions
    assert_refused(lambda: gdpa.explain(**make()), argument, ())


def test_the_calls_that_the_wrong_ones_vary_are_right():
    for make in (packed_call, dense_key_call, shared_query_call):
        assert gdpa.attention_varlen(**make()).isfinite().all()
    assert gdpa.attention(**dense_call()).isfinite().all()


def test_right_calls_before_them_do_not_let_wrong_ones_pass(monkeypatch):
    """What the checks read is remembered where they passed: a wrong call must not look like a right one."""
    remembered: set[Any] = set()
    monkeypatch.setattr(problem, "_sound", remembered)
    for make in (packed_call, dense_key_call, shared_query_call):
        gdpa.explain(**make())
    gdpa.explain(**dense_call())
    right = set(remembered)
    assert len(right) == 4
    for make, argument, fragments in WRONG_VARLEN.values():
        assert_refused(lambda make=make: gdpa.attention_varlen(**make()), argument, fragments)
    for make, argument, fragments in WRONG_DENSE.values():
        assert_refused(lambda make=make: gdpa.attention(**make()), argument, fragments)
    monkeypatch.setattr(problem, "_check_call", lambda *arguments: pytest.fail("a call that is known was checked again"))
    gdpa.explain(**packed_call())


def test_the_memory_of_right_calls_is_bounded(monkeypatch):
    remembered: set[Any] = set()
    monkeypatch.setattr(problem, "_sound", remembered)
    monkeypatch.setattr(problem, "_MOST_SOUND", 3)
    for rows in range(1, 12):
        gdpa.explain(**packed_call(q=torch.randn(rows, 4, 16)))
        assert 1 <= len(remembered) <= 3


@pytest.mark.parametrize("error", [gdpa.BackendUnavailable, gdpa.UnsupportedActivation], ids=lambda e: e.__name__)
def test_every_error_is_a_gdpa_error_and_a_value_error(error):
    assert issubclass(error, gdpa.GdpaError)
    assert issubclass(gdpa.GdpaError, ValueError)


def test_mixed_dtypes_are_accepted_only_under_autocast():
    call = packed_call(k=torch.randn(10, 2, 16).bfloat16())
    assert_refused(lambda: gdpa.attention_varlen(**call), "k", ("bfloat16", "float32"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gdpa.attention_varlen(**call).dtype == torch.bfloat16


WRONG_VALUES = {
    "does not start at 0": ((1, 4), ("start at 0", "got 1")),
    "starts below 0": ((-1, 4), ("start at 0", "got -1")),
    "decreases": ((0, 5, 3, 8), ("never to decrease", "5 then 3", "position 2")),
    "ends past the buffer": ((0, 4, 9), ("at most at 8", "got 9")),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("wrong", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_wrong_offsets_are_refused_on_a_cpu_before_a_backend_runs(wrong, side, dtype, monkeypatch):
    values, fragments = wrong
    right = torch.linspace(0, 8, len(values)).long()
    call = {
        "q": torch.randn(8, 2, 8),
        "k": torch.randn(8, 2, 8),
        "v": torch.randn(8, 2, 8),
        "cu_seqlens_q": right,
        "cu_seqlens_k": right,
    }
    call[side] = offsets(*values, dtype=dtype)
    calls = [spy(monkeypatch, dispatch.load(name), "forward") for name in ("reference", "cpu")]
    for backend in (None, "reference", "cpu"):
        assert_refused(lambda backend=backend: gdpa.attention_varlen(**call, backend=backend), side, fragments)
    assert calls == [[], []]


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_bound_below_a_length_is_refused_on_a_cpu(side):
    call = packed_call(**{f"max_seqlen_{side}": 4})
    length = {"q": 5, "k": 6}[side]
    assert_refused(lambda: gdpa.attention_varlen(**call), f"cu_seqlens_{side}", ("up to 4", f"got {length} for sequence 1"))


@pytest.mark.parametrize("extra", [0, 100], ids=["exact", "loose"])
def test_a_right_bound_changes_nothing(extra):
    call = packed_call()
    expected = gdpa.attention_varlen(**call)
    assert torch.equal(gdpa.attention_varlen(**call, max_seqlen_q=5 + extra, max_seqlen_k=6 + extra), expected)


def test_offsets_are_refused_inside_the_operator_too():
    q = torch.randn(8, 2, 8)
    bad, good = offsets(0, 9), offsets(0, 8)
    with pytest.raises(gdpa.GdpaError, match="cu_seqlens_k: expected to end at most at 8"):
        torch.ops.gdpa.forward(q, q, q, good, bad, None, None, None, ["relu"], None, 1.0, -1, -1, False, "")


@pytest.mark.parametrize(
    ("device", "value", "checked"),
    [("cpu", None, True), ("cpu", "0", True), ("cuda", None, False), ("cuda", "0", False), ("cuda", "1", True)],
)
def test_offsets_are_looked_at_on_a_cpu_always_and_elsewhere_where_asked(device, value, checked, monkeypatch):
    monkeypatch.delenv("GDPA_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("GDPA_CHECK", value)
    assert offsets_are_checked(torch.device(device)) is checked


def test_right_offsets_come_back_as_integers():
    assert check_offsets("cu_seqlens_q", offsets(0, 3, 3, 7), 9, 4) == [0, 3, 3, 7]
    assert check_offsets("cu_seqlens_q", offsets(0), 0, None) == [0]


def test_row_ranges_clamp_whatever_the_offsets_hold():
    assert row_ranges(offsets(0, 3, 3, 8), 3, 8) == [(0, 3), (3, 0), (3, 5)]
    assert row_ranges(None, 2, 5) == [(0, 5), (0, 5)]
    for start, length in row_ranges(offsets(-4, 6, 2, 100, 50), 4, 8):
        assert start >= 0
        assert length >= 0
        assert start + length <= 8


def test_causal_sets_the_right_side_only():
    assert check_window((-1, -1), False) == (-1, -1)
    assert check_window((-1, -1), True) == (-1, 0)
    assert check_window((5, 3), True) == (5, 0)
    assert check_window([5, 3], False) == (5, 3)


@pytest.mark.parametrize("window", list(itertools.product((-1, 0, 1, 3, 9), repeat=2)), ids=str)
@pytest.mark.parametrize("lengths", [(4, 4), (2, 6), (6, 2), (0, 3), (3, 0), (1, 1)], ids=str)
def test_window_is_flash_attentions(lengths, window):
    q_len, k_len = lengths
    left, right = window
    mask = window_mask(q_len, k_len, window, torch.device("cpu"))
    assert mask.shape == lengths
    for i, j in itertools.product(range(q_len), range(k_len)):
        diagonal = i + k_len - q_len
        assert mask[i, j].item() == ((left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (0, 2), (3, 3), (-1, 1)], ids=str)
def test_allowed_pairs_counts_the_masks(window):
    case = make_case(q_lengths=(4, 0, 7, 2), k_lengths=(6, 3, 5, 0), window_size=window)
    expected = sum(
        int(window_mask(q_len, k_len, window, torch.device("cpu")).sum())
        for q_len, k_len in zip((4, 0, 7, 2), (6, 3, 5, 0), strict=True)
    )
    assert allowed_pairs(case.problem, case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k) == expected


def test_explain_names_the_backend_and_a_reason_for_every_other():
    explanation = gdpa.explain(**packed_call())
    assert explanation.backend == "cpu"
    assert set(explanation.why_not) == set(dispatch.BACKENDS) - {"cpu"}
    assert all(explanation.why_not.values())
    assert "cpu" in str(explanation)
    assert explanation.why_not["triton"] in str(explanation)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_explain_of_a_named_backend_is_that_backend(backend):
    explanation = gdpa.explain(**packed_call(), backend=backend)
    assert explanation.backend == backend
    assert set(explanation.why_not) == set(dispatch.BACKENDS) - {backend}


def test_explain_takes_the_dense_form(monkeypatch):
    calls = spy(monkeypatch, dispatch.load("cpu"), "forward")
    assert gdpa.explain(**dense_call()).backend == "cpu"
    assert calls == []


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_backend_that_explain_names_is_the_one_that_runs(backend, monkeypatch):
    calls = {name: spy(monkeypatch, dispatch.load(name), "forward") for name in ("reference", "cpu")}
    gdpa.attention_varlen(**packed_call(), backend=backend)
    assert {name: len(made) for name, made in calls.items()} == {"reference": 0, "cpu": 0, backend: 1}


@needs_triton
def test_a_named_backend_that_cannot_run_raises_its_reason_and_never_falls_back(nothing_runs, monkeypatch):
    monkeypatch.undo()
    call = {name: value.double() if value.is_floating_point() else value for name, value in packed_call().items()}
    calls = [spy(monkeypatch, dispatch.load(name), "forward") for name in ("reference", "cpu")]
    with pytest.raises(gdpa.BackendUnavailable, match=r"'triton' cannot run this call: .*float64") as caught:
        gdpa.attention_varlen(**call, backend="triton")
    assert str(caught.value).startswith("backend:")
    assert calls == [[], []]
    with pytest.raises(gdpa.BackendUnavailable, match="float64"):
        gdpa.explain(**call, backend="triton")
    assert "float64" in gdpa.explain(**call).why_not["triton"]


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_rows": 2**30}, "fewer than 1073741824 rows"),
        ({"heads": 2**16, "kv_heads": 2**16, "head_dim": 128}, "rows of fewer than 8388608 elements"),
        ({"heads": 2**16, "value_dim": 256}, "rows of fewer than 8388608 elements"),
    ],
    ids=["rows", "a row of queries", "a row of the output"],
)
def test_the_portable_kernels_take_what_they_count_in_32_bits(changes, reason):
    small = dataclasses.replace(make_case(dtype=torch.bfloat16).problem, device=torch.device("cuda", 0))
    assert dispatch.reason_against("triton", small) is None
    large = dispatch.reason_against("triton", dataclasses.replace(small, **changes))
    assert large is not None and reason in large


@needs_triton
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize(
    ("changes", "got"), [({"heads": 2**16, "kv_heads": 2**16}, "65536 and 5"), ({"query_rows": 2**20}, "2 and 1048576")]
)
def test_shared_queries_of_more_heads_or_rows_than_a_grid_has_programs_are_refused(backend, changes, got, monkeypatch):
    from gdpa.backends.hopper import backend as hopper

    monkeypatch.setattr(hopper, "architecture", lambda device: 90)
    monkeypatch.setattr(hopper, "_missing", lambda: None)
    gpu = torch.device("cuda", 0)
    for form in ("shared-query", "packed"):
        small = dataclasses.replace(make_case(form, dtype=torch.bfloat16, head_dim=64).problem, device=gpu)
        assert dispatch.reason_against(backend, small) is None
        reason = dispatch.reason_against(backend, dataclasses.replace(small, **changes))
        if form == "packed":
            assert reason is None
        else:
            assert reason is not None and "at most 65535 heads and 1048560 rows" in reason and got in reason


@needs_triton
def test_no_tile_of_shared_queries_has_fewer_rows_than_the_refusal_goes_by():
    from gdpa.backends import gpu
    from gdpa.backends.triton import configs

    tables = (configs._HOPPER, configs._PORTABLE, configs._FULL_PRECISION)
    rows = [shape.block_m for table in tables for (kernel, *_), shape in table.items() if kernel == "query_gradient"]
    assert len(rows) == 9 and min(rows) >= gpu.LEAST_QUERIES_OF_A_TILE


def test_explain_goes_by_autocasts_dtype():
    q = torch.randn(1, 16, 1, 64)
    with spied_problems() as problems, torch.autocast("cpu", torch.bfloat16):
        gdpa.explain(q, q, q)
        gdpa.explain(q.double(), q.double(), q.double())
    assert [problem.dtype for problem in problems] == [torch.bfloat16, torch.float64]


@contextmanager
def spied_problems():
    found = []
    real = dispatch.explain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "explain", lambda problem, backend: (found.append(problem), real(problem, backend))[1])
        yield found


def test_a_window_as_wide_as_an_integer_is_none():
    q = torch.randn(1, 6, 1, 8)
    for side in ((-1, sys.maxsize), (sys.maxsize, -1), (sys.maxsize, sys.maxsize)):
        for backend in ("reference", "cpu"):
            out = gdpa.attention(q, q, q, "sigmoid", window_size=side, backend=backend)
            torch.testing.assert_close(out, gdpa.attention(q, q, q, "sigmoid", backend=backend))


def test_a_nested_result_pads_as_its_queries_do():
    q = torch.nested.nested_tensor([torch.randn(length, 2, 8) for length in (3, 5)], layout=torch.jagged)
    out = gdpa.attention(q, q, q)
    assert torch.nested.to_padded_tensor(out, 0.0).shape == torch.nested.to_padded_tensor(q, 0.0).shape
    assert (out + q).shape == q.shape


def test_nested_tensors_of_other_batches_are_refused_by_the_callers_argument():
    three, two = (
        torch.nested.nested_tensor([torch.randn(length, 2, 8) for length in lengths], layout=torch.jagged)
        for lengths in ((3, 5, 2), (4, 4))
    )
    with pytest.raises(gdpa.GdpaError, match=r"k: expected a batch of 3 \(that of q\), got 2"):
        gdpa.attention(three, two, two)


@pytest.mark.parametrize("fill", [None, "0", torch.zeros(())])
def test_what_is_no_number_fills_nothing(fill):
    with pytest.raises(gdpa.GdpaError, match="fill: expected a number"):
        gdpa.unpack(torch.randn(8, 4), torch.tensor([0, 3, 8]), 5, fill=fill)


def test_an_activation_keeps_what_it_is():
    activation = gdpa.Activation("silu")
    with pytest.raises(AttributeError, match="cannot be changed"):
        del activation.key
    assert activation.key == "silu"

"""The schema of a training example and its batches: what they refuse, and that examples survive cutting and joining."""

import dataclasses
import doctest
import importlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import gdpa
from gdpa.data.schema import Batch, History, Schema, concatenate, packed_offsets

SCHEMA = Schema(dense=2, sparse=(("ad", 10), ("country", 3)), items=10, event_types=("view", "click"), values=True, candidate="ad")


def small_batch() -> Batch:
    """Three examples with 2, 0 and 3 events."""
    return Batch(
        labels=torch.tensor([1.0, 0.0, 1.0]),
        request_timestamps=torch.tensor([100, 200, 300]),
        dense=torch.arange(6.0).view(3, 2),
        sparse=torch.tensor([[9, 0], [4, 1], [0, 2]]),
        history=History(
            offsets=torch.tensor([0, 2, 2, 5], dtype=torch.int32),
            items=torch.tensor([1, 2, 7, 8, 9]),
            types=torch.tensor([0, 1, 1, 0, 1]),
            timestamps=torch.tensor([50, 100, 10, 20, 20]),
            values=torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5]),
        ),
    )


def columns(batch: Batch) -> dict[str, torch.Tensor | None]:
    tensors = {**vars(batch), **vars(batch.history)}
    return {name: column for name, column in tensors.items() if name not in ("history", "known")}


def assert_same(got: Batch, expected: Batch) -> None:
    for name, column in columns(expected).items():
        other = columns(got)[name]
        if column is None:
            assert other is None, name
        else:
            assert other.dtype == column.dtype and torch.equal(other, column), name


def test_a_right_batch_passes_its_check_and_knows_its_lengths():
    batch = small_batch().check(SCHEMA)
    assert len(batch) == 3
    assert batch.lengths.tolist() == [2, 0, 3]


def test_batches_without_examples_or_without_events_pass_too():
    batch = small_batch()
    assert len(batch.rows(1, 1).check(SCHEMA)) == 0
    bare = batch.without_history().check(SCHEMA)
    assert bare.lengths.tolist() == [0, 0, 0]
    assert torch.equal(bare.dense, batch.dense) and torch.equal(bare.sparse, batch.sparse)


def test_rows_and_concatenate_are_inverse():
    batch = small_batch()
    assert_same(concatenate([batch.rows(0, 1), batch.rows(1, 1), batch.rows(1, 3)]), batch)
    assert batch.rows(1, 3).history.offsets.tolist() == [0, 0, 3]


def test_select_takes_examples_in_the_given_order():
    batch = small_batch()
    picked = batch.select(torch.tensor([2, 0, 1, 2])).check(SCHEMA)
    assert_same(picked, concatenate([batch.rows(2, 3), batch.rows(0, 1), batch.rows(1, 2), batch.rows(2, 3)]))


def test_to_moves_every_tensor():
    moved = small_batch().to("meta")
    assert all(column.device.type == "meta" for column in columns(moved).values())


def test_counts_are_taken_along_from_the_cpu_and_dropped_on_the_way_back():
    history = small_batch().history
    assert history.known is None and history.counts() == (3, (2, 3))
    moved = history.to("meta")
    assert moved.counts() == (3, (2, 3))  # a meta tensor could not be counted
    assert moved.to("meta").counts() == (3, (2, 3))
    assert history.to("cpu").known is None
    assert small_batch().rows(1, 2).history.counts() == (0, ())
    assert small_batch().rows(1, 1).history.counts() == (0, ())


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 100])
def test_recent_keeps_the_newest_events_of_each_example(limit):
    batch = small_batch()
    recent = batch.recent(limit).check(SCHEMA)
    for example in range(3):
        whole, kept = batch.rows(example, example + 1).history, recent.rows(example, example + 1).history
        for name, column in whole.events.items():
            assert kept.events[name].tolist() == column.tolist()[max(0, len(column) - limit) :], name
    assert torch.equal(recent.labels, batch.labels) and torch.equal(recent.sparse, batch.sparse)


def test_recent_refuses_a_limit_that_is_no_count():
    for limit in (-1, True, 1.5):
        with pytest.raises(gdpa.GdpaError, match="limit: expected"):
            small_batch().recent(limit)


@pytest.mark.parametrize("schema", [SCHEMA, Schema(0, (), 1, ("view",))], ids=["full", "least"])
def test_a_schema_survives_its_json(schema):
    assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", SCHEMA.to_json().replace('"format": 1', '"format": 2'), SCHEMA.to_json().replace('"items"', '"itens"')],
    ids=["empty", "list", "no-format", "other-format", "other-field"],
)
def test_json_of_anything_else_is_refused(text):
    with pytest.raises(gdpa.GdpaError, match="schema"):
        Schema.from_json(text)


def test_a_schema_of_lists_is_that_of_tuples():
    lists = Schema(dense=1, sparse=[["ad", 10]], items=10, event_types=["view", "click"])
    assert lists == Schema(dense=1, sparse=(("ad", 10),), items=10, event_types=("view", "click"))
    assert lists == Schema.from_json(lists.to_json())
    hash(lists)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"dense": -1}, "dense"),
        ({"dense": True}, "dense"),
        ({"items": 0}, "items"),
        ({"sparse": (("ad", 10), ("ad", 3))}, "sparse"),
        ({"sparse": (("ad", 0),)}, "sparse"),
        ({"sparse": (("ad", 3, 4),)}, "sparse"),
        ({"sparse": ("ad",)}, "sparse"),
        ({"items": 2**63}, "items"),
        ({"event_types": ()}, "event_types"),
        ({"event_types": "xy"}, "event_types"),
        ({"event_types": ("view", "view")}, "event_types"),
        ({"values": 1}, "values"),
        ({"candidate": "country"}, "candidate"),
        ({"candidate": "film"}, "candidate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_wrong_schema_names_the_argument(change, argument):
    with pytest.raises(gdpa.GdpaError, match=f"^{argument}:"):
        dataclasses.replace(SCHEMA, **change)


def changed(batch: Batch, name: str, value: torch.Tensor | None) -> Batch:
    if name.startswith("history."):
        return replace(batch, history=replace(batch.history, **{name.removeprefix("history."): value}))
    return replace(batch, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", torch.ones(3, dtype=torch.int64)),
        ("request_timestamps", torch.zeros(2, dtype=torch.int64)),
        ("dense", torch.zeros(3, 3)),
        ("sparse", torch.zeros(3, 1, dtype=torch.int64)),
        ("history.items", torch.zeros(4, dtype=torch.int64)),
        ("history.types", torch.zeros(5, dtype=torch.int32)),
        ("history.timestamps", torch.zeros(5, dtype=torch.int64, device="meta")),
        ("history.values", None),
        ("history.offsets", torch.tensor([0, 2, 2, 5])),
        ("history.offsets", torch.tensor([0, 3, 2, 5], dtype=torch.int32)),
        ("history.offsets", torch.tensor([1, 2, 2, 5], dtype=torch.int32)),
        ("history.offsets", torch.tensor([0, 2, 2, 4], dtype=torch.int32)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_of_another_shape_or_kind_is_named(name, value):
    bad = changed(small_batch(), name, value)
    # Fewer items than the other columns have events: the columns are measured against the items.
    named = r"history\." if name == "history.items" else name.replace(".", r"\.")
    with pytest.raises(gdpa.GdpaError, match=f"^{named}"):
        bad.check(SCHEMA)


@pytest.mark.parametrize(
    ("name", "place", "value", "column", "row"),
    [
        ("labels", (1,), 2.0, "label", 1),
        ("dense", (2, 1), float("nan"), "dense", 2),
        ("sparse", (0, 0), 10, "sparse_ad", 0),
        ("sparse", (2, 1), -1, "sparse_country", 2),
        ("history.items", (2,), 10, "history_item", 2),
        ("history.items", (1,), -1, "history_item", 0),
        ("history.types", (4,), 2, "history_type", 2),
        ("history.timestamps", (3,), 5, "history_timestamp", 2),
        ("history.timestamps", (1,), 101, "history_timestamp", 0),
        ("history.timestamps", (0,), -(2**63), "history_timestamp", 0),
        ("request_timestamps", (0,), 2**62, "request_timestamp", 0),
        ("history.values", (4,), float("inf"), "history_value", 2),
    ],
)
def test_a_value_that_the_schema_does_not_allow_is_named_by_column_and_row(name, place, value, column, row):
    batch = small_batch()
    tensor = columns(batch)[name.removeprefix("history.")].clone()
    tensor[place] = value
    with pytest.raises(gdpa.GdpaError, match=f"column '{column}', row {row}: expected"):
        changed(batch, name, tensor).check(SCHEMA)


def test_cutting_and_joining_refuse_what_makes_no_sense():
    batch = small_batch()
    with pytest.raises(gdpa.GdpaError, match="start, stop"):
        batch.rows(2, 4)
    with pytest.raises(gdpa.GdpaError, match="batches: expected at least one"):
        concatenate([])
    with pytest.raises(gdpa.GdpaError, match="batches: expected event values"):
        concatenate([batch, changed(batch, "history.values", None)])


def test_more_events_than_int32_counts_are_refused():
    assert packed_offsets(torch.tensor([2**31 - 2, 1])).tolist() == [0, 2**31 - 2, 2**31 - 1]
    with pytest.raises(gdpa.GdpaError, match="history: expected fewer than 2147483648 events"):
        packed_offsets(torch.tensor([2**31 - 2, 2]))


def test_importing_gdpa_and_its_data_modules_leaves_pyarrow_alone():
    code = "import sys, gdpa, gdpa.data.convert, gdpa.data.parquet, gdpa.data.synthetic; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["schema", "synthetic"])
def test_examples_in_docstrings_run(name):
    failed, ran = doctest.testmod(importlib.import_module(f"gdpa.data.{name}"))
    assert ran and not failed

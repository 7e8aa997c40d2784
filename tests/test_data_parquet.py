"""Parquet files of the schema: what is written is read, in batches of any size; a wrong file is refused by row and column."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_data_schema import SCHEMA, assert_same, small_batch

import gdpa
from gdpa.data.parquet import ParquetReader, of_size, write
from gdpa.data.schema import Batch, Schema, concatenate
from gdpa.data.synthetic import SyntheticClicks

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

SAMPLE = Path(__file__).parent / "data" / "clicks.parquet"
CLICKS = SyntheticClicks(batch_size=100, median_length=6, max_length=40)


@pytest.fixture(scope="module")
def clicks_file(tmp_path_factory):
    """300 examples in row groups of 64."""
    path = tmp_path_factory.mktemp("parquet") / "clicks.parquet"
    assert write(path, [CLICKS.batch(i) for i in range(3)], CLICKS.schema, row_group=64) == 300
    return path


@pytest.fixture(scope="module")
def all_clicks():
    return concatenate([CLICKS.batch(i) for i in range(3)])


@pytest.mark.parametrize("size", [1, 7, 64, 100, 128, 300, 1000])
def test_what_was_written_is_read_across_row_groups(clicks_file, all_clicks, size):
    reader = ParquetReader(clicks_file, size)
    assert pq.ParquetFile(clicks_file).num_row_groups == 5
    assert reader.schema == CLICKS.schema
    batches = list(reader)
    assert len(batches) == len(reader)
    assert all(len(batch) == size for batch in batches[:-1])
    assert_same(concatenate(batches).check(reader.schema), all_clicks)


def test_a_last_batch_that_is_smaller_can_be_left_out(clicks_file):
    reader = ParquetReader(clicks_file, 128, drop_last=True)
    assert [len(batch) for batch in reader] == [128, 128]
    assert len(reader) == 2


@pytest.mark.parametrize("shuffle", [None, 3], ids=["in-order", "shuffled"])
@pytest.mark.parametrize("start", [0, 1, 4, 42, 43, 50])
def test_reading_resumes_at_any_batch(clicks_file, start, shuffle):
    reader = ParquetReader(clicks_file, 7)
    whole, resumed = list(reader.batches(shuffle=shuffle)), list(reader.batches(start, shuffle=shuffle))
    assert len(resumed) == max(len(whole) - start, 0)
    for got, expected in zip(resumed, whole[start:], strict=True):
        assert_same(got, expected)


def test_shuffling_keeps_every_example_and_a_seed_means_one_order(clicks_file, all_clicks):
    reader = ParquetReader(clicks_file, 50)
    first, again, other = (concatenate(list(reader.batches(shuffle=seed))) for seed in (1, 1, 2))
    assert_same(first, again)
    assert not torch.equal(first.dense, other.dense)
    assert not torch.equal(first.dense, all_clicks.dense)
    places = {value: index for index, value in enumerate(all_clicks.dense[:, 0].tolist())}
    rows = [places[value] for value in first.dense[:, 0].tolist()]
    mixed = [[row % 64 for row in rows if row // 64 == group] for group in range(4)]
    assert all(mixed[0] != order for order in mixed[1:]), "each row group has an order of its own"
    assert list(dict.fromkeys(row // 64 for row in rows)) != list(range(5)), "the row groups come in another order too"
    order, expected = (batch.dense[:, 0].argsort() for batch in (first, all_clicks))
    assert_same(first.select(order), all_clicks.select(expected))


def test_joining_small_pieces_takes_time_in_proportion_to_their_number(all_clicks, monkeypatch):
    """A log whose users have an example each comes in pieces of one row."""
    ones = [all_clicks.rows(place, place + 1) for place in range(len(all_clicks))]
    asked, length = [], Batch.__len__
    monkeypatch.setattr(Batch, "__len__", lambda batch: asked.append(1) or length(batch))
    for size in (len(ones), len(ones) - 1, 7):
        asked.clear()
        found = list(of_size(iter(ones), size))
        assert len(asked) < 8 * len(ones), size
        assert [length(batch) for batch in found] == [size] * (len(ones) // size) + ([len(ones) % size] if len(ones) % size else [])
        assert_same(concatenate(found), all_clicks)


def test_row_groups_are_read_one_at_a_time_and_a_broken_one_is_reported(clicks_file, tmp_path):
    """A byte of the last row group is flipped: what comes before is read, and its turn is an error, not wrong values."""
    metadata = pq.ParquetFile(clicks_file).metadata.row_group(4)
    column = next(
        metadata.column(i) for i in range(metadata.num_columns) if metadata.column(i).path_in_schema.startswith("history_item")
    )
    start, size = column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size
    broken = tmp_path / "broken.parquet"
    data = bytearray(clicks_file.read_bytes())
    middle = start + size * 3 // 4  # of the ids; a byte of a page's header may be one that nobody reads
    data[middle] ^= 0xFF
    broken.write_bytes(data)
    batches = iter(ParquetReader(broken, 64))
    for _ in range(4):
        assert len(next(batches)) == 64
    with pytest.raises(gdpa.GdpaError, match=r"broken\.parquet: row group 4, from row 256 on"):
        next(batches)


def test_reading_a_batch_does_not_load_the_file(tmp_path):
    clicks = SyntheticClicks(batch_size=2000, median_length=64)
    path = tmp_path / "large.parquet"
    write(path, [clicks.batch(i) for i in range(4)], clicks.schema, row_group=200)
    whole = pq.read_table(path).nbytes
    reader, before = ParquetReader(path, 50), pa.total_allocated_bytes()
    for _ in zip(range(100), reader, strict=False):
        assert pa.total_allocated_bytes() - before < whole / 4


def test_a_schema_with_the_least_survives_the_file(tmp_path):
    least = Schema(0, (), 5, ("view",))
    batch = small_batch()
    history = replace(batch.history, items=torch.arange(5), types=torch.zeros(5, dtype=torch.int64), values=None)
    batch = replace(batch, dense=torch.empty(3, 0), sparse=torch.empty(3, 0, dtype=torch.int64), history=history)
    write(tmp_path / "least.parquet", [batch], least)
    assert_same(next(iter(ParquetReader(tmp_path / "least.parquet", 3))), batch)


def test_names_with_dots_and_columns_of_somebody_elses_are_no_trouble(tmp_path):
    """A dot is the separator of nested columns in Parquet's own paths."""
    path, schema = tmp_path / "dots.parquet", replace(SCHEMA, sparse=(("ad", 10), ("geo.country", 3)))
    write(path, [small_batch()], schema)
    table = pq.read_table(path).append_column("history_item_names", pa.array([["a"], [], None]))
    pq.write_table(table, path)
    assert_same(next(iter(ParquetReader(path, 3))), small_batch())


def test_examples_whose_histories_are_all_empty_survive_the_file(tmp_path):
    bare = small_batch().without_history()
    write(tmp_path / "bare.parquet", [bare], SCHEMA)
    assert_same(next(iter(ParquetReader(tmp_path / "bare.parquet", 3))), bare)


def written(path, **changes):
    """A file of two row groups of three examples each, small_batch() twice, with columns put in its place: (type, six values)."""
    write(path, [small_batch(), small_batch()], SCHEMA, row_group=3)
    table = pq.read_table(path)
    for column, change in changes.items():
        index = table.schema.get_field_index(column)
        table = table.remove_column(index)
        if change is not None:
            table = table.add_column(index, column, pa.array(change[1], change[0]))
    pq.write_table(table, path, row_group_size=3)
    return path


INTEGERS, FLOATS = pa.list_(pa.int64()), pa.list_(pa.float32())
ITEMS = [[1, 2], [], [7, 8, 9], [1, 2], [], [7, 8, 9]]
TIMES = [[50, 100], [], [10, 20, 20]] * 2
WIDE = [[0.0, 1.0]] * 6


def test_other_widths_and_kinds_of_lists_are_read(tmp_path):
    path = written(
        tmp_path / "wide.parquet",
        label=(pa.int64(), [1, 0, 1] * 2),
        sparse_ad=(pa.uint32(), [9, 4, 0] * 2),
        dense=(pa.list_(pa.float64()), [[0, 1], [2, 3], [4, 5]] * 2),
        history_item=(pa.large_list(pa.int32()), ITEMS),
    )
    assert_same(concatenate(list(ParquetReader(path, 4))), concatenate([small_batch(), small_batch()]))


@pytest.mark.parametrize(
    ("column", "kind", "values", "row", "problem"),
    [
        ("label", pa.int8(), [0, 1, 0, 1, 2, 1], 4, "0 or 1, got 2"),
        ("label", pa.int8(), [0, 1, None, 1, 1, 1], 2, "got null"),
        ("request_timestamp", pa.int64(), [100, 200, 300, 100, 200, None], 5, "got null"),
        ("dense", FLOATS, [*WIDE[:4], [0.0], WIDE[5]], 4, "length 2, the number of dense features, got 1"),
        ("dense", FLOATS, [*WIDE[:3], None, *WIDE[4:]], 3, "expected a list, got null"),
        ("dense", FLOATS, [*WIDE[:5], [0.0, float("nan")]], 5, "finite numbers, got nan"),
        ("dense", pa.list_(pa.float64()), [*WIDE[:5], [0.0, 1e300]], 5, "finite numbers, got inf"),
        ("sparse_ad", pa.int64(), [9, 4, 0, 9, -4, 0], 4, "0 to 9, got -4"),
        ("sparse_country", pa.int64(), [0, 1, 2, 3, 1, 2], 3, "0 to 2, got 3"),
        ("sparse_country", pa.int64(), [0, 1, 2, 0, 1, None], 5, "got null"),
        ("history_item", INTEGERS, [*ITEMS[:5], [7, 8, 10]], 5, "0 to 9, got 10"),
        ("history_item", INTEGERS, [*ITEMS[:3], [-1, 2], *ITEMS[4:]], 3, "0 to 9, got -1"),
        ("history_item", INTEGERS, [*ITEMS[:4], None, ITEMS[5]], 4, "expected a list, got null"),
        ("history_item", INTEGERS, [*ITEMS[:5], [7, None, 9]], 5, "null in it"),
        ("history_type", INTEGERS, [[0, 1], [], [1, 0, 1], [0, 1], [0], [1, 0, 1]], 4, "length 0, that of history_item, got 1"),
        ("history_type", INTEGERS, [[0, 1], [], [1, 0, 1], [0, 2], [], [1, 0, 1]], 3, "0 to 1, got 2"),
        ("history_timestamp", INTEGERS, [*TIMES[:5], [10, 30, 20]], 5, "ascending order, got 20"),
        ("history_timestamp", INTEGERS, [*TIMES[:3], [50, 101], *TIMES[4:]], 3, "after the request, got 101"),
        ("history_timestamp", INTEGERS, [*TIMES[:5], [10, 20]], 5, "length 3, that of history_item, got 2"),
        ("history_value", FLOATS, [[1.0, 1.0], [], [1.0] * 3, [1.0, float("inf")], [], [1.0] * 3], 3, "finite numbers, got inf"),
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_a_wrong_value_is_named_by_file_row_and_column(tmp_path, column, kind, values, row, problem, size):
    path = written(tmp_path / "bad.parquet", **{column: (kind, values)})
    reader = ParquetReader(path, size, schema=SCHEMA)
    with pytest.raises(gdpa.GdpaError, match=rf"bad\.parquet: row {row}, column '{column}': .*{re.escape(problem)}"):
        list(reader)


@pytest.mark.parametrize(
    ("column", "change", "expected"),
    [
        ("sparse_ad", None, "one such column, got none among"),
        ("history_timestamp", None, "one such column, got none among"),
        ("label", (pa.string(), ["0"] * 6), "integers, got the type string"),
        ("sparse_ad", (pa.float64(), [1.0] * 6), "integers, got the type double"),
        ("request_timestamp", (pa.timestamp("s"), [1] * 6), "integers, got the type timestamp"),
        ("dense", (pa.float32(), [1.0] * 6), "lists of floats, got the type float"),
        ("history_item", (pa.list_(pa.string()), [["1"]] * 6), "lists of integers, got the type list"),
        ("history_value", (INTEGERS, ITEMS), "lists of floats, got the type list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_column_or_a_wrong_type_is_an_error_at_opening(tmp_path, column, change, expected):
    path = written(tmp_path / "bad.parquet", **{column: change})
    with pytest.raises(gdpa.GdpaError, match=rf"bad\.parquet: column '{column}': expected {expected}"):
        ParquetReader(path, 4, schema=SCHEMA)


def test_a_given_schema_must_agree_and_its_vocabularies_hold(tmp_path):
    path = written(tmp_path / "clicks.parquet")
    larger = replace(SCHEMA, sparse=(("ad", 20), ("country", 3)), items=20)
    assert ParquetReader(path, 4, schema=larger).schema == larger
    smaller = replace(SCHEMA, sparse=(("ad", 9), ("country", 3)), items=9)
    with pytest.raises(gdpa.GdpaError, match="row 0, column 'sparse_ad': expected an id from 0 to 8, got 9"):
        list(ParquetReader(path, 4, schema=smaller))
    with pytest.raises(gdpa.GdpaError, match=r"clicks\.parquet: expected the schema"):
        ParquetReader(path, 4, schema=replace(SCHEMA, event_types=("click", "view")))
    with pytest.raises(gdpa.GdpaError, match=r"clicks\.parquet: expected the schema"):
        ParquetReader(path, 4, schema=replace(SCHEMA, sparse=(("film", 20),), items=20, candidate="film"))


def test_a_file_without_a_schema_is_read_with_a_given_one(tmp_path):
    path = written(tmp_path / "bare.parquet")
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(gdpa.GdpaError, match=r"bare\.parquet: expected a schema"):
        ParquetReader(path, 4)
    assert_same(next(iter(ParquetReader(path, 3, schema=SCHEMA))), small_batch())


def test_what_is_no_parquet_file_is_refused(tmp_path):
    with pytest.raises(gdpa.GdpaError, match=r"none\.parquet: expected a Parquet file, there is none"):
        ParquetReader(tmp_path / "none.parquet", 4)
    with pytest.raises(gdpa.GdpaError, match="there is a folder"):
        ParquetReader(tmp_path, 4)
    text, cut = tmp_path / "text.parquet", tmp_path / "cut.parquet"
    text.write_text("label,dense\n")
    cut.write_bytes(SAMPLE.read_bytes()[:-100])
    for path in (text, cut):
        with pytest.raises(gdpa.GdpaError, match=f"{path.name}: expected a Parquet file, which this is not"):
            ParquetReader(path, 4)


def test_a_file_without_rows_is_refused(tmp_path):
    path = written(tmp_path / "empty.parquet")
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(gdpa.GdpaError, match=r"empty\.parquet: expected at least one row"):
        ParquetReader(path, 4)


def test_an_error_while_writing_leaves_the_older_file_as_it_was(tmp_path):
    path = tmp_path / "clicks.parquet"
    write(path, [small_batch()], SCHEMA)
    before = path.read_bytes()
    bad = replace(small_batch(), labels=torch.tensor([0.0, 3.0, 1.0]))
    with pytest.raises(gdpa.GdpaError, match="column 'label', row 1"):
        write(path, [small_batch(), bad], SCHEMA, row_group=1)
    with pytest.raises(gdpa.GdpaError, match="at least one example"):
        write(path, [], SCHEMA)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: ParquetReader(SAMPLE, 0), "batch_size"),
        (lambda: ParquetReader(SAMPLE, 4).batches(-1), "start"),
        (lambda: ParquetReader(SAMPLE, 4).batches(shuffle=-1), "shuffle"),
        (lambda: write("x.parquet", [], SCHEMA, row_group=0), "row_group"),
    ],
    ids=["batch_size", "start", "shuffle", "row_group"],
)
def test_a_wrong_argument_is_named(call, argument):
    with pytest.raises(gdpa.GdpaError, match=f"^{argument}:"):
        call()


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(gdpa.GdpaError, match=r"pyarrow: expected to be installed.*gdpa\[data\]"):
        ParquetReader(SAMPLE, 4)

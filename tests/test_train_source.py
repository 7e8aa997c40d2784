"""Where batches come from: every position gives the batches that an uninterrupted run would see, and held-out ones are never among them."""

import threading
import time
from itertools import islice

import pyarrow.parquet
import pytest
import torch

from gdpa.data import parquet
from gdpa.data.schema import Batch, concatenate
from gdpa.data.synthetic import SyntheticClicks
from gdpa.errors import GdpaError
from gdpa.train import source
from gdpa.train.source import Parquet, Prefetch, Synthetic, share


def keys(batches):
    """What tells an example: its dense features."""
    return [tuple(row) for batch in batches for row in batch.dense.tolist()]


@pytest.fixture(scope="module")
def clicks():
    return SyntheticClicks(20, seed=3, median_length=3, max_length=6)


@pytest.fixture
def folder(tmp_path, clicks):
    """Two files of 60 and 40 examples in row groups of 12."""
    path = tmp_path / "data"
    path.mkdir()
    parquet.write(path / "a.parquet", (clicks.batch(index) for index in range(3)), clicks.schema, row_group=12)
    parquet.write(path / "b.parquet", (clicks.batch(index) for index in range(3, 5)), clicks.schema, row_group=12)
    return path


def test_synthetic_batches_are_the_generators_from_any_position_on(clicks):
    for workers in (1, 3):
        made = Synthetic(20, seed=3, median_length=3, max_length=6, workers=workers)
        for start in (0, 2):
            for index, batch in enumerate(islice(made.batches(start), 4)):
                assert batch.dense.equal(clicks.batch(start + index).dense)


def test_synthetic_batches_end_before_the_ones_held_out(monkeypatch, clicks):
    monkeypatch.setattr(source, "HELD_OUT", 4)
    made = Synthetic(20, seed=3, median_length=3, max_length=6, workers=3)
    held = list(made.held_out(2))
    assert [batch.dense.tolist() for batch in held] == [clicks.batch(index).dense.tolist() for index in (4, 5)]
    batches = made.batches(1)
    assert keys(islice(batches, 3)) == keys(clicks.batch(index) for index in (1, 2, 3))
    with pytest.raises(GdpaError, match="--steps: expected at most 4 on synthetic data, since the batches after them are held out"):
        next(batches)


def test_an_epoch_has_every_training_row_once_and_no_row_that_is_held_out(folder):
    made = Parquet(folder, 8, seed=1)
    held = keys(made.held_out(1000))
    everything = keys(parquet.ParquetReader(path, 1000).batches().__next__() for path in sorted(folder.iterdir()))
    # 100 rows, of which 10 are held out; row groups of 12.
    assert held == everything[-10:]
    assert made.rows == 90
    per_epoch = 90 // 8
    first, second = (keys(islice(made.batches(epoch * per_epoch), per_epoch)) for epoch in (0, 1))
    for epoch in (first, second):
        assert len(set(epoch)) == len(epoch) == 88
        assert set(epoch) <= set(everything[:-10])
    assert first != second
    assert set(first) != set(second)  # what is left over is not always the same


@pytest.mark.parametrize("start", [0, 1, 4, 9, 10, 11, 25])
def test_a_position_in_parquet_files_gives_the_batches_that_an_uninterrupted_run_sees(folder, start):
    made = Parquet(folder, 8, seed=1)
    assert keys(islice(made.batches(start), 6)) == keys(islice(made.batches(0), start, start + 6))
    assert keys(islice(made.batches(0), 6)) != keys(islice(Parquet(folder, 8, seed=2).batches(0), 6))


def test_a_file_is_read_as_a_folder_with_it(folder):
    made = Parquet(folder / "a.parquet", 8, seed=1)
    assert made.rows == 54
    assert set(made.facts["row_groups"]) == {"a.parquet"}
    assert all(len(batch) == 8 for batch in islice(made.batches(0), 20))


def test_what_cannot_be_trained_on_is_refused_with_its_reason(folder, tmp_path, clicks):
    with pytest.raises(GdpaError, match="--data: expected 'synthetic', a Parquet file or a folder of them, got .*none.parquet"):
        Parquet(tmp_path / "none.parquet", 8, seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(GdpaError, match=r"--data: expected a folder with \*.parquet files, got .*empty' without any"):
        Parquet(tmp_path / "empty", 8, seed=0)
    with pytest.raises(GdpaError, match=r"--batch-size: expected at most 90, the training .* \(10 are held out\), got 91"):
        Parquet(folder, 91, seed=0)
    parquet.write(tmp_path / "one.parquet", [clicks.batch(0).rows(0, 1)], clicks.schema)
    with pytest.raises(GdpaError, match=r"--batch-size: expected at most 0, the training .* \(1 are held out\), got 8"):
        Parquet(tmp_path / "one.parquet", 8, seed=0)
    (tmp_path / "text.parquet").write_text("not Parquet")
    with pytest.raises(GdpaError, match=r"text.parquet: expected a Parquet file, which this is not"):
        Parquet(tmp_path / "text.parquet", 8, seed=0)
    other = SyntheticClicks(20, seed=3, dense=5)
    parquet.write(folder / "c.parquet", [other.batch(0)], other.schema)
    with pytest.raises(GdpaError, match=r"c.parquet: expected the schema"):
        Parquet(folder, 8, seed=0)


def test_an_id_beyond_the_vocabulary_stops_the_training_with_its_row_and_column(folder, tmp_path):
    """A file whose vocabulary is larger than that of the first one of its folder."""
    larger = SyntheticClicks(20, seed=3, items=4096, median_length=3, max_length=6)
    parquet.write(folder / "c.parquet", [larger.batch(0)], larger.schema, row_group=4)
    made = Parquet(folder, 8, seed=0)
    with pytest.raises(
        GdpaError, match=r"c.parquet: row \d+, column '(sparse_ad|history_item)': expected an id from 0 to 511, got"
    ):
        list(islice(made.batches(0), 12))


@pytest.mark.parametrize("rows", [range(60), range(12, 36), range(3, 10), range(10, 50), range(59, 60)], ids=str)
def test_some_rows_of_a_file_are_read_as_if_it_had_no_others(folder, rows):
    whole = concatenate(list(parquet.ParquetReader(folder / "a.parquet", 8)))
    reader = parquet.ParquetReader(folder / "a.parquet", 8, rows=rows)
    assert (reader.rows, len(reader), reader.group_rows) == (len(rows), -(-len(rows) // 8), (12,) * 5)
    expected = keys([whole.rows(rows.start, rows.stop)])
    assert keys(reader) == expected
    assert sorted(keys(reader.batches(shuffle=5))) == sorted(expected)
    assert keys(reader.batches(1)) == expected[8:]
    assert keys(reader.batches(1, shuffle=5)) == keys(reader.batches(shuffle=5))[8:]


@pytest.mark.parametrize("rows", [range(50, 61), range(-1, 5), range(0, 10, 2)], ids=str)
def test_rows_that_a_file_does_not_have_are_refused(folder, rows):
    with pytest.raises(GdpaError, match="rows: expected some of the 60 rows"):
        parquet.ParquetReader(folder / "a.parquet", 8, rows=rows)


def test_a_wrong_value_in_some_rows_is_reported_by_its_row_in_the_file(tmp_path, clicks):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "wrong.parquet"
    parquet.write(path, [clicks.batch(0)], clicks.schema, row_group=6)
    table = pq.read_table(path)
    labels = table.column("label").to_pylist()
    labels[14] = 2
    pq.write_table(table.set_column(0, table.schema.field("label"), pa.array(labels, pa.int8())), path, row_group_size=6)
    assert len(list(parquet.ParquetReader(path, 4, rows=range(12)))) == 3
    with pytest.raises(GdpaError, match="row 14, column 'label': expected 0 or 1, got 2"):
        list(parquet.ParquetReader(path, 4, rows=range(13, 20)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_ranks_shares_make_up_the_batch(clicks, ranks):
    batch = clicks.batch(0)
    shares = [share(batch, rank, ranks) for rank in range(ranks)]
    joined = concatenate(shares)
    assert all(getattr(joined, name).equal(getattr(batch, name)) for name in ("labels", "dense", "sparse"))
    assert joined.history.items.equal(batch.history.items) and joined.history.offsets.equal(batch.history.offsets)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert isinstance(shares[0], Batch)


def test_batches_made_ahead_come_in_order_and_an_error_comes_with_them():
    def items():
        yield from range(10)
        raise GdpaError("the end of the file is missing")

    with Prefetch(items(), lambda item: item * item) as made:
        found = [next(made) for _ in range(10)]
        with pytest.raises(GdpaError, match="the end of the file is missing"):
            next(made)
    assert found == [item * item for item in range(10)]
    with Prefetch(iter([1, 2])) as made:
        assert list(made) == [1, 2]


def test_nothing_is_made_after_the_last_batch_is_taken():
    made, closed = [], threading.Event()

    def items():
        try:
            for item in range(10**9):
                made.append(item)
                yield item
        finally:
            closed.set()

    with Prefetch(items()) as batches:
        assert next(batches) == 0
    assert closed.wait(5)
    count = len(made)
    time.sleep(0.05)
    assert len(made) == count <= source.AHEAD + 3


def test_a_batch_for_the_cpu_is_not_copied(clicks):
    batch = clicks.batch(0)
    assert source.pinned(batch, torch.device("cpu")) is batch


def test_files_of_as_many_other_rows_are_other_data(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    changed = SyntheticClicks(20, seed=4, median_length=3, max_length=6)
    for number, path in enumerate(sorted(folder.glob("*.parquet"))):
        rows = parquet.row_count(path)
        parquet.write(other / path.name, islice(changed.batches(100 * number), rows // 20), changed.schema, row_group=12)
    before, after = (Parquet(path, 8, seed=0).facts for path in (folder, other))
    assert before["row_groups"] == after["row_groups"]
    assert before != after
    assert before == Parquet(folder, 8, seed=0).facts


def test_empty_files_of_a_folder_are_left_out(folder, clicks):
    full = Parquet(folder, 8, seed=0)
    path = folder / "part-empty.parquet"
    parquet.write(path, islice(clicks.batches(0), 1), clicks.schema)
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    assert parquet.row_count(path) == 0
    assert Parquet(folder, 8, seed=0).facts == full.facts

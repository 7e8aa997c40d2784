"""MovieLens ratings to examples, against a plain computation on made-up ratings."""

import math
import random
import re
import tracemalloc

import pytest
import torch

import gdpa
from gdpa.data import convert
from gdpa.data.convert import EVENT_TYPES, main, movielens
from gdpa.data.parquet import ParquetReader
from gdpa.data.schema import concatenate

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

HEADER = "userId,movieId,rating,timestamp"


def made_up(seed=0, users=12):
    """Some hundred ratings: users of 1 to 60 ratings in ascending order, their times in any order and some equal."""
    draw = random.Random(seed)
    rows = []
    for user in sorted(draw.sample(range(1, 500), users)):
        for movie in draw.sample(range(1, 900), draw.choice([1, 5, 6, 20, 60])):
            rows.append((user, movie, draw.randint(1, 10) / 2, 1_000_000_000 + draw.randint(0, 40)))
    return rows


def text_of(rows):
    return "\n".join([HEADER, *(",".join(map(str, row)) for row in rows)]) + "\n"


def plain_examples(rows, min_history, max_history):
    """The examples by loops over lists."""
    for user in sorted({row[0] for row in rows}):
        own = sorted((row for row in rows if row[0] == user), key=lambda row: row[3])
        for index in range(min_history, len(own)):
            earlier = own[:index]
            _, movie, rating, time = own[index]
            kept = earlier[-max_history:]
            yield {
                "label": float(rating >= 4),
                "time": time,
                "dense": [math.log(1 + index), sum(row[2] for row in earlier) / index if index else 0.0],
                "sparse": [user, movie],
                "items": [row[1] for row in kept],
                "types": [0 if row[2] < 2.5 else 1 if row[2] < 4 else 2 for row in kept],
                "times": [row[3] for row in kept],
                "values": [row[2] for row in kept],
            }


@pytest.mark.parametrize(("min_history", "max_history"), [(5, 200), (0, 7), (1, 1)])
def test_every_rating_becomes_the_example_that_loops_make(tmp_path, monkeypatch, min_history, max_history):
    monkeypatch.setattr(convert, "_EVENTS_AT_ONCE", 100)  # so that users are cut into several parts
    rows = made_up()
    assert len(rows) > 200
    (tmp_path / "ratings.csv").write_text(text_of(rows))
    out = tmp_path / "out.parquet"
    count = movielens(tmp_path / "ratings.csv", out, min_history=min_history, max_history=max_history, row_group=64)
    expected = list(plain_examples(rows, min_history, max_history))
    reader = ParquetReader(out, 32)
    assert count == reader.rows == len(expected)
    assert reader.schema.candidate == "movie" and reader.schema.event_types == EVENT_TYPES
    assert dict(reader.schema.sparse) == {"user": max(r[0] for r in rows) + 1, "movie": max(r[1] for r in rows) + 1}
    batch = concatenate(list(reader)).check(reader.schema)
    bounds = batch.history.offsets.tolist()
    for index, example in enumerate(expected):
        events = slice(bounds[index], bounds[index + 1])
        assert batch.labels[index] == example["label"]
        assert batch.request_timestamps[index] == example["time"]
        torch.testing.assert_close(batch.dense[index], torch.tensor(example["dense"]))
        assert batch.sparse[index].tolist() == example["sparse"]
        assert batch.history.items[events].tolist() == example["items"]
        assert batch.history.types[events].tolist() == example["types"]
        assert batch.history.timestamps[events].tolist() == example["times"]
        assert batch.history.values[events].tolist() == example["values"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1,20,4.0", "line 3: expected integers userId, movieId and timestamp and a number rating, got '1,20,4.0'"),
        ("1,20,four,1000", "line 3: expected integers"),
        ("1,2.5,4.0,1000", "line 3: expected integers"),
        ("1,2_5,4.0,1000", "line 3: expected integers"),
        ("", "line 3: expected integers"),
        ("1,-20,4.0,1000", "line 3: expected a movieId from 0 to 2147483647, got -20"),
        ("1,20,0_4,1000", "line 3: expected integers"),
        ("1,20,4.0,-1", "line 3: expected a timestamp from 0"),
        (f"1,20,4.0,{2**61 + 1}", "line 3: expected a timestamp from 0"),
        ("1,20,7,1000", "line 3: expected a rating from 0 to 5, got 7"),
        ("1,20,nan,1000", "line 3: expected a rating from 0 to 5, got nan"),
        ("0,20,4.0,1000", "line 3: expected users in ascending order, got userId 0 after 1"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_written(tmp_path, line, problem):
    ratings = tmp_path / "ratings.csv"
    ratings.write_text(f"{HEADER}\n1,10,3.5,1000\n{line}\n1,30,4.0,1001\n")
    with pytest.raises(gdpa.GdpaError, match=rf"ratings\.csv: {re.escape(problem)}"):
        movielens(ratings, tmp_path / "out.parquet", min_history=1)
    assert list(tmp_path.iterdir()) == [ratings]


def test_other_files_are_refused(tmp_path):
    ratings, out = tmp_path / "ratings.csv", tmp_path / "out.parquet"
    with pytest.raises(gdpa.GdpaError, match="there is none"):
        movielens(ratings, out)
    for text, problem in (
        ("", "line 1: expected the header"),
        ("user,item\n1,2\n", "line 1: expected the header"),
        (f"{HEADER}\n", "expected a user with more than 5 ratings"),
        (f"{HEADER}\n1,10,3.5,1000\n", "expected a user with more than 5 ratings"),
    ):
        ratings.write_text(text)
        with pytest.raises(gdpa.GdpaError, match=problem):
            movielens(ratings, out)
    ratings.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(gdpa.GdpaError, match="could not be read as CSV"):
        movielens(ratings, out)
    with pytest.raises(gdpa.GdpaError, match="^max_history:"):
        movielens(ratings, out, max_history=0)


def test_the_ratings_are_not_replaced_by_their_examples(tmp_path):
    ratings, link = tmp_path / "ratings.csv", tmp_path / "link"
    ratings.write_text(text_of(made_up()))
    link.symlink_to(ratings)
    for out in (ratings, link):
        with pytest.raises(gdpa.GdpaError, match="^out: expected another file than the ratings"):
            movielens(ratings, out)
    assert ratings.read_text() == text_of(made_up())


def test_a_user_is_read_when_the_examples_of_the_one_before_are_taken(tmp_path, monkeypatch):
    (tmp_path / "ratings.csv").write_text(text_of(made_up()))
    users, read, taken = convert._users, [], []

    def recorded(path):
        for user in users(path):
            read.append(user.user)
            yield user

    def take(out, batches, schema, *, row_group):
        read.clear()
        for batch in batches:
            taken.append(int(batch.sparse[0, 0]))
            assert read[-1] == taken[-1]
        return len(taken)

    monkeypatch.setattr(convert, "_users", recorded)
    monkeypatch.setattr(convert, "write", take)
    assert movielens(tmp_path / "ratings.csv", tmp_path / "out.parquet") > 3


def test_reading_more_users_takes_no_more_memory(tmp_path):
    """Python's own and numpy's: ten times the users, far from ten times the memory."""

    def peak(users):
        lines = (f"{user},{movie},4.0,{1000 + movie}\n" for user in range(users) for movie in range(30))
        (tmp_path / "ratings.csv").write_text(HEADER + "\n" + "".join(lines))
        tracemalloc.start()
        movielens(tmp_path / "ratings.csv", tmp_path / "out.parquet", row_group=100)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(10)  # imports and caches of the first call
    assert peak(400) < 2 * peak(40) + 100_000


def test_the_command_converts_and_says_what_is_wrong(tmp_path, capsys):
    ratings, out = tmp_path / "ratings.csv", tmp_path / "out.parquet"
    ratings.write_text(text_of(made_up()))
    assert main([str(ratings), str(out), "--min-history", "5", "--max-history", "20"]) == 0
    assert f"{ParquetReader(out, 8).rows} examples" in capsys.readouterr().out
    assert ParquetReader(out, 10_000).schema.dense == 2
    assert next(iter(ParquetReader(out, 10_000))).lengths.max() == 20
    assert main([str(tmp_path / "none.csv"), str(out)]) == 2
    assert "none.csv" in capsys.readouterr().err

"""Synthetic click traffic: the same batches whenever they are asked for, and a signal that needs the history to be found."""

from pathlib import Path

import pytest
import torch
from test_data_schema import assert_same

import gdpa
from gdpa.data.schema import concatenate
from gdpa.data.synthetic import COUNTRIES, EVENT_TYPES, PLACEMENTS, SyntheticClicks, main

SAMPLE = Path(__file__).parent / "data" / "clicks.parquet"
SAMPLE_COMMAND = ["--batches", "3", "--batch-size", "64", "--seed", "7", "--median-length", "8", "--max-length", "32"]


def normalised_entropy(log_odds, labels):
    rate = labels.mean()
    base = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    return (torch.nn.functional.binary_cross_entropy_with_logits(log_odds, labels) / base).item()


def logistic_ne(train, train_labels, test, test_labels):
    """NE on the test examples of a logistic regression fitted to the others by Newton's method."""
    train, test = (torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1) for x in (train, test))
    weights = torch.zeros(train.shape[1], dtype=torch.float64)
    for _ in range(8):
        p = torch.sigmoid(train @ weights)
        hessian = train.T @ (train * (p * (1 - p))[:, None]) + 0.1 * torch.eye(len(weights))
        weights = weights + torch.linalg.solve(hessian, train.T @ (train_labels - p) - 0.1 * weights)
    return normalised_entropy(test @ weights, test_labels)


def flat_features(batch):
    one_hot = [torch.nn.functional.one_hot(batch.sparse[:, i], size) for i, size in ((1, COUNTRIES), (2, PLACEMENTS))]
    return torch.cat([batch.dense.double(), *one_hot], dim=1)


def candidate_features(clicks, batch):
    return torch.nn.functional.one_hot(clicks.category[batch.sparse[:, 0]], clicks.categories)


def test_a_model_needs_the_history():
    clicks = SyntheticClicks(batch_size=1024, seed=3)
    train, test = (concatenate([clicks.batch(i) for i in range(*span)]) for span in ((0, 8), (8, 16)))
    labels = train.labels.double(), test.labels.double()
    assert 0.1 < labels[0].mean() < 0.5

    def ne(*features):
        return logistic_ne(
            torch.cat([f(train) for f in features], 1), labels[0], torch.cat([f(test) for f in features], 1), labels[1]
        )

    without = ne(flat_features, lambda batch: candidate_features(clicks, batch))
    with_history = ne(flat_features, lambda batch: clicks.history_match(batch)[:, None])
    best = normalised_entropy(clicks.log_odds(test), labels[1])
    assert without < 0.995, "the dense and sparse features carry a weaker part"
    assert with_history < 0.97
    assert with_history < without - 0.02
    assert best < with_history + 0.005, "nothing beats the log odds that the labels were drawn from"


@pytest.mark.parametrize("ignored", ["recency", "event type"])
def test_recency_and_event_type_matter(ignored):
    """A match that weighs all events alike in one of the two says less."""
    clicks = SyntheticClicks(batch_size=2048, seed=4)
    batch = concatenate([clicks.batch(i) for i in range(4)])
    history = batch.history
    if ignored == "recency":
        history = type(history)(**{**vars(history), "timestamps": batch.request_timestamps.repeat_interleave(batch.lengths.long())})
    else:
        history = type(history)(**{**vars(history), "types": torch.ones_like(history.types)})
    blunt = type(batch)(**{**vars(batch), "history": history})
    labels = batch.labels.double()
    sharp_ne, blunt_ne = (logistic_ne(m, labels, m, labels) for m in (clicks.history_match(b)[:, None] for b in (batch, blunt)))
    assert sharp_ne < blunt_ne - 0.01


@pytest.mark.parametrize("lengths", ["lognormal", "power-law"])
def test_batches_are_of_the_schema_with_heavy_tails_empties_and_every_event_type(lengths):
    clicks = SyntheticClicks(batch_size=1024, lengths=lengths, median_length=16, max_length=200)
    batch = clicks.batch(0).check(clicks.schema)
    assert len(batch) == 1024
    assert 0 < (batch.lengths == 0).sum() < 120
    assert batch.lengths.max() == 200
    assert batch.lengths.float().mean() > 1.3 * batch.lengths.median()
    assert batch.history.types.unique().tolist() == list(range(len(EVENT_TYPES)))
    assert batch.sparse[:, 1:].amax(0).tolist() == [COUNTRIES - 1, PLACEMENTS - 1]


def test_uniform_histories_have_every_length_to_the_cap():
    clicks = SyntheticClicks(batch_size=1024, lengths="uniform", median_length=16, max_length=20)
    lengths = clicks.batch(0).check(clicks.schema).lengths
    assert lengths.unique().tolist() == list(range(1, 21)) and abs(float(lengths.float().mean()) - 10.5) < 0.6


def test_a_batch_depends_on_seed_and_index_alone():
    clicks = SyntheticClicks(batch_size=32, seed=5)
    in_order = [clicks.batch(i) for i in range(4)]
    torch.manual_seed(1)
    backwards = [SyntheticClicks(batch_size=32, seed=5).batch(i) for i in reversed(range(4))][::-1]
    for got, expected in zip(backwards, in_order, strict=True):
        assert_same(got, expected)
    resumed = clicks.batches(start=2)
    assert_same(next(resumed), in_order[2])
    assert_same(next(resumed), in_order[3])
    assert not torch.equal(in_order[0].dense, in_order[1].dense)
    assert not torch.equal(in_order[0].dense, SyntheticClicks(batch_size=32, seed=6).batch(0).dense)


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    SyntheticClicks(batch_size=16).batch(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_traffic_without_any_history_has_no_match():
    clicks = SyntheticClicks(batch_size=16, empty=1.0)
    batch = clicks.batch(0).check(clicks.schema)
    assert batch.lengths.sum() == 0
    assert clicks.history_match(batch).tolist() == [0.0] * 16


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch_size", 0),
        ("seed", -1),
        ("items", 100),
        ("categories", 1),
        ("dense", 2),
        ("lengths", "normal"),
        ("median_length", 0),
        ("max_length", 0),
        ("empty", 1.5),
    ],
)
def test_a_wrong_argument_is_named(argument, value):
    with pytest.raises(gdpa.GdpaError, match=f"^{argument}:"):
        SyntheticClicks(**{"batch_size": 8, argument: value})


def test_a_negative_index_is_refused():
    with pytest.raises(gdpa.GdpaError, match="^index:"):
        SyntheticClicks(batch_size=8).batch(-1)


def test_the_sample_is_what_its_command_makes(tmp_path, capsys):
    """The sample in tests/data may never change: a seed means the same examples everywhere."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from gdpa.data.parquet import ParquetReader

    assert main([str(tmp_path / "clicks.parquet"), *SAMPLE_COMMAND]) == 0
    assert "192 examples" in capsys.readouterr().out
    made, kept = (ParquetReader(path, batch_size=192) for path in (tmp_path / "clicks.parquet", SAMPLE))
    assert made.schema == kept.schema
    assert_same(next(iter(made)), next(iter(kept)))
    assert SAMPLE.stat().st_size < 64_000
    docs = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    assert f"python -m gdpa.data.synthetic tests/data/clicks.parquet {' '.join(SAMPLE_COMMAND)}" in docs


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    assert main([str(tmp_path / "clicks.parquet"), "--batches", "0"]) == 2
    assert "batches: expected at least 1, got 0" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere" / "clicks.parquet")]) == 2
    assert "nowhere" in capsys.readouterr().err

"""NE and AUC against their definitions, over all examples at once and over a window."""

import doctest
import math

import pytest
import torch

from gdpa.train import metrics


def brute_auc(logits, labels):
    above, below = logits[labels == 1], logits[labels == 0]
    pairs = (above[:, None] > below).double() + 0.5 * (above[:, None] == below).double()
    return float(pairs.mean())


def drawn(examples, seed=0, levels=None):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(examples, generator=generator)
    if levels is not None:
        logits = (logits * levels).round() / levels
    labels = (torch.rand(examples, generator=generator) < torch.sigmoid(logits)).float()
    return logits, labels


def test_a_model_that_always_says_the_base_rate_has_an_ne_of_one_and_an_auc_of_a_half():
    labels = torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0])
    scores = metrics.exact(torch.full((8,), math.log(0.25 / 0.75), dtype=torch.float64), labels)
    assert scores.ne == pytest.approx(1.0, abs=1e-12)
    assert (scores.auc, scores.examples) == (0.5, 8)


def test_ne_is_the_log_loss_over_the_entropy_of_the_base_rate():
    logits, labels = drawn(1000)
    p = torch.sigmoid(logits.double())
    loss = -torch.where(labels == 1, p.log(), (1 - p).log()).mean()
    rate = labels.double().mean()
    entropy = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    assert metrics.exact(logits, labels).ne == pytest.approx(float(loss / entropy), rel=1e-12)


@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "ties"])
def test_auc_is_the_share_of_pairs_in_order(levels):
    logits, labels = drawn(700, levels=levels)
    assert metrics.exact(logits, labels).auc == pytest.approx(brute_auc(logits, labels), abs=1e-12)


@pytest.mark.parametrize("labels", [[], [0.0, 0.0], [1.0]])
def test_scores_that_the_labels_do_not_define_are_nan(labels):
    logits, labels = torch.zeros(len(labels)), torch.tensor(labels)
    scores = metrics.exact(logits, labels)
    assert math.isnan(scores.ne) and math.isnan(scores.auc) and scores.examples == len(labels)
    window = metrics.Window(torch.device("cpu"))
    window.add(logits, labels)
    read = window.read()
    assert math.isnan(read.ne) and math.isnan(read.auc) and read.examples == len(labels)


def test_a_windows_scores_are_the_exact_ones_of_its_examples_and_reading_empties_it():
    """Logits on the histogram's levels: then its AUC is not rounded."""
    window = metrics.Window(torch.device("cpu"))
    for seed in (3, 4):
        logits, labels = drawn(500, seed=seed, levels=metrics.BINS / (2 * metrics.SPAN))
        for part in (slice(0, 123), slice(123, 500)):
            window.add(logits[part], labels[part])
        exact, read = metrics.exact(logits, labels), window.read()
        assert read.auc == pytest.approx(exact.auc, abs=1e-12)
        # The losses are float32: their relative rounding error is at most 2^-24 each, and so is their sum's in float64.
        assert read.ne == pytest.approx(exact.ne, rel=1e-6)
        assert read.examples == 500


def test_a_windows_auc_of_any_logits_is_off_by_at_most_half_the_pairs_within_one_level():
    logits, labels = drawn(2000)
    window = metrics.Window(torch.device("cpu"))
    window.add(logits, labels)
    above, below = logits[labels == 1], logits[labels == 0]
    close = ((above[:, None] - below).abs() < 2 * metrics.SPAN / metrics.BINS).double().mean()
    assert abs(window.read().auc - brute_auc(logits, labels)) <= 0.5 * float(close)


def test_a_window_takes_logits_that_are_not_finite():
    window = metrics.Window(torch.device("cpu"))
    window.add(torch.tensor([math.nan, math.inf, -math.inf, 100.0]), torch.tensor([1.0, 1, 0, 1]))
    scores = window.read()
    assert math.isnan(scores.ne) and scores.auc == 1.0


def test_examples_in_the_docstrings_run():
    failed, ran = doctest.testmod(metrics)
    assert ran and not failed

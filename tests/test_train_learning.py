"""A model learns: `tiny` finds the planted signal of the synthetic data within a minute on a CPU, and not without histories."""

import time

from gdpa import cli
from gdpa.train import log as logs

STEPS = 150  # fewer than the preset's


def scores(folder, *options):
    words = ["train", "--device", "cpu", "--steps", str(STEPS), "--evaluation-examples", "4096", "--out", str(folder), *options]
    assert cli.main(words) == 0
    return logs.lines(folder / "log.jsonl")[-1]


def test_tiny_learns_from_histories_within_a_minute(tmp_path):
    """The minute is of the processor, which a busy machine does not stretch."""
    start = time.process_time()
    with_history = scores(tmp_path / "with")
    assert time.process_time() - start < 60
    assert with_history["ne"] < 0.97
    assert with_history["auc"] > 0.6
    without = scores(tmp_path / "without", "--no-history")
    assert without["ne"] >= with_history["ne"] + 0.01

"""`gdpa bench --suite train` on a GPU: every provider runs, agrees with plain PyTorch, and has its memory counted."""

from __future__ import annotations

import json
from pathlib import Path

from gdpa import cli


def test_every_provider_of_the_training_step_runs_and_agrees(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "train", "--device", "cuda", "--preset", "small", "--batch", "64", "--seconds", "1"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert [facts["compiled"] for facts in data["header"]["models"].values()] == [True, True], data["rows"][0]["note"]
    rows = data["rows"]
    assert [row["provider"] for row in rows] == 2 * ["gdpa", "gdpa-triton", "eager", "compile", "varlen"]
    for row in rows:
        assert row["error"] is None, row
        assert 0 < row["attention_ms"] < row["step_ms"] and row["peak_bytes"] > 0
        if row["provider"] not in ("eager", "varlen"):
            assert row["gradient_difference"] < 0.03

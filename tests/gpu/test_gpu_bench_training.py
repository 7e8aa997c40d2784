"""`gdpa bench --suite train` on a GPU: every provider runs, agrees with plain PyTorch, and has its memory counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gdpa import cli


@pytest.mark.parametrize(
    ("model", "providers", "compiled"),
    [
        ("kunlun", ["gdpa", "gdpa-triton", "eager", "compile", "varlen"], False),
        # Compilation takes a minute for the operator inside the layers and another for what lies around other attentions.
        ("interformer", ["gdpa", "gdpa-triton"], True),
    ],
)
def test_every_provider_of_the_training_step_runs_and_agrees(
    tmp_path: Path, model: str, providers: list[str], compiled: bool
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "train", "--device", "cuda", "--preset", "small", "--batch", "64", "--seconds", "1"]
    choice = ["--model", model, "--providers", ",".join(providers), "--compile" if compiled else "--no-compile"]
    assert cli.main([*arguments, *choice, "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    rows = data["rows"]
    assert data["header"]["models"][model]["compiled"] is compiled, rows[0]["note"]
    assert [row["provider"] for row in rows] == providers
    for row in rows:
        assert row["error"] is None, row
        assert 0 < row["attention_ms"] < row["step_ms"] and row["peak_bytes"] > 0
    # Plain PyTorch is what the others are held against; a compiled provider, what it gives in a model that is not. Softmax is another
    # function.
    expected = set() if compiled else {"eager", "varlen"}
    assert {row["provider"] for row in rows if row["gradient_difference"] is None} == expected
    assert all(row["gradient_difference"] < 0.03 for row in rows if row["provider"] not in expected)

"""README and docs/: their Python runs, their links lead somewhere, and what they say of the commands is so."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import gdpa
from gdpa import cli
from gdpa.bench.report import KEYS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block):
    exec(compile(block, "block", "exec"), {"__name__": "block"})


def test_there_are_blocks_to_run():
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_readme_stays_short_and_names_every_activation():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160
    for name in gdpa.activations():
        assert re.search(rf"\b{name}\b", text), name


def test_the_options_in_the_docs_exist():
    parser = cli._parser()
    known = set()
    for action in parser._subparsers._group_actions[0].choices.values():
        known |= {option for entry in action._actions for option in entry.option_strings}
    for page in PAGES:
        for line in page.read_text().splitlines():
            if re.match(r"\s+(gdpa (bench|check|info|precompile)|\[--)", line):
                assert set(re.findall(r"--[a-z-]+", line)) <= known, line


def test_examples_in_docstrings_run():
    """The examples of the public docstrings."""
    for name in ("api", "jagged", "activations", "data.traffic"):
        module = importlib.import_module(f"gdpa.{name}")
        names = {"gdpa": gdpa, "torch": torch, **vars(module)}
        failed, ran = doctest.testmod(module, extraglobs=names)
        assert ran, module.__name__
        assert not failed, module.__name__


def test_readmes_measured_tables_are_those_of_the_results():
    from gdpa.bench.readme import page, written

    readme = (ROOT / "README.md").read_text()
    assert written(readme) == readme, "run: python -m gdpa.bench.readme"
    assert (ROOT / "docs" / "results.md").read_text() == page(), "run: python -m gdpa.bench.readme"


def test_every_results_file_is_whole_and_says_how_it_was_made():
    files = sorted((ROOT / "results").glob("*.json"))
    assert files
    for path in files:
        data = json.loads(path.read_text())
        assert data["header"]["command"].startswith(("gdpa ", "python -m gdpa")), path.name
        assert data["rows"], path.name


def test_tables_of_measured_figures_come_from_the_files_that_are_there(monkeypatch, tmp_path):
    """What is absent is not shown, and kernels that were timed under two names are shown once."""
    from gdpa.bench import readme

    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.tables() == []
    row = dict.fromkeys(KEYS) | {"case": "self-8", "mode": "forward", "activation": "silu", "provider": "gdpa-hopper"}
    row |= {"ms": 1.0, "tflops": 600.4, "fraction_of_floor": 0.876}
    cudnn = row | {"provider": "cudnn", "tflops": 500.0}
    cell = row | {"provider": "fa3", "ms": None, "tflops": None, "fraction_of_floor": None}
    header = {"device": "a GPU", "dtype": "bfloat16", "batch": 2, "heads": 3, "dim": 4, "command": "gdpa bench", "commit": "c"}
    data = {"header": header | {"versions": {"torch": "2"}}, "rows": [row, cudnn, cell, row | {"activation": "gelu"}]}
    (tmp_path / "h200-forward.json").write_text(json.dumps(data))
    (table,) = readme.tables()
    assert "| case | gdpa-hopper silu | gdpa-hopper gelu | cudnn (softmax) |" in table
    assert "| self-8 | 600 [0.88] | 600 [0.88] | 500 [0.88] |" in table
    assert "fa3" not in table
    theirs = row | {"mode": "backward", "note": "gradients by gdpa-triton; noisy: its even and odd rounds differ by 4%"}
    alone = data | {"rows": [theirs]}
    (tmp_path / "h200-backward.json").write_text(json.dumps(alone))
    assert "| case | gdpa-hopper silu |" in readme.tables()[1]
    twice = data | {"rows": [theirs, row | {"mode": "backward", "provider": "gdpa-triton", "tflops": 300.0}]}
    (tmp_path / "h200-backward.json").write_text(json.dumps(twice))
    backward = readme.tables()[1]
    assert "; gdpa-hopper's gradients are gdpa-triton's\n" in backward
    assert "| case | gdpa-triton silu |" in backward
    assert "| self-8 | 300 [0.88] |" in backward
    assert "; gdpa-hopper's gradients are gdpa-triton's\n\n| case | gdpa-triton silu |" in readme.page()
    ours = row | {"provider": "gdpa-cpu", "ms": 2.0, "peak_bytes": 10}
    eager = row | {"provider": "eager", "ms": 5.0, "peak_bytes": 1000}
    cpu = data | {"header": header | {"threads": 2, "versions": {}}, "rows": [ours, eager]}
    (tmp_path / "cpu.json").write_text(json.dumps(cpu))
    assert "| self-8 silu | 2 ms, 2.50x (10 B, 1 KB) |" in readme.tables()[2]
    train = {"header": {"command": "gdpa train"}, "rows": [{"model": "a", "seconds_per_step": 0.12345, "steps": 9}]}
    (tmp_path / "h200-train.json").write_text(json.dumps(train))
    assert "| a | 0.1235 | 9 |" in readme.tables()[2]

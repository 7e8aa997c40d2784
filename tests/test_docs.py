"""README and docs/: their Python runs, their links lead somewhere, and what they say of the commands is so."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import gdpa
from gdpa import cli

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
    assert len(text.splitlines()) <= 150
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
    from gdpa.bench.readme import written

    readme = (ROOT / "README.md").read_text()
    assert written(readme) == readme, "run: python -m gdpa.bench.readme"

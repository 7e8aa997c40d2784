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

# The modules with examples in their docstrings.
EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "gdpa").rglob("*.py"))
    if ">>> " in path.read_text()
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
            if re.match(r"\s+(gdpa (bench|train|check|info|precompile)|\[--)", line):
                assert set(re.findall(r"--[a-z-]+", line)) <= known, line


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_run(name):
    """With gdpa, torch and the module's own names imported; all else an example must import itself."""
    module = importlib.import_module(name)
    failed, ran = doctest.testmod(module, extraglobs={"gdpa": gdpa, "torch": torch})
    assert ran == (ROOT / module.__file__).read_text().count(">>> "), "an example that doctest does not find"
    assert not failed


def test_there_are_examples_to_run():
    assert {"gdpa.api", "gdpa.jagged", "gdpa.activations", "gdpa.data.traffic", "gdpa.nn.regions", "gdpa.models"} <= set(EXAMPLES)


def test_readmes_measured_tables_are_those_of_the_results():
    from gdpa.bench.readme import page, written

    readme = (ROOT / "README.md").read_text()
    assert written(readme) == readme, "run: python -m gdpa.bench.readme"
    assert (ROOT / "docs" / "results.md").read_text() == page(), "run: python -m gdpa.bench.readme"


def test_asking_for_help_writes_no_tables(monkeypatch, tmp_path, capsys):
    from gdpa.bench import readme

    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["readme", "--help"])
    with pytest.raises(SystemExit):
        readme.main()
    assert "results/" in capsys.readouterr().out


def test_figures_quoted_from_the_h200s_files_are_theirs():
    """Prose in docs/ that names these files: measured again, the sentences must be written again."""
    forward, backward, narrow, causal = (
        json.loads((ROOT / "results" / f"h200-{name}.json").read_text()) for name in ("forward", "backward", "forward-64", "causal")
    )
    design, numerics = (" ".join((ROOT / "docs" / name).read_text().split()) for name in ("design.md", "numerics.md"))

    def of(data, provider, key):
        return [row[key] for row in data["rows"] if row["provider"] == provider and row["ms"] is not None]

    def share(data, case, activation):
        cells = {(row["case"], row["provider"], row["activation"]): row["fraction_of_floor"] for row in data["rows"]}
        return f"{cells[case, 'gdpa-hopper', activation]:.2f}"

    four = ("gdpa-hopper", "gdpa-triton", "cudnn", "varlen")
    hosts = json.loads((ROOT / "results" / "experiments" / "h200.json").read_text())["runs"]["host of both backends"]["cases"]

    def calls(backend, key):
        times = [round(host[key]) for name, host in hosts.items() if name.startswith(f"{backend}, ")]
        assert len(times) == 4
        return f"{min(times)} to {max(times)}"

    plain, recorded, back = "forward", "forward with gradients", "backward"
    cudnn, varlen = ({key: round(us) for key, us in hosts[name].items()} for name in ("cuDNN SDPA", "varlen_attn"))
    before = hosts["triton by Triton's launcher"]
    for sentence in (
        f"take {calls('hopper', plain)} microseconds of Python and launch without gradients and {calls('hopper', recorded)} with them, "
        f"through the Triton backend {calls('triton', plain)} and {calls('triton', recorded)}; cuDNN through torch's SDPA takes "
        f"{cudnn[plain]} and {cudnn[recorded]}, `varlen_attn` {varlen[plain]} and {varlen[recorded]} (",
        f"A backward takes {calls('hopper', back)}, of which autograd has {round(hosts['a Function of nothing'][back])} for",
        f"cuDNN's {cudnn[back]}, `varlen_attn`'s {varlen[back]}.",
        f"a forward took {before[plain]} microseconds at the least so, a backward {before[back]}.",
        f"and they take {calls('triton', plain)} and {calls('triton', back)} (",
    ):
        assert sentence in design, sentence

    ours, best = {}, {}
    for row in backward["rows"]:
        cell = row["case"], row["activation"]
        if row["provider"] == "gdpa-hopper":
            ours[cell] = row["fraction_of_floor"]
        elif row["ms"] is not None:
            best[cell] = max(best.get(cell, 0.0), row["fraction_of_floor"])
    ahead = [ours[cell] / best[cell] for cell in ours]
    assert f"in every cell {min(ahead):.2f} to {max(ahead):.2f} times the best of the other providers there" in design

    speed = {
        (row["case"], row["provider"]): f"{row['tflops']:.0f}"
        for row in causal["rows"]
        if row["mode"] == "backward" and row["activation"] == "silu" and row["ms"] is not None
    }
    dense, jagged = ("causal-512", "causal-1024", "causal-2048"), ("causal-512-jag", "causal-2048-jag")
    mine, theirs, portable = ([speed[case, provider] for case in dense] for provider in ("gdpa-hopper", "cudnn", "gdpa-triton"))
    packed = [" and ".join(speed[case, provider] for case in jagged) for provider in ("gdpa-hopper", "gdpa-triton", "varlen")]
    for sentence in (
        f"it has {mine[0]}, {mine[1]} and {mine[2]} with 512, 1024 and 2048 keys, where cuDNN's causal softmax has "
        f"{theirs[0]}, {theirs[1]} and {theirs[2]} and the Triton backend {portable[0]}, {portable[1]} and {portable[2]};",
        f"(1152) {packed[0]}, the Triton backend {packed[1]}, `varlen_attn` {packed[2]}.",
    ):
        assert sentence in design, sentence

    assert f"the R of the tables, {forward['header']['R']['median']:.0f} TFLOP/s" in design
    jagged = [share(forward, case, "silu") for case in ("pffn-512x512-jag", "self-512-jag")]
    assert f"The tables have {jagged[0]} and {jagged[1]} with SiLU" in design
    assert f"2048 x 256 with SiLU, which is {share(forward, 'pffn-2048x256', 'silu')} there" in design
    gelu, silu, relu = (
        " and ".join(share(narrow, case, activation) for case in ("self-1024", "self-2048"))
        for activation in ("gelu_tanh", "silu", "relu")
    )
    assert f"gelu_tanh has {gelu} of the floor, SiLU {silu}, relu {relu} (" in design

    built = [entry for entry in forward["schedule"] if entry["ms"] is not None]
    fastest, slowest = (f"{1e3 * pick(entry['ms'] for entry in built):.0f}" for pick in (min, max))
    most = 100 * max(entry["fraction_of_forward"] for entry in built)
    assert f"with the gaps of its launch {fastest} to {slowest}, at most {most:.1f} % of any forward" in design

    low, high, triton_low, triton_high = (
        f"{pick(of(forward, provider, 'error')):.2e}".replace("e-0", "e-") for provider in four[:2] for pick in (min, max)
    )
    assert f"is {low} to {high} on the hopper backend, {triton_low} to {triton_high} on triton" in numerics


FRACTION = r"(?<![\d.])[01]\.\d{3}(?!\d)"
# What the tables of experiments are written in: activations, fractions or arrows between two, and sizes, such as `2048`, `lengths to 512`,
# `lengths to 1024 x 256`, `to 2048 with 2048 keys`, `causal 1024`.
WORDS = re.compile(
    rf"(?P<activation>SiLU|gelu_tanh|gelu|relu)|(?P<figures>{FRACTION}(?:\s*->\s*{FRACTION})?)|(?P<none>\bnone\b)|(?P<end>\.(?= |$))"
    r"|(?P<kind>causal|heavy-tailed|jagged|lengths)?\s*(?P<to>\bto )?(?<![\d.,=])\b(?P<rows>\d{3,5})"
    r"(?: x (?P<dense>\d+)| with (?P<with>\d+) keys|(?P<keys> keys))?(?![\d.])|with (?P<same>\d+) keys"
)


def case_of(word: re.Match[str]) -> str:
    """The pattern of a case's name in results/experiments/h200.json, of a size in the tables."""
    rows, dense = word["rows"] or word["same"], word["dense"] or word["with"] or word["same"]
    if dense:
        packed = {"jagged": "-jag", "lengths": "-jag"}.get(word["kind"], "-jag" if word["to"] else "")
        return rf"(?<!\d){rows}x{dense}" + ("(?:-jag)?" if word["same"] else packed) + r"(?![-\d])"
    if word["kind"] == "heavy-tailed":
        return rf"(?<!\d)(?:{rows}-)?tail(?![-\w])"
    if word["kind"] == "causal":
        return rf"causal-{rows}(?![-\d])"
    if word["to"] or word["kind"]:
        return rf"(?<![\dx]){rows}-jag(?!-)"
    return rf"(?<![\w-])(?:self-)?{rows}(?![\dx]|-(?!gelu|silu))" + (rf"|x{rows}(?!\d)" if word["keys"] else "")


def quotations(cell: str) -> list[tuple[str | None, str | None, tuple[str, ...]]]:
    """(activation, case, fractions) of what a cell quotes. A fraction with no size before it is of the size that the activation before
    had in its place, or of the last size."""
    found: list[tuple[str | None, str | None, tuple[str, ...]]] = []
    activation = size = last = None
    sizes, earlier = [], []
    for word in WORDS.finditer(cell):
        if word["end"]:
            activation = size = last = None
            sizes, earlier = [], []
        elif word["activation"]:
            if word["activation"] != activation:
                earlier, sizes, size = sizes or earlier, [], None
            activation = word["activation"]
        elif word["figures"] or word["none"]:
            size = last = size or (earlier[len(sizes)] if len(sizes) < len(earlier) else last)
            sizes.append(size)
            if word["figures"]:
                found.append((activation, size, tuple(re.findall(FRACTION, word["figures"]))))
            size = None
        else:
            size = case_of(word)
    return found


def fractions_of(data, path=()):
    """(path, value) of every fraction of the floor in a file of experiments."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from fractions_of(value, (*path, name))
        elif "fraction" in name and isinstance(value, int | float):
            yield path, f"{value:.3f}"


def is_measured(activation, size, fractions, measured):
    """Whether one case of one run has all of them, of this activation and size."""
    cases: dict[tuple[str, ...], set[str]] = {}
    for path, value in measured:
        depth = next((i for i, name in enumerate(path) if i and re.search(size or "", name)), None)
        # Where the runs' names of variants say gelu and mean gelu_tanh, their header says so.
        plain = activation == "gelu_tanh" and path[0] in ("forward gelu", "forward packed and three")
        name = r"gelu\w*" if plain else rf"{(activation or '').lower()}(?:_[a-z])?"
        if depth is not None and (activation is None or re.search(rf"(?<![a-z_]){name}(?![a-z_])", " / ".join(path[1:]))):
            cases.setdefault(path[: depth + 1], set()).add(value)
    return any(set(fractions) <= found for found in cases.values())


def test_fractions_that_design_quotes_of_the_hopper_kernels_were_measured():
    """Those of three decimals are experiments'; the tables' own have two, and tests above. In the tables of experiments both ends of an
    arrow are of one case of one run, of the size and activation they are said to be of; in prose a fraction is one of those measured."""
    runs = json.loads((ROOT / "results" / "experiments" / "h200.json").read_text())["runs"]
    measured = list(fractions_of(runs))
    values = {value for _, value in measured}
    design = (ROOT / "docs" / "design.md").read_text()
    backend = design.split("### Hopper backend")[1].split("### Triton backend")[0]
    experiments = design.split("## Experiments with the Hopper kernels")[1]
    prose = backend + "\n".join(line for line in experiments.splitlines() if not line.startswith("|"))
    assert not set(re.findall(FRACTION, prose)) - values
    quoted, wrong = 0, []
    for row in (line for line in experiments.splitlines() if line.startswith("|")):
        named = [name for name in re.findall(r'"([^"]+)"', row) if name in runs]
        for cell in row.strip("| ").split(" | "):
            both = [name for name in ("SiLU", "gelu_tanh", "gelu") if re.search(rf"\b{name}\b", cell)]
            for activation, size, fractions in quotations(cell):
                quoted += len(fractions)
                there = [(path, value) for path, value in measured if not named or path[0] in named]
                # `SiLU: a -> b, gelu_tanh c -> d; 2048: e -> f, g -> h` leaves out whose e, f, g and h are.
                ways = [activation, *both] if activation else [None]
                if not any(is_measured(way, size, fractions, there) for way in ways):
                    wrong.append((activation, size, fractions, cell[:60]))
    tables = "\n".join(line for line in experiments.splitlines() if line.startswith("|"))
    assert quoted == len(re.findall(FRACTION, tables)) > 600
    assert not wrong, "not in results/experiments/h200.json: " + "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("cell", "right"),
    [
        ("SiLU 2048: 0.814 -> 0.785, lengths to 2048: 0.763 -> 0.702; gelu_tanh 0.769 -> 0.748, 0.725 -> 0.673", True),
        ("SiLU 1024: 0.814 -> 0.785", False),
        ("gelu_tanh 2048: 0.814 -> 0.785", False),
        ("SiLU 2048: 0.814 -> 0.702", False),
        ("SiLU 2048: 0.763 -> 0.702", False),
        ("SiLU 2048: 0.814 -> 0.785; gelu_tanh 0.725 -> 0.673", False),
    ],
)
def test_a_fraction_of_another_row_or_column_is_noticed(cell, right):
    """Each of these stands somewhere in the file."""
    measured = list(fractions_of(json.loads((ROOT / "results" / "experiments" / "h200.json").read_text())["runs"]))
    assert set(re.findall(FRACTION, cell)) <= {value for _, value in measured}
    there = [(path, value) for path, value in measured if path[0] == "backward dP issued early"]
    assert all(is_measured(*quotation, there) for quotation in quotations(cell)) == right


def test_every_results_file_is_whole_and_says_how_it_was_made():
    files = sorted((ROOT / "results").glob("*.json"))
    assert files
    for path in files:
        data = json.loads(path.read_text())
        assert data["header"]["command"].startswith(("gdpa ", "python -m gdpa")), path.name
        assert data["rows"], path.name


def test_tables_of_measured_figures_come_from_the_files_that_are_there(monkeypatch, tmp_path):
    """What is absent is not shown, and of softmax, which has no activation, the best."""
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
    assert "| case | forward: gdpa-hopper silu, gelu | forward: best softmax |" in table
    assert "| self-8 | 600, 600 [0.88, 0.88] | 500 [0.88] cudnn |" in table
    page = readme.page()
    assert "| case | gdpa-hopper silu | gdpa-hopper gelu | cudnn (softmax) |" in page
    assert "| self-8 | 600 [0.88] | 600 [0.88] | 500 [0.88] |" in page
    assert "fa3" not in table + page
    beside_gelu = cudnn | {"activation": "gelu", "tflops": 610.0, "fraction_of_floor": 0.9}
    (tmp_path / "h200-forward.json").write_text(json.dumps(data | {"rows": [*data["rows"], beside_gelu]}))
    assert "| self-8 | 600, 600 [0.88, 0.88] | 610 [0.90] cudnn |" in readme.tables()[0]
    assert "| self-8 | 600 [0.88] | 600 [0.88] | 610 [0.90] |" in readme.page()
    (tmp_path / "h200-forward.json").write_text(json.dumps(data))
    both = [row | {"mode": "backward"}, row | {"mode": "backward", "provider": "gdpa-triton", "ms": 1.25, "tflops": 300.0}]
    (tmp_path / "h200-backward.json").write_text(json.dumps(data | {"rows": both}))
    (table,) = readme.tables()
    heads = ("forward: gdpa-hopper silu, gelu", "forward: best softmax", "backward: gdpa-hopper silu", "backward: gdpa-triton silu")
    assert "| case | " + " | ".join(heads) + " |" in table
    assert "| self-8 | 600, 600 [0.88, 0.88] | 500 [0.88] cudnn | 600 [0.88] | 300 [0.88] |" in table
    assert "| self-8 | 600 [0.88] | 300 [0.88] |" in readme.page()
    (tmp_path / "h200-forward-64.json").write_text(json.dumps(data | {"header": data["header"] | {"dim": 64}}))
    assert "D=64, forward" in readme.page()
    assert "D=64, forward" not in "".join(readme.tables())
    ours = row | {"provider": "gdpa-cpu", "ms": 2.0, "peak_bytes": 10}
    eager = row | {"provider": "eager", "ms": 5.0, "peak_bytes": 1000}
    cpu = data | {"header": header | {"threads": 2, "versions": {}}, "rows": [ours, eager]}
    (tmp_path / "cpu.json").write_text(json.dumps(cpu))
    assert "| self-8 silu | 2 ms, 2.50x (10 B, 1 KB) |" in readme.tables()[1]
    step = {"model": "a", "preset": "b", "provider": "gdpa", "samples_per_s": 1234.5, "step_ms": 10.4, "attention_ms": 2.34}
    train = {"header": {"command": "gdpa train", "gpu": "a GPU"}, "rows": [step | {"peak_bytes": 2e9}]}
    train["rows"].append(dict.fromkeys(train["rows"][0]) | {"model": "a", "preset": "b", "provider": "eager"})
    (tmp_path / "h200-train.json").write_text(json.dumps(train))
    assert "| model | gdpa | eager |" in readme.tables()[1]
    assert "| a b | 1,234 (10, 2.3; 2 GB) | - |" in readme.tables()[1]
    large = train | {"rows": [train["rows"][0] | {"samples_per_s": 5678.0}]}
    (tmp_path / "h200-train-768.json").write_text(json.dumps(large))
    assert "5,678" in readme.page()
    assert "5,678" not in "".join(readme.tables())

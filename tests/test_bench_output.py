"""What a run leaves behind: the JSON and its schema, resuming, comparing, tables, the picture and the page."""

import io
import json
import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from gdpa.bench import command, compare, machine, page, plot, report, run, tables, timing, warm
from gdpa.bench.cases import FULL, GPU_SIZE, Case, Size
from gdpa.bench.providers import NAMES, Gdpa
from gdpa.bench.report import Report, Row
from gdpa.bench.timing import Rates
from gdpa.errors import GdpaError

CPU = torch.device("cpu")
KEYS = [
    "case", "mode", "activation", "provider", "ms", "spread", "tflops", "floor_ms", "fraction_of_floor", "R", "R_rested",
    "host_us", "peak_bytes", "error", "note",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_yardsticks(monkeypatch):
    """R and W of a small matmul and a small copy: what they are does not matter here."""
    monkeypatch.setitem(timing.HARDWARE_SIZES, "cpu", (64, 2**16))


def head(**changes):
    facts = dict.fromkeys(report.SAME) | {"command": "gdpa bench", "device": "made-up device", "cases": {}}
    return facts | changes


def row(provider="gdpa-cpu", ms=2.0, fraction=0.5, case="self-20-jag", mode="forward", activation="gelu", **rest):
    figures = {} if ms is None else {"ms": ms, "tflops": 1 / ms, "fraction_of_floor": fraction, "floor_ms": 1.0, "spread": 0.01}
    return Row(case, mode, activation, provider, **figures, **rest)


def text_of(show, width=80):
    console = Console(width=width, file=io.StringIO())
    show(console)
    return console.file.getvalue()


# JSON


def test_every_row_has_exactly_the_keys_of_the_schema(tmp_path):
    path = tmp_path / "rows.json"
    case = Case.named("self-20-jag", Size(3, 2, 8))
    results = Report(machine.header(CPU, "gdpa bench --batch 3"))
    plan = run.Plan((case,), ("gelu",), ("forward",), (Gdpa("nothing"), Gdpa("cpu")), torch.float32, CPU, timing.Effort(0.01, 2, 2))
    run.run(plan, results, save=lambda: results.write(path))
    loaded = json.loads(path.read_text())
    assert list(loaded) == ["header", "rows"]
    assert [list(found) for found in loaded["rows"]] == [KEYS, KEYS]
    assert list(report.KEYS) == KEYS
    cell, measured = loaded["rows"]
    assert [name for name in KEYS if cell[name] is not None] == ["case", "mode", "activation", "provider", "note"]
    assert all(measured[name] is not None for name in ("ms", "spread", "tflops", "floor_ms", "fraction_of_floor", "error"))
    assert set(loaded["header"]) >= {"machine", "cpu", "gpu", "clocks", "driver", "versions", "commit", "command", "R", "W"}
    assert list(tmp_path.iterdir()) == [path]


def test_lists_beside_the_rows_are_there_where_they_were_asked_for(tmp_path):
    results = Report(head(), [row()], cold=[{"case": "a"}])
    assert list(results.as_json()) == ["header", "rows", "cold"]


def test_the_header_has_the_range_of_the_rates():
    results = Report(head(), rates=[Rates(2e12, 1e12, 5e12), Rates(4e12, 3e12, 7e12), Rates(3e12, 2e12, 6e12)])
    header = results.as_json()["header"]
    assert header["R"] == {"median": 3.0, "lowest": 2.0, "highest": 4.0, "unit": "TFLOP/s"}
    assert header["R_rested"] == {"median": 6.0, "lowest": 5.0, "highest": 7.0, "unit": "TFLOP/s"}
    assert header["W"] == {"median": 2.0, "lowest": 1.0, "highest": 3.0, "unit": "TB/s"}


def test_there_is_one_row_for_each_key():
    results = Report(head())
    results.add(row(ms=1.0))
    results.add(row(ms=3.0))
    assert [found.ms for found in results.rows] == [3.0]


def test_lists_beside_the_rows_have_one_row_for_each_key_too():
    results = Report(head())
    for ms, provider in ((1.0, "gdpa-cpu"), (2.0, "eager"), (3.0, "gdpa-cpu")):
        results.put("cold", {"case": "a", "activation": "gelu", "provider": provider, "ms": ms, "note": None})
    assert [(found["provider"], found["ms"]) for found in results.cold] == [("eager", 2.0), ("gdpa-cpu", 3.0)]


def test_the_commit_outside_a_checkout_is_what_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.gdpa, "__file__", str(tmp_path / "gdpa" / "__init__.py"))
    monkeypatch.setenv("GDPA_COMMIT", "abc")
    assert machine.commit() == "abc"
    monkeypatch.delenv("GDPA_COMMIT")
    assert machine.commit() is None


def test_a_cpu_has_no_clocks_and_no_driver():
    with machine.Clocks(CPU) as clocks:
        pass
    assert clocks.summary() is None
    assert machine.driver(CPU) is None


def test_clocks_are_medians_of_the_samples_under_load():
    text = "210, 3201, 1980, 90.1, 700.00, 30\n1400, 3201, 1980, 690, 700.00, 60\n1500, 3201, 1980, 695, 700.00, 62\n1410, 3201, 1980, [N/A"
    assert machine.summarise(text) == {
        "sm_mhz": 1450.0, "memory_mhz": 3201.0, "sm_max_mhz": 1980.0, "power_w": 692.5, "power_limit_w": 700.0, "temperature_c": 61.0,
        "sm_lowest_mhz": 1400.0, "samples": 2.0,
    }  # fmt: skip


def test_clocks_without_a_power_reading_are_those_of_every_sample():
    found = machine.summarise("1980, 3201, 1980, [N/A], [N/A], 45\n1960, 3201, 1980, [N/A], [N/A], 47")
    assert found is not None
    assert found["sm_mhz"] == 1970.0
    assert found["power_w"] is None
    assert machine.summarise("Unable to determine the device\n") is None


def test_clocks_are_read_while_the_block_runs_and_not_after(tmp_path, monkeypatch):
    """nvidia-smi stood in for by a script that says a line, and another later."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 1400, 3201, 1980, 690, 700, 60\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1-2"))
    with machine.Clocks(torch.device("cuda", 0)) as clocks:
        deadline = time.monotonic() + 10
        while clocks.summary() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    assert clocks.summary()["sm_mhz"] == 1400.0
    assert clocks._process.poll() is not None, "it still runs"


# Resuming


def test_resuming_keeps_the_rows_with_a_figure_and_tries_the_others_again(tmp_path):
    path = tmp_path / "rows.json"
    Report(head(), [row(), row("fa3", ms=None, note="not installed")], cold=[{"case": "a"}]).write(path)
    results = report.resume(path, head(command="gdpa bench --resume"))
    assert [found.provider for found in results.rows] == ["gdpa-cpu"]
    assert results.cold == [{"case": "a"}]
    assert results.header["command"] == "gdpa bench; then gdpa bench --resume"


def test_resuming_keeps_the_range_of_the_rates(tmp_path):
    path = tmp_path / "rows.json"
    Report(head(), [row()], rates=[Rates(2e12, 1e12, 5e12), Rates(4e12, 3e12, 7e12), Rates(3e12, 2e12, 6e12)]).write(path)
    results = report.resume(path, head())
    results.rates.append(Rates(5e12, 1.5e12, 8e12))
    header = results.as_json()["header"]
    assert (header["R"]["lowest"], header["R"]["highest"]) == (2.0, 5.0)
    assert (header["R_rested"]["lowest"], header["R_rested"]["highest"]) == (5.0, 8.0)
    assert (header["W"]["lowest"], header["W"]["highest"]) == (1.0, 3.0)


def older(results):
    """A run's data as they were before there were two R."""
    data = results.as_json()
    data["header"].pop("R_rested", None)
    rows = [{key: value for key, value in found.items() if key not in ("R", "R_rested")} for found in data["rows"]]
    return data | {"rows": rows}


def test_a_file_from_before_there_were_two_r_is_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(older(Report(head(), [row()], rates=[Rates(2e12, 1e12)]))))
    assert "R_rested" not in path.read_text()
    (found,) = report.load(path, "--show")["rows"]
    assert Row.of(found) == row()
    results = report.resume(path, head())
    assert results.rows == [row()]
    assert results.rates == [Rates(2e12, 1e12)] * 3
    assert text_of(lambda console: tables.show(command._loaded(path), console)).count("R_rested") == 0
    assert "R</td><td>2 TFLOP/s" in page.page(command._loaded(path))


def test_resuming_without_a_file_is_a_new_run(tmp_path):
    assert report.resume(tmp_path / "none.json", head()).rows == []


@pytest.mark.parametrize("name", report.SAME)
def test_resuming_refuses_a_file_of_another_run_and_names_the_difference(tmp_path, name):
    path = tmp_path / "rows.json"
    Report(head(**{name: "other"}), [row()]).write(path)
    with pytest.raises(GdpaError, match=f"--resume: expected .* to hold {name}"):
        report.resume(path, head())


@pytest.mark.parametrize(
    "change",
    [
        {"ms": "abc"},
        {"mode": "sideways"},
        {"case": ["x"]},
        {"fraction_of_floor": "q"},
        {"note": 3},
        {"ms": True},
    ],
    ids=repr,
)
def test_a_file_with_a_wrong_value_is_refused_by_its_name(tmp_path, change):
    path = tmp_path / "rows.json"
    Report(head(), [row()]).write(path)
    data = json.loads(path.read_text())
    data["rows"][0] |= change
    path.write_text(json.dumps(data))
    ((key, value),) = change.items()
    with pytest.raises(GdpaError, match=rf"--show: expected .* for {key} in every row, got {re.escape(repr(value))} in"):
        report.load(path, "--show")
    for name, value in [
        ("cases", [1]),
        ("cases", {"self-8": 3}),
        ("cases", {"self-8": {"batch": 1, "heads": 1, "dim": 8, "rows": 8, "bytes": {}}}),
        ("R", "fast"),
        ("W", {"median": 1.0, "unit": "TB/s"}),
        ("clocks", "x"),
        ("clocks", {"sm_mhz": "x"}),
    ]:
        path.write_text(json.dumps({"header": {name: value}, "rows": []}))
        with pytest.raises(GdpaError, match=rf"--show: expected .* for {name}, got {re.escape(repr(value))} in"):
            report.load(path, "--show")
    path.write_text("[" * 100000)
    with pytest.raises(GdpaError, match="--show: expected JSON"):
        report.load(path, "--show")


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"header": {}, "rows": [{"case": "a"}]}'])
def test_a_file_that_is_no_run_is_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(GdpaError, match="--show: expected"):
        report.load(path, "--show")


def test_rows_that_are_there_are_not_measured_again():
    case = Case.named("self-20-jag", Size(3, 2, 8))
    have = row(ms=7.0)
    results = Report(head(), [have])
    plan = run.Plan((case,), ("gelu",), ("forward", "backward"), (Gdpa("cpu"),), torch.float32, CPU, timing.Effort(0.01, 2, 2))
    run.run(replace(plan, done=frozenset({have.key})), results)
    assert [(found.mode, found.ms == 7.0) for found in results.rows] == [("forward", True), ("backward", False)]


# Comparing


def compared(tmp_path, before, after, threshold=0.05):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, rows in zip(paths, (before, after), strict=True):
        Report(head(), rows).write(path)
    console = Console(width=130, file=io.StringIO())
    return compare.compare(*paths, threshold, console), console.file.getvalue()


@pytest.mark.parametrize(
    ("after", "status", "word"),
    [
        (row(ms=2.2, fraction=0.5), 0, "same"),  # the machine was slower, not the kernel
        (row(ms=2.0, fraction=0.4), 1, "slower"),
        (row(ms=2.0, fraction=0.6), 0, "faster"),
        (row(ms=2.05, fraction=None), 0, "same"),
        (row(ms=3.0, fraction=None), 1, "slower"),
        (row(ms=1.0, fraction=None), 0, "faster"),
        (row(ms=None, note="out of memory"), 1, "no figure any more"),
    ],
)
def test_a_comparison_goes_by_the_floor_and_else_by_time(tmp_path, after, status, word):
    code, text = compared(tmp_path, [row()], [after])
    assert code == status
    assert word in text


def test_rows_whose_r_was_measured_in_another_way_are_compared_by_time(tmp_path):
    """By the fraction of the floor the new one would be faster by a fifth."""
    between = row(ms=2.0, fraction=0.6, R=700.0, R_rested=840.0)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(older(Report(head(), [row(ms=2.0, fraction=0.5)]))))
    Report(head(), [between]).write(after)
    console = Console(width=130, file=io.StringIO())
    assert compare.compare(before, after, 0.05, console) == 0
    text = console.file.getvalue()
    assert "same" in text
    assert "0.50 -> 0.60" not in text
    assert "by time: 1 of the rows" in text
    code, text = compared(tmp_path, [between], [row(ms=2.0, fraction=0.5, R=580.0, R_rested=840.0)])
    assert (code, "0.60 -> 0.50" in text, "by time" in text) == (1, True, False)


def test_a_threshold_decides_and_rows_of_one_file_are_listed(tmp_path):
    before = [row(), row("eager", case="self-8")]
    after = [row(fraction=0.4), row("fa3", case="self-9")]
    assert compared(tmp_path, before, after, threshold=0.3)[0] == 0
    code, text = compared(tmp_path, before, after)
    assert code == 1
    assert "before.json: self-8 forward gelu eager" in text
    assert "after.json: self-9 forward gelu fa3" in text


def test_a_comparison_of_other_sizes_says_so(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, dim in zip(paths, (64, 128), strict=True):
        Report(head(dim=dim, batch=3), [row()]).write(path)
    text = text_of(lambda console: compare.compare(*paths, 0.05, console), width=500)
    assert f"not the same dim: 64 in {paths[0]}, 128 in {paths[1]}" in text
    assert text.count("not the same") == 1


def test_files_with_nothing_in_common_are_refused(tmp_path):
    with pytest.raises(GdpaError, match="--compare"):
        compared(tmp_path, [row()], [row("eager")])
    with pytest.raises(GdpaError, match="--threshold"):
        compared(tmp_path, [row()], [row()], threshold=5)


# Tables


def test_the_table_shows_ratios_sizes_and_notes_within_80_columns():
    rows = [
        row("eager", ms=20.0, peak_bytes=3_000_000, error=3e-7),
        row("gdpa-cpu", ms=5.0, peak_bytes=40_000, error=3e-7),
        row("cudnn", ms=5.0, host_us=20.0, note="softmax, not the activation"),
        row("gdpa-triton", ms=None, note="there is no GPU"),
    ]
    facts = run.summary(Case.named("self-20-jag", Size(3, 2, 8)), 4)
    text = text_of(lambda console: tables.show(Report(head(cases={"self-20-jag": facts}), rows), console))
    assert "4.00x" in text
    assert "40 KB" in text
    assert "cudnn (softmax)" in text
    assert "gdpa-triton: there is no GPU" in text
    assert "batch 3, 2 heads, dimension 8" in text
    assert "…" not in text


@pytest.mark.parametrize("rested", [None, 8e12], ids=["one R", "two"])
def test_table_and_page_say_which_matmul_the_floor_uses(rested):
    results = Report(head(), [row()], rates=[Rates(4e12, 1e12, rested)])
    texts = [
        text_of(lambda console: tables.show(results, console), width=300),
        re.sub("&#x27;", "'", page.page(results)),
        text_of(lambda console: command._show_rates(results, console)),
    ]
    assert all("timed in the same rounds" in text for text in texts[:2])
    said = ["R_rested that of the matmul by itself, which the floor does not use"] * 2 + [
        "R_rested, the matmul by itself: 8 TFLOP/s"
    ]
    assert [wanted in text for wanted, text in zip(said, texts, strict=True)] == [rested is not None] * 3
    assert ("R_rested</td><td>8 TFLOP/s (8 to 8" in texts[1]) == (rested is not None)


def test_columns_that_nobody_fills_are_left_out():
    text = text_of(lambda console: tables.show(Report(head(), [row()]), console))
    assert "memory" not in text
    assert "host" not in text


def test_no_figure_is_cut_off_in_a_narrow_terminal(tmp_path):
    path = tmp_path / "rows.json"
    Report(head(), [row(ms=123.4)]).write(path)
    text = text_of(lambda console: compare.compare(path, path, 0.05, console), width=40)
    assert "123 ms" in text
    assert "0.50 -> 0.50" in text
    assert "+0.0%" in text
    console = Console(width=40, file=io.StringIO())
    tables.print_whole(tables.list_cases([Case.named("self-20-jag", Size(3, 2, 8))], 4), console)
    assert "backward GFLOP" in console.file.getvalue()
    graph = [{"case": "self-8", "mode": "forward", "activation": "gelu_tanh", "provider": "gdpa-hopper", "ms": 25.0, "note": None}]
    tables.show(Report(head(), [row(ms=123.4)], graph=graph), console)
    assert "25 ms" in console.file.getvalue()
    assert "gdpa-hopper" in console.file.getvalue()
    assert "…" not in text + console.file.getvalue()
    assert console.width == 40


def test_lists_beside_the_rows_have_their_tables():
    cold = [{"case": "self-8", "activation": "gelu", "provider": "gdpa-cpu", "ms": 2500.0, "note": None}]
    text = text_of(lambda console: tables.show(Report(head(), cold=cold), console))
    assert "2.50 s" in text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "-"),
        (0.0123, "12.3 us"),
        (0.99973, "1 ms"),
        (1.5, "1.5 ms"),
        (999.0, "999 ms"),
        (999.7, "1.00 s"),
        (61_000.0, "61.00 s"),
        (-142.0, "-142 ms"),
    ],
)
def test_durations_read_naturally(ms, text):
    assert tables.duration(ms) == text


def test_large_figures_have_no_exponent():
    fast = replace(row(), tflops=1145.4)
    rate = {"median": 1599.6, "lowest": 1400.0, "highest": 1650.0, "unit": "TFLOP/s"}
    assert " 1145 " in text_of(lambda console: tables.show(Report(head(), [fast]), console))
    assert ">1145 [" in page.page(Report(head(), [fast]))
    assert tables.rate(rate) == "1600 TFLOP/s (1400 to 1650 over the run)"
    assert [tables.size(count) for count in (999, 999_700, 2_500_000_000_000)] == ["999 B", "1 MB", "2500 GB"]


def test_the_time_left_follows_what_is_done():
    ticks = iter([0.0, 30.0])
    plan = run.Plan((Case.named("self-8", Size(1, 1, 8)),), ("gelu",), ("forward",), (), torch.float32, CPU, timing.Effort(9.5))
    bar = command.Bar(plan, Console(file=io.StringIO()), now=lambda: next(ticks))
    bar.step("self-8", plan.steps / 4)
    bar.finished("self-8")
    assert "measured self-8; 30 s so far, about 90 s left" in bar.console.file.getvalue()


# Picture and page


def many():
    """The full suite of six providers, two activations and modes, with cells that have no figure."""
    rows = []
    for index, case in enumerate(FULL):
        for mode in ("forward", "backward"):
            for activation in ("silu", "gelu"):
                for place, provider in enumerate(("gdpa-hopper", "gdpa-triton", "cudnn", "varlen", "fa3", "hstu")):
                    ms = None if (provider == "cudnn" and "jag" in case) else 1.0 + place
                    rows.append(row(provider, ms, 0.9 - 0.1 * place, case, mode, activation, note=f"<note {index}>"))
    facts = {case: run.summary(Case.named(case, GPU_SIZE), 2) for case in FULL}
    return Report(head(cases=facts, R={"median": 700, "lowest": 650, "highest": 800, "unit": "TFLOP/s"}), rows)


def test_the_picture_has_a_panel_for_each_mode_and_activation_with_the_floor(tmp_path):
    figure = plot.figure(many())
    titles = [axis.get_title(loc="left").split("   ")[0] for axis in figure.axes]
    assert list(dict.fromkeys(titles)) == ["forward, silu", "forward, gelu", "backward, silu", "backward, gelu"]
    for axis in figure.axes:
        assert any(list(line.get_ydata()) == [1.0, 1.0] for line in axis.lines)
        assert len(axis.patches) <= plot.BARS
    drawn = sum(len(axis.patches) for axis in figure.axes)
    assert drawn == sum(found.ms is not None for found in many().rows)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"gdpa-hopper", "cudnn (softmax)", "hstu"} < set(legend)
    path = tmp_path / "rows.png"
    plot.write(many(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_run_without_figures_says_so():
    figure = plot.figure(Report(head(), [row(ms=None, note="none")]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["no row has a figure"]


def test_without_rates_the_bars_are_flops():
    figure = plot.figure(Report(head(), [row(fraction=None)]))
    assert figure.axes[0].get_ylabel() == "GFLOP/s"


def test_every_provider_has_a_colour():
    assert set(plot.COLOURS) == set(NAMES)


class Checker(HTMLParser):
    """Tags close in the order they opened, and nothing is fetched from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(tmp_path):
    path = tmp_path / "rows.html"
    page.write(many(), path)
    text = path.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert [link[:22] for link in checker.links] == ["data:image/png;base64,"]
    assert "<note" not in text
    assert "&lt;note 0&gt;" in text
    assert checker.seen.count("table") == 1 + 4 + 2 * len(FULL)
    assert re.search(r"R</td><td>700 TFLOP/s \(650 to 800", text)
    for name in ("cudnn (softmax)", *FULL):
        assert name in text
    assert text.index("data:image/png") < text.index("where this comes from")


def test_the_page_says_clocks_and_work_in_words():
    sampled = {"sm_mhz": 1725.0, "sm_lowest_mhz": 1260.0, "power_w": 663.07, "power_limit_w": 700.0, "temperature_c": None}
    assert page._clocks(sampled) == "1725 MHz, at the lowest 1260, 663 W, limit 700 W"
    facts = {"batch": 2, "heads": 3, "dim": 4, "rows": 5, "flops": {"forward": 2.5e9, "backward": 6.18e12}}
    line = tables.describe(facts | {"bytes": {"forward": 10, "backward": 2000}})
    assert line.endswith("forward 2.5 GFLOP, 10 B; backward 6.18 TFLOP, 2 KB")


# Compiling ahead


def test_kernels_are_compiled_for_the_forms_that_the_cases_need():
    names = ("self-8", "pffn-8x4", "self-8-jag", "self-8-tail", "pffn-8x4-jag", "pma-2x8-jag", "pma-2x8")
    forms = [warm.form_of(Case.named(name, GPU_SIZE)) for name in names]
    assert forms == ["dense", "dense", "packed", "packed", "dense-keys", "shared-queries", "shared-queries"]


def test_compiling_ahead_asks_for_each_kernel_once_and_reports_what_fails(monkeypatch, tmp_path):
    started = []

    class Process:
        returncode = 1

        def __init__(self, arguments, **_):
            started.append(json.loads(arguments[-1]))

        def communicate(self, timeout):
            return "", "first\nlast line\n"

    monkeypatch.setattr(warm.subprocess, "Popen", Process)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cases = [Case.named(name, GPU_SIZE) for name in FULL]
    problem = warm.compile_kernels(["gdpa-triton", "gdpa-cpu", "cudnn"], cases, ["silu", "gelu"], torch.bfloat16)
    assert problem == "last line"
    assert len(started) == 4 * 2
    assert {request["arch"] for request in started} == {90}

    started.clear()
    warm.compile_kernels(["gdpa-hopper"], cases, ["silu"], torch.bfloat16, gradients=False)
    assert len(started) == 4
    started.clear()
    warm.compile_kernels(["gdpa-hopper"], cases, ["silu"], torch.bfloat16)
    backward = sorted((request["form"], request["keys"]) for request in started if request["backward"])
    dense = [("dense", keys) for keys in (128, 256, 512, 1024, 2048)]
    assert backward == [*dense, *[("dense-keys", keys) for keys in (256, 512, 2048)], ("packed", 0), ("shared-queries", 0)]
    assert all(request["rows"] == [request["keys"] or 256] * 2 for request in started if request["backward"])

    started.clear()
    narrow = [Case.named(name, replace(GPU_SIZE, dim=64)) for name in ("self-2048-jag", "pffn-1024x256-jag", "pma-32x2048-jag")]
    warm.compile_kernels(["gdpa-hopper"], narrow, ["silu"], torch.bfloat16)
    rows = {request["form"]: tuple(request["rows"]) for request in started if request["backward"]}
    averages = [int(case.drawn.sum()) // case.batch for case in narrow]
    assert rows == {"packed": (averages[0], 256), "dense-keys": (averages[1], 256), "shared-queries": (32, 256)}

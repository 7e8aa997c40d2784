"""`python -m gdpa.bench.cpu_ratio`: what it prints and writes, of measurements that are made up."""

import json

import pytest

from gdpa.bench import cpu_ratio


@pytest.fixture
def measured(monkeypatch):
    """Every timing is a list of two rounds; the number of batches, dtypes and activations that are timed before Ctrl-C, in a list."""
    left = [1000]

    def in_a_process(function, *arguments):
        if function is cpu_ratio.measure_memory:
            return {"mib": 10.0}
        if function is cpu_ratio.measure_time:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return {"gdpa": [1.0, 2.0], "padded": [4.0, 4.0], "eager": [3.0, 3.0], "difference": 0.0}
        return {}

    monkeypatch.setattr(cpu_ratio, "in_a_process", in_a_process)
    monkeypatch.setattr(cpu_ratio.multiprocessing, "set_forkserver_preload", lambda modules: None)
    return left


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["cpu_ratio", *map(str, arguments)])
    return cpu_ratio.main()


def test_a_whole_run_is_printed_and_written(measured, monkeypatch, capsys, tmp_path):
    assert command(monkeypatch, "--quick", "--json", tmp_path / "ratio.json") == 0
    assert "4.00x" in capsys.readouterr().out
    rows = json.loads((tmp_path / "ratio.json").read_text())["rows"]
    assert len(rows) == 4 * len(cpu_ratio.batches(quick=True))
    assert {row["speedup"] for row in rows} == {4.0}


@pytest.mark.parametrize("before", [0, 3])
def test_ctrl_c_prints_the_rows_so_far_and_writes_no_file(measured, monkeypatch, capsys, tmp_path, before):
    measured[0] = before
    assert command(monkeypatch, "--quick", "--json", tmp_path / "ratio.json") == 130
    text = capsys.readouterr().out
    assert text.count("padded eager") == (before > 0)  # the table's title
    assert ("interrupted: these are the rows so far" in text) == (before > 0)
    assert text.splitlines()[-1].startswith("interrupted")
    assert not list(tmp_path.iterdir())

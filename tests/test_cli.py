"""The command line as a user meets it: what it prints, what it returns, what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import clean_env

import gdpa
from gdpa import cli
from gdpa.bench import providers, report, run, timing
from gdpa.bench.cases import FULL
from gdpa.errors import GdpaError

SMALL = ["bench", "--device", "cpu", "--batch", "2", "--heads", "1", "--dim", "8", "--seconds", "0.01"]
SIGNS = ["--provider", "gdpa-cpu", "--case", "self-16-jag", "--mode", "forward"]


@pytest.fixture(autouse=True)
def _small_yardsticks(monkeypatch):
    """R and W of a small matmul and a small copy: what they are does not matter here."""
    monkeypatch.setitem(timing.HARDWARE_SIZES, "cpu", (64, 2**16))


def test_bench_prints_a_table_for_each_workload_and_writes_the_rows(capsys, tmp_path):
    path = tmp_path / "rows.json"
    assert cli.main([*SMALL, "--activation", "relu", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    for case in ("self-512-jag, relu", "pma-32x1024-jag, relu", "pffn-512x256-jag, relu", "self-256, relu"):
        assert case in printed.out
    assert "time left" in printed.err or "s left" in printed.err
    loaded = json.loads(path.read_text())
    header = loaded["header"]
    assert header["command"].startswith("gdpa bench --device cpu")
    assert (header["dtype"], header["batch"], header["heads"], header["dim"], header["seed"]) == ("float32", 2, 1, 8, 0)
    assert set(header["versions"]) == {"python", "torch", "triton", "cuda", "gdpa"}
    assert {"machine", "cpu", "gpu", "clocks", "driver", "commit", "started", "seconds"} <= set(header)
    assert header["R"]["lowest"] <= header["R"]["median"] <= header["R"]["highest"]
    assert {(row["mode"], row["provider"]) for row in loaded["rows"] if row["ms"] is not None} == {
        (mode, provider) for mode in ("forward", "backward") for provider in ("eager", "gdpa-cpu")
    }


def test_bench_lists_its_cases_with_their_work(capsys):
    assert cli.main(["bench", "--list", "--suite", "full", "--batch", "2", "--heads", "1", "--dim", "8"]) == 0
    printed = capsys.readouterr().out
    assert all(case in printed for case in FULL)
    assert "GFLOP" in printed


def test_bench_runs_what_it_is_told_to(capsys, tmp_path):
    path = tmp_path / "rows.json"
    chosen = ["--case", "self-16,pffn-16x8-jag", "--case", "pma-2x16-jag", "--provider", "gdpa-cpu,gdpa-reference"]
    assert cli.main([*SMALL, *chosen, "--mode", "both", "--activation", "relu,gelu", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["case"] for row in rows} == {"self-16", "pffn-16x8-jag", "pma-2x16-jag"}
    assert {row["provider"] for row in rows} == {"gdpa-cpu", "gdpa-reference"}
    assert {row["mode"] for row in rows} == {"both"}
    assert {row["activation"] for row in rows} == {"relu", "gelu"}
    assert len(rows) == 3 * 2 * 2


def test_bench_returns_1_where_a_backend_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(providers, "judge", lambda *_: [_wrong_verdict()])
    assert cli.main([*SMALL, *SIGNS]) == 1
    assert "wrong, not timed" in capsys.readouterr().out


def _wrong_verdict():
    from gdpa.numerics import Verdict

    return Verdict("out", 1.0, 0.1, 1.0, 0.1)


def test_bench_resumes_where_a_file_ends(capsys, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    arguments = [*SMALL, "--provider", "gdpa-cpu", "--mode", "forward", "--json", str(path)]
    assert cli.main([*arguments, "--case", "self-16-jag"]) == 0
    first = json.loads(path.read_text())["rows"]
    assert cli.main([*arguments, "--case", "self-16-jag,self-8", "--resume"]) == 0
    second = json.loads(path.read_text())
    assert second["rows"][:1] == first
    assert [row["case"] for row in second["rows"]] == ["self-16-jag", "self-8"]
    assert set(second["header"]["cases"]) == {"self-16-jag", "self-8"}
    capsys.readouterr()
    assert cli.main([*arguments, "--case", "self-16-jag", "--resume", "--dtype", "bf16"]) == 2
    assert "dtype 'bfloat16' as this run, got 'float32'" in capsys.readouterr().err


def test_bench_compares_two_files(capsys, tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert cli.main([*SMALL, *SIGNS, "--json", str(before)]) == 0
    data = json.loads(before.read_text())
    data["rows"][0] |= {"ms": 2 * data["rows"][0]["ms"], "fraction_of_floor": data["rows"][0]["fraction_of_floor"] / 2}
    after.write_text(json.dumps(data))
    assert cli.main(["bench", "--compare", str(before), str(before)]) == 0
    assert cli.main(["bench", "--compare", str(before), str(after)]) == 1
    assert "slower" in capsys.readouterr().out
    assert cli.main(["bench", "--compare", str(after), str(before)]) == 0
    assert cli.main(["bench", "--compare", str(before), str(after), "--threshold", "0.6"]) == 0


def test_bench_draws_pictures_of_a_file_without_measuring(capsys, tmp_path, monkeypatch):
    path, picture, page = (tmp_path / name for name in ("rows.json", "rows.png", "rows.html"))
    assert cli.main([*SMALL, *SIGNS, "--json", str(path)]) == 0
    monkeypatch.setattr(run.Run, "__call__", lambda self: pytest.fail("measured"))
    assert cli.main(["bench", "--show", str(path), "--plot", str(picture), "--report", str(page)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "self-16-jag" in page.read_text()
    assert "self-16-jag" in capsys.readouterr().out


def test_ctrl_c_leaves_the_rows_so_far_and_returns_130(tmp_path):
    """A real signal to a real process, once the first rows are on disk."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "gdpa", *SMALL, "--provider", "gdpa-cpu", "--json", str(path)]
    command[command.index("0.01")] = "2"
    # A shell starts background jobs, and so perhaps these tests, with the signal ignored; a person's Ctrl-C is not.
    process = subprocess.Popen(
        command, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        # Few rounds are enough for the cap, so rows come long before 2 s a group, and the run lasts several groups.
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted" in out
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert len(rows) < 8
    assert rows[0]["case"] in out


def test_check_holds_every_activation_to_its_budget(capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "cpu", "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in gdpa.activations())
    assert f"{len(gdpa.activations())} passed, 0 failed" in printed


def test_check_takes_lists_with_commas(capsys):
    lists = ["--backend", "reference,cpu", "--dtype", "fp32,bf16", "--dtype", "fp16", "--activation", "relu,gelu"]
    assert cli.main(["check", "--device", "cpu", *lists]) == 0
    printed = capsys.readouterr().out
    assert "12 passed, 0 failed" in printed
    lines = {tuple(words[:3]) for line in printed.splitlines() if len(words := line.split()) > 3}
    named = {(b, d, a) for b in ("cpu", "reference") for d in ("float32", "bfloat16", "float16") for a in ("relu", "gelu")}
    assert named <= lines


def test_check_returns_1_on_a_failure(capsys, monkeypatch):
    from gdpa.bench import check

    monkeypatch.setattr(check, "judge", lambda *_: [_wrong_verdict()])
    assert cli.main(["check", "--device", "cpu", "--backend", "cpu", "--dtype", "fp32", "--activation", "relu"]) == 1
    assert "over the budget" in capsys.readouterr().out


def test_check_says_what_it_did_not_check(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["check", "--device", "cpu", "--backend", "triton", "--dtype", "fp32"]) == 1
    printed = capsys.readouterr().out
    assert "not checked: triton in float32: q is on the CPU" in printed
    assert "0 passed, 0 failed" in printed


def test_info_names_the_versions_the_backends_and_the_caches(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert gdpa.__version__ in printed
    for line in ("cpu on cpu", "triton on cpu", "reference on cpu", "generated code", "compiled kernels"):
        assert line in printed


def test_info_says_which_providers_of_the_benchmark_there_are(capsys):
    assert cli.main(["info"]) == 0
    said = dict(re.findall(r"^bench: (\S+)\s+(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert set(said) == {name for name in providers.NAMES if not name.startswith("gdpa-")}
    assert said["eager"].startswith("runs on")
    if not torch.cuda.is_available():
        assert said["cudnn"] == "runs on a CUDA device only"


def test_precompile_without_a_gpu_asks_for_the_architecture(capsys, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["precompile", "--activation", "gelu", "--dim", "64"]) == 2
    assert "--arch: expected a compute capability such as 80, 90 or 100" in capsys.readouterr().err


def test_precompile_builds_for_another_architecture(tmp_path):
    pytest.importorskip("triton")
    command = ["precompile", "--activation", "relu", "--dim", "64", "--dtype", "bf16", "--arch", "90"]
    folders = {"TRITON_CACHE_DIR": str(tmp_path / "kernels"), "GDPA_CACHE_DIR": str(tmp_path / "sources")}
    done = subprocess.run(
        [sys.executable, "-m", "gdpa", *command], env=clean_env(**folders), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert list((tmp_path / "kernels").rglob("*.cubin"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--activation", "gelo"], "Did you mean 'gelu'"),
        (["bench", "--provider", "gdpa-tritn"], "did you mean 'gdpa-triton'?"),
        (["bench", "--case", "self-512-jagg"], "nearest: self-512-jag"),
        (["bench", "--suite", "ful"], "did you mean 'full'?"),
        (["bench", "--mode", "forwards"], "did you mean 'forward'?"),
        (["bench", "--device", "cpu", "--graph"], "--graph: expected a CUDA device"),
        (["bench", "--resume"], "--resume: expected --json FILE"),
        (["bench", "--compare", "/no/a.json", "/no/b.json"], "--compare: expected a file that can be read"),
        (["bench", "--show", "/no/a.json"], "--show: expected a file that can be read"),
        (["bench", "--device", "cud"], "did you mean 'cuda'?"),
        (["bench", "--plot", "/no/such/folder/file.png"], "--plot: expected a file in a folder that can be written"),
        (["bench", "--json", "/no/such/folder/file.json"], "--json: expected a file in a folder that can be written"),
        (["bench", "--seconds", "0"], "--seconds: expected a positive number"),
        (["check", "--activation", "tanhh"], "Did you mean 'tanh'"),
        (["check", "--activation", "gelu,tanhh"], "Did you mean 'tanh'"),
        (["check", "--activation", ","], "--activation: expected a name, or some with commas"),
        (["check", "--backend", "cpuu"], "did you mean 'cpu'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_refused_before_anything_runs(capsys, arguments, message):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--dtype", "bf15"], "did you mean 'bf16'?"),
        (["check", "--dtype", "fp64"], "argument --dtype: expected one of bf16, fp16, fp32"),
        (["check", "--dtype", "fp32,bf15"], "argument --dtype: expected one of bf16, fp16, fp32"),
        (["check", "--dtype", ","], "argument --dtype: expected a name, or some with commas"),
        (["bench", "--batch", "0"], "invalid positive integer value"),
        (["bnch"], "bench"),
        ([], "COMMAND"),
    ],
    ids=["dtype", "float64", "one of a list", "an empty list", "batch", "command", "nothing"],
)
def test_wrong_usage_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_asking_for_a_gpu_that_is_not_there_says_why(capsys):
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "--device: expected a device of this machine" in capsys.readouterr().err


def test_the_module_runs_from_a_checkout_uninstalled(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-m", "gdpa", "--version"], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"gdpa {gdpa.__version__}"


def test_a_rank_of_torchrun_ends_without_the_interpreters_own_end(monkeypatch):
    """Threads of its process group may outlive the run, and abort the process there."""
    ends = []
    monkeypatch.setattr(cli, "main", lambda: 3)
    monkeypatch.setattr(cli.os, "_exit", ends.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):  # _exit would not have come back
        cli.run()
    assert ends == [3]
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit) as end:
        cli.run()
    assert end.value.code == 3 and ends == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", ""], "--case: expected a name, or some with commas, got ''"),
        (["--provider", ","], "--provider: expected a name"),
        (["--seed", "-1"], "--seed: expected a number from 0"),
        (["--seed", str(2**63)], "--seed: expected a number from 0"),
        (["--plot", "rows.svg"], "--plot: expected a name that ends with .png, got rows.svg"),
        (["--plot", "rows"], "--plot: expected a name that ends with .png"),
        (["--plot", "rows.png", "--json", "rows.png"], "--json: expected another file than that of --plot, which it would replace"),
        (["--show", "rows.json", "--report", "./rows.json"], "--report: expected another file than that of --show, which it would"),
        (["--compare", "a.json", "b.json", "--json", "c.json"], "--json: expected without --compare"),
        (["--show", "a.json", "--json", "c.json"], "--json: expected without --show"),
        (["--compare", "a.json", "b.json", "--show", "c.json"], "--show: expected without --compare"),
        (["--threshold", "0.5"], "--threshold: expected with --compare alone"),
        (["--suite", "train", "--threshold", "0.05"], "--threshold: expected with --compare alone"),
        (["--show", "a.json", "--threshold", "0"], "--threshold: expected with --compare alone"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_refuses_before_it_measures(options, message, capsys):
    assert cli.main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--show", "a.json", "--case", "self-8"], "--case: expected without --show"),
        (["--show", "a.json", "--memory"], "--memory: expected without --show"),
        (["--show", "a.json", "--no-compile"], "--compile: expected without --show"),
        (["--compare", "a.json", "b.json", "--activation", "silu"], "--activation: expected without --compare"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_only_reads_files_takes_no_option_of_a_run(options, message, capsys):
    assert cli.main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_pipe_is_not_replaced_by_a_file(capsys, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert cli.main([*SMALL, *SIGNS, "--json", str(pipe)]) == 2
    assert "--json: expected a file in a folder that can be written" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_training_file_is_shown_and_no_picture_of_it_is_promised(capsys, tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"header": {"suite": "train", "models": {}}, "rows": []}))
    assert cli.main(["bench", "--show", str(path)]) == 0
    assert cli.main(["bench", "--show", str(path), "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot: expected without --show of a training step's file" in capsys.readouterr().err


def test_a_disk_that_is_full_costs_the_file_and_not_the_table(capsys, tmp_path, monkeypatch):
    def full(path):
        raise GdpaError(f"{path}: could not be written: no space left")

    monkeypatch.setattr(report, "replacing", full)
    assert cli.main([*SMALL, *SIGNS, "--json", str(tmp_path / "rows.json")]) == 2
    printed = capsys.readouterr()
    assert "gdpa-cpu" in printed.out
    assert "no space left" in printed.err
    assert "wrote" not in printed.out


def test_file_names_are_printed_as_they_are(capsys, tmp_path):
    path = tmp_path / "rows[final].json"
    assert cli.main([*SMALL, *SIGNS, "--json", str(path)]) == 0
    assert "rows[final].json" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dim", "512"], "--dim: expected a multiple of 8 from 8 to 256, got 512"),
        (["--dim", "7"], "--dim: expected a multiple of 8"),
        (["--dim", "64", "--value-dim", "12"], "--value-dim: expected a multiple of 8"),
        (["--activation", "relu,silu", "--dim", "12"], "--dim: expected a multiple of 8"),  # a list with commas, as elsewhere
        (["--dim", "64", "--arch", "12"], "--arch: expected a compute capability from 80 on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_precompile_refuses_what_no_kernel_takes(options, message, capsys):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert cli.main(["precompile", "--activation", "gelu", "--arch", "80", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "message"), [({"WORLD_SIZE": "2"}, "RANK: expected"), ({"WORLD_SIZE": "x"}, "WORLD_SIZE: expected")]
)
def test_ranks_that_torchrun_did_not_start_are_refused(variables, message, capsys, monkeypatch, tmp_path):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--device", "cpu", "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err

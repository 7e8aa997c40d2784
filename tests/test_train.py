"""`gdpa train` as a user meets it: what it prints and leaves, how it stops, and that it goes on as if it had not."""

import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import clean_env, spy
from rich.console import Console

from gdpa import cli, dispatch, models
from gdpa.data import parquet
from gdpa.data.synthetic import SyntheticClicks
from gdpa.errors import GdpaError
from gdpa.train import command, curves
from gdpa.train import log as logs
from gdpa.train.loop import Loop
from gdpa.train.progress import Display, Reading

SMALL = [
    "train",
    "--device",
    "cpu",
    "--batch-size",
    "8",
    "--log-every",
    "2",
    "--evaluation-examples",
    "16",
    "--checkpoint-every",
    "3",
]
LAST_LINE = re.compile(r"NE (\d\.\d{4}) AUC (\d\.\d{4}) samples/s (\d+\.\d)")


@pytest.fixture(autouse=True)
def _quick_and_in_one_thread(monkeypatch, request):
    """Sums are bitwise the same in one thread as in a subprocess of one; the yardstick of MFU and the picture, which takes half a
    second, do not matter to most tests."""
    monkeypatch.setitem(command.MATMUL_ROWS, "cpu", 32)
    if "picture" not in request.node.name:
        monkeypatch.setattr(curves, "write", lambda log, path: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(folder, *options, status=0):
    assert cli.main([*SMALL, "--out", str(folder), *options]) == status
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 8 steps."""
    torch.set_num_threads(1)
    return run(tmp_path_factory.mktemp("whole") / "run", "--steps", "8")


@pytest.fixture(scope="module")
def losses(whole):
    found = logs.losses(whole / "log.jsonl")
    assert len(found) == 8
    return found


def at_step(monkeypatch, number, action):
    """Do something before the training step of that number, counted from 0."""
    train = Loop.train_step

    def patched(self, *arguments):
        if self.step == number:
            action(self)
        return train(self, *arguments)

    monkeypatch.setattr(Loop, "train_step", patched)


@pytest.mark.parametrize("model", ["kunlun", "interformer"])
def test_the_last_line_has_the_scores_and_the_folder_has_the_log_the_picture_and_checkpoints(model, tmp_path, capsys):
    folder = run(tmp_path / "run", "--model", model, "--steps", "5")
    printed = capsys.readouterr().out.strip().splitlines()
    assert printed[0].startswith(f"{model} tiny, ")
    match = LAST_LINE.fullmatch(printed[-1])
    assert match
    lines = logs.lines(folder / "log.jsonl")
    assert [(line["event"], line["step"]) for line in lines] == [
        ("start", 0),
        ("steps", 2),
        ("steps", 3),
        ("steps", 4),
        ("steps", 5),
        ("end", 5),
    ]
    assert [len(line["losses"]) for line in lines[1:5]] == [2, 1, 1, 1]
    assert all(line["samples_per_s"] > 0 and line["tokens_per_s"] > 0 and line["mfu"] > 0 for line in lines[1:5])
    assert lines[0]["command"].startswith("gdpa train --device cpu") and lines[0]["config"]["model"]["model"] == model
    assert (f"{lines[-1]['ne']:.4f}", f"{lines[-1]['auc']:.4f}") == match.groups()[:2]
    assert lines[-1]["examples"] == 16
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]


def test_the_reported_loss_is_the_log_loss_of_the_batch(losses):
    """The first, by the weights as the seed makes them."""
    config = models.PRESETS["kunlun"]["tiny"]
    longest = config.max_history
    batch = SyntheticClicks(8, seed=0, median_length=longest // command.MEDIAN_SHARE, max_length=longest).batch(0)
    torch.manual_seed(0)
    logits = models.build("kunlun", "tiny", batch_schema()).forward(batch)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    assert losses[0] == pytest.approx(float(expected.detach()), rel=1e-6)


def batch_schema():
    return SyntheticClicks(1).schema


def test_ctrl_c_finishes_the_step_and_the_printed_command_goes_on_to_the_same_losses(monkeypatch, tmp_path, capsys, whole, losses):
    folder, handler = tmp_path / "a run", signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    with monkeypatch.context() as patched:
        at_step(patched, 4, lambda loop: os.kill(os.getpid(), signal.SIGINT))
        run(folder, "--steps", "8", status=130)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("interrupted after step 5; to go on: gdpa train ")
    assert (folder / "checkpoints" / "step-00000005").is_dir()
    assert [line["event"] for line in logs.lines(folder / "log.jsonl")][-1] == "interrupted"
    assert logs.losses(folder / "log.jsonl") == losses[:5]
    words = shlex.split(last.partition("to go on: gdpa ")[2])
    assert words[-1] == "--resume"
    assert cli.main(words) == 0
    assert logs.losses(folder / "log.jsonl") == losses
    first, again = (logs.lines(path / "log.jsonl")[-1] for path in (whole, folder))
    assert (first["ne"], first["auc"]) == (again["ne"], again["auc"])
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_run_killed_by_sigkill_resumes_from_its_last_complete_checkpoint_to_the_same_losses(tmp_path, losses, capsys):
    folder = tmp_path / "run"
    words = [*SMALL, "--out", str(folder), "--steps", "1000000", "--checkpoint-every", "2"]
    process = subprocess.Popen([sys.executable, "-m", "gdpa", *words], env=clean_env(), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "checkpoints" / "step-00000004").is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    # What a process leaves that is killed while it writes.
    shutil.copytree(folder / "checkpoints" / "step-00000004", folder / "checkpoints" / ".step-00000006.partial")
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"event": "steps", "st')
    step = int(sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("step"))[-1][5:])
    run(folder, "--steps", str(max(8, step + 2)), "--resume")
    assert f"resumed after step {step} of" in capsys.readouterr().out
    assert logs.losses(folder / "log.jsonl")[:8] == losses
    assert [line["step"] for line in logs.lines(folder / "log.jsonl") if line["event"] == "resume"] == [step]
    assert not list((folder / "checkpoints").glob(".*"))


def test_a_finished_run_may_be_resumed_to_more_steps_and_scores_again_where_there_are_none(tmp_path, losses, capsys):
    folder = run(tmp_path / "run", "--steps", "3")
    first = capsys.readouterr().out.strip().splitlines()[-1]
    run(folder, "--steps", "3", "--resume")
    second = capsys.readouterr().out.strip().splitlines()[-1]
    assert LAST_LINE.fullmatch(first) and second == first.partition(" samples/s")[0] + " samples/s nan"
    run(folder, "--steps", "8", "--resume")
    assert logs.losses(folder / "log.jsonl") == losses


def test_a_checkpoint_of_another_run_is_refused_with_the_first_field_that_differs(whole, tmp_path, capsys):
    for options, expected in (
        (["--model", "interformer"], "config.model.model = 'interformer', as this run has it, got 'kunlun'"),
        (["--seed", "3"], "config.seed = 3, as this run has it, got 0"),
        (["--no-history"], "config.no_history = True, as this run has it, got False"),
        (["--batch-size", "16"], "config.batch_size = 16, as this run has it, got 8"),
    ):
        before = sorted(path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock")
        run(whole, "--resume", *options, status=2)
        assert expected in capsys.readouterr().err
        assert sorted(path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock") == before
    rows = SyntheticClicks(8, dense=5, median_length=3, max_length=6)
    parquet.write(tmp_path / "other.parquet", [rows.batch(index) for index in range(4)], rows.schema, row_group=8)
    run(whole, "--resume", "--data", str(tmp_path / "other.parquet"), status=2)
    assert re.search(r"expected a checkpoint with schema.dense = 5, as this run has it, got 8", capsys.readouterr().err)
    same = SyntheticClicks(8, median_length=3, max_length=6)
    parquet.write(tmp_path / "same.parquet", [same.batch(index) for index in range(4)], same.schema, row_group=8)
    run(whole, "--resume", "--data", str(tmp_path / "same.parquet"), status=2)
    assert "expected a checkpoint with data.kind = 'parquet', as this run has it, got 'synthetic'" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_it_goes_on(whole, tmp_path, capsys, losses):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    newest = folder / "checkpoints" / "step-00000008"
    (shard,) = newest.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 16
    shard.write_bytes(data)
    run(folder, "--steps", "8", "--resume", status=2)
    assert f"{shard}: expected" in (error := capsys.readouterr().err) and "the file was damaged" in error
    shutil.rmtree(newest)
    run(folder, "--steps", "8", "--resume")
    assert "resumed after step 6" in capsys.readouterr().out
    assert logs.losses(folder / "log.jsonl") == losses


@pytest.mark.parametrize("kind", ["weight", "gradient"])
def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_group_and_keeps_the_last_checkpoint(
    kind, monkeypatch, tmp_path, capsys, losses
):
    def spoil(loop):
        parameter = loop.model.dense.head.out.weight
        if kind == "weight":
            parameter.data[0] = math.nan
        else:
            parameter.register_hook(lambda grad: grad * math.inf)

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        at_step(patched, 4, spoil)
        run(folder, "--steps", "8", status=1)
    printed = capsys.readouterr().out
    assert "gdpa train: stopped: step 5: expected a finite loss and gradient" in printed
    assert "parameter group 'dense.head' (dense.head.out.weight)" in printed
    assert f"{folder / 'checkpoints' / 'step-00000003'} is from before it" in printed
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    assert logs.lines(folder / "log.jsonl")[-1]["event"] == "stopped"
    run(folder, "--steps", "8", "--resume")
    assert logs.losses(folder / "log.jsonl") == losses


def test_weights_that_are_not_finite_are_not_written_to_a_checkpoint(monkeypatch, tmp_path, capsys):
    """The last step before a checkpoint: its loss and gradients were finite."""

    def spoil(loop):
        apply = loop.updates.apply

        def patched(*arguments):
            norm = apply(*arguments)
            loop.model.tables["history_item"].weight.data[7] = math.inf
            return norm

        loop.updates.apply = patched

    at_step(monkeypatch, 5, spoil)
    folder = run(tmp_path / "run", "--steps", "8", status=1)
    printed = capsys.readouterr().out
    assert "step 6: expected finite weights after it, not those of 'tables.history_item' (tables.history_item.weight)" in printed
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]


def test_histories_that_are_all_empty_train(tmp_path, capsys):
    folder = run(tmp_path / "run", "--steps", "3", "--no-history")
    assert all(math.isfinite(loss) for loss in logs.losses(folder / "log.jsonl"))
    assert LAST_LINE.fullmatch(capsys.readouterr().out.strip().splitlines()[-1])
    assert logs.lines(folder / "log.jsonl")[1]["tokens_per_s"] == 0


def test_histories_are_cut_to_what_the_preset_uses(tmp_path):
    """The newest events: longer histories of the same end give the same losses."""
    used = models.PRESETS["kunlun"]["tiny"].max_history
    clicks = SyntheticClicks(8, median_length=3 * used, max_length=4 * used)
    batches = [clicks.batch(index) for index in range(3)]
    parquet.write(tmp_path / "long.parquet", batches, clicks.schema, row_group=8)
    parquet.write(tmp_path / "short.parquet", [batch.recent(used) for batch in batches], clicks.schema, row_group=8)
    found = [
        logs.losses(run(tmp_path / name, "--data", str(tmp_path / f"{name}.parquet"), "--steps", "2") / "log.jsonl")
        for name in ("long", "short")
    ]
    assert found[0] == found[1]


def test_files_that_do_not_hold_their_schema_are_read_with_the_one_given(tmp_path, capsys):
    import pyarrow.parquet as pq

    clicks = SyntheticClicks(8, median_length=3, max_length=6)
    path, schema = tmp_path / "bare.parquet", tmp_path / "schema.json"
    parquet.write(path, [clicks.batch(index) for index in range(3)], clicks.schema, row_group=8)
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path, row_group_size=8)
    run(tmp_path / "without", "--data", str(path), status=2)
    assert "expected a schema in the file's metadata or as an argument, got neither" in capsys.readouterr().err
    schema.write_text(clicks.schema.to_json())
    run(tmp_path / "with", "--data", str(path), "--schema", str(schema), "--steps", "1")


def test_out_of_memory_is_said_with_the_batch_size(monkeypatch, tmp_path, capsys):
    def full(loop):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    at_step(monkeypatch, 1, full)
    run(tmp_path / "run", status=2)
    assert "--batch-size: expected one that cpu has memory for, got 8: CUDA out of memory" in capsys.readouterr().err


def test_what_is_asked_wrongly_is_said_before_anything_is_written(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(command, "broken_cpu_products", lambda dtype: "torch.matmul in bfloat16 ends the process")
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    for options, expected in (
        (["--model", "dlrm"], "--model: expected one of"),
        (["--preset", "huge"], "--preset: expected one of"),
        (["--data", str(tmp_path / "none.parquet")], "--data: expected 'synthetic', a Parquet file or a folder of them, got"),
        (["--data", str(file)], "expected a Parquet file, which this is not"),
        (["--backend", "cuda"], "--backend: expected one of auto, cpu, hopper, triton, reference, got 'cuda'"),
        (
            ["--backend", "hopper"],
            "--backend: expected one that runs this model on cpu, got hopper: backend: 'hopper' cannot run this",
        ),
        (["--schema", str(file)], "--schema: expected with --data PATH alone, since synthetic data have their own"),
        (["--data", "x", "--schema", str(tmp_path / "none.json")], "--schema: expected a file that can be read, got"),
        (["--data", "x", "--schema", str(file)], "--schema: " + str(file) + ": schema: expected the JSON text of a schema"),
        (["--steps", str(2**20 + 1)], "--steps: expected at most 1048576 on synthetic data"),
        (["--dtype", "fp16"], "--dtype: expected bf16 or fp32"),
        (["--dtype", "bf16"], "--dtype: expected one that this CPU computes in, got bf16, and torch.matmul in bfloat16 ends"),
        (["--compile"], "--compile: expected on a machine that can, got one that cannot: torch.compile needs a C++ compiler"),
        (["--parallel", "tp"], "--parallel: expected one of ddp, fsdp, got 'tp'"),
        (["--seed", "-1"], "--seed: expected a number from 0 to 9223372036854775807, got -1"),
        (["--seed", str(2**64)], "--seed: expected a number from 0 to 9223372036854775807, got 18446744073709551616"),
    ):
        run(tmp_path / "run", *options, status=2)
        assert expected in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    run(file / "run", status=2)
    assert f"--out: expected a folder that can be written, got {file / 'run'}" in capsys.readouterr().err
    assert cli.main(["train", "--resume"]) == 2
    assert "--resume: expected --out FOLDER with it" in capsys.readouterr().err


def test_a_folder_with_a_run_is_not_written_over_and_one_in_use_is_not_shared(whole, tmp_path, capsys):
    import fcntl

    run(whole, status=2)
    assert f"--out: expected a folder without a run, or --resume to go on with it, got {whole}" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run(tmp_path / "run", status=2)
    assert "--out: expected a folder that no other run uses" in capsys.readouterr().err


def test_checkpoints_whose_log_is_gone_are_a_run_too(whole, tmp_path, capsys):
    """A new run's first checkpoint, older than theirs, would be the one that is removed."""
    folder = tmp_path / "run"
    shutil.copytree(whole / "checkpoints", folder / "checkpoints")
    run(folder, "--steps", "2", "--keep", "1", status=2)
    assert f"--out: expected a folder without a run, or --resume to go on with it, got {folder}" in capsys.readouterr().err


def test_a_run_that_has_done_more_steps_than_are_asked_for_is_not_scored_as_one_of_them(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = (folder / "log.jsonl").read_text()
    run(folder, "--steps", "5", "--resume", status=2)
    latest = folder / "checkpoints" / "step-00000008"
    assert f"--steps: expected at least 8, which {latest} has done, got 5" in capsys.readouterr().err
    assert (folder / "log.jsonl").read_text() == before


def test_a_folder_or_a_log_that_cannot_be_written_is_said(tmp_path, capsys):
    """A folder in a file's place stands for a right that is missing, which the administrator always has."""
    for name, expected in (
        (".lock", "--out: expected a folder that can be written, got"),
        ("log.jsonl", "log.jsonl: expected a file in a folder that can be written"),
    ):
        folder = tmp_path / name.removeprefix(".")
        (folder / name).mkdir(parents=True)
        run(folder, "--steps", "2", "--resume", status=2)
        assert expected in capsys.readouterr().err


def test_without_out_every_run_has_a_new_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert cli.main([*SMALL, "--steps", "1"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["kunlun-tiny-1", "kunlun-tiny-2"]
    run(tmp_path / "new", "--steps", "1", "--resume")
    assert "there is no checkpoint to resume: starting at the first step" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "compiled"), [(["--compile"], True), (["--no-compile"], False), ([], False)], ids=str)
def test_compile_compiles_the_stages_of_the_dense_part(options, compiled, monkeypatch, tmp_path, capsys):
    from gdpa.models.base import DensePart
    from gdpa.train import loop

    asked = []
    monkeypatch.setattr(loop, "compile_stages", asked.append)
    monkeypatch.setattr(command, "missing_compiler", lambda device: None)
    run(tmp_path / "run", "--steps", "1", *options)
    assert [isinstance(module, DensePart) for module in asked] == [True] * compiled
    assert (", compiled, " in capsys.readouterr().out) == compiled


def test_the_backend_that_was_asked_for_computes_the_attention(tmp_path, losses, monkeypatch):
    calls = {name: spy(monkeypatch, dispatch.load(name), "forward") for name in ("reference", "cpu")}
    found = logs.losses(run(tmp_path / "run", "--steps", "2", "--backend", "reference") / "log.jsonl")
    assert found == pytest.approx(losses[:2], rel=1e-4)
    assert calls["reference"] and not calls["cpu"]


def test_a_log_with_a_broken_line_is_refused_by_its_number(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "start", "step": 0}\nnot JSON\n{"event": "steps", "step": 2}\n')
    with pytest.raises(ValueError, match="line 2: expected a JSON object with event and step, got 'not JSON'"):
        logs.lines(path)
    log = logs.Log(tmp_path / "new.jsonl")
    log.write("steps", 1, losses=[math.nan, 1.5], ne=math.inf)
    log.close()
    assert json.loads((tmp_path / "new.jsonl").read_text()) == {"event": "steps", "step": 1, "losses": [None, 1.5], "ne": None}


def reading(step):
    return Reading(step, ne=0.95123, auc=0.71234, samples_per_s=12345.0, tokens_per_s=2_345_678.0, mfu=0.123)


def test_a_terminal_shows_a_bar_and_anything_else_a_line_now_and_then():
    figures = ("NE 0.9512", "AUC 0.7123", "12.3k samples/s", "2.35M tokens/s", "MFU 12.3%")
    for width in (80, 160):
        screen = io.StringIO()
        with Display(Console(file=screen, force_terminal=True, width=width, color_system=None), 0, 100) as display:
            display.step(1)
            display.read(reading(10))
        assert all(figure in screen.getvalue() for figure in (*figures, " 10/100"))
        assert ("━" in screen.getvalue()) == (width == 160)
    plain, now = io.StringIO(), iter([0.0, 1.0, 6.0, 6.1])
    with Display(Console(file=plain, width=80), 0, 100, clock=lambda: next(now)) as display:
        for step in (10, 20, 30, 100):
            display.step(step)
            display.read(reading(step))
    shown = plain.getvalue().splitlines()
    assert [line.split()[1] for line in shown] == ["10/100", "30/100", "100/100"]
    assert all(figure in shown[0] for figure in figures)


def test_the_picture_has_the_three_curves_and_the_held_out_scores(whole):
    figure = curves.figure(logs.lines(whole / "log.jsonl"))
    assert [axis.get_title(loc="left").split()[0] for axis in figure.axes] == ["NE", "AUC", "samples/s"]
    end = logs.lines(whole / "log.jsonl")[-1]
    texts = [text.get_text() for axis in figure.axes[:2] for text in axis.get_legend().get_texts()]
    assert f"held out, at the end: {end['ne']:.4f}" in texts and f"held out, at the end: {end['auc']:.4f}" in texts
    assert curves.figure([]).axes  # a run that was stopped before its first line


def test_held_out_scores_far_from_those_of_training_are_in_the_picture():
    """Of a model that learned its few examples by heart."""
    readings = [
        {"event": "steps", "step": step, "ne": 1 / step, "auc": 1 - 0.3 / step, "samples_per_s": 1.0} for step in range(1, 41)
    ]
    figure = curves.figure([*readings, {"event": "end", "step": 40, "ne": 2.2, "auc": 0.5}])
    for axis, score in zip(figure.axes, (2.2, 0.5), strict=False):
        low, high = axis.get_ylim()
        assert low < score < high


def test_the_other_commands_do_not_import_the_trainer():
    code = (
        "import sys, gdpa.cli; gdpa.cli._parser(); print([m for m in sys.modules if m.startswith(('gdpa.train', 'gdpa.models'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_env(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_scores_are_printed_though_the_picture_cannot_be_written(tmp_path, capsys):
    (tmp_path / "curves.png").mkdir()
    run(tmp_path, "--steps", "2")
    printed = capsys.readouterr()
    assert LAST_LINE.fullmatch(printed.out.strip().split("\n")[-1])
    assert "no picture" in printed.err


def test_the_scores_are_printed_though_the_disk_is_full_when_they_are_logged(monkeypatch, tmp_path, capsys):
    write = logs.Log.write

    def full(self, event, step, **facts):
        if event == "end":
            raise GdpaError(f"{self._file.name}: the line of step {step} could not be written: No space left on device")
        write(self, event, step, **facts)

    monkeypatch.setattr(logs.Log, "write", full)
    run(tmp_path, "--steps", "2", status=2)
    printed = capsys.readouterr()
    assert LAST_LINE.fullmatch(printed.out.strip().split("\n")[-1])
    assert "No space left on device" in printed.err


def test_as_many_examples_are_held_out_as_were_asked_for(tmp_path):
    run(tmp_path, "--steps", "2", "--evaluation-examples", "11")
    assert logs.lines(tmp_path / "log.jsonl")[-1]["examples"] == 11


def test_a_log_that_cannot_be_read_and_stray_files_beside_checkpoints_are_no_tracebacks(tmp_path, capsys):
    run(tmp_path, "--steps", "4")
    (tmp_path / "checkpoints" / ".step-foo").write_text("")
    run(tmp_path, "--steps", "5", "--resume")
    (tmp_path / "log.jsonl").write_bytes(b"\xff\n")
    run(tmp_path, "--steps", "6", "--resume", status=2)
    assert "expected a log that can be read" in capsys.readouterr().err


def test_tables_that_no_memory_holds_are_said(tmp_path, capsys, monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

    monkeypatch.setattr(command.models, "from_config", full)
    run(tmp_path, "--steps", "2", status=2)
    assert "--preset, --schema: expected weights and tables that cpu has memory for" in capsys.readouterr().err

"""`gdpa train` under torchrun: two ranks of gloo give the losses of one, and a run goes on on another number of ranks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import clean_env

from gdpa import cli
from gdpa.data import parquet
from gdpa.data.synthetic import SyntheticClicks
from gdpa.train import log as logs

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")

SMALL = ["train", "--device", "cpu", "--batch-size", "6", "--log-every", "2", "--checkpoint-every", "100"]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """61 examples, 7 of them held out: with a batch of 6, the last held-out batch has one, and the first rank none of it."""
    clicks = SyntheticClicks(61, median_length=5, max_length=12)
    path = tmp_path_factory.mktemp("data") / "clicks.parquet"
    parquet.write(path, [clicks.batch(0)], clicks.schema, row_group=24)
    return path


def test_two_ranks_give_the_losses_of_one_and_a_run_goes_on_on_any_number_of_them(tmp_path, data, capsys):
    """Three steps with DDP, two with FSDP, one alone: the same run as six steps of one rank, but for the order of sums. The first losses
    differ by a few float32 roundings; a step of AdamW may turn one in a gradient near zero into one of the learning rate in a
    weight, which is why the last ones are compared less closely."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    here = [*SMALL, "--data", str(data), "--out", str(together)]
    for options, expected in (
        (["--steps", "3"], ["2 ranks, ddp"]),
        (["--steps", "5", "--parallel", "fsdp", "--resume"], ["2 ranks, fsdp", "resumed after step 3 of 5"]),
    ):
        words = [*TWO_RANKS, "-m", "gdpa", *here, *options]
        done = subprocess.run(words, env=clean_env(), capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(text in done.stdout for text in expected)
        assert sum(line.startswith("NE ") for line in done.stdout.splitlines()) == 1, "the first rank alone prints"
    shards = sorted(path.name for path in (together / "checkpoints" / "step-00000005").glob("*.safetensors"))
    assert shards == ["shard-00000.safetensors", "shard-00001.safetensors"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert cli.main([*here, "--steps", "6", "--resume"]) == 0
    assert cli.main([*SMALL, "--data", str(data), "--out", str(alone), "--steps", "6"]) == 0
    torch.set_num_threads(threads)
    assert "resumed after step 5 of 6" in capsys.readouterr().out
    found, expected = logs.losses(together / "log.jsonl"), logs.losses(alone / "log.jsonl")
    assert len(found) == len(expected) == 6
    assert found[:2] == pytest.approx(expected[:2], rel=8 * torch.finfo(torch.float32).eps)
    assert found == pytest.approx(expected, rel=1e-4)
    first, second = (logs.lines(folder / "log.jsonl")[-1] for folder in (together, alone))
    assert first["ne"] == pytest.approx(second["ne"], rel=1e-3)
    assert (first["examples"], second["examples"]) == (7, 7)


def test_ctrl_c_of_torchrun_writes_one_checkpoint_of_all_ranks(tmp_path, data):
    folder, output = tmp_path / "run", tmp_path / "output"
    words = [*TWO_RANKS, "-m", "gdpa", *SMALL, "--out", str(folder), "--data", str(data), "--steps", "1000000"]
    with output.open("w") as file:
        # A session of its own: the signal goes to torchrun and both ranks, as a terminal sends it.
        process = subprocess.Popen(words, env=clean_env(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + 120
            while '"steps"' not in ((folder / "log.jsonl").read_text() if (folder / "log.jsonl").exists() else ""):
                assert process.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert "interrupted after step" in output.read_text()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    assert checkpoint.name == f"step-{state['step']:08d}"
    assert len(logs.losses(folder / "log.jsonl")) == state["step"]


FULL = """
from gdpa import cli
from gdpa.errors import GdpaError
from gdpa.train import log

write = log.Log.write

def full(self, event, step, **facts):
    if step == 4:
        raise GdpaError(f"the line of step {step} could not be written: No space left on device")
    write(self, event, step, **facts)

log.Log.write = full
cli.run()
"""


def test_a_line_of_the_log_that_cannot_be_written_ends_every_rank_with_the_reason(tmp_path, data):
    (tmp_path / "full.py").write_text(FULL)
    folder = tmp_path / "run"
    words = [*TWO_RANKS, str(tmp_path / "full.py"), *SMALL, "--data", str(data), "--out", str(folder), "--steps", "8"]
    done = subprocess.run(words, env=clean_env(), capture_output=True, text=True, timeout=180)
    assert done.returncode != 0
    assert done.stderr.count("gdpa train: error: the line of step 4 could not be written: No space left on device") == 2, (
        done.stderr
    )
    assert "Gloo" not in done.stderr and "[rank1]" not in done.stderr, done.stderr
    assert [line["step"] for line in logs.lines(folder / "log.jsonl")] == [0, 2]


def test_what_the_first_rank_cannot_read_or_write_ends_every_rank_with_the_reason(tmp_path, data):
    """The others would wait for it in vain, and end with an error of the connection."""
    folder = tmp_path / "run"
    here = [*TWO_RANKS, "-m", "gdpa", *SMALL, "--data", str(data), "--out", str(folder)]
    assert subprocess.run([*here, "--steps", "1"], env=clean_env(), capture_output=True, timeout=180).returncode == 0
    os.truncate(folder / "checkpoints" / "step-00000001" / "shard-00001.safetensors", 100)
    done = subprocess.run([*here, "--steps", "2", "--resume"], env=clean_env(), capture_output=True, text=True, timeout=180)
    assert done.returncode != 0
    assert done.stderr.count("the file was damaged") == 2, done.stderr
    assert "[rank1]" not in done.stderr, done.stderr

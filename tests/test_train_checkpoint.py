"""Checkpoints on disk: complete or absent whenever the process dies, refused where a byte is wrong."""

import json
import os
import shutil
import sys
from contextlib import suppress

import pytest
import torch

from gdpa.errors import GdpaError
from gdpa.train.checkpoint import Checkpoints, check_same, read_state
from gdpa.train.world import World

ALONE = World(torch.device("cpu"))
FILES = {"a.safetensors": 1000, "b.safetensors": 10}
# What changes the file system, as Python's audit hooks call it.
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")


def save(checkpoints, step):
    with checkpoints.writing(step, {"step": step, "config": {"a": [1, 2]}}, ALONE) as folder:
        for name, size in FILES.items():
            (folder / name).write_bytes(bytes([step % 256]) * size)


def test_what_was_written_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    save(checkpoints, 7)
    state = read_state(checkpoints.latest())
    assert (state["step"], state["config"]) == (7, {"a": [1, 2]})
    assert {name: facts["bytes"] for name, facts in state["files"].items()} == FILES
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000007"]


def test_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 100_000_000, 99_999_999):
        save(checkpoints, step)
    assert [step for step, _ in checkpoints.complete()] == [99_999_999, 100_000_000]


def killed_at(folder, operation):
    """A process that dies, without any clean-up, at the file operation of that number while it writes the second checkpoint of two
    and removes the first; None where there are fewer operations."""
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = Checkpoints(folder, keep=1)
    save(checkpoints, 1)
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event, arguments):
            nonlocal seen
            if event in OPERATIONS:
                seen += 1
                if seen == operation:
                    os._exit(9)

        sys.addaudithook(hook)
        with suppress(BaseException):
            save(checkpoints, 2)
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_killed_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    steps, operation = [], 0
    while True:
        operation += 1
        status = killed_at(tmp_path / "run", operation)
        checkpoints = Checkpoints(tmp_path / "run", keep=1)
        step = read_state(checkpoints.latest())["step"]
        steps.append(step)
        checkpoints.clean()
        assert [path.name for path in checkpoints.folder.iterdir() if path.name.startswith(".")] == []
        read_state(checkpoints.latest())
        if status == 0:
            break
        assert status == 9
        save(checkpoints, 3)  # and the next run writes its own
        assert read_state(checkpoints.latest())["step"] == 3
    assert steps == sorted(steps) and set(steps) == {1, 2}
    assert operation > 8


@pytest.mark.parametrize("name", ["a.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_checkpoint_is_refused_by_its_name_and_what_to_do_is_said(tmp_path, name, damage):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    path = checkpoints.latest() / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        # In the JSON, a digit of a number, so that it is still JSON.
        place = data.index(b"1000") if name == "state.json" else 500
        data[place] ^= 1
        path.write_bytes(data)
    elif damage == "truncated":
        path.write_bytes(data[:-5])
    else:
        path.unlink()
    with pytest.raises(GdpaError) as caught:
        read_state(checkpoints.latest())
    assert str(path) in str(caught.value)
    assert f"remove {checkpoints.latest()} to go on from the checkpoint before it" in str(caught.value)
    shutil.rmtree(checkpoints.latest())
    assert read_state(checkpoints.latest())["step"] == 1


def test_a_state_nested_past_what_json_reads_is_refused_by_its_name(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    path = checkpoints.latest() / "state.json"
    path.write_text("[" * 100_000)
    with pytest.raises(GdpaError, match=f"{path}: expected the state of a checkpoint"):
        read_state(checkpoints.latest())


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    path = checkpoints.latest() / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(GdpaError, match="expected a checkpoint of format 1, got 2"):
        read_state(checkpoints.latest())


def test_an_error_while_writing_leaves_the_checkpoints_as_they_were(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def fail():
        with checkpoints.writing(2, {}, ALONE) as folder:
            (folder / "a.safetensors").write_bytes(b"1")
            raise OSError(28, "No space left on device")

    with pytest.raises(GdpaError, match="the checkpoint of step 2 could not be written: .*No space left"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    save(checkpoints, 2)
    assert read_state(checkpoints.latest())["step"] == 2


def test_the_first_field_that_differs_is_named(tmp_path):
    theirs = {"model": {"width": 32, "events": [{"heads": 2}]}, "seed": 0}
    check_same(tmp_path, "config", theirs, {"model": {"width": 32, "events": ({"heads": 2},)}, "seed": 0})
    with pytest.raises(GdpaError, match=r"expected a checkpoint with config\.model\.width = 64, as this run has it, got 32"):
        check_same(tmp_path, "config", theirs, {"model": {"width": 64, "events": []}, "seed": 1})
    with pytest.raises(GdpaError, match=r"config\.clip = 1\.0, as this run has it, got '\(absent\)'"):
        check_same(tmp_path, "config", theirs, {**theirs, "clip": 1.0})
    with pytest.raises(GdpaError, match=r"config\.seed = '\(absent\)', as this run has it, got 0"):
        check_same(tmp_path, "config", theirs, {"model": theirs["model"]})

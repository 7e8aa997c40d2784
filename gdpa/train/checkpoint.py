"""Checkpoints on disk: complete or absent, checked when they are read, without code in them.

    FOLDER/step-00000200/state.json      what is not a tensor, the size and SHA-256 of every other file, and its own SHA-256
                        /*.safetensors   tensors (gdpa.distributed.storage)

A checkpoint is written under a name that begins with a dot, brought to the disk, and then renamed, so that a process killed at any
moment leaves only complete ones under their names. The newest `keep` stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gdpa.errors import GdpaError
from gdpa.train.world import World

FORMAT = 1
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})$")


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise GdpaError(f"keep: expected at least 1, got {keep}")
        self.folder, self.keep = folder, keep

    def complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of every checkpoint, the oldest first."""
        if not self.folder.is_dir():
            return []
        found = ((_NAME.match(entry.name), entry) for entry in self.folder.iterdir())
        return sorted((int(match[1]), entry) for match, entry in found if match)

    def latest(self) -> Path | None:
        found = self.complete()
        return found[-1][1] if found else None

    def clean(self) -> None:
        """Remove what a killed process left half written or half removed."""
        if self.folder.is_dir():
            for entry in self.folder.glob(".step-*"):
                if entry.is_dir():
                    shutil.rmtree(entry)

    def partial(self, step: int) -> Path:
        """Where a checkpoint is written before it has its name."""
        return self.folder / f".step-{step:08d}.partial"

    @contextmanager
    def writing(self, step: int, state: dict[str, Any], world: World) -> Iterator[Path]:
        """A folder for the files of a checkpoint, which all ranks write in the block; after it they and `state` (JSON) are the
        checkpoint of `step`, and the oldest ones are removed. An error on the way leaves the earlier ones as they were."""
        partial = self.partial(step)
        try:
            world.by_first(lambda: self._begin(step))
            with self._told(step):
                yield partial
            world.wait()
            world.by_first(lambda: self._finish(step, state))
        finally:
            if world.first:
                shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _told(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GdpaError(f"{self.folder}: the checkpoint of step {step} could not be written: {error}") from error

    def _begin(self, step: int) -> None:
        with self._told(step):
            partial = self.partial(step)
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)

    def _finish(self, step: int, state: dict[str, Any]) -> None:
        partial = self.partial(step)
        with self._told(step):
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            facts = {str(path.relative_to(partial)): _facts(path) for path in files}
            state = _plain({**state, "format": FORMAT, "files": facts})
            state["sha256"] = _digest(state)
            with (partial / STATE).open("w") as file:
                json.dump(state, file, indent=1)
            for path in (*files, partial / STATE, partial):
                _sync(path)
            os.rename(partial, self.folder / f"step-{step:08d}")
            _sync(self.folder)
            for _, old in self.complete()[: -self.keep]:
                self._discard(old)

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint: first its name, so that none is ever there in part."""
        hidden = path.with_name(f".{path.name}.old")
        if hidden.exists():
            shutil.rmtree(hidden)
        os.rename(path, hidden)
        shutil.rmtree(hidden)


def read_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint whose every byte was checked; a GdpaError that names the file where one is wrong."""
    advice = f"remove {path} to go on from the checkpoint before it"
    file = path / STATE
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        recorded, number = state.pop("sha256"), state["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise GdpaError(
            f"{file}: expected the state of a checkpoint, got a file that cannot be read ({error!r}); {advice}"
        ) from error
    if number != FORMAT:
        raise GdpaError(f"{file}: expected a checkpoint of format {FORMAT}, got {number!r}")
    if recorded != _digest(state):
        raise GdpaError(f"{file}: expected the SHA-256 {recorded}, got {_digest(state)}: the file was damaged; {advice}")
    for name, expected in state["files"].items():
        try:
            found = _facts(path / name)
        except OSError as error:
            raise GdpaError(f"{path / name}: expected a file of {expected['bytes']} bytes, got none ({error}); {advice}") from error
        if found != expected:
            raise GdpaError(
                f"{path / name}: expected {expected['bytes']} bytes of SHA-256 {expected['sha256']}, got {found['bytes']} of "
                f"{found['sha256']}: the file was damaged; {advice}"
            )
    return state


def check_same(path: Path, name: str, theirs: Any, ours: Any) -> None:
    """Raise GdpaError at the first field in which a checkpoint differs from the run that is to go on from it."""
    difference = _difference(name, theirs, _plain(ours))
    if difference is not None:
        field, their_value, our_value = difference
        raise GdpaError(f"{path}: expected a checkpoint with {field} = {our_value!r}, as this run has it, got {their_value!r}")


def _difference(name: str, theirs: Any, ours: Any) -> tuple[str, Any, Any] | None:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in dict.fromkeys([*ours, *theirs]):
            found = _difference(f"{name}.{key}", theirs.get(key, "(absent)"), ours.get(key, "(absent)"))
            if found is not None:
                return found
        return None
    return None if theirs == ours else (name, theirs, ours)


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _plain(value: Any) -> Any:
    """As it comes back from JSON: tuples as lists, keys as text."""
    return json.loads(json.dumps(value))


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

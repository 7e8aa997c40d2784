"""Files of results: each appears whole under its name, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gdpa.errors import GdpaError


def check_target(argument: str, path: Path) -> Path:
    """The path, if a file can be put there: a new one, or in the place of another, but not of a pipe or a device."""
    try:
        taken = path.exists() and not path.is_file()
        folder = path.resolve().parent
    except OSError as error:  # such as a name that is too long
        raise GdpaError(f"{argument}: expected the name of a file, got {path}: {error.strerror}") from None
    if taken or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise GdpaError(f"{argument}: expected a file in a folder that can be written, got {path}")
    if path.exists() and not os.access(path, os.W_OK):  # it would be replaced all the same
        raise GdpaError(f"{argument}: expected a file that can be written, got {path}, which is read-only")
    return path


def why_unwritten(write: Callable[[], None]) -> GdpaError | None:
    """None once the file is written, or why it is not: for a run whose figures, which it prints, are worth more than their file."""
    try:
        write()
    except GdpaError as error:
        return error
    return None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, whose file takes the place of `path` at the end of the block: one that is killed or fails before leaves `path`
    as it was. A symbolic link stays one."""
    check_target(str(path), path)
    whole = path.resolve()
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, whole)
    except OSError as error:
        raise GdpaError(f"{path}: could not be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)

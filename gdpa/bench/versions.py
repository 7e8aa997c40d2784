"""Another version of gdpa beside this one, in the same process, so that both are timed in the same rounds.

A process has one package of a name and one torch operator of a name. So the other version's modules are copied to a temporary folder in
which they are called something else, wherever the word stands: imports, operators, the folder of generated code in the user's cache,
which stays.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import gdpa
from gdpa.bench import machine
from gdpa.bench.cases import Workload
from gdpa.bench.providers import ELSEWHERE, Gdpa
from gdpa.errors import GdpaError

NAME = "gdpa"
_WORD = re.compile(rf"\b{NAME}\b")


@dataclass(frozen=True)
class Version:
    """`package` is what it is called here, `root` the folder to import it from, `commit` its own, where that is known."""

    package: str
    root: Path
    commit: str | None

    def module(self, name: str = "") -> ModuleType:
        """The module that is called gdpa, or gdpa.<name>, in that version."""
        if str(self.root) not in sys.path:
            sys.path.append(str(self.root))
        return importlib.import_module(f"{self.package}.{name}" if name else self.package)


class Elsewhere(Gdpa):
    """A backend of another version. The case's tensors, the gate and the clock are this version's."""

    def __init__(self, backend: str, where: str) -> None:
        super().__init__(backend)
        self.name += f"{ELSEWHERE}{where}"
        self.version = version(where)
        self.package = self.version.module()
        self.note = None if self.version.commit is None else f"commit {self.version.commit[:7]}{self.version.commit[40:]}"

    def _refusal(self, workload: Workload) -> str | None:
        """By its public functions: what lies behind them may be another's than this version's."""
        q, k, v, *offsets = workload.inputs[:5]
        try:
            options = {"activation": workload.activation, "causal": workload.case.causal, "backend": self.backend}
            self.package.explain(q, k, v, *offsets, **options)
        except (self.package.BackendUnavailable, self.package.UnsupportedActivation) as error:
            return str(error)
        return None


@cache
def version(where: str) -> Version:
    """Of a folder that has a checkout of gdpa in it, or of a commit of the checkout that this gdpa is."""
    folder = Path(where).expanduser()
    sources: dict[Path, str]
    if folder.is_dir():
        sources = _of_folder(folder)
        commit = machine.commit(folder)
    else:
        sources, commit = _of_commit(where)
    # The same sources get the same name in every process, so that caches of compiled kernels serve.
    digest = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in sorted(sources.items())).encode()).hexdigest()
    package = f"{NAME}_{digest[:8]}"
    root = Path(tempfile.mkdtemp(prefix=f"{package}-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for path, text in sources.items():
        copy = root / package / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_WORD.sub(package, text))
    return Version(package, root, commit)


def _of_folder(folder: Path) -> dict[Path, str]:
    package = folder / NAME
    if not (package / "__init__.py").is_file():
        raise GdpaError(
            f"--provider: expected a checkout of gdpa or a commit after the @, got the folder {folder}, which has no {NAME}"
        )
    return {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}


def _of_commit(name: str) -> tuple[dict[Path, str], str]:
    root = Path(gdpa.__file__).parent.parent

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=60, check=True).stdout

    try:
        commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").decode().strip()
        archive = git("archive", "--format=tar", commit, "--", NAME)
    except (OSError, subprocess.SubprocessError):
        raise GdpaError(
            f"--provider: expected a folder with a checkout of gdpa, or a commit of {root}, after the @, got {name!r}"
        ) from None
    sources = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            file = files.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                sources[Path(member.name).relative_to(NAME)] = file.read().decode()
    return sources, commit

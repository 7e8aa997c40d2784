"""Another version of gdpa as a provider: its own code in this process, held to the same gate and the same clock."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gdpa
from gdpa import cli
from gdpa.bench import providers, versions, warm
from gdpa.bench.cases import GPU_SIZE, Case, Size, build
from gdpa.errors import GdpaError

ROOT = Path(gdpa.__file__).parent.parent
ARGUMENTS = ["bench", "--case", "self-20-jag", "--batch", "3", "--heads", "2", "--dim", "8", "--seconds", "0.2", "--device", "cpu"]


@pytest.fixture
def changed(tmp_path):
    """A checkout of gdpa that runs `line` first in every `attention_varlen`."""

    def change(line):
        root = tmp_path / "other"
        shutil.copytree(ROOT / "gdpa", root / "gdpa", ignore=shutil.ignore_patterns("__pycache__"))
        file = root / "gdpa" / "api.py"
        text = file.read_text()
        start = text.index("def attention_varlen(")
        place = text.index('    """', text.index('"""', start) + 3) + len('    """')
        file.write_text(f"{text[:place]}\n    {line}{text[place:]}")
        return root

    return change


def rows_of(tmp_path, *names):
    path = tmp_path / "rows.json"
    status = cli.main([*ARGUMENTS, "--mode", "forward", "--provider", ",".join(names), "--json", str(path)])
    return status, {row["provider"]: row for row in json.loads(path.read_text())["rows"]}


def test_a_slower_version_is_slower_in_the_same_run(tmp_path, changed, capsys):
    other = f"gdpa-cpu@{changed('import time; time.sleep(0.05)')}"
    status, rows = rows_of(tmp_path, other, "gdpa-cpu")
    assert status == 0
    assert rows[other]["ms"] > 50 > rows["gdpa-cpu"]["ms"]
    assert rows[other]["error"] == rows["gdpa-cpu"]["error"]
    printed = capsys.readouterr().out
    assert "vs here" in printed and f"{rows['gdpa-cpu']['ms'] / rows[other]['ms']:.3f}x" in printed


def test_a_wrong_version_is_wrong_and_this_one_is_not(tmp_path, changed):
    other = f"gdpa-cpu@{changed('v = 2 * v')}"
    status, rows = rows_of(tmp_path, "gdpa-cpu", other)
    assert status == 1
    assert rows[other]["note"].startswith("wrong, not timed") and rows[other]["ms"] is None
    assert rows["gdpa-cpu"]["ms"] is not None


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_commit_is_a_version_with_operators_of_its_own():
    other = providers.by_name("gdpa-reference@HEAD")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert other.note == f"commit {head[:7]}"
    package = other.package
    assert package.__name__ == other.version.package != "gdpa"
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.profiler.profile() as profile:
        package.attention(q, q, q).sum().backward()
    ran = {event.name for event in profile.events()}
    assert {f"{package.__name__}::forward", f"{package.__name__}::backward"} <= ran
    assert "gdpa::forward" not in ran
    assert (
        other.reason_against(build(Case.named("self-6", Size(1, 1, 8)), "gelu", torch.float32, torch.device("cpu")), True) is None
    )


def test_a_backend_that_the_other_version_cannot_run_says_why(monkeypatch):
    other = providers.by_name(f"gdpa-hopper@{ROOT}")
    workload = build(Case.named("self-6", Size(1, 1, 64)), "gelu", torch.float32, torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert other.reason_against(workload, True).startswith("backend: 'hopper' cannot run this call: ")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert other.reason_against(workload, True).startswith("TRITON_INTERPRET=1: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gdpa-cpu@no-such-commit",
            "expected a folder with a checkout of gdpa, or a commit of .*, after the @, got 'no-such-commit'",
        ),
        ("gdpa-cpu@--output=x", "got '--output=x'"),
        ("gdpa-cpu@{folder}", "expected a checkout of gdpa or a commit after the @, got the folder .*, which has no gdpa"),
        ("eager@HEAD", "expected one of gdpa's backends before the @, got 'eager@HEAD'"),
        ("gdpa-cpp@HEAD", "did you mean 'gdpa-cpu'"),
    ],
)
def test_what_is_no_version_is_refused(tmp_path, name, message):
    with pytest.raises(GdpaError, match=message):
        providers.chosen([name.format(folder=tmp_path)], gpu=False)


def test_versions_stand_behind_the_backend_they_are_of():
    names = ["eager", "gdpa-cpu@b", "gdpa-cpu@a", "strange", "gdpa-cpu", "eager", "gdpa-hopper@a"]
    assert providers.in_order(names) == ["gdpa-hopper@a", "gdpa-cpu", "gdpa-cpu@b", "gdpa-cpu@a", "eager", "strange"]


def test_the_kernels_of_a_version_are_compiled_ahead_by_its_own_code(monkeypatch):
    other = versions.version(str(ROOT))
    started = []

    class Process:
        returncode = 0

        def __init__(self, arguments, env, **_):
            started.append((arguments, env["PYTHONPATH"].split(":")[0]))

        def communicate(self, timeout):
            return "", ""

    monkeypatch.setattr(warm.subprocess, "Popen", Process)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cases = [Case.named("self-8-jag", GPU_SIZE)]
    assert warm.compile_kernels([f"gdpa-hopper@{ROOT}", "gdpa-cpu"], cases, ["silu"], torch.bfloat16) is None
    assert [root for _, root in started] == 2 * [str(other.root)]
    for arguments, _ in started:
        assert arguments[:3] == [sys.executable, "-m", f"{other.package}.bench.warm"]
        # A provider as the renamed modules call it.
        assert json.loads(arguments[3])["provider"] in other.module("bench.warm").LAUNCHERS


def test_a_kernel_compiles_under_the_other_name(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    for name in ("GDPA_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    provider = f"{versions.version(str(ROOT)).package}-hopper"
    facts = {"form": "packed", "activation": "silu", "dim": 64, "heads": 2, "dtype": "bfloat16", "arch": 90}
    process = warm._start(
        f"gdpa-hopper@{ROOT}", json.dumps({"provider": provider, **facts, "backward": False, "causal": True, "keys": 0})
    )
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert list((tmp_path / "TRITON_CACHE_DIR").rglob("*.cubin"))

"""The hopper backend's kernels, as the compiler makes them, run on a simulator (tests/simulator): right results, and no races, deadlocks
or addresses outside of tensors, whatever the order in which things happen.

`GDPA_FUZZ=N pytest tests/test_hopper_simulated.py` draws N new sets of options; a report's index draws it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import clean_env, needs_triton
from simulator import assembly
from simulator.races import READ, WRITE, Box, Epoch, Fault, History
from test_compile_kernels import NEWEST, NEWEST_VERSION

pytestmark = needs_triton

FUZZ = int(os.environ.get("GDPA_FUZZ", "0"))
SHARDS = 6
OPTIONS_OF_A_SHARD = -(-FUZZ // SHARDS) or 2


def reports(module: str, *arguments: Any, newest: bool = False) -> list[dict[str, Any]]:
    env = clean_env()
    env["PYTHONPATH"] = f"{Path(__file__).parent}:{env['PYTHONPATH']}"
    if newest:
        if not (NEWEST / "triton").exists():
            pytest.skip(f"Triton {NEWEST_VERSION} is not in .venv/triton-newest (make test installs it)")
        env["PYTHONPATH"] = f"{NEWEST}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", f"simulator.{module}", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_problems(shard):
    first = shard * 1000 if FUZZ == 0 else int.from_bytes(os.urandom(4), "little")
    found = reports("problems", first, OPTIONS_OF_A_SHARD)
    assert len(found) == 4 * OPTIONS_OF_A_SHARD
    assert [x for x in found if "error" in x] == []
    launched = Counter(name for x in found for name in x["launches"])
    assert launched["forward_kernel"] > len(found) // 2
    assert launched["backward_kernel"] > 0


@pytest.mark.parametrize("newest", [False, True], ids=["installed Triton", f"Triton {NEWEST_VERSION}"])
def test_problems_that_once_failed(newest):
    found = reports("problems", "known", newest=newest)
    assert [x for x in found if "error" in x] == []
    assert all(x["launches"][:2] == ["forward_kernel", "backward_kernel"] for x in found)


def test_random_problems_of_the_newest_compiler():
    found = reports("problems", 9000, OPTIONS_OF_A_SHARD, newest=True)
    assert len(found) == 4 * OPTIONS_OF_A_SHARD
    assert [x for x in found if "error" in x] == []


@pytest.mark.parametrize(("kernel", "every"), [("forward_kernel", 2), ("backward_kernel", 4)])
def test_a_kernel_that_lacks_a_synchronisation_is_found_out(kernel, every):
    """Of all waits, arrivals and fences that are left out one at a time, but those that others imply: a consumer's wait for a copy that
    the one before has waited for, when it takes its turn after that."""
    found = reports("mutations", kernel, every, 0)
    assert len(found) > 25
    missed = [x["what"] for x in found if x["found"] is None]
    assert len(missed) <= len(found) // 7, missed


class TestTheHistoryOfAccesses:
    """Two actors, 0 and 1; a clock says up to which of its counts each is known."""

    @staticmethod
    def history(epoch: Epoch, kind: str = WRITE, fence: Epoch | None = None) -> History:
        history = History("memory")
        history.note(kind, Box((0, 64), (0, 8)), [3, 0], epoch, "one", fence, by_threads=fence is not None)
        return history

    def test_what_is_known_to_be_over_may_be_followed(self):
        self.history(Epoch(0, 3)).note(WRITE, Box((0, 64), (0, 8)), [3, 1], Epoch(1, 1), "another")

    @pytest.mark.parametrize(("before", "after"), [(WRITE, WRITE), (WRITE, READ), (READ, WRITE)])
    def test_a_race(self, before, after):
        with pytest.raises(Fault, match=r"race on memory: another .* while one .* is not known to be over"):
            self.history(Epoch(0, 3), before).note(after, Box((63, 70), (7, 9)), [2, 1], Epoch(1, 1), "another")

    def test_what_is_under_way_conflicts_with_everything(self):
        with pytest.raises(Fault, match="is still under way"):
            self.history(Epoch()).note(READ, Box((0, 1), (0, 1)), [9, 9], Epoch(1, 1), "another")

    def test_reads_and_other_places_do_not_conflict(self):
        self.history(Epoch(0, 3), READ).note(READ, Box((0, 64), (0, 8)), [0, 1], Epoch(1, 1), "another")
        self.history(Epoch(0, 3)).note(WRITE, Box((64, 65), (0, 8)), [0, 1], Epoch(1, 1), "another")
        self.history(Epoch(0, 3)).note(WRITE, Box((0, 64), (8, 9)), [0, 1], Epoch(1, 1), "another")

    def test_threads_writes_need_a_fence_that_the_copy_engine_comes_after(self):
        place = Box((0, 64), (0, 8))
        for fence in (Epoch(), Epoch(0, 4)):
            with pytest.raises(Fault, match="without a fence"):
                self.history(Epoch(0, 3), fence=fence).note(READ, place, [3, 1], Epoch(1, 1), "a copy")
        self.history(Epoch(0, 3), fence=Epoch(0, 3)).note(READ, place, [3, 1], Epoch(1, 1), "a copy")
        self.history(Epoch(0, 3), fence=Epoch()).note(READ, place, [3, 1], Epoch(1, 1), "a load", by_threads=True)


class TestInlineAssembly:
    @pytest.mark.parametrize(("name", "dtype"), assembly.DTYPES.items())
    def test_packed_instructions_round_once(self, name, dtype):
        """s * t + s of neighbouring elements, of which the first is in the low half."""
        s, t = torch.randn(2, 4, 64, dtype=torch.float32)
        text = ("{ .reg .b32 s, t; cvt.rn.PAIR.f32 s, $2, $1; cvt.rn.PAIR.f32 t, $4, $3; fma.rn.PAIR $0, s, t, s; }").replace(
            "PAIR", f"{name}x2"
        )
        (got,) = assembly.run(text, 2, [s, t], [dtype])
        x, y = s.to(dtype).double(), t.to(dtype).double()
        assert torch.equal(got, (x * y + x).to(dtype))

    def test_halves_come_together(self):
        x = torch.tensor([1.0 + 2**-9])
        text = "{ .reg .b16 half; .reg .f32 first; cvt.rn.bf16.f32 half, $1; mov.b32 first, {0, half}; sub.f32 $0, $1, first; }"
        (got,) = assembly.run(text, 1, [x], [torch.float32])
        assert got == 2**-9

    def test_an_instruction_that_is_not_known_is_a_fault(self):
        with pytest.raises(Fault, match="does not know the instruction 'sin.approx.f32"):
            assembly.run("sin.approx.f32 $0, $1;", 1, [torch.ones(1)], [torch.float32])

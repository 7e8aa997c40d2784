"""The hopper backend's kernels, as the compiler makes them, run on a simulator (tests/simulator): right results, and no races, deadlocks
or addresses outside of tensors, whatever the order in which things happen.

`GDPA_FUZZ=N pytest tests/test_hopper_simulated.py` draws N new sets of options; a report's index draws it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import clean_env, needs_triton
from simulator import assembly
from simulator.machine import Descriptor, Machine, Partition, Program, plain
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
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_problems(shard):
    first = shard * 1000 if FUZZ == 0 else int.from_bytes(os.urandom(4), "little")
    found = reports("problems", first, OPTIONS_OF_A_SHARD)
    assert len(found) == 4 * OPTIONS_OF_A_SHARD
    assert [x for x in found if "error" in x] == []
    assert sum("forward_kernel" in x["launches"] for x in found) > len(found) // 2


@pytest.mark.parametrize("newest", [False, True], ids=["installed Triton", f"Triton {NEWEST_VERSION}"])
def test_problems_that_once_failed(newest):
    found = reports("problems", "known", newest=newest)
    assert [x for x in found if "error" in x] == []
    assert all(x["launches"][:2] == ["forward_kernel", "backward_kernel"] for x in found)


def test_random_problems_of_the_newest_compiler():
    found = reports("problems", 9000, OPTIONS_OF_A_SHARD, newest=True)
    assert len(found) == 4 * OPTIONS_OF_A_SHARD
    assert [x for x in found if "error" in x] == []


def test_every_form_of_the_kernels():
    found = reports("problems", "forms")
    assert [x for x in found if "error" in x] == []
    kernels = [(name, form) for x in found for name, form in zip(x["launches"], x["forms"], strict=True)]
    seen = {name: {(key, form[key]) for kernel, form in kernels if kernel == name for key in form} for name, _ in kernels}
    both = (False, True)
    expected: dict[str, dict[str, Any]] = {
        "forward_kernel": {"CONSUMERS": (2, 3, 4), "ONE_LOOP": both, "WINDOW": (0, 1, 2), "EARLY": both},
        "backward_kernel": {
            "DQ": range(4),
            "DV": range(3),
            "PAIRED": both,
            "TOGETHER": both,
            "CAUSAL": both,
            "ORDERED": both,
            "ROWS": (64, 128),
            "IN_ORDER": both,
            "WITH_DK": both,
            "FOLD": both,
            "SCALE_OUTSIDE": both,
        },
    }
    for kernel, values in expected.items():
        values |= {
            "MASK_TAIL": both,
            "HAS_LIST": both,
            "Q_SHARED": both,
            "SCALE_PER_SEQUENCE": both,
            "D": (64, 128),
            "GROUP": (1, 2),
        }
        missing = {(key, value) for key, choices in values.items() for value in choices} - seen[kernel]
        assert not missing, kernel


# What of a kernel may be left out: the device comes to it another way. A consumer takes its turn after one that has waited for the same
# copy; a product's result is used behind a later wait; a warp has seen a counter, and fenced, for its other half.
IMPLIED = ("wait_barrier", "warp_group_dot_wait", "fence.proxy.async.global", "gpu.barrier", "ttg.barrier")


@pytest.mark.parametrize(
    ("kernel", "every"),
    [
        ("forward of four", 7),
        ("forward of three", 7),
        ("forward of two", 5),
        ("backward", 8),
        ("backward of long steps", 12),
        ("backward through dq", 12),
        ("backward, causal", 12),
        ("backward in a fixed order", 12),
    ],
)
def test_a_kernel_that_lacks_a_synchronisation_is_found_out(kernel, every):
    """All waits, arrivals and fences, left out one at a time, but those that others imply."""
    found = reports("mutations", kernel, every, 0)
    assert len(found) >= 10
    missed = [x["what"] for x in found if x["found"] is None]
    assert len(missed) <= len(found) // 4, missed
    # Of long steps, a consumer's dS has the fence of the dQ that it hands over before the other one's turn.
    implied = (*IMPLIED, "fence_async_shared") if kernel == "backward of long steps" else IMPLIED
    assert [x for x in missed if not any(kind in x for kind in implied)] == []


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


class TestTheMachine:
    """Partitions of one program, written by hand; whatever the order in which they go on."""

    def setup_method(self) -> None:
        self.machine = Machine(0, 1)
        self.program = Program(self.machine, 0, (0, 0, 0), (1, 1, 1))
        self.tile = self.program.allocate((16, 8), torch.float32, "tile")
        (self.barrier,) = self.program.new_barriers(1, "barrier")
        self.barrier.init(1)
        self.values = torch.arange(128.0).view(16, 8)
        self.tensor = torch.zeros(16, 8)
        self.machine.tensors.append(self.tensor)

    def run(self, *functions: Callable[[Partition], Any], warps: int = 4, seed: int = 0) -> None:
        self.machine.random.seed(seed)
        for i, function in enumerate(functions):
            partition = Partition(self.program, f"partition {i}", warps, self.machine.blank())
            self.machine.start(partition, function(partition))
        self.machine.run()

    def descriptor(self) -> Descriptor:
        return Descriptor(self.machine, self.tensor, [1, 1, 16, 8], [0, 0, 8, 1], [1, 1, 16, 8])

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("way", ["bar", "mbarrier"])
    def test_a_store_that_another_partition_waits_for(self, way, seed):
        def writes(here):
            here.store(self.values, self.tile)
            yield from here.arrive(6, 256) if way == "bar" else here.arrive_at(self.barrier, 1)

        def reads(here):
            yield from here.join(6, 256) if way == "bar" else here.wait(self.barrier, 0)
            assert torch.equal(here.load(self.tile), self.values)

        self.run(writes, reads, seed=seed)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_store_that_nobody_waits_for(self, seed):
        def writes(here):
            yield None
            here.store(self.values, self.tile)

        def reads(here):
            yield None
            here.load(self.tile)

        with pytest.raises(Fault, match="race on tile of program 0"):
            self.run(writes, reads, seed=seed)

    def test_what_comes_after_the_start_of_partitions_is_not_known_to_them(self):
        def child(here):
            yield None
            here.load(self.tile)

        def parent(here):
            here.store(self.values, self.tile)
            others = here.specialize([(child, 4, "child")], ())
            here.store(self.values, self.tile)
            yield from here.gather(others)

        with pytest.raises(Fault, match="race on tile"):
            self.run(parent)

    @pytest.mark.parametrize(
        ("fenced", "met", "fault"), [(True, True, None), (False, True, "without a fence"), (True, False, "other warps of it")]
    )
    def test_a_copy_out_of_what_threads_wrote(self, fenced, met, fault):
        def copies(here):
            here.store(self.values, self.tile)
            if fenced:
                here.fence()
            if met:
                here.meet()
            yield from here.copy_out(self.descriptor(), [0, 0, 0, 0], self.tile, False)
            here.wait_stores(0)

        if fault is None:
            self.run(copies)
            assert torch.equal(self.tensor, self.values)
        else:
            with pytest.raises(Fault, match=fault):
                self.run(copies)

    @pytest.mark.parametrize("waits", [True, False])
    def test_memory_that_a_copy_reads_is_written_anew(self, waits):
        def copies(here):
            here.store(self.values, self.tile)
            here.fence()
            here.meet()
            yield from here.copy_out(self.descriptor(), [0, 0, 0, 0], self.tile, False)
            if waits:
                here.wait_stores(0)
                here.meet()
            here.store(self.values + 1, self.tile)
            here.wait_stores(0)

        if waits:
            self.run(copies)
        else:
            with pytest.raises(Fault, match="is still under way"):
                self.run(copies)

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_copy_into_shared_memory(self, waits):
        def copies(here):
            self.tensor.copy_(self.values)
            yield from here.arrive_at(self.barrier, 1, 16 * 8 * 4)
            yield from here.copy_in(self.descriptor(), [0, 0, -2, 0], self.barrier, self.tile)

        def reads(here):
            if waits:
                yield from here.wait(self.barrier, 0)
            yield None
            assert torch.equal(here.load(self.tile)[2:], self.values[:-2])

        if waits:
            self.run(copies, reads, warps=1)
        else:
            with pytest.raises(Fault, match="race on tile"):
                self.run(copies, reads, warps=1)

    @pytest.mark.parametrize(("first", "second", "announced", "fault"), [
        (True, True, False, None),
        (False, True, True, None),
        (False, True, False, "race on tensor"),
        (False, False, False, "race on tensor"),
    ])  # fmt: skip
    def test_additions_go_in_any_order_and_stores_do_not(self, first, second, announced, fault):
        """`announced`: a counter says that the first one has arrived."""
        counter = torch.zeros(1, dtype=torch.int32)
        self.machine.tensors.append(counter)
        other = self.program.allocate((16, 8), torch.float32, "other")

        def gives(adds, tile, is_first):
            def partition(here):
                here.store(self.values, tile)
                here.fence()
                if announced and not is_first:
                    yield from here.await_count(counter.data_ptr(), 1)
                    here.see_what_was_counted()
                yield from here.copy_out(self.descriptor(), [0, 0, 0, 0], tile, adds)
                if announced and is_first:
                    yield from here.stores_arrive()
                    yield from here.count_up(counter.data_ptr())
                here.wait_stores(0)

            return partition

        def both() -> None:
            self.run(gives(first, self.tile, True), gives(second, other, False), warps=1)

        if fault is None:
            both()
            assert torch.equal(self.tensor, 2 * self.values)
        else:
            with pytest.raises(Fault, match=fault):
                both()

    def test_barriers_that_count_wrong(self):
        def arrives(here):
            yield from here.arrive_at(self.barrier, 2)

        with pytest.raises(Fault, match="has 2 arrivals of 1"):
            self.run(arrives)

        def joins(threads):
            def partition(here):
                yield from here.join(6, threads)

            return partition

        with pytest.raises(Fault, match="for 256 threads, others for 384"):
            self.run(joins(384), joins(256), joins(256))

    def test_a_deadlock_says_who_waits_where(self):
        def waits(here):
            yield from here.wait(self.barrier, 0)

        with pytest.raises(Fault, match=r"deadlock: partition 0 of program 0 waits at 'yield from here.wait"):
            self.run(waits)

    def test_a_product_before_its_wait_and_without_one(self):
        def multiplies(here):
            product = here.multiply(self.values, self.values.T, torch.zeros(16, 16), False, True)
            yield None
            with pytest.raises(Fault, match="before it is waited for"):
                plain(product)

        with pytest.raises(Fault, match="leaves while products are under way"):
            self.run(multiplies)

    def test_an_address_outside_of_a_tensor(self):
        beyond = Descriptor(self.machine, self.tensor, [1, 1, 17, 8], [0, 0, 8, 1], [1, 1, 16, 8])
        with pytest.raises(Fault, match="elements 8 to 136 of a tensor of 128"):
            beyond.box([0, 0, 1, 0])


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

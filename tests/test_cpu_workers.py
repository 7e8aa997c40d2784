"""The cpu backend's workers and the memory they keep: the bits of one thread, other threads, inference mode, errors, forks."""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import check, leaves, make_case, run, spy
from torch import Tensor

from gdpa.backends import cpu, cpu_plan, cpu_tensors, cpu_whole


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch):
    """Two workers, whatever the work."""
    monkeypatch.setattr(cpu_plan, "LEAST_SCORES_FOR_WORKERS", 0)
    monkeypatch.setattr(cpu_plan, "LEAST_SCORES_IN_ALL", 0)
    monkeypatch.setattr(cpu_plan, "UNEVEN", float("inf"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["packed", "dense", "dense-key", "shared-query"])
@pytest.mark.usefixtures("small_tiles", "two_threads")
def test_workers_give_the_bits_of_one_thread(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(form, q_lengths=(40, 65, 3, 17), k_lengths=(65, 2, 30, 40), heads=8, kv_heads=4, causal=True, seed=14)
    submitted = spy(monkeypatch, cpu_plan, "_workers")
    shared = check(case, "cpu")
    assert submitted, "no worker ran"
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    for a, b in zip(run(case, "cpu"), shared, strict=True):
        assert a is not None
        assert torch.equal(a, b)


@pytest.mark.usefixtures("two_threads")
def test_workers_on_whole_sequences_give_the_bits_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_whole, "MOST_SCORES", 2 * 65 * 65)
    case = make_case(q_lengths=(40, 65, 3, 17), k_lengths=(65, 2, 65, 40), heads=8, seed=26)
    calls, submitted = spy(monkeypatch, cpu_whole, "_Call"), spy(monkeypatch, cpu_plan, "_workers")
    shared = check(case, "cpu")
    assert len(calls) == 2
    assert submitted, "no worker ran"
    torch.set_num_threads(1)
    for a, b in zip(run(case, "cpu"), shared, strict=True):
        assert a is not None
        assert torch.equal(a, b)


@pytest.mark.usefixtures("two_threads")
def test_workers_serve_inference_mode_and_leave_new_threads_their_number() -> None:
    case = make_case(q_lengths=(40, 65, 3), heads=4, seed=15)
    right = case.call(*case.inputs[:3], "cpu")
    with torch.inference_mode():
        assert torch.equal(case.call(*case.inputs[:3], "cpu"), right)
    assert cpu_plan._workers(2).submit(torch.get_num_threads).result() == 1
    with multiprocessing.pool.ThreadPool(1) as fresh:
        assert fresh.apply(torch.get_num_threads) == 2
    q, k, v = leaves(case.inputs)
    assert case.call(q, k, v, "cpu").requires_grad


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_worker_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **keywords: Any) -> None:
        raise MemoryError("no room for the tile")

    case = make_case(q_lengths=(40, 65, 3), heads=4, seed=16)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_whole, "product", fails)
        with pytest.raises(MemoryError, match="no room for the tile"):
            case.call(*case.inputs[:3], "cpu")
    check(case, "cpu")


@pytest.mark.usefixtures("two_threads")
def test_a_call_that_wants_more_workers_does_not_close_the_pool_under_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "_pool", None)
    monkeypatch.setattr(cpu_plan, "_pool_size", 0)
    case = make_case(q_lengths=(40, 65, 3), heads=4, seed=16)
    cpu_plan._workers(2)
    submit = ThreadPoolExecutor.submit
    others: list[threading.Thread] = []

    def meets_another(self: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
        if not others:
            others.append(threading.Thread(target=cpu_plan._workers, args=(3,)))
            others[0].start()
            others[0].join(0.5)  # it ends at once, or waits for this call
        return submit(self, function, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", meets_another)
        check(case, "cpu")
    others[0].join()
    assert cpu_plan._pool_size == 3


@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_makes_workers_of_its_own() -> None:
    case = make_case(q_lengths=(40, 65, 3), heads=4, seed=17)
    cpu_plan._workers(2)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)  # as a DataLoader's worker does: OpenMP's threads do not survive a fork
        sender.send(case.call(*case.inputs[:3], "cpu").sum().item())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiver.poll(30), "the child hangs"
    assert receiver.recv() == case.call(*case.inputs[:3], "cpu").sum().item()
    process.join()


@pytest.mark.parametrize("late", ["threading.Thread(target=late).start()", "atexit.register(attend)"], ids=["thread", "atexit"])
def test_a_call_after_the_main_thread_has_ended_does_without_workers(late: str) -> None:
    """By then no thread can be started any more."""
    script = f"""
import atexit, threading, torch, gdpa
torch.set_num_threads(2)
q = torch.randn(16, 512, 4, 32)
expected = gdpa.attention(q, q, q)

def attend():
    print("same" if torch.equal(gdpa.attention(q, q, q), expected) else "not the same")

def late():
    threading.main_thread().join()
    attend()

{late}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("same\n", 0), done.stderr


def test_scratch_memory_is_kept_for_the_next_call_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("dense", q_lengths=(64,) * 3, k_lengths=(64,) * 3, heads=2, dtype=torch.bfloat16, seed=22)

    def kept() -> dict[Any, int]:
        return {key: buffer.data_ptr() for key, buffer in cpu_tensors._kept.buffers.items()}

    def call() -> Tensor:
        return cpu.forward(case.problem, *case.inputs[:5], None)

    with multiprocessing.pool.ThreadPool(1) as fresh:  # a thread's memory is its own
        with monkeypatch.context() as patch:
            patch.setattr(cpu_tensors, "KEPT_BYTES", 0)
            fresh.apply(call)
            assert not fresh.apply(kept)

        def call_in_inference_mode() -> Tensor:
            with torch.inference_mode():
                return call()

        right = fresh.apply(call_in_inference_mode)
        first = fresh.apply(kept)
        assert first
        # Memory from inference mode serves outside it.
        assert torch.equal(fresh.apply(call), right)
        assert fresh.apply(kept) == first
        assert not set(first.values()) & set(kept().values())

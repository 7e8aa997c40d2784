"""Run a function on several gloo ranks of this machine, each a process of its own, and collect what they return."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")

# A server that has imported torch forks the ranks, which saves each the seconds of importing it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "gdpa.models", "gdpa.distributed.parallel"])


class Died(AssertionError):
    """A rank was ended by a signal, with no exception of its own. In one run of all tests a rank was gone without a traceback, and two
    others found its connections closed; how it ended was not recorded then, and sixteen repeats of that test went well."""


def run_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2, timeout: float = 120) -> list[Any]:
    """[function(rank, *arguments) of each rank], inside a process group of them all.

    A rank that raises fails the test with its traceback; so do ranks that have not finished after `timeout` seconds, which are killed, and
    ranks that die of a signal twice in a row.
    """
    try:
        return _run_ranks(function, arguments, ranks, timeout)
    except Died as error:
        warnings.warn(f"{function.__name__}, tried again: {error}", stacklevel=2)
        return _run_ranks(function, arguments, ranks, timeout)


def _run_ranks(function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, timeout: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes = [_context.Process(target=_rank, args=(rank, ranks, folder, function, arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        try:
            # The first to fail ends the wait: the others would stay in a collective.
            while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
                if time.monotonic() > end:
                    raise TimeoutError(f"{function.__name__}: {ranks} ranks had not finished after {timeout} s")
                time.sleep(0.02)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        errors = "\n".join(path.read_text() for path in sorted(Path(folder).glob("error-*")))
        died = {rank: code for rank, code in enumerate(codes) if code is not None and code < 0}
        if died:
            stacks = "\n".join(path.read_text() for path in sorted(Path(folder).glob("fault-*")))
            raise Died(f"ranks died of signals, {died}\n{errors}\n{stacks}")
        assert not errors, f"exit codes {codes}\n{errors}"
        assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]
        return [torch.load(f"{folder}/result-{rank}", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    faults = open(f"{folder}/fault-{rank}", "w")  # noqa: SIM115 - where it was when a signal ended it
    faulthandler.enable(faults)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        torch.save(function(rank, *arguments), f"{folder}/result-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        import traceback

        Path(folder, f"error-{rank}").write_text(f"rank {rank} of {ranks}:\n{traceback.format_exc()}")
        os._exit(1)

"""What `run_ranks` makes of ranks that fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Died, needs_gloo, run_ranks


def dies_once(rank: int, mark: str) -> int:
    if rank == 1 and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return rank


def dies(rank: int) -> None:
    if rank == 1:
        os.abort()
    dist.barrier()


def raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("not this one")
    dist.barrier()


@needs_gloo
def test_ranks_are_tried_again_where_one_died_of_a_signal(tmp_path):
    with pytest.warns(UserWarning, match="dies_once, tried again: ranks died of signals, {1: -9}"):
        assert run_ranks(dies_once, str(tmp_path / "mark")) == [0, 1]


@needs_gloo
def test_but_once_alone_and_it_is_said_where_it_died():
    with (
        pytest.warns(UserWarning, match="tried again"),
        pytest.raises(Died, match=r"{1: -6}(.|\n)*Fatal Python error: Aborted(.|\n)* in dies"),
    ):
        run_ranks(dies)


@needs_gloo
def test_not_where_one_raised():
    with pytest.raises(AssertionError, match="ValueError: not this one"):
        run_ranks(raises)

"""The training loop: one path for one process and for many.

Every rank takes its share of the rows of each global batch. The loss is the mean over the global batch, so the gradients, and with
them the losses, are those of one process up to the order of sums. A GPU is waited for only where something is printed or written.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gdpa.data.schema import Batch
from gdpa.distributed.parallel import parallelize
from gdpa.errors import GdpaError
from gdpa.models import ClickModel, Table
from gdpa.nn.regions import compile_regions, compile_stages
from gdpa.train import metrics, state
from gdpa.train.checkpoint import Checkpoints, check_same, read_state
from gdpa.train.log import Log
from gdpa.train.progress import Display, Reading
from gdpa.train.settings import Folder, Settings
from gdpa.train.source import Prefetch, Source, pinned, share
from gdpa.train.updates import NonFinite, Updates, group_of
from gdpa.train.world import World

# Operations of a forward and a backward, in forwards.
STEP_FORWARDS = 3
# Tables of at least this many rows have sparse gradients: those of small ones cost less whole.
SPARSE_ROWS = 2**17


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `scores` are of the held-out batches, None where it was interrupted."""

    step: int
    scores: metrics.Scores | None
    samples_per_s: float


class Loop:
    """A run: its model, optimisers, data and files.

    matmul_rate   FLOP/s of a large matrix product on one rank's device, for MFU; None leaves it out
    stop          asked after every step whether to stop there: the step is finished, a checkpoint written
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        model: ClickModel,
        world: World,
        folder: Folder,
        *,
        matmul_rate: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if settings.batch_size < world.size:
            raise GdpaError(f"--batch-size: expected at least 1 example for each of {world.size} ranks, got {settings.batch_size}")
        self.settings, self.source, self.world, self.folder = settings, source, world, folder
        self.model = model
        self.wrapped = _parallel(model, settings, world)
        if settings.compile:
            # Sharded layers are gathered by hooks, which no graph may hold.
            sharded = world.group is not None and settings.parallel == "fsdp"
            (compile_regions if sharded else compile_stages)(model.dense)
        self.updates = Updates(model.dense_parameters(), model.table_parameters(), settings.rates, world.group)
        self.checkpoints = Checkpoints(folder.checkpoints, settings.keep)
        self.step = 0
        self._saved_step = -1
        self._matmul_rate, self._stop = matmul_rate, stop
        self._clock = _Clock()

    def resume(self) -> bool:
        """Go on from the newest checkpoint; False where there is none."""
        latest = self.world.from_first(str(self.checkpoints.latest() or ""))
        if not latest:
            return False
        path = Path(latest)
        # One rank reads and checks all files; the others would read the same bytes again.
        found = self.world.by_first(lambda: read_state(path))
        check_same(path, "config", found["config"], self.settings.identity())
        check_same(path, "schema", found["schema"], json.loads(self.source.schema.to_json()))
        check_same(path, "data", found["data"], self.source.facts)
        if found["step"] > self.settings.steps:
            raise GdpaError(f"--steps: expected at least {found['step']}, which {path} has done, got {self.settings.steps}")
        state.restore(path, self.model, self.updates, self.world)
        self.step = self._saved_step = found["step"]
        return True

    def run(self, log: Log | None, display: Display) -> Outcome:
        """Train to the last step and score the held-out batches, or until `stop` says so."""
        settings, world = self.settings, self.world
        window, losses, norms = metrics.Window(world.device), list[Tensor](), list[Tensor]()
        self.model.train()
        stopped = self._asked_to_stop()
        with Prefetch(self.source.batches(self.step), self._prepared) as batches:
            self._clock.start()
            while self.step < settings.steps and not stopped:
                host_batch, examples, tokens = next(batches)
                loss, norm = self.train_step(host_batch.to(world.device, non_blocking=True), examples, window)
                losses.append(loss)
                norms.append(norm)
                self.step += 1
                self._clock.count(examples, tokens)
                display.step(self.step)
                saves = self.step % settings.checkpoint_every == 0
                # A line of the log ends where a checkpoint is, so that a run that goes on from it has every loss.
                reads = self.step % settings.log_every == 0 or self.step == settings.steps or saves
                looks = reads or world.device.type == "cpu"  # a GPU would have to be waited for
                if looks or world.group is None:
                    stopped = self._asked_to_stop()
                if looks or stopped:
                    self.updates.check()
                if reads or stopped:
                    reading = self._read(window, host_batch)
                    self._write(log, reading, losses, norms)
                    display.read(reading)
                    losses, norms = [], []
                    self._clock.start()
                if saves:
                    self._clock.stop()
                    self.save()
                    self._clock.start()
        self.save()
        return Outcome(self.step, None if stopped else self.evaluate(), self._clock.samples_per_s)

    def _write(self, log: Log | None, reading: Reading, losses: list[Tensor], norms: list[Tensor]) -> None:
        """A line of the log, by the first rank. Where it cannot, all ranks end with the reason."""

        def write() -> None:
            if log is not None:
                log.write("steps", self.step, losses=torch.stack(losses).tolist(), **_facts(reading, norms))

        self.world.by_first(write)

    def _asked_to_stop(self) -> bool:
        return self.world.any(self._stop())

    def _prepared(self, batch: Batch) -> tuple[Batch, int, int]:
        """This rank's share of a batch, in pinned memory where a GPU reads it; the examples and events of the whole batch."""
        batch = self._seen(batch)
        mine = share(batch, self.world.rank, self.world.size)
        return pinned(mine, self.world.device), len(batch), batch.history.items.shape[0]

    def _seen(self, batch: Batch) -> Batch:
        """What the model may see of a batch."""
        return batch.without_history() if self.settings.no_history else batch.recent(self.settings.config.max_history)

    def train_step(self, batch: Batch, examples: int, window: metrics.Window) -> tuple[Tensor, Tensor]:
        """One step on this rank's rows of a batch of `examples`. Returns the loss of the whole batch and the norm of its gradient."""
        logits = self.logits(batch)
        total = metrics.log_losses(logits, batch.labels).sum()
        # Gradients are averaged over the ranks; the mean over the global batch is their sum.
        (total * (self.world.size / examples)).backward()
        loss = self.world.sum(total.detach() / examples)
        norm = self.updates.apply(self.step, loss)
        window.add(logits.detach(), batch.labels)
        return loss, norm

    def logits(self, batch: Batch) -> Tensor:
        device = self.world.device.type
        with torch.autocast(device, torch.bfloat16) if self.settings.bf16 else nullcontext():
            logits: Tensor = self.wrapped(batch)
        return logits

    def _read(self, window: metrics.Window, batch: Batch) -> Reading:
        scores = window.read(self.world.group)
        self._clock.stop()
        seconds, examples, tokens = self._clock.read()
        # The operations of one batch stand for the others': counting those of every batch would cost more than it tells.
        flops = self.model.flops(batch) / max(len(batch), 1) * examples * STEP_FORWARDS
        peak = None if self._matmul_rate is None else self._matmul_rate * self.world.size
        return Reading(
            step=self.step,
            ne=scores.ne,
            auc=scores.auc,
            samples_per_s=examples / seconds,
            tokens_per_s=tokens / seconds,
            mfu=None if peak is None else flops / seconds / peak,
        )

    def save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self.step == self._saved_step:
            return
        self.updates.check()
        wrong = self.updates.non_finite_weight()
        if wrong is not None:
            raise NonFinite(f"step {self.step}: expected finite weights after it, not those of {group_of(wrong)!r} ({wrong})")
        facts = {
            "step": self.step,
            "config": self.settings.identity(),
            "schema": json.loads(self.source.schema.to_json()),
            "data": self.source.facts,
        }
        with self.checkpoints.writing(self.step, facts, self.world) as folder:
            state.write(folder, self.model, self.updates, self.world)
        self._saved_step = self.step

    @torch.no_grad()
    def evaluate(self) -> metrics.Scores | None:
        """The scores of the held-out batches, over all ranks; None where `stop` says so on the way."""
        self.model.eval()
        logits, labels = [torch.zeros(0)], [torch.zeros(0)]
        for batch in self._held_out():
            if self._asked_to_stop():
                return None
            logits.append(self.logits(batch).float().cpu())
            labels.append(batch.labels.cpu())
        self.model.train()
        device = self.world.device
        return metrics.exact(self.world.gather(torch.cat(logits).to(device)), self.world.gather(torch.cat(labels).to(device)))

    def _held_out(self) -> Iterator[Batch]:
        left = self.settings.evaluation
        for batch in self.source.held_out(-(-left // self.settings.batch_size)):
            batch = batch.rows(0, min(left, len(batch)))
            left -= len(batch)
            yield share(self._seen(batch), self.world.rank, self.world.size).to(self.world.device)


class _Clock:
    """Seconds, examples and events of training, without what is between the steps, such as writing a checkpoint."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._seconds, self._examples, self._tokens = 0.0, 0, 0
        self._intervals: list[tuple[float, int]] = []

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._since

    def count(self, examples: int, tokens: int) -> None:
        self._examples += examples
        self._tokens += tokens

    def read(self) -> tuple[float, int, int]:
        """Of the interval that ends here; the next one begins."""
        interval = max(self._seconds, 1e-9), self._examples, self._tokens
        self._intervals.append(interval[:2])
        self._seconds, self._examples, self._tokens = 0.0, 0, 0
        return interval

    @property
    def samples_per_s(self) -> float:
        """Over all intervals but the first, in which kernels are compiled, where there are others; NaN where nothing was trained."""
        counted = self._intervals[1:] or self._intervals
        seconds = sum(taken for taken, _ in counted)
        return sum(examples for _, examples in counted) / seconds if seconds else math.nan


def _facts(reading: Reading, norms: list[Tensor]) -> dict[str, Any]:
    facts = asdict(reading)
    del facts["step"]
    return {"gradient_norms": torch.stack(norms).tolist(), **facts}


def _parallel(model: ClickModel, settings: Settings, world: World) -> nn.Module:
    """The model as its ranks call it: itself, or spread over them."""
    for table in model.tables.values():
        assert isinstance(table, Table)
        table.sparse = table.rows >= SPARSE_ROWS
    if world.group is None:
        return model
    return parallelize(model, init_device_mesh(world.device.type, (world.size,)), settings.parallel)

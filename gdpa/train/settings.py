"""What a training run is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gdpa.errors import GdpaError
from gdpa.models import Config
from gdpa.train.updates import Rates

Parallel = Literal["ddp", "fsdp"]
PARALLEL: tuple[Parallel, ...] = ("ddp", "fsdp")


@dataclass(frozen=True)
class Settings:
    """steps             the number of the last step; a run may be resumed with a larger one
    batch_size        examples of a step over all ranks
    bf16              autocast to bfloat16; parameters, losses and optimisers stay in float32
    compile           torch.compile of the dense part layer by layer (gdpa.nn.regions)
    log_every         steps between two lines of the log; so often a GPU is waited for
    checkpoint_every  steps between two checkpoints; the newest `keep` stay
    evaluation        held-out examples that the scores at the end are of, at most, in whole batches
    parallel          how the dense part is spread over ranks: "ddp" (copies) or "fsdp" (shards); tables are sharded by rows in both
    """

    config: Config
    steps: int
    batch_size: int
    seed: int = 0
    backend: str = "auto"
    no_history: bool = False
    bf16: bool = False
    compile: bool = False
    parallel: Parallel = "ddp"
    log_every: int = 10
    checkpoint_every: int = 200
    keep: int = 2
    evaluation: int = 8192

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise GdpaError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:  # torch's generators take no more
            raise GdpaError(f"--seed: expected a number from 0 to {2**63 - 1}, got {self.seed}")
        if self.parallel not in PARALLEL:
            raise GdpaError(f"--parallel: expected one of {', '.join(PARALLEL)}, got {self.parallel!r}")

    @property
    def rates(self) -> Rates:
        config = self.config
        return Rates(config.learning_rate, config.table_learning_rate, config.warmup_steps)

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same one, as JSON. Where and how long it runs is not part of it."""
        rates = self.rates
        return {
            "model": self.config.to_dict(),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "no_history": self.no_history,
            "bf16": self.bf16,
            "clip": rates.clip,
            "weight_decay": rates.weight_decay,
        }


@dataclass(frozen=True)
class Folder:
    """The files of a run."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

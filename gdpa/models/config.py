"""What a model is made of, as data: frozen, comparable, and plain JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gdpa.errors import GdpaError

Gate = Literal["sigmoid", "tanh", "identity"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """What both models have.

    width            features of a non-sequence token
    tokens           non-sequence tokens between layers
    context_tokens   tokens of the summary that personalises the sequence; the weights of PFFN are made of it
    hidden           rows of each sample's K and V in PFFN; a multiple of context_tokens
    embedding        features of a row of the tables
    head_hidden      hidden units of the prediction head
    tau              PFFN's scale is 1 / tau; None means 1 / sqrt(head dimension)

    The others are defaults of a training run, which the model does not read:

    batch_size, default_steps, warmup_steps
    max_history              newest events of a history that are used (`Batch.recent`)
    learning_rate            of AdamW on the dense part, after the warm-up
    table_learning_rate      of row-wise Adagrad on the tables
    """

    model: ClassVar[str]

    width: int
    tokens: int
    context_tokens: int
    hidden: int
    embedding: int
    head_hidden: int
    tau: float | None = None

    batch_size: int
    default_steps: int
    warmup_steps: int
    max_history: int
    learning_rate: float
    table_learning_rate: float

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.hidden % self.context_tokens != 0:
            raise GdpaError(f"context_tokens: expected a divisor of hidden {self.hidden}, got {self.context_tokens}")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; `config_from_dict` reads them back."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {"model": self.model, **plain}


@dataclass(frozen=True, kw_only=True)
class InterFormerConfig(Config):
    """`gdpa.models.InterFormer`.

    layers        how many
    seq_width     features of a sequence token
    heads         of PFFN, self-attention and pooling
    seeds         tokens that PMA pools a sequence into, in each layer
    recent        newest events that join the summary as they are
    dot_hidden    hidden units that the products of the interaction arch pass through
    gate          Gating(Z) = gate(Z * MLP(Z))
    """

    model: ClassVar[str] = "interformer"

    layers: int
    seq_width: int
    heads: int
    seeds: int
    recent: int
    dot_hidden: int
    gate: Gate = "tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate not in ("sigmoid", "tanh", "identity"):
            raise GdpaError(f"gate: expected 'sigmoid', 'tanh' or 'identity', got {self.gate!r}")


@dataclass(frozen=True, kw_only=True)
class EventConfig:
    """One group of event types, a sequence of its own in Kunlun.

    types     names of the schema's event types; ("*",) means all that no other group names
    width     features of a sequence token
    heads     of every attention over the sequence
    seeds     learned queries of HSP
    tokens    tokens that HSP condenses the sequence into
    terms     of HSP's SumKronLinear
    layers    even ones are PFFN with a fresh HSP, odd ones self-attention in a sliding window
    window    events that a self-attention sees: the event itself and those before it
    """

    types: tuple[str, ...]
    width: int
    heads: int
    seeds: int
    tokens: int
    terms: int
    layers: int
    window: int

    def __post_init__(self) -> None:
        _check_sizes(self)
        if not self.types or not all(isinstance(name, str) for name in self.types):
            raise GdpaError(f"types: expected names of event types or ('*',), got {self.types!r}")
        if self.width % self.heads != 0 or self.width // self.heads % 2 != 0:
            raise GdpaError(f"heads: expected a divisor of width {self.width} that leaves an even head dimension, got {self.heads}")


@dataclass(frozen=True, kw_only=True)
class KunlunConfig(Config):
    """`gdpa.models.Kunlun`.

    events       its groups of event types; the model has as many layers as the deepest of them that the schema has types for
    experts      parts that the tokens are split into for the interaction, each with its own expert
    fm_rank      columns that a factorisation machine's products are compressed to
    """

    model: ClassVar[str] = "kunlun"

    events: tuple[EventConfig, ...]
    experts: int
    fm_rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.events:
            raise GdpaError("events: expected at least one group of event types, got none")
        names = [name for group in self.events for name in group.types]
        if len(set(names)) != len(names):
            raise GdpaError(f"events: expected every event type in one group, got {names}")
        if self.experts >= self.tokens:
            raise GdpaError(f"experts: expected fewer than the {self.tokens} tokens, got {self.experts}")


def config_from_dict(plain: dict[str, Any]) -> Config:
    """The config that `to_dict` made; anything else is a GdpaError."""
    try:
        fields = dict(plain)
        kind: type[Config] = {"interformer": InterFormerConfig, "kunlun": KunlunConfig}[fields.pop("model")]
        if "events" in fields:
            fields["events"] = tuple(EventConfig(**{**group, "types": tuple(group["types"])}) for group in fields["events"])
        return kind(**fields)
    except GdpaError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise GdpaError(f"config: expected the fields of a model's config, got {str(plain)[:200]} ({error!r})") from error


def _check_sizes(config: Config | EventConfig) -> None:
    """Integers are at least 1 (steps of a warm-up: 0), floats finite and above 0."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type == "int":
            least = 0 if field.name == "warmup_steps" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise GdpaError(f"{field.name}: expected an integer of at least {least}, got {value!r}")
        elif field.type in ("float", "float | None"):
            if value is None and field.type == "float | None":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise GdpaError(f"{field.name}: expected a finite number above 0, got {value!r}")

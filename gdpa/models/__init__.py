"""Reference models over gdpa.nn: InterFormer and Kunlun, for the examples of gdpa.data.schema.

    model = gdpa.models.build("kunlun", "tiny", schema)
    logits = model(batch)                                  (B,)

`import gdpa` does not import this package.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gdpa.data.schema import Schema
from gdpa.errors import GdpaError
from gdpa.models.base import ClickModel
from gdpa.models.config import Config, EventConfig, InterFormerConfig, KunlunConfig, config_from_dict
from gdpa.models.interformer import InterFormer
from gdpa.models.kunlun import Kunlun
from gdpa.models.presets import PRESETS
from gdpa.models.tables import Table

__all__ = [
    "PRESETS",
    "ClickModel",
    "Config",
    "EventConfig",
    "InterFormer",
    "InterFormerConfig",
    "Kunlun",
    "KunlunConfig",
    "Table",
    "build",
    "config_from_dict",
    "from_config",
    "preset_config",
]


def build(
    name: str,
    preset: str,
    schema: Schema,
    *,
    backend: str | None = "auto",
    attention: Callable[..., Tensor] | None = None,
) -> ClickModel:
    """The model of that name and preset for examples of `schema`, its parameters drawn from torch's generator.

    Args:
        name: "interformer" or "kunlun".
        preset: a key of PRESETS[name].
        backend: of the attention, as in `gdpa.attention`; "auto" and None pick the fastest.
        attention: a callable that takes the arguments of `gdpa.attention_varlen`, to compute the attention in its place.

    Example:
        >>> from gdpa.data.synthetic import SyntheticClicks
        >>> clicks = SyntheticClicks(batch_size=4)
        >>> gdpa.models.build("kunlun", "tiny", clicks.schema)(clicks.batch(0)).shape
        torch.Size([4])
    """
    return from_config(preset_config(name, preset), schema, backend=backend, attention=attention)


def preset_config(name: str, preset: str) -> Config:
    """PRESETS[name][preset], or a GdpaError that says which there are."""
    if name not in PRESETS:
        raise GdpaError(f"name: expected one of {', '.join(PRESETS)}, got {name!r}")
    if preset not in PRESETS[name]:
        raise GdpaError(f"preset: expected one of {', '.join(PRESETS[name])}, got {preset!r}")
    return PRESETS[name][preset]


def from_config(
    config: Config, schema: Schema, *, backend: str | None = "auto", attention: Callable[..., Tensor] | None = None
) -> ClickModel:
    """The model that a config describes; the other arguments are those of `build`."""
    chosen = None if backend == "auto" else backend
    model: ClickModel
    if isinstance(config, KunlunConfig):
        model = Kunlun(config, schema, backend=chosen)
    elif isinstance(config, InterFormerConfig):
        model = InterFormer(config, schema, backend=chosen)
    else:
        raise GdpaError(f"config: expected an InterFormerConfig or a KunlunConfig, got {type(config).__name__}")
    if attention is not None:
        model.set_attention(attention)
    return model

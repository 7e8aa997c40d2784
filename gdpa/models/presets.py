"""The sizes that have names."""

from __future__ import annotations

from collections.abc import Mapping

from gdpa.models.config import Config, EventConfig, InterFormerConfig, KunlunConfig

PRESETS: Mapping[str, Mapping[str, Config]] = {
    "interformer": {
        "tiny": InterFormerConfig(
            width=32,
            tokens=8,
            context_tokens=4,
            hidden=16,
            embedding=16,
            head_hidden=64,
            layers=2,
            seq_width=32,
            heads=2,
            seeds=4,
            recent=4,
            rank=32,
            batch_size=256,
            default_steps=400,
            warmup_steps=20,
            max_history=64,
            learning_rate=3e-3,
            table_learning_rate=0.05,
        ),
    },
    "kunlun": {
        "tiny": KunlunConfig(
            width=32,
            tokens=8,
            context_tokens=4,
            hidden=16,
            embedding=16,
            head_hidden=64,
            experts=4,
            fm_rank=8,
            events=(
                EventConfig(types=("click", "conversion"), width=32, heads=2, seeds=8, tokens=4, terms=2, layers=2, window=16),
                EventConfig(types=("*",), width=16, heads=2, seeds=4, tokens=2, terms=2, layers=1, window=8),
            ),
            batch_size=256,
            default_steps=400,
            warmup_steps=20,
            max_history=64,
            learning_rate=3e-3,
            table_learning_rate=0.05,
        ),
    },
}

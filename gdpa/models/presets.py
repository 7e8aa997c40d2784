"""The sizes that have names.

    tiny         trains on a CPU in less than a minute on the synthetic clicks; for tests
    small        a GPU in minutes, or a patient CPU
    gem-block    the shape to measure: heads of 128 features, 4 of them, histories to 2048 events, 256 generated rows, 4 layers

gem-block's batches are sized for 139 GiB, in bf16 autocast, eager. Nearly all memory is what a forward keeps for the backward, per event
and counted in units of 1 KB, the size of one bf16 token of 512 features: norms keep fp32 copies (2), linear maps their input (1), an
attention its q, k and v (3) and output (1). Kunlun comes to about 45 (encoder 4, two PFFN 10, two window layers 20, three poolings 6,
the stream 5), InterFormer to about 80 (MaskNet 6, four PFFN 20, four self-attentions 36, five poolings 10, the stream 9). At an average
history of 1,536 events that is 1,152 * 1,536 * 45 KB = 80 GB and 768 * 1,536 * 80 KB = 94 GB, which leaves room for a
backward's temporaries.
"""

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
            dot_hidden=64,
            batch_size=64,
            default_steps=150,
            warmup_steps=20,
            max_history=32,
            learning_rate=1e-3,
            table_learning_rate=0.2,
        ),
        "small": InterFormerConfig(
            width=128,
            tokens=16,
            context_tokens=4,
            hidden=64,
            embedding=64,
            head_hidden=256,
            layers=3,
            seq_width=128,
            heads=4,
            seeds=8,
            recent=4,
            dot_hidden=256,
            batch_size=512,
            default_steps=2000,
            warmup_steps=100,
            max_history=256,
            learning_rate=1e-3,
            table_learning_rate=0.1,
        ),
        "gem-block": InterFormerConfig(
            width=512,
            tokens=16,
            context_tokens=4,
            hidden=256,
            embedding=128,
            head_hidden=512,
            tau=2048.0,
            layers=4,
            seq_width=512,
            heads=4,
            seeds=16,
            recent=12,
            dot_hidden=512,
            batch_size=768,
            default_steps=1000,
            warmup_steps=100,
            max_history=2048,
            learning_rate=3e-4,
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
            batch_size=64,
            default_steps=250,
            warmup_steps=20,
            max_history=32,
            learning_rate=1e-3,
            table_learning_rate=0.2,
        ),
        "small": KunlunConfig(
            width=128,
            tokens=16,
            context_tokens=8,
            hidden=64,
            embedding=64,
            head_hidden=256,
            experts=4,
            fm_rank=16,
            events=(
                # The sizes that the paper gives for clicks and for impressions.
                EventConfig(types=("click", "conversion"), width=256, heads=8, seeds=64, tokens=32, terms=4, layers=3, window=100),
                EventConfig(types=("*",), width=128, heads=4, seeds=32, tokens=16, terms=4, layers=2, window=50),
            ),
            batch_size=512,
            default_steps=2000,
            warmup_steps=100,
            max_history=256,
            learning_rate=1e-3,
            table_learning_rate=0.1,
        ),
        "gem-block": KunlunConfig(
            width=512,
            tokens=16,
            context_tokens=16,
            hidden=256,
            embedding=128,
            head_hidden=512,
            tau=2048.0,
            experts=8,
            fm_rank=32,
            # One group, so that the sequences are as long as the histories.
            events=(EventConfig(types=("*",), width=512, heads=4, seeds=256, tokens=32, terms=8, layers=4, window=128),),
            batch_size=1152,
            default_steps=1000,
            warmup_steps=100,
            max_history=2048,
            learning_rate=3e-4,
            table_learning_rate=0.05,
        ),
    },
}

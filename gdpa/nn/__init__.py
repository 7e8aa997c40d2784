"""Modules over the operator: the attention blocks of recommendation models, for jagged batches.

    SelfAttention     a sequence attends to itself
    PMA               learned seeds, shared by the batch, pool each sequence into a few tokens
    PFFN              a feed-forward network whose weights are generated for each sample
    HSP               pooling in two steps: many seeds, then SumKronLinear to fewer tokens
    SumKronLinear     a sum of Kronecker-structured linear maps over tokens and features
    RotaryTemporal    rotary embedding of positions and of elapsed time

Sequences come as (values (T, width), offsets (B + 1,)) or as jagged nested tensors (B, *, width), and leave as the same kind.
`import gdpa` does not import this package.
"""

from gdpa.nn.attention import SelfAttention
from gdpa.nn.feed_forward import PFFN
from gdpa.nn.kronecker import SumKronLinear
from gdpa.nn.pooling import HSP, PMA
from gdpa.nn.rotary import RotaryTemporal

__all__ = ["HSP", "PFFN", "PMA", "RotaryTemporal", "SelfAttention", "SumKronLinear"]

"""gdpa: attention whose softmax is replaced by any elementwise activation, forward and backward, for jagged batches."""

from gdpa.activations import Activation, activations
from gdpa.api import attention, attention_varlen, explain
from gdpa.dispatch import Explanation
from gdpa.errors import BackendUnavailable, GdpaError, UnsupportedActivation
from gdpa.jagged import offsets_from_lengths, pack, unpack

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "BackendUnavailable",
    "Explanation",
    "GdpaError",
    "UnsupportedActivation",
    "activations",
    "attention",
    "attention_varlen",
    "explain",
    "offsets_from_lengths",
    "pack",
    "unpack",
]

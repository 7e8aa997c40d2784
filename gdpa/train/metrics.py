"""What a click model is judged by.

    NE   normalised entropy: the mean log loss over the entropy of the base rate of the same examples. 1 is a model that always says
         the base rate; lower is better.
    AUC  the chance that a positive example is ranked above a negative one; a tie counts half.

Two ways to them. `exact` reads all logits of an evaluation at once and computes the AUC from their ranks, in float64. `Window` gathers
sums and two histograms of logits on the device while a model trains and is read when something is printed: its NE is exact up to
the float32 loss of each example, its AUC that of logits rounded to one of BINS levels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

# Levels of the histograms, uniform on [-SPAN, SPAN]: 1/128 apart. Logits beyond are in the outermost level.
BINS, SPAN = 4096, 16.0


class Scores(NamedTuple):
    """A score is NaN where the examples do not define it: there are none, or their labels are all alike."""

    ne: float
    auc: float
    examples: int


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) float32 or wider: the log loss of each example."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="none")


def normalised_entropy(loss_sum: float, positives: float, examples: float) -> float:
    """NE of `examples` whose log losses sum to `loss_sum`.

    Example:
        >>> round(normalised_entropy(loss_sum=4 * math.log(2), positives=2, examples=4), 6)
        1.0
    """
    if not 0 < positives < examples:
        return math.nan
    rate = positives / examples
    entropy = -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)
    return loss_sum / examples / entropy


def exact(logits: Tensor, labels: Tensor) -> Scores:
    """The scores of all examples at once, computed on the CPU."""
    logits, labels = logits.detach().double().cpu(), labels.detach().double().cpu()
    positives = int(labels.sum())
    ne = normalised_entropy(float(log_losses(logits, labels).sum()), positives, len(labels))
    if not 0 < positives < len(labels) or not bool(logits.isfinite().all()):
        return Scores(ne, math.nan, len(labels))
    above, below = logits[labels > 0.5], logits[labels <= 0.5].sort().values
    # Twice the pairs in order plus the ties: whole numbers, so that no rounding enters.
    twice = torch.searchsorted(below, above, right=False).sum() + torch.searchsorted(below, above, right=True).sum()
    return Scores(ne, int(twice) / (2 * len(above) * len(below)), len(labels))


class Window:
    """NE and AUC of the examples seen since the last `read`, gathered without waiting for the device.

    Example:
        >>> window = Window(torch.device("cpu"))
        >>> window.add(torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 0.0]))
        >>> window.read().auc
        1.0
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # log losses, positives, examples
        self._counts = torch.zeros(2 * BINS, dtype=torch.int64, device=device)  # negatives, then positives

    def add(self, logits: Tensor, labels: Tensor) -> None:
        with torch.no_grad():
            losses = log_losses(logits, labels)
            terms = torch.stack([losses, labels.to(losses.dtype), torch.ones_like(losses)])
            self._sums += terms.sum(1, dtype=torch.float64)
            # A NaN has no level; nan_to_num puts it in the middle, and the loss tells of it.
            level = ((logits.float().nan_to_num(0.0, SPAN, -SPAN) + SPAN) * (BINS / (2 * SPAN))).long().clamp(0, BINS - 1)
            level += BINS * (labels > 0.5)
            self._counts.index_add_(0, level, torch.ones_like(level))

    def read(self, group: torch.distributed.ProcessGroup | None = None) -> Scores:
        """The scores over all ranks of `group`, and a new window. Waits for the device."""
        if group is not None:
            torch.distributed.all_reduce(self._sums, group=group)
            torch.distributed.all_reduce(self._counts, group=group)
        loss_sum, positives, examples = self._sums.tolist()
        negative, positive = self._counts.view(2, BINS).cpu().clone()
        self._sums.zero_()
        self._counts.zero_()
        pairs = int(negative.sum()) * int(positive.sum())
        below = negative.cumsum(0) - negative
        auc = int((positive * (2 * below + negative)).sum()) / (2 * pairs) if pairs else math.nan
        return Scores(normalised_entropy(loss_sum, positives, examples), auc, int(examples))

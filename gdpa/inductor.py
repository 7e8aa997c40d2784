"""What Inductor must know of the operators: memory that held offsets is not to be written again in the same region.

schedule.py knows offsets by their tensor and its version. Where Inductor is done with a buffer it takes the tensor itself for the next one
of that size (`buf9 = buf3; del buf3  # reuse`), and its kernels write without a new version: a region's second offsets would be taken
for its first. Buffers that Inductor never reuses are freed instead, and the next tensor is another.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from gdpa import schedule
from gdpa.problem import OFFSET_DTYPES


def keep_offsets() -> None:
    """Tell Inductor, if this process has it. It traces the operators before it lowers them, so their fakes call this in time."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    for operator in (torch.ops.gdpa.forward.default, torch.ops.gdpa.backward.default):
        try:
            if not hasattr(lowering.lowerings.get(operator), "_keeps_offsets"):
                _lower(lowering, operator)
        except (AttributeError, ImportError, TypeError):  # another torch: none of this is public
            schedule.stop_sharing()


def _lower(lowering: Any, operator: Any) -> None:
    """What Inductor does with an operator that it does not know, and after it the note."""
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator))
    lowering.make_fallback(operator, layout_constraint=constraint, warn=False)
    plain = lowering.lowerings[operator]

    @functools.wraps(plain)
    def lower(*arguments: Any, **keywords: Any) -> Any:
        graph: Any = V.graph
        before = len(graph.operations)
        lowered = plain(*arguments, **keywords)
        for operation in graph.operations[before:]:
            if isinstance(operation, lowering.ir.FallbackKernel):
                graph.never_reuse_buffers.update(x.get_name() for x in operation.inputs if x.get_dtype() in OFFSET_DTYPES)
        return lowered

    vars(lower)["_keeps_offsets"] = True
    lowering.lowerings[operator] = lower

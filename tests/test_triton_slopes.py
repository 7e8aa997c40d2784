"""The portable backward with f' in each of its forms (`backward.score_gradients`).

Interpreted kernels get portable device code, in which f' has neither factors nor a 1 to add. Here they get that of NVIDIA devices, of
activations which it spells in operations that the interpreter knows.
"""

import pytest
import torch
from helpers import check, make_case, needs_interpreter

pytestmark = needs_interpreter


def wave(s):
    """f' is 1 + sin(s): lifted."""
    return s - torch.cos(s)


def cubic(s):
    """f' is a multiple of s * s: it has a factor."""
    return 0.3 * s * s * s


@pytest.mark.parametrize(
    ("dtype", "activation", "form", "slopes"),
    [
        (torch.bfloat16, wave, "packed", {"lifted"}),
        (torch.bfloat16, cubic, "packed", {"folded"}),
        (torch.bfloat16, wave, "shared-query", {"lifted", "weighted"}),
        (torch.float16, wave, "packed", {"weighted"}),
        (torch.float16, cubic, "dense", {"weighted"}),
        (torch.bfloat16, [wave, cubic], "packed", {"plain"}),
    ],
    ids=["lifted", "folded", "shared", "fp16", "fp16-dense", "per-head"],
)
@pytest.mark.parametrize("window", [(-1, -1), (9, 3)], ids=["whole", "window"])
def test_gradients_are_those_of_the_reference(monkeypatch, dtype, activation, form, slopes, window):
    from gdpa.backends.triton import launch
    from gdpa.tracing import device_functions

    precision = "bfloat16" if dtype == torch.bfloat16 else "float16"
    monkeypatch.setattr(launch.Call, "activation", lambda call: device_functions(call.problem.activations, precision=precision))
    chosen = set()
    pair = launch.Call.pair

    def noted(call, *arguments, **keywords):
        constants = pair(call, *arguments, **keywords)
        chosen.add(constants["SLOPE"])
        return constants

    monkeypatch.setattr(launch.Call, "pair", noted)
    check(
        make_case(
            form,
            q_lengths=(33, 0, 5),
            k_lengths=(34, 7, 0),
            heads=2,
            kv_heads=1,
            dtype=dtype,
            activation=activation,
            out_scale="per-sequence",
            window_size=window,
        ),
        "triton",
    )
    assert chosen == slopes

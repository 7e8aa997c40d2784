"""gdpa.nn.regions: compiled regions compute what the modules do, for batches of any size and with any attention between them; and so do
compiled stages, with the operator inside."""

import copy

import pytest
import torch
from helpers import needs_compiler, offsets_of
from torch._dynamo.testing import CompileCounter

import gdpa
import gdpa.models
from gdpa.data.synthetic import SyntheticClicks
from gdpa.models import PRESETS, interformer
from gdpa.nn import PFFN
from gdpa.nn.regions import compile_regions, compile_stages, plain_regions, plain_stages


def clicks(size):
    return SyntheticClicks(size, items=64, median_length=8, max_length=32)


def random_model(name):
    """None of its parameters are at the zeros and identities that they start from."""
    torch.manual_seed(0)
    model = gdpa.models.build(name, "tiny", clicks(1).schema)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def check_gradients(one, other, **tolerance):
    for (key, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda m, key=key: f"{key}: {m}", **tolerance)
    one.zero_grad()
    other.zero_grad()


# The graphs of InterFormer: features, X_sum, MaskNet, the positions, S_sum, two of PFFN, two around the self-attention, the interaction
# and the head. Kunlun has two groups, each with sizes of its own.
@pytest.mark.parametrize(("name", "graphs"), [("interformer", 11), ("kunlun", 17)])
def test_one_set_of_graphs_serves_all_layers_batches_and_attentions(name, graphs):
    plain = random_model(name)
    model = copy.deepcopy(plain)
    counter = CompileCounter()
    assert compile_regions(model.dense, backend=counter) > graphs
    calls = []

    def attention(*arguments, **options):
        calls.append(1)
        return gdpa.attention_varlen(*arguments, **options)

    def check(batch):
        logits, right = model(batch), plain(batch)
        torch.testing.assert_close(logits, right)
        logits.sum().backward()
        right.sum().backward()
        check_gradients(model, plain)

    check(clicks(24).batch(1))
    assert counter.frame_count == graphs
    model.set_attention(attention)
    check(clicks(24).batch(2))
    check(clicks(30).batch(0))
    check(clicks(24).batch(1).without_history())
    assert counter.frame_count == graphs and calls
    check(clicks(24).batch(3).rows(0, 1))
    assert set(model.state_dict()) == set(plain.state_dict())
    plain_regions(model)
    assert not any(name in module.__dict__ for module in model.modules() for name in getattr(type(module), "regions", ()))


# InterFormer: what is before the layers, a later layer's X_sum, a layer, the head. Kunlun's two layers are not alike: one pools and
# personalises both groups, the other has a self-attention of one group, whose sequence is longer by a layer, and pools the other's.
@pytest.mark.parametrize(("name", "graphs"), [("interformer", 4), ("kunlun", 4)])
def test_a_stage_is_compiled_once_for_the_layers_that_are_alike(name, graphs):
    plain = random_model(name)
    model = copy.deepcopy(plain)
    counter = CompileCounter()
    assert compile_stages(model.dense, backend=counter) in (3, 4)

    def check(batch):
        logits, right = model(batch), plain(batch)
        torch.testing.assert_close(logits, right)
        logits.sum().backward()
        right.sum().backward()
        check_gradients(model, plain)

    for batch in (clicks(24).batch(1), clicks(24).batch(2), clicks(30).batch(0), clicks(24).batch(1).without_history()):
        check(batch)
    assert counter.frame_count == graphs
    check(clicks(24).batch(3).rows(0, 1))
    with torch.no_grad():
        torch.testing.assert_close(model(clicks(9).batch(0)), plain(clicks(9).batch(0)))
    assert set(model.state_dict()) == set(plain.state_dict())
    plain_stages(model)
    assert not any(name in model.dense.__dict__ for name in type(model.dense).stages)


def test_stages_and_their_gradients_as_one_graph_each_under_autocast():
    """Forward and backward as a compiler sees them, with the operator in both; run without its kernels."""
    plain = random_model("interformer")
    model = copy.deepcopy(plain)
    compile_stages(model.dense, backend="aot_eager")
    for batch in (clicks(24).batch(1), clicks(30).batch(0)):
        for one in (model, plain):
            with torch.autocast("cpu", torch.float16):
                one(batch).sum().backward()
        pairs = [(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)]
        apart = sum((one - other).square().sum() for one, other in pairs) / sum(other.square().sum() for _, other in pairs)
        assert float(apart) ** 0.5 < 5e-3
        model.zero_grad()
        plain.zero_grad()


@needs_compiler
def test_inductor_computes_the_same_under_autocast():
    """A layer of InterFormer: the regions of PFFN and those around the self-attention."""
    torch.manual_seed(0)
    plain = interformer.SequenceLayer(PRESETS["interformer"]["tiny"], None)
    layer = copy.deepcopy(plain)
    assert compile_regions(layer) == 4
    offsets, context = offsets_of((5, 0, 9)), torch.randn(3, 4, 32)
    stream = torch.randn(14, 32)
    for dtype in (torch.float32, torch.float16):
        outs = []
        for module in (layer, plain):
            with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float16):
                x = stream.to(dtype)
                out = module(x, offsets, module.attend.rotary.turns(14, offsets, None, dtype), context)
            out.float().square().mean().backward()
            outs.append(out)
        assert outs[0].dtype == dtype
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 2e-3}
        torch.testing.assert_close(*outs, **tolerance)
        check_gradients(layer, plain, **tolerance)


def test_a_compiled_region_inside_a_compiled_module():
    torch.manual_seed(0)
    plain = PFFN(16, 2, hidden=8, context_width=6)
    module = copy.deepcopy(plain)
    compile_regions(module, backend="eager")
    x, context = torch.randn(14, 16), torch.randn(3, 6)
    counter = CompileCounter()
    out = torch.compile(module, backend=counter, fullgraph=True)(x, offsets_of((5, 0, 9)), context=context)
    torch.testing.assert_close(out, plain(x, offsets_of((5, 0, 9)), context=context))
    assert counter.frame_count == 1

"""gdpa.models: both models against float64 computations by hand, and what every model promises."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import importlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import spy
from models_by_hand import BY_HAND
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import gdpa
import gdpa.models
from gdpa.data.schema import Batch, History, Schema
from gdpa.data.synthetic import SyntheticClicks
from gdpa.models import PRESETS, ClickModel, Config, KunlunConfig, config_from_dict
from gdpa.models.blocks import TokenMixer
from gdpa.models.config import EventConfig, InterFormerConfig
from gdpa.models.sequences import end_rows, prepend
from gdpa.models.windows import banded_attention, window_pairs

NAMES = ("interformer", "kunlun")
BOTH = pytest.mark.parametrize("name", NAMES)


def clicks(size: int = 6, seed: int = 0) -> SyntheticClicks:
    return SyntheticClicks(size, seed=seed, items=64, median_length=6, max_length=12, empty=0.2)


def tiny(name: str, schema: Schema | None = None, seed: int = 0, **options: Any) -> ClickModel:
    """A tiny model whose parameters are all random: none are left at the zeros and identities that they start from."""
    torch.manual_seed(seed)
    model = gdpa.models.build(name, "tiny", schema or clicks().schema, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@BOTH
def test_logits_and_gradients_equal_a_float64_computation_by_hand(name: str) -> None:
    data = clicks()
    model, batch = tiny(name).double(), data.batch(1)
    assert 0 in batch.lengths and batch.lengths.max() > 8
    sparse, sequences = model.embed(batch)
    logits = model.dense(batch.dense, sparse, sequences)
    expected = torch.stack([BY_HAND[name](model, batch, index) for index in range(len(batch))])
    # The operator uses "mean" factors in float32, whatever the inputs are: 1e-7 of the pooled values.
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn(len(batch), dtype=torch.float64)
    parameters = dict(model.named_parameters())
    got = torch.autograd.grad(logits, list(parameters.values()), weights)
    right = torch.autograd.grad(expected, list(parameters.values()), weights, allow_unused=True, materialize_grads=True)
    for (key, _), one, other in zip(parameters.items(), got, right, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()) + 1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )


@BOTH
def test_every_parameter_gets_a_gradient_and_logits_are_float32(name: str) -> None:
    data = clicks(32)
    model = tiny(name, data.schema)
    logits = model(data.batch(0))
    assert logits.shape == (32,) and logits.dtype == torch.float32
    functional.binary_cross_entropy_with_logits(logits, data.batch(0).labels).backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert missing == []


@BOTH
def test_a_new_model_learns_from_its_first_steps(name: str) -> None:
    data = clicks(64)
    torch.manual_seed(0)
    model = gdpa.models.build(name, "tiny", data.schema)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch = data.batch(0)
    losses = []
    for _ in range(15):
        loss = functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@BOTH
def test_batches_without_examples_without_events_and_of_one_event(name: str) -> None:
    data = clicks()
    model, batch = tiny(name, data.schema), data.batch(1)
    assert model(batch.rows(0, 0)).shape == (0,)
    model(batch.rows(0, 0)).sum().backward()
    bare = model(batch.without_history())
    assert bare.shape == (6,) and bare.isfinite().all()
    bare.sum().backward()
    empty = int((batch.lengths == 0).nonzero()[0])
    torch.testing.assert_close(model(batch)[empty], bare[empty])
    one = model(batch.recent(1))
    assert one.isfinite().all() and not torch.allclose(one, bare)


@BOTH
def test_an_example_is_scored_by_its_own_history_alone(name: str) -> None:
    data = clicks()
    model, batch = tiny(name, data.schema), data.batch(1)
    longest = int(batch.lengths.argmax())
    start, stop = batch.history.offsets[longest : longest + 2].tolist()
    logits = model(batch)
    for column in ("items", "types", "values"):
        changed = getattr(batch.history, column).clone()
        changed[start:stop] = changed[start:stop].roll(1)
        other = model(replace(batch, history=replace(batch.history, **{column: changed})))
        assert (other[longest] - logits[longest]).abs() > 1e-5, column
        others = torch.arange(len(batch)) != longest
        assert torch.equal(other[others], logits[others])
    apart = torch.cat([model(batch.rows(index, index + 1)) for index in range(len(batch))])
    torch.testing.assert_close(apart, logits, rtol=1e-4, atol=1e-4)  # float32 products of other shapes


@BOTH
def test_a_seed_gives_the_same_model_and_the_same_steps(name: str) -> None:
    data = clicks(16)
    logits, gradients = [], []
    for _ in range(2):
        model = tiny(name, data.schema, seed=3)
        out = model(data.batch(0))
        out.sum().backward()
        logits.append(out)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(*logits) and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert not torch.equal(tiny(name, data.schema, seed=4)(data.batch(0)), logits[0])


@BOTH
def test_state_dicts_hold_parameters_alone_and_survive_a_change_of_backend(name: str) -> None:
    data = clicks()
    first, second = tiny(name, data.schema, backend="cpu"), tiny(name, data.schema, seed=9, backend="reference")
    state = first.state_dict()
    assert set(state) == {key for key, _ in first.named_parameters()}
    second.load_state_dict(state)
    torch.testing.assert_close(second(data.batch(0)), first(data.batch(0)), rtol=1e-5, atol=1e-5)
    for key, parameter in copy.deepcopy(first).named_parameters():
        assert torch.equal(parameter, state[key])


@BOTH
def test_parameters_are_of_the_tables_or_of_the_dense_part(name: str) -> None:
    model = tiny(name)
    tables, dense = dict(model.table_parameters()), dict(model.dense_parameters())
    assert {**tables, **dense}.keys() == dict(model.named_parameters()).keys() and not tables.keys() & dense.keys()
    assert set(tables) == {f"tables.{key}.weight" for key in ("history_item", "sparse_country", "sparse_placement")}
    assert model.tables["history_item"].weight.shape == (64, 16)
    assert all(key.startswith("dense.") for key in dense)


@BOTH
def test_the_candidate_shares_the_items_table(name: str) -> None:
    data = clicks()
    shared, apart = (tiny(name, replace(data.schema, candidate=candidate)) for candidate in ("ad", None))
    assert "sparse_ad" not in shared.tables and apart.tables["sparse_ad"].weight.shape == (64, 16)
    batch = data.batch(0).without_history()
    for model, table in ((shared, "history_item"), (apart, "sparse_ad")):
        model(batch).sum().backward()
        rows = model.tables[table].weight.grad.abs().sum(1) > 0
        assert set(rows.nonzero().flatten().tolist()) == set(batch.sparse[:, 0].tolist())


@BOTH
def test_gradients_of_tables_may_be_sparse(name: str) -> None:
    data = clicks()
    model = tiny(name, data.schema)
    model(data.batch(0)).sum().backward()
    dense = model.tables["history_item"].weight.grad.clone()
    model.zero_grad()
    for table in model.tables.values():
        table.sparse = True
    model(data.batch(0)).sum().backward()
    assert model.tables["history_item"].weight.grad.is_sparse
    torch.testing.assert_close(model.tables["history_item"].weight.grad.to_dense(), dense)


@BOTH
@pytest.mark.parametrize(
    ("column", "wrong"),
    [("sparse_ad", 64), ("sparse_country", -1), ("history_item", 64), ("history_item", -2), ("history_type", 3)],
)
def test_an_id_without_a_row_is_refused_by_name(name: str, column: str, wrong: int) -> None:
    data = clicks()
    model, batch = tiny(name, data.schema), data.batch(1)
    sparse, history = batch.sparse.clone(), batch.history
    if column.startswith("sparse"):
        sparse[2, ["sparse_ad", "sparse_country"].index(column)] = wrong
    else:
        key = {"history_item": "items", "history_type": "types"}[column]
        ids = getattr(history, key).clone()
        ids[-1] = wrong
        history = replace(history, **{key: ids})
    with pytest.raises(gdpa.GdpaError, match=rf"^{column}: expected ids from 0 to \d+.*got {wrong}$"):
        model(replace(batch, sparse=sparse, history=history))


def test_a_table_names_itself() -> None:
    with pytest.raises(gdpa.GdpaError, match="color: expected ids from 0 to 4, the rows of its table, got 5"):
        gdpa.models.Table("color", 5, 3)(torch.tensor([0, 5]))


@BOTH
def test_a_batch_of_another_schema_is_refused(name: str) -> None:
    data = clicks()
    model, batch = tiny(name, data.schema), data.batch(0)
    for wrong, argument in (
        (replace(batch, dense=batch.dense[:, :3]), r"^dense: expected shape \(6, 8\)"),
        (replace(batch, sparse=batch.sparse[:, :2]), r"^sparse: expected shape \(6, 3\)"),
        (replace(batch, history=replace(batch.history, values=None)), "^history.values: expected a value per event"),
        (replace(batch, dense=batch.dense[:4]), r"^dense: expected shape \(6, 8\), .*, got \(4, 8\)"),
        (replace(batch, sparse=batch.sparse.float()), "^sparse: expected .* torch.int64, .* got .* torch.float32"),
        (replace(batch, labels=batch.labels[:3]), r"^request_timestamps: expected shape \(3,\), .* got \(6,\)"),
        (replace(batch, request_timestamps=batch.request_timestamps[:3]), r"^request_timestamps: expected shape \(6,\)"),
        (replace(batch, history=replace(batch.history, types=batch.history.types[:3])), "^history.types: expected"),
        (
            replace(batch, history=replace(batch.history, offsets=batch.history.offsets[:4])),
            r"^history.offsets: expected shape \(7,\)",
        ),
        *(
            (
                replace(batch, history=replace(batch.history, offsets=offsets)),
                "^history.offsets: expected a non-decreasing sequence from 0",
            )
            for offsets in (batch.history.offsets + 1, batch.history.offsets.flip(0), batch.history.offsets.clamp(max=3))
        ),
    ):
        with pytest.raises(gdpa.GdpaError, match=argument):
            model(wrong)


@BOTH
def test_the_least_schema_and_names_with_dots(name: str) -> None:
    history = History(torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([5, 6]))
    least = Batch(torch.zeros(2), torch.tensor([9, 9]), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64), history)
    assert tiny(name, Schema(0, (), 2, ("view",)))(least).shape == (2,)
    dotted = Schema(0, (("a.b", 3), ("a%2Eb", 3), ("items", 3)), 2, ("view",))
    model = tiny(name, dotted)
    assert len(model.tables) == 4
    assert model(replace(least, sparse=torch.zeros(2, 3, dtype=torch.int64))).shape == (2,)


@BOTH
def test_another_attention_may_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clicks()
    calls = []

    def attention(*arguments: Any, **keywords: Any) -> Tensor:
        calls.append(keywords["backend"])
        return gdpa.attention_varlen(*arguments, **keywords)

    model, default = tiny(name, data.schema, attention=attention), tiny(name, data.schema)
    assert torch.equal(model(data.batch(0)), default(data.batch(0)))
    modules = [module for module in model.modules() if isinstance(module, gdpa.nn.base.AttentionModule)]
    assert len(calls) == len(modules) > 4
    halved = tiny(name, data.schema, attention=lambda *arguments, **keywords: attention(*arguments, **keywords) / 2)
    assert not torch.allclose(halved(data.batch(0)), default(data.batch(0)))


@BOTH
def test_the_dense_part_is_one_graph_for_batches_of_any_size(name: str) -> None:
    data = clicks()
    config = PRESETS[name]["tiny"]
    if isinstance(config, InterFormerConfig):
        config = replace(config, layers=1)
    else:
        config = replace(config, events=(replace(config.events[0], types=("*",)),))
    torch.manual_seed(0)
    plain = gdpa.models.from_config(config, data.schema)
    model = copy.deepcopy(plain)
    graphs = CompileCounter()
    model.dense.compile(backend=graphs, fullgraph=True, dynamic=True)
    for batch in (clicks(24).batch(1), clicks(24).batch(2), clicks(30).batch(0)):  # more events than a chunk of windows has
        logits = model(batch)
        torch.testing.assert_close(logits, plain(batch))
        logits.sum().backward()
        plain(batch).sum().backward()
    assert graphs.frame_count == 1
    for (key, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda m, key=key: f"{key}: {m}")
    assert set(model.state_dict()) == set(plain.state_dict())


@BOTH
def test_autocast_computes_in_half_precision_and_gives_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clicks(16)
    model, batch = tiny(name, data.schema), data.batch(0)
    right = model(batch)
    from gdpa.backends import cpu

    calls = spy(monkeypatch, cpu, "forward")
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(batch)
    assert {call[1].dtype for call in calls} == {torch.float16}
    assert logits.dtype == torch.float32
    assert (logits - right).abs().max() < 0.05 * right.abs().max()
    logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


class TestKunlun:
    def test_odd_layers_reuse_the_summary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Layers 0 and 2 and the finished sequence are pooled; layers 1 and 3 see what layers 0 and 2 saw."""
        (group,) = PRESETS["kunlun"]["gem-block"].events
        group = replace(group, width=8, heads=2, seeds=4, tokens=2, terms=1, window=4)
        config = replace(PRESETS["kunlun"]["tiny"], events=(group,))
        data = clicks()
        model = gdpa.models.from_config(config, data.schema)
        seen: list[Tensor] = []
        for layer in model.dense.interact:
            layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1][:, config.context_tokens :]))
        pools = spy(monkeypatch, gdpa.models.kunlun.SummaryPool, "forward")
        model(data.batch(0))
        assert len(seen) == 4 and len(pools) == 3
        assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3]) and not torch.equal(seen[1], seen[2])

    def test_event_types_have_their_own_sizes(self) -> None:
        model = gdpa.models.build("kunlun", "small", clicks().schema)
        assert model.group_of == [1, 0, 0]  # impression, click, conversion
        sizes = [
            (stack.pools[0].pool.width, stack.pools[0].pool.heads, stack.pools[0].pool.condense.out_tokens, stack.depth)
            for stack in model.dense.groups
        ]
        assert sizes == [(256, 8, 32, 3), (128, 4, 16, 2)]
        assert [stack.windows[0].attend.window for stack in model.dense.groups] == [100, 50]
        assert len(model.dense.generate) == 3

    def test_groups_without_types_in_the_schema_are_left_out(self) -> None:
        model = gdpa.models.build("kunlun", "tiny", replace(clicks().schema, event_types=("rating",)))
        assert model.group_of == [0] and len(model.dense.groups) == 1
        named = (replace(PRESETS["kunlun"]["tiny"].events[0], types=("click",)),)
        with pytest.raises(gdpa.GdpaError, match="schema: expected event types that the config names .click., got 'impression'"):
            gdpa.models.from_config(replace(PRESETS["kunlun"]["tiny"], events=named), clicks().schema)


class TestSequences:
    @pytest.mark.parametrize("window", [1, 3, 40])
    def test_windows_by_chunks_equal_windows_by_hand(self, window: int) -> None:
        lengths = (5, 0, 70, 1, 33)
        offsets = gdpa.offsets_from_lengths(torch.tensor(lengths))
        q, k, v = torch.randn(3, sum(lengths), 2, 4, dtype=torch.float64).unbind()
        out = banded_attention(q, k, v, offsets, window)
        pairs = 0
        for b, length in enumerate(lengths):
            rows = slice(int(offsets[b]), int(offsets[b + 1]))
            behind = torch.arange(length)[:, None] - torch.arange(length)
            seen = (behind >= 0) & (behind < window)
            scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) / 2
            p = scores.masked_fill(~seen, -math.inf).softmax(-1)
            torch.testing.assert_close(out[rows], torch.einsum("hqk,khd->qhd", p, v[rows]))
            pairs += int(seen.sum())
        assert window_pairs(torch.tensor(lengths), window) == pairs
        assert banded_attention(q[:0], k[:0], v[:0], offsets[:1], window).shape == (0, 2, 4)

    @pytest.mark.parametrize("sequence", range(5))
    def test_a_nan_stays_in_its_own_sequence(self, sequence: int) -> None:
        """Also those of rows that no sequence covers, the last of five; forward and in all gradients."""
        offsets = gdpa.offsets_from_lengths(torch.tensor([5, 70, 1, 33]))
        ends = [*offsets.tolist(), 120]
        rows = slice(ends[sequence], ends[sequence + 1])
        inputs = torch.randn(4, 120, 2, 4)
        poisoned = inputs.clone()
        poisoned[:, rows] = math.nan
        others = torch.ones(120, dtype=torch.bool)
        others[rows] = False
        results = []
        for x in (inputs, poisoned):
            q, k, v = (y.requires_grad_() for y in x[:3].clone().unbind())
            out = banded_attention(q, k, v, offsets, 40)
            results.append((out, *torch.autograd.grad(out, (q, k, v), x[3])))
        for clean, dirty in zip(*results, strict=True):
            assert torch.equal(clean[others], dirty[others])
        assert results[1][0][rows].isnan().all()

    def test_tokens_are_prepended_and_both_ends_read(self) -> None:
        values, tokens = torch.arange(6.0)[:, None], -torch.arange(1.0, 7.0).view(3, 2, 1)
        joined, offsets = prepend(values, torch.tensor([0, 2, 2, 6], dtype=torch.int32), tokens)
        assert joined.flatten().tolist() == [-1, -2, 0, 1, -3, -4, -5, -6, 2, 3, 4, 5]
        assert offsets.tolist() == [0, 4, 6, 12] and offsets.dtype == torch.int32
        rows, there = end_rows(offsets, 2, 3)
        assert rows.tolist() == [[0, 1, 0, 2, 3], [4, 5, 4, 4, 4], [6, 7, 9, 10, 11]]
        assert there.tolist() == [[True, True, False, True, True], [True, True, False, False, False], [True] * 5]


@pytest.mark.parametrize("name", NAMES)
def test_no_token_starts_without_variance(name: str) -> None:
    """The LayerNorm behind the map over the features would make its gradient 300 times as large, and clipping all others' as small."""
    torch.manual_seed(0)
    clicks = SyntheticClicks(16)
    model = gdpa.models.build(name, "tiny", clicks.schema)
    mix = model.dense.features.mix
    assert mix.out_features > mix.in_features, "more tokens than features"
    torch.testing.assert_close(mix.weight[: mix.in_features], torch.eye(mix.in_features))
    batch = clicks.batch(0)
    functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
    norms = torch.stack([parameter.grad.norm() for _, parameter in model.dense_parameters() if parameter.grad is not None])
    assert mix.weight.grad is not None and mix.weight.grad.norm() < 0.5 * norms.norm()


def test_a_map_over_tokens_reads_all_that_come_in_from_the_start() -> None:
    mix = TokenMixer(5, 2, 8).mix.weight
    torch.testing.assert_close(mix[:, :2], torch.eye(2))
    assert (mix[:, 2:] != 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_not_rounded_under_autocast(name: str) -> None:
    clicks = SyntheticClicks(16)
    torch.manual_seed(0)
    model = gdpa.models.build(name, "tiny", clicks.schema)
    nn.init.normal_(model.get_parameter("dense.head.out.weight"))
    with torch.autocast("cpu", torch.float16):
        logits = model.dense(clicks.batch(0).dense, *model.embed(clicks.batch(0)))
    assert logits.dtype == torch.float32 and (logits != logits.half()).float().mean() > 0.9


class TestConfigs:
    @pytest.mark.parametrize(("name", "preset"), [(name, preset) for name in NAMES for preset in PRESETS[name]])
    def test_survive_json(self, name: str, preset: str) -> None:
        config = PRESETS[name][preset]
        plain = json.loads(json.dumps(config.to_dict()))
        assert plain == config.to_dict() and config_from_dict(plain) == config
        assert config_from_dict({**plain, "learning_rate": 0.5}) != config
        assert config.default_steps > config.warmup_steps and config.max_history >= 16

    @pytest.mark.parametrize(
        ("change", "argument"),
        [
            ({"width": 0}, "width"),
            ({"tau": -1.0}, "tau"),
            ({"context_tokens": 3}, "context_tokens"),
            ({"learning_rate": "fast"}, "learning_rate"),
            ({"model": "dlrm"}, "config"),
            ({"surprise": 1}, "config"),
            ({"experts": 8}, "experts"),
            ({"events": []}, "events"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_wrong_ones_are_refused_by_name(self, change: dict[str, Any], argument: str) -> None:
        with pytest.raises(gdpa.GdpaError, match=rf"^{argument}: expected"):
            config_from_dict({**PRESETS["kunlun"]["tiny"].to_dict(), **change})

    def test_names_and_presets_are_refused_with_the_ones_there_are(self) -> None:
        schema = clicks().schema
        with pytest.raises(gdpa.GdpaError, match="name: expected one of interformer, kunlun, got 'gpt'"):
            gdpa.models.build("gpt", "tiny", schema)
        with pytest.raises(gdpa.GdpaError, match="preset: expected one of tiny, small, gem-block, got 'huge'"):
            gdpa.models.build("kunlun", "huge", schema)
        with pytest.raises(gdpa.BackendUnavailable, match="backend: expected"):
            gdpa.models.build("kunlun", "tiny", schema, backend="cuda")

    @BOTH
    def test_gem_block_has_the_published_shape(self, name: str) -> None:
        config: Config = PRESETS[name]["gem-block"]
        with torch.device("meta"):
            model = gdpa.models.build(name, "gem-block", clicks().schema)
        blocks = [module for module in model.modules() if isinstance(module, gdpa.nn.PFFN)]
        assert {(block.heads, block.head_dim, block.hidden) for block in blocks} == {(4, 128, 256)}
        layers = config.layers if isinstance(config, InterFormerConfig) else config.events[0].layers
        assert layers == 4 and config.max_history == 2048

    @pytest.mark.parametrize("gate", ["sigmoid", "tanh", "identity"])
    def test_gates(self, gate: str) -> None:
        data = clicks()
        config = replace(PRESETS["interformer"]["tiny"], gate=gate)
        torch.manual_seed(0)
        gating = gdpa.models.from_config(config, data.schema).dense.condense[0].gating
        z = torch.randn(2, 3, 32)
        inner = z * gating.linear(z)
        expected = {"sigmoid": inner.sigmoid(), "tanh": inner.tanh(), "identity": inner}[gate]
        assert torch.equal(gating(z), expected)
        with pytest.raises(gdpa.GdpaError, match="gate: expected 'sigmoid'"):
            replace(config, gate="relu")


class TestSummary:
    @BOTH
    def test_counts_every_parameter_once(self, name: str) -> None:
        model = tiny(name)
        summary = model.summary()
        assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert summary.forward_flops == 0 and "FLOPs" not in str(summary)
        tables = 64 * 16 + 32 * 16 + 8 * 16
        assert summary.parts[0].name == "tables" and summary.parts[0].parameters == tables

    def test_flops_of_an_interformer_are_those_that_torch_counts(self) -> None:
        data = clicks(16)
        model, batch = tiny("interformer", data.schema), data.batch(0)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(batch)
        # 24 columns of an event (16 of its item, 3 types, 2 scalars, zeros) make 3 x 16; a type is looked up, not multiplied.
        joined = 2 * len(batch.history.items) * (24 * 48 - (16 + 2) * 16)
        assert model.flops(batch) == counter.get_total_flops() - joined > 0

    def test_flops_of_a_kunlun_are_those_that_torch_counts_but_for_the_windows(self) -> None:
        """The chunks of the windowed attention compute more pairs than the windows have; those are counted by hand."""
        data = clicks(16)
        model, batch = tiny("kunlun", data.schema), data.batch(0)
        with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():
            model(batch)
        counts = counter.get_flop_counts()["Global"]
        chunked = sum(count for operator, count in counts.items() if "scaled_dot_product" in str(operator))
        windows = 0
        for row in range(len(batch)):
            types = batch.rows(row, row + 1).history.types
            clicked = int((types > 0).sum())
            windows += sum(min(position + 1, 16) for position in range(clicked))
        # 24 columns of an event (16 of its item, 2 scalars, the types of its group, zeros) make a token; types and zeros are no work.
        clicked = int((batch.history.types > 0).sum())
        joined = 2 * (24 - 18) * (clicked * 32 + (len(batch.history.items) - clicked) * 16)
        # torch's counter does not know every kernel of scaled_dot_product_attention: `chunked` is what it did count.
        assert model.flops(batch) == counter.get_total_flops() - joined - chunked + 4 * 32 * windows

    @BOTH
    def test_prints_a_table_for_a_batch(self, name: str) -> None:
        data = clicks(16)
        model, batch = tiny(name, data.schema), data.batch(0)
        summary = model.summary(batch)
        assert summary.step_flops == 3 * summary.forward_flops == 3 * model.flops(batch)
        lines = str(summary).splitlines()
        assert f"{summary.forward_flops:,}" in lines[-2] and f"{summary.parameters:,}" in lines[0]
        assert lines[-1] == f"for a batch of 16 examples and {len(batch.history.items)} events"


@pytest.mark.parametrize("module", ["", ".interformer", ".kunlun"])
def test_examples_in_docstrings_run(module: str) -> None:
    failed, ran = doctest.testmod(importlib.import_module(f"gdpa.models{module}"), extraglobs={"gdpa": gdpa})
    assert ran >= 3 and failed == 0


def test_configs_are_frozen() -> None:
    for config in (PRESETS["kunlun"]["tiny"], PRESETS["interformer"]["tiny"], PRESETS["kunlun"]["tiny"].events[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.width = 3
    assert isinstance(PRESETS["kunlun"]["tiny"], KunlunConfig) and isinstance(PRESETS["kunlun"]["tiny"].events[0], EventConfig)

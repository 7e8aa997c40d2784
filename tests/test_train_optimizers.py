"""Row-wise Adagrad against its formula; warm-up, clipping and the guard of `Updates`."""

import copy
import doctest
import math

import pytest
import torch
from torch import nn

from gdpa.errors import GdpaError
from gdpa.train import optimizers
from gdpa.train.optimizers import RowwiseAdagrad
from gdpa.train.updates import NonFinite, Rates, Updates, group_of

ROWS, WIDTH = 12, 4


def make_table(sparse):
    torch.manual_seed(0)
    return nn.Embedding(ROWS, WIDTH, sparse=sparse)


def lookups():
    """Ids of some steps: repeated, absent, and none at all."""
    return [torch.tensor(ids) for ids in ([3, 3, 7], [1], [3, 11, 0, 0], [], [7, 3])]


def train(table, optimizer, targets):
    for ids in lookups():
        if len(ids):
            (table(ids) * targets[: len(ids)]).square().sum().backward()
        else:
            table(ids.long()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def formula(lr, eps, targets):
    """The same training in float64, row by row."""
    weight, total = make_table(False).weight.detach().double(), torch.zeros(ROWS, dtype=torch.float64)
    for ids in lookups():
        grad = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        for place, row in enumerate(ids.tolist()):
            grad[row] += 2 * weight[row] * targets[place].double() ** 2
        for row in set(ids.tolist()):
            total[row] += grad[row].square().mean()
            weight[row] -= lr * grad[row] / (total[row].sqrt() + eps)
    return weight, total


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_rowwise_adagrad_follows_its_formula(sparse):
    targets = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(1)) + 0.5
    table = make_table(sparse)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1, eps=1e-6)
    train(table, optimizer, targets)
    weight, total = formula(0.1, 1e-6, targets)
    # A handful of float32 operations on numbers near 1, in five steps.
    torch.testing.assert_close(table.weight.detach().double(), weight, rtol=0, atol=32 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(
        optimizer.state[table.weight]["sum"].double(), total, rtol=32 * torch.finfo(torch.float32).eps, atol=0
    )


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_rows_that_were_not_looked_up_keep_their_weights_and_their_state(sparse):
    table = make_table(sparse)
    before = table.weight.detach().clone()
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    train(table, optimizer, torch.ones(4, WIDTH))
    unseen = sorted(set(range(ROWS)) - {row for ids in lookups() for row in ids.tolist()})
    assert unseen
    assert table.weight[unseen].equal(before[unseen])
    assert optimizer.state[table.weight]["sum"].shape == (ROWS,)
    assert not optimizer.state[table.weight]["sum"][unseen].any()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_step_that_is_called_off_changes_nothing(sparse):
    table = make_table(sparse)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    optimizer.found_inf = torch.ones(())
    before = table.weight.detach().clone()
    (table(torch.tensor([1, 2])) * math.nan).sum().backward()
    optimizer.step()
    assert table.weight.equal(before)
    assert not optimizer.state[table.weight]["sum"].any()


def test_what_is_no_table_is_refused():
    with pytest.raises(GdpaError, match=r"params: expected tables of shape \(rows, width\), got the shape \(3,\)"):
        RowwiseAdagrad([nn.Parameter(torch.zeros(3))])
    with pytest.raises(GdpaError, match="lr: expected"):
        RowwiseAdagrad([nn.Parameter(torch.zeros(3, 2))], lr=-1.0)


def test_examples_in_the_docstrings_run():
    failed, ran = doctest.testmod(optimizers)
    assert ran and not failed


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleDict({"item": nn.Embedding(5, 3)})
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, ids):
        x = self.tables["item"](ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).squeeze(-1)


def updates_of(model, **rates):
    named = list(model.named_parameters())
    tables = [pair for pair in named if pair[0].startswith("tables.")]
    dense = [pair for pair in named if not pair[0].startswith("tables.")]
    return Updates(dense, tables, Rates(**{"learning_rate": 0.1, "table_learning_rate": 0.1, "warmup_steps": 0, **rates}))


def test_rates_rise_over_the_warm_up_and_stay():
    rates = Rates(learning_rate=1.0, table_learning_rate=1.0, warmup_steps=3)
    assert [rates.share(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    model = Small()
    updates = updates_of(model, warmup_steps=3)
    for expected in (0.025, 0.05, 0.075, 0.1, 0.1):
        loss = model(torch.tensor([1, 2])).sum()
        loss.backward()
        updates.apply(round(expected / 0.025) - 1, loss.detach())
        assert [group["lr"] for o in updates.optimizers.values() for group in o.param_groups] == [pytest.approx(expected)] * 3


def test_the_dense_gradient_is_scaled_down_to_the_clip_and_the_tables_is_not():
    model, small = Small(), 1e-3
    updates = updates_of(model, clip=small)
    loss = model(torch.tensor([1, 2, 4])).square().sum()
    loss.backward()
    dense = [p.grad.clone() for name, p in model.named_parameters() if not name.startswith("tables.")]
    table = model.tables["item"].weight.grad.clone()
    expected = torch.cat([grad.flatten() for grad in dense]).norm()
    assert expected > small
    norm = updates.apply(0, loss.detach())
    torch.testing.assert_close(norm, expected)
    # AdamW's first moment after one step is (1 - 0.9) of the gradient that it was given.
    given = torch.cat([updates.adamw.state[p]["exp_avg"].flatten() for p in model.parameters() if p in updates.adamw.state]) / 0.1
    torch.testing.assert_close(given.norm(), torch.tensor(small), rtol=1e-3, atol=0)
    torch.testing.assert_close(updates.adagrad.state[model.tables["item"].weight]["sum"], table.square().mean(1))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            lambda model: model.layers[1].weight.data.fill_(math.inf),
            r"step 3: .* the weights of parameter group 'layers.1' \(layers.1.weight\) were not finite before it",
        ),
        (
            lambda model: model.head.weight.register_hook(lambda grad: grad * math.nan),
            r"step 3: .*the weights were finite, the gradient of parameter group 'head.weight' \(head.weight\) was not, 1 of 7",
        ),
        (
            lambda model: model.tables["item"].weight.register_hook(lambda grad: grad * math.inf),
            r"step 3: .*the gradient of parameter group 'tables.item' \(tables.item.weight\) was not, 1 of 7",
        ),
    ],
    ids=["weight", "gradient", "table"],
)
def test_a_step_that_is_not_finite_is_named_and_neither_it_nor_a_later_one_changes_weights(spoil, expected):
    model = Small()
    updates = updates_of(model)
    before = {}
    for step in range(5):
        if step == 2:
            spoil(model)
            before = {name: value.clone() for name, value in model.state_dict().items()}
        loss = model(torch.tensor([1, 2])).square().sum()
        loss.backward()
        updates.apply(step, loss.detach())
        if step < 2:
            updates.check()
    for name, value in model.state_dict().items():
        assert value.equal(before[name]), name
    with pytest.raises(NonFinite, match=expected):
        updates.check()


def test_a_parameter_without_a_gradient_is_left_alone():
    model = Small()
    model.layers.append(nn.Linear(3, 3))
    model.layers[2].requires_grad_(True)
    updates = updates_of(model)
    unused = model.layers.pop(2)
    before = unused.weight.detach().clone()
    loss = model(torch.tensor([1, 2])).sum()
    loss.backward()
    updates.apply(0, loss.detach())
    updates.check()
    assert unused.weight.equal(before)


def test_a_sparse_gradient_of_no_rows_is_finite():
    """As of a table whose feature no example of the batch has, or of the shard of a divided one that no rank asked for a row of."""
    model = Small()
    model.tables["item"].sparse = True
    updates = updates_of(model)
    before = model.tables["item"].weight.detach().clone()
    loss = (model(torch.tensor([], dtype=torch.int64)).sum() + model.head(torch.ones(1, 3))).sum()
    loss.backward()
    assert model.tables["item"].weight.grad._nnz() == 0
    updates.apply(0, loss.detach())
    updates.check()
    assert model.tables["item"].weight.equal(before)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("dense.layers.2.pffn.key.weight", "dense.layers.2"),
        ("dense.head.out.bias", "dense.head"),
        ("tables.history_item.weight", "tables.history_item"),
        ("bias", "bias"),
    ],
)
def test_parameter_groups_are_parts_of_the_model(name, group):
    assert group_of(name) == group


def test_state_that_is_loaded_stays_float32_whatever_the_tables_are():
    table = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
    optimizer = RowwiseAdagrad([table])
    for _ in range(300):
        table.grad = torch.ones_like(table)
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    table.grad = torch.ones_like(table)
    optimizer.step()
    total = optimizer.state[table]["sum"]
    assert total.dtype == torch.float32
    assert total.tolist() == [301.0] * 4, "bfloat16 has no 301"


def test_tables_may_be_added_and_optimizers_copied():
    first, second = (nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
    optimizer = RowwiseAdagrad([first])
    optimizer.add_param_group({"params": [second]})
    with pytest.raises(GdpaError, match="expected tables of shape"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    twin = copy.deepcopy(optimizer)
    for one in (optimizer, twin):
        for group in one.param_groups:
            for table in group["params"]:
                table.grad = torch.ones_like(table)
        one.step()
        assert [len(group["params"]) for group in one.param_groups] == [1, 1]
    assert second.abs().min() > 0
    assert torch.equal(twin.param_groups[1]["params"][0], second)

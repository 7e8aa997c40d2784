"""Tables divided by rows: lookups are bitwise those of the whole table, gradients and updates are the whole table's too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import gdpa
from gdpa.distributed import ShardedTable, shard_tables
from gdpa.models.tables import Table
from gdpa.train.optimizers import RowwiseAdagrad

pytestmark = needs_gloo

WIDTH = 3
STEPS = 3
# Rows that the ranks do not divide, fewer rows than ranks, and one row.
ROWS = (7, 8, 2, 1)


def ids_of(step: int, rank: int, rows: int) -> Tensor:
    """Repeated ids, ids of other ranks, in two dimensions; in step 1 rank 0 has none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(rows, (0 if (step, rank) == (1, 0) else 4, 3), generator=generator)


def weights_of(step: int, rank: int, ids: Tensor) -> Tensor:
    """A gradient for every number looked up: multiples of 6, whose sums and averages over 2 or 3 ranks are exact in any order."""
    return 6.0 * torch.randint(-4, 5, (*ids.shape, WIDTH), generator=torch.Generator().manual_seed(100 * step + rank))


def make_table(rows: int, sparse: bool) -> Table:
    torch.manual_seed(rows)
    return Table("feature", rows, WIDTH, sparse=sparse)


@torch.no_grad()
def whole_grad(table: ShardedTable, sparse: bool) -> Tensor:
    grad = table.weight.grad
    assert isinstance(grad, DTensor) and grad.to_local().is_sparse == sparse
    local = grad.to_local().to_dense().clone()
    shape = (table.rows, table.width)
    return DTensor.from_local(local, table.mesh, [Shard(0)], run_check=False, shape=shape, stride=(table.width, 1)).full_tensor()


def train_divided(rank: int) -> dict[tuple[int, bool], dict[str, Any]]:
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for rows in ROWS:
        for sparse in (False, True):
            table = make_table(rows, sparse)
            if rank > 0:
                torch.nn.init.zeros_(table.weight)  # the values are those of the first rank
            table = ShardedTable(table, mesh)
            assert isinstance(table.weight, DTensor) and table.weight.placements == (Shard(0),)
            assert table.weight.shape == (rows, WIDTH)
            optimizer = RowwiseAdagrad([table.weight], lr=0.5)
            record: dict[str, Any] = {"found": [], "grads": [], "local_rows": table.weight.to_local().shape[0]}
            for step in range(STEPS):
                ids = ids_of(step, rank, rows)
                looked_up = table(ids)
                (looked_up * weights_of(step, rank, ids)).sum().backward()
                record["found"].append(looked_up.detach())
                record["grads"].append(whole_grad(table, sparse))
                optimizer.step()
                optimizer.zero_grad()
            record["weight"] = table.weight.detach().full_tensor()
            record["sum"] = optimizer.state[table.weight]["sum"].full_tensor()
            found[rows, sparse] = record
    return found


def everything(rank: int) -> dict[str, Any]:
    return {"train": train_divided(rank), "accumulate": accumulate(rank), "refusals": refusals(rank)}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(everything)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_divided_table_learns_as_the_whole_one(ranks: int, two_ranks: list[dict[str, Any]]):
    results = [found["train"] for found in two_ranks] if ranks == 2 else run_ranks(train_divided, ranks=ranks)
    for rows in ROWS:
        for sparse in (False, True):
            table = make_table(rows, sparse)
            optimizer = RowwiseAdagrad([table.weight], lr=0.5)
            for step in range(STEPS):
                for rank in range(ranks):
                    ids = ids_of(step, rank, rows)
                    looked_up = table(ids)
                    assert torch.equal(results[rank][rows, sparse]["found"][step], looked_up), (rows, sparse, step, rank)
                    (looked_up * weights_of(step, rank, ids)).sum().backward()
                # Averaged over the ranks, as DDP averages.
                table.weight.grad = table.weight.grad / ranks
                for result in results:
                    assert torch.equal(result[rows, sparse]["grads"][step], table.weight.grad.to_dense()), (rows, sparse, step)
                optimizer.step()
                optimizer.zero_grad()
            for result in results:
                assert torch.equal(result[rows, sparse]["weight"], table.weight.detach()), (rows, sparse)
                assert torch.equal(result[rows, sparse]["sum"], optimizer.state[table.weight]["sum"]), (rows, sparse)
    for rows in ROWS:
        assert sum(result[rows, False]["local_rows"] for result in results) == rows


def accumulate(rank: int) -> dict[bool, Tensor]:
    """Two lookups of one backward pass and one of a second, without zero_grad between."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for sparse in (False, True):
        table = ShardedTable(make_table(7, sparse), mesh)
        first, second, third = (ids_of(step, rank, 7) for step in range(3))
        (table(first).sum() + 2 * table(second).sum()).backward()
        (4 * table(third).sum()).backward()
        found[sparse] = whole_grad(table, sparse)
    return found


def test_gradients_of_several_lookups_add_up(two_ranks: list[dict[str, Any]]):
    expected = torch.zeros(7, WIDTH)
    for rank in range(2):
        for step, factor in enumerate((1.0, 2.0, 4.0)):
            ids = ids_of(step, rank, 7).flatten()
            expected.index_add_(0, ids, torch.full((len(ids), WIDTH), factor / 2))
    for found in (results["accumulate"] for results in two_ranks):
        assert torch.equal(found[False], expected)
        assert torch.equal(found[True], expected)


def refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    table = ShardedTable(make_table(7, False), mesh)
    model = torch.nn.Module()
    found = []
    for call in (
        lambda: table(torch.tensor([0, 7])),
        lambda: table(torch.tensor([-1])),
        lambda: ShardedTable(make_table(7, False), init_device_mesh("cpu", (1, 2))),
        lambda: shard_tables(model, mesh),
        lambda: shard_tables(torch.nn.ModuleDict(), mesh),
    ):
        with pytest.raises(gdpa.GdpaError) as error:
            call()
        found.append(str(error.value))
    model.tables = torch.nn.ModuleDict({"a": torch.nn.Embedding(3, 2)})
    with pytest.raises(gdpa.GdpaError) as error:
        shard_tables(model, mesh)
    return [*found, str(error.value), repr(table)]


def test_wrong_ids_and_models_are_refused_by_name(two_ranks: list[dict[str, Any]]):
    for found in (results["refusals"] for results in two_ranks):
        assert found[0] == "feature: expected ids from 0 to 6, the rows of its table, got 7"
        assert found[1] == "feature: expected ids from 0 to 6, the rows of its table, got -1"
        assert found[2].startswith("mesh: expected one dimension, got 2")
        assert found[3].startswith("model: expected one with `tables`, an nn.ModuleDict, got Module")
        assert found[4].startswith("model: expected one with `tables`, an nn.ModuleDict, got ModuleDict")
        assert found[5] == "model.tables['a']: expected a gdpa.models.tables.Table, got Embedding"
        assert found[6] == "ShardedTable('feature', rows=7, width=3, sparse=False, ranks=2)"

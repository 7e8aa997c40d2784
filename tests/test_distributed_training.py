"""A model on two ranks: the losses of one rank with all the examples, and checkpoints that go on with another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import gdpa
import gdpa.models
from gdpa.data.schema import Batch
from gdpa.data.synthetic import SyntheticClicks
from gdpa.distributed import ShardedTable, load_tensors, parallelize, save_tensors
from gdpa.train.optimizers import RowwiseAdagrad

pytestmark = needs_gloo

BATCH = 24
STEPS = 4
CLICKS = SyntheticClicks(batch_size=BATCH)


class Training:
    """A model of gdpa.models and its optimisers, on one rank or spread over two."""

    def __init__(self, name: str, dense: str | None, seed: int = 0, sparse: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = gdpa.models.build(name, "tiny", CLICKS.schema)
        for table in self.model.tables.values():
            table.sparse = sparse
        self.called: nn.Module = self.model
        if dense is not None:
            self.called = parallelize(self.model, init_device_mesh("cpu", (2,)), dense)
        parameters = [parameter for _, parameter in self.model.dense_parameters()]
        self.adamw = torch.optim.AdamW(parameters, lr=1e-3)
        self.adagrad = RowwiseAdagrad([parameter for _, parameter in self.model.table_parameters()], lr=0.05)

    def backward(self, batch: Batch, share: float = 1.0) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self.called(batch), batch.labels)
        (share * loss).backward()
        return loss.detach()

    def update(self) -> None:
        for optimizer in (self.adamw, self.adagrad):
            optimizer.step()
            optimizer.zero_grad()

    def step_of_rank(self, step: int, rank: int) -> float:
        """One step with half the examples here; the loss of all of them."""
        loss = self.backward(half(step, rank)) / 2
        dist.all_reduce(loss)
        self.note_gradients(step)
        self.update()
        return loss.item()

    def step_of_halves(self, step: int) -> float:
        """One step by one process, with the examples of each rank one after the other."""
        losses = [self.backward(half(step, rank), 0.5) / 2 for rank in range(2)]
        self.note_gradients(step)
        self.update()
        return sum(losses).item()  # type: ignore[union-attr]

    @torch.no_grad()
    def note_gradients(self, step: int) -> None:
        if step == 0:
            self.gradients = {name: whole(parameter.grad).clone() for name, parameter in self.model.named_parameters()}

    def step_of_all(self, step: int) -> float:
        loss = self.backward(CLICKS.batch(step))
        self.update()
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()
        for name, parameter in self.model.named_parameters():
            for optimizer in (self.adamw, self.adagrad):
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{name}/{key}", value


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, dense, on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().is_sparse:
        dense, mesh, placements = tensor.to_local().to_dense(), tensor.device_mesh, tensor.placements
        tensor = DTensor.from_local(dense, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return tensor.full_tensor()


def half(step: int, rank: int) -> Batch:
    return CLICKS.batch(step).rows(rank * BATCH // 2, (rank + 1) * BATCH // 2)


def train_on_ranks(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, dense, sparse in (("kunlun", "ddp", False), ("kunlun", "fsdp", True), ("interformer", "fsdp", False)):
        training = Training(name, dense, seed=rank, sparse=sparse)  # the first rank's values count
        assert all(isinstance(table, ShardedTable) for table in training.model.tables.values())
        losses = [training.step_of_rank(step, rank) for step in range(2)]
        place = Path(folder, f"{name}-{dense}")
        if rank == 0:
            place.mkdir()
        dist.barrier()
        save_tensors(place, training.tensors())
        losses += [training.step_of_rank(step, rank) for step in range(2, STEPS)]
        divided = sum(isinstance(parameter, DTensor) for _, parameter in training.model.dense_parameters())
        found[f"{name}-{dense}"] = {
            "losses": losses,
            "divided": divided,
            "gradients": training.gradients,
            "tensors": {key: whole(value.detach()) for key, value in training.tensors().items()},
        }
    # One example for two ranks: the second has none, and takes part all the same.
    training = Training("kunlun", "ddp")
    batch = CLICKS.batch(0).rows(rank, 1)
    (2 * summed_loss(training.called(batch), batch)).backward()
    training.note_gradients(0)
    found["one example"] = training.gradients
    return found


def summed_loss(logits: Tensor, batch: Batch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")


def resume_on_ranks(rank: int, folder: str) -> dict[str, list[float]]:
    """Go on from a checkpoint that one process wrote after two steps."""
    found = {}
    for dense in ("ddp", "fsdp"):
        training = Training("kunlun", dense, seed=7)
        training.step_of_rank(9, rank)  # makes the optimisers' state, which is overwritten
        load_tensors(Path(folder), training.tensors())
        found[dense] = [training.step_of_rank(step, rank) for step in range(2, STEPS)]
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have: more threads would add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two_ranks(saved: Path) -> list[dict[str, Any]]:
    return run_ranks(train_on_ranks, str(saved))


def check_losses(came: list[float], wanted: list[float], *, exactly: bool = False) -> None:
    """Losses that may differ by the order of sums, or not at all.

    A float32 sum of n terms in another order differs by some sqrt(n) * 2^-24 of their size, here 3e-7 for the loss and as much for the
    weights, which the steps in between multiply; 1e-5 leaves room for a dozen layers of it. Seen: 3e-7.
    """
    assert len(came) == len(wanted)
    for one, other in zip(came, wanted, strict=True):
        assert one == other if exactly else abs(one - other) < 1e-5 * other


@pytest.mark.parametrize("case", ["kunlun-ddp", "kunlun-fsdp", "interformer-fsdp"])
def test_two_ranks_give_the_losses_of_one(case: str, two_ranks: list[dict[str, Any]]):
    name, dense = case.split("-")
    halves, at_once = Training(name, None), Training(name, None)
    expected = [halves.step_of_halves(step) for step in range(STEPS)]
    check_losses(expected, [at_once.step_of_all(step) for step in range(STEPS)])
    largest = max(float(gradient.abs().max()) for gradient in halves.gradients.values())
    for result in (found[case] for found in two_ranks):
        assert result["divided"] == (0 if dense == "ddp" else len(list(halves.model.dense_parameters())))
        check_losses(result["losses"], expected, exactly=dense == "ddp")
        if dense == "ddp":
            # What one process does with the two halves in turn: sums in the same order, and to halve is exact, so not a bit differs.
            assert [key for key, tensor in halves.tensors().items() if not torch.equal(result["tensors"][key], tensor)] == []
        # AdamW hardly cares for a factor on all gradients, so the losses would not show one; these would. FSDP's hooks change the order
        # in which autograd adds up what several consumers of a tensor send back.
        for key, gradient in halves.gradients.items():
            torch.testing.assert_close(result["gradients"][key], gradient, rtol=1e-4, atol=1e-6 * largest, msg=key)


def test_a_rank_without_examples_changes_nothing(two_ranks: list[dict[str, Any]]):
    training = Training("kunlun", None)
    batch = CLICKS.batch(0).rows(0, 1)
    summed_loss(training.model(batch), batch).backward()
    training.note_gradients(0)
    for found in two_ranks:
        for key, gradient in training.gradients.items():
            assert torch.equal(found["one example"][key], gradient), key


def test_one_rank_goes_on_from_two(two_ranks: list[dict[str, Any]], saved: Path):
    for dense in ("ddp", "fsdp"):
        training = Training("kunlun", None, seed=7)
        training.step_of_all(9)  # makes the optimisers' state, which is overwritten
        load_tensors(saved / f"kunlun-{dense}", training.tensors())
        losses = [training.step_of_halves(step) for step in range(2, STEPS)]
        check_losses(losses, two_ranks[0][f"kunlun-{dense}"]["losses"][2:], exactly=dense == "ddp")


def test_two_ranks_go_on_from_one(two_ranks: list[dict[str, Any]], tmp_path: Path):
    training = Training("kunlun", None)
    for step in range(2):
        training.step_of_halves(step)
    save_tensors(tmp_path, training.tensors())
    for found in run_ranks(resume_on_ranks, str(tmp_path)):
        for dense, losses in found.items():
            check_losses(losses, two_ranks[0]["kunlun-ddp"]["losses"][2:], exactly=dense == "ddp")


def test_a_checkpoint_of_another_model_is_refused(two_ranks: list[dict[str, Any]], saved: Path):
    training = Training("interformer", None)
    with pytest.raises(gdpa.GdpaError, match="expected "):
        load_tensors(saved / "kunlun-ddp", training.tensors())


def refusals(rank: int) -> list[str]:
    mesh, model = init_device_mesh("cpu", (2,)), gdpa.models.build("kunlun", "tiny", CLICKS.schema)
    found = []
    for arguments in ((model, mesh, "dp"), (model, init_device_mesh("cpu", (1, 2)), "ddp"), (nn.Linear(2, 2), mesh, "ddp")):
        with pytest.raises(gdpa.GdpaError) as error:
            parallelize(*arguments)
        found.append(str(error.value))
    return found


def test_wrong_arguments_are_refused_by_name():
    for found in run_ranks(refusals):
        assert found[0] == "dense: expected 'ddp' or 'fsdp', got 'dp'"
        assert found[1].startswith("mesh: expected one dimension, got 2")
        assert found[2] == "model: expected one of gdpa.models, with `dense` and `tables`, got Linear"

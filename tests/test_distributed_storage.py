"""Tensors in a folder: back bitwise on any number of ranks, never by unpickling, and refused where something is wrong."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gdpa
from gdpa.distributed import load_tensors, save_tensors, saved_tensors
from gdpa.distributed.storage import DTYPES, _Writer


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randint(0, 2, (3, 2), generator=generator).to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {
        "weights/matrix.0": torch.randn(7, 5, 2, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "vector": torch.arange(5.0),
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same_bits(came: Tensor, wanted: Tensor) -> bool:
    came, wanted = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (came, wanted))
    return torch.equal(came, wanted)


def test_one_process_reads_what_it_wrote_without_unpickling(tmp_path: Path, monkeypatch, recwarn):
    tensors = some_tensors()
    save_tensors(tmp_path, tensors)

    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("something was unpickled")

    for module in (pickle, torch.serialization.pickle):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(torch, "load", never)
    found = zeros_like(tensors)
    load_tensors(tmp_path, found)
    assert [name for name in tensors if not same_bits(found[name], tensors[name])] == []
    assert saved_tensors(tmp_path) == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert not recwarn.list


def test_a_file_is_in_the_safetensors_layout(tmp_path: Path):
    save_tensors(tmp_path, {"a": torch.arange(6, dtype=torch.int32).view(2, 3), "b": torch.tensor([1.5])})
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["a"] == {"dtype": "I32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["b"] == {"dtype": "F32", "shape": [1], "data_offsets": [24, 28]}
    assert data[8 + length :] == struct.pack("<6if", *range(6), 1.5)
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    assert places["a"]["saved_offsets"] == [0, 0]


def test_the_safetensors_library_reads_a_file(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = some_tensors()
    save_tensors(tmp_path, tensors)
    found = safetensors.load_file(next(tmp_path.iterdir()))
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


def rewritten(folder: Path, change) -> None:
    """Change a folder's one file: `change(header, bytes after it) -> bytes of a file`."""
    (file,) = folder.iterdir()
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    file.write_bytes(change(json.loads(data[8 : 8 + length]), data[8 + length :]))


def packed(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


def with_entry(**changes: Any):
    return lambda header, rest: packed({**header, "a": {**header["a"], **changes}}, rest)


def with_place(**changes: Any):
    def change(header: Any, rest: bytes) -> bytes:
        places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        places["a"].update(changes)
        return packed({**header, "__metadata__": {"DCP_SHARDING_INFO": json.dumps(places)}}, rest)

    return change


DAMAGE = {
    "truncated": lambda header, rest: packed(header, rest[:-1]),
    "no-header": lambda header, rest: b"1234",
    "a-pickle": lambda header, rest: pickle.dumps({"a": 1}),
    "header-too-long": lambda header, rest: struct.pack("<Q", 2**40) + rest,
    "not-json": lambda header, rest: struct.pack("<Q", 4) + b"{{{{" + rest,
    "a-list": lambda header, rest: packed([1, 2], rest),
    "no-places": lambda header, rest: packed({name: header[name] for name in "ab"}, rest),
    "strange-dtype": with_entry(dtype="C64"),
    "shape-too-large": with_entry(shape=[3, 3]),
    "negative-shape": with_entry(shape=[-2, -3]),
    "before-the-data": with_entry(data_offsets=[-24, 0]),
    "past-the-end": with_entry(data_offsets=[24, 48]),
    "outside-its-tensor": with_place(saved_offsets=[1, 0]),
    "other-rank": with_place(saved_offsets=[0]),
    "a-piece-missing": with_place(global_shape=[4, 3]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_and_changes_nothing(damage: str, tmp_path: Path):
    tensors = {"a": torch.arange(6, dtype=torch.int32).view(2, 3), "b": torch.tensor([1.5])}
    save_tensors(tmp_path, tensors)
    rewritten(tmp_path, DAMAGE[damage])
    found = zeros_like(tensors)
    with pytest.raises(gdpa.GdpaError, match="expected"):
        load_tensors(tmp_path, found)
    assert all(torch.equal(found[name], torch.zeros_like(tensor)) for name, tensor in tensors.items())


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path):
    with pytest.raises(gdpa.GdpaError, match=r"expected a folder with files \*\.safetensors, got none"):
        load_tensors(tmp_path, {})
    with pytest.raises(gdpa.GdpaError, match=r"expected a folder"):
        saved_tensors(tmp_path / "absent")
    save_tensors(tmp_path, {"a": torch.zeros(2, 3)})
    for wrong, message in (
        ({"b": torch.zeros(2, 3)}, "expected a tensor 'b', got 1 other"),
        ({"a": torch.zeros(3, 2)}, r"expected 'a' of shape \(3, 2\), torch.float32, got Saved\(shape=\(2, 3\)"),
        ({"a": torch.zeros(2, 3).double()}, r"expected 'a' of shape \(2, 3\), torch.float64, got"),
    ):
        with pytest.raises(gdpa.GdpaError, match=message):
            load_tensors(tmp_path, wrong)
    for wrong in ({"c": torch.zeros(2, dtype=torch.complex64)}, {"c": 3}):
        with pytest.raises(gdpa.GdpaError, match=r"tensors\['c'\]: expected a tensor of"):
            save_tensors(tmp_path, wrong)
    with pytest.raises(gdpa.GdpaError, match="could not be written: rank 0: .*No such file"):
        save_tensors(tmp_path / "absent", {"a": torch.zeros(2, 3)})


def test_ctrl_c_while_tensors_are_written_is_no_error_of_the_file(tmp_path: Path, monkeypatch):
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Writer, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_tensors(tmp_path, {"a": torch.zeros(2)})


def whole_tensors() -> dict[str, Tensor]:
    """By name: how the ranks hold them. Rows that neither 2 nor 3 divides, fewer rows than ranks, columns, nothing."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (7, 4), "few": (1, 4), "columns": (4, 5), "sums": (7,), "alike": (3, 3), "none": (0, 2), "step": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


PLACED = {"rows": Shard(0), "few": Shard(0), "columns": Shard(1), "sums": Shard(0), "none": Shard(0), "alike": Replicate()}


def held(mesh: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: distribute_tensor(t, mesh, [PLACED[name]]) if name in PLACED else t for name, t in tensors.items()}


def save_and_load(rank: int, saved: str, loaded: str) -> tuple[list[str], dict[str, Tensor]]:
    """Write a folder, read another: the names of the files written, the whole tensors read."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    save_tensors(Path(saved), held(mesh, whole_tensors()) | {f"random.{rank}": torch.tensor([rank])})
    found = held(mesh, zeros_like(whole_tensors()))
    load_tensors(Path(loaded), found)
    whole = {name: tensor.full_tensor() if name in PLACED else tensor for name, tensor in found.items()}
    return sorted(path.name for path in Path(saved).iterdir()), whole


@needs_gloo
def test_ranks_read_what_another_number_of_ranks_wrote(tmp_path: Path):
    wanted = whole_tensors()
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for folder in (one, two, three):
        folder.mkdir()
    save_tensors(one, wanted)
    for saved, loaded, ranks in ((two, one, 2), (three, two, 3)):
        for names, found in run_ranks(save_and_load, str(saved), str(loaded), ranks=ranks):
            assert names == [f"shard-{rank:05d}.safetensors" for rank in range(ranks)]
            assert all(same_bits(found[name], tensor) for name, tensor in wanted.items()), ranks
    for folder, ranks in ((two, 2), (three, 3)):
        alone = zeros_like(wanted)
        load_tensors(folder, alone)
        assert all(same_bits(alone[name], tensor) for name, tensor in wanted.items()), ranks
        number = torch.zeros(1, dtype=torch.int64)
        load_tensors(folder, {f"random.{ranks - 1}": number})
        assert number.item() == ranks - 1

    shutil.move(three / "shard-00002.safetensors", tmp_path / "lost")
    with pytest.raises(gdpa.GdpaError, match="expected 28 numbers of 'rows' in its files, got 24"):
        load_tensors(three, zeros_like(wanted))


def fail_on_rank_one(rank: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(gdpa.GdpaError) as error:
        save_tensors(Path(folder), held(mesh, whole_tensors()))
    return str(error.value)


@needs_gloo
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path):
    (tmp_path / "shard-00001.safetensors").mkdir()
    for message in run_ranks(fail_on_rank_one, str(tmp_path)):
        assert "could not be written: rank 1: " in message and "Is a directory" in message

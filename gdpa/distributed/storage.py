"""Tensors of all ranks in one folder, by torch.distributed.checkpoint, read back by any number of ranks and without unpickling.

    FOLDER/shard-00000.safetensors, ...    one file for each rank that wrote something

torch's own file storage pickles its index, and unpickling runs whatever code a pickle names. Here a file has the safetensors layout:

    8 bytes     the length of the header, little-endian
    header      JSON: name -> {"dtype", "shape", "data_offsets": [first byte, last byte + 1] after the header}
    the bytes of the tensors, one after the other, in C order

and its "__metadata__" says, in the words of torch's HuggingFaceStorageWriter, where each piece lies in its tensor. The index is put
together from the headers, so there is no index file, and what reads safetensors files reads these.

Only tensors are stored. What else a checkpoint needs is the caller's, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gdpa.errors import GdpaError

SUFFIX = ".safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
_PIECES = "DCP_SHARDING_INFO"
_OFFSETS, _GLOBAL_SHAPE = "saved_offsets", "global_shape"


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors into a folder that exists. Every rank calls it, with its own DTensors and its copies of what is replicated.

    Without a process group the one process writes all. A tensor that all ranks hold alike is written by one of them; one that only
    some ranks name is theirs. The files are on the disk when it returns. An error on any rank is a GdpaError on all.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in NAMES:
            came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise GdpaError(f"tensors[{name!r}]: expected a tensor of {', '.join(map(str, NAMES))}, got {came}")
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _told(f"{folder}: the tensors could not be written"):
        save(dict(tensors), storage_writer=_Writer(folder), planner=planner)


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill named tensors from a folder, in place. Every rank calls it, with DTensors placed however this run has them.

    Each rank reads the bytes of its own parts only. A name that the folder does not hold, a shape or a dtype that differs, or a piece
    that is missing is a GdpaError, and nothing is changed then.
    """
    saved = saved_tensors(folder)
    for name, tensor in tensors.items():
        if name not in saved:
            raise GdpaError(f"{folder}: expected a tensor {name!r}, got {len(saved)} others")
        expected = Saved(tuple(tensor.shape), tensor.dtype)
        if saved[name] != expected:
            raise GdpaError(f"{folder}: expected {name!r} of shape {expected.shape}, {expected.dtype}, got {saved[name]}")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad(), _told(f"{folder}: the tensors could not be read"):
        load({name: tensor.detach() for name, tensor in tensors.items()}, storage_reader=_Reader(folder), planner=planner)


class Saved(NamedTuple):
    """What a folder holds under one name."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def saved_tensors(folder: Path) -> dict[str, Saved]:
    """The names, whole shapes and dtypes in a folder; a GdpaError where a piece of one is missing."""
    found: dict[str, Saved] = {}
    filled: dict[str, int] = {}
    for piece in _pieces(folder):
        saved = Saved(piece.global_shape, piece.dtype)
        if found.setdefault(piece.name, saved) != saved:
            raise GdpaError(f"{piece.file}: expected {piece.name!r} of shape and dtype {found[piece.name]}, got {saved}")
        filled[piece.name] = filled.get(piece.name, 0) + math.prod(piece.shape)
    for name, saved in found.items():
        if filled[name] != math.prod(saved.shape):
            raise GdpaError(f"{folder}: expected {math.prod(saved.shape)} numbers of {name!r} in its files, got {filled[name]}")
    return found


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor in a file."""

    name: str
    file: Path
    start: int  # its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]  # its place in the whole tensor
    global_shape: tuple[int, ...]

    def read(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
        """A box of the piece. Whole rows are read, as they lie together."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        first, rows = (offsets[0], lengths[0]) if self.shape else (0, 1)
        data = torch.empty(rows * row, dtype=torch.uint8)
        with self.file.open("rb") as file:
            file.seek(self.start + first * row)
            if data.numel() and file.readinto(data.numpy().data) != data.numel():
                raise GdpaError(f"{self.file}: expected {data.numel()} bytes of {self.name!r} at {file.tell()}, got fewer")
        if not data.numel():
            return torch.empty(lengths, dtype=self.dtype)
        values = data.view(self.dtype).view((rows, *self.shape[1:]) if self.shape else ())
        for dim in range(1, len(self.shape)):
            values = values.narrow(dim, offsets[dim], lengths[dim])
        return values


def _pieces(folder: Path) -> Iterator[_Piece]:
    files = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX)) if folder.is_dir() else []
    if not files:
        raise GdpaError(f"{folder}: expected a folder with files *{SUFFIX}, got none")
    for file in files:
        yield from _pieces_of(file)


def _pieces_of(file: Path) -> Iterator[_Piece]:
    """The pieces that a file's header names, each checked to lie within the file and within its tensor."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise GdpaError(f"{file}: expected a file of tensors, got one of {size} bytes whose header would have {length}")
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        places = json.loads(header.pop("__metadata__")[_PIECES])
        for name, facts in header.items():
            first, last = (int(number) for number in facts["data_offsets"])
            shape, offsets, whole = (
                tuple(int(number) for number in numbers)
                for numbers in (facts["shape"], places[name][_OFFSETS], places[name][_GLOBAL_SHAPE])
            )
            dtype = DTYPES[facts["dtype"]]
            inside = len(shape) == len(offsets) == len(whole) and all(
                min(at, count) >= 0 and at + count <= most for at, count, most in zip(offsets, shape, whole, strict=True)
            )
            if not inside or first < 0 or last - first != math.prod(shape) * dtype.itemsize or 8 + length + last > size:
                raise ValueError(f"{name!r}: {facts}, {places[name]} do not fit a file of {size} bytes")
            yield _Piece(name, file, 8 + length + first, dtype, shape, offsets, whole)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GdpaError(
            f"{file}: expected a header of tensors and their places, got one that cannot be read ({error!r})"
        ) from error


class _Writer(StorageWriter):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"shard-{number:05d}{SUFFIX}") for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        header: dict[str, Any] = {}
        places: dict[str, Any] = {}
        results, end = [], 0
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            if data is None or name in header:
                raise GdpaError(f"tensors[{name!r}]: expected a tensor with one piece on each rank, got {item}")
            shape, dtype = data.chunk.sizes, data.properties.dtype
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            places[name] = {_OFFSETS: list(data.chunk.offsets), _GLOBAL_SHAPE: list(data.size)}
            results.append(WriteResult(item.index, end - start, plan.storage_data))
        if header:
            self._write(self.folder / plan.storage_data, header, places, plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, path: Path, header: dict[str, Any], places: dict[str, Any], plan: SavePlan, planner: SavePlanner) -> None:
        metadata = {"format": "pt", "DCP_VERSION": "1.0", _PIECES: json.dumps(places)}
        text = json.dumps({"__metadata__": metadata, **header}).encode()
        text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for item in plan.items:
                tensor: Any = planner.resolve_data(item)
                if tensor.numel():
                    file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


class _Reader(StorageReader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pieces: dict[MetadataIndex, _Piece] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for piece in _pieces(self.folder):
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
            whole = TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(piece.global_shape), [])
            tensors.setdefault(piece.name, whole).chunks.append(chunk)
            self.pieces[MetadataIndex(piece.name, piece.offsets)] = piece
        return Metadata(state_dict_metadata=tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            values = self.pieces[item.storage_index].read(tuple(item.storage_offsets), tuple(item.lengths))
            target = planner.resolve_tensor(item)
            target.copy_(values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Failures of any rank as one GdpaError, and no warning where there is but one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            if any(isinstance(reason[0], KeyboardInterrupt) for reason in error.failures.values()):
                raise KeyboardInterrupt from error  # torch takes Ctrl-C for a failure of the file too
            reasons = "; ".join(f"rank {rank}: {str(reason[0]) or repr(reason[0])}" for rank, reason in error.failures.items())
            raise GdpaError(f"{what}: {reasons}") from error

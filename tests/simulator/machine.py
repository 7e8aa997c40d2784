"""One launch: programs, their partitions, barriers, shared memory, the copy engine, and the scheduler.

    PTX, or TTGIR                        here                       what it does to clocks
    bar.sync, bar.arrive                 join, arrive               hand over, and take over where it syncs
    mbarrier.arrive, barrier_expect      arrive_at                  hands over
    wait_barrier                         wait                       takes over, of who arrived and what was copied
    local_load, local_store              load, store                an access by threads
    fence_async_shared                   fence                      the partition's stores may be read by copies and products
    warp_group_dot, ..._wait             multiply, wait_products    the accesses of a product are over at its wait
    async_tma_copy_global_to_local       copy_in                    over when the mbarrier's phase is
    async_tma_copy_local_to_global       copy_out                   shared memory is read at
    async_tma_store_wait                 wait_stores                this wait, by the thread that copied
    wait_group 0; fence.acq_rel.gpu      stores_arrive              and the tensor written at this one; published
    red.add, ld.acquire of a counter     count_up, await_count      hands what was published over; takes it over
    fence.proxy.async.global             see_what_was_counted       copies may rely on it

A partition is a generator that yields None where it may be interrupted, or a condition for which it waits. The scheduler draws who goes
on. The copy engine's loads and stores are drawn as well, each at any time between its start and what waits for it.
"""

from __future__ import annotations

import linecache
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simulator.races import ADD, READ, WRITE, Box, Chunks, Epoch, Fault, History

Condition = Callable[[], bool]
Waiting = Generator[Condition | None, None, Any]

WARP = 32
CHUNK = 16
SHARED_MEMORY = 227 * 1024
MOST_TURNS = 3_000_000


class Block:
    """An allocation in shared memory. What was never written is NaN."""

    def __init__(self, name: str, size: int) -> None:
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8)
        self.history = History(name)
        self.places: dict[Any, Chunks] = {}


class View:
    """Part of a block as a tensor."""

    __slots__ = ("block", "data")

    def __init__(self, block: Block, data: Tensor) -> None:
        self.block, self.data = block, data

    def like(self, memory: Tensor) -> Tensor:
        """The same part of another of the block's memories."""
        return memory.view(self.data.dtype).as_strided(self.data.shape, self.data.stride(), self.data.storage_offset())

    def place(self) -> Chunks:
        key = self.data.dtype.itemsize, self.data.shape, self.data.stride(), self.data.storage_offset()
        if key not in self.block.places:
            marks = torch.zeros_like(self.block.bytes)
            self.like(marks).view(torch.int16 if self.data.dtype.itemsize == 2 else torch.int32).fill_(-1)
            self.block.places[key] = Chunks(marks.view(-1, CHUNK).any(1).numpy())
        return self.block.places[key]

    def note(
        self, kind: str, here: Partition, epoch: Epoch, what: str, fence: Epoch | None = None, by_threads: bool = False
    ) -> None:
        self.block.history.note(kind, self.place(), here.clock, epoch, f"{what} of {here.name}", fence, by_threads)


def new_clocks(size: int) -> np.ndarray:
    """Two for each partition: what it knows, and what of it the copy engine knows."""
    return np.zeros((2, size), dtype=np.int64)


class NamedBarrier:
    """`bar.sync` and `bar.arrive`: opens when as many threads came as they say, and begins anew."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.threads = self.count = self.opened = 0
        self.gathering = new_clocks(size)
        self.handed: list[np.ndarray] = []  # the clocks of all who opened it, for each opening

    def arrive(self, here: Partition, threads: int) -> int:
        """How often it was open before."""
        if self.count == 0:
            self.threads = threads
        if threads != self.threads:
            raise Fault(f"{here.name} comes to {self.name} for {threads} threads, others for {self.threads}")
        self.count += WARP * here.warps
        if self.count > threads:
            raise Fault(f"{self.name} has {self.count} of {threads} threads with {here.name}")
        np.maximum(self.gathering, here.clocks, out=self.gathering)
        here.release()
        opened = self.opened
        if self.count == threads:
            self.opened += 1
            self.count = 0
            self.handed.append(self.gathering)
            self.gathering = np.zeros_like(self.gathering)
        return opened


class Barrier:
    """An mbarrier."""

    def __init__(self, name: str, actor: int, size: int) -> None:
        self.name, self.actor = name, actor
        self.expected = 0  # arrivals of a phase; 0 before it is initialised
        self.arrived = self.phases = self.bytes = 0
        self.gathering = new_clocks(size)
        self.handed = self.gathering

    def init(self, count: int) -> None:
        if self.expected:
            raise Fault(f"{self.name} is initialised twice")
        self.expected = count

    def change(self, clocks: np.ndarray, arrivals: int, size: int) -> None:
        if not self.expected:
            raise Fault(f"{self.name} is used before it is initialised")
        np.maximum(self.gathering, clocks, out=self.gathering)
        self.arrived += arrivals
        self.bytes += size
        if self.arrived > self.expected:
            raise Fault(f"{self.name} has {self.arrived} arrivals of {self.expected}")
        if self.arrived == self.expected and self.bytes == 0:
            self.phases += 1
            self.arrived = 0
            self.gathering[:, self.actor] = self.phases
            self.handed = self.gathering.copy()

    def is_open(self, parity: int) -> bool:
        if not self.expected:
            raise Fault(f"{self.name} is waited for before it is initialised")
        return (self.phases & 1) != parity


class Pending:
    """A product under way: nobody may look at it before its wait."""

    def __init__(self, result: Tensor, epoch: Epoch) -> None:
        self.result, self.epoch = result, epoch


class Store:
    """A copy from shared memory to a tensor. Its memory may be written when it was read, which is earlier than it arrives."""

    def __init__(self, read: Epoch, written: Epoch, write: Callable[[], None]) -> None:
        self.read, self.written = read, written
        self.write: Callable[[], None] | None = write  # None when it is done

    def perform(self) -> None:
        if self.write is not None:
            self.write()
            self.write = None


class Partition:
    """Warps that run one function, as one thread."""

    def __init__(self, program: Program, name: str, warps: int, clocks: np.ndarray) -> None:
        self.program, self.machine, self.warps = program, program.machine, warps
        self.name = f"{name} of program {program.number}"
        self.actor = self.machine.new_actor()
        self.clocks = clocks.copy()
        self.clocks[:, self.actor] = 1
        # What its threads know, and what of it its copies may rely on: what they knew at the last fence.proxy.async.global.
        self.clock, self.visible = self.clocks
        self.published = np.zeros_like(self.clock)  # what whoever sees a counter that it raises may rely on: see stores_arrive
        self.apart = False  # whether its warps have not met since they wrote to shared memory,
        self.unheard = False  # or since one thread saw that copies had read it
        self.products: deque[Pending] = deque()
        self.stores: list[Store] = []
        self.unfenced: list[Epoch] = []  # of stores to shared memory

    def release(self) -> None:
        self.clocks[:, self.actor] += 1

    def acquire(self, clocks: np.ndarray) -> None:
        np.maximum(self.clocks, clocks, out=self.clocks)

    def now(self) -> Epoch:
        return Epoch(self.actor, int(self.clock[self.actor]))

    def end(self, epoch: Epoch) -> None:
        epoch.end(self.actor, int(self.clock[self.actor]))

    # Named barriers, and the partition's own.

    def meet(self) -> None:
        self.apart = self.unheard = False

    def arrive(self, number: int, threads: int) -> Waiting:
        self.program.named(number).arrive(self, threads)
        yield None

    def join(self, number: int, threads: int) -> Waiting:
        barrier = self.program.named(number)
        opened = barrier.arrive(self, threads)
        while barrier.opened == opened:
            yield lambda: barrier.opened > opened
        self.acquire(barrier.handed[opened])
        self.meet()

    # mbarriers.

    def wait(self, barrier: Barrier, parity: int) -> Waiting:
        while not barrier.is_open(parity & 1):
            yield lambda: barrier.is_open(parity & 1)
        self.acquire(barrier.handed)

    def arrive_at(self, barrier: Barrier, count: int, size: int = 0) -> Waiting:
        """Arrive, and announce a copy of so many bytes."""
        self.meet()  # which the compiler has the warps do before one thread arrives
        barrier.bytes += size
        barrier.change(self.clocks, count, 0)
        self.release()
        yield None

    # Shared memory, by threads.

    def load(self, view: View) -> Tensor:
        view.note(READ, self, self.now(), "a load", by_threads=True)
        return view.data.clone(memory_format=torch.contiguous_format)

    def store(self, value: Tensor, view: View) -> None:
        if self.unheard and self.warps > 1:
            raise Fault(f"{self.name}: only one thread knows that {view.block.history.name}, which all write, has been read")
        self.apart = True
        self.unfenced.append(Epoch())
        view.note(WRITE, self, self.now(), "a store", self.unfenced[-1], by_threads=True)
        if value.shape != view.data.shape or value.dtype != view.data.dtype:
            raise Fault(f"{value.dtype} {tuple(value.shape)} is stored as {view.data.dtype} {tuple(view.data.shape)}")
        view.data.copy_(value)

    def fence(self) -> None:
        """What this partition wrote, the copy engine and products may read."""
        for epoch in self.unfenced:
            self.end(epoch)
        self.unfenced.clear()

    # Products.

    def operand(self, x: View | Tensor | Pending, epoch: Epoch) -> Tensor:
        if isinstance(x, View):
            x.note(READ, self, epoch, "a product")
            return x.data.float()
        return plain(x).float()

    def multiply(self, a: Any, b: Any, accumulator: Any, use: bool, is_async: bool) -> Pending | Tensor:
        epoch = Epoch()
        result = self.operand(a, epoch) @ self.operand(b, epoch)
        if use:
            result += accumulator.result if isinstance(accumulator, Pending) else accumulator
        product = Pending(result, epoch)
        self.products.append(product)
        if not is_async:
            self.wait_products(0)
            return result
        return product

    def wait_products(self, count: int, *values: Any) -> Any:
        """Until at most `count` are under way. Values that are there now come out as tensors."""
        while len(self.products) > count:
            self.end(self.products.popleft().epoch)
        ready = tuple(x.result if isinstance(x, Pending) and x.epoch.actor is not None else x for x in values)
        return ready[0] if len(ready) == 1 else ready

    # The copy engine.

    def copy_in(self, tensor: Descriptor, at: list[int], barrier: Barrier, view: View) -> Waiting:
        """From a tensor to shared memory; the barrier has the bytes announced."""
        epoch = Epoch()
        self.program.copies.append(epoch)
        tensor.check(view)
        view.note(WRITE, self, epoch, "a copy")
        box = tensor.box(at)
        tensor.note(READ, box, self.visible, epoch, f"a copy by {self.name}")
        clocks = self.clocks.copy()

        def land() -> None:
            view.data.copy_(tensor.read(box).view(view.data.shape))
            epoch.end(barrier.actor, barrier.phases + 1)
            barrier.change(clocks, 0, -view.data.numel() * view.data.dtype.itemsize)

        self.machine.loads.append(land)
        self.release()
        yield None

    def copy_out(self, tensor: Descriptor, at: list[int], view: View, adds: bool) -> Waiting:
        """From shared memory to a tensor, or added to it."""
        if self.apart and self.warps > 1:
            raise Fault(f"{self.name} copies {view.block.history.name}, which other warps of it may still be writing")
        tensor.check(view)
        read, written = Epoch(), Epoch()
        view.note(READ, self, read, "a copy")
        box = tensor.box(at)
        tensor.note(ADD if adds else WRITE, box, self.visible, written, f"a copy by {self.name}")
        values = view.data.clone(memory_format=torch.contiguous_format)
        store = Store(read, written, lambda: tensor.write(box, values, adds))
        self.stores.append(store)
        self.machine.stores.append(store)
        yield None

    def wait_stores(self, count: int) -> None:
        """Until all but the last `count` have read shared memory. They need not have arrived."""
        for store in self.stores[: len(self.stores) - count]:
            if store.read.actor is None:
                self.end(store.read)
        self.unheard = True

    def stores_arrive(self) -> Waiting:
        """Until all have arrived, which a counter that is raised afterwards tells whoever sees it. Of one warp: it meets itself alone."""
        self.one_warp()
        self.wait_stores(0)
        for store in self.stores:
            store.perform()
            self.end(store.written)
        self.stores.clear()
        self.published = self.clock.copy()
        self.release()
        yield None

    def leave(self) -> None:
        if any(store.read.actor is None for store in self.stores):
            raise Fault(f"{self.name} leaves while copies read its shared memory")
        if self.products:
            raise Fault(f"{self.name} leaves while products are under way")

    # Counters in global memory.

    def one_warp(self) -> None:
        if self.warps != 1:
            raise Fault(f"{self.name} does for each of {self.warps} warps what is to be done once")

    def count_up(self, address: int) -> Waiting:
        self.one_warp()
        counter = self.machine.counter(address)
        np.maximum(counter.clock, self.published, out=counter.clock)
        counter.value.add_(1)
        yield None

    def take_ticket(self, address: int) -> Waiting:
        self.one_warp()
        counter = self.machine.counter(address)
        ticket = int(counter.value)
        counter.value.add_(1)
        yield None
        return ticket

    def look_at(self, address: int) -> Waiting:
        counter = self.machine.counter(address)
        value = int(counter.value)
        np.maximum(self.clock, counter.clock, out=self.clock)
        yield None
        return value

    def await_count(self, address: int, count: int) -> Waiting:
        counter = self.machine.counter(address)
        while int(counter.value) < count:
            yield lambda: int(counter.value) >= count
        np.maximum(self.clock, counter.clock, out=self.clock)
        return int(counter.value)

    def see_what_was_counted(self) -> None:
        self.visible[:] = self.clock

    # Partitions.

    def specialize(self, partitions: list[tuple[Callable[..., Waiting], int, str]], arguments: tuple[Any, ...]) -> list[Partition]:
        started = []
        for function, warps, name in partitions:
            other = Partition(self.program, name, warps, self.clocks)
            self.machine.start(other, function(other, *arguments))
            started.append(other)
        self.release()  # what comes now is after what they know
        return started

    def gather(self, partitions: list[Partition]) -> Waiting:
        for other in partitions:
            while other in self.machine.running:
                yield lambda other=other: other not in self.machine.running
            self.acquire(other.clocks)
        if not all(epoch.is_before(self.clock) for epoch in self.program.copies):
            raise Fault(f"program {self.program.number} ends while copies may still write its shared memory")


def plain(x: Any) -> Any:
    if isinstance(x, Pending):
        if x.epoch.actor is None:
            raise Fault("a product is used before it is waited for")
        return x.result
    return x


class Counter:
    def __init__(self, value: Tensor, size: int) -> None:
        self.value = value
        self.clock = np.zeros(size, dtype=np.int64)


class Program:
    def __init__(self, machine: Machine, number: int, indices: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self.machine, self.number, self.indices, self.grid = machine, number, indices, grid
        self.barriers: dict[int, NamedBarrier] = {}
        self.copies: list[Epoch] = []  # to shared memory
        self.size = 0

    def named(self, number: int) -> NamedBarrier:
        if not 0 <= number < 16:
            raise Fault(f"there is no barrier {number}")
        if number not in self.barriers:
            self.barriers[number] = NamedBarrier(f"barrier {number} of program {self.number}", self.machine.size)
        return self.barriers[number]

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> View:
        count = int(np.prod(shape))
        size = -(-count * dtype.itemsize // CHUNK) * CHUNK
        self.size += size
        if self.size > SHARED_MEMORY:
            raise Fault(f"{self.size} bytes of shared memory")
        block = Block(f"{name} of program {self.number}", size)
        return View(block, block.bytes.view(dtype)[:count].view(shape))

    def new_barriers(self, count: int, name: str) -> list[Barrier]:
        names = (f"{name}[{i}] of program {self.number}" for i in range(count))
        return [Barrier(name, self.machine.new_actor(), self.machine.size) for name in names]


class Descriptor:
    """A tensor as the copy engine sees it."""

    def __init__(self, machine: Machine, base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> None:
        self.base, self.shape, self.strides, self.block = base, shape, strides, block
        self.history = None if machine.overlapping else machine.history(base)

    def box(self, at: list[int]) -> tuple[int, int, int, int, int]:
        """(first element from the base, rows, columns, rows and columns before them that lie outside) of a block of which all but the last
        two dimensions are 1."""
        if any(size != 1 for size in self.block[:-2]):
            raise Fault(f"the simulator copies rows and columns, not blocks of {self.block}")
        inside = all(0 <= x < size for x, size in zip(at[:-2], self.shape[:-2], strict=True))
        sides = []
        for x, size, most in zip(at[-2:], self.block[-2:], self.shape[-2:], strict=True):
            first, last = max(x, 0), min(x + size, most)
            sides.append((first, last - first if inside and last > first else 0, first - x))
        (row, rows, above), (column, columns, before) = sides
        if rows == 0 or columns == 0:
            return 0, 0, 0, 0, 0
        offset = sum(x * stride for x, stride in zip([*at[:-2], row, column], self.strides, strict=True))
        # Addresses wrap, those of bytes.
        size = self.base.element_size()
        first = ((offset * size + 2**63) % 2**64 - 2**63) // size
        lowest = -self.base.storage_offset()
        highest = lowest + self.base.untyped_storage().nbytes() // size
        end = first + (rows - 1) * self.strides[-2] + columns
        if first < lowest or end > highest:
            raise Fault(f"elements {first} to {end} of a tensor of {highest}")
        return first, rows, columns, above, before

    def check(self, view: View) -> None:
        """The copy engine moves bits: it converts nothing."""
        if view.data.dtype != self.base.dtype or view.data.numel() != int(np.prod(self.block)):
            raise Fault(f"{self.base.dtype} {self.block} is copied as {view.data.dtype} {tuple(view.data.shape)}")

    def memory(self, box: tuple[int, int, int, int, int]) -> Tensor:
        first, rows, columns, _, _ = box
        return self.base.as_strided((rows, columns), (self.strides[-2], 1), self.base.storage_offset() + first)

    def note(self, kind: str, box: tuple[int, int, int, int, int], clock: np.ndarray, epoch: Epoch, what: str) -> None:
        first, rows, columns, _, _ = box
        if rows == 0 or self.history is None:
            return
        row, column = divmod(first, self.strides[-2])
        self.history.note(kind, Box((row, row + rows), (column, column + columns)), clock, epoch, what)

    def read(self, box: tuple[int, int, int, int, int]) -> Tensor:
        _, rows, columns, above, before = box
        block = torch.zeros(self.block[-2:], dtype=self.base.dtype)
        if rows:
            block[above : above + rows, before : before + columns] = self.memory(box)
        return block

    def write(self, box: tuple[int, int, int, int, int], values: Tensor, adds: bool) -> None:
        _, rows, columns, above, before = box
        if rows:
            values = values.view(self.block[-2:])[above : above + rows, before : before + columns]
            memory = self.memory(box)
            memory.copy_(memory + values if adds else values)


class Machine:
    """All programs of a launch."""

    def __init__(self, seed: int, programs: int, overlapping: bool = False) -> None:
        self.overlapping = overlapping  # whether sequences' rows are, so that writes to tensors may meet
        self.random = random.Random(seed)
        self.size = 64 * programs + 1
        self.actors = 0
        self.running: dict[Partition, Waiting] = {}
        self.waiting: dict[Partition, Condition] = {}
        self.loads: list[Callable[[], None]] = []
        self.stores: list[Store] = []
        self.counters: dict[int, Counter] = {}
        self.histories: dict[int, History] = {}
        self.tensors: list[Tensor] = []

    def new_actor(self) -> int:
        self.actors += 1
        if self.actors > self.size:
            raise Fault(f"a program has more than {self.size} partitions and barriers")
        return self.actors - 1

    def blank(self) -> np.ndarray:
        return new_clocks(self.size)

    def history(self, base: Tensor) -> History:
        return self.histories.setdefault(base.data_ptr(), History(f"tensor {len(self.histories)}"))

    def find(self, address: int, size: int) -> tuple[Tensor, int]:
        """The bytes of the tensor that an address lies in, and where."""
        for x in self.tensors:
            first = x.untyped_storage().data_ptr()
            if first <= address and address + size <= first + x.untyped_storage().nbytes():
                return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()), address - first
        raise Fault(f"an address outside of every tensor: {address:#x}")

    def counter(self, address: int) -> Counter:
        if address not in self.counters:
            memory, at = self.find(address, 4)
            self.counters[address] = Counter(memory[at : at + 4].view(torch.int32)[0], self.size)
        return self.counters[address]

    def start(self, partition: Partition, function: Waiting) -> None:
        self.running[partition] = function

    def run(self) -> None:
        """Until everybody is done, in an order that is drawn; some orders keep a partition waiting for long."""
        slow: Partition | None = None
        turns = 0
        while self.running:
            turns += 1
            if turns > MOST_TURNS:
                raise Fault(f"no end after {MOST_TURNS} turns: " + "; ".join(self._states()))
            if turns % 64 == 1:
                slow = self.random.choice([*self.running, None])
            self._engine()
            ready = [p for p in self.running if p not in self.waiting or self.waiting[p]()]
            if not ready:
                if not self.loads:
                    raise Fault("deadlock: " + "; ".join(self._states()))
                continue
            quick = [p for p in ready if p is not slow]
            partition = self.random.choice(quick or ready)
            self.waiting.pop(partition, None)
            try:
                condition = next(self.running[partition])
            except StopIteration:
                partition.leave()
                del self.running[partition]
                continue
            if condition is not None:
                self.waiting[partition] = condition
        for store in self.stores:
            store.perform()

    def _engine(self) -> None:
        """Some of what the copy engine has to do, in any order."""
        stuck = len(self.waiting) == len(self.running)
        while self.loads and (stuck or self.random.random() < 0.3):
            self.loads.pop(self.random.randrange(len(self.loads)))()
            stuck = False
        self.stores = [x for x in self.stores if x.write is not None]
        if self.stores and self.random.random() < 0.1:
            self.random.choice(self.stores).perform()

    def _states(self) -> Iterator[str]:
        for partition, function in self.running.items():
            frame: Any = function.gi_frame
            inner: Any = function
            while getattr(inner, "gi_yieldfrom", None) is not None:
                frame, inner = inner.gi_frame, inner.gi_yieldfrom
            line = frame.f_lineno
            text = linecache.getline(frame.f_code.co_filename, line).strip()
            yield f"{partition.name} waits at {text!r}, line {line} of {frame.f_code.co_name}"

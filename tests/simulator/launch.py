"""Where kernels go that the Hopper backend's host code launches on CPU tensors, while `simulated()` lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.runtime.jit import JITFunction

from gdpa.backends import gpu
from gdpa.backends.hopper import launch, launch_backward, plan_forward
from simulator.machine import Descriptor, Machine, Partition, Program
from simulator.races import Fault
from simulator.translate import Translation, load


class Kernel:
    """A kernel as far as it is compiled here."""

    run = None  # no launcher

    def __init__(self, text: str) -> None:
        self.text = text
        self.translation, self.namespace = load(text)


class Forgetful(dict[Any, Any]):
    """No launch goes by a recipe, which starts compiled machine code."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


MOST_AT_ONCE = 8  # programs of kernels that do not ask for it


class Simulation:
    """What the launches of a `simulated()` have in common, and a count of them."""

    def __init__(self, seed: int, overlapping: bool) -> None:
        self.seed = seed
        self.overlapping = overlapping
        self.launches: list[str] = []
        self.kernels: list[Kernel] = []
        self.forms: list[dict[str, Any]] = []  # the compile-time arguments of each

    def launch(self, function: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup:
            raise Fault("the simulator starts kernels; it builds none for later")
        with gpu.target_architecture(90):
            kernel, values = compiled(function, args, options)
        name = kernel.translation.function
        self.launches.append(name)
        self.kernels.append(kernel)
        self.forms.append({key: value for key, value in options.items() if key.isupper()})
        self.start(kernel, values, tuple([*grid, 1, 1][:3]), options.get("launch_cooperative_grid", False))
        return kernel

    def start(self, kernel: Kernel, values: list[Any], grid: tuple[int, int, int], together: bool) -> None:
        """Programs that need not run together run one after the other, so that none waits for another, or, for their races, all at once."""
        self.seed += 1
        count = grid[0] * grid[1] * grid[2]
        numbers = range(count)
        at_once = together or (count <= MOST_AT_ONCE and self.seed % 2 == 0)
        for batch in [list(numbers)] if at_once else [[x] for x in numbers]:
            machine = Machine(self.seed, len(batch), self.overlapping)
            arguments = bind(machine, kernel.translation, values)
            for number in batch:
                indices = number % grid[0], number // grid[0] % grid[1], number // grid[0] // grid[1]
                program = Program(machine, number, indices, grid)
                partition = Partition(program, "the default partition", kernel.translation.warps, machine.blank())
                machine.start(partition, kernel.namespace[kernel.translation.function](partition, *arguments))
            machine.run()


_compiled: dict[Any, Kernel] = {}


def compiled(function: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Kernel, list[Any]]:
    """A kernel's TTGIR for these arguments, and those of them that it is passed: the others are constants in it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ir, make_backend

    options = {**options, "debug": False, "instrumentation_mode": ""}
    _, _, target, backend, binder = function.device_caches[-90]  # the number of gpu.target_architecture(90)
    bound, specialization, rest = binder(*args, **options)
    key = function, str(specialization), str(sorted(rest.items()))
    if key not in _compiled:
        packed, signature, constexprs, attributes = function._pack_args(backend, options, bound, specialization, rest)
        source = function.ASTSource(function, signature, constexprs, attributes)
        assert isinstance(target, GPUTarget)
        chosen = make_backend(target).parse_options({**packed.__dict__, **source.parse_options()})
        stages: dict[str, Any] = {}
        backend.add_stages(stages, chosen, source.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(target, chosen, backend.get_codegen_implementation(chosen), backend.get_module_map(), context)
        metadata: dict[str, Any] = {}
        for name in ("ttir", "ttgir"):
            if name in stages:
                module = stages[name](module, metadata)
        _compiled[key] = Kernel(str(module))
    return _compiled[key], [x for x, kind in zip(bound.values(), specialization, strict=True) if kind[0] != "constexpr"]


def bind(machine: Machine, translation: Translation, values: list[Any]) -> list[Any]:
    """The parameters of the translated kernel: a descriptor is followed by its shape and its strides."""
    parameters = iter(translation.parameters)
    bound: list[Any] = []
    given = iter(values)
    for parameter in parameters:
        value = next(given)
        if parameter.is_descriptor:
            bound.append(Descriptor(machine, value.base, list(value.shape), list(value.strides), list(value.block_shape)))
            bound += [*value.shape, *value.strides]
            for _ in range(2 * len(value.shape)):
                next(parameters)
            machine.tensors.append(value.base)
        elif isinstance(value, Tensor):
            machine.tensors.append(value)
            bound.append(value.data_ptr())
        else:
            bound.append(value)
    return bound


@contextmanager
def simulated(multiprocessors: int = 2, seed: int = 0, overlapping: bool = False) -> Iterator[Simulation]:
    """The backend's host code starts kernels on a simulated device of so many multiprocessors; `seed` draws the order of things.

    Where sequences are `overlapping`, as garbage offsets make them, several write the same rows, and that is no fault."""
    simulation = Simulation(seed, overlapping)

    def run(function: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return simulation.launch(function, *args, grid=grid, warmup=warmup, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", run))
        for module in (launch, launch_backward):
            stack.enter_context(patch.object(module, "multiprocessors", lambda device: multiprocessors))
            stack.enter_context(patch.object(module, "_recipes", Forgetful()))
        stack.enter_context(patch.object(plan_forward, "LEAST_TILES_FOR_FOUR", 0))  # problems are small here
        yield simulation

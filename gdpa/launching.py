"""Starting kernels that Triton has compiled, past the argument binding of its `kernel[grid](...)`: where that is known, by the C function
under it.

`kernel[grid](...)` binds and classifies every argument at every call, a hundred microseconds for a kernel of fifty. `run` lets Triton do
that for the first launch of a kind and keeps what it compiled in a Recipe; later launches of the kind are started by it. What makes a
kind is what Triton compiles for (`kinds`): types, which integers are 1 or multiples of 16, which addresses are multiples of 16, and the
compile-time arguments. Only NVIDIA's launchers are known here; other devices, and Triton's interpreter, always go Triton's way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

Geometry = tuple[list[int], list[int]]  # the shape and the strides of a descriptor
Grid = tuple[int, int, int]


class BareLauncher(NamedTuple):
    """What `kernel.run` comes down to: a C function of (grid, stream, *leading, *arguments), its descriptors encoded and flattened."""

    launch: Callable[..., None]
    leading: tuple[Any, ...]
    encoders: tuple[Callable[[Any], list[Any]], ...]  # for each descriptor: its tensor map, shape and strides


_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def bare_launcher(kernel: Any) -> BareLauncher | None:
    """The C function that starts a compiled kernel; None where there is no such thing, and `kernel.run` is the way.

    Known of Triton 3.6 alone, of kernels whose descriptors, if they have any, are all the copy engine's and that ask for no scratch
    memory.
    """
    if _VERSION != (3, 6):
        return None
    from triton.backends.nvidia import driver

    run = kernel.run
    launch = getattr(run, "launch", None)
    if launch is None or driver._BASE_ARGS_FORMAT != "iiiKKppOOOOOO" or run.global_scratch_size or run.profile_scratch_size:
        return None
    layouts: tuple[Any, ...] = ()
    if inspect.isfunction(launch):  # descriptors are handled by a Python function around the C function
        inside = inspect.getclosurevars(launch).nonlocals
        launch, layouts = inside.get("launcher"), inside.get("tensordesc_meta")  # type: ignore[assignment]
        if launch is None or not layouts or None in layouts:
            return None
    no_scratch = no_hooks = (None, None)
    leading = (kernel.function, run.launch_cooperative_grid, run.launch_pdl, *no_scratch, kernel.packed_metadata, None, *no_hooks)
    return BareLauncher(launch, leading, tuple(partial(driver.make_tensordesc_arg, metadata=layout) for layout in layouts))


class Recipe:
    """How launches of one kind run, whatever their addresses and numbers of rows: these change with every jagged batch.

    `geometries` are the shapes and strides of the kernel's descriptors, its first parameters. `arguments` are what the C function is
    given before the kernel's pointers, with `places` for the tensors' maps. `constants` are the compile-time arguments at the end.
    """

    __slots__ = ("arguments", "constants", "encoded", "geometries", "kernel", "launcher", "places")

    def __init__(self, kernel: Any, constants: tuple[Any, ...], geometries: tuple[Geometry, ...]) -> None:
        self.kernel = kernel
        self.constants = constants
        self.geometries = geometries
        self.launcher = bare_launcher(kernel)
        encoders = [] if self.launcher is None else zip(self.launcher.encoders, geometries, strict=True)
        self.encoded = tuple([Encoded(encode, geometry) for encode, geometry in encoders])
        self.arguments: list[Any] = [0, 1, 1, 0] if self.launcher is None else [0, 1, 1, 0, *self.launcher.leading]
        places = []
        for shape, strides in geometries:
            places.append(len(self.arguments))
            self.arguments += [None, *shape, *strides]
        self.places = tuple(places)


class Described:
    """As much of a tensor descriptor as a launch reads: made in 0.4 microseconds on a 2-core Xeon, a whole one in 20."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor, geometry: Geometry) -> None:
        self.base = base
        self.shape, self.strides = geometry


class Encoded(dict[int, list[Any]]):
    """One descriptor as the launcher takes it, by the address it points to, the only thing in it that varies.

    Allocators give the same addresses again and again. On a 2-core Xeon it takes 0.14 microseconds to find one, 1.3 to encode it and
    what the driver takes.
    """

    __slots__ = ("encode", "geometry")
    MOST = 1024

    def __init__(self, encode: Callable[[Any], list[Any]], geometry: Geometry) -> None:
        self.encode = encode
        self.geometry = geometry

    def add(self, x: Tensor) -> list[Any]:
        if len(self) >= self.MOST:
            self.clear()
        self[x.data_ptr()] = expanded = self.encode(Described(x, self.geometry))
        return expanded


def start(recipe: Recipe, grid: Grid, stream: int, tensors: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> None:
    """Launch a kernel by its recipe. `tensors` are what it reads and writes through descriptors, `arguments` the others that are no
    constants, tensors or their addresses among them. The device that the recipe is of must be the current one, `stream` one of its."""
    launcher = recipe.launcher
    hooked = is_hooked()
    if launcher is not None and not hooked:
        expanded: list[Any] = []
        for x, encoded in zip(tensors, recipe.encoded, strict=True):
            expanded += encoded.get(x.data_ptr()) or encoded.add(x)
        launcher.launch(*grid, stream, *launcher.leading, *expanded, *arguments, *recipe.constants)
        return
    kernel = recipe.kernel
    described = [Described(x, geometry) for x, geometry in zip(tensors, recipe.geometries, strict=True)]
    everything = (*described, *arguments, *recipe.constants)
    metadata = kernel.launch_metadata(grid, stream, *everything) if hooked else None
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *everything)


def is_hooked() -> bool:
    """Whether a profiler has asked Triton to tell it of launches: through hooks, or chains of them, most often empty."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def is_known(device: torch.device) -> bool:
    """Whether kernels on this device can be started by recipe."""
    return device.type == "cuda" and torch.version.hip is None and not knobs.runtime.interpret


def kinds(kernel: Any, arguments: tuple[Any, ...], first: int = 0) -> tuple[Any, ...]:
    """What Triton tells apart of a kernel's arguments from the `first` one on, compile-time ones included, or more finely."""
    return tuple([_kind(parameter, x) for parameter, x in zip(kernel.params[first:], arguments, strict=False)])


def _kind(parameter: Any, x: Any) -> Any:
    if parameter.is_constexpr:
        return x
    if type(x) is int:
        width = 0 if -(2**31) <= x < 2**31 else 1 if x < 2**63 else 2
        return width if parameter.do_not_specialize else (width, x == 1, x % 16 == 0)
    if isinstance(x, Tensor):
        return x.dtype, parameter.do_not_specialize_on_alignment or x.data_ptr() % 16 == 0
    return type(x)


_MOST_RECIPES = 4096
_recipes: dict[tuple[Any, ...], Recipe] = {}


def run(
    kernel: Any,
    grid: Grid,
    device: torch.device,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> Recipe | None:
    """Launch a kernel without descriptors on the current device: by Triton the first time, by its recipe from then on.

    `arguments` are the kernel's parameters in order, `constants` the compile-time ones behind them, `options` how it is compiled.
    Returns the recipe of such launches, for callers who know that their next one is of the same kind.
    """
    if not is_known(device):
        kernel[grid](*arguments, **constants, **options)
        return None
    key = (kernel, device, *kinds(kernel, arguments), *constants.values(), *options.values())
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = Recipe(kernel[grid](*arguments, **constants, **options), tuple(constants.values()), ())
        remember(key, recipe)
    else:
        start(recipe, grid, torch._C._cuda_getCurrentRawStream(device.index), (), arguments)
    return recipe


def known(key: tuple[Any, ...]) -> Recipe | None:
    return _recipes.get(key)


def remember(key: tuple[Any, ...], recipe: Recipe) -> None:
    if len(_recipes) >= _MOST_RECIPES:
        _recipes.clear()
    _recipes[key] = recipe

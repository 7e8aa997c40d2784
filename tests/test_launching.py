"""Kernels started past Triton's launcher (gdpa/launching.py): the compiled kernel and the arguments that Triton itself would have taken.

recipes.py makes the launches of the portable kernels, in a process whose Triton does not interpret. How the C function under Triton's
launcher is called is tested in test_hopper.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import clean_env, needs_triton
from test_compile_kernels import NEWEST, NEWEST_VERSION

pytestmark = needs_triton

SCHEDULE = ("bounds_kernel", "list_kernel")


@pytest.fixture(scope="module", params=[False, True], ids=["installed Triton", f"Triton {NEWEST_VERSION}"])
def rows(request) -> list[dict[str, Any]]:
    env = clean_env()
    if request.param:
        if not (NEWEST / "triton").exists():
            pytest.skip(f"Triton {NEWEST_VERSION} is not in .venv/triton-newest (make test installs it)")
        env["PYTHONPATH"] = f"{NEWEST}:{env['PYTHONPATH']}"
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("recipes.py"))], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


class TestThePortableKernels:
    def test_triton_is_asked_once_for_each_kind(self, rows):
        assert len(rows) > 60
        for row in rows:
            assert row["again"]["asked"] == [], row["case"]
            asked = [name for name in row["fresh"]["asked"] if name not in SCHEDULE]
            assert len(asked) == {3: 3, 1: 2}[sum(row["needs"])], row["case"]

    def test_by_recipe_they_are_what_triton_would_have_launched(self, rows):
        """The kernel that Triton's own rules choose for these arguments, the grid, and every argument in its place."""
        for row in rows:
            assert row["again"]["launches"] == row["fresh"]["launches"], (row["case"], row["needs"])
            by_recipe_at_first = [launch for launch in row["first"]["launches"] if launch[0] not in SCHEDULE]
            assert by_recipe_at_first == row["fresh"]["launches"], (row["case"], row["needs"])

    def test_batches_of_other_rows_share_recipes(self, rows):
        for row in rows:
            if row["case"] in ("other rows", "another batch", "other scales", "shared queries, other keys"):
                assert row["first"]["asked"] == [], row["case"]

    def test_there_are_cases_that_must_not(self, rows):
        """Without them the others would prove little."""
        kinds = ("1 heads", "16 heads", "float16", "float32", "threads copy", "window", "scales of sequences", "a slice")
        kinds += ("dense, 1 x 8", "dense, 4 x 24", "dense, 4 x 128", "dense keys", "shared queries")
        asked = {row["case"]: row["first"]["asked"] for row in rows if all(row["needs"])}
        for kind in kinds:
            assert "forward_kernel" in asked[kind], kind


KERNEL = SimpleNamespace(
    params=[
        SimpleNamespace(is_constexpr=constant, do_not_specialize=plain, do_not_specialize_on_alignment=anywhere)
        for constant, plain, anywhere in (
            (False, False, False),
            (False, True, False),
            (False, False, True),
            (True, False, False),
        )
    ]
)


def test_what_triton_tells_apart_is_told_apart():
    """Two values of the same kind may be given to the same compiled kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from gdpa.launching import kinds

    libtriton = pytest.importorskip("triton._C.libtriton")
    backend, x = CUDABackend(GPUTarget("cuda", 90, 32)), torch.zeros(64)
    tensors = [x, x[1:], x[4:], x[:0], x.half(), x.double(), x.int(), x.long(), x.bfloat16()[1:]]
    edges = [2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**40, 2**63 - 1, 2**63]
    values = [*range(-33, 50), *edges, 0.0, 1.0, 0.5, None, *tensors]
    for parameter, options in zip(KERNEL.params, ((True, True), (False, True), (True, False)), strict=False):
        classes: dict[Any, Any] = {}
        for value in values:
            (kind,) = kinds(SimpleNamespace(params=[parameter]), (value,))
            theirs = libtriton.native_specialize_impl(backend, value, False, *options)
            assert classes.setdefault(kind, theirs) == theirs, value
        assert len(classes) > 5


class Kernel:
    """Stands in for a Triton kernel and for what it compiles; keeps what each launch was given."""

    params = KERNEL.params

    def __init__(self) -> None:
        self.by_triton: list[Any] = []
        self.by_recipe: list[Any] = []
        self.function, self.packed_metadata = 11, (4, 1, 1000)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.by_triton.append((grid, arguments, options)) or self

    def run(self, *arguments: Any) -> None:
        self.by_recipe.append((arguments[:3], arguments[9:]))


class TestLaunching:
    @pytest.fixture
    def kernel(self, monkeypatch) -> Kernel:
        from gdpa import launching

        monkeypatch.setattr(launching, "_recipes", {})
        monkeypatch.setattr(launching, "is_known", lambda device: True)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        return Kernel()

    def launch(self, kernel: Kernel, x: Any, rows: int, batch: Any, constant: Any = "a", warps: int = 4) -> None:
        from gdpa import launching

        launching.run(kernel, (2, 3, 1), torch.device("cpu"), (x, rows, batch), {"C": constant}, {"num_warps": warps})

    def test_is_triton_s_the_first_time_alone(self, kernel):
        x = torch.zeros(10)
        for _ in range(3):
            self.launch(kernel, x, 5, 17)
        assert kernel.by_triton == [((2, 3, 1), (x, 5, 17), {"C": "a", "num_warps": 4})]
        assert kernel.by_recipe == [((2, 3, 1), (x, 5, 17, "a"))] * 2

    @pytest.mark.parametrize(
        "changes",
        [
            {"x": torch.zeros(10).half()},
            {"x": torch.zeros(10)[1:]},
            {"x": None},
            {"batch": 1},
            {"rows": 2**31},
            {"constant": "b"},
            {"warps": 8},
        ],
        ids=["dtype", "address", "no tensor", "one", "wide", "constant", "option"],
    )
    def test_is_triton_s_again_for_another_kind(self, kernel, changes):
        usual = {"x": torch.zeros(10), "rows": 5, "batch": 17}
        self.launch(kernel, **usual)
        self.launch(kernel, **usual | changes)
        assert len(kernel.by_triton) == 2
        self.launch(kernel, **usual)
        self.launch(kernel, **usual | changes)
        assert len(kernel.by_triton) == len(kernel.by_recipe) == 2

    def test_is_always_triton_s_on_other_devices(self, kernel, monkeypatch):
        from gdpa import launching

        monkeypatch.setattr(launching, "is_known", lambda device: False)
        for _ in range(3):
            self.launch(kernel, torch.zeros(10), 5, 17)
        assert len(kernel.by_triton) == 3
        assert not kernel.by_recipe

    def test_keeps_a_bounded_number_of_recipes(self, kernel, monkeypatch):
        from gdpa import launching

        monkeypatch.setattr(launching, "_MOST_RECIPES", 3)
        for warps in range(1, 20):
            self.launch(kernel, torch.zeros(10), 5, 17, warps=warps)
            assert 1 <= len(launching._recipes) <= 3


@pytest.mark.parametrize("hip", [None, "6.0"])
@pytest.mark.parametrize("interpreted", [False, True])
def test_recipes_are_for_nvidia_and_compiled_kernels(monkeypatch, hip, interpreted):
    from triton import knobs

    from gdpa import launching

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(knobs.runtime, "interpret", interpreted)
    is_known = launching.is_known.__wrapped__
    assert is_known(torch.device("cuda", 0)) == (hip is None and not interpreted)
    assert not is_known(torch.device("cpu"))


def test_a_kernel_without_descriptors_is_started_by_the_c_function_itself(monkeypatch):
    import triton
    from triton.backends.nvidia import driver

    from gdpa import launching

    if not triton.__version__.startswith("3.6."):
        pytest.skip(f"the launcher is known of Triton 3.6 alone, and this is {triton.__version__}")
    started: list[Any] = []

    class CFunction:  # not a Python function, as the one that Triton builds
        def __call__(self, *arguments: Any) -> None:
            started.append(arguments)

    run = driver.CudaLauncher.__new__(driver.CudaLauncher)
    run.launch = driver.wrap_handle_tensordesc(CFunction(), {0: "*fp32", 1: "i32", 2: "constexpr"}, None)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    kernel = SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 1000), launch_metadata=lambda *_: None)
    recipe = launching.Recipe(kernel, ("constant",), ())
    assert recipe.launcher is not None
    launching.start(recipe, (2, 3, 4), 7, (), (4096, 5))
    monkeypatch.setattr(launching, "is_hooked", lambda: True)
    launching.start(recipe, (2, 3, 4), 7, (), (4096, 5))
    bare, ordinary = started
    assert bare == (*ordinary[:11], None, None, *ordinary[13:])
    assert ordinary[:5] == (2, 3, 4, 7, 11)
    assert ordinary[13:] == (4096, 5, "constant")

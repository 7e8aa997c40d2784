"""The hopper backend's host side, without a GPU: what it takes, and that remembered launches are what first ones are.

What the kernel computes is tested in tests/gpu, how it compiles in test_compile_kernels.py.
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import FORMS, make_case, needs_triton

from gdpa.backends.hopper import backend

HOPPER = torch.device("cuda", 0)


@pytest.fixture
def on_hopper(monkeypatch):
    """As on a Hopper GPU, as far as the decision goes."""
    monkeypatch.setattr(backend, "architecture", lambda device: 90 if device.type == "cuda" else 0)
    monkeypatch.setattr(backend, "_missing", lambda: None)


def problem(**changes: Any) -> Any:
    case = make_case(heads=4, head_dim=128, dtype=torch.bfloat16)
    return dataclasses.replace(case.problem, **{"device": HOPPER, **changes})


def test_it_takes_both_16_bit_dtypes_and_head_dimensions(on_hopper):
    for dtype in (torch.bfloat16, torch.float16):
        for size in (64, 128):
            assert backend.supports(problem(dtype=dtype, head_dim=size, value_dim=size)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 96, "value_dim": 96}, "head dimensions 64 and 128"),
        ({"value_dim": 64}, "head dimensions 64 and 128"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"query_rows": 2**30}, "fewer than"),
        ({"key_side": "dense", "key_rows": 2**20, "batch": 1024}, "fewer than"),
        ({"device": torch.device("cpu")}, "q is on cpu"),
    ],
    ids=["D", "Dv", "dtype", "rows", "rows of all sequences", "device"],
)
def test_it_says_what_it_does_not_take(on_hopper, changes, reason):
    assert reason in backend.supports(problem(**changes))


def test_another_gpu_is_named(monkeypatch):
    monkeypatch.setattr(backend, "architecture", lambda device: 80)
    assert backend.supports(problem()) == "it runs on Hopper GPUs (compute capability 9.0), and this one is 8.0"


@needs_triton
class TestWhichGradientsItsKernelComputes:
    """dQ alone comes from the portable kernel."""

    @pytest.fixture
    def calls(self, monkeypatch):
        from gdpa.backends.hopper import launch_backward
        from gdpa.backends.triton import run as portable

        calls = []
        for name, module in (("hopper", launch_backward), ("triton", portable)):
            monkeypatch.setattr(
                module, "backward", lambda *arguments, name=name: calls.append((name, arguments[-1])) or (None,) * 3
            )
        return calls

    @pytest.mark.parametrize(
        ("needs", "expected"),
        [
            ((True, True, True), [("hopper", (True, True, True))]),
            ((False, True, False), [("hopper", (False, True, False))]),
            ((True, False, True), [("hopper", (True, False, True))]),
            ((True, False, False), [("triton", (True, False, False))]),
        ],
    )
    def test_by_what_is_needed(self, calls, needs, expected):
        backend.backward(problem(), *[None] * 7, needs)
        assert calls == expected


class Launched:
    """Stands in for the kernel: keeps what each launch is given, Triton's way and the short one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[Any, ...]]] = []
        self.function = self.packed_metadata = None

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Launched:
            for option in ("num_warps", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid"):
                constants.pop(option, None)
            self.calls.append(("first", grid[0], (*arguments, *constants.values())))
            return self

        return launch

    def run(self, grid: int, *rest: Any) -> None:
        self.calls.append(("remembered", grid, rest[8:]))


def comparable(arguments: tuple[Any, ...]) -> list[Any]:
    """Descriptors by what the copy engine is told, tensors by where they are (a schedule stays while its offsets do)."""
    seen: list[Any] = []
    for x in arguments:
        if hasattr(x, "base"):
            seen.append(("descriptor", x.base.data_ptr(), list(x.shape), list(x.strides), x.padding))
        else:
            seen.append(x.data_ptr() if isinstance(x, torch.Tensor) else x)
    return seen


@pytest.fixture
def launched(monkeypatch):
    """The forward's launches, of a kernel that stands in for its own; on a CPU, whose tensors have no device index."""
    from gdpa.backends.hopper import launch

    kernel = Launched()
    monkeypatch.setattr(launch, "forward_kernel", kernel)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    return kernel


def call(case: Any, **changes: Any) -> torch.Tensor:
    from gdpa.backends.hopper import launch

    q, k, v, cu_q, cu_k, scales = case.inputs._replace(**changes)
    return launch.forward(case.problem, q, k, v, cu_q, cu_k, scales)


@needs_triton
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out_scale", [None, "per-sequence"], ids=["one scale", "a scale each"])
def test_a_remembered_launch_is_what_a_first_one_would_be(launched, monkeypatch, form, out_scale):
    """Jagged batches differ in their rows and addresses; the recipe of one must serve the next, and what is noted of a batch itself."""
    from gdpa.backends.hopper import launch

    options = {"heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "out_scale": out_scale}
    small = make_case(form, q_lengths=(130, 7), k_lengths=(5, 300), **options)
    large = make_case(form, q_lengths=(300, 0, 65), k_lengths=(64, 129, 700), scale=0.25, seed=1, **options)

    call(small)
    outputs = [call(large)]
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_first", lambda *arguments: pytest.fail("a batch seen before was prepared again"))
        outputs.append(call(large))
    launch._recipes.clear()
    unknown = dataclasses.replace(large, problem=dataclasses.replace(large.problem))
    outputs.append(call(unknown))
    assert [how for how, _, _ in launched.calls] == ["first", "remembered", "remembered", "first"]
    assert len({grid for _, grid, _ in launched.calls[1:]}) == 1
    seen = [comparable(arguments) for _, _, arguments in launched.calls[1:]]
    assert [arguments.pop(3)[1] for arguments in seen] == [x.data_ptr() for x in outputs]
    assert seen[0] == seen[1] == seen[2]


@needs_triton
def test_slices_of_one_projection_are_read_in_place_and_the_output_is_whole(launched):
    case = make_case(q_lengths=(130, 7), heads=4, head_dim=64, dtype=torch.bfloat16)
    q = torch.ones(137, 3, 4, 64, dtype=torch.bfloat16)[:, 1]
    for _ in range(3):
        out = call(case, q=q)
        assert out.shape == q.shape
        assert out.is_contiguous()
    assert [how for how, _, _ in launched.calls] == ["first", "remembered", "remembered"]
    for _, _, arguments in launched.calls:
        assert arguments[0].base is q


@needs_triton
def test_inputs_that_cannot_be_described_are_copied(launched):
    case = make_case("dense", q_lengths=(100, 100), heads=2, head_dim=64, dtype=torch.bfloat16)
    call(case)
    apart = torch.ones(2, 110, 2, 64, dtype=torch.bfloat16)[:, :100]  # the same last strides, sequences further apart
    unaligned = torch.ones(2 * 100 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 100, 2, 64)
    for q in (apart, unaligned):
        call(case, q=q)
        call(case, q=q)
    assert len(launched.calls) == 5
    for _, _, arguments in launched.calls[1:]:
        read = arguments[0].base
        assert read is not apart
        assert read.is_contiguous()
        assert read.data_ptr() % 16 == 0
        assert (read == 1).all()


@needs_triton
@pytest.mark.parametrize(("rows", "batch"), [(1, 3), (5, 1)])
def test_a_dimension_of_size_1_may_have_any_stride(launched, rows, batch):
    """As in tensors whose rows come before their sequences: torch calls those with one row contiguous, whatever the distance of rows."""
    case = make_case("dense", q_lengths=(rows,) * batch, k_lengths=(7,) * batch, heads=2, head_dim=64, dtype=torch.bfloat16)
    q = torch.empty(rows, batch, 2, 64, dtype=torch.bfloat16).transpose(0, 1).copy_(case.inputs.q)
    assert q.stride(0) != rows * q.stride(1)
    assert q.is_contiguous()
    for _ in range(2):
        call(case, q=q)
    for _, _, arguments in launched.calls:
        descriptor = arguments[0]
        read = descriptor.base.as_strided((batch * rows, 2, 64), (descriptor.strides[2], 64, 1))
        assert torch.equal(read, case.inputs.q.reshape(-1, 2, 64))


@needs_triton
class TestTheBareLauncher:
    """Past `kernel.run`, the C function must be given what Triton would have given it."""

    LAYOUTS = (
        {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False},
        {"swizzle": 2, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 128, 32], "fp4_padded": False},
    )

    @pytest.fixture
    def started(self, monkeypatch):
        """A kernel with two descriptors, an integer and a constant, whose launcher is Triton's around a C function that takes notes."""
        import triton
        from triton.backends.nvidia import driver

        if not triton.__version__.startswith("3.6."):
            pytest.skip(f"the launcher is known of Triton 3.6 alone, and this is {triton.__version__}")
        calls: list[tuple[Any, ...]] = []
        encoded: list[tuple[Any, ...]] = []
        utils = SimpleNamespace(fill_tma_descriptor=lambda *what: encoded.append(what) or ("map", str(what)))
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        signature = {0: "tensordesc<bf16[1,1,64,64]>", 1: "tensordesc<bf16[1,1,128,32]>", 2: "i32", 3: "constexpr"}
        run = driver.CudaLauncher.__new__(driver.CudaLauncher)
        run.launch = driver.wrap_handle_tensordesc(lambda *arguments: calls.append(arguments), signature, self.LAYOUTS)
        run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
        run.global_scratch_size = run.profile_scratch_size = 0
        run.global_scratch_align = run.profile_scratch_align = 1
        metadata = lambda grid, stream, *arguments: ("metadata", grid, stream)  # noqa: E731
        kernel = SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 1000), launch_metadata=metadata)
        # The forward kernel, by its arguments: four descriptors, two pointers, six numbers, 15 constants.
        four = {**dict.fromkeys(range(4), "tensordesc<bf16[1,1,64,64]>"), **dict.fromkeys(range(4, 12), "i32"), 12: "constexpr"}
        of_four = copy.copy(run)
        of_four.launch = driver.wrap_handle_tensordesc(lambda *arguments: calls.append(arguments), four, self.LAYOUTS[:1] * 4)
        forward = SimpleNamespace(run=of_four, function=11, packed_metadata=(4, 1, 1000), launch_metadata=metadata)
        compiled = type("Compiled", (), {"__getitem__": lambda self, grid: lambda *arguments, **constants: forward})()
        return SimpleNamespace(kernel=kernel, four=compiled, calls=calls, encoded=encoded)

    def start(self, started: Any, *tensors: torch.Tensor, recipe: Any = None) -> Any:
        from gdpa.backends.hopper import launch

        recipe = recipe or launch.Recipe(started.kernel, ("constant",), tuple(launch.ragged_geometry(x) for x in tensors))
        launch.start(recipe, 132, tensors, (5,))
        return recipe

    def test_is_given_what_triton_gives_it(self, started, monkeypatch):
        from gdpa import launching

        a, b = torch.zeros(10, 2, 64).bfloat16(), torch.zeros(10, 3, 64).bfloat16()
        recipe = self.start(started, a, b)
        self.start(started, a, b, recipe=recipe)
        assert len(started.encoded) == 2
        assert recipe.launcher is not None
        monkeypatch.setattr(launching, "bare_launcher", lambda kernel: None)
        self.start(started, a, b)
        assert len(started.encoded) == 4
        bare, again, ordinary = started.calls
        hooks = slice(11, 13)  # empty chains, or none
        assert bare == again == (*ordinary[:11], None, None, *ordinary[13:])
        assert all(not chain.calls for chain in ordinary[hooks])

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("out_scale", [None, "per-sequence"], ids=["one scale", "a scale each"])
    def test_of_a_prepared_call_is_given_what_triton_gives_it(self, started, monkeypatch, form, out_scale):
        from gdpa import launching
        from gdpa.backends.hopper import launch

        options = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "out_scale": out_scale}
        case = make_case(form, q_lengths=(130, 7), k_lengths=(5, 300), **options)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(launch, "_recipes", {})
        monkeypatch.setattr(launch, "forward_kernel", started.four)
        call(case)
        del started.calls[:]
        outs = [call(case) for _ in range(2)]
        monkeypatch.setattr(launching, "is_hooked", lambda: True)  # Triton's own way
        outs.append(call(case))
        seen = []
        for arguments, out in zip(map(list, started.calls), outs, strict=True):
            assert arguments.pop(40)[1].startswith(f"({out.data_ptr()}, ")
            del arguments[10:13]  # metadata for hooks, and the hooks
            seen.append(comparable(tuple(arguments)))
        assert seen[0] == seen[1] == seen[2]

    def test_finds_a_descriptor_by_its_address_alone(self, started):
        tensors = [torch.zeros(10, 2, 64).bfloat16() for _ in range(3)]
        recipe = self.start(started, tensors[0], tensors[1])
        self.start(started, tensors[2], tensors[1], recipe=recipe)
        self.start(started, tensors[1], tensors[2][3:], recipe=recipe)
        self.start(started, tensors[0], tensors[1][:2], recipe=recipe)
        addresses = [x.data_ptr() for x in (tensors[0], tensors[1], tensors[2], tensors[1], tensors[2][3:])]
        assert [what[0] for what in started.encoded] == addresses
        assert [what[1] for what in started.encoded] == [3, 2, 3, 3, 2]  # the two descriptors are kept apart

    def test_keeps_a_bounded_number_of_them(self, started, monkeypatch):
        from gdpa import launching

        monkeypatch.setattr(launching.Encoded, "MOST", 3)
        x = torch.zeros(64, 2, 64).bfloat16()
        recipe = self.start(started, x, x)
        for row in range(1, 20):
            self.start(started, x[row:], x, recipe=recipe)
            assert 1 <= len(recipe.encoded[0]) <= 3
            assert started.calls[-1][13] == ("map", str(started.encoded[-1]))

    def test_is_left_alone_where_a_hook_watches(self, started, monkeypatch):
        from triton import knobs

        seen: list[Any] = []
        chain = knobs.HookChain()
        chain.add(seen.append)
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", chain)
        x = torch.zeros(10, 2, 64).bfloat16()
        self.start(started, x, x)
        assert started.calls[0][10:12] == (("metadata", (132, 1, 1), 7), chain)

    @pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
    def test_is_not_for_kernels_with_scratch_memory(self, started, size):
        from gdpa.launching import bare_launcher

        assert bare_launcher(started.kernel) is not None
        setattr(started.kernel.run, size, 128)
        assert bare_launcher(started.kernel) is None


@needs_triton
def test_nothing_is_launched_without_queries_or_keys(monkeypatch):
    from gdpa.backends.hopper import launch

    kernel = Launched()
    monkeypatch.setattr(launch, "forward_kernel", kernel)
    for q_lengths, k_lengths in (((0, 0), (3, 4)), ((3, 4), (0, 0))):
        case = make_case(q_lengths=q_lengths, k_lengths=k_lengths, head_dim=64, dtype=torch.bfloat16)
        out = launch.forward(case.problem, *case.inputs[:3], case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k, None)
        assert not out.any()
    assert not kernel.calls


@needs_triton
@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"activation": "gelu"}, 16),
        ({"activation": "gelu_tanh", "form": "shared-query", "q_lengths": (16,), "k_lengths": (5, 300)}, 16),
        ({"activation": "gelu", "form": "shared-query", "q_lengths": (15,), "k_lengths": (5, 300)}, None),
        ({"activation": "gelu", "q_lengths": (29, 2)}, None),
        ({"activation": "silu"}, None),
        ({"activation": "gelu", "scale": 0.0111}, 16),
        ({"activation": "gelu", "scale": 0.011}, None),
        ({"activation": "gelu", "scale": -1.0}, None),
        ({"activation": "gelu", "scale": 1e7}, None),
        ({"activation": "gelu", "scale": 0.0001, "dtype": torch.float16}, 32),
        ({"activation": "gelu", "head_dim": 64}, 16),
        ({"activation": "gelu", "head_dim": 64, "q_lengths": (600, 500), "k_lengths": (600, 500)}, 32),
        ({"activation": "gelu", "head_dim": 64, "q_lengths": (600, 500), "k_lengths": (192, 193), "form": "dense-key"}, None),
        ({"activation": "gelu", "head_dim": 64, "form": "dense", "q_lengths": (256, 256), "k_lengths": (256,)}, 16),
        ({"activation": "gelu", "head_dim": 64, "form": "dense", "q_lengths": (512, 512), "k_lengths": (256,)}, 16),
        (
            {
                "activation": "gelu",
                "head_dim": 64,
                "dtype": torch.float16,
                "form": "dense",
                "q_lengths": (512,),
                "k_lengths": (256,),
            },
            32,
        ),
        ({"activation": "gelu", "dtype": torch.float16}, 32),
        ({"activation": "gelu", "dtype": torch.float16, "k_lengths": (5, 122)}, None),
        ({"activation": "gelu_tanh", "dtype": torch.float16}, 32),
        ({"activation": "silu", "dtype": torch.float16}, None),
        ({"activation": ["gelu", "gelu", "gelu", "relu"]}, None),
    ],
    ids=[
        "gelu",
        "a few rows for each of several",
        "too few for each",
        "few rows",
        "silu",
        "the least scale",
        "a small scale",
        "a negative scale",
        "a large scale",
        "fp16, a small scale",
        "narrow",
        "narrow, three consumers",
        "narrow, one loop of three consumers",
        "narrow, four consumers and one tile",
        "narrow, four consumers and two tiles",
        "narrow, fp16 and four consumers",
        "fp16",
        "fp16, few keys",
        "fp16, gelu_tanh",
        "fp16, silu",
        "heads that differ",
    ],
)
def test_gelu_is_packed_where_many_rows_share_the_error_budget(options, exact, monkeypatch):
    from gdpa.backends.hopper import launch, plan, plan_forward
    from gdpa.backends.hopper.forward import rounded

    monkeypatch.setattr(plan_forward, "LEAST_TILES_FOR_FOUR", 0)  # the cases are small

    case = make_case(
        **{"q_lengths": (130, 7), "k_lengths": (5, 300), "heads": 4, "head_dim": 128, "dtype": torch.bfloat16} | options
    )
    q, k, v = case.inputs[:3]
    constants = launch._constants(case.problem, q, k, v, q.new_empty(case.problem.output_shape), None)
    functions = plan.functions_for(case.problem)
    chosen = [constants[name] for name in ("activate", "finish", "activate_rest", "finish_rest")]
    forms = plan_forward.packed_forms(case.problem)
    if exact is None:
        assert forms is None
        assert chosen == [functions.scaled, rounded, functions.scaled, rounded]
    else:
        assert forms is not None
        assert [form.exact for form in forms] == [exact, 0]
        first, rest = (functions.packed[form] for form in forms)
        assert chosen == [first.open, first.finish, rest.open, rest.finish]


@needs_triton
def test_a_mask_parts_no_packed_pairs():
    """A gelu whose slope at 0 is more than fp16 holds is masked, and so not packed."""
    import gdpa
    from gdpa.backends.hopper import launch
    from gdpa.tracing import device_functions

    steep = gdpa.Activation(lambda s: torch.nn.functional.gelu(s) * 1e6)
    assert device_functions((steep.key,), precision="bfloat16", frontend="gluon").packed
    case = make_case(activation=steep, q_lengths=(130, 7), k_lengths=(5, 300), heads=4, head_dim=128, dtype=torch.bfloat16)
    q, k, v = case.inputs[:3]
    constants = launch._constants(case.problem, q, k, v, q.new_empty(case.problem.output_shape), None)
    assert constants["MASK_TAIL"]
    assert constants["finish"] is launch.rounded


@needs_triton
class TestHowManyConsumersShareATile:
    LONG = (512, 512)

    @pytest.fixture
    def few_tiles_do(self, monkeypatch):
        from gdpa.backends.hopper import plan_forward

        monkeypatch.setattr(plan_forward, "LEAST_TILES_FOR_FOUR", 0)

    @pytest.mark.parametrize(("batch", "expected"), [(33, 4), (32, 3)])
    @pytest.mark.parametrize("form", ["packed", "dense"])
    def test_four_only_where_every_multiprocessor_has_a_tile(self, form, batch, expected):
        from gdpa.backends.hopper import plan_forward

        options = {"heads": 4, "head_dim": 64, "dtype": torch.bfloat16, "activation": "silu"}
        problem = make_case(form, q_lengths=(200,) * batch, **options).problem
        assert plan_forward.consumers(problem) == (2 if form == "dense" and expected == 3 else expected)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, 4),
            ({"k_lengths": (384, 384)}, 4),
            ({"k_lengths": (384, 386)}, 3),
            ({"k_lengths": (128, 129)}, 3),  # gelu, the base's, has long steps
            ({"k_lengths": (128, 129), "activation": "silu"}, 4),
            ({"form": "dense-key", "activation": "silu"}, 3),
            ({"form": "dense"}, 4),
            ({"form": "dense", "k_lengths": (128,)}, 3),
            ({"form": "dense", "k_lengths": (128,), "activation": "silu"}, 4),
            ({"form": "dense", "k_lengths": (1024,)}, 4),
            ({"form": "dense", "k_lengths": (1025,)}, 4),
            ({"form": "dense", "k_lengths": (1024,), "activation": "elu"}, 4),
            ({"form": "dense", "k_lengths": (1025,), "activation": "elu"}, 3),
            ({"form": "shared-query", "q_lengths": (512,), "k_lengths": (5, 300)}, 4),
            ({"q_lengths": (1024, 0)}, 4),
            ({"q_lengths": (96, 96)}, 4),
            ({"q_lengths": (95, 96)}, 2),
            ({"form": "dense", "q_lengths": (128, 128)}, 2),
            ({"form": "dense", "q_lengths": (129, 129)}, 3),
            ({"form": "dense", "q_lengths": (192, 192)}, 3),
            ({"form": "dense", "q_lengths": (192, 192), "k_lengths": (192,)}, 4),
            ({"form": "dense", "q_lengths": (193, 193)}, 4),
            ({"form": "dense", "q_lengths": (256, 256), "k_lengths": (100,)}, 2),
            ({"form": "dense", "q_lengths": (257, 257)}, 3),
            ({"form": "dense", "q_lengths": (320, 320), "k_lengths": (320,)}, 4),
            ({"form": "dense", "q_lengths": (384, 384), "k_lengths": (384,)}, 3),
            ({"form": "dense", "q_lengths": (512, 512), "k_lengths": (512,)}, 4),
            ({"form": "dense", "q_lengths": (640, 640), "k_lengths": (640,)}, 3),
            ({"form": "dense", "q_lengths": (2048, 2048), "k_lengths": (2048,), "activation": "silu"}, 3),
            ({"form": "dense", "q_lengths": (2048, 2048), "activation": "silu"}, 4),
            ({"form": "shared-query", "q_lengths": (384,), "k_lengths": (212, 300)}, 3),
            ({"form": "shared-query", "q_lengths": (32,), "k_lengths": (5, 300)}, 2),
            ({"activation": "softplus"}, 3),  # a long one
            ({"activation": "softplus", "q_lengths": (511, 512)}, 2),
            ({"activation": "softplus", "form": "dense", "q_lengths": (384, 384)}, 2),
            ({"activation": "softplus", "form": "dense", "q_lengths": (1024, 1024)}, 3),
            ({"head_dim": 128}, 2),
            ({"dtype": torch.float16, "activation": "silu"}, 4),
            ({"dtype": torch.float16, "activation": "gelu_tanh", "form": "dense", "q_lengths": (192, 192)}, 3),
            ({"dtype": torch.float16, "form": "dense", "q_lengths": (1024, 1024)}, 4),
            ({"dtype": torch.float16, "form": "dense", "q_lengths": (1024, 1024), "k_lengths": (64,)}, 3),
            ({"dtype": torch.float16}, 4),
            ({"dtype": torch.float16, "k_lengths": (1025, 1025)}, 3),
            ({"dtype": torch.float16, "k_lengths": (5, 122)}, 3),
            # A long one, with so few keys not packed.
            ({"dtype": torch.float16, "k_lengths": (5, 122), "q_lengths": (511, 512)}, 2),
            ({"dtype": torch.float16, "k_lengths": (1025, 1025), "q_lengths": (95, 96)}, 2),
            ({"activation": torch.log}, 2),
            ({"activation": ["gelu", "relu"]}, 2),
        ],
    )
    @pytest.mark.usefixtures("few_tiles_do")
    def test_narrow_heads_have_as_many_as_make_few_tiles(self, options, expected):
        from gdpa.backends.hopper import plan_forward

        options = {"q_lengths": self.LONG, "k_lengths": (5, 300), "heads": 2, "head_dim": 64, "dtype": torch.bfloat16} | options
        if options.get("form") == "dense" and options["k_lengths"] == (5, 300):
            options["k_lengths"] = (256, 256)
        problem = make_case(**options).problem
        assert plan_forward.consumers(problem) == expected
        # There two have packed gelu, and a sequence's results must not depend on how long others are.
        assert plan_forward.consumers(dataclasses.replace(problem, deterministic=True)) == 2

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"form": "dense", "k_lengths": (129, 129)}, False),  # of four, and so packed
            ({"form": "dense", "k_lengths": (129, 129), "activation": "elu"}, True),
            ({"form": "dense", "k_lengths": (384, 384)}, True),
            ({"form": "dense", "k_lengths": (128, 128)}, False),
            ({"form": "dense", "k_lengths": (385, 385)}, False),
            ({"k_lengths": (64, 64)}, True),
            ({"k_lengths": (200, 310)}, True),
            ({"k_lengths": (63, 64)}, False),
            ({"k_lengths": (200, 312)}, False),
            ({"activation": "silu"}, False),
            ({"activation": "softplus"}, False),
            ({"head_dim": 128}, False),
            ({"q_lengths": (40,)}, False),
        ],
    )
    @pytest.mark.usefixtures("few_tiles_do")
    def test_a_long_activation_and_few_blocks_of_keys_have_one_loop(self, options, expected):
        from gdpa.backends.hopper import launch, plan_forward

        base = {
            "form": "shared-query",
            "activation": "gelu",
            "q_lengths": (384, 384),
            "k_lengths": (5, 300),
            "heads": 2,
            "head_dim": 64,
            "dtype": torch.bfloat16,
        }
        case = make_case(**base | options)
        assert plan_forward.has_one_loop(case.problem) == expected
        q, k, v = case.inputs[:3]
        constants = launch._constants(case.problem, q, k, v, q.new_empty(case.problem.output_shape), None)
        assert constants["ONE_LOOP"] == expected

    def test_a_loop_for_few_keys_is_another_kernel_than_one_for_many(self, launched):
        """Alike in all else that a recipe depends on."""
        options = {"activation": "gelu", "heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
        for keys in (100, 500, 120, 600):
            call(make_case("shared-query", q_lengths=(384,), k_lengths=(keys, keys), **options))
        assert [(how, arguments[-1]) for how, _, arguments in launched.calls] == [
            ("first", True),
            ("first", False),
            ("remembered", True),
            ("remembered", False),
        ]

    @pytest.mark.usefixtures("few_tiles_do")
    def test_packed_scores_are_another_kernel_than_others(self, launched):
        """Alike in all else that a recipe depends on."""
        from gdpa.backends.hopper.forward import rounded

        options = {"q_lengths": (1024,), "activation": "gelu", "heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
        for scale in (0.125, -0.125, 0.25, -0.25):
            call(make_case("dense", **options, scale=scale))
        assert [(how, rounded in arguments) for how, _, arguments in launched.calls] == [
            ("first", False),
            ("first", True),
            ("remembered", False),
            ("remembered", True),
        ]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("activation", ["silu", "gelu", "softplus"])
    def test_precompile_builds_each_kind_once(self, monkeypatch, activation, dtype):
        """All that sequences of as many queries as keys can have, and no other twice."""
        from gdpa.backends.hopper import launch, plan_forward

        def kind(form, rows):
            q, k, v, cu_q, cu_k = launch.example(form, 1024, rows, 4, 4, 64, 64, dtype)
            problem = launch.describe(q, k, v, cu_q, cu_k, None, None, (activation,), None, 1.0, (-1, -1), False)
            forms = plan_forward.consumers(problem), plan_forward.has_one_loop(problem), plan_forward.packed_forms(problem)
            return form, launch.precision_for(problem), *forms

        built = []

        def compile_it(activations, head_dim, dtype, group, form, kv_heads, rows, window):
            of_form = kind(form, rows)
            if of_form not in built:
                built.append(of_form)
            return SimpleNamespace(metadata=SimpleNamespace(num_warps=4 + 4 * of_form[2], shared=1024), hash=of_form)

        monkeypatch.setattr(launch, "compile_forward", compile_it)
        lines = launch.precompile((activation,), 64, dtype)
        assert len(lines) == len(built)
        forms = ("packed", "dense", "dense-keys", "shared-queries")
        assert set(built) == {kind(form, rows) for form in forms for rows in range(32, 2200, 32)}

    @pytest.mark.usefixtures("few_tiles_do")
    @pytest.mark.parametrize("form", ["packed", "dense"])
    def test_tiles_records_and_the_kernel_agree(self, launched, form):
        """One batch of each kind: three consumers have 192 rows a tile and four 256, so there are fewer tiles."""
        from gdpa.backends.hopper import launch

        options = {"heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "activation": "silu"}
        for rows, count in ((64, 2), (512, 4), *(((384, 3),) if form == "dense" else ())):
            case = make_case(form, q_lengths=(rows, rows), k_lengths=(128, 128), **options)
            call(case)
            call(case)
            tile = 64 * count
            q_blocks = -(-rows // tile)
            for _, _, arguments in launched.calls[-2:]:
                records, tiles, blocks = arguments[4], arguments[6], arguments[9]
                assert blocks == (q_blocks if form == "dense" else -(-2 * rows // tile))
                assert tiles >= 2 * 2 * q_blocks
                assert arguments[-2] == count
            if form == "packed":
                built = launch.schedule.records(
                    case.inputs.cu_seqlens_q, case.inputs.cu_seqlens_k, 2, case.problem.query_rows, case.problem.key_rows, tile
                )
                assert built[0, 0] == 2 * q_blocks
                assert records == built.data_ptr()

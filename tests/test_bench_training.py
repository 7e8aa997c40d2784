"""`gdpa bench --suite train`: the attention of each provider against the reference, the marks around its calls, and the run itself."""

import json
import math
import re
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import gdpa
from gdpa import cli, models
from gdpa.bench import timing, training, training_attention, training_report
from gdpa.bench.softmax import attend
from gdpa.bench.training_attention import Attention, Watched, by_name
from gdpa.data.synthetic import SyntheticClicks
from gdpa.nn import regions
from gdpa.numerics import Inputs

CPU = torch.device("cpu")
HEADS, DIM, SEEDS, KEYS = 2, 8, 3, 5
LENGTHS = torch.tensor([4, 0, 1, 7])
FORMS = ("packed", "dense keys", "shared queries")
KEYS_OF_A_ROW = {
    "model", "preset", "provider", "samples_per_s", "tokens_per_s", "step_ms", "spread", "attention_ms", "attention_forward_ms",
    "attention_backward_ms", "other_ms", "mfu", "peak_bytes", "gradient_difference", "rounds", "error", "note",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """A small yardstick, and few short turns."""
    monkeypatch.setitem(timing.HARDWARE_SIZES, "cpu", (64, 2**16))
    monkeypatch.setattr(training, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(training, "MOST_ROUNDS", 2)


def call(form):
    """(q, k, v) that ask for gradients, and the offsets of both sides."""
    generator = torch.Generator().manual_seed(0)
    offsets = gdpa.offsets_from_lengths(LENGTHS)
    rows, batch = int(LENGTHS.sum()), len(LENGTHS)

    def normal(*shape):
        return torch.randn(*shape, HEADS, DIM, generator=generator, dtype=torch.float64).requires_grad_()

    if form == "dense keys":
        return (normal(rows), normal(batch, KEYS), normal(batch, KEYS)), (offsets, None)
    if form == "shared queries":
        return (normal(SEEDS), normal(rows), normal(rows)), (None, offsets)
    return (normal(rows), normal(rows), normal(rows)), (offsets, offsets)


def run(operator, tensors, offsets, **options):
    out = operator(*tensors, *offsets, None, None, gdpa.Activation("gelu"), **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, tensors, weights)


def learned(name):
    attention = by_name(name)
    attention.begin(learn=True)
    return attention


def suite(path, *options, status=0):
    arguments = ["bench", "--suite", "train", "--device", "cpu", "--seconds", "60", "--steps", "1", "--batch", "8", *options]
    assert cli.main([*arguments, "--json", str(path)]) == status
    return json.loads(path.read_text())


# The attention of each provider


@pytest.mark.parametrize("out_scale", [None, 0.5, 1.0 / (1.0 + LENGTHS)], ids=["none", "number", "per sequence"])
@pytest.mark.parametrize("form", FORMS)
def test_padded_attention_and_its_gradients_equal_the_reference(form, out_scale):
    tensors, offsets = call(form)
    expected = run(gdpa.attention_varlen, tensors, offsets, scale=0.3, out_scale=out_scale, backend="reference")
    attention = learned("eager")
    for result in (run(attention, tensors, offsets, scale=0.3, out_scale=out_scale), again(attention, tensors, offsets, out_scale)):
        for name, x, right in zip(("out", "dq", "dk", "dv"), result, expected, strict=True):
            torch.testing.assert_close(x, right, rtol=1e-10, atol=1e-10, msg=name)


def again(attention, tensors, offsets, out_scale):
    """The step after the first, which knows the lengths."""
    attention.begin()
    return run(attention, tensors, offsets, scale=0.3, out_scale=out_scale)


def test_padded_attention_knows_the_default_scale():
    tensors, offsets = call("packed")
    torch.testing.assert_close(run(learned("eager"), tensors, offsets), run(gdpa.attention_varlen, tensors, offsets))


def test_the_scores_of_padded_attention_are_counted_by_hand():
    attention = learned("eager")
    for form in FORMS:
        run(attention, *call(form))
    batch, longest = len(LENGTHS), int(LENGTHS.max())
    counts = [batch * HEADS * rows * keys for rows, keys in ((longest, longest), (longest, KEYS), (SEEDS, longest))]
    assert attention.padded_scores == counts
    assert attention.estimated_bytes(2) == 2 * (2 * sum(counts) + 3 * max(counts))


def test_padding_that_does_not_fit_a_cpu_is_refused_as_out_of_memory(monkeypatch):
    monkeypatch.setattr(training_attention, "free_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match="score matrices") as caught:
        run(learned("eager"), *call("packed"))
    assert timing.describe_failure(caught.value) == "out of memory"


@pytest.mark.parametrize("name", ["eager", "varlen"])
def test_what_the_baselines_do_not_compute_is_refused(name):
    tensors, offsets = call("packed")
    with pytest.raises(gdpa.GdpaError, match="window_size"):
        learned(name)(*tensors, *offsets, None, None, gdpa.Activation("gelu"), window_size=(3, 0))
    if name == "eager":
        with pytest.raises(gdpa.GdpaError, match="activation"):
            learned(name)(*tensors, *offsets, None, None, gdpa.Activation(torch.sin))


@pytest.mark.parametrize("form", FORMS)
def test_varlen_is_softmax_over_each_sequence(form, monkeypatch):
    """With torch's kernel, which needs a GPU, replaced by the oracle on the packed tensors that it is given."""
    from torch.nn.attention import varlen

    def oracle(q, k, v, cu_q, cu_k, max_q, max_k):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
        return attend(Inputs(q, k, v, cu_q, cu_k), DIM**-0.5, None, torch.float64, torch.float64, rounded=False).out

    monkeypatch.setattr(varlen, "varlen_attn", oracle)
    tensors, offsets = call(form)
    with torch.no_grad():
        out = learned("varlen")(*tensors, *offsets, None, None, gdpa.Activation("gelu"), scale=0.3, out_scale=2.0)
        q, k, v = tensors
        for b, length in enumerate(LENGTHS.tolist()):
            start = int(LENGTHS[:b].sum())
            rows = slice(start, start + length)
            keys = (k[b], v[b]) if form == "dense keys" else (k[rows], v[rows])
            queries, result = (q, out[b]) if form == "shared queries" else (q[rows], out[rows])
            if length == 0:
                assert not result.any()
                continue
            p = torch.softmax(torch.einsum("qhd,khd->hqk", queries, keys[0]) / DIM**0.5, dim=-1)
            torch.testing.assert_close(result, torch.einsum("hqk,khd->qhd", p, keys[1]))


def test_a_named_backend_is_used_and_noted():
    tensors, offsets = call("packed")
    attention = learned("gdpa-reference")
    run(attention, tensors, offsets, backend=None)
    assert attention.backends == ["reference"]
    attention = learned("gdpa")
    run(attention, tensors, offsets, backend="reference")
    assert attention.backends == ["cpu"]


def test_providers_that_cannot_run_here_say_why():
    assert "CUDA" in by_name("varlen").reason_against(CPU, True)
    assert "bf16" in by_name("varlen").reason_against(torch.device("cuda"), False)
    assert by_name("varlen").reason_against(torch.device("cuda"), True) is None
    assert "TRITON_INTERPRET" in by_name("gdpa-triton").reason_against(torch.device("cuda"), True)
    assert by_name("eager").reason_against(CPU, False) is None


# The marks around calls


class Slow(torch.autograd.Function):
    FORWARD, BACKWARD = 0.02, 0.05

    @staticmethod
    def forward(ctx, x):
        time.sleep(Slow.FORWARD)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(Slow.BACKWARD)
        return gradient * 2


class Sleeper(Attention):
    def __call__(self, q, k, v, *arguments, **options):
        return Slow.apply(q + k + v)


def test_watched_calls_are_timed_forward_and_backward_and_what_is_around_them_is_not():
    watched = Watched(Sleeper("sleeper"), gpu=False)
    x = torch.ones(3, requires_grad=True)
    y = x
    for _ in range(2):
        y = Slow.apply(y)  # outside
        y = watched(y, y, y)
    y = Slow.apply(y)
    y.sum().backward()
    forward, backward = watched.milliseconds()
    assert len(watched.forward_marks) == len(watched.backward_marks) == 4
    assert 2e3 * Slow.FORWARD <= forward < 3.5e3 * Slow.FORWARD
    assert 2e3 * Slow.BACKWARD <= backward < 3.5e3 * Slow.BACKWARD
    assert x.grad.tolist() == [2.0**3 * 6**2] * 3


class Event:
    """As much of a CUDA event as the marks use."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    """The GPU's way through the suite, on the CPU; returns how often the device was waited for."""
    waits = []
    for module in (training, training_attention):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12345)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return waits


# The run


def test_the_suite_measures_both_models_and_writes_every_key(tmp_path, capsys):
    data = suite(tmp_path / "rows.json")
    assert [(row["model"], row["provider"]) for row in data["rows"]] == [
        (model, provider) for model in ("interformer", "kunlun") for provider in ("gdpa", "eager")
    ]
    for row in data["rows"]:
        assert set(row) == KEYS_OF_A_ROW
        facts = data["header"]["models"][row["model"]]
        seconds = row["step_ms"] / 1e3
        assert row["error"] is None and row["preset"] == "tiny" and row["rounds"] == 2
        assert row["samples_per_s"] == pytest.approx(facts["batch"] / seconds)
        assert row["tokens_per_s"] == pytest.approx(facts["events"] / seconds)
        assert row["attention_ms"] == pytest.approx(row["attention_forward_ms"] + row["attention_backward_ms"])
        rest = row["step_ms"] - row["attention_ms"]
        assert row["other_ms"] == (pytest.approx(rest) if rest >= 0 else None)  # this machine may be a busy one
        assert row["attention_forward_ms"] > 0 and row["attention_backward_ms"] > 0
        rate = data["header"]["R"][row["model"]]["value"] * 1e12
        assert row["mfu"] == pytest.approx(facts["step_flops"] / seconds / rate)
        assert row["peak_bytes"] is None  # a CPU has no such count
    assert [row["gradient_difference"] for row in data["rows"] if row["provider"] == "eager"] == [None, None]
    assert all(row["gradient_difference"] < 1e-5 for row in data["rows"] if row["provider"] == "gdpa")
    assert data["header"]["suite"] == "train" and "--suite train" in data["header"]["command"]
    longest = models.PRESETS["kunlun"]["tiny"].max_history
    batch = SyntheticClicks(8, lengths="uniform", max_length=longest).batch(0)
    assert data["header"]["lengths"] == "uniform"
    facts = data["header"]["models"]["kunlun"]
    assert (facts["batch"], facts["events"]) == (8, batch.history.items.shape[0])
    model = models.build("kunlun", "tiny", SyntheticClicks(1).schema)
    assert facts["step_flops"] == 3 * model.flops(batch)
    printed = capsys.readouterr().out
    assert f"{facts['events']} events, uniform histories, the longest" in printed
    assert "kunlun, tiny" in printed and "samples/s" in printed and "the samples/s of eager" in printed


def broken(graph, inputs):
    raise NotImplementedError("no compiler today")


def compiled_by(backend, monkeypatch):
    """torch.compile's backend in the suite; returns how often a model was compiled for each kind of attention."""
    asked = set()
    for name in ("compile_regions", "compile_stages"):

        def compile_parts(module, name=name):
            asked.add(name)
            return getattr(regions, name)(module, backend=backend)

        monkeypatch.setattr(training, name, compile_parts)
    return asked


@pytest.mark.parametrize("backend", ["eager", broken], ids=["works", "fails"])
def test_the_model_is_compiled_around_each_kind_of_attention_and_the_rows_say_so(backend, monkeypatch, tmp_path):
    asked = compiled_by(backend, monkeypatch)
    data = suite(tmp_path / "rows.json", "--model", "kunlun", "--compile")
    assert asked == {"compile_regions", "compile_stages"}
    assert data["header"]["models"]["kunlun"]["compiled"] == (backend == "eager")
    notes = ("compiled layer by layer", "compiled between the attention's calls")
    for row, note in zip(data["rows"], notes if backend == "eager" else ["not compiled: torch.compile failed: "] * 2, strict=True):
        assert row["error"] is None and row["step_ms"] > 0 and row["attention_ms"] > 0
        assert row["note"].startswith(note)


def test_another_backend_is_not_passed_by_on_the_short_way(monkeypatch):
    """Calls that are remembered with the backend they had would go on to it."""
    from gdpa import dispatch, shortcut
    from gdpa.bench.training_attention import run_on

    monkeypatch.setitem(shortcut._calls, "a key", [])
    try:
        run_on("reference")
        assert not shortcut._calls
    finally:
        run_on(None)
    assert dispatch.choose.__module__ == "gdpa.dispatch"


def test_one_compilation_serves_all_backends_of_the_operator(monkeypatch, tmp_path):
    counter = CompileCounter()
    compiled_by(counter, monkeypatch)
    ran = []
    for name in ("cpu", "reference"):
        module = gdpa.dispatch.load(name)
        forward = module.forward
        monkeypatch.setattr(module, "forward", lambda *a, name=name, forward=forward: (ran.append(name), forward(*a))[1])
    providers = ("--provider", "gdpa,gdpa-reference")
    data = suite(tmp_path / "rows.json", "--model", "interformer", "--compile", *providers)
    assert [row["note"] for row in data["rows"]] == [
        "compiled layer by layer; backend cpu",
        "compiled layer by layer; backend reference",
    ]
    assert counter.frame_count == 4  # start, X_sum, layer, finish
    # 7 calls a forward: the first one, the gate's, that for memory, 3 in each of 2 rounds, and for the first provider that which compiles
    # and the gate's in the model that is not compiled.
    assert {name: ran.count(name) for name in set(ran)} == {"cpu": 11 * 7, "reference": 9 * 7}
    assert gdpa.explain(*(torch.zeros(1, 2, 1, 8) for _ in range(3))).backend == "cpu"


def test_the_rows_of_a_file_are_shown_again(tmp_path, capsys):
    suite(tmp_path / "rows.json", "--model", "kunlun")
    first = capsys.readouterr().out
    assert cli.main(["bench", "--show", str(tmp_path / "rows.json")]) == 0
    again = capsys.readouterr().out
    assert again.strip() in first
    assert "memory:" not in first  # a CPU has no such column


def test_attention_that_took_longer_than_the_step_leaves_no_rest_and_the_table_says_so(monkeypatch, tmp_path, capsys):
    """They are timed in different steps."""
    watched = training.Comparison._watched_step

    def busy(self, attention):
        return (90e3, 30e3) if "reference" in attention.backends else watched(self, attention)

    monkeypatch.setattr(training.Comparison, "_watched_step", busy)
    path = tmp_path / "rows.json"
    data = suite(path, "--provider", "gdpa-reference,gdpa", "--model", "kunlun")
    slow, usual = data["rows"]
    assert (slow["attention_ms"], slow["other_ms"]) == (120e3, None) and slow["step_ms"] > 0
    said = "gdpa-reference: backend reference; no rest of the step: attention's calls took 120.00 s in the steps they were timed in"
    printed = capsys.readouterr().out
    assert said in printed and printed.count("no rest of the step") == 1 + (usual["other_ms"] is None)
    slow["other_ms"] = slow["step_ms"] - slow["attention_ms"]  # as files of before have it
    path.write_text(json.dumps(data))
    assert cli.main(["bench", "--show", str(path)]) == 0
    again = capsys.readouterr().out
    assert said in again and re.search(r"-\d+\.\d\d s", again) is None


def test_on_a_gpu_memory_is_read_and_the_device_waited_for_between_turns_alone(tmp_path, gpu):
    data = suite(tmp_path / "rows.json", "--model", "kunlun", "--steps", "3")
    assert [row["peak_bytes"] for row in data["rows"]] == [12345, 12345]
    assert all(row["step_ms"] > 0 and row["attention_ms"] > 0 for row in data["rows"])
    # Two providers: once each for memory; two rounds of twice for the untimed step, twice for the timed ones, once for the marks.
    assert len(gpu) == 2 * (1 + 2 * 5)


class Failing(training_attention.Gdpa):
    """Runs `good` steps, then raises."""

    good, error = 0, RuntimeError("no such luck\nand more")
    begun = 0

    def begin(self, learn=False):
        super().begin(learn)
        Failing.begun += 1

    def __call__(self, *arguments, **options):
        if Failing.begun > Failing.good:
            raise Failing.error
        return super().__call__(*arguments, **options)


@pytest.fixture
def failing(monkeypatch):
    """gdpa-reference raises `error` once it has run `good` steps."""
    monkeypatch.setattr(
        training_attention, "by_name", lambda name: Failing("gdpa-cpu") if name == "gdpa-reference" else by_name(name)
    )

    def set_up(good, error):
        monkeypatch.setattr(Failing, "begun", 0)
        monkeypatch.setattr(Failing, "good", good)
        monkeypatch.setattr(Failing, "error", error)

    return set_up


@pytest.mark.parametrize(
    "good", [0, 1, 2, 6], ids=["in the first forward", "at the gate", "at the step for memory", "in the last round"]
)
def test_a_provider_that_fails_leaves_the_others_rows(good, failing, tmp_path):
    failing(good, RuntimeError("no such luck\nand more"))
    providers = ("--provider", "gdpa-reference,eager,gdpa", "--model", "kunlun")
    data = suite(tmp_path / "rows.json", *providers, status=1)
    wrong, *others = data["rows"]
    assert wrong["error"] == "failed: RuntimeError: no such luck"
    assert all(wrong[name] is None for name in training_report.MEASURED)
    assert all(row["error"] is None and row["samples_per_s"] > 0 and row["rounds"] == 2 for row in others)


def test_rows_of_earlier_rounds_stay_where_the_device_fails_altogether(monkeypatch, tmp_path):
    matmul, rounds = training.Comparison._matmul, []

    def broken(self):
        rounds.append(self)
        if len(rounds) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        matmul(self)

    monkeypatch.setattr(training.Comparison, "_matmul", broken)
    data = suite(tmp_path / "rows.json", "--model", "kunlun")
    assert [(row["error"], row["rounds"]) for row in data["rows"]] == [(None, 1), (None, 1)]


def test_out_of_memory_is_said_and_is_no_failure(failing, tmp_path):
    failing(0, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    data = suite(tmp_path / "rows.json", "--provider", "gdpa-reference,gdpa", "--model", "kunlun")
    assert [row["error"] for row in data["rows"]] == ["out of memory", None]


def test_a_backend_that_is_not_for_this_device_is_no_failure(tmp_path):
    data = suite(tmp_path / "rows.json", "--provider", "gdpa-hopper,gdpa-triton,varlen,gdpa", "--model", "kunlun")
    hopper, triton, varlen, ours = (row["error"] for row in data["rows"])
    assert "TRITON_INTERPRET" in hopper and "TRITON_INTERPRET" in triton and "CUDA" in varlen and ours is None


def test_a_provider_that_computes_something_else_is_wrong(monkeypatch, tmp_path):
    class Halved(training_attention.Gdpa):
        def __call__(self, *arguments, **options):
            return super().__call__(*arguments, **options) / 2

    monkeypatch.setattr(training_attention, "by_name", lambda name: Halved(name) if name == "gdpa" else by_name(name))
    data = suite(tmp_path / "rows.json", "--model", "kunlun", status=1)
    ours, eager = data["rows"]
    assert ours["error"].startswith("wrong: its gradient is") and ours["samples_per_s"] is None
    assert ours["gradient_difference"] > training.TOLERANCE[False] and eager["error"] is None


def test_a_gradient_that_compilation_loses_is_wrong(monkeypatch, tmp_path):
    """A provider that is alone is held against itself in a model that is not compiled."""

    def losing(dense):
        encode = type(dense.encode).forward
        dense.encode.forward = lambda events: encode(dense.encode, events).detach() + 0 * encode(dense.encode, events)
        return 1

    monkeypatch.setattr(training, "compile_stages", losing)
    monkeypatch.setattr(training, "plain_stages", lambda dense: dense.encode.__dict__.pop("forward", None))
    data = suite(tmp_path / "rows.json", "--model", "interformer", "--provider", "gdpa", "--compile", status=1)
    (row,) = data["rows"]
    assert row["error"].startswith("wrong: its gradient is") and "the same, not compiled" in row["error"]
    assert row["gradient_difference"] > training.TOLERANCE[False] and row["samples_per_s"] is None
    monkeypatch.setattr(training, "compile_stages", lambda dense: 1)
    (row,) = suite(tmp_path / "right.json", "--model", "interformer", "--provider", "gdpa", "--compile")["rows"]
    assert row["error"] is None and row["gradient_difference"] == 0


def test_a_lost_parameter_is_told_from_rounding():
    torch.manual_seed(0)
    sizes = {"large": 100.0, "small": 3.0, "next to nothing": 0.1}
    expected = {name: size * torch.nn.functional.normalize(torch.randn(50), dim=0) for name, size in sizes.items()}
    noisy = {name: x + 0.05 * torch.nn.functional.normalize(torch.randn(50), dim=0) for name, x in expected.items()}
    share = training.PARAMETER_SHARE[True]
    assert training._differences(noisy, expected, share).worst < training.PARAMETER_TOLERANCE
    whole, worst, name = training._differences({**noisy, "small": torch.zeros(50)}, expected, share)
    assert name == "small" and whole < training.TOLERANCE[True] and worst > training.PARAMETER_TOLERANCE
    del noisy["small"]
    assert training._differences(noisy, expected, share) == (math.inf, math.inf, "small")


def test_a_gradient_that_is_not_finite_is_wrong_and_does_not_stop_the_others_optimisers(monkeypatch, tmp_path):
    class Broken(training_attention.Gdpa):
        def __call__(self, *arguments, **options):
            return super().__call__(*arguments, **options) * math.nan

    monkeypatch.setattr(training_attention, "by_name", lambda name: Broken(name) if name == "gdpa" else by_name(name))
    ours, eager = suite(tmp_path / "rows.json", "--model", "kunlun", status=1)["rows"]
    assert "not finite" in ours["error"] and eager["error"] is None


def test_every_turn_starts_from_the_same_weights(monkeypatch, tmp_path):
    norms = {}
    step = training.Comparison._step

    def recorded(self, attention):
        total = sum(float(x.detach().double().square().sum()) for x in self.model.parameters())
        norms.setdefault(attention.name, []).append(total)
        step(self, attention)

    monkeypatch.setattr(training.Comparison, "_step", recorded)
    suite(tmp_path / "rows.json", "--model", "kunlun")
    # The step for memory, then an untimed, a timed and a watched step in each of two rounds.
    for name in ("gdpa", "eager"):
        assert len(norms[name]) == 7
        assert norms[name][0] == norms[name][1] == norms[name][4] == norms["gdpa"][0] != norms[name][2]


def test_the_file_is_whole_after_every_round_and_ctrl_c_leaves_the_rows_so_far(monkeypatch, tmp_path):
    matmul, rounds = training.Comparison._matmul, []

    def interrupted(self):
        rounds.append(json.loads((tmp_path / "rows.json").read_text()))
        if len(rounds) == 2:
            raise KeyboardInterrupt
        matmul(self)

    monkeypatch.setattr(training.Comparison, "_matmul", interrupted)
    data = suite(tmp_path / "rows.json", "--model", "kunlun", status=130)
    assert [row["rounds"] for row in rounds[0]["rows"]] == [None, None]
    assert [row["rounds"] for row in rounds[1]["rows"]] == [row["rounds"] for row in data["rows"]] == [1, 1]


def test_lognormal_histories_are_drawn_on_demand(tmp_path):
    data = suite(tmp_path / "rows.json", "--model", "kunlun", "--provider", "gdpa", "--lengths", "lognormal")
    longest = models.PRESETS["kunlun"]["tiny"].max_history
    batch = SyntheticClicks(8, median_length=longest // 8, max_length=longest).batch(0)
    assert data["header"]["lengths"] == "lognormal"
    assert data["header"]["models"]["kunlun"]["events"] == batch.history.items.shape[0]


def test_gem_block_has_a_batch_that_padding_fits():
    plan = training.Plan(("interformer", "kunlun"), "gem-block", ("gdpa",), CPU, True)
    assert {name: plan.settings(name).batch_size for name in plan.models} == {"interformer": 192, "kunlun": 512}
    plan = training.Plan(("kunlun",), "gem-block", ("gdpa",), CPU, True, batch=3)
    assert plan.settings("kunlun").batch_size == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "train", "--model", "kunlum"], "did you mean 'kunlun'?"),
        (["--suite", "train", "--preset", "huge"], "--preset: expected one of tiny, small, gem-block, got 'huge'"),
        (["--suite", "train", "--providers", "fa3"], "--provider: expected one of gdpa, "),
        (["--suite", "train", "--lengths", "lognornal"], "--lengths: expected one of uniform, lognormal, got 'lognornal'"),
        (["--lengths", "uniform"], "--lengths: expected with --suite train alone"),
        (["--suite", "train", "--dtype", "fp16"], "--dtype: expected bf16 or fp32"),
        (["--suite", "train", "--seconds", "0"], "--seconds: expected a positive number"),
        (["--suite", "train", "--case", "self-8"], "--case: expected with the other suites alone"),
        (["--suite", "train", "--plot", "x.png"], "--plot: expected with the other suites alone"),
        (["--steps", "3"], "--steps: expected with --suite train alone"),
        (["--suite", "trains"], "did you mean 'train'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_refused_by_name(options, message, capsys):
    assert cli.main(["bench", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_file_of_the_suite_is_refused(tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"header": {"suite": "train"}, "rows": [{"model": "kunlun"}]}))
    assert cli.main(["bench", "--show", str(path)]) == 2
    assert "--show: expected a header with models and rows with model, preset, provider" in capsys.readouterr().err
    path.write_text(json.dumps({"header": {"suite": "train"}, "rows": []}))
    assert cli.main(["bench", "--show", str(path)]) == 2


def test_a_model_that_cannot_be_made_is_a_failure(monkeypatch, capsys):
    def broken(*arguments, **options):
        raise ValueError("no such model")

    monkeypatch.setattr(training.models, "from_config", broken)
    assert cli.main(["bench", "--device", "cpu", "--suite", "train", "--model", "kunlun", "--seconds", "0.1"]) == 1
    assert "failed: ValueError: no such model" in " ".join(capsys.readouterr().out.split())

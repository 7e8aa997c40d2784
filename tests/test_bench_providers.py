"""Providers other than gdpa's own: what they compute, in their own layouts, against the oracle; and what they say where they cannot.

Libraries that are not installed are stood in for by modules with the same functions, computed in plain PyTorch.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import gdpa
from gdpa.bench import external, gate, plain, providers, softmax
from gdpa.bench.cases import Case, Size, build
from gdpa.numerics import Results

CPU = torch.device("cpu")
SIZE = Size(batch=4, heads=2, dim=8)
UNMASKED = ("self-20-jag", "self-30-tail", "pma-4x20-jag", "pffn-20x5-jag", "self-6", "pffn-6x5")
NAMES = (*UNMASKED, "causal-20-jag", "causal-30-tail", "causal-6")
EVERY = pytest.mark.parametrize("name", NAMES)


def workload_of(name, activation="silu", dtype=torch.float32):
    return build(Case.named(name, SIZE), activation, dtype, CPU)


def admit(monkeypatch, provider):
    """Let a provider that wants a GPU run on the CPU's stand-in."""
    monkeypatch.setattr(type(provider), "reason_against", lambda self, workload, gradients: None)
    return provider


def sequences(q, k, v, cu_q, cu_k):
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        yield (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))


def packed_softmax(q, k, v, cu_q, cu_k, causal=False):
    """In float64: the order of fp32's additions, which differs between torch's releases, may err as much as so few scores are allowed."""
    by_sequence = sequences(q.double(), k.double(), v.double(), cu_q, cu_k)
    parts = [F.scaled_dot_product_attention(*x, is_causal=causal).transpose(0, 1) for x in by_sequence]
    return torch.cat(parts).to(q.dtype)


def packed_activation(f, scale, q, k, v, cu_q, cu_k, causal=False):
    parts = []
    for a, b, c in sequences(q, k, v, cu_q, cu_k):
        p = f(scale * (a @ b.mT))
        parts.append(((p.tril() if causal else p) @ c).transpose(0, 1))
    return torch.cat(parts)


def install(monkeypatch, module, **functions):
    """A module, and the packages above it, with these functions."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        made = types.ModuleType(name)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, name, made)
    for name, function in functions.items():
        setattr(made, name, function)


@pytest.fixture(autouse=True)
def _look_again():
    external.function.cache_clear()
    yield
    external.function.cache_clear()


def assert_passes(provider, workload):
    entry = gate.enter(provider, workload, gradients=True)
    assert entry.note is None
    assert [verdict.name for verdict in entry.verdicts] == list(Results._fields)
    assert all(verdict.passed for verdict in entry.verdicts), [str(v) for v in entry.verdicts if not v.passed]


# Softmax yardsticks


@EVERY
def test_the_softmax_oracle_is_torchs_softmax_attention(name):
    workload = workload_of(name)
    q, k, v = workload.inputs[:3]
    scale, causal = workload.problem.scale, workload.case.causal
    exact = softmax.attend(workload.inputs, scale, workload.d_out, torch.float64, torch.float32, rounded=False, causal=causal)
    packed = softmax.Packed(workload)
    leaves = [x.detach().double().requires_grad_() for x in packed.leaves()]
    out = packed_softmax(*leaves, *packed.offsets(), causal)
    d_out = workload.d_out.double().reshape(out.shape)
    expected = packed.collect(Results(out, *torch.autograd.grad(out, leaves, d_out)))
    for mine, torchs in zip(exact, expected, strict=True):
        torch.testing.assert_close(mine, torchs, check_dtype=False, rtol=1e-6, atol=1e-6)
    assert exact.dq.shape == q.shape
    assert exact.dk.shape == k.shape
    assert exact.dv.shape == v.shape


@pytest.mark.parametrize("name", ["self-6", "pffn-6x5", "causal-6"])
def test_sdpa_is_judged_as_softmax_on_dense_batches(monkeypatch, name):
    monkeypatch.setattr(softmax.Cudnn, "backend", SDPBackend.MATH)
    assert_passes(admit(monkeypatch, softmax.Cudnn()), workload_of(name))


def test_a_softmax_that_is_wrong_has_a_red_gate(monkeypatch):
    provider = admit(monkeypatch, softmax.Flash())
    monkeypatch.setattr(softmax.Flash, "backend", SDPBackend.MATH)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, is_causal: 1.01 * torch.softmax(q @ k.mT / 8**0.5, -1) @ v
    )
    entry = gate.enter(provider, workload_of("self-6"), gradients=True)
    assert [verdict.name for verdict in entry.wrong("both")] == list(Results._fields)


def test_a_softmax_that_sees_later_keys_has_a_red_gate(monkeypatch):
    provider = admit(monkeypatch, softmax.Flash())
    monkeypatch.setattr(softmax.Flash, "backend", SDPBackend.MATH)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal: torch.softmax(q @ k.mT / 8**0.5, -1) @ v)
    assert not gate.enter(provider, workload_of("self-6"), gradients=True).wrong("both")
    entry = gate.enter(provider, workload_of("causal-6"), gradients=True)
    assert [verdict.name for verdict in entry.wrong("both")] == list(Results._fields)


@EVERY
@pytest.mark.parametrize("release", ["window_size", "is_causal"])
def test_varlen_takes_every_case_with_offsets_on_both_sides(monkeypatch, name, release):
    import torch.nn.attention.varlen

    seen = []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        seen.append((query.dim(), cu_seq_q.dtype, max_q, max_k))
        assert window_size in ((-1, -1), (-1, 0))
        return packed_softmax(query, key, value, cu_seq_q, cu_seq_k, window_size == (-1, 0))

    def earlier(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0 if is_causal else -1))

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn if release == "window_size" else earlier)
    workload = workload_of(name)
    assert_passes(admit(monkeypatch, softmax.Varlen()), workload)
    assert seen[0] == (3, torch.int32, *workload.longest)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_sdpa_says_that_it_takes_dense_batches_only(name):
    assert providers.by_name(name).reason_against(workload_of("self-20-jag"), True) == "takes dense batches only"


@pytest.mark.parametrize("name", ["cudnn", "flash", "varlen"])
def test_softmax_yardsticks_say_that_they_need_a_gpu(name):
    assert providers.by_name(name).reason_against(workload_of("self-6"), True) == "runs on a CUDA device only"


# Libraries that may be installed


@pytest.mark.parametrize("name", ["fa3", "fa4", "hstu", "meta-triton"])
def test_a_library_that_is_not_there_is_not_installed(monkeypatch, name):
    for module in ("flash_attn_interface", "flash_attn", "generative_recommenders", "ads_mkl"):
        monkeypatch.setitem(sys.modules, module, None)
    assert providers.by_name(name).reason_against(workload_of("self-6"), True) == "not installed"


def test_a_library_that_does_not_load_says_why(monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise OSError("libcudart.so.99: cannot open shared object file\nmore")

    monkeypatch.setitem(sys.modules, "flash_attn_interface", Broken("flash_attn_interface"))
    reason = providers.by_name("fa3").reason_against(workload_of("self-6"), True)
    assert reason == "installed, but OSError: libcudart.so.99: cannot open shared object file"


@EVERY
@pytest.mark.parametrize("max_seqlen", [True, False], ids=["takes max_seqlen", "does not"])
@pytest.mark.parametrize(("provider", "module"), [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")])
def test_flash_attention_is_called_by_its_names(monkeypatch, name, provider, module, max_seqlen):
    workload = workload_of(name)

    def without(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, causal=False):
        return packed_softmax(q, k, v, cu_seqlens_q, cu_seqlens_k, causal), None  # the second is the logsumexp

    def with_(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
        assert (max_seqlen_q, max_seqlen_k) == workload.longest
        return packed_softmax(q, k, v, cu_seqlens_q, cu_seqlens_k, causal)

    install(monkeypatch, module, flash_attn_varlen_func=with_ if max_seqlen else without)
    assert_passes(admit(monkeypatch, providers.by_name(provider)), workload)


@EVERY
def test_hstu_divides_by_its_longest_sequence(monkeypatch, name):
    workload = workload_of(name)

    def cuda_hstu_mha(max_seq_len, alpha, q, k, v, seq_offsets, causal, max_q_len=0, seq_offsets_q=None):
        assert causal is workload.case.causal
        q_offsets = seq_offsets if seq_offsets_q is None else seq_offsets_q
        return packed_activation(F.silu, alpha, q, k, v, q_offsets, seq_offsets, causal) / max_seq_len

    install(monkeypatch, external.Hstu.module, cuda_hstu_mha=cuda_hstu_mha)
    assert_passes(admit(monkeypatch, external.Hstu()), workload)


@pytest.mark.parametrize(
    ("name", "activation", "reason"),
    [
        ("self-6", "gelu", "computes SiLU only"),
        ("self-6", "silu", "runs on a CUDA device only"),
    ],
)
def test_hstu_says_what_it_does_not_compute(monkeypatch, name, activation, reason):
    install(monkeypatch, external.Hstu.module, cuda_hstu_mha=lambda max_seq_len, alpha, q, k, v, seq_offsets, causal: q)
    assert external.Hstu().reason_against(workload_of(name, activation), True) == reason


@pytest.mark.parametrize("name", UNMASKED)
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2"])
def test_metas_kernel_is_judged_without_a_scale_on_the_scores(monkeypatch, name, activation):
    functions = {"fast_gelu": lambda s: F.gelu(s, approximate="tanh"), "relu_square": lambda s: F.relu(s) ** 2}

    def gdpa_of_meta(query, key, value, query_offset, key_offset, max_seq_len_q, max_seq_len_kv, activation="raw", qk_scale=None):
        return qk_scale * packed_activation(functions[activation], 1.0, query, key, value, query_offset, key_offset)

    install(monkeypatch, external.MetaTriton.modules[1], generalized_dot_product_attention=gdpa_of_meta)
    assert_passes(admit(monkeypatch, external.MetaTriton()), workload_of(name, activation))


def test_metas_kernel_says_what_it_lacks(monkeypatch):
    install(monkeypatch, external.MetaTriton.modules[0], generalized_dot_product_attention=lambda q: q)
    assert external.MetaTriton().reason_against(workload_of("self-6", "exp"), True) == "has no exp"
    assert external.MetaTriton().reason_against(workload_of("causal-6"), True) == "has no causal mask"


# Plain PyTorch


def test_plain_pytorchs_functions_are_the_activations():
    s = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert tuple(plain.FUNCTIONS) == gdpa.activations()
    for name, function in plain.FUNCTIONS.items():
        torch.testing.assert_close(function(s), gdpa.Activation(name)(s))


@pytest.mark.parametrize("activation", plain.LOGARITHMS)
@EVERY
def test_flex_gives_the_activation_back_from_its_logarithm(name, activation):
    workload = workload_of(name, activation)
    entry = gate.enter(plain.Flex(), workload, gradients=False)
    assert entry.note is None
    assert not entry.wrong("forward"), str(entry.verdicts[0])


def test_flex_says_where_there_is_no_logarithm():
    assert "takes negative values" in plain.Flex().reason_against(workload_of("self-6", "gelu"), False)
    assert plain.Flex().reason_against(workload_of("self-6", "relu"), True) == "FlexAttention has no backward on a CPU"


def test_compile_runs_eagers_function(monkeypatch):
    compiled = []
    monkeypatch.setattr(plain.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, fullgraph: compiled.append(f) or f)
    assert_passes(plain.Compiled(), workload_of("self-20-jag"))
    assert len(compiled) == 1
    monkeypatch.setattr(plain.shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in plain.Compiled().reason_against(workload_of("self-6"), False)


# The list of providers


def test_every_provider_of_the_list_can_be_made():
    assert [providers.by_name(name).name for name in providers.NAMES] == list(providers.NAMES)


def test_the_default_follows_the_device_and_all_is_all():
    assert tuple(p.name for p in providers.chosen(None, gpu=True)) == providers.GPU_DEFAULT
    assert tuple(p.name for p in providers.chosen(None, gpu=False)) == providers.CPU_DEFAULT
    assert tuple(p.name for p in providers.chosen(["all"], gpu=False)) == providers.NAMES


def test_an_unknown_provider_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'gdpa-triton'"):
        providers.chosen(["gdpa-trition"], gpu=True)


def test_labels_say_softmax():
    assert providers.label("fa3") == "fa3 (softmax)"
    assert providers.label("hstu") == "hstu"


def test_a_backend_that_this_gdpa_lacks_is_a_reason():
    assert providers.Gdpa("nothing").reason_against(workload_of("self-6"), False) == "this gdpa has no backend 'nothing'"


def test_gdpa_on_another_device_gives_dispatchs_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "CPU" in providers.Gdpa("triton").reason_against(workload_of("self-6"), False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter is for tests" in providers.Gdpa("triton").reason_against(workload_of("self-6"), False)

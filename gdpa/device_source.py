"""Device code of activations: a readable Triton module generated from their expressions, cached on disk.

Three flavours, by the precision of the results. That of float32 is portable: elementwise `tl` operations alone, so that it also runs
in Triton's interpreter, exact to float32's rounding. The others are for NVIDIA devices (sm_75 and later), where P and dS are rounded to
bfloat16 or float16 anyway: they use the approximate instructions of the special-function unit, and fold the scale of the scores and
constants into the steps (`gdpa.folding`).
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gdpa.activations import Activation
from gdpa.device_helpers import FAST as _FAST_HELPERS
from gdpa.device_helpers import FAST_OF as _HELPERS_OF
from gdpa.device_helpers import PORTABLE as _PORTABLE_HELPERS
from gdpa.errors import GdpaError
from gdpa.expression import Expression
from gdpa.folding import ONE, WEIGHT, Coefficient, Folded, StepOperand, fold
from gdpa.graph import Graph, Operand, Ref, Statement, formulas
from gdpa.lifting import lift
from gdpa.lowering import Precision
from gdpa.packing import FLAVOURS, Form, packed_functions
from gdpa.spelling import WITH_TANH, spelled
from gdpa.writing import literal, powers, scalar

GENERATOR_VERSION = 23


@dataclass(frozen=True)
class PackedFunctions:
    """Attributes:
    open: `open_packed(s, scale, head) -> x`, a float32 tile: all of the g of `DeviceFunctions.scaled` but its last step. In the first
        columns x is g; from there on two neighbours hold what two scores became together, in the 16 bits of the result, and are no
        numbers.
    finish: `finish_packed(x, DTYPE) -> g`, a tile of the dtype of the precision, as DTYPE must be.
    """

    open: Any
    finish: Any


@dataclass(frozen=True)
class DeviceFunctions:
    """Functions for kernels to call on a float32 tile of scores, decorated for the frontend asked for.

    `value` and `pair` take scores that are scaled already. The others take raw ones and the scale, a scalar, and give results
    but for factors, for the kernel to put where they cost least, such as on the sum over the keys. Only bfloat16 has factors other
    than 1: float16 may not have the range for a result without its factor.

    Attributes:
        value: `activate(s, head) -> f(s)`.
        pair: `activate_pair(s, head) -> (f(s), f'(s))`.
        scaled: `activate_scaled(s, scale, head) -> g`, with f(scale * s) = c * g.
        factor: `factor(scale, head) -> c`, a float32 scalar.
        scaled_pair: `activate_pair_scaled(s, scale, head) -> (g, dg)`, with f(scale * s) = c * g and f'(scale * s) = d * dg, or
            d * (dg + 1) where `lifted`. This g and c may differ from those of `scaled` and `factor`.
        pair_factors: `pair_factors(scale, head) -> (c, d)`, float32 scalars.
        lifted: whether the dg of `scaled_pair` lacks 1 (see gdpa/lifting.py).
        weighted_pair: `activate_pair_weighted(s, scale, weight, head) -> (g, dg)`, with f(scale * s) = c * g and
            weight * f'(scale * s) = dg; the weight is a scalar.
        weighted_factor: `weighted_factor(scale, head) -> c`, of that g.
        weighted_instructions: how many `weighted_pair` has for a score, of one activation in bfloat16 or in float16 on sm_90; None
            elsewhere, and where one of its steps is a call of several.
        packed: the same f by pairs of scores, in every form. Empty where heads differ or the activation is not made for that. Needs sm_90.
        source: the text of the generated module.
        path: the file it was written to.
    """

    value: Any
    pair: Any
    scaled: Any
    factor: Any
    scaled_pair: Any
    pair_factors: Any
    lifted: bool
    weighted_pair: Any
    weighted_factor: Any
    weighted_instructions: int | None
    packed: dict[Form, PackedFunctions]
    source: str
    path: Path


def device_functions(keys: tuple[str, ...], *, precision: Precision = "float32", frontend: str = "triton") -> DeviceFunctions:
    """Generate, write and import the device code of some activations.

    Args:
        keys: one key for all heads, in which case the functions ignore `head`; or one per head, which the functions
            choose from by `head`, a scalar integer. Equal keys share one branch.
        precision: the dtype that results are rounded to. Below float32 approximate NVIDIA instructions are used, with errors well below
            that rounding.
        frontend: `"triton"` or `"gluon"`, the language of the calling kernel.

    Raises:
        GdpaError: a key is malformed, or the precision or the frontend is unknown.
        ImportError: Triton is not installed.
    """
    import triton

    if frontend not in _PREAMBLES:
        raise GdpaError(f"frontend: expected one of {', '.join(_PREAMBLES)}, got {frontend!r}")
    if precision not in _NAMES:
        raise GdpaError(f"precision: expected one of {', '.join(_NAMES)}, got {precision!r}")
    return _load(tuple(keys), precision, frontend, bool(triton.knobs.runtime.interpret))


@lru_cache(maxsize=256)
def _load(keys: tuple[str, ...], precision: Precision, frontend: str, interpreted: bool) -> DeviceFunctions:
    # triton.jit decides when it decorates whether a function is interpreted, so `interpreted` is part of the memo.
    source = generate(keys, precision=precision, frontend=frontend)
    name = f"gdpa_activation_{_digest(keys, precision, frontend)}"
    path = _write(f"{name}.py", source)
    module = _import(f"{name}_{'interpreted' if interpreted else 'compiled'}", path, source)
    return DeviceFunctions(
        value=module.activate,
        pair=module.activate_pair,
        scaled=module.activate_scaled,
        factor=module.factor,
        scaled_pair=module.activate_pair_scaled,
        pair_factors=module.pair_factors,
        lifted=module.LIFTED,
        weighted_pair=module.activate_pair_weighted,
        weighted_factor=module.weighted_factor,
        weighted_instructions=module.WEIGHTED_INSTRUCTIONS,
        packed={
            form: PackedFunctions(getattr(module, f"open_packed_{form.name}"), getattr(module, f"finish_packed_{form.name}"))
            for form in (FLAVOURS[precision].forms if hasattr(module, "both") else ())
        },
        source=source,
        path=path,
    )


def generate(keys: tuple[str, ...], *, precision: Precision = "float32", frontend: str = "triton") -> str:
    """The text of the module that `device_functions` imports; the arguments are the same."""
    distinct = list(dict.fromkeys(keys))
    writer = _Writer(precision)
    folds = precision != "float32"
    functions: list[str] = []
    packed = None
    lifts = precision == "bfloat16" and len(distinct) == 1
    for i, key in enumerate(distinct):
        expression = Activation.from_key(key).expression
        functions += [writer.function(f"value_{i}", expression, 1), writer.function(f"pair_{i}", expression, 2)]
        if folds:
            whole = None if precision == "bfloat16" else ONE
            functions += writer.folded_functions("value", i, expression, (whole,))
            functions += writer.folded_functions("pair", i, expression, (whole, whole), lifts)
            functions += writer.folded_functions("pair", i, expression, (whole, WEIGHT))
        # Only where all heads have it: with branches over heads around packed steps ptxas waits after every product.
        if precision in FLAVOURS and len(distinct) == 1:
            packed = writer.packed_functions(i, expression, frontend)
    heads = {i: [head for head, key in enumerate(keys) if key == distinct[i]] for i in range(len(distinct))}
    dispatch = [_dispatch("activate", "value", "s", "y", heads), _dispatch("activate_pair", "pair", "s", "y, dy", heads)]
    if folds:
        dispatch += [
            _dispatch("activate_scaled", "scaled_value", "s, scale", "g", heads),
            _dispatch("factor", "factors_of_scaled_value", "scale", "c", heads),
            _dispatch("activate_pair_scaled", "scaled_pair", "s, scale", "g, dg", heads),
            _dispatch("pair_factors", "factors_of_scaled_pair", "scale", "c, d", heads),
            _dispatch("activate_pair_weighted", "weighted_pair", "s, scale, weight", "g, dg", heads),
            _dispatch("weighted_factor", "factors_of_weighted_pair", "scale", "c", heads),
        ]
        if packed is not None:
            functions += packed
            names = [form.name for form in FLAVOURS[precision].forms]
            dispatch += [f"@jit\ndef open_packed_{x}(s, scale, head):\n    return opened_value_0_{x}(s, scale)" for x in names]
    else:
        dispatch += _UNFOLDED
    counted = writer.weighted_instructions if precision in WITH_TANH and len(distinct) == 1 else None
    functions += [f"LIFTED = {writer.lifted}", f"WEIGHTED_INSTRUCTIONS = {counted}"]
    title = f'"""Activations of gdpa as {frontend} device functions, {_NAMES[precision]}. Generated: edits are overwritten."""'
    body = "\n\n\n".join([title + "\n\n" + _PREAMBLES[frontend], *writer.helpers(), *functions, *dispatch])
    return body.replace("@jit", "@gluon.jit" if frontend == "gluon" else "@triton.jit") + "\n"


# Operations that are one instruction where tanh is.
_SINGLE = frozenset(
    {"mul", "add", "sub", "neg", "abs", "maximum", "minimum", "where", "le", "lt", "ge", "gt", "eq", "ne"}
    | {"tanh", "exp2", "log2", "reciprocal"}
)
_NAMES: dict[Precision, str] = {
    "float32": "in portable operations",
    "float16": "in approximate instructions of NVIDIA devices, for float16",
    "float16_sm90": "in approximate instructions of NVIDIA devices, for float16 on sm_90",
    "float16_sm90_many": "in approximate instructions of NVIDIA devices, for float16 on sm_90 and sums over many keys",
    "bfloat16": "in approximate instructions of NVIDIA devices, for bfloat16",
}

# Gluon has maximum's option but not its enumeration; a global that a kernel reads must be a constexpr.
_PROPAGATE_NAN = "\nfrom triton.language import PropagateNan\n\nPROPAGATE_NAN = tl.constexpr(PropagateNan.ALL)"
_PREAMBLES = {
    "triton": "import triton\nimport triton.language as tl" + _PROPAGATE_NAN,
    "gluon": "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as tl" + _PROPAGATE_NAN,
}


# A number becomes a scalar of the device by being assigned.
_UNFOLDED = (
    "@jit\ndef activate_scaled(s, scale, head):\n    return activate(s * scale, head)",
    "@jit\ndef factor(scale, head):\n    c = 1.0\n    return c",
    "@jit\ndef activate_pair_scaled(s, scale, head):\n    return activate_pair(s * scale, head)",
    "@jit\ndef pair_factors(scale, head):\n    c = 1.0\n    return c, c",
    "@jit\ndef activate_pair_weighted(s, scale, weight, head):\n    y, dy = activate_pair(s * scale, head)\n    return y, dy * weight",
    "@jit\ndef weighted_factor(scale, head):\n    c = 1.0\n    return c",
)


def _dispatch(name: str, prefix: str, arguments: str, results: str, heads: dict[int, list[int]]) -> str:
    """`name(arguments, head)`: a chain of branches over the distinct functions; the one of most heads needs no test."""
    lines = ["@jit", f"def {name}({arguments}, head):"]
    if len(heads) == 1:
        return "\n".join([*lines, f"    return {prefix}_0({arguments})"])
    last = max(heads, key=lambda i: len(heads[i]))
    for place, i in enumerate(i for i in heads if i != last):
        tests = " | ".join(f"(head == {head})" for head in heads[i])
        lines += [f"    {'elif' if place else 'if'} {tests}:", f"        {results} = {prefix}_{i}({arguments})"]
    lines += ["    else:", f"        {results} = {prefix}_{last}({arguments})", f"    return {results}"]
    return "\n".join(lines)


# Operations that are one expression; others are helpers.
_TEMPLATES = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "exact_erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "~{0}",
    "where": "tl.where({0}, {1}, {2})",
    "to_float": "tl.where({0}, 1.0, 0.0)",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=PROPAGATE_NAN)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=PROPAGATE_NAN)",
}


class _Writer:
    """Writes functions of one flavour and remembers which helpers they call."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._own_helpers = {name: text for name, text in _FAST_HELPERS.items() if name in _HELPERS_OF[precision]}
        self._used: set[str] = set()
        self.lifted = False  # whether a function was written whose dg lacks 1
        self.weighted_instructions: int | None = None

    def helpers(self) -> list[str]:
        """The helper functions that were called, directly or by others, each after those it calls."""
        sources = _PORTABLE_HELPERS | self._own_helpers
        used = set(self._used)
        for name in reversed(sources):
            if name in used:
                used |= {other for other in sources if re.search(rf"(?<![\w.]){other}\(", sources[name])}
        return [text.strip() for name, text in sources.items() if name in used]

    def function(self, name: str, expression: Expression, outputs: int) -> str:
        """One device function of `s`: f alone, or the pair with its common subexpressions computed once."""
        graph = self._graph(expression, outputs)
        named = zip(("f(s)", "f'(s)"), formulas(graph), strict=False)
        lines = [f"# {label} = {formula}" for label, formula in named]
        lines += ["@jit", f"def {name}(s):"]
        graph = spelled(graph, self._precision)
        for i, statement in enumerate(graph.statements):
            lines.append(f"    t{i} = {self._statement(statement)}")
        return "\n".join([*lines, f"    return {', '.join(map(_output, graph.outputs))}"])

    def _graph(self, expression: Expression, outputs: int) -> Graph:
        return expression.value_for(self._precision) if outputs == 1 else expression.pair_for(self._precision)

    def folded_functions(
        self, name: str, number: int, expression: Expression, multiples: tuple[Coefficient | None, ...], lifts: bool = False
    ) -> list[str]:
        """The function `name` of the raw `s` and `scale`, and of `weight` where a multiple has it, and that of its factors."""
        graph = spelled(self._graph(expression, len(multiples)), self._precision)
        raised = lift(graph) if lifts else None
        folded = fold(graph, multiples) if raised is None else raised
        self.lifted |= raised is not None
        weighted = WEIGHT in multiples
        if weighted and number == 0 and all(step.operation in _SINGLE for step in folded.steps):
            self.weighted_instructions = folded.instructions
        own_name = f"{'weighted' if weighted else 'scaled'}_{name}_{number}"
        lines = []
        for label, result, factor, multiple in zip(("f", "f'"), ("g", "dg"), folded.factors, multiples, strict=False):
            result = "(dg + 1)" if label == "f'" and raised is not None else result
            product = result if factor == ONE else f"{scalar(factor, 'scale**{}')} * {result}"
            lines.append(
                f"# {'weight * ' if multiple == WEIGHT else ''}{label}(scale * s) = {product}, for the {label} of {name}_{number}"
            )
        lines += ["@jit", f"def {own_name}(s, scale{', weight' if weighted else ''}):", *self._body(folded)]
        # A weighted f' has no factor, which nobody asks for.
        free = [x for x, multiple in zip(folded.factors, multiples, strict=True) if multiple != WEIGHT]
        factors = [f"    {letter} = {scalar(factor)}" for letter, factor in zip("cd", free, strict=False)]
        factor_lines = ["@jit", f"def factors_of_{own_name}(scale):", *powers(folded.factors), *factors]
        factor_lines.append(f"    return {', '.join('cd'[: len(free)])}")
        return ["\n".join(lines), "\n".join(factor_lines)]

    def _body(self, folded: Folded) -> list[str]:
        """The lines of a function that computes the outputs."""
        lines = powers(folded.scalars)
        texts: dict[StepOperand, str] = {}
        for coefficient in folded.scalars:
            text = scalar(coefficient)
            if text not in ("scale", "weight"):
                texts[coefficient] = f"k{len(texts)}"
                lines.append(f"    {texts[coefficient]} = {text}")
        fused = set(folded.fused.values())
        shown = [i for i in range(len(folded.steps)) if i not in fused]
        texts |= {Ref(i): f"t{place}" for place, i in enumerate(shown)}
        lines += [f"    {texts[Ref(i)]} = {self._step(folded, i, texts)}" for i in shown]
        return [*lines, f"    return {', '.join(_output(x, texts) for x in folded.outputs)}"]

    def packed_functions(self, number: int, expression: Expression, frontend: str) -> list[str] | None:
        """The f of `folded_functions` two scores at a time in 16 bits; None where it has not the form."""
        wanted = None if self._precision == "bfloat16" else ONE
        folded = fold(spelled(self._graph(expression, 1), self._precision), (wanted,))
        return packed_functions(folded, self._precision, frontend, number)

    def _step(self, folded: Folded, index: int, texts: dict[StepOperand, str]) -> str:
        """The text of a step, the product that it fuses with inside."""

        def text(operand: StepOperand) -> str:
            if isinstance(operand, Ref | Coefficient) and operand in texts:
                return texts[operand]
            if isinstance(operand, Ref) and operand.index >= 0:
                return " * ".join(map(text, folded.steps[operand.index].operands))
            return scalar(operand) if isinstance(operand, Coefficient) else _operand(operand)

        step = folded.steps[index]
        operands = [text(x) for x in step.operands]
        if step.operation == "add" and operands[1].startswith("-"):
            return f"{operands[0]} - {operands[1][1:]}"
        return self._operation(step.operation, operands)

    def _statement(self, statement: Statement) -> str:
        name, operands = statement
        return self._operation(name, list(map(_operand, operands)))

    def _operation(self, name: str, texts: list[str]) -> str:
        template = _TEMPLATES.get(name)
        if template is not None and name not in self._own_helpers:
            return template.format(*texts)
        if name == "pow":
            # Its helper wants tiles.
            texts = [text if text.startswith(("s", "t")) else f"tl.where(s == s, {text}, {text})" for text in texts]
        self._used.add(name)
        return f"{name}({', '.join(texts)})"


def _operand(operand: Operand) -> str:
    if isinstance(operand, Ref):
        return "s" if operand.index < 0 else f"t{operand.index}"
    return literal(operand)


def _output(operand: Operand | Coefficient, texts: dict[StepOperand, str] | None = None) -> str:
    """What a function returns; `texts` has names for steps and coefficients."""
    text = (texts or {}).get(operand)
    if text is None:
        text = scalar(operand) if isinstance(operand, Coefficient) else _operand(operand)
    # A constant as a tile of the shape (and, in Gluon, of the layout) of `s`.
    return text if isinstance(operand, Ref) else f"tl.where(s == s, {text}, {text})"


def _digest(keys: tuple[str, ...], precision: Precision, frontend: str) -> str:
    import triton

    parts = (GENERATOR_VERSION, torch.__version__, triton.__version__, precision, frontend, *keys)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def cache_directory() -> Path:
    """Where generated modules go: `$GDPA_CACHE_DIR`, else `$XDG_CACHE_HOME/gdpa`, else `~/.cache/gdpa`."""
    chosen = os.environ.get("GDPA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdpa"


@lru_cache(maxsize=1)
def _own_directory() -> tempfile.TemporaryDirectory[str]:
    """For a process that cannot write the cache directory; removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="gdpa-")


def _write(name: str, source: str) -> Path:
    try:
        return _write_into(cache_directory(), name, source)
    except (OSError, RuntimeError):  # Path.home() raises RuntimeError where there is no home
        return _write_into(Path(_own_directory().name), name, source)


def _write_into(directory: Path, name: str, source: str) -> Path:
    """Write the file unless it is there with this very content; replaced at once, so readers see all of it or none."""
    path = directory / name
    try:
        if path.read_bytes() == source.encode():
            return path
    except OSError:
        pass
    directory.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


class _Loader(importlib.machinery.SourceFileLoader):
    """Imports the text that was generated, whatever becomes of its file in the meantime."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self._source = source.encode()

    def get_data(self, path: Any) -> bytes:
        return self._source

    def path_stats(self, path: Any) -> Any:
        raise OSError("bytecode is neither read nor written")


def _import(name: str, path: Path, source: str) -> ModuleType:
    loader = _Loader(name, path, source)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # triton.jit looks the module of a function up
    loader.exec_module(module)
    return module

"""Device code of gelu and its like for two scores at a time, in the halves of a register.

    f(h) = h T + h, but for a factor        T = tanh(u(h)), u odd

P is rounded to 16 bits anyway, and an instruction for pairs computes two scores. A kernel calls `open_packed` on a tile of scores and
`finish_packed`, the last step, on what it made of them. There are two ways to T:

    tanh          two uses of the special-function unit, and u
    complement    multiplications alone (gdpa/complement.py)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gdpa.complement import roots
from gdpa.folding import Coefficient, Folded, StepOperand
from gdpa.graph import SCORE, Ref
from gdpa.lowering import Precision
from gdpa.writing import powers, scalar

# Rows of a call, heads counted, that should share the budget for it to have packed scores (docs/numerics.md).
FEWEST_PACKED_ROWS = 128
# The scales whose powers, up to that of the complement's last coefficient, leave constants room in float32 and bfloat16.
PACKED_SCALES = (1e-6, 1e6)


class Form(NamedTuple):
    """Attributes:
    exact: how many of a tile's columns, the first ones, are computed in float32. Packed scores are rounded to 16 bits before the activation
        and P once more after it: sums over many keys stay well inside the error budget, single ones do not. So the first columns of a
        sequence are exact: sequences of so few keys have no packed ones, and those of some more have a share of exact ones. A multiple of
        16, the keys of one product instruction; later blocks of keys have none.
    in_turn: whether every other pair goes by tanh, so that a step waits neither for the special-function unit nor for instructions
        (docs/design.md has what each gave); else all are complements.
    """

    exact: int
    in_turn: bool

    @property
    def name(self) -> str:
        return f"{self.exact}_in_turn" if self.in_turn else str(self.exact)

    @property
    def ways(self) -> tuple[str, ...]:
        """To T, of neighbouring pairs. Four pairs of a thread are of two rows and 16 columns: both ways are in each row and each column."""
        return ("tanh", "complement", "complement", "tanh") if self.in_turn else ("complement",)


@dataclass(frozen=True)
class Flavour:
    """What a precision means to packed code.

    Attributes:
        pair: what assembly calls two of its numbers in a register.
        dtype: what Triton calls one.
        round: rounds a float32.
        widen: makes a float32, `first`, of one, `half`.
        limit: keeps scores finite that are past float16's range: beside an exact tanh they stay so.
        forms: those there are. float16 wants 32 exact columns, and has none in turn: signs are free there, so that the complement has
            fewer instructions as well.
        free_signs: whether instructions take |x| and -x for x, and a product within 0 and 1, at no cost.
        degree: of the complement's root.
        largest_error: of the complement, as `roots` has it.
        constants: the least and the largest constant. Beyond them float16 has not the numbers, and bfloat16 not their products with powers
            of PACKED_SCALES.
    """

    pair: str
    dtype: str
    round: str
    widen: str
    limit: str
    forms: tuple[Form, ...]
    free_signs: bool
    degree: int
    largest_error: float
    constants: tuple[float, float]

    def has(self, *constants: float) -> bool:
        least, largest = self.constants
        return all(least <= abs(x) <= largest for x in constants)


FLAVOURS: dict[Precision, Flavour] = {
    "bfloat16": Flavour(
        pair="bf16x2",
        dtype="bfloat16",
        round="cvt.rn.bf16.f32",
        widen="mov.b32 first, {0, half}",
        limit="",
        forms=(Form(0, True), Form(16, True), Form(32, False)),
        free_signs=False,
        degree=4,
        largest_error=1.2e-3,
        constants=(1e-12, 1e12),
    ),
    "float16_sm90_many": Flavour(
        pair="f16x2",
        dtype="float16",
        round="cvt.rn.f16.f32",
        widen="cvt.f32.f16 first, half",
        limit=".satfinite",
        forms=(Form(0, False), Form(32, False)),
        free_signs=True,
        degree=5,
        largest_error=3e-4,
        constants=(1e-4, 6e4),
    ),
}

_COLUMNS = {"triton": "tl.arange(0, x.shape[1])", "gluon": "tl.arange(0, x.shape[1], tl.SliceLayout(0, x.type.layout))"}
_BOTH = '''
@jit
def both(k):
    """k in both halves of a register, in {dtype}; the second is rounded so that their mean is nearest to k, lest all scores err alike."""
    return tl.inline_asm_elementwise(
        """
        {{
        .reg .b16 half;
        .reg .f32 first, second;
        {round} half, $1;
        {widen};
        sub.f32 second, $1, first;
        add.f32 second, second, $1;
        cvt.rn.{pair}.f32 $0, second, $1;
        }}
        """,
        "=r,f", [k], dtype=tl.int32, is_pure=True, pack=1,
    )
'''.strip()
_EXACT = """
@jit
def exact_columns_{exact}(x):
    return ({columns} < {exact})[None, :]
""".strip()
_FINISH = '''
@jit
def finish_packed_{name}(x, DTYPE: tl.constexpr):
    """The last step of what `open_packed_{name}` left in two neighbours; exact columns, the first {exact}, are rounded."""
    tl.static_assert(DTYPE == tl.{dtype})
    g = tl.inline_asm_elementwise(
        """
        {{
        .reg .b32 s, t, a;
        mov.b32 s, $1;
        mov.b32 t, $2;
        {last}
        }}
        """,
        "=r,f,f", [x], dtype=tl.{dtype}, is_pure=True, pack=2,
    )
    return {result}
'''.strip()
_OPERATIONS = {"mul": "mul.rn", "add": "add.rn", "tanh": "tanh.approx"}


@dataclass
class _Assembly:
    """What several pairs do. $0, $1 are the first pair's results, with `results` in all; then come its scores, or multiples of them, and
    the other pairs'; then constants, each once for every score."""

    results: int
    lines: list[str] = field(default_factory=list)
    registers: list[str] = field(default_factory=list)
    constants: list[Coefficient] = field(default_factory=list)

    def constant(self, coefficient: Coefficient) -> str:
        if coefficient not in self.constants:
            self.constants.append(coefficient)
        return f"${self.results * (2 + self.constants.index(coefficient))}"


def packed_functions(folded: Folded, precision: Precision, frontend: str, number: int) -> list[str] | None:
    """The texts of `both`, of `opened_value_<number>_<name>` for every form, and of what goes with them, for an f that `fold` made; None
    where it is no such f."""
    flavour = FLAVOURS[precision]
    odd = folded.gate
    if odd is None or not flavour.has(*odd):
        return None
    root = roots(odd, flavour.degree, flavour.largest_error)
    if root is not None and not flavour.has(*root):
        root = None
    words = {"pair": flavour.pair, "dtype": flavour.dtype, "round": flavour.round, "widen": flavour.widen}
    last = f"fma.rn.{flavour.pair} $0, s, t, s;"
    if flavour.free_signs and root is not None:  # t is |T|
        last = f"abs.{flavour.pair} a, s;\n        fma.rn.{flavour.pair} $0, a, t, s;"
    texts = [_BOTH.format(**words)]
    for exact in sorted({form.exact for form in flavour.forms} - {0}):
        texts.append(_EXACT.format(columns=_COLUMNS[frontend], exact=exact))
    for form in flavour.forms:
        result = f"tl.where(exact_columns_{form.exact}(x), x.to(tl.{flavour.dtype}), g)" if form.exact else "g"
        texts.append(_FINISH.format(name=form.name, exact=form.exact, last=last, result=result, **words))
        texts.append(_open(folded, root, flavour, number, form))
    return texts


def _open(folded: Folded, root: tuple[float, ...] | None, flavour: Flavour, number: int, form: Form) -> str:
    multiple = folded.steps[0].operands[1]
    whole = isinstance(multiple, Coefficient)  # whether h is a multiple of the score, which the first step makes
    ways = ("tanh",) if root is None else form.ways
    assembly = _Assembly(2 * len(ways))
    results = []  # come last: their registers may be those of scores
    for i, way in enumerate(ways):
        assembly.registers.append(f"s{i}")
        first = assembly.results + 2 * i
        assembly.lines.append(f"cvt.rn{flavour.limit}.{flavour.pair}.f32 s{i}, ${first + 1}, ${first};")
        if root is None or way == "tanh":
            t = _by_tanh(assembly, folded, flavour, 1 if whole else 0, i)
        else:
            t = _by_complement(assembly, root, flavour, whole, i)
        results += [f"mov.b32 ${2 * i}, s{i};", f"mov.b32 ${2 * i + 1}, {t};"]
    assembly.lines += results
    name = f"opened_value_{number}_{form.name}"
    scalars = [*assembly.constants, multiple] if isinstance(multiple, Coefficient) else assembly.constants
    lines = ["@jit", f"def {name}(s, scale):", *powers(scalars)]
    lines += [f"    k{i} = both({scalar(x)})" for i, x in enumerate(assembly.constants)]
    if isinstance(multiple, Coefficient):
        lines.append(f"    h = s * ({scalar(multiple)})")
    lines += ["    x = tl.inline_asm_elementwise(", '        """', "        {"]
    lines += [f"        .reg .b32 {', '.join(assembly.registers)};", *(f"        {x}" for x in assembly.lines)]
    arguments = ", ".join(["h" if whole else "s", *(f"k{i}" for i in range(len(assembly.constants)))])
    kinds = ["=f"] * assembly.results + ["f"] * assembly.results + ["r"] * assembly.results * len(assembly.constants)
    lines += [
        "        }",
        '        """,',
        f'        "{",".join(kinds)}", [{arguments}], dtype=tl.float32, is_pure=True, pack={assembly.results},',
        "    )",
        f"    return tl.where(exact_columns_{form.exact}(s), scaled_value_{number}(s, scale), x)" if form.exact else "    return x",
    ]
    return "\n".join(lines)


def _by_tanh(assembly: _Assembly, folded: Folded, flavour: Flavour, first: int, place: int) -> str:
    """The steps of f but the last. Returns the register of T."""
    fused = set(folded.fused.values())
    *opening, last = (i for i in range(first, len(folded.steps)) if i not in fused)
    assert folded.steps[opening[-1]].operation == "tanh" and last in folded.fused, "`finish_packed` is the last step: s * tanh + s"
    names: dict[StepOperand, str] = {Ref(0) if first else SCORE: f"s{place}"}
    names.update((Ref(i), f"t{place}_{n}") for n, i in enumerate(opening))
    assembly.registers += [names[Ref(i)] for i in opening]
    for i in opening:
        step = folded.steps[i]
        if i in folded.fused:
            product = folded.steps[folded.fused[i]]
            (summand,) = [x for x in step.operands if x != Ref(folded.fused[i])]
            operation, operands = "fma.rn", (*product.operands, summand)
        else:
            operation, operands = _OPERATIONS[step.operation], step.operands
        texts = [assembly.constant(x) if isinstance(x, Coefficient) else names[x] for x in operands]
        assembly.lines.append(f"{operation}.{flavour.pair} {', '.join([names[Ref(i)], *texts])};")
    return names[Ref(opening[-1])]


def _by_complement(assembly: _Assembly, root: tuple[float, ...], flavour: Flavour, whole: bool, place: int) -> str:
    """The register of T, which is 1 - q^2 with the sign of h, or, where signs are free, of |T|.

    Where they are, T = r (2 - r) with r = 1 - q = h p(h), which keeps its relative accuracy however small it is. In bfloat16 signs cost
    an instruction each, on a unit that has little to do, and r would cost two more. There q is a polynomial of -|h|, q^2 - 1 is -|T|,
    and of its bits that of the sign is taken from h."""
    pair = flavour.pair
    h, q, t, number = (f"{x}{place}" for x in ("a", "q", "t", "number"))  # 2, or 1 and then -1
    assembly.registers += [h, q, t, number]
    if flavour.free_signs:
        *inner, last = [Coefficient(-x, 0 if whole else i) for i, x in enumerate(root, start=1)]
        lines = [f"abs.{pair} {h}, s{place};"]
        lines.append(f"fma.rn.{pair} {q}, {h}, {assembly.constant(last)}, {assembly.constant(inner[-1])};")
        lines += [f"fma.rn.{pair} {q}, {q}, {h}, {assembly.constant(x)};" for x in reversed(inner[:-1])]
        lines += [f"mul.rn.sat.{pair} {q}, {q}, {h};", f"mov.b32 {number}, 0x40004000;"]
        lines += [f"sub.rn.{pair} {t}, {number}, {q};", f"mul.rn.{pair} {t}, {t}, {q};"]
    else:
        *inner, last = [Coefficient(x * (-1.0) ** i, 0 if whole else i) for i, x in enumerate(root, start=1)]
        lines = [f"or.b32 {h}, s{place}, 0x80008000;", f"mov.b32 {number}, 0x3f803f80;"]
        lines.append(f"fma.rn.{pair} {q}, {h}, {assembly.constant(last)}, {assembly.constant(inner[-1])};")
        lines += [f"fma.rn.{pair} {q}, {q}, {h}, {assembly.constant(x)};" for x in reversed(inner[:-1])]
        lines += [f"fma.rn.relu.{pair} {q}, {q}, {h}, {number};", f"mov.b32 {number}, 0xbf80bf80;"]
        lines.append(f"fma.rn.{pair} {t}, {q}, {q}, {number};")
        lines.append(f"lop3.b32 {t}, {t}, s{place}, 0x7fff7fff, 0xe4;")  # bit by bit (t & mask) | (s & ~mask)
    assembly.lines += lines
    return t

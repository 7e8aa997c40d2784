"""Device code of gelu and its like for two scores at a time, in the halves of a register.

    f(h) = h T + h, but for a factor        T = tanh(u(h)), u odd

P is rounded to 16 bits anyway, and an instruction for pairs computes two scores. A kernel calls `open_packed` on a tile of scores and
`finish_packed`, the last step, on what it made of them. There are two ways to T. They may alternate in a tile, since they ask for different
units of the machine:

    tanh          two uses of the special-function unit, and u
    complement    multiplications alone (gdpa/complement.py)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gdpa.complement import roots
from gdpa.folding import Coefficient, Folded, StepOperand
from gdpa.graph import SCORE, Ref
from gdpa.lowering import Precision
from gdpa.writing import powers, scalar

# Rows of a call, heads counted, that should share the budget for it to have packed scores (docs/numerics.md).
FEWEST_PACKED_ROWS = 128
# The scales whose powers, up to that of the complement's last coefficient, are numbers of float32 and bfloat16.
PACKED_SCALES = (1e-8, 1e8)


_IN_TURN = ("tanh", "complement", "complement", "tanh")


@dataclass(frozen=True)
class Flavour:
    """What a precision means to packed code.

    Attributes:
        pair: what assembly calls two of its numbers in a register.
        dtype: what Triton calls one.
        round: rounds a float32.
        widen: makes a float32, `first`, of one, `half`.
        limit: keeps scores finite that are past float16's range: beside an exact tanh they stay so.
        ways: to T, of neighbouring pairs in turn, by the number of columns, the first ones, that are computed in float32.
        degree: of the complement's root.
        largest_error: of the complement, relative.
    """

    pair: str
    dtype: str
    round: str
    widen: str
    limit: str
    ways: dict[int, tuple[str, ...]]
    degree: int
    largest_error: float


# Packed scores are rounded to 16 bits before the activation and P once more after it: sums over many keys stay well inside the error
# budget, single ones do not. So the first columns of a sequence are computed in float32: sequences of so few keys have no packed ones, and
# those of some more have a share of exact ones. Multiples of 16, the keys of one product instruction. float16 wants 32.
#
# In bfloat16 the two ways alternate, so that a step waits neither for the special-function unit nor for instructions (docs/design.md has
# what each gave). Three consumers of the hopper forward have registers for it beside exact columns only with one way, and with 32 of
# those. In float16 the complement has fewer instructions as well: signs there are free.
FLAVOURS: dict[Precision, Flavour] = {
    "bfloat16": Flavour(
        pair="bf16x2",
        dtype="bfloat16",
        round="cvt.rn.bf16.f32",
        widen="mov.b32 first, {0, half}",
        limit="",
        ways={0: _IN_TURN, 16: _IN_TURN, 32: ("complement",)},
        degree=4,
        largest_error=1.2e-3,
    ),
    "float16_sm90_many": Flavour(
        pair="f16x2",
        dtype="float16",
        round="cvt.rn.f16.f32",
        widen="cvt.f32.f16 first, half",
        limit=".satfinite",
        ways={0: ("complement",), 32: ("complement",)},
        degree=5,
        largest_error=3e-4,
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
def finish_packed_{exact}(x, DTYPE: tl.constexpr):
    """The last step of what `open_packed_{exact}` left in two neighbours; exact columns, the first {exact}, are rounded."""
    tl.static_assert(DTYPE == tl.{dtype})
    g = tl.inline_asm_elementwise(
        """
        {{
        .reg .b32 s, t;
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
    """The texts of `both`, `opened_value_<number>_<exact>` and what goes with it, for an f that `fold` made; None where it has not the
    form."""
    odd = folded.gate
    if odd is None:
        return None
    flavour = FLAVOURS[precision]
    root = roots(odd, flavour.degree, flavour.largest_error)
    words = {"pair": flavour.pair, "dtype": flavour.dtype, "round": flavour.round, "widen": flavour.widen}
    texts = [_BOTH.format(**words)]
    for exact, ways in flavour.ways.items():
        chosen = ways if root is not None else ("tanh",)
        last = f"fma.rn.{flavour.pair} $0, s, t, s;"
        if _leaves_sign_out(flavour, chosen):
            last = f".reg .b32 a;\n        abs.{flavour.pair} a, s;\n        fma.rn.{flavour.pair} $0, a, t, s;"
        result = "g"
        if exact:
            texts.append(_EXACT.format(columns=_COLUMNS[frontend], exact=exact))
            result = f"tl.where(exact_columns_{exact}(x), x.to(tl.{flavour.dtype}), g)"
        texts.append(_FINISH.format(exact=exact, last=last, result=result, **words))
        texts.append(_open(folded, root or (), flavour, chosen, number, exact))
    return texts


def _leaves_sign_out(flavour: Flavour, ways: tuple[str, ...]) -> bool:
    """Whether t is |T|: where |h| costs the last step nothing, as it does in float16, and no other way needs one that is for both."""
    return flavour.pair == "f16x2" and ways == ("complement",)


def _open(folded: Folded, root: tuple[float, ...], flavour: Flavour, ways: tuple[str, ...], number: int, exact: int) -> str:
    multiple = folded.steps[0].operands[1]
    whole = isinstance(multiple, Coefficient)  # whether h is a multiple of the score, which the first step makes
    assembly = _Assembly(2 * len(ways))
    for i, way in enumerate(ways):
        assembly.registers.append(f"s{i}")
        first = assembly.results + 2 * i
        assembly.lines.append(f"cvt.rn{flavour.limit}.{flavour.pair}.f32 s{i}, ${first + 1}, ${first};")
        if way == "tanh":
            t = _by_tanh(assembly, folded, flavour, 1 if whole else 0, i)
        else:
            t = _by_complement(assembly, root, flavour, whole, i, _leaves_sign_out(flavour, ways))
        assembly.lines += [f"mov.b32 ${2 * i}, s{i};", f"mov.b32 ${2 * i + 1}, {t};"]
    name = f"opened_value_{number}_{exact}"
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
        f"    return tl.where(exact_columns_{exact}(s), scaled_value_{number}(s, scale), x)" if exact else "    return x",
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


def _by_complement(
    assembly: _Assembly, root: tuple[float, ...], flavour: Flavour, whole: bool, place: int, leaves_sign_out: bool
) -> str:
    """T is 1 - q^2 with the sign of h. Returns its register, or |T|'s.

    With bfloat16 pairs a sign costs an instruction of its own, on a unit that has little to do. So q is a polynomial of -|h| there, -|T| is
    q^2 - 1, and of its bits that of the sign is taken from h."""
    pair = flavour.pair
    free = pair == "f16x2"
    s, h, q, t, one = (f"{x}{place}" for x in ("s", "a", "q", "t", "one"))
    assembly.registers += [h, q, t, one]
    sign = 1.0 if free else -1.0
    *inner, last = [Coefficient(x * sign**i, 0 if whole else i) for i, x in enumerate(root, start=1)]
    lines = [f"abs.{pair} {h}, {s};" if free else f"or.b32 {h}, {s}, 0x80008000;"]
    lines.append(f"mov.b32 {one}, {'0x3c003c00' if free else '0x3f803f80'};")
    lines.append(f"fma.rn.{pair} {q}, {h}, {assembly.constant(last)}, {assembly.constant(inner[-1])};")
    lines += [f"fma.rn.{pair} {q}, {q}, {h}, {assembly.constant(x)};" for x in reversed(inner[:-1])]
    lines.append(f"fma.rn.relu.{pair} {q}, {q}, {h}, {one};")
    if free:
        lines += [f"neg.{pair} {t}, {q};", f"fma.rn.{pair} {t}, {t}, {q}, {one};"]
    else:
        lines += [f"mov.b32 {one}, 0xbf80bf80;", f"fma.rn.{pair} {t}, {q}, {q}, {one};"]
    if not leaves_sign_out:
        lines.append(f"lop3.b32 {t}, {t}, {s}, 0x7fff7fff, 0xe4;")  # bit by bit (t & mask) | (s & ~mask)
    assembly.lines += lines
    return t

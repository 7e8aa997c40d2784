"""From the text of a kernel's TTGIR to a Python module: a generator for the kernel, and one for each of its partitions.

    %s = arith.addi %a, %b : i32                       v_s = binary('addi', v_a, v_b, 'i32')
    ttng.wait_barrier %full, %phase, %true             if v_true: yield from here.wait(v_full, v_phase)
    %r = scf.for %i = %a to %b step %c                 v_x = v_y
        iter_args(%x = %y) -> (i32) {                  v_i = v_a
      scf.yield %z : i32                               while v_i < v_b:
    }                                                      v_x, = v_z,
                                                           v_i += v_c
                                                       v_r = v_x

`python -m simulator.translate FILE` prints the translation of a file.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from itertools import count as numbers
from typing import Any, NamedTuple

from simulator import instructions
from simulator.races import Fault

_LOCATION = re.compile(r"\s*loc\((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\))*\)")
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULTS = re.compile(r"^(%[\w$.-]+)(?::(\d+))? = (.*)$")


_numbers = numbers(1)


class Type(NamedTuple):
    shape: tuple[int, ...] | None  # None of scalars
    kind: str


def type_of(text: str) -> Type:
    text = text.strip()
    inside = re.match(r"(?:tensor|!ttg\.memdesc|!tt\.tensordesc<tensor)<((?:\d+x)+)(!tt\.ptr<\w+>|\w+)", text)
    if inside:
        return Type(tuple(int(x) for x in inside[1].rstrip("x").split("x")), inside[2])
    return Type(None, text)


def split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        if c in "<([{":
            depth += 1
        elif c in ")]}" or (c == ">" and text[i - 1] != "-"):
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    parts.append(text[last:])
    return [x.strip() for x in parts if x.strip()]


def name_of(text: str) -> str:
    """A value's name in Python: %x#1 is one of several results."""
    name, _, index = text.strip().partition("#")
    plain = "v_" + re.sub(r"\W", lambda m: f"_{ord(m[0])}_", name[1:])
    return f"{plain}[{index}]" if index else plain


def names_in(text: str) -> list[str]:
    return [name_of(x) for x in _NAME.findall(text)]


class Parameter(NamedTuple):
    name: str
    type: Type
    is_descriptor: bool


class Translation(NamedTuple):
    source: str
    function: str
    parameters: list[Parameter]
    warps: int


class Translator:
    """Reads lines and writes Python."""

    def __init__(self, text: str) -> None:
        lines = [_LOCATION.sub("", line).strip() for line in text.splitlines()]
        self.lines = [x for x in lines if x and not x.startswith("#")]
        self.at = 0
        self.functions: list[list[str]] = []
        self.out: list[str] = []
        self.depth = 1
        warps = re.search(r'"ttg.num-warps" = (\d+)', text)
        assert warps
        self.warps = int(warps[1])

    def write(self, line: str) -> None:
        self.out.append("    " * self.depth + line)

    def next(self) -> str:
        self.at += 1
        return self.lines[self.at - 1]

    def translate(self) -> Translation:
        while not self.lines[self.at].startswith("tt.func"):
            self.at += 1
        head = re.match(r"tt\.func (?:public )?@(\w+)\((.*?)\)(?: attributes .*)? \{$", self.next())
        assert head
        parameters = []
        for argument in split(re.sub(r"\{[^{}]*\}", "", head[2])):
            name, _, kind = argument.partition(":")
            parameters.append(Parameter(name_of(name), type_of(kind), "tensordesc" in kind))
        self.out = [f"def {head[1]}(here, {', '.join(x.name for x in parameters)}):"]
        self.write("yield None")
        self.region(lambda values: None)
        self.functions.append(self.out)
        source = "\n\n\n".join("\n".join(x) for x in self.functions) + "\n"
        return Translation(source, head[1], parameters, self.warps)

    def region(self, give: Callable[[list[str]], str | None]) -> str:
        """Lines up to the brace that closes them; `give` says what becomes of the values they end with. The closing line."""
        wrote = len(self.out)
        while True:
            line = self.next()
            if line.startswith("}"):
                if len(self.out) == wrote:
                    self.write("pass")
                return line
            end = re.match(r"(scf\.yield|tt\.return|ttg\.warp_return|ttg\.warp_yield)(?: (.*))?$", line)
            if end:
                given = give(names_in((end[2] or "").split(" : ")[0]))
                if given:
                    self.write(given)
                continue
            self.instruction(line)

    def instruction(self, line: str) -> None:
        match = _RESULTS.match(line)
        target, count, rest = ("", 0, line) if match is None else (name_of(match[1]), int(match[2] or 1), match[3])
        name = re.match(r'"?([\w.]+)"?', rest)
        assert name, line
        handler = getattr(self, "on_" + name[1].replace(".", "_"), None)
        if handler is not None:
            handler(target, count, rest)
            return
        dialect, _, what = name[1].partition(".")
        operands = names_in(rest)
        kind = type_of(rest.rpartition(" : ")[2])
        if dialect == "arith" and what in instructions.BINARY:
            self.write(f"{target} = binary({what!r}, {operands[0]}, {operands[1]}, {kind.kind!r})")
        elif what in instructions.UNARY:
            self.write(f"{target} = unary({what!r}, {operands[0]}, {kind.kind!r})")
        else:
            raise Fault(f"the simulator does not know {line!r}")

    # Control.

    def on_scf_for(self, target: str, count: int, rest: str) -> None:
        match = re.match(r"scf\.for (%\S+) = (%\S+) to (%\S+) step (%\S+)(?: iter_args\((.*?)\) -> \(.*?\)+)?\s*(?::.*)?\{$", rest)
        assert match, rest
        index, first, last, step = (name_of(x) for x in match.groups()[:4])
        carried = [x.split(" = ") for x in split(match[5] or "")]
        inside = [name_of(x) for x, _ in carried]
        for (_, start), name in zip(carried, inside, strict=True):
            self.write(f"{name} = {name_of(start)}")
        self.write(f"{index} = {first}")
        self.write(f"while {index} < {last}:")
        self.depth += 1
        self.region(lambda values: f"{', '.join(inside)}, = {', '.join(values)}," if values else None)
        self.write(f"{index} += {step}")
        self.depth -= 1
        if count == 1:
            self.write(f"{target} = {inside[0]}")
        elif count:
            self.write(f"{target} = ({', '.join(inside)})")

    def on_scf_if(self, target: str, count: int, rest: str) -> None:
        def give(values: list[str]) -> str | None:
            if not values:
                return None
            return f"{target} = {values[0]}" if count == 1 else f"{target} = ({', '.join(values)})"

        self.write(f"if {names_in(rest)[0]}:")
        self.depth += 1
        closing = self.region(give)
        self.depth -= 1
        if "else" in closing:
            self.write("else:")
            self.depth += 1
            self.region(give)
            self.depth -= 1

    def on_tt_reduce(self, target: str, count: int, rest: str) -> None:
        axis = re.search(r"axis = (\d+)", rest)
        assert axis
        body = []
        while not self.lines[self.at].startswith("})"):
            body.append(self.next())
        self.next()
        how = [re.search(r"= arith\.(\w+)", x) for x in body]
        names = [x[1] for x in how if x]
        if len(names) != 1:
            raise Fault(f"the simulator does not reduce by {body}")
        self.write(f"{target} = reduce({names_in(rest)[0]}, {axis[1]}, {names[0]!r})")

    def on_ttg_warp_specialize(self, target: str, count: int, rest: str) -> None:
        arguments = names_in(rest)
        if not self.next().startswith("default"):
            raise Fault("a warp_specialize without a default partition")
        start = len(self.out)
        self.region(lambda values: None)
        default, self.out = self.out[start:], self.out[:start]
        partitions = []
        while True:
            head = re.match(r"(partition\d+)\((.*)\) num_warps\((\d+)\) \{$", self.lines[self.at])
            if head is None:
                break
            self.next()
            if any(f"def {head[1]}(" in x[0] for x in self.functions):
                raise Fault("the simulator knows one warp_specialize in a kernel")
            outer, depth = self.out, self.depth
            parameters = [name_of(x.partition(":")[0]) for x in split(head[2])]
            self.out, self.depth = [f"def {head[1]}(here, {', '.join(parameters)}):"], 1
            self.write("yield None")
            closing = self.region(lambda values: None)
            self.functions.append(self.out)
            self.out, self.depth = outer, depth
            partitions.append(f"({head[1]}, {head[3]}, {head[1]!r})")
            if ":" in closing:
                break
        self.write(f"others = here.specialize([{', '.join(partitions)}], ({''.join(x + ', ' for x in arguments)}))")
        self.out += default
        self.write("yield from here.gather(others)")

    # Values.

    def on_arith_constant(self, target: str, count: int, rest: str) -> None:
        value = rest.removeprefix("arith.constant ")
        if value in ("true", "false"):
            self.write(f"{target} = {value.capitalize()}")
            return
        value, _, kind = value.rpartition(" : ")
        kind = type_of(kind)
        value = value.removeprefix("dense<").removesuffix(">")
        if value.startswith("0x") and kind.kind[0] != "i":
            value = repr(instructions.bit_pattern(int(value, 16), kind.kind))
        value = {"true": "True", "false": "False", "nan": "math.nan", "inf": "math.inf", "-inf": "-math.inf"}.get(value, value)
        self.write(f"{target} = constant({value}, {kind.shape}, {kind.kind!r})")

    def on_ub_poison(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = 'poison'")

    def on_arith_cmpi(self, target: str, count: int, rest: str) -> None:
        how = re.match(r"arith\.cmp[if] (\w+),", rest)
        assert how
        x, y = names_in(rest)
        self.write(f"{target} = compare({how[1]!r}, {x}, {y}, {type_of(rest.rpartition(' : ')[2]).kind!r})")

    on_arith_cmpf = on_arith_cmpi

    def on_arith_select(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = select({', '.join(names_in(rest))})")

    def _convert(self, target: str, count: int, rest: str) -> None:
        types = re.search(r" : (.*?) to (.*)$", rest)
        assert types
        source, to = type_of(types[1]), type_of(types[2])
        unsigned = rest.startswith(("arith.extui", "arith.uitofp"))
        self.write(f"{target} = convert({names_in(rest)[0]}, {source.kind!r}, {to.kind!r}, {unsigned})")

    on_arith_truncf = on_arith_extf = on_arith_extsi = on_arith_extui = on_arith_trunci = _convert
    on_arith_sitofp = on_arith_fptosi = on_arith_uitofp = _convert

    def on_tt_bitcast(self, target: str, count: int, rest: str) -> None:
        types = re.search(r" : (.*?) (?:->|to) (.*)$", rest)
        assert types
        source, to = type_of(types[1]), type_of(types[2])
        self.write(f"{target} = bitcast({names_in(rest)[0]}, {source.kind!r}, {to.kind!r})")

    on_arith_bitcast = on_tt_bitcast

    def on_tt_splat(self, target: str, count: int, rest: str) -> None:
        kind = type_of(rest.rpartition("->")[2])
        self.write(f"{target} = constant({names_in(rest)[0]}, {kind.shape}, {kind.kind!r})")

    def on_tt_make_range(self, target: str, count: int, rest: str) -> None:
        ends = re.search(r"end = (\d+) : i32, start = (\d+)", rest)
        assert ends
        self.write(f"{target} = torch.arange({ends[2]}, {ends[1]}, dtype=torch.int32)")

    def on_tt_expand_dims(self, target: str, count: int, rest: str) -> None:
        axis = re.search(r"axis = (\d+)", rest)
        assert axis
        self.write(f"{target} = plain({names_in(rest)[0]}).unsqueeze({axis[1]})")

    def on_tt_broadcast(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = plain({names_in(rest)[0]}).expand({type_of(rest.rpartition('->')[2]).shape})")

    def on_tt_reshape(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = plain({names_in(rest)[0]}).reshape({type_of(rest.rpartition('->')[2]).shape})")

    def _order(self, rest: str) -> str:
        order = re.search(r"array<i32: ([\d, ]+)>", rest)
        assert order
        return order[1]

    def on_tt_trans(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = plain({names_in(rest)[0]}).permute({self._order(rest)})")

    def on_ttg_convert_layout(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = plain({names_in(rest)[0]})")

    def on_tt_elementwise_inline_asm(self, target: str, count: int, rest: str) -> None:
        match = re.match(r'tt\.elementwise_inline_asm "(.*)" \{constraints = .*?packed_element = (\d+).*?\} (.*)$', rest)
        assert match, rest
        text = re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), match[1])
        operands = names_in(match[3].split(" : ")[0])
        types = [type_of(x) for x in split(match[3].rpartition("->")[2])]
        call = self._device_call(text, operands)
        if call is not None:
            self.write(f"{target} = {call}")
            return
        after = re.search(r"add\.u32 gathered, gathered, (\d+); bar\.sync gathered, (\d+);", text)
        if after:  # pipeline.join_after
            self.write(f"yield from here.join({after[1]}, {after[2]})")
            self.write(f"{target} = ({', '.join(f'plain({x})' for x in operands)})")
            return
        kinds = [x.kind for x in types]
        self.write(f"{target} = inline({text!r}, {match[2]}, {types[0].shape}, {kinds}, [{', '.join(operands)}])")

    def _device_call(self, text: str, operands: list[str]) -> str | None:
        """Assembly that is no arithmetic, known by what pipeline.py writes."""
        listed = ", ".join(operands)
        calls = (
            ("bar.arrive $1, $2", f"yield from here.arrive({listed})"),
            ("bar.sync $1, $2", f"yield from here.join({listed})"),
            ("@p trap", operands[0] if operands else ""),
            ("cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.acq_rel.gpu", "yield from here.stores_arrive()"),
            ("@first red.relaxed.gpu.global.add.u32 [$1], 1", f"yield from here.count_up({listed})"),
            ("@first atom.relaxed.gpu.global.add.u32 ticket, [$1], 1", f"yield from here.take_ticket({listed})"),
            ("@short bra again", f"yield from here.await_count({listed})"),
            ("ld.acquire.gpu.global.u32 $0, [$1];", f"yield from here.look_at({listed})"),
            ("fence.proxy.async.global;", "here.see_what_was_counted()"),
        )
        for part, call in calls:
            if part in text:
                return call
        return None

    # Programs and global memory.

    def on_tt_get_program_id(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = here.program.indices[{'xyz'.index(rest.split()[1])}]")

    def on_tt_get_num_programs(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = here.program.grid[{'xyz'.index(rest.split()[1])}]")

    def on_tt_addptr(self, target: str, count: int, rest: str) -> None:
        x, offset = names_in(rest)
        element = re.search(r"!tt\.ptr<(\w+)>", rest)
        assert element
        self.write(f"{target} = advance({x}, {offset}, {instructions.dtype_of(element[1]).itemsize})")

    def on_tt_ptr_to_int(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = {names_in(rest)[0]}")

    def on_tt_load(self, target: str, count: int, rest: str) -> None:
        pointer, *others = names_in(rest)
        mask, other = [*others, "None", "None"][:2]
        kind = type_of(rest.rpartition(" : ")[2])
        element = re.search(r"!tt\.ptr<(\w+)>", rest)
        assert element
        self.write(f"{target} = load(here.machine, {pointer}, {mask}, {other}, {element[1]!r}, {kind.shape})")

    def on_tt_store(self, target: str, count: int, rest: str) -> None:
        pointer, value, *others = names_in(rest)
        element = re.search(r"!tt\.ptr<(\w+)>", rest)
        assert element
        self.write(f"store(here.machine, {pointer}, {value}, {others[0] if others else None}, {element[1]!r})")

    # Shared memory.

    def on_ttg_local_alloc(self, target: str, count: int, rest: str) -> None:
        kind = type_of(rest.rpartition("->")[2])
        assert kind.shape
        if kind.kind == "i64":
            self.write(f"{target} = here.program.new_barriers({kind.shape[0]}, {target!r})")
            if len(kind.shape) == 1:
                self.write(f"{target}, = {target}")
            return
        if names_in(rest):
            raise Fault("the simulator does not allocate what is there already")
        self.write(f"{target} = here.program.allocate({kind.shape}, {instructions.dtype_of(kind.kind)}, {target!r})")

    def on_ttg_memdesc_index(self, target: str, count: int, rest: str) -> None:
        x, index = names_in(rest)
        if type_of(rest.rpartition("->")[2]).kind == "i64":
            self.write(f"{target} = {x}[inside({index}, len({x}))]")
        else:
            self.write(f"{target} = View({x}.block, {x}.data[inside({index}, len({x}.data))])")

    def on_ttg_memdesc_reshape(self, target: str, count: int, rest: str) -> None:
        (x,) = names_in(rest)
        self.write(f"{target} = View({x}.block, {x}.data.view({type_of(rest.rpartition('->')[2]).shape}))")

    def on_ttg_memdesc_trans(self, target: str, count: int, rest: str) -> None:
        (x,) = names_in(rest)
        self.write(f"{target} = View({x}.block, {x}.data.permute({self._order(rest)}))")

    def on_ttg_memdesc_subslice(self, target: str, count: int, rest: str) -> None:
        (x,) = names_in(rest)
        offsets = re.search(r"\[([\d, ]+)\]", rest)
        shape = type_of(rest.rpartition("->")[2]).shape
        assert offsets and shape
        slices = ", ".join(f"{at}:{at + size}" for at, size in zip(map(int, offsets[1].split(",")), shape, strict=True))
        self.write(f"{target} = View({x}.block, {x}.data[{slices}])")

    def on_ttg_memdesc_reinterpret(self, target: str, count: int, rest: str) -> None:
        (x,) = names_in(rest)
        kind = type_of(rest.rpartition("->")[2])
        self.write(f"{target} = reinterpret({x}, {kind.shape}, {instructions.dtype_of(kind.kind)})")

    def on_ttg_local_load(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = here.load({names_in(rest)[0]})")

    def on_ttg_local_store(self, target: str, count: int, rest: str) -> None:
        value, view = names_in(rest)
        self.write(f"here.store(plain({value}), {view})")

    def on_ttng_fence_async_shared(self, target: str, count: int, rest: str) -> None:
        self.write("here.fence()")

    def on_gpu_barrier(self, target: str, count: int, rest: str) -> None:
        self.write("here.meet()")

    on_ttg_barrier = on_gpu_barrier

    # Barriers.

    def on_ttng_init_barrier(self, target: str, count: int, rest: str) -> None:
        number = re.search(r", (\d+) :", rest)
        assert number
        self.write(f"{names_in(rest)[0]}.init({number[1]})")

    def on_ttng_wait_barrier(self, target: str, count: int, rest: str) -> None:
        barrier, phase, *condition = names_in(rest)
        self._if(condition, f"yield from here.wait({barrier}, {phase})")

    def on_ttng_arrive_barrier(self, target: str, count: int, rest: str) -> None:
        barrier, *condition = names_in(rest)
        number = re.search(r", (\d+)", rest)
        assert number
        self._if(condition, f"yield from here.arrive_at({barrier}, {number[1]})")

    def on_ttng_barrier_expect(self, target: str, count: int, rest: str) -> None:
        barrier, condition = names_in(rest)
        size = re.search(r", (\d+),", rest)
        assert size
        self._if([condition], f"yield from here.arrive_at({barrier}, 1, {size[1]})")

    def _if(self, condition: list[str], line: str) -> None:
        self.write(f"if {condition[0]}: {line}" if condition else line)

    # The copy engine and products.

    def _at(self, rest: str) -> str:
        at = re.search(r"\[(.*?)\]", rest)
        assert at
        return f"[{', '.join(names_in(at[1]))}]"

    def on_ttng_async_tma_copy_global_to_local(self, target: str, count: int, rest: str) -> None:
        names = names_in(rest)
        view, barrier, condition = names[-3:]
        self._if([condition], f"yield from here.copy_in({names[0]}, {self._at(rest)}, {barrier}, {view})")

    def on_ttng_async_tma_copy_local_to_global(self, target: str, count: int, rest: str) -> None:
        names = names_in(rest)
        self.write(f"yield from here.copy_out({names[0]}, {self._at(rest)}, {names[-1]}, False)")

    def on_ttng_async_tma_reduce(self, target: str, count: int, rest: str) -> None:
        if "add" not in rest.split("%")[0]:
            raise Fault(f"the simulator does not know {rest!r}")
        names = names_in(rest)
        self.write(f"yield from here.copy_out({names[0]}, {self._at(rest)}, {names[-1]}, True)")

    def on_ttng_async_tma_store_wait(self, target: str, count: int, rest: str) -> None:
        self.write(f"here.wait_stores({self._pendings(rest)})")

    def _pendings(self, rest: str) -> str:
        pendings = re.search(r"pendings = (\d+)", rest)
        assert pendings
        return pendings[1]

    def on_ttng_warp_group_dot(self, target: str, count: int, rest: str) -> None:
        a, b, accumulator, *use = names_in(rest)
        is_async = "isAsync = true" in rest
        self.write(f"{target} = here.multiply({a}, {b}, {accumulator}, {use[0] if use else True}, {is_async})")

    def on_ttng_warp_group_dot_wait(self, target: str, count: int, rest: str) -> None:
        self.write(f"{target} = here.wait_products({self._pendings(rest)}, {', '.join(names_in(rest))})")


def load(text: str) -> tuple[Translation, dict[str, Any]]:
    """The translation of a kernel, and the namespace with its functions."""
    import math

    import torch

    from simulator import machine

    translation = Translator(text).translate()
    namespace: dict[str, Any] = {
        "math": math,
        "torch": torch,
        "View": machine.View,
        "plain": machine.plain,
        "reinterpret": reinterpret,
    }
    for name in (
        "advance",
        "binary",
        "bitcast",
        "compare",
        "constant",
        "convert",
        "inline",
        "load",
        "reduce",
        "select",
        "store",
        "unary",
    ):
        namespace[name] = getattr(instructions, name)
    namespace["inside"] = inside
    name = f"<{translation.function}, translated {next(_numbers)}>"
    linecache.cache[name] = (len(translation.source), None, translation.source.splitlines(True), name)  # for tracebacks
    exec(compile(translation.source, name, "exec"), namespace)
    return translation, namespace


def inside(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise Fault(f"buffer {index} of {count}")
    return index


def reinterpret(view: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The same memory as another type and shape, from its beginning."""
    first = view.data.storage_offset() * view.data.dtype.itemsize
    size = dtype.itemsize
    for x in shape:
        size *= x
    if size > view.data.numel() * view.data.dtype.itemsize:
        raise Fault(f"{tuple(view.data.shape)} of {view.data.dtype} is taken for {shape} of {dtype}, which is more")
    data = view.block.bytes[first : first + size].view(dtype).view(shape)
    return type(view)(view.block, data)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(Translator(file.read()).translate().source)

"""README's measured tables and docs/results.md, from the JSON files in results/.

    python -m gdpa.bench.readme          rewrites README.md between its markers, and docs/results.md

A file that is not there is not shown. A test fails where the two pages differ from what this writes.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from gdpa.bench.providers import NAMES, SOFTMAX, label
from gdpa.bench.tables import duration, rate, size

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "results"
GPU_FILES = ("h200-forward.json", "h200-backward.json")
# docs/results.md has room for more.
PAGE_FILES = (
    *GPU_FILES,
    "h200-causal.json",
    "h200-forward-64.json",
    "h200-backward-64.json",
    "h200-fp16-128.json",
    "h200-fp16-64.json",
)
TRAIN_FILE = "h200-train.json"
PAGE_TRAIN_FILES = (TRAIN_FILE, "h200-train-768.json")
CPU_FILE = "cpu.json"
RATIO_FILE = "cpu-ratio.json"

Data = dict[str, Any]


def load(name: str) -> Data | None:
    path = RESULTS / name
    data: Data | None = json.loads(path.read_text()) if path.exists() else None
    return data


def gpu_table(name: str, data: Data) -> str:
    """TFLOP/s and fraction of the floor: a line for each case, a column for each provider and activation.

    Softmax has none: it is measured beside each of them, and its best is shown.
    """
    rows = [row for row in data["rows"] if row["ms"] is not None]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    parts = []
    for mode in modes:
        mine = [row for row in rows if row["mode"] == mode]
        activations = list(dict.fromkeys(row["activation"] for row in mine))
        columns = [
            (provider, activation)
            for provider in NAMES
            for activation in (activations[:1] if provider in SOFTMAX else activations)
            if any(row["provider"] == provider and (provider in SOFTMAX or row["activation"] == activation) for row in mine)
        ]
        cells: dict[tuple[str, str, str], Data] = {}
        for row in mine:
            softmax = row["provider"] in SOFTMAX
            cell = row["case"], row["provider"], activations[0] if softmax else row["activation"]
            if cell not in cells or row["tflops"] > cells[cell]["tflops"]:
                cells[cell] = row
        heads = [label(p) if p in SOFTMAX else f"{p} {a}" for p, a in columns]
        lines = [
            f"{_where(data)}, {mode}, TFLOP/s and in brackets the fraction of the hardware's floor "
            f"([docs/benchmarking.md]({{docs}}benchmarking.md)): `{data['header']['command']}` ([{name}]({{root}}results/{name}))",
            "",
            "| case | " + " | ".join(heads) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for case in dict.fromkeys(row["case"] for row in data["rows"]):
            figures = [cells.get((case, *column)) for column in columns]
            lines.append(f"| {case} | " + " | ".join("-" if row is None else _share(row) for row in figures) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def overview(named: list[tuple[str, Data]]) -> str:
    """The same in short, for README: both directions in a line, all activations of a backend in a cell, the best of the softmaxes."""
    sources = [f"`{data['header']['command']}` ([{name}]({{root}}results/{name}))" for name, data in named]
    columns: list[tuple[str, dict[str, str]]] = []
    cases: dict[str, None] = {}
    for _, data in named:
        cases |= dict.fromkeys(row["case"] for row in data["rows"])
        rows = [row for row in data["rows"] if row["ms"] is not None]
        activations = ", ".join(dict.fromkeys(row["activation"] for row in rows))
        for mode in dict.fromkeys(row["mode"] for row in rows):
            mine = [row for row in rows if row["mode"] == mode]
            for provider in ("gdpa-hopper", "gdpa-triton"):
                cells: dict[str, list[Data]] = {}
                for row in mine:
                    if row["provider"] == provider:
                        cells.setdefault(row["case"], []).append(row)
                if cells:
                    columns.append((f"{mode}: {provider} {activations}", {case: _shares(found) for case, found in cells.items()}))
            best: dict[str, Data] = {}
            for row in mine:
                if row["provider"] in SOFTMAX and row["tflops"] > best.get(row["case"], {"tflops": 0.0})["tflops"]:
                    best[row["case"]] = row
            if best:
                shown = {case: f"{_share(row)} {row['provider']}" for case, row in best.items()}
                columns.append((f"{mode}: best softmax", shown))
    return "\n".join(
        [
            f"{_where(named[0][1])}, TFLOP/s and in brackets the fraction of the hardware's floor "
            f"([docs/benchmarking.md]({{docs}}benchmarking.md)): {', '.join(sources)}",
            "",
            "| case | " + " | ".join(head for head, _ in columns) + " |",
            "|---" * (len(columns) + 1) + "|",
            *(f"| {case} | " + " | ".join(cells.get(case, "-") for _, cells in columns) + " |" for case in cases),
        ]
    )


def _shares(rows: list[Data]) -> str:
    """Of one case and provider, the activations in a cell."""
    rates = ", ".join(f"{row['tflops']:.0f}" for row in rows)
    shares = [row["fraction_of_floor"] for row in rows]
    return rates + ("" if None in shares else f" [{', '.join(f'{share:.2f}' for share in shares)}]")


def _share(row: Data) -> str:
    share = row["fraction_of_floor"]
    return f"{row['tflops']:.0f}" + ("" if share is None else f" [{share:.2f}]")


def _where(data: Data) -> str:
    head = data["header"]
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[head["dtype"]]
    return f"{head['device']}, {dtype}, B={head['batch']}, H={head['heads']}, D={head['dim']}"


def cpu_table(name: str, data: Data) -> str:
    """The CPU backend beside plain PyTorch: a line for each case and activation."""
    head = data["header"]
    cells = {(row["case"], row["activation"], row["mode"], row["provider"]): row for row in data["rows"]}
    modes = list(dict.fromkeys(row["mode"] for row in data["rows"]))
    lines = [
        f"{_where(data)}, {head['threads']} threads: gdpa-cpu, times as fast as plain PyTorch on padded tensors (its peak memory, "
        f"plain PyTorch's): `{head['command']}` ([{name}]({{root}}results/{name}))",
        "",
        "| case | " + " | ".join(modes) + " |",
        "|---" * (len(modes) + 1) + "|",
    ]
    for case, activation in dict.fromkeys((row["case"], row["activation"]) for row in data["rows"]):
        pairs = [tuple(cells.get((case, activation, mode, provider)) for provider in ("gdpa-cpu", "eager")) for mode in modes]
        lines.append(f"| {case} {activation} | " + " | ".join(_against(*pair) for pair in pairs) + " |")
    return "\n".join(lines)


def _against(ours: Data | None, eager: Data | None) -> str:
    if ours is None or eager is None or ours["ms"] is None or eager["ms"] is None:
        return "-"
    memory = [size(row["peak_bytes"]) for row in (ours, eager)]
    return f"{duration(ours['ms'])}, {eager['ms'] / ours['ms']:.2f}x" + (f" ({memory[0]}, {memory[1]})" if all(memory) else "")


def times_as_fast(row: Data, name: str) -> str:
    """The best rounds' ratio, the rounds' median and their range."""
    if row[name] is None:
        return "-"
    return f"{row[name]:.2f} ({row[name + '_median']:.2f}, {row[name + '_lowest']:.2f} to {row[name + '_highest']:.2f})"


def ratio_table(data: Data) -> str:
    """The CPU backend against padded eager PyTorch on larger batches."""
    header = data["header"]
    runs = [json.loads(path.read_text())["rows"] for path in sorted(RESULTS.glob("cpu-ratio*.json"))]
    jagged = [row for rows in runs for row in rows if row["dtype"] == "fp32" and ".." in row["batch"]]
    eager, ratios = [row["padded_ms"] / 1e3 for row in jagged], [row["speedup"] for row in jagged]
    lines = [
        f"CPU ({header['threads']} threads), forward and backward, H=4, D=128, against padded eager PyTorch: `{header['command']}`",
        "",
        f"Padded eager takes millions of page faults, whose cost moves: over the {len(jagged)} fp32 rows of the jagged batch in "
        f"results/cpu-ratio*.json it took {min(eager):.1f} to {max(eager):.1f} s and the speed-up was {min(ratios):.1f} to "
        f"{max(ratios):.1f}.",
        "",
        "`eager` starts and ends with the tensors that gdpa has; padded eager is given its heads first. Best rounds; in brackets the "
        "median of the rounds and their range.",
        "",
        "| batch | dtype | activation | against padded eager | against eager | extra memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        memory = "-" if row["memory_fraction"] is None else f"{100 * row['memory_fraction']:.1f} %"
        cells = [
            row["batch"],
            row["dtype"],
            row["activation"],
            times_as_fast(row, "speedup"),
            times_as_fast(row, "eager_speedup"),
            memory,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def train_table(name: str, data: Data) -> str:
    """A training step by model and provider: its throughput, and where its time goes."""
    providers = list(dict.fromkeys(row["provider"] for row in data["rows"]))
    cells = {(row["model"], row["preset"], row["provider"]): row for row in data["rows"]}
    made_with = f"; {data['header']['made_with']}" if "made_with" in data["header"] else ""
    lines = [
        f"{data['header'].get('gpu')}, a training step, samples/s (milliseconds: the step, of which attention; memory): "
        f"`{data['header']['command']}` ([{name}]({{root}}results/{name}){made_with})",
        "",
        "| model | " + " | ".join(providers) + " |",
        "|---" * (len(providers) + 1) + "|",
    ]
    for model, preset in dict.fromkeys((row["model"], row["preset"]) for row in data["rows"]):
        shown = [_step(cells.get((model, preset, provider))) for provider in providers]
        lines.append(f"| {model} {preset} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _step(row: Data | None) -> str:
    if row is None or row["samples_per_s"] is None:
        return "-"
    return f"{row['samples_per_s']:,.0f} ({row['step_ms']:.0f}, {row['attention_ms']:.1f}; {row['peak_bytes'] / 1e9:.0f} GB)"


def header_lines(data: Data) -> str:
    """Where a file's figures come from."""
    head = data["header"]
    facts = [
        f"commit {head['commit']}",
        ", ".join(f"{name} {version}" for name, version in head["versions"].items() if version is not None),
    ]
    facts += [f"{name} {rate(head[name])}" for name in ("R", "R_rested", "W") if head.get(name)]
    return "; ".join(facts) + "."


def present(names: tuple[str, ...]) -> list[tuple[str, Data]]:
    """Those of the files that are there."""
    return [(name, data) for name in names if (data := load(name)) is not None]


def tables() -> list[str]:
    """README's: one of the operator, one of training, one of a CPU."""
    named = present(GPU_FILES)
    parts = [overview(named)] if named else []
    train, cpu = load(TRAIN_FILE), load(CPU_FILE)
    if train is not None:
        parts.append(train_table(TRAIN_FILE, train))
    if cpu is not None:
        parts.append(cpu_table(CPU_FILE, cpu))
    return [part.format(docs="docs/", root="") for part in parts]


def page() -> str:
    """docs/results.md: the same tables with where they come from, and what README has no room for."""
    parts = [
        "# Measured",
        "Written by `python -m gdpa.bench.readme` from the files in `results/`; how the figures are made: "
        "[benchmarking.md](benchmarking.md).",
    ]
    named = present(PAGE_FILES)
    cpu, ratio = load(CPU_FILE), load(RATIO_FILE)
    parts += [f"{gpu_table(name, data)}\n\n{header_lines(data)}" for name, data in named]
    parts += [train_table(name, data) for name, data in present(PAGE_TRAIN_FILES)]
    if cpu is not None:
        parts.append(f"{cpu_table(CPU_FILE, cpu)}\n\n{header_lines(cpu)}")
    if ratio is not None:
        parts.append(ratio_table(ratio))
    return "\n\n".join(part.format(docs="", root="../") for part in parts) + "\n"


def written(text: str) -> str:
    """README's text with its measured tables made anew."""
    body = "<!-- table:measured -->\n" + "\n\n".join(tables()) + "\n<!-- /table:measured -->"
    return re.sub(r"<!-- table:measured -->.*<!-- /table:measured -->", lambda _: body, text, flags=re.DOTALL)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m gdpa.bench.readme", description="Write README's tables and docs/results.md from the files in results/."
    ).parse_args()
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text()))
    (ROOT / "docs" / "results.md").write_text(page())


if __name__ == "__main__":
    main()

"""README's measured tables, from the JSON files in results/.

    python -m gdpa.bench.readme          rewrites README.md between its markers

A test fails where README.md differs from what this writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
GPU_RESULTS = ROOT / "results" / "h200-triton.json"
CPU_RESULTS = ROOT / "results" / "cpu-ratio.json"


def gpu_table(report: dict[str, Any]) -> str:
    """TFLOP/s and fraction of the floor, a row for each case, a column for each mode and activation."""
    rows = report["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    columns = list(
        dict.fromkeys((row["mode"], row["activation"]) for row in sorted(rows, key=lambda row: row["mode"] != "forward"))
    )
    cells = {(row["case"], row["mode"], row["activation"]): row for row in rows}
    lines = [
        f"{report['header']['device']}, bf16, B=1152, H=4, D=128, TFLOP/s and in brackets the fraction of the hardware's floor "
        f"([docs/benchmarking.md](docs/benchmarking.md)): `{report['header']['command']}`",
        "",
        "| case | " + " | ".join(f"{mode} {activation}" for mode, activation in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for case in cases:
        figures = [cells[case, *column] for column in columns]
        texts = ["-" if row["ms"] is None else f"{row['tflops']:.0f} [{row['fraction_of_floor']:.2f}]" for row in figures]
        lines.append(f"| {case} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def cpu_table(report: dict[str, Any]) -> str:
    """The CPU backend against padded eager PyTorch."""
    header = report["header"]
    runs = [json.loads(path.read_text())["rows"] for path in sorted(CPU_RESULTS.parent.glob("cpu-ratio*.json"))]
    jagged = [row for rows in runs for row in rows if row["dtype"] == "fp32" and ".." in row["batch"]]
    eager, ratios = [row["padded_ms"] / 1e3 for row in jagged], [row["speedup"] for row in jagged]
    lines = [
        f"CPU ({header['threads']} threads), forward and backward, H=4, D=128, against padded eager PyTorch: `{header['command']}`",
        "",
        f"Padded eager takes millions of page faults, whose cost moves: over the {len(jagged)} fp32 rows of the jagged batch in "
        f"results/cpu-ratio*.json it took {min(eager):.1f} to {max(eager):.1f} s and the speed-up was {min(ratios):.1f} to "
        f"{max(ratios):.1f}.",
        "",
        "| batch | dtype | activation | times as fast | its rounds | extra memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        memory = "-" if row["memory_fraction"] is None else f"{100 * row['memory_fraction']:.1f} %"
        rounds = f"{row['speedup_lowest']:.2f} to {row['speedup_highest']:.2f}"
        lines.append(f"| {row['batch']} | {row['dtype']} | {row['activation']} | {row['speedup']:.2f} | {rounds} | {memory} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """README's text with its measured tables made anew."""
    tables = [gpu_table(json.loads(GPU_RESULTS.read_text())), cpu_table(json.loads(CPU_RESULTS.read_text()))]
    body = "<!-- table:measured -->\n" + "\n\n".join(tables) + "\n<!-- /table:measured -->"
    return re.sub(r"<!-- table:measured -->.*<!-- /table:measured -->", lambda _: body, text, flags=re.DOTALL)


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()

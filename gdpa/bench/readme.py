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
    lines = [
        f"CPU ({header['threads']} threads), forward and backward, H=4, D=128, against padded eager PyTorch: `{header['command']}`",
        "",
        "| batch | dtype | activation | times as fast | extra memory |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        memory = "-" if row["memory_fraction"] is None else f"{100 * row['memory_fraction']:.1f} %"
        lines.append(f"| {row['batch']} | {row['dtype']} | {row['activation']} | {row['speedup']:.2f} | {memory} |")
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

"""One self-contained HTML page: where the figures come from, the picture, and the tables."""

from __future__ import annotations

import base64
import json
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from gdpa.bench import plot
from gdpa.bench.cases import MODES
from gdpa.bench.providers import in_order, is_own, label
from gdpa.bench.report import EXTRAS, Report, Row
from gdpa.bench.tables import describe, duration, figures, legend, rate, size
from gdpa.files import replacing

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 1280px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .5rem 0; } th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #999; font-weight: 600; } tbody tr:nth-child(even) { background: #f6f6f4; }
td.name, th.name { text-align: left; } td.note { text-align: left; white-space: normal; color: #555; font-size: .9em; }
tr.gdpa td { font-weight: 600; } tr.softmax td { color: #666; } tr.empty td { color: #999; } tr.first td { border-top: 1px solid #bbb; }
.facts td { text-align: left; white-space: normal; } .facts td:first-child { color: #666; white-space: nowrap; vertical-align: top; }
img { max-width: 100%; } code { background: #f2f2ef; padding: 0 .25em; overflow-wrap: anywhere; }
p.legend, .size { color: #666; font-size: .9em; }
.wide { overflow-x: auto; }
"""
COLUMNS = ("mode", "provider", "time", "spread", "TFLOP/s", "floor", "/floor", "host", "memory", "error", "note")


def write(report: Report, path: Path) -> None:
    with replacing(path) as partial:
        partial.write_text(page(report))


def page(report: Report) -> str:
    data = report.as_json()
    picture = base64.b64encode(plot.png(report)).decode()
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>gdpa bench: {escape(str(report.header.get('device')))}</title><style>{STYLE}</style></head><body>",
        f"<h1>gdpa bench: {escape(str(report.header.get('device')))}</h1>",
        f'<div class="wide"><img alt="fraction of the floor by case and provider" src="data:image/png;base64,{picture}"></div>',
    ]
    parts += _summaries(report)
    cases = report.header.get("cases", {})
    for (case, activation), group in groupby(report.ordered(), key=lambda row: (row.case, row.activation)):
        parts.append(f"<h2>{escape(case)}, {escape(activation)}</h2>")
        if case in cases:
            parts.append(f'<p class="size">{escape(describe(cases[case]))}</p>')
        parts.append(_table(list(group)))
    for name in EXTRAS:
        if data.get(name):
            parts.append(f"<h2>{name}</h2>{_plain_table(data[name])}")
    parts.append(f'<p class="legend">{"<br>".join(map(escape, legend(report).values()))}</p>')
    parts.append(f"<h2>where this comes from</h2>{_facts(data['header'])}</body></html>")
    return "\n".join(parts) + "\n"


def _summaries(report: Report) -> list[str]:
    """For each mode and activation, a line for each case and a column for each provider."""
    parts = []
    timed = [row for row in report.ordered() if row.ms is not None]
    modes: tuple[str, ...] = MODES
    panels = sorted(dict.fromkeys((row.mode, row.activation) for row in timed), key=lambda pair: modes.index(pair[0]))
    for mode, activation in panels:
        rows = [row for row in timed if (row.mode, row.activation) == (mode, activation)]
        names = in_order(row.provider for row in rows)
        cells = {(row.case, row.provider): f"{figures(row.tflops)} [{_share(row)}]" for row in rows if row.tflops is not None}
        head = "".join(f"<th>{escape(label(name))}</th>" for name in names)
        lines = [
            f'<tr><td class="name">{escape(case)}</td>{"".join(f"<td>{cells.get((case, name), chr(8211))}</td>" for name in names)}</tr>'
            for case in dict.fromkeys(row.case for row in rows)
        ]
        parts.append(f"<h2>{escape(mode)}, {escape(activation)}: TFLOP/s [fraction of the floor]</h2>")
        parts.append(f'<div class="wide"><table><thead><tr><th class=name>case</th>{head}</tr></thead>')
        parts.append(f"<tbody>{''.join(lines)}</tbody></table></div>")
    return parts


def _share(row: Row) -> str:
    return "-" if row.fraction_of_floor is None else f"{row.fraction_of_floor:.2f}"


def _facts(header: dict[str, Any]) -> str:
    lines = []
    for name, value in header.items():
        if name == "cases" or value is None:
            continue
        if name in ("R", "R_rested", "W"):
            value = rate(value)
        elif name == "clocks":
            value = _clocks(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)
        text = escape(value if isinstance(value, str) else json.dumps(value))
        lines.append(f"<tr><td>{escape(name)}</td><td>{f'<code>{text}</code>' if name == 'command' else text}</td></tr>")
    return f'<table class="facts"><tbody>{"".join(lines)}</tbody></table>'


def _clocks(sampled: dict[str, float]) -> str:
    """Medians under load, as nvidia-smi saw them; a figure that it did not give is left out."""
    words = {
        "sm_mhz": "{:.0f} MHz",
        "sm_lowest_mhz": "at the lowest {:.0f}",
        "sm_max_mhz": "at the most {:.0f}",
        "memory_mhz": "memory {:.0f} MHz",
        "power_w": "{:.0f} W",
        "power_limit_w": "limit {:.0f} W",
        "temperature_c": "{:.0f} °C",
        "samples": "{:.0f} samples",
    }
    return ", ".join(form.format(sampled[name]) for name, form in words.items() if sampled.get(name) is not None)


def _table(rows: list[Row]) -> str:
    left = ("mode", "provider", "note")
    head = "".join(f"<th{' class=name' if name in left else ''}>{name}</th>" for name in COLUMNS)
    body = []
    for mode, group in groupby(rows, key=lambda row: row.mode):
        for index, row in enumerate(group):
            kinds = ["first"] if index == 0 else []
            kinds.append(
                "empty"
                if row.ms is None
                else "gdpa"
                if is_own(row.provider)
                else "softmax"
                if label(row.provider) != row.provider
                else "other"
            )
            cells = [
                duration(row.ms),
                "" if row.spread is None else f"{row.spread:.1%}",
                "" if row.tflops is None else f"{row.tflops:.4g}",
                "" if row.floor_ms is None else duration(row.floor_ms),
                "" if row.fraction_of_floor is None else f"{row.fraction_of_floor:.3f}",
                "" if row.host_us is None else f"{row.host_us:.0f} us",
                size(row.peak_bytes),
                "" if row.error is None else f"{row.error:.1e}",
            ]
            names = f'<td class="name">{mode if index == 0 else ""}</td><td class="name">{escape(label(row.provider))}</td>'
            values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            body.append(f'<tr class="{" ".join(kinds)}">{names}{values}<td class="note">{escape(row.note or "")}</td></tr>')
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _plain_table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th class=name>{escape(key)}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f'<td class="name">{escape(_text(value))}</td>' for value in row.values()) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

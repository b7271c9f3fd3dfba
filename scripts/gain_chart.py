"""Draw the gain of HybridSession on CPU cores, one bar a model, those without a gain included.

    python scripts/gain_chart.py [--from-results]

Draws ``docs/img/gain.svg`` and ``docs/img/gain-dark.svg`` from ``docs/data/gain.json``. With ``--from-results``, writes
that file first, from ``docs/data/cpu.json``, which ``scripts/bench_cpu.py -o docs/data`` measures in half an hour on
idle cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from result_files import read_parts

from chrion.common.files import write_atomically

ROOT = Path(__file__).parent.parent
DATA, PICTURES = ROOT / "docs" / "data", ROOT / "docs" / "img"
#: Width of the picture and of its labels, height of a bar with its gap, and of the title.
WIDTH, LABELS, ROW, TOP, BOTTOM = 760, 240, 22, 58, 40
#: The largest value of the axis.
MOST = 1.2
#: Largest ratio that counts as a gain.
GAIN = 0.97


@dataclass(frozen=True)
class Theme:
    """Colours of a picture."""

    text: str
    faint: str
    grid: str
    gain: str
    plain: str


THEMES = {
    "gain": Theme("#1f2328", "#57606a", "#d0d7de", "#1a6fb0", "#8c959f"),
    "gain-dark": Theme("#e6edf3", "#9da7b1", "#3d444d", "#58a6ff", "#768390"),
}


def gains(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return name, ratio and interval of each model in the results of ``bench_cpu.py``; a later table replaces rows."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        columns = part.get("columns", [])
        for cells in part.get("rows", []):
            row = dict(zip(columns, cells, strict=True))
            least, most = (float(text) for text in row["90 %"].split(" to "))
            ratio = float(row["ratio"].strip("*"))
            found[row["model"]] = {"model": row["model"], "ratio": ratio, "interval": [least, most]}
    return sorted(found.values(), key=lambda row: (row["ratio"], row["model"]))


def draw(content: Mapping[str, Any], theme: Theme) -> str:
    """Return the picture."""
    rows = content["models"]
    height = TOP + ROW * len(rows) + BOTTOM
    bottom = TOP + ROW * len(rows)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13">'
        ),
        f"<title>{escape(content['title'])}</title>",
        _text(0, 18, content["title"], theme.text, extra='font-size="15" font-weight="600"'),
        _text(0, 38, content["subtitle"], theme.faint),
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, width = _x(value), 2 if value == 1 else 1
        colour = theme.text if value == 1 else theme.grid
        lines.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="{colour}" stroke-width="{width}" fill="none"/>')
        lines.append(_text(x, bottom + 17, f"{value:g}", theme.faint, extra='text-anchor="middle"'))
    for at, row in enumerate(rows):
        lines += _bar(row, TOP + ROW * at, theme)
    lines.append(_text(0, height - 6, content["note"], theme.faint, extra='font-size="11"'))
    return "\n".join([*lines, "</svg>\n"])


def _bar(row: Mapping[str, Any], y: float, theme: Theme) -> list[str]:
    """Return the label, the bar, the interval and the value of a model."""
    ratio, (least, most) = row["ratio"], row["interval"]
    gain = ratio <= GAIN
    x, middle = _x(ratio), y + ROW / 2
    after = max(x, _x(most)) + 6
    if after < _x(1) < after + 30:
        after = _x(1) + 6  # beside the line at 1
    return [
        _text(LABELS - 10, middle + 4, row["model"], theme.text, extra='text-anchor="end"'),
        (
            f'<rect x="{LABELS}" y="{y + 4}" width="{x - LABELS:.1f}" height="{ROW - 8}" rx="2" '
            f'fill="{theme.gain if gain else theme.plain}"/>'
        ),
        f'<path d="M{_x(least):.1f} {middle}H{_x(most):.1f}" stroke="{theme.text}" stroke-width="1.5" fill="none"/>',
        _text(after, middle + 4, f"{ratio:.2f}", theme.text if gain else theme.faint),
    ]


def _text(x: float, y: float, text: str, colour: str, *, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {extra}>{escape(text)}</text>'


def _x(value: float) -> float:
    return LABELS + (WIDTH - LABELS) * value / MOST


def main() -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-results", action="store_true", help="write docs/data/gain.json first")
    arguments = parser.parse_args()
    path = DATA / "gain.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if arguments.from_results:
        content["models"] = gains(read_parts(DATA, "cpu"))
        write_atomically(path, format_gain(content).encode())
    for name, theme in THEMES.items():
        write_atomically(PICTURES / f"{name}.svg", draw(content, theme).encode())


def format_gain(content: Mapping[str, Any]) -> str:
    """Return the text of the file, one line for each model."""
    models = ",\n  ".join(json.dumps(row) for row in content["models"])
    head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "models")
    return f'{{{head},\n "models": [\n  {models}]}}\n'


if __name__ == "__main__":
    main()

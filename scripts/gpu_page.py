"""Render the result of ``scripts/bench_gpu.py`` as a page.

    python scripts/gpu_page.py gpu.json [-o docs/gpu.md]

Takes a second. Writes the whole page, or prints it without ``-o``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_gpu import SCHEMA
from derive_paper_profile import TABLE_6
from page_markers import markdown_table
from reproduction.table6 import PAPER, reduction_percent

from chrion.common.files import read_json, write_atomically
from chrion.errors import OptionError

PATTERNS = ("gpu", "cpu", "latency-optimal", "memory-optimal")
#: The aims: the paper's best reductions, in percent.
AIM_LATENCY, AIM_MEMORY = 19.4, 67.5

Row = Mapping[str, Any]


def format_number(value: float | None) -> str:
    """Format a number; a missing one is a dash."""
    return "—" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def median(row: Row) -> float | None:
    """Return the median time in ms; None for a candidate that did not run."""
    found: float | None = row.get("median_ms")
    return found


def format_reduction(value: float | None, reference: float | None) -> str:
    """Format the reduction of a value against a reference in percent."""
    return "—" if value is None or not reference else f"{reduction_percent(value, reference):+.1f} %"


def memory_of(pattern: Row) -> float:
    """Return the measured memory in MB, or the predicted resident memory if it was not measured."""
    held: float | None = pattern["measured_mb"]
    return float(pattern["predicted"]["resident_mb"]) if held is None else held


def figures_rows(cases: Mapping[str, Row]) -> Iterator[list[str]]:
    """Yield the table of latency and memory of the four patterns, predicted / measured."""
    yield ["model", "pattern", "ms", "MB, Equation 4", "MB, resident", "MB, measured", "operators on the accelerator"]
    for name, case in cases.items():
        for pattern in PATTERNS:
            row = case[pattern]
            predicted = row["predicted"]
            ms = f"{format_number(predicted['latency_ms'])} / {format_number(median(row['measured']))}"
            memory = (predicted["memory_mb"], predicted["resident_mb"], row["measured_mb"])
            share = f"{row['on_accelerator']} of {row['operators']}"
            yield [name, pattern, ms, *(format_number(mb) for mb in memory), share]


def reduction_rows(cases: Mapping[str, Row]) -> Iterator[list[str]]:
    """Yield the table of reductions of the hybrid patterns against the GPU pattern, measured / the paper's."""
    yield ["model", "latency-optimal, latency", "memory", "memory-optimal, latency", "memory"]
    for name, case in cases.items():
        gpu_ms, gpu_mb = median(case["gpu"]["measured"]), memory_of(case["gpu"])
        cells = []
        for pattern, printed in zip(PATTERNS[2:], (PAPER[name].fastest, PAPER[name].smallest), strict=True):
            ms, mb = median(case[pattern]["measured"]), memory_of(case[pattern])
            measured = (format_reduction(ms, gpu_ms), format_reduction(mb, gpu_mb))
            row = TABLE_6[name]
            published = ("—", "—")
            if printed:
                published = (format_reduction(printed[0], row.gpu_ms), format_reduction(printed[1], row.gpu_mb))
            cells += [f"{a} / {b}" for a, b in zip(measured, published, strict=True)]
        yield [name, *cells]


def user_rows(cases: Mapping[str, Row]) -> Iterator[list[str]]:
    """Yield the table of HybridSession and the plain sessions of the same models."""
    names = list(dict.fromkeys(name for case in cases.values() for name in case["timings"] if name != "hybrid"))
    yield ["LSTM", *(f"{name}, ms" for name in names), "hybrid, ms", "reduction", "MB, plain / hybrid", "chosen"]
    for size, case in cases.items():
        times = {name: median(row) for name, row in case["timings"].items()}
        own = times.pop("hybrid", None)
        best = min((ms for ms in times.values() if ms is not None), default=None)
        held = case["measured_mb"]
        memory = f"{format_number(held['accelerator'])} / {format_number(held['hybrid'])}"
        chosen = "plan" if case["predicted"] else "plain"
        times_ms = [format_number(times.get(name)) for name in names]
        yield [size, *times_ms, format_number(own), format_reduction(own, best), memory, chosen]


def figure10_rows(cases: Mapping[str, Sequence[Row]]) -> Iterator[list[str]]:
    """Yield the table of latency, predicted / measured, and of resident memory by alpha."""
    yield ["alpha, ms/MB", *cases]
    for points in zip(*cases.values(), strict=True):
        cells = []
        for point in points:
            predicted = point["predicted"]
            ms = f"{format_number(predicted['latency_ms'])} / {format_number(median(point['measured']))} ms"
            cells.append(f"{ms}, {format_number(predicted['resident_mb'])} MB")
        yield [f"{points[0]['alpha']:g}", *cells]


def format_aims(parts: Mapping[str, Row]) -> list[str]:
    """Return a line for each aim, latency and memory, that says whether it is reached."""
    gains = {}
    for size, case in parts.get("user", {}).get("cases", {}).items():
        times = {name: ms for name, row in case["timings"].items() if (ms := median(row)) is not None}
        if "hybrid" in times and len(times) > 1:
            gains[size] = reduction_percent(times.pop("hybrid"), min(times.values()))
    saved = {}
    for name, case in parts.get("table6", {}).get("cases", {}).items():
        gpu, small = case["gpu"], case["memory-optimal"]
        ours_ms, gpu_ms = (median(row["measured"]) for row in (small, gpu))
        if ours_ms is not None and gpu_ms is not None and ours_ms <= gpu_ms and memory_of(gpu):
            note = "" if small["on_accelerator"] else ", no operator on the accelerator"
            saved[name + note] = reduction_percent(memory_of(small), memory_of(gpu))
    lines = [
        _format_aim("latency against the best plain session", gains, AIM_LATENCY),
        _format_aim("memory at no more than the GPU's latency", saved, AIM_MEMORY),
    ]
    return [f"- {line}" for line in lines]


def _format_aim(quantity: str, reductions: Mapping[str, float], aim: float) -> str:
    if not reductions:
        return f"{quantity}: not measured (aim: {aim} %)"
    best = max(reductions, key=reductions.__getitem__)
    verb = "reached" if reductions[best] >= aim else "missed"
    return f"{quantity}: at best {reductions[best]:.1f} % less ({best}); aim {aim} %: {verb}"


def format_page(result: Mapping[str, Any]) -> str:
    """Return the page."""
    machine, parts = result["machine"], result["parts"]
    lines = [
        "# On a GPU",
        "",
        f"Written by `scripts/gpu_page.py` from measurements of `scripts/bench_gpu.py` on {machine['cpu']},",
    ]
    lines += [f"{machine['cores']} cores, {result['accelerator']}, onnxruntime {machine['onnxruntime']}."]
    if result["toy"]:
        lines += ["", "**Toy sizes: these figures show that the benchmark runs, and say nothing about speed.**"]
    if result["context_mb"] is None:
        lines += ["", "GPU memory could not be measured; reductions of memory are those of predicted resident memory."]
    lines += ["", "Medians of alternating rounds; inputs and outputs are in host memory for every candidate."]
    lines += ["", *format_aims(parts)]
    tables: dict[str, tuple[tuple[str, Callable[[Any], Iterator[list[str]]]], ...]] = {
        "table6": (
            ("Table 6, predicted / measured", figures_rows),
            ("Reductions, measured / the paper's", reduction_rows),
        ),
        "user": (("Folded models", user_rows),),
        "figure10": (("Figure 10, latency predicted / measured, resident memory", figure10_rows),),
    }
    for part, sections in tables.items():
        cases = parts.get(part, {}).get("cases")
        for title, rows in sections if cases else ():
            lines += ["", f"## {title}", "", markdown_table(rows(cases))]
    for case, row in parts.get("overlap", {}).get("cases", {}).items():
        share = row["both_sides_ms"] / row["latency_ms"] if row["latency_ms"] else 0.0
        ms, predicted_ms = format_number(row["latency_ms"]), format_number(row["predicted_ms"])
        lines += ["", "## Overlap", "", f"{case}: {ms} ms (predicted {predicted_ms} ms);"]
        lines += [f"accelerator and cores compute at the same time for {share:.0%} of it."]
    missing = [f"- {p}, {c}: {why}" for p, row in parts.items() for c, why in row["failed"].items()]
    missing += [f"- {p}, {c}: out of time" for p, row in parts.items() for c in row["left_out"]]
    return "\n".join([*lines, *(["", "## Not measured", "", *missing] if missing else [])]) + "\n"


def main() -> None:
    """Read the result, and write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the JSON file that bench_gpu.py wrote")
    parser.add_argument("-o", "--output", type=Path, help="where to write the page (default: print it)")
    arguments = parser.parse_args()
    page = format_page(read_json(arguments.result, SCHEMA, OptionError))
    if arguments.output:
        write_atomically(arguments.output, page)
    else:
        print(page)


if __name__ == "__main__":
    main()

"""The result of ``scripts/bench_gpu.py`` as a page: ``python scripts/gpu_page.py gpu.json -o docs/gpu.md``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_gpu import SCHEMA
from derive_paper_profile import TABLE_6
from page_markers import markdown_table
from reproduce_table6 import PAPER, less

from chrion.errors import OptionError
from chrion.files import read_json, write_atomically

PATTERNS = ("gpu", "cpu", "latency-optimal", "memory-optimal")
#: What we want to reach: the paper's best reductions, in percent.
AIM_LATENCY, AIM_MEMORY = 19.4, 67.5

Row = Mapping[str, Any]


def number(value: float | None) -> str:
    """A figure, or a dash where there is none."""
    return "—" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def median(row: Row) -> float | None:
    """Of a way that ran; None of one that did not."""
    found: float | None = row.get("median_ms")
    return found


def reduction(value: float | None, reference: float | None) -> str:
    """In percent against a reference."""
    return "—" if value is None or not reference else f"{less(value, reference):+.1f} %"


def memory_of(pattern: Row) -> float:
    """Measured where it could be, or else as an arena is predicted to hold."""
    held: float | None = pattern["measured_mb"]
    return float(pattern["predicted"]["resident_mb"]) if held is None else held


def figures_rows(cases: Mapping[str, Row]) -> Iterator[list[str]]:
    """Latency and memory of the four patterns, predicted / measured."""
    yield ["model", "pattern", "ms", "MB, Equation 4", "MB, resident", "MB, measured", "operators on the accelerator"]
    for name, case in cases.items():
        for pattern in PATTERNS:
            row = case[pattern]
            predicted = row["predicted"]
            ms = f"{number(predicted['latency_ms'])} / {number(median(row['measured']))}"
            memory = (predicted["memory_mb"], predicted["resident_mb"], row["measured_mb"])
            share = f"{row['on_accelerator']} of {row['operators']}"
            yield [name, pattern, ms, *(number(mb) for mb in memory), share]


def reduction_rows(cases: Mapping[str, Row]) -> Iterator[list[str]]:
    """Reductions of the hybrid patterns against the GPU pattern, ours measured / the paper's."""
    yield ["model", "latency-optimal, latency", "memory", "memory-optimal, latency", "memory"]
    for name, case in cases.items():
        gpu_ms, gpu_mb = median(case["gpu"]["measured"]), memory_of(case["gpu"])
        cells = []
        for pattern, printed in zip(PATTERNS[2:], (PAPER[name].fastest, PAPER[name].smallest), strict=True):
            ours = (reduction(median(case[pattern]["measured"]), gpu_ms), reduction(memory_of(case[pattern]), gpu_mb))
            row = TABLE_6[name]
            theirs = ("—", "—")
            if printed:
                theirs = (reduction(printed[0], row.gpu_ms), reduction(printed[1], row.gpu_mb))
            cells += [f"{a} / {b}" for a, b in zip(ours, theirs, strict=True)]
        yield [name, *cells]


def user_rows(cases: Mapping[str, Row]) -> Iterator[list[str]]:
    """HybridSession against the plain sessions of the same model."""
    names = list(dict.fromkeys(name for case in cases.values() for name in case["timings"] if name != "hybrid"))
    yield ["LSTM", *(f"{name}, ms" for name in names), "hybrid, ms", "against the best", "MB, plain / hybrid", "runs"]
    for size, case in cases.items():
        times = {name: median(row) for name, row in case["timings"].items()}
        own = times.pop("hybrid", None)
        best = min((ms for ms in times.values() if ms is not None), default=None)
        held = case["measured_mb"]
        memory = f"{number(held['accelerator'])} / {number(held['hybrid'])}"
        way = "by a plan" if case["predicted"] else "plain"
        yield [size, *(number(times.get(name)) for name in names), number(own), reduction(own, best), memory, way]


def figure10_rows(cases: Mapping[str, Sequence[Row]]) -> Iterator[list[str]]:
    """Latency predicted / measured and resident memory along alpha."""
    yield ["alpha, ms/MB", *cases]
    for points in zip(*cases.values(), strict=True):
        cells = []
        for point in points:
            predicted = point["predicted"]
            ms = f"{number(predicted['latency_ms'])} / {number(median(point['measured']))} ms"
            cells.append(f"{ms}, {number(predicted['resident_mb'])} MB")
        yield [f"{points[0]['alpha']:g}", *cells]


def aims(parts: Mapping[str, Row]) -> list[str]:
    """Whether what we want to reach is reached: one line for latency, one for memory."""
    gains = {}
    for size, case in parts.get("user", {}).get("cases", {}).items():
        times = {name: ms for name, row in case["timings"].items() if (ms := median(row)) is not None}
        if "hybrid" in times and len(times) > 1:
            gains[size] = less(times.pop("hybrid"), min(times.values()))
    saved = {}
    for name, case in parts.get("table6", {}).get("cases", {}).items():
        gpu, small = case["gpu"], case["memory-optimal"]
        ours_ms, gpu_ms = (median(row["measured"]) for row in (small, gpu))
        if ours_ms is not None and gpu_ms is not None and ours_ms <= gpu_ms and memory_of(gpu):
            where = "" if small["on_accelerator"] else ", nothing on the accelerator"
            saved[name + where] = less(memory_of(small), memory_of(gpu))
    what = "latency below the best plain session"
    lines = [_aim(what, gains, AIM_LATENCY), _aim("memory within the GPU's latency", saved, AIM_MEMORY)]
    return [f"- {line}" for line in lines]


def _aim(what: str, found: Mapping[str, float], aim: float) -> str:
    if not found:
        return f"{what}: not measured (aim: {aim} %)"
    best = max(found, key=found.__getitem__)
    verb = "reached" if found[best] >= aim else "missed"
    return f"{what}: at best {found[best]:.1f} % less ({best}); aim {aim} %: {verb}"


def rendered(result: Mapping[str, Any]) -> str:
    """The page."""
    machine, parts = result["machine"], result["parts"]
    lines = [
        "# On a GPU",
        "",
        f"Written by `scripts/gpu_page.py` from what `scripts/bench_gpu.py` measured on {machine['cpu']},",
    ]
    lines += [f"{machine['cores']} cores, {result['accelerator']}, onnxruntime {machine['onnxruntime']}."]
    if result["toy"]:
        lines += ["", "**Toy sizes: this shows that the whole path runs, and nothing about speed.**"]
    if result["context_mb"] is None:
        lines += ["", "GPU memory could not be measured here; reductions of memory are of what is predicted resident."]
    lines += ["", "Medians of alternating turns; inputs and outputs in host memory for every way.", "", *aims(parts)]
    tables: dict[str, tuple[tuple[str, Callable[[Any], Iterator[list[str]]]], ...]] = {
        "table6": (("Table 6, predicted / measured", figures_rows), ("Reductions, ours / the paper's", reduction_rows)),
        "user": (("Folded, as a user would run them", user_rows),),
        "figure10": (("Figure 10, latency predicted / measured, resident memory", figure10_rows),),
    }
    for part, sections in tables.items():
        cases = parts.get(part, {}).get("cases")
        for title, rows in sections if cases else ():
            lines += ["", f"## {title}", "", markdown_table(rows(cases))]
    for case, row in parts.get("overlap", {}).get("cases", {}).items():
        share = row["both_sides_ms"] / row["latency_ms"] if row["latency_ms"] else 0.0
        told = f"{case}: {number(row['latency_ms'])} ms (predicted {number(row['predicted_ms'])} ms); accelerator and "
        lines += ["", "## Overlap", "", f"{told}cores compute at once for {share:.0%} of it."]
    missing = [f"- {p}, {c}: {why}" for p, row in parts.items() for c, why in row["failed"].items()]
    missing += [f"- {p}, {c}: no time left" for p, row in parts.items() for c in row["left_out"]]
    return "\n".join([*lines, *(["", "## Not measured", "", *missing] if missing else [])]) + "\n"


def main() -> None:
    """Read, render, write or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    page = rendered(read_json(arguments.result, SCHEMA, OptionError))
    if arguments.output:
        write_atomically(arguments.output, page)
    else:
        print(page)


if __name__ == "__main__":
    main()

"""Table 6 and Figure 10 of the Chrion paper, planned with the profile that was derived from Table 6.

The tables compare thirteen LSTMs in four patterns with the paper: all operators on the GPU, all on the CPU,
latency-optimal (alpha 0) and memory-optimal (the largest alpha that is no slower than the GPU), planned by the paper's
algorithms. The profile was fitted to the GPU and CPU rows; the two hybrid patterns are predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from derive_paper_profile import BASE_MB, TABLE_6

from chrion import Graph, Plan, Profile, load, partition
from chrion.common.files import bundled_folder
from chrion.report.categories import COLOURS
from chrion.report.figures import new_figure, save_figure
from chrion.scheduler.plan import Prediction
from chrion.zoo import build
from reproduction.results import Tables

#: The policy with the paper's algorithms.
POLICY = "chrion-paper"
ALPHAS = tuple(step / 10 for step in range(11))
#: The baseline and one variant each in batch size, width and length. The paper's captions are illegible in our copy;
#: other variants of Table 6 show the same.
FIGURE_10 = ("lstm-baseline", "lstm-batch-2", "lstm-io-32", "lstm-seq-64")
#: The line of a plan's memory, and those of the plans on one device.
MEMORY_LINE: dict[str, Any] = {"color": COLOURS[1], "marker": "s", "clip_on": False}
GPU_LINE = {"color": COLOURS[5], "linestyle": "--"}
CPU_LINE = {"color": COLOURS[3], "linestyle": "-."}
#: Differences above this are printed in bold, in percentage points of the GPU's latency or memory.
NOTABLE_POINTS = 10.0
#: Assumed slowdown of a cell on the GPU and on a core while both compute, as possible explanations of the table.
SLOWDOWNS = ((1.0, 1.0), (1.0, 1.4), (1.4, 1.0), (1.4, 1.4), (1.6, 1.2), (1.8, 1.2), (1.8, 1.6))


@dataclass(frozen=True)
class Hybrid:
    """The printed hybrid patterns of one column of Table 6, in ms and MB; None if it prints none."""

    fastest: tuple[float, float]
    smallest: tuple[float, float] | None


PAPER = {
    "lstm-baseline": Hybrid((52.0, 948.1), (58.4, 629.0)),
    "lstm-layers-4": Hybrid((21.2, 525.0), None),
    "lstm-layers-8": Hybrid((36.8, 833.0), (36.8, 833.0)),
    "lstm-layers-16": Hybrid((71.1, 1189.0), (77.3, 675.0)),  # 77.3 reads "713" in our copy; 1.0 % less says 77.3
    "lstm-batch-1": Hybrid((48.2, 959.0), (57.2, 607.0)),
    "lstm-batch-2": Hybrid((47.6, 935.0), (55.8, 591.0)),
    "lstm-batch-4": Hybrid((55.7, 1053.0), (55.7, 1053.0)),
    "lstm-batch-16": Hybrid((67.5, 623.0), None),
    "lstm-io-32": Hybrid((52.4, 927.0), (55.8, 581.0)),
    "lstm-io-128": Hybrid((72.0, 875.0), None),
    "lstm-seq-32": Hybrid((18.8, 609.0), (18.8, 609.0)),
    "lstm-seq-64": Hybrid((34.2, 757.0), (39.1, 533.0)),
    "lstm-seq-128": Hybrid((82.1, 707.0), None),
}


@dataclass(frozen=True)
class Patterns:
    """The predictions for one model in the four patterns."""

    name: str
    gpu: Prediction
    cpu: Prediction
    fastest: Prediction
    smallest: Prediction


def plan_patterns(name: str, profile: Profile) -> Patterns:
    """Plan a model in all four patterns."""
    graph = load(build(name))
    fastest = partition(graph, profile, policy=POLICY)
    assert fastest.accelerator_only is not None  # noqa: S101 - the profile has an accelerator
    assert fastest.cpu_only is not None  # noqa: S101 - and cores
    smallest = partition(graph, profile, slo=fastest.accelerator_only.latency_ms, policy=POLICY)
    return Patterns(name, fastest.accelerator_only, fastest.cpu_only, fastest.predicted, smallest.predicted)


def reduction_percent(value: float, reference: float) -> float:
    """Return the reduction of a value against a reference in percent, as Table 6 prints it."""
    return (1 - value / reference) * 100


def main_rows(found: Sequence[Patterns]) -> Iterator[list[str]]:
    """Yield Table 6, ours / the paper's, in ms and MB; the columns that the profile was fitted to are named."""
    fitted = [f"{column} (fitted)" for column in ("GPU, ms", "GPU, MB", "CPU, ms")]
    hybrid = [f"{pattern}, {unit}" for pattern in ("latency-optimal", "memory-optimal") for unit in ("ms", "MB")]
    yield ["model", *fitted, *hybrid]
    for p in found:
        row, theirs = TABLE_6[p.name], PAPER[p.name]
        plain = (p.gpu.latency_ms, p.gpu.memory_mb, p.cpu.latency_ms)
        ours = (*plain, p.fastest.latency_ms, p.fastest.memory_mb, p.smallest.latency_ms, p.smallest.memory_mb)
        printed = (row.gpu_ms, row.gpu_mb, row.cpu_ms, *theirs.fastest, *(theirs.smallest or (None, None)))
        cells = zip(ours, printed, strict=True)
        yield [p.name, *(f"{a:.1f}/{'—' if b is None else f'{b:.1f}'}" for a, b in cells)]


def hybrid_rows(found: Sequence[Patterns], pattern: str) -> Iterator[list[str]]:
    """Yield the table of a hybrid pattern: latency, memory and reductions, ours / the paper's, and differences."""
    yield ["model", "ms", "MB", "latency reduction", "memory reduction", "points, latency", "points, memory"]
    for p in found:
        ours: Prediction = getattr(p, pattern)
        theirs: tuple[float, float] | None = getattr(PAPER[p.name], pattern)
        row = TABLE_6[p.name]
        own = (
            reduction_percent(ours.latency_ms, p.gpu.latency_ms),
            reduction_percent(ours.memory_mb, p.gpu.memory_mb),
        )
        if theirs is None:
            figures = [f"{ours.latency_ms:.1f} / —", f"{ours.memory_mb:.1f} / —"]
            yield [p.name, *figures, *(f"{x:.1f} % / —" for x in own), "", ""]
            continue
        printed = reduction_percent(theirs[0], row.gpu_ms), reduction_percent(theirs[1], row.gpu_mb)
        cells = [f"{ours.latency_ms:.1f} / {theirs[0]:.1f}", f"{ours.memory_mb:.1f} / {theirs[1]:.1f}"]
        cells += [f"{a:.1f} % / {b:.1f} %" for a, b in zip(own, printed, strict=True)]
        points = [a - b for a, b in zip(own, printed, strict=True)]
        yield [p.name, *cells, *(f"**{x:+.1f}**" if abs(x) > NOTABLE_POINTS else f"{x:+.1f}" for x in points)]


def slow_down(profile: Profile, gpu: float, cpu: float) -> Profile:
    """Return the profile with all operators slower by a factor on the GPU and on the cores."""
    operators = {
        s: replace(o, accelerator_ms=(o.accelerator_ms or 0.0) * gpu, cpu_ms=tuple(ms * cpu for ms in o.cpu_ms))
        for s, o in profile.operators.items()
    }
    return replace(profile, operators=operators, _estimators={})


def slowdown_rows(profile: Profile) -> Iterator[list[str]]:
    """Yield the table of mean differences between the printed plans and latency-optimal plans on slower devices."""
    yield ["cells on the GPU", "cells on a core", "latency difference", "memory difference", "the baseline, ms", "MB"]
    graphs = {name: load(build(name)) for name in PAPER}
    for gpu, cpu in SLOWDOWNS:
        machine = slow_down(profile, gpu, cpu)
        found = {name: partition(graph, machine, policy=POLICY).predicted for name, graph in graphs.items()}
        latency = mean(abs(p.latency_ms / PAPER[n].fastest[0] - 1) for n, p in found.items())
        memory = mean(abs(p.memory_mb - PAPER[n].fastest[1]) / TABLE_6[n].gpu_mb for n, p in found.items())
        base = found["lstm-baseline"]
        figures = (f"{latency:.1%}", f"{memory:.1%} of the GPU's", f"{base.latency_ms:.1f}", f"{base.memory_mb:.0f}")
        yield [f"x {gpu}", f"x {cpu}", *figures]


def share_rows(found: Sequence[Patterns]) -> Iterator[list[str]]:
    """Yield the table of what the printed memory implies: share of cells on the GPU, and time of each device."""
    yield [
        "model",
        "cells on the GPU, ours / the paper's",
        "GPU busy, ms",
        "CPU busy, ms",
        "sum",
        "printed",
        "overlapped",
    ]
    for p in found:
        row, (printed_ms, printed_mb) = TABLE_6[p.name], PAPER[p.name].fastest
        theirs = (printed_mb - BASE_MB) / (row.gpu_mb - BASE_MB)
        ours = (p.fastest.memory_mb - BASE_MB) / (p.gpu.memory_mb - BASE_MB)
        gpu, cpu = theirs * row.gpu_ms, (1 - theirs) * row.cpu_ms
        overlapped = (gpu + cpu - printed_ms) / min(gpu, cpu)
        figures = (f"{gpu:.1f}", f"{cpu:.1f}", f"{gpu + cpu:.1f}", f"{printed_ms:.1f}", f"{overlapped:.0%}")
        yield [p.name, f"{ours:.0%} / {theirs:.0%}", *figures]


def sweep_alpha(name: str, profile: Profile) -> list[tuple[float, Plan]]:
    """Plan a model for alpha from 0 to 1 by the paper's algorithms."""
    graph: Graph = load(build(name))
    return [(alpha, partition(graph, profile, alpha=alpha, policy=POLICY)) for alpha in ALPHAS]


def critical_alpha(name: str, profile: Profile) -> float:
    """Return the largest alpha, in steps of 0.01, whose plan is no slower than the GPU."""
    graph = load(build(name))
    plans = [partition(graph, profile, alpha=step / 100, policy=POLICY) for step in range(101)]
    gpu = plans[0].accelerator_only
    assert gpu is not None  # noqa: S101 - the profile has an accelerator
    return max(plan.alpha for plan in plans if plan.predicted.latency_ms <= gpu.latency_ms)


def figure10_rows(curves: Sequence[Sequence[tuple[float, Plan]]]) -> Iterator[list[str]]:
    """Yield the table of latency and memory by alpha, with a column for each model."""
    yield ["alpha, ms/MB", *(name.removeprefix("lstm-") for name in FIGURE_10)]
    for at, alpha in enumerate(ALPHAS):
        figures = (curve[at][1].predicted for curve in curves)
        yield [f"{alpha:.1f}", *(f"{p.latency_ms:.1f} ms, {p.memory_mb:.0f} MB" for p in figures)]


def draw_figure10(names: Sequence[str], curves: Sequence[Sequence[tuple[float, Plan]]], path: Path) -> None:
    """Draw latency and memory over alpha, with the latencies of the GPU and CPU patterns as horizontal lines."""
    figure = new_figure(9, 6)
    for axes, name, curve in zip(figure.subplots(2, 2).flat, names, curves, strict=True):
        alphas, plans = zip(*curve, strict=True)
        memory = axes.twinx()
        axes.plot(alphas, [p.predicted.latency_ms for p in plans], "o-", color=COLOURS[0], label="latency")
        memory.plot(alphas, [p.predicted.memory_mb for p in plans], **MEMORY_LINE, label="memory (Eq. 4)")
        if plans[0].accelerator_only is not None:
            axes.axhline(plans[0].accelerator_only.latency_ms, **GPU_LINE, label="latency, all on the GPU")
        if plans[0].cpu_only is not None:
            axes.axhline(plans[0].cpu_only.latency_ms, **CPU_LINE, label="latency, all on the CPU")
        axes.set_title(name, fontsize=10)
        axes.set(xlabel="alpha, ms/MB", ylabel="latency, ms", ylim=(0, None))
        memory.set(ylabel="memory, MB", ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        for either in (axes, memory):
            either.spines["top"].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    of_memory, names_of_memory = memory.get_legend_handles_labels()
    entries = ([handles[0], *of_memory, *handles[1:]], [labels[0], *names_of_memory, *labels[1:]])
    figure.legend(*entries, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


def paper_profile() -> Profile:
    """Return the profile of the paper's machine."""
    return Profile.load(bundled_folder("profiles") / "gtx1080ti-paper.json")


def table6() -> Tables:
    """Return Table 6, the reductions of its hybrid patterns, and what explains the differences."""
    profile = paper_profile()
    found = [plan_patterns(name, profile) for name in TABLE_6]
    return {
        "table6": list(main_rows(found)),
        "table6 latency-optimal": list(hybrid_rows(found, "fastest")),
        "table6 memory-optimal": list(hybrid_rows(found, "smallest")),
        "table6 shares": list(share_rows(found)),
        "table6 slower devices": list(slowdown_rows(profile)),
    }


def figure10(picture: Path | None) -> Tables:
    """Draw Figure 10 if there is a file for it, and return its points and the critical alpha of the baseline."""
    profile = paper_profile()
    curves = [sweep_alpha(name, profile) for name in FIGURE_10]
    if picture:
        draw_figure10(FIGURE_10, curves, picture)
    critical = [["model", "critical alpha, ms/MB", "paper's"]]
    critical.append(["lstm-baseline", f"{critical_alpha('lstm-baseline', profile):.2f}", "0.3"])
    return {"figure10": list(figure10_rows(curves)), "figure10 critical alpha": critical}

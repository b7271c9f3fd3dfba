"""Results of Orca's end-to-end experiment: latency against throughput, and throughputs at equal latencies.

Yu et al., *Orca* (OSDI 2022), section 6.2 and Figure 10: the median latency of a request divided by its generated
tokens, against the throughput, for several greatest batches.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chrion.generation.scheduling import POLICIES
from chrion.report.figures import new_figure, save_figure
from chrion.report.simulation_plots import line_style
from decoding.load import Costs, IterationTotals, scaled_lengths

#: Latencies at which throughputs are compared, relative to the least one of iteration-level scheduling.
FACTORS = (2.0, 4.0)
#: Model, scale, policy, greatest batch and target.
Load = tuple[str, int, str, int, float]
_FEATURES = ("features", "prompt_features")
HEAD = (
    *("weights", "prompt, new tokens", "latency per token", "max batch"),
    *("iteration-level, requests/s", "request-level", "ratio", "simulated ratio"),
)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What the clients of one run have seen, or the median of several runs."""

    #: The name of the model, and the number by which Orca's lengths are divided.
    model: str
    scale: int
    policy: str
    max_batch: int
    #: What determined the rate: a latency relative to that of a single request, or the rate itself if it was given.
    target: float
    offered_per_s: float
    #: Requests of the run.
    requests: int
    #: Determines the requests; of several runs, that of the first one.
    seed: int
    requests_per_s: float
    #: The median over requests of the latency per generated token.
    ms_per_token: float
    #: Totals over the iterations of a measured run.
    iterations: IterationTotals | None = None

    @property
    def workload(self) -> tuple[str, int]:
        """The model and the lengths."""
        return self.model, self.scale

    @property
    def load(self) -> Load:
        """What the runs have in common whose results are compared by medians."""
        return *self.workload, self.policy, self.max_batch, self.target


@dataclass(frozen=True, slots=True)
class Reading:
    """A throughput that is read off a curve at a latency."""

    requests_per_s: float
    #: True if the curve ends below the latency, so that the throughput is a lower bound.
    bound: bool


def append_point(path: Path, point: LoadPoint) -> None:
    """Add a point to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(point)) + "\n")


def read_points(path: Path) -> list[LoadPoint]:
    """Return the points of a file, one for each run."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [LoadPoint(**row | {"iterations": _totals(row["iterations"])}) for row in rows]


def _totals(row: dict[str, Any] | None) -> IterationTotals | None:
    return None if row is None else IterationTotals(row["time_ms"], *(tuple(row[name]) for name in _FEATURES))


def normalise_speed(run: LoadPoint, costs: Costs) -> LoadPoint:
    """Scale a run to a machine whose iterations take as long as the costs state, on average over the run.

    If all iterations and all times between arrivals take x times as long, rates are divided by x, and latencies are
    multiplied by it.

    Args:
        run: A run; without totals of its iterations it is returned as it is.
        costs: Costs of iterations without and with prompts.
    """
    if run.iterations is None:
        return run
    slowdown = run.iterations.slowdown(costs)
    return replace(
        run,
        offered_per_s=run.offered_per_s * slowdown,
        requests_per_s=run.requests_per_s * slowdown,
        ms_per_token=run.ms_per_token / slowdown,
        iterations=None,
    )


def median_points(runs: Iterable[LoadPoint]) -> list[LoadPoint]:
    """Return the medians over runs of each load: of rates, throughputs and latencies."""
    loads: dict[Load, list[LoadPoint]] = {}
    for run in runs:
        loads.setdefault(run.load, []).append(run)
    medians = ("offered_per_s", "requests_per_s", "ms_per_token")
    return [
        replace(
            found[0],
            **{name: statistics.median(getattr(run, name) for run in found) for name in medians},
            iterations=None,
        )
        for found in loads.values()
    ]


def throughput_at(curve: Sequence[LoadPoint], ms_per_token: float) -> Reading | None:
    """Return the throughput of a curve at a latency, or None if all of its latencies are greater.

    Args:
        curve: Points of one model, policy and greatest batch.
        ms_per_token: The latency. Between two points the throughput is interpolated linearly.
    """
    ordered = sorted(curve, key=lambda point: point.offered_per_s)
    within = [at for at, point in enumerate(ordered) if point.ms_per_token <= ms_per_token]
    if not within:
        return None
    low = ordered[within[-1]]
    if within[-1] == len(ordered) - 1:
        return Reading(low.requests_per_s, bound=True)
    high = ordered[within[-1] + 1]
    share = (ms_per_token - low.ms_per_token) / (high.ms_per_token - low.ms_per_token)
    return Reading(low.requests_per_s + share * (high.requests_per_s - low.requests_per_s), bound=False)


def table_rows(points: Sequence[LoadPoint], simulated: Sequence[LoadPoint] = ()) -> list[tuple[str, ...]]:
    """Return the throughputs of both policies at equal latencies: by workload and greatest batch, and the best.

    Args:
        points: Measured points.
        simulated: Simulated ones, whose ratios at the same latencies stand beside the measured ones.
    """
    rows: list[tuple[str, ...]] = [HEAD]
    for workload in dict.fromkeys(point.workload for point in points):
        own, others = ([point for point in some if point.workload == workload] for some in (points, simulated))
        for factor in FACTORS:
            latency = factor * latency_alone(own)
            head = (workload[0], format_lengths(workload[1]), f"{latency:.1f} ms")
            expected = readings(others, latency)
            for batch, found in readings(own, latency).items():
                ratio = _cells(*expected[batch])[-1] if batch in expected else "-"
                rows.append((*head, batch, *_cells(*found), ratio))
    return rows


def latency_alone(points: Sequence[LoadPoint]) -> float:
    """Return the least latency of iteration-level scheduling."""
    return min(p.ms_per_token for p in points if p.policy == "iteration")


def readings(points: Sequence[LoadPoint], ms_per_token: float) -> dict[str, tuple[Reading | None, Reading | None]]:
    """Return the throughputs of both policies at a latency, by greatest batch and for the best one."""
    found: dict[str, tuple[Reading | None, Reading | None]] = {}
    for batch in sorted({point.max_batch for point in points}):
        curves = ([p for p in points if (p.policy, p.max_batch) == (policy, batch)] for policy in POLICIES)
        ours, theirs = (throughput_at(curve, ms_per_token) for curve in curves)
        found[str(batch)] = (ours, theirs)
    if found:
        ours, theirs = (_best(several) for several in zip(*found.values(), strict=True))
        found["best"] = (ours, theirs)
    return found


def format_lengths(scale: int) -> str:
    """Return the ranges of prompts and outputs."""
    lengths = scaled_lengths(scale)
    return ", ".join(f"{lengths[f'{name}_least']} to {lengths[f'{name}_most']}" for name in ("prompt", "new"))


def _best(readings: Iterable[Reading | None]) -> Reading | None:
    return max((r for r in readings if r is not None), key=lambda r: r.requests_per_s, default=None)


def _cells(ours: Reading | None, theirs: Reading | None) -> tuple[str, str, str]:
    texts = [
        "none" if reading is None else f"{'at least ' if reading.bound else ''}{reading.requests_per_s:.1f}"
        for reading in (ours, theirs)
    ]
    if ours is None or theirs is None or (ours.bound and theirs.bound):
        return texts[0], texts[1], "-"
    limit = "at least " if ours.bound else "at most " if theirs.bound else ""
    return texts[0], texts[1], f"{limit}{ours.requests_per_s / theirs.requests_per_s:.2f}"


def plot(points: Sequence[LoadPoint], path: Path) -> None:
    """Draw latency against throughput, a panel for each workload, with the legend below all of them."""
    workloads = list(dict.fromkeys(point.workload for point in points))
    figure = new_figure(4.2 * len(workloads), 3.8)
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axes, workload in zip(panels, workloads, strict=True):
        own = [point for point in points if point.workload == workload]
        for at, policy in enumerate(POLICIES):
            for line, batch in enumerate(sorted({point.max_batch for point in own})):
                curve = sorted(
                    (p for p in own if p.policy == policy and p.max_batch == batch), key=lambda p: p.offered_per_s
                )
                axes.plot(
                    [point.requests_per_s for point in curve],
                    [point.ms_per_token for point in curve],
                    **line_style(at, line),
                    label=f"{policy}-level, max batch {batch}",
                )
        axes.set_title(f"{workload[0]}, {format_lengths(workload[1])} tokens", fontsize=9)
        axes.set_yscale("log")
        axes.yaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel("throughput, requests/s")
        axes.set_ylabel("median latency per token, ms")
        handles |= {line.get_label(): line for line in axes.get_lines() if line.get_label() not in handles}
    entries = handles.values(), list(handles)
    figure.legend(*entries, loc="outside lower center", ncols=2, fontsize=7, frameon=False, borderpad=1)
    save_figure(figure, path)

"""Results of Orca's end-to-end experiment: latency against throughput, and throughputs at equal latencies.

Yu et al., *Orca* (OSDI 2022), section 6.2 and Figure 10: the median latency of a request divided by its generated
tokens, against the throughput, for several max batches. Policies are compared in each repetition by itself, whose
runs follow each other, and the medians of these comparisons are reported.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chrion.generation.scheduling import POLICIES
from chrion.report.figures import new_figure, save_figure
from chrion.report.simulation_plots import line_style
from decoding.code_version import check_version
from decoding.load import Costs, IterationTotals, scaled_lengths

#: Latencies at which throughputs are compared, relative to the minimum of iteration-level scheduling.
FACTORS = (2.0, 4.0)
#: Model, scale, policy, max batch and target.
Load = tuple[str, int, str, int, float]
_FEATURES = ("features", "prompt_features")
HEAD = (
    *("weights", "latency per token", "max batch"),
    *("iteration-level, requests/s", "request-level", "ratio", "at equal speed", "simulated"),
)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The view of the clients of one run, or the median of several runs."""

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
    #: Determines the requests, and stands for a repetition; of several runs, that of the first one.
    seed: int
    requests_per_s: float
    #: The median over requests of the latency per generated token.
    ms_per_token: float
    #: Totals over the iterations of a measured run.
    iterations: IterationTotals | None = None
    #: The machine of a measured run, and the version of onnxruntime.
    machine: str = ""
    #: The version of the code that measured it, by :func:`decoding.code_version.code_version`.
    code: str = ""

    @property
    def workload(self) -> tuple[str, int]:
        """The model and the lengths."""
        return self.model, self.scale

    @property
    def load(self) -> Load:
        """What the runs have in common whose results are compared by medians."""
        return *self.workload, self.policy, self.max_batch, self.target


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a figure, which are equal if it is known."""

    low: float
    high: float

    @property
    def known(self) -> bool:
        """Return whether the figure is known."""
        return self.low == self.high

    def over(self, other: Interval) -> Interval:
        """Return the bounds of the quotient of two figures that are not negative."""
        return Interval(self.low / other.high, self.high / other.low if other.low else math.inf)

    @classmethod
    def median(cls, intervals: Sequence[Interval]) -> Interval:
        """Return the bounds of the median of figures."""
        return cls(*(statistics.median(getattr(one, bound) for one in intervals) for bound in ("low", "high")))

    def format(self, digits: int, *, significant: bool = False) -> str:
        """Return it as text; ``-`` if nothing is known.

        Args:
            digits: Digits after the point.
            significant: Round to so many significant digits instead.
        """
        low, high = (
            f"{float(f'{bound:.{digits}g}'):g}" if significant else f"{bound:.{digits}f}"
            for bound in (self.low, self.high)
        )
        if low == high:
            return low
        if math.isinf(self.high):
            return f"at least {low}" if self.low else "-"
        return f"{low} to {high}" if self.low else f"at most {high}"


def append_point(path: Path, point: LoadPoint) -> None:
    """Add a point to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(point)) + "\n")


def read_points(path: Path) -> list[LoadPoint]:
    """Return the points of a file, one for each run.

    Raises:
        OptionError: They were measured with several versions of the code.
    """
    check_version(path)
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [LoadPoint(**row | {"iterations": _totals(row["iterations"])}) for row in rows]


def measured_on(runs: Iterable[LoadPoint]) -> str:
    """Return the machines of measured runs, and the version of the code."""
    found = {(run.machine or "an unknown machine") + (f", Chrion {run.code}" if run.code else "") for run in runs}
    return "; ".join(sorted(found))


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


def throughput_at(curve: Sequence[LoadPoint], ms_per_token: float) -> Interval:
    """Return the throughput of a curve at a latency.

    Between two points it is interpolated linearly. A curve that ends below the latency gives a lower bound, and one
    whose latencies are all greater an upper bound.

    Args:
        curve: Points of one model, policy and max batch.
        ms_per_token: The latency.
    """
    ordered = sorted(curve, key=lambda point: point.offered_per_s)
    within = [at for at, point in enumerate(ordered) if point.ms_per_token <= ms_per_token]
    if not within:
        return Interval(0.0, ordered[0].requests_per_s if ordered else math.inf)
    low = ordered[within[-1]]
    if within[-1] == len(ordered) - 1:
        return Interval(low.requests_per_s, math.inf)
    high = ordered[within[-1] + 1]
    share = (ms_per_token - low.ms_per_token) / (high.ms_per_token - low.ms_per_token)
    found = low.requests_per_s + share * (high.requests_per_s - low.requests_per_s)
    return Interval(found, found)


def table_rows(
    runs: Sequence[LoadPoint],
    normalised: Sequence[LoadPoint] = (),
    simulated: Sequence[LoadPoint] = (),
    significant: int = 0,
) -> list[tuple[str, ...]]:
    """Return the throughputs of both policies at equal latencies: by workload and max batch, and the best.

    All figures are medians over repetitions, ratios as well.

    Args:
        runs: Measured runs.
        normalised: The same at equal speed, by :func:`normalise_speed`.
        simulated: The latter simulated.
        significant: Significant digits of throughputs and ratios; 0 for one digit and two digits after the point.
    """
    rounded = {"significant": significant > 0}
    rows: list[tuple[str, ...]] = [HEAD]
    for workload in dict.fromkeys(run.workload for run in runs):
        own, scaled, others = (
            [run for run in some if run.workload == workload] for some in (runs, normalised, simulated)
        )
        for factor in FACTORS:
            latencies, at_equal_speed = (equal_latencies(some, factor) for some in (own, scaled))
            found = readings(own, latencies)
            beside = (readings(some, at_equal_speed) for some in (scaled, others))
            ratios = [
                {batch: _median_ratio(pairs).format(significant or 2, **rounded) for batch, pairs in some.items()}
                for some in (found, *beside)
            ]
            head = (workload[0], f"{statistics.median(latencies.values()):.1f} ms")
            for batch, pairs in found.items():
                throughputs = (
                    Interval.median(several).format(significant or 1, **rounded) for several in zip(*pairs, strict=True)
                )
                rows.append((*head, batch, *throughputs, *(some.get(batch, "-") for some in ratios)))
    return rows


def summary_rows(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the ratios of a table by :func:`table_rows`, as measured and at equal speed, for some max batches."""
    batches = {"8": "max batch 8", "32": "max batch 32", "best": "best batches"}
    found: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for weights, latency, batch, *_, measured, at_equal_speed, _ in rows[1:]:
        found.setdefault((weights, latency), {})[batch] = measured, at_equal_speed
    columns = (f"{title}, {kind}" for title in batches.values() for kind in ("measured", "at equal speed"))
    head = ("weights", "latency per token", *columns)
    lines = ((*key, *(cell for batch in batches for cell in own.get(batch, ("-", "-")))) for key, own in found.items())
    return [head, *lines]


def equal_latencies(runs: Sequence[LoadPoint], factor: float) -> dict[int, float]:
    """Return by seed the latency at which throughputs are compared.

    Args:
        runs: Runs of one workload.
        factor: The latency relative to the minimum of iteration-level scheduling in the same repetition.
    """
    minima: dict[int, float] = {}
    for run in runs:
        if run.policy == "iteration":
            minima[run.seed] = min(run.ms_per_token, minima.get(run.seed, math.inf))
    return {seed: factor * latency for seed, latency in minima.items()}


def readings(runs: Sequence[LoadPoint], latencies: Mapping[int, float]) -> dict[str, list[tuple[Interval, Interval]]]:
    """Return throughputs at equal latencies, by max batch and for the best one: of both policies, for each seed.

    Args:
        runs: Runs of one workload.
        latencies: The latency of each seed.
    """
    found: dict[str, list[tuple[Interval, Interval]]] = {}
    for seed, latency in latencies.items():
        own = [run for run in runs if run.seed == seed]
        pairs: list[tuple[Interval, Interval]] = []
        for batch in sorted({run.max_batch for run in own}):
            curves = ([p for p in own if (p.policy, p.max_batch) == (policy, batch)] for policy in POLICIES)
            ours, theirs = (throughput_at(curve, latency) for curve in curves)
            pairs.append((ours, theirs))
            found.setdefault(str(batch), []).append(pairs[-1])
        if pairs:
            ours, theirs = (_best(several) for several in zip(*pairs, strict=True))
            found.setdefault("best", []).append((ours, theirs))
    return found


def workload_lengths(workloads: Iterable[tuple[str, int]]) -> str:
    """Return the lengths of workloads, for the caption of a table."""
    texts = [f"{model}: {format_lengths(scale)}" for model, scale in dict.fromkeys(workloads)]
    return f"Tokens of prompts and outputs: {'; '.join(texts)}."


def format_lengths(scale: int) -> str:
    """Return the ranges of prompts and outputs."""
    lengths = scaled_lengths(scale)
    return ", ".join(f"{lengths[f'{name}_least']} to {lengths[f'{name}_most']}" for name in ("prompt", "new"))


def _best(several: Sequence[Interval]) -> Interval:
    return Interval(max(one.low for one in several), max(one.high for one in several))


def _median_ratio(pairs: Iterable[tuple[Interval, Interval]]) -> Interval:
    return Interval.median([ours.over(theirs) for ours, theirs in pairs])


def plot(points: Sequence[LoadPoint], path: Path) -> None:
    """Draw latency against throughput, a panel for each workload, with the legend below all of them."""
    workloads = list(dict.fromkeys(point.workload for point in points))
    figure = new_figure(4.2 * len(workloads), 4.6)
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
        prompts, outputs = format_lengths(workload[1]).split(", ")
        axes.set_title(f"{workload[0]}: prompts of {prompts},\noutputs of {outputs} tokens", fontsize=11)
        axes.set_yscale("log")
        axes.yaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("throughput, requests/s")
        axes.set_ylabel("median latency per token, ms")
        handles |= {line.get_label(): line for line in axes.get_lines() if line.get_label() not in handles}
    entries = handles.values(), list(handles)
    figure.legend(*entries, loc="outside lower center", ncols=4, fontsize=9, frameon=False, handlelength=3.5)
    save_figure(figure, path)

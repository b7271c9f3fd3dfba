"""Large clusters by sampling: a few of many equal cells are simulated.

The servers and the models are divided into cells, each with nearly the same share of the requests; a model that many
requests ask for is in several cells, and a pinned one in all of them. Cells that are chosen at random are a sample of
all cells, so the figures of the cluster have an interval (Student's t). It has no correction for a finite number of
cells, since the figures of each are those of one random run. What the interval does not contain is the effect of the
division itself: a request cannot be routed to a server of another cell. Larger cells show how much it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from msgspec import structs

from chrion.common.wrong_values import wrong_value
from chrion.errors import ScenarioError
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.planned import request_counts
from chrion.serving.simulator.results import COST
from chrion.serving.simulator.scenario import Scenario, ScenarioSource
from chrion.serving.simulator.sweep import intervals, run_tasks, simulate_built
from chrion.serving.simulator.workload import ClassifiedWorkload, MinuteReplay, SyntheticWorkload, Workload

CELLS_SCHEMA = "chrion.simulation-cells/1"
#: The largest part of the mean of a cell's requests that one model has; loads of cells differ by no more (a choice,
#: not measured).
_LARGEST_PART = 0.25


def build_cell(source: ScenarioSource, cells: int, index: int) -> Scenario:
    """Return the scenario of one cell.

    Raises:
        ScenarioError: A group of servers, or the models, cannot be divided into so many cells, or the workload cannot.
    """
    scenario = source.build()
    for size in scenario.groups:
        if size % cells:
            expected = f"a divisor of the number of servers of each group, {size}"
            raise wrong_value("--cells", expected, cells, failure=ScenarioError)
    if len(scenario.models) < cells or scenario.autoscaling:
        expected = f"at most the number of models, {len(scenario.models)}, and no autoscaling"
        raise wrong_value("--cells", expected, cells, failure=ScenarioError)
    groups = tuple(size // cells for size in scenario.groups)
    for spec in scenario.domains:
        if any(size % spec.size for size in groups):
            expected = f"cells of whole domains of {spec.size} servers"
            raise wrong_value("--cells", expected, cells, failure=ScenarioError)
    store = scenario.store
    firsts = np.cumsum([0, *scenario.groups[:-1]]).tolist()
    servers = [scenario.servers[first] for first, size in zip(firsts, groups, strict=True) for _ in range(size)]
    weights = request_counts(scenario.workload, len(scenario.models))
    pinned = [i for i, model in enumerate(scenario.models) if model.spec.pinned]
    chosen = divide(weights.tolist(), cells, pinned)[index]
    return replace(
        scenario,
        servers=tuple(servers),
        groups=groups,
        store=structs.replace(store, gb_per_s=store.gb_per_s / cells) if store else None,
        models=tuple(scenario.models[i] for i in chosen),
        workload=_part(scenario.workload, chosen, scenario.seed + index),
        seed=scenario.seed + index,
    )


def divide(weights: Sequence[float], cells: int, everywhere: Collection[int] = ()) -> list[dict[int, float]]:
    """Return the models of each cell, ascending, with the parts of their requests that it serves.

    A model with more than :data:`_LARGEST_PART` of a cell's mean weight is divided equally, into as few parts as have
    no more. The parts go one after another, in falling order of weight, to the lightest cell: the sums differ by at
    most the weight of one part (Graham's longest processing time first).

    Args:
        weights: The weight of each model.
        cells: The number of cells.
        everywhere: Models that are divided among all cells: every server holds them.
    """
    largest = max(sum(weights) / cells * _LARGEST_PART, 1e-300)
    common = frozenset(everywhere)
    numbers = {at: max(1, min(cells, math.ceil(w / largest))) for at, w in enumerate(weights) if at not in common}
    found: list[dict[int, float]] = [dict.fromkeys(everywhere, 1 / cells) for _ in range(cells)]
    heap = [(0.0, cell) for cell in range(cells)]
    for model in sorted(numbers, key=lambda model: -weights[model] / numbers[model]):
        for _ in range(numbers[model]):
            total, cell = heap[0]
            found[cell][model] = found[cell].get(model, 0.0) + 1 / numbers[model]
            heapq.heapreplace(heap, (total + weights[model] / numbers[model], cell))
    return [dict(sorted(own.items())) for own in found]


def sample_cells(
    source: ScenarioSource,
    cells: int,
    number: int,
    *,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, dict[str, Interval]]:
    """Return the figures of a cluster, estimated from some of its cells, by pattern and name.

    Args:
        source: The scenario of the whole cluster.
        cells: The number of cells.
        number: The number of cells to simulate.
        workers: Number of processes.
        progress: Called with the number of cells that are done.

    Raises:
        OptionError: There are not so many cells, or fewer than two.
        ScenarioError: The scenario cannot be divided.
    """
    if not 2 <= number <= cells:
        raise wrong_value("--replications", f"cells to simulate, from 2 to {cells}", number)
    scenario = source.build()
    order = np.random.default_rng([scenario.seed, cells]).permutation(cells)[:number].tolist()
    builds = [partial(build_cell, source, cells, index) for index in order]
    builds[0]()  # refuses what cannot be divided before the work begins
    simulated = run_tasks(simulate_built, builds, workers=workers, progress=progress)
    return {
        pattern: {name: _scaled(entry, cells if name == COST else 1) for name, entry in figures.items()}
        for pattern, figures in intervals(simulated).items()
    }


def _scaled(entry: Interval, factor: int) -> Interval:
    return Interval(entry.mean * factor, entry.half_width * factor)


def _part(workload: Workload, parts: Mapping[int, float], seed: int) -> Workload:
    """Return the parts of the requests for some models."""
    if isinstance(workload, ClassifiedWorkload):
        return replace(workload, whole=_part(workload.whole, parts, seed), seed=seed)
    if isinstance(workload, SyntheticWorkload):
        chances = workload.chances[list(parts)] * list(parts.values())
        share = float(chances.sum())
        return replace(
            workload,
            requests=max(1, round(workload.requests * share)),
            rate_per_s=workload.rate_per_s * share,
            chances=chances / share,
            seed=seed,
        )
    if isinstance(workload, MinuteReplay):
        places = {model: place for place, model in enumerate(parts)}
        models = workload.models.tolist()
        counts = workload.counts * np.array([[parts.get(model, 0.0)] for model in models])
        return replace(workload, counts=counts, models=np.array([places.get(model, 0) for model in models]), seed=seed)
    raise ScenarioError("--cells: the requests cannot be divided: expected a synthetic workload, or counts by minute")

"""Large clusters by sampling: a few of many equal cells are simulated.

The servers and the models are divided into cells, each with nearly the same share of the requests. Cells that are
chosen at random are a sample of all cells, so the figures of the cluster have an interval (Student's t). It has no
correction for a finite number of cells, since the figures of each are those of one random run. Cells whose shares
differ are refused, since the mean over cells would not be that over requests. What the interval does not contain is the
effect of the division itself: a request cannot be routed to a server of another cell. Larger cells show how much it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chrion.common.wrong_values import wrong_value
from chrion.errors import ScenarioError
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.planned import request_counts
from chrion.serving.simulator.replications import COST, intervals
from chrion.serving.simulator.request_classes import ClassifiedWorkload
from chrion.serving.simulator.scenario import Scenario, ScenarioSource
from chrion.serving.simulator.sweep import SweepPoint, run_tasks
from chrion.serving.simulator.workload import MinuteReplay, SyntheticWorkload, Workload

CELLS_SCHEMA = "chrion.simulation-cells/1"
#: The largest ratio of a cell's requests to the mean over cells (a choice, not measured).
_MOST_SHARE = 1.25


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a scenario."""

    source: ScenarioSource
    cells: int
    index: int

    def build(self) -> Scenario:
        """Return the scenario of the cell.

        Raises:
            ScenarioError: A group of servers, or the models, cannot be divided into so many cells, or the workload
                cannot.
        """
        scenario = self.source.build()
        for size in scenario.groups:
            if size % self.cells:
                expected = f"a divisor of the number of servers of each group, {size}"
                raise wrong_value("--cells", expected, self.cells, failure=ScenarioError)
        if len(scenario.models) < self.cells or scenario.autoscaling:
            expected = f"at most the number of models, {len(scenario.models)}, and no autoscaling"
            raise wrong_value("--cells", expected, self.cells, failure=ScenarioError)
        groups = tuple(size // self.cells for size in scenario.groups)
        firsts = np.cumsum([0, *scenario.groups[:-1]]).tolist()
        servers = [scenario.servers[first] for first, size in zip(firsts, groups, strict=True) for _ in range(size)]
        weights = request_counts(scenario.workload, len(scenario.models))
        chosen = divide(weights.tolist(), self.cells)[self.index]
        return replace(
            scenario,
            servers=tuple(servers),
            groups=groups,
            models=tuple(scenario.models[i] for i in chosen),
            workload=_part(scenario.workload, chosen, scenario.seed + self.index),
            seed=scenario.seed + self.index,
        )


def divide(weights: Sequence[float], cells: int) -> list[list[int]]:
    """Return the models of each cell, ascending: one after another in falling order of weight, to the lightest cell.

    The sums differ by at most the weight of one model (Graham's longest processing time first).
    """
    heap = [(0.0, cell) for cell in range(cells)]
    found: list[list[int]] = [[] for _ in range(cells)]
    for model in sorted(range(len(weights)), key=lambda model: -weights[model]):
        total, cell = heap[0]
        found[cell].append(model)
        heapq.heapreplace(heap, (total + weights[model], cell))
    return [sorted(own) for own in found]


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
        ScenarioError: The scenario cannot be divided, or not into cells of about equal requests.
    """
    if not 2 <= number <= cells:
        raise wrong_value("--replications", f"cells to simulate, from 2 to {cells}", number)
    scenario = source.build()
    order = np.random.default_rng([scenario.seed, cells]).permutation(cells)[:number].tolist()
    tasks = [Cell(source, cells, index) for index in order]
    tasks[0].build()  # refuses what cannot be divided before the work begins
    _check_shares(scenario, cells)
    points = [SweepPoint({}, 0, found) for found in run_tasks(tasks, workers=workers, progress=progress)]
    return {
        pattern: {name: _scaled(entry, cells if name == COST else 1) for name, entry in figures.items()}
        for pattern, figures in intervals(points).items()
    }


def _check_shares(scenario: Scenario, cells: int) -> None:
    """Raise an error if a cell has far more requests than others, or none.

    Raises:
        ScenarioError: One has.
    """
    weights = request_counts(scenario.workload, len(scenario.models))
    shares = [float(weights[own].sum() * cells / weights.sum()) for own in divide(weights.tolist(), cells)]
    if max(shares) > _MOST_SHARE or min(shares) < 1 / _MOST_SHARE:
        expected = f"fewer: the requests of a cell would be {min(shares):.2f} to {max(shares):.2f} times the mean"
        raise wrong_value("--cells", expected, cells, failure=ScenarioError)


def _scaled(entry: Interval, factor: int) -> Interval:
    return Interval(entry.mean * factor, entry.half_width * factor)


def _part(workload: Workload, models: Sequence[int], seed: int) -> Workload:
    """Return the requests for some models."""
    if isinstance(workload, ClassifiedWorkload):
        return replace(workload, whole=_part(workload.whole, models, seed), seed=seed)
    if isinstance(workload, SyntheticWorkload):
        chances = workload.chances[list(models)]
        share = float(chances.sum())
        return replace(
            workload,
            requests=max(1, round(workload.requests * share)),
            rate_per_s=workload.rate_per_s * share,
            chances=chances / share,
            seed=seed,
        )
    if isinstance(workload, MinuteReplay):
        places = {model: place for place, model in enumerate(models)}
        own = np.array([places.get(model, -1) for model in workload.models.tolist()])
        counts = np.where(own[:, np.newaxis] >= 0, workload.counts, 0)
        return replace(workload, counts=counts, models=np.maximum(own, 0), seed=seed)
    raise ScenarioError("--cells: the requests cannot be divided: expected a synthetic workload, or counts by minute")

"""The exact optimum of small graphs, by constraint programming: what the other policies are measured against.

Interval scheduling in OR-Tools CP-SAT with the cost definition of ``timeline.evaluate``, every operator a segment:
an optional interval for each operator and lane, no overlap on a lane, and for each edge a transfer time that depends on
both lanes. Times are whole numbers of a resolution that keeps rounding below a ten-thousandth of the makespan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from chrion.errors import OptionError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.timeline import evaluate

#: Larger graphs are refused: the solver would not end.
_MOST_OPERATORS = 40
_TICKS = 100_000
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best schedule found, and how much better another could be."""

    schedule: Schedule
    #: No schedule is faster than this.
    lower_bound_ms: float
    #: Whether the schedule is proven optimal.
    proven: bool


def exact(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """The schedule with the least latency, at the best number of cores.

    Raises:
        OptionError: The graph is too large, alpha is not 0, or OR-Tools is missing.
    """
    if alpha:
        raise OptionError("policy exact: it minimises latency alone", hint="leave --alpha out")
    alone = costs.accelerator_ms is not None and math.inf not in costs.accelerator_ms
    counts = range(0 if alone else 1, costs.cores + 1)
    found = [solve(dag, costs, cores).schedule for cores in counts]
    return min(found, key=lambda schedule: evaluate(dag, costs, schedule).latency_ms)


def solve(dag: Dag, costs: Costs, cores: int, *, limit_s: float = _LIMIT_S) -> Optimum:
    """The least latency on the accelerator, if there is one, and ``cores`` CPU lanes.

    Args:
        dag: A graph of at most 40 operators.
        costs: The machine's costs.
        cores: CPU lanes in use, which decides their speed.
        limit_s: Time after which the best so far has to do.

    Raises:
        OptionError: The graph is too large, or OR-Tools is missing.
    """
    if len(dag) > _MOST_OPERATORS:
        raise OptionError(f"policy exact: {len(dag)} operators are more than the {_MOST_OPERATORS} it can solve")
    if not len(dag):
        return Optimum(Schedule((), (), cores), 0.0, proven=True)
    return _Model(dag, costs, cores).solve(limit_s)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise OptionError("policy exact: OR-Tools is missing", hint="pip install 'chrion[exact]'") from error
    return cp_model


class _Model:
    """The constraint model of one graph on one set of lanes."""

    def __init__(self, dag: Dag, costs: Costs, cores: int) -> None:
        self.dag, self.costs, self.cores = dag, costs, cores
        self.cp = _cp_model()
        self.model = self.cp.CpModel()
        lanes = range(cores + 1)
        times = [costs.lane_ms(lane, cores) for lane in lanes]
        self.length = [
            [ms[i] + costs.dispatch_ms if math.isfinite(ms[i]) else None for ms in times] for i in range(len(dag))
        ]
        serial = sum(min(ms for ms in row if ms is not None) for row in self.length)
        moves = sum(
            self._transfer(m, i, 0, 1) + self._transfer(m, i, 1, 0)
            for i in range(len(dag))
            for m in dag.predecessors[i]
        )
        horizon_ms = serial + moves + costs.handoff_ms * len(dag) + 1e-9
        self.tick_ms = horizon_ms / _TICKS
        self.start = [self.model.new_int_var(0, 2 * _TICKS, f"s{i}") for i in range(len(dag))]
        self.end = [self.model.new_int_var(0, 2 * _TICKS, f"e{i}") for i in range(len(dag))]
        self.on = [[self._assignment(i, lane) for lane in lanes] for i in range(len(dag))]
        self._constrain()

    def _assignment(self, i: int, lane: int) -> Any:
        """Whether an operator is on a lane."""
        literal = self.model.new_bool_var(f"x{i},{lane}")
        if self.length[i][lane] is None:
            self.model.add(literal == 0)
        return literal

    def _constrain(self) -> None:
        rows: list[list[Any]] = [[] for _ in range(self.cores + 1)]
        for i, literals in enumerate(self.on):
            self.model.add_exactly_one(literals)
            for lane, literal in enumerate(literals):
                ms = self.length[i][lane]
                if ms is not None:
                    ticks = round(ms / self.tick_ms)
                    name = f"i{i},{lane}"
                    rows[lane].append(
                        self.model.new_optional_interval_var(self.start[i], ticks, self.end[i], literal, name)
                    )
        for row in rows:
            self.model.add_no_overlap(row)
        for i in range(len(self.dag)):
            for m in self.dag.predecessors[i]:
                self._precede(m, i)
        self.makespan = self.model.new_int_var(0, 2 * _TICKS, "makespan")
        self.model.add_max_equality(self.makespan, self.end)
        self.model.minimize(self.makespan)
        if self.cores > 1:  # CPU lanes are alike: the first operator on one of them is on the first
            self.model.add(self.on[self.dag.topological_order[0]][1] >= self.on[self.dag.topological_order[0]][2])

    def _precede(self, before: int, after: int) -> None:
        for source, here in enumerate(self.on[before]):
            for target, there in enumerate(self.on[after]):
                delay = 0 if source == target else round(self._transfer(before, after, source, target) / self.tick_ms)
                self.model.add(self.start[after] >= self.end[before] + delay).only_enforce_if([here, there])

    def _transfer(self, before: int, after: int, source: int, target: int) -> float:
        size = self.dag.edge_bytes[after][self.dag.predecessors[after].index(before)]
        return self.costs.transfer_ms(source, target, size)

    def solve(self, limit_s: float) -> Optimum:
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(self.model)
        if status not in {self.cp.OPTIMAL, self.cp.FEASIBLE}:
            raise OptionError(f"policy exact: no schedule found in {limit_s:g} s")
        n = len(self.dag)
        lanes = tuple(next(j for j, x in enumerate(self.on[i]) if solver.value(x)) for i in range(n))
        position = {i: at for at, i in enumerate(self.dag.topological_order)}
        order = sorted(range(n), key=lambda i: (solver.value(self.start[i]), position[i]))
        bound = solver.best_objective_bound * self.tick_ms
        return Optimum(Schedule(tuple(order), lanes, self.cores), bound, status == self.cp.OPTIMAL)

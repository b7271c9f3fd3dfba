"""Exact optimum of small graphs, by constraint programming: the reference for the other policies.

Interval scheduling in OR-Tools CP-SAT with the evaluator's definition of cost. Every operator is a segment of its own.
The model has an optional interval for each operator and place (a lane, or several if costs have widths), no overlap on
a lane, a handoff for each edge between CPU lanes and wherever a lane uses another one's core, and copies on lanes of
their own, including those of the request's inputs and outputs. Times are integers of a resolution that keeps rounding
below a ten-thousandth of the makespan. The duration of an operator does not depend on the order, so weight reloads
(:mod:`chrion.scheduler.evaluation.weight_cache`) are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chrion.common.installation import install_hint
from chrion.errors import OptionError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule

#: Larger graphs are refused: the solver would not terminate.
_MOST_OPERATORS = 40
#: With more cores, only lanes of one core each are considered: constraints grow with the square of the places.
_MOST_CORES_WIDE = 8
_TICKS = 100_000
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best schedule found, with a lower bound on the latency of any schedule."""

    schedule: Schedule
    lower_bound_ms: float
    #: True if the schedule is proven optimal.
    proven: bool


def exact(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Return the schedule with the least latency on all lanes.

    Raises:
        OptionError: The graph is too large, alpha is not 0, OR-Tools is missing, or no schedule is found in time.
    """
    if alpha:
        raise OptionError("alpha: policy exact minimises latency alone", hint="leave it out")
    return solve(dag, costs, costs.cores).schedule


def solve(dag: Dag, costs: Costs, cores: int, *, limit_s: float = _LIMIT_S) -> Optimum:
    """Return the schedule with the least latency on the accelerator, if there is one, and ``cores`` CPU lanes.

    Args:
        dag: A graph of at most 40 operators.
        costs: The machine's costs.
        cores: Number of CPU lanes, which determines their speed.
        limit_s: Time limit, after which the best schedule so far is returned.

    Raises:
        OptionError: The graph is too large, OR-Tools is missing, or no schedule is found in time.
    """
    if len(dag) > _MOST_OPERATORS:
        raise OptionError(f"policy exact solves graphs of at most {_MOST_OPERATORS} operators; this one has {len(dag)}")
    if not len(dag):
        return Optimum(Schedule((), (), cores), 0.0, proven=True)
    return _Model(dag, costs, cores).solve(limit_s)


def or_tools() -> Any:
    """Import OR-Tools, which is optional.

    Raises:
        OptionError: It is not installed.
    """
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise OptionError("policy exact needs OR-Tools, which is not installed", hint=install_hint("exact")) from error
    return cp_model


@dataclass(frozen=True, slots=True)
class _Place:
    """A lane, and the number of lanes from it on that an operator occupies."""

    lane: int
    width: int

    def shares_core(self, other: _Place) -> bool:
        """Return True if no two operators can run in both places at the same time."""
        return self.lane < other.lane + other.width and other.lane < self.lane + self.width


@dataclass(frozen=True, slots=True)
class _Copy:
    """Variables of one copy: start, end, and True if it is made at all."""

    start: Any
    end: Any
    made: Any


class _Model:
    """The constraint model of one graph on one set of lanes."""

    def __init__(self, dag: Dag, costs: Costs, cores: int) -> None:
        if cores > _MOST_CORES_WIDE:
            costs = costs.without_widths()
        self.dag, self.costs, self.cores = dag, costs, cores
        self.cp = or_tools()
        self.model = self.cp.CpModel()
        #: The accelerator, then the CPU lanes, then places on several of them.
        self.places = [_Place(lane, 1) for lane in range(cores + 1)]
        self.places += [_Place(at, w) for w in costs.widths for at in range(1, cores - w + 2)]
        self.length = [[self._length_ms(i, place) for place in self.places] for i in range(len(dag))]
        serial = sum(min(ms for ms in row if ms is not None) for row in self.length)
        moves = sum(costs.upload.ms(size) + costs.download.ms(size) for size in dag.value_bytes)
        moves += sum(costs.upload.ms(size) for size, _ in dag.request_inputs)
        horizon_ms = serial + moves + (costs.handoff_ms + costs.wake_ms) * len(dag) + 1e-9
        self.tick_ms = horizon_ms / _TICKS
        self.start = [self.model.new_int_var(0, 2 * _TICKS, f"s{i}") for i in range(len(dag))]
        self.end = [self.model.new_int_var(0, 2 * _TICKS, f"e{i}") for i in range(len(dag))]
        #: Position of each operator in the order: variables if there are copies, whose order depends on it.
        self.position: Sequence[Any] = [0] * len(dag)
        self.on = [[self._assignment(i, at) for at in range(len(self.places))] for i in range(len(dag))]
        self._constrain()

    def _length_ms(self, i: int, place: _Place) -> float | None:
        """Return the time of an operator in a place with its dispatch; None if it is not supported there."""
        costs = self.costs
        if place.width > 1:
            return costs.core_ms(i, place.width, self.cores) + costs.dispatch_ms + costs.wake_ms
        ms = costs.lane_ms(place.lane, self.cores)[i]
        return ms + costs.dispatch_ms if math.isfinite(ms) else None

    def _assignment(self, i: int, at: int) -> Any:
        """Return the variable that is true if an operator is in a place."""
        literal = self.model.new_bool_var(f"x{i},{at}")
        if self.length[i][at] is None:
            self.model.add(literal == 0)
        return literal

    def _intervals(self) -> list[list[Any]]:
        """Add an optional interval for each operator and place; return those of each lane."""
        rows: list[list[Any]] = [[] for _ in range(self.cores + 1)]
        for i, literals in enumerate(self.on):
            self.model.add_exactly_one(literals)
            for at, (place, literal) in enumerate(zip(self.places, literals, strict=True)):
                ms = self.length[i][at]
                if ms is not None:
                    ticks = round(ms / self.tick_ms)
                    interval = self.model.new_optional_interval_var(
                        self.start[i], ticks, self.end[i], literal, f"i{i},{at}"
                    )
                    for lane in range(place.lane, place.lane + place.width):
                        rows[lane].append(interval)
        return rows

    def _constrain(self) -> None:
        """Add all constraints and the objective."""
        for row in self._intervals():
            self.model.add_no_overlap(row)
        for i in range(len(self.dag)):
            for m in self.dag.predecessors[i]:
                self._precede(m, i)
        if len(self.places) > self.cores + 1:
            for i, j in itertools.combinations(range(len(self.dag)), 2):
                self._pass_cores(i, j)
        self.makespan = self.model.new_int_var(0, 2 * _TICKS, "makespan")
        for end in self.end:
            self.model.add(self.makespan >= end)
        if self.costs.accelerator_ms is not None and (
            self.cores or self.dag.request_inputs or self.dag.request_outputs
        ):
            self._constrain_copies()
        self.model.minimize(self.makespan)
        if self.cores > 1 and len(self.places) == self.cores + 1:  # lanes are alike: the first one is never on lane 2
            self.model.add(self.on[self.dag.topological_order[0]][1] >= self.on[self.dag.topological_order[0]][2])

    def _precede(self, before: int, after: int) -> None:
        """Constrain an edge: ``after`` starts when ``before`` has ended, on another CPU lane a handoff later."""
        self.model.add(self.start[after] >= self.end[before])
        delay = round(self.costs.handoff_ms / self.tick_ms)
        if delay:
            cpu = range(1, len(self.places))
            for source, target in itertools.permutations(cpu, 2):
                if self.places[source].lane != self.places[target].lane:
                    together = [self.on[before][source], self.on[after][target]]
                    self.model.add(self.start[after] >= self.end[before] + delay).only_enforce_if(together)

    def _pass_cores(self, i: int, j: int) -> None:
        """Constrain two operators whose places share a core: one is first, and the other waits for the handoff."""
        first = self.model.new_bool_var(f"c{i},{j}")
        for a, b in itertools.product(range(1, len(self.places)), repeat=2):
            one, other = self.places[a], self.places[b]
            if one.lane == other.lane or not one.shares_core(other):
                continue
            both = [self.on[i][a], self.on[j][b]]
            after_i, after_j = (round(self._delay_ms(place) / self.tick_ms) for place in (one, other))
            self.model.add(self.start[j] >= self.end[i] + after_i).only_enforce_if([first, *both])
            self.model.add(self.start[i] >= self.end[j] + after_j).only_enforce_if([first.negated(), *both])

    def _delay_ms(self, place: _Place) -> float:
        """Return how long after an operator's end another lane may use its cores."""
        return self.costs.handoff_ms + (self.costs.wake_ms if place.width > 1 else 0.0)

    def _constrain_copies(self) -> None:
        """Add copies: an optional interval for each value and direction, in the order of the operators that make them.

        That order is the schedule's, so it is a variable as well: each operator has a position in it, after those of
        its predecessors and of the operators that run before it on its lane.
        """
        n = len(self.dag)
        self.position = [self.model.new_int_var(0, n - 1, f"p{i}") for i in range(n)]
        inputs_copied = self._copy_inputs()
        for i in range(n):
            for m in self.dag.predecessors[i]:
                self.model.add(self.position[i] > self.position[m])
        copies = {(i, up): self._copies(i, upload=up) for i in range(n) for up in (True, False)}
        for i in range(n):
            for copy in copies[i, True]:
                self.model.add(copy.start >= inputs_copied)
        for i, j in itertools.combinations(range(n), 2):
            first = self.model.new_bool_var(f"b{i},{j}")
            self._in_order(i, j, first, copies)
            self._in_order(j, i, first.negated(), copies)

    def _copy_inputs(self) -> Any:
        """Add the copies of the request's inputs, one after another; return the end of the last."""
        end: Any = 0
        for at, (size, readers) in enumerate(self.dag.request_inputs):
            made = self.model.new_bool_var(f"b{at}")
            end += round(self.costs.upload.ms(size) / self.tick_ms) * made
            for reader in readers:
                on_device = self.on[reader][0]
                self.model.add_implication(on_device, made)
                self.model.add(self.start[reader] >= end).only_enforce_if(on_device)
        return end

    def _in_order(self, i: int, j: int, holds: Any, copies: Mapping[tuple[int, bool], Sequence[_Copy]]) -> None:
        """Add the constraints that hold if operator ``i`` precedes ``j`` in the order."""
        self.model.add(self.position[i] < self.position[j]).only_enforce_if(holds)
        for a, b in itertools.product(range(len(self.places)), repeat=2):
            if self.places[a].shares_core(self.places[b]):
                self.model.add(self.start[j] >= self.end[i]).only_enforce_if([holds, self.on[i][a], self.on[j][b]])
        for upload in (True, False):
            for before, after in itertools.product(copies[i, upload], copies[j, upload]):
                both = [holds, before.made, after.made]
                self.model.add(after.start >= before.end).only_enforce_if(both)

    def _copies(self, i: int, *, upload: bool) -> list[_Copy]:
        """Add the copies of the values of operator ``i`` in one direction, one after another."""
        cost = self.costs.upload if upload else self.costs.download
        on_device = [literals[0] for literals in self.on]
        made: list[_Copy] = []
        for value, readers in self.dag.output_values[i]:
            name = f"{'u' if upload else 'd'}{value}"
            start, end = (self.model.new_int_var(0, 2 * _TICKS, f"{name}{side}") for side in "se")
            copy = _Copy(start, end, self.model.new_bool_var(name))
            self.model.add(copy.end == copy.start + round(cost.ms(self.dag.value_bytes[value]) / self.tick_ms))
            self.model.add(copy.start >= self.end[i])
            for before in made:
                self.model.add(copy.start >= before.end).only_enforce_if([before.made, copy.made])
            own = on_device[i].negated() if upload else on_device[i]
            for reader in readers:
                other = on_device[reader] if upload else on_device[reader].negated()
                self.model.add_bool_or([own.negated(), other.negated(), copy.made])
                self.model.add(self.start[reader] >= copy.end).only_enforce_if([own, other])
            if not upload and (i, value) in self.dag.request_outputs:
                self.model.add_implication(own, copy.made)
                self.model.add(self.makespan >= copy.end).only_enforce_if(copy.made)
            made.append(copy)
        return made

    def solve(self, limit_s: float) -> Optimum:
        """Solve the model."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(self.model)
        if status not in {self.cp.OPTIMAL, self.cp.FEASIBLE}:
            raise OptionError(f"policy exact found no schedule within {limit_s:g} s")
        n = len(self.dag)
        chosen = [self.places[next(at for at, x in enumerate(self.on[i]) if solver.value(x))] for i in range(n)]
        widths = tuple(place.width for place in chosen)
        position = {i: at for at, i in enumerate(self.dag.topological_order)}
        ordered = [solver.value(variable) for variable in self.position]
        # Of operators that start together on a core, all but the last take no time.
        times = [(solver.value(self.start[i]), solver.value(self.end[i])) for i in range(n)]
        order = sorted(range(n), key=lambda i: (ordered[i], *times[i], position[i]))
        bound = solver.best_objective_bound * self.tick_ms
        lanes = tuple(place.lane for place in chosen)
        schedule = Schedule(tuple(order), lanes, self.cores, widths=widths if max(widths) > 1 else ())
        return Optimum(schedule, bound, status == self.cp.OPTIMAL)

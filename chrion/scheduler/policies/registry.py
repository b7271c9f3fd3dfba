"""Schedulers by name: functions from a graph and its costs to a schedule and how it is cut."""

from __future__ import annotations

from collections.abc import Callable

from chrion.errors import OptionError, ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.policies.chrion import Planner
from chrion.scheduler.policies.device_selection import select_devices
from chrion.scheduler.policies.exact import exact
from chrion.scheduler.policies.heft import heft
from chrion.scheduler.policies.one_device import (
    greedy_schedule,
    ios_schedule,
    nimble_schedule,
    opara_schedule,
    wavefront_schedule,
)
from chrion.scheduler.policies.orders import bfs_order, dfs_order, hybrid_order
from chrion.scheduler.schedule import Schedule

#: Made once for a graph and its costs; from alpha (ms per MB) to a solution.
Solver = Callable[[float], Solution]
Policy = Callable[[Dag, Costs], Solver]

DEFAULT_POLICY = "chrion"
#: The one that may also merge operators, where it is given a model and not only its graph of operators.
MERGING_POLICY = "ios"


def _plain(schedule: Callable[[Dag, Costs, float], Schedule]) -> Policy:
    """A policy that only decides order and lanes; it is cut without delaying anything."""

    def policy(dag: Dag, costs: Costs) -> Solver:
        problem = Problem(dag, costs)

        def solve(alpha: float) -> Solution:
            found = schedule(dag, costs, alpha)
            return problem.place(found, origin=schedule.__name__)

        return solve

    return policy


def chrion_paper(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Algorithm 1, then Algorithm 2, as printed."""
    return select_devices(dag, costs, hybrid_order(dag, costs), alpha).schedule


def breadth_first(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Algorithm 2 on the breadth-first order."""
    return select_devices(dag, costs, bfs_order(dag), alpha).schedule


def depth_first(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Algorithm 2 on the depth-first order."""
    return select_devices(dag, costs, dfs_order(dag), alpha).schedule


def cpu_only(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """The paper's schedule with the CPU cores alone, at the core count that suits the graph best."""
    return chrion_paper(dag, costs.without_accelerator(), alpha)


def accelerator_only(dag: Dag, costs: Costs, alpha: float) -> Schedule:  # noqa: ARG001 - a policy takes alpha
    """Everything on the accelerator; what it cannot run on one CPU core, as onnxruntime would place it."""
    if costs.accelerator_ms is None:
        raise ScheduleError("policy accelerator: the profile has no accelerator", hint="choose policy cpu")
    lanes = tuple(int(ms == float("inf")) for ms in costs.accelerator_ms)
    return Schedule(hybrid_order(dag, costs), lanes, max(lanes, default=0))


def heft_best(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """HEFT, at the number of cores with the least L + alpha * M."""
    problem = Problem(dag, costs)
    counts = range(0 if costs.accelerator_ms is not None else 1, costs.cores + 1)
    found = [heft(dag, costs, cores, alpha=alpha) for cores in counts]
    solutions = [problem.place(s) for s in found]
    return min(solutions, key=lambda s: s.cost(alpha)).schedule


POLICIES: dict[str, Policy] = {
    "chrion": Planner,
    "chrion-paper": _plain(chrion_paper),
    "accelerator": _plain(accelerator_only),
    "cpu": _plain(cpu_only),
    "bfs": _plain(breadth_first),
    "dfs": _plain(depth_first),
    "heft": _plain(heft_best),
    "exact": _plain(exact),
    MERGING_POLICY: _plain(ios_schedule),
    "nimble": _plain(nimble_schedule),
    "opara": _plain(opara_schedule),
    "wavefront": _plain(wavefront_schedule),
    "greedy": _plain(greedy_schedule),
}


def policy_named(name: str) -> Policy:
    """Look a policy up.

    Raises:
        OptionError: There is none of that name.
    """
    if name not in POLICIES:
        raise OptionError(f"policy: there is none named {name!r}", hint=f"one of {', '.join(POLICIES)}")
    return POLICIES[name]

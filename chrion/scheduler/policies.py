"""Schedulers by name: functions from a graph and its costs to a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chrion.errors import OptionError, ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.greedy import select_devices
from chrion.scheduler.order import bfs_order, dfs_order, hybrid_order
from chrion.scheduler.timeline import Schedule

#: From the graph, its costs and alpha (ms per MB) to a schedule.
Policy = Callable[[Dag, Costs, float], Schedule]


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


POLICIES: dict[str, Policy] = {
    "chrion-paper": chrion_paper,
    "accelerator": accelerator_only,
    "cpu": cpu_only,
    "bfs": breadth_first,
    "dfs": depth_first,
}


def policy_named(name: str) -> Policy:
    """Look a policy up.

    Raises:
        OptionError: There is none of that name.
    """
    if name not in POLICIES:
        raise OptionError(f"policy: there is none named {name!r}", hint=f"one of {_listed(list(POLICIES))}")
    return POLICIES[name]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)

"""Registry of schedulers: the built-in policies, and those that installed packages add.

Most policies are functions of a graph, its costs and alpha that return a schedule. To add one here, write it in a file
of this folder and add a line to the table below. A package adds one by an entry point in the group ``chrion.policies``:
its name is the policy's name, its object the function, and the first line of the function's docstring the description.
See ``docs/adding-a-scheduler.md``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from chrion.common.suggestions import did_you_mean
from chrion.errors import OptionError, ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.chrion import search_variants
from chrion.scheduler.policies.chrion_paper import breadth_first, chrion_paper, depth_first
from chrion.scheduler.policies.core_counts import sampled_counts, usable_counts
from chrion.scheduler.policies.cpop import cpop
from chrion.scheduler.policies.exact import exact, or_tools
from chrion.scheduler.policies.heft import heft
from chrion.scheduler.policies.ios_merging import ios, merged_variants
from chrion.scheduler.policies.nimble import nimble
from chrion.scheduler.policies.opara import opara
from chrion.scheduler.policies.partial_offload import first_fit, last_layers
from chrion.scheduler.policies.peft import peft
from chrion.scheduler.policies.policy import Policy, ScheduleFunction, SchedulePolicy, SolutionPolicy
from chrion.scheduler.policies.single_device import accelerator_only, cpu_only
from chrion.scheduler.policies.stages import greedy, wavefront
from chrion.scheduler.schedule import Schedule, validate

#: Entry points of this group add policies.
ENTRY_POINT_GROUP = "chrion.policies"


_BUILT_IN: tuple[Policy, ...] = (
    SolutionPolicy(
        "chrion",
        "Default: local search over placements, orders and chunk lengths.",
        search_variants,
        weighs_memory=True,
    ),
    SchedulePolicy("chrion-paper", "The Chrion paper's order and device selection.", chrion_paper, weighs_memory=True),
    SchedulePolicy("accelerator", "Every operator on the accelerator.", accelerator_only),
    SchedulePolicy("cpu", "The paper's device selection on the CPU cores alone.", cpu_only),
    SolutionPolicy("first-fit", "onnxruntime's way: operators in order until the memory is full.", first_fit),
    SolutionPolicy("layers", "llama.cpp's way: the last layers that fit into the accelerator.", last_layers),
    SchedulePolicy(
        "bfs", "The paper's device selection on the breadth-first order.", breadth_first, weighs_memory=True
    ),
    SchedulePolicy("dfs", "The paper's device selection on the depth-first order.", depth_first, weighs_memory=True),
    SchedulePolicy(
        "heft", "HEFT: by rank, each operator where it finishes first.", heft, sampled_counts, weighs_memory=True
    ),
    SchedulePolicy(
        "cpop", "CPOP: the critical path on one lane, the rest where it finishes first.", cpop, sampled_counts
    ),
    SchedulePolicy("peft", "PEFT: as HEFT, with the best time that can follow on each lane.", peft, sampled_counts),
    SchedulePolicy(
        "exact",
        "The optimum on one accelerator lane, to 40 operators; needs OR-Tools.",
        exact,
        usable_counts,
        require=or_tools,
    ),
    SolutionPolicy(
        "ios",
        "IOS: the best stages, by dynamic programming; may merge operators.",
        ios,
        merged_variants,
        measures_stages=True,
    ),
    SchedulePolicy("nimble", "Nimble: streams with the fewest synchronisations.", nimble),
    SchedulePolicy("opara", "Opara: streams in one pass; compute- and memory-bound alternate.", opara),
    SchedulePolicy("wavefront", "Rammer's order: stages of ready operators, round robin.", wavefront),
    SchedulePolicy("greedy", "IOS's baseline: stages of ready operators, packed by cost.", greedy),
)

#: The built-in policies by name.
POLICIES = {policy.name: policy for policy in _BUILT_IN}


def policy_names() -> list[str]:
    """Return the names of all policies: the built-in ones, then those of installed packages."""
    return [*POLICIES, *_plugins()]


def describe_policies() -> dict[str, str]:
    """Return a line of description for each policy name; for one that cannot be loaded, the reason."""
    described = {}
    for name in policy_names():
        try:
            described[name] = find_policy(name).description
        except OptionError as error:
            described[name] = f"unavailable: {error}"
    return described


def find_policy(name: str) -> Policy:
    """Return the policy of a name.

    Raises:
        OptionError: There is no such policy, or the package that adds it cannot be loaded.
    """
    plugins = _plugins()
    if name in POLICIES:
        return POLICIES[name]
    if name in plugins:
        return _load(plugins[name])
    choices = f"choose one of {', '.join(policy_names())}"
    raise OptionError(f"unknown policy {name!r}", hint=did_you_mean(name, policy_names(), choices))


def _plugins() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by policy name."""
    return _discover(tuple(sys.path))


@lru_cache(maxsize=8)
def _discover(path: tuple[str, ...]) -> dict[str, EntryPoint]:  # noqa: ARG001 - the cache's key: a new path may hold other packages
    """Find the entry points of installed packages; warn about names that are taken."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, _package(point))):
        if point.name in POLICIES:
            _warn_ignored(point, "Chrion")
        elif point.name in points:
            _warn_ignored(point, f"package {_package(points[point.name])}")
        else:
            points[point.name] = point
    return points


def _warn_ignored(point: EntryPoint, owner: str) -> None:
    message = f"policy {point.name!r} of package {_package(point)} is ignored: {owner} has a policy of that name"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown package"


def _load(point: EntryPoint) -> SchedulePolicy:
    """Return the policy of an entry point.

    Raises:
        OptionError: The entry point's object cannot be imported, or cannot be called.
    """
    try:
        function = point.load()
    except Exception as error:
        raise OptionError(
            f"policy {point.name!r} of package {_package(point)} cannot be loaded: {type(error).__name__}: {error}",
            hint=f"update or uninstall {_package(point)}",
        ) from error
    if not callable(function):
        raise OptionError(
            f"policy {point.name!r} of package {_package(point)}: {point.value} is not a function",
            hint=f"update or uninstall {_package(point)}",
        )

    lines = (function.__doc__ or "").strip().splitlines()
    description = lines[0] if lines else f"Policy of package {_package(point)}."
    # A package does not declare if its policy weighs memory, so a higher alpha is always tried to meet a budget.
    return SchedulePolicy(point.name, description, _checked(point, function), weighs_memory=True)


def _checked(point: EntryPoint, function: Callable[[Dag, Costs, float], object]) -> ScheduleFunction:
    """Return a package's function with a check of its schedules."""
    origin = f"policy {point.name!r} of package {_package(point)}"

    def checked(dag: Dag, costs: Costs, alpha: float) -> Schedule:
        schedule = function(dag, costs, alpha)
        if not isinstance(schedule, Schedule):
            raise ScheduleError(f"{origin} returned a {type(schedule).__name__}, expected a Schedule")
        try:
            validate(dag, costs, schedule)
        except ScheduleError as error:
            raise ScheduleError(f"{origin}: {error.message}") from error
        return schedule

    return checked

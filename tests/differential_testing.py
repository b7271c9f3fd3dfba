"""Differential tests: a random model run by HybridSession and by plain onnxruntime, and their outputs compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Self

import numpy as np
import onnx

from chrion import HybridSession, load, partition
from chrion.graph import Graph
from chrion.scheduler import Plan, validate
from output_comparison import Reference, quiet_options, quiet_run
from random_models import Draft
from random_operators import random_model
from random_plans import random_plan
from random_profiles import coarse_random_profile

#: Sizes of the free dimension in consecutive requests.
_SIZES = (3, 1, 5, 3)
#: The exact policy is slow, so that larger graphs are not planned with it.
MAX_EXACT_OPERATORS = 6

Feed = dict[str, np.ndarray[Any, Any]]


class MismatchError(Exception):
    """The outputs of HybridSession differ from those of plain onnxruntime, or it failed."""


@dataclass
class Counts:
    """Counts of what was compared."""

    models: int = 0
    #: Models that onnxruntime refuses.
    refused: int = 0
    runs: int = 0
    #: Runs of more than one segment.
    cut: int = 0
    segments: int = 0
    #: Runs that fail in plain onnxruntime, too.
    failed: int = 0
    #: Outputs that differ, but for which plain onnxruntime does not agree with itself either.
    unsettled: int = 0
    plans: int = 0

    def __iadd__(self, other: Counts) -> Self:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def compare_random_model(pick: Random, size: int, *, policies: Sequence[str] = (), wide: float = 0.3) -> Counts:
    """Build a random model, run it in both ways, and compare the outputs.

    Args:
        pick: Source of randomness.
        size: Steps of the model.
        policies: Schedulers whose plans are compared, too.
        wide: Probability that a plan has operators on several cores.

    Raises:
        MismatchError: HybridSession or a scheduler is wrong.
    """
    draft = random_model(pick, size)
    model = draft.model()
    counts = Counts(models=1)
    try:
        plain = Reference(model.SerializeToString())
        plain.open_all_levels()
    except Exception:  # noqa: BLE001 - the generator does not know all of onnxruntime's rules
        counts.refused = 1
        return counts
    feeds = [draft.feed(size) for size in (_SIZES if draft.free else _SIZES[:2])]
    for everywhere in (True, False):
        optimise = pick.random() < 0.7
        graph = load(model, optimise=optimise)
        planner = partial(random_plan, pick=pick, everywhere=everywhere, wide=pick.random() < wide)
        with HybridSession(graph, quiet_options(), plan=planner, strict=True) as session:
            for feed in feeds:
                _compare(session, plain, feed, counts)
    if policies and counts.failed < counts.runs:
        graph = _load_for(draft, model, feeds[0])
        _compare_policies(graph, plain, feeds[0], pick, policies, counts)
    return counts


def _load_for(draft: Draft, model: onnx.ModelProto, feed: Feed) -> Graph:
    """Load the graph for the shapes of a request."""
    names = {i.name for i in draft.inputs}
    return load(model, {name: array.shape for name, array in feed.items() if name in names})


def _compare_policies(
    graph: Graph, plain: Reference, feed: Feed, pick: Random, policies: Sequence[str], counts: Counts
) -> None:
    """Plan the model by every policy, and compare the outputs of each plan."""
    for policy in policies:
        if policy == "exact" and len(graph.dag) > MAX_EXACT_OPERATORS:
            continue
        plan = plan_at_random_costs(graph, policy, pick)
        counts.plans += 1
        with HybridSession(graph, quiet_options(), plan=plan, strict=True) as session:
            _compare(session, plain, feed, counts)


def plan_at_random_costs(graph: Graph, policy: str, pick: Random) -> Plan:
    """Return a policy's plan of a graph of known shapes at random costs.

    Raises:
        MismatchError: The plan changes when it is written and read.
        ScheduleError: The plan is not valid.
    """
    profile = coarse_random_profile(graph, pick)
    plan = partition(graph, profile, policy=policy, streams=pick.choice([1, 3]))
    costs = profile.costs(plan.apply(graph).dag)
    validate(plan.apply(graph).dag, costs, plan.schedule)
    if Plan.from_json(plan.to_json()) != plan:
        raise MismatchError(f"policy {policy}: the plan changes in a round trip through JSON")
    return plan


def _compare(session: HybridSession, plain: Reference, feed: Feed, counts: Counts) -> None:
    counts.runs += 1
    try:
        expected = plain.run(feed)
    except Exception:  # noqa: BLE001 - some operators refuse empty tensors, for example
        counts.failed += 1
        expected = None
    try:
        # Every second run has run options: lane threads serve these, and native lanes the others.
        found = session.run(None, feed, quiet_run() if counts.runs % 2 else None)
    except Exception as error:
        if expected is None:
            return
        raise MismatchError(f"failed, unlike plain onnxruntime: {error}\n{session.explain()}") from error
    segments = len(session.plan.segments) if session.plan else 0
    counts.segments += segments
    counts.cut += segments > 1
    if expected is None:
        return
    wrong = plain.difference(found, expected)
    if not wrong:
        return
    if not plain.settles(feed, expected):
        counts.unsettled += 1
        return
    raise MismatchError(f"{wrong}\n{session.explain()}")

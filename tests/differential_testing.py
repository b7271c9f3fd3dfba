"""Differential tests: a random model run by HybridSession and by plain onnxruntime, and their outputs compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Self

import numpy as np
import onnx

from chrion import HybridSession, Profile, load, partition
from chrion.graph import Graph
from chrion.profiler import CopyCost
from chrion.profiler.profiles import OperatorCost
from chrion.scheduler import Plan, random_plan, validate
from helpers import MACHINE
from output_comparison import Reference, quiet_options, quiet_run
from random_models import Draft
from random_operators import random_model

#: Sizes of the free dimension that a session is fed in turn.
_SIZES = (3, 1, 5, 3)
#: The exact policy is slow: larger graphs are not tried with it.
MOST_EXACT = 6

Feed = dict[str, np.ndarray[Any, Any]]


class MismatchError(Exception):
    """HybridSession gave another answer than plain onnxruntime, or none."""


@dataclass
class Tally:
    """What was looked at."""

    models: int = 0
    #: Models that onnxruntime refuses.
    refused: int = 0
    runs: int = 0
    #: Runs over more than one segment.
    cut: int = 0
    segments: int = 0
    #: Runs that plain onnxruntime fails as well.
    failed: int = 0
    #: Answers that differ where plain onnxruntime does not agree with itself either.
    unsettled: int = 0
    plans: int = 0

    def __iadd__(self, other: Tally) -> Self:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def examine(pick: Random, size: int, *, policies: Sequence[str] = ()) -> Tally:
    """Make a model and compare.

    Args:
        pick: Where chance comes from.
        size: Steps of the model.
        policies: Planners to try as well.

    Raises:
        MismatchError: HybridSession or a planner is wrong.
    """
    draft = random_model(pick, size)
    model = draft.model()
    tally = Tally(models=1)
    try:
        plain = Reference(model.SerializeToString())
        plain.open_all_levels()
    except Exception:  # noqa: BLE001 - the generator knows less than onnxruntime
        tally.refused = 1
        return tally
    feeds = [draft.feed(size) for size in (_SIZES if draft.free else _SIZES[:2])]
    for everywhere in (True, False):
        optimise = pick.random() < 0.7
        graph = load(model, optimise=optimise)
        maker = partial(random_plan, pick=pick, everywhere=everywhere)
        with HybridSession(graph, quiet_options(), plan=maker, strict=True) as session:
            for feed in feeds:
                _compare(session, plain, feed, tally)
    if policies and tally.failed < tally.runs:
        graph = _fixed(draft, model, feeds[0])
        _plan(graph, plain, feeds[0], pick, policies, tally)
    return tally


def _fixed(draft: Draft, model: onnx.ModelProto, feed: Feed) -> Graph:
    """Return the graph for the shapes of a request."""
    names = {i.name for i in draft.inputs}
    return load(model, {name: array.shape for name, array in feed.items() if name in names})


def _plan(graph: Graph, plain: Reference, feed: Feed, pick: Random, policies: Sequence[str], tally: Tally) -> None:
    """Every policy makes a valid plan of the model, and what it plans is right."""
    for policy in policies:
        if policy == "exact" and len(graph.dag) > MOST_EXACT:
            continue
        plan = planned(graph, policy, pick)
        tally.plans += 1
        with HybridSession(graph, quiet_options(), plan=plan, strict=True) as session:
            _compare(session, plain, feed, tally)


def planned(graph: Graph, policy: str, pick: Random) -> Plan:
    """Return a policy's plan of a graph of known shapes at random costs.

    Raises:
        MismatchError: The plan does not survive its file.
        ScheduleError: The plan is not valid.
    """
    profile = made_up_profile(graph, pick)
    plan = partition(graph, profile, policy=policy, streams=pick.choice([1, 3]))
    costs = profile.costs(plan.apply(graph).dag)
    validate(plan.apply(graph).dag, costs, plan.schedule)
    if Plan.from_json(plan.to_json()) != plan:
        raise MismatchError(f"policy {policy}: the plan is another after a round trip")
    return plan


def made_up_profile(graph: Graph, pick: Random) -> Profile:
    """Costs at random, for an accelerator that is the CPU by another lane."""
    operators = {
        signature: OperatorCost(
            op_type=op_type,
            cpu_ms=(cost := pick.choice([0.01, 0.1, 1.0]), cost),
            accelerator_ms=pick.choice([None, 0.01, 0.1]),
        )
        for signature, op_type in zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    }
    copy = CopyCost(pick.choice([0.0, 0.05]), 1e-6)
    return Profile(MACHINE, 2, "CPUExecutionProvider", operators, copy, copy, handoff_ms=0.01, dispatch_ms=0.01)


def _compare(session: HybridSession, plain: Reference, feed: Feed, tally: Tally) -> None:
    tally.runs += 1
    try:
        expected = plain.run(feed)
    except Exception:  # noqa: BLE001 - some operators refuse what is empty, for example
        tally.failed += 1
        expected = None
    try:
        # With and without run options in turn: lanes in Python serve the former, lanes in C the latter.
        found = session.run(None, feed, quiet_run() if tally.runs % 2 else None)
    except Exception as error:
        if expected is None:
            return
        raise MismatchError(f"failed where plain onnxruntime does not: {error}\n{session.explain()}") from error
    segments = len(session.plan.segments) if session.plan else 0
    tally.segments += segments
    tally.cut += segments > 1
    if expected is None:
        return
    wrong = plain.difference(found, expected)
    if not wrong:
        return
    if not plain.settles(feed, expected):
        tally.unsettled += 1
        return
    raise MismatchError(f"{wrong}\n{session.explain()}")

"""Plans of published scheduling policies, compared with plain onnxruntime."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from chrion import Graph, HybridSession, load, partition
from chrion.profiler import Profile
from chrion.scheduler import Plan
from chrion.scheduler.evaluation.solution import Problem
from helpers import assert_equal, run_plain
from light_models import LIGHT_MODELS, random_feed
from random_operators import random_model
from random_profiles import random_profile
from solution_checks import check_solution

PUBLISHED = ("ios", "nimble", "opara", "wavefront", "greedy")


def check_plan(graph: Graph, profile: Profile, plan: Plan) -> None:
    """Assert that a plan is a valid solution of its graph."""
    planned = plan.apply(graph)
    costs = profile.costs(planned.dag)
    check_solution(planned.dag, costs, Problem(planned.dag, costs).evaluate(plan.schedule))


def check_random_model(seed: int, *, accelerator: bool) -> None:
    """Assert that every policy's plan of a random model, on cores or several accelerator lanes, has correct outputs."""
    made = random_model(random.Random(seed), 10 + seed)
    model, feed = made.model(), made.feed()
    graph = load(model, {name: array.shape for name, array in feed.items()})
    _check_policies(graph, random_profile([graph], accelerator=accelerator, seed=seed), feed, run_plain(model, feed))


def check_light_model(name: str) -> None:
    """Assert that every policy's plan of a real architecture on two cores has correct outputs."""
    graph = load(LIGHT_MODELS[name])
    feed = random_feed(graph)
    _check_policies(graph, random_profile([graph], accelerator=False), feed, run_plain(LIGHT_MODELS[name], feed))


def _check_policies(graph: Graph, profile: Profile, feed: Mapping[str, Any], expected: list[Any]) -> None:
    for policy in PUBLISHED:
        plan = partition(graph, profile, policy=policy, streams=3)
        check_plan(graph, profile, plan)
        with HybridSession(graph, plan=Plan.from_json(plan.to_json())) as session:
            if not plan.accelerator:
                assert (session.plan is None) == (len(plan.segments) == 1), policy  # one segment runs plain
            for _ in range(2):
                assert_equal(session.run(None, feed), expected)

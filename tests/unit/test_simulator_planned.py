"""The pattern ``planned`` compared with exhaustive search."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ScenarioError
from chrion.serving.simulator.planned import choose_variants, pareto_hull
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource, find_scenario
from chrion.serving.variants import Variant
from property_tests import examples

VARIANTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=4)


def variant(memory_mb: float, latency_ms: float) -> Variant:
    return Variant("v", memory_mb, latency_ms, latency_ms)


def cost(chosen: list[Variant] | tuple[Variant, ...], requests: list[float]) -> float:
    """Return the total latency of all requests."""
    return sum(v.latency_ms * n for v, n in zip(chosen, requests, strict=True))


def memory(chosen: list[Variant] | tuple[Variant, ...]) -> int:
    return sum(v.memory_bytes for v in chosen)


@examples(300)
@given(st.lists(VARIANTS, min_size=1, max_size=4), st.integers(0, 200), st.data())
def test_the_choice_is_near_the_optimum(sizes: list[Any], budget_mb: int, data: st.DataObject) -> None:
    """All fit if that is possible, and the relaxed optimum is at most one exchange better.

    The relaxation is the lower convex hull of all combinations in the plane of memory and total latency.
    """
    models = [[variant(float(mb), float(ms)) for mb, ms in own] for own in sizes]
    requests = [float(data.draw(st.integers(1, 9))) for _ in models]
    chosen = choose_variants(models, requests, budget_mb * 10**6)
    every = list(itertools.product(*models))
    least = min(memory(other) for other in every)
    assert memory(chosen) <= max(least, budget_mb * 10**6)
    possible = [other for other in every if memory(other) <= max(least, budget_mb * 10**6)]
    largest_step = max(
        n * (max(v.latency_ms for v in own) - min(v.latency_ms for v in own))
        for n, own in zip(requests, models, strict=True)
    )
    assert cost(chosen, requests) <= min(cost(other, requests) for other in possible) + largest_step
    if budget_mb * 10**6 >= max(memory(other) for other in every):
        assert cost(chosen, requests) == min(cost(other, requests) for other in every)


@examples(300)
@given(VARIANTS, st.floats(0.0, 5.0))
def test_the_hull_has_the_choice_of_every_price(sizes: list[tuple[int, int]], alpha: float) -> None:
    """The least latency + alpha x memory over all variants is that over the hull."""
    variants = [variant(float(mb), float(ms)) for mb, ms in sizes]
    hull = pareto_hull(variants)
    assert min(v.latency_ms + alpha * v.memory_mb for v in hull) == pytest.approx(
        min(v.latency_ms + alpha * v.memory_mb for v in variants)
    )
    assert [v.memory_mb for v in hull] == sorted({v.memory_mb for v in hull})


def two_models(**sets: Any) -> Scenario:
    """Return a scenario of a popular and a rare model, with memory for one large variant."""
    table = {
        "large": {"memory_mb": 800.0, "latency_ms": 20.0},
        "small": {"memory_mb": 300.0, "latency_ms": 30.0},
    }
    models = [{"name": name, "share": share, "variants": table} for name, share in (("rare", 1.0), ("popular", 9.0))]
    content = {"servers": [{"gpu_memory_gb": 1.2}], "models": models, "patterns": ["planned", "large"]}
    return ScenarioSource("two", content, Path()).changed({"requests": 500, **sets}).build()


def test_memory_goes_to_the_popular_model() -> None:
    """The popular model has the large variant, and nothing is swapped after two loads; the rare one, if it is named."""
    scenario = two_models()
    assert [model.variants["planned"].name for model in scenario.models] == ["small", "large"]
    planned, large = simulate(scenario)
    assert planned.total.loads == 2 < large.total.loads
    named = two_models(**{"models.rare.variant": "large", "models.popular.variant": "small"})
    assert [model.variants["planned"].name for model in named.models] == ["large", "small"]
    with pytest.raises(ScenarioError, match=r"models.rare.variant = 'huge': not a variant"):
        two_models(**{"models.rare.variant": "huge"})


def test_objectives_come_before_memory() -> None:
    """A variant that is slower than its model's objective is not chosen if another one is fast enough."""
    scenario = two_models(**{"slo.latency_ms": 25.0})
    assert [model.variants["planned"].name for model in scenario.models] == ["large", "large"]


def test_table7_planned() -> None:
    """With 8 GB, the plans of the nine models mix the patterns, and are never swapped."""
    scenario = find_scenario("table7").changed({"patterns": ["gpu", "planned"], "requests": 2000}).build()
    names = {model.variants["planned"].name for model in scenario.models}
    assert len(names) > 1
    total = sum(model.variants["planned"].memory_bytes for model in scenario.models)
    assert total <= scenario.servers[0].budget_bytes
    gpu, planned = simulate(scenario)
    assert planned.total.loads == 0 < gpu.total.loads
    assert np.isfinite(planned.total.response.mean_ms)

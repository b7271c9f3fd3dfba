"""Searches of stages under a budget, against the exact optimum."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_searches import SEARCHES, evolve_stages, exhaust_stages

from chrion.errors import OptionError
from chrion.graph.dag import Dag
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes, Stage
from chrion.scheduler.search.stages import CountedCost, stages_of_levels
from property_tests import examples
from strategies import costs_for, dags

PLAIN = sorted(set(SEARCHES) - {"CMA-ES"})
ALL = [
    *PLAIN,
    pytest.param("CMA-ES", marks=pytest.mark.skipif(not importlib.util.find_spec("cmaes"), reason="no cmaes")),
]


def check(dag: Dag, stages: Sequence[Stage], r: int | None = 3, s: int | None = 8) -> None:
    """Check that stages hold each operator once and in order, in groups that do not depend, within the limits."""
    placed = {i: (at, group) for at, stage in enumerate(stages) for group in stage.groups for i in group}
    assert sorted(itertools.chain(*(group for stage in stages for group in stage.groups))) == list(range(len(dag)))
    for i, (at, group) in placed.items():
        for m in dag.predecessors[i]:
            before, other = placed[m]
            assert before < at or (other is group and group.index(m) < group.index(i))
    assert all(len(group) <= (r or len(dag)) for stage in stages for group in stage.groups)
    assert all(len(stage.groups) <= (s or len(dag)) for stage in stages)


@examples(100)
@given(dags(), st.data())
def test_levels_are_valid_stages(dag: Dag, data: st.DataObject) -> None:
    """Whatever levels are wanted, the stages are valid and within the limits."""
    wanted = data.draw(st.lists(st.floats(-3, 9), min_size=len(dag), max_size=len(dag)))
    r, s = data.draw(st.sampled_from([(3, 8), (1, 1), (2, 2), (None, None)]))
    check(dag, stages_of_levels(dag, wanted, r, s), r, s)


@examples(100)
@given(dags(6), st.data())
def test_levels_express_the_best_stages(dag: Dag, data: st.DataObject) -> None:
    """The stages of the dynamic programme are those of their own numbers as levels."""
    costs = data.draw(costs_for(dag, accelerator=False))
    best = search_stages(dag, DeviceLanes(dag, costs).stage_ms)
    wanted = [0.0] * len(dag)
    for at, stage in enumerate(best):
        for i in itertools.chain(*stage.groups):
            wanted[i] = float(at)
    found = stages_of_levels(dag, wanted)
    assert [sorted(map(sorted, stage.groups)) for stage in found] == [sorted(map(sorted, s.groups)) for s in best]


@examples(50)
@given(dag=dags(4), data=st.data())
def test_the_exhaustive_search_finds_the_least_latency(dag: Dag, data: st.DataObject) -> None:
    """Its stages are valid, and as fast as the best of all levels that operators can have."""
    device = DeviceLanes(dag, data.draw(costs_for(dag, accelerator=False)))

    def latency_ms(stages: Sequence[Stage]) -> float:
        return sum(device.stage_ms(stage.groups) for stage in stages)

    found = exhaust_stages(dag, device.stage_ms)
    check(dag, found, None, None)
    levels = itertools.product(range(len(dag)), repeat=len(dag))
    every = (latency_ms(stages_of_levels(dag, wanted, None, None)) for wanted in levels)
    assert latency_ms(found) == pytest.approx(min(every))


@pytest.mark.parametrize("name", ALL)
@examples(30)
@given(dag=dags(6), data=st.data())
def test_no_search_beats_the_optimum_or_its_budget(name: str, dag: Dag, data: st.DataObject) -> None:
    """Stages are valid, not better than those of the whole dynamic programme, and the same for the same seed."""
    # The programme never joins operators on both sides of an articulation point, which would save a dispatch.
    costs = data.draw(costs_for(dag, accelerator=False, dispatch=False))
    device = DeviceLanes(dag, costs)
    budget = data.draw(st.integers(6, 200))
    counted = CountedCost(device.stage_ms)
    stages = SEARCHES[name](dag, counted, budget, 0)
    check(dag, stages)
    least = sum(device.stage_ms(stage.groups) for stage in search_stages(dag, device.stage_ms))
    assert sum(device.stage_ms(stage.groups) for stage in stages) >= least - 1e-9
    if name != "IOS":  # its cap counts endings, too
        assert counted.evaluations <= max(budget, len(dag))
    assert SEARCHES[name](dag, device.stage_ms, budget, 0) == stages


@pytest.mark.parametrize(("name", "within"), [("IOS", 1.03), ("annealing", 1.03), ("beam", 1.2)])
def test_searches_find_the_optimum_of_a_module(name: str, within: float) -> None:
    """On an Inception module of two lanes, the searches come near the optimum with 400 evaluations."""
    edges = [(0, 1), (0, 2), (2, 3), (0, 4), (4, 5), (5, 6), (0, 7), (7, 8), (1, 9), (3, 9), (6, 9), (8, 9)]
    dag = Dag.from_edges(10, edges)
    times = (2.0, 3.0, 1.0, 4.0, 1.0, 2.0, 2.0, 0.5, 1.5, 0.5)

    def stage_ms(groups: Sequence[Sequence[int]]) -> float:
        longest = sorted((sum(times[i] for i in group) for group in groups), reverse=True)
        lanes = [0.0, 0.0]
        for ms in longest:
            lanes[lanes.index(min(lanes))] += ms
        return 0.1 + max(lanes)

    least = sum(stage_ms(stage.groups) for stage in search_stages(dag, stage_ms))
    found = sum(stage_ms(stage.groups) for stage in SEARCHES[name](dag, stage_ms, 400, 0))
    assert least <= found <= within * least


def test_cma_es_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, one line says how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(OptionError, match="cmaes is not installed"):
        evolve_stages(Dag.from_edges(1, []), lambda _: 1.0, 10)

"""The field's schedulers as schedules: valid on anything, and like what their papers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chrion.scheduler import POLICIES
from chrion.scheduler.evaluation.validation import check_solution
from chrion.scheduler.policies.stages import DeviceLanes
from strategies import costs_for, dags

FIELD = ("ios", "nimble", "opara", "wavefront", "greedy")


@pytest.mark.parametrize("policy", FIELD)
@settings(deadline=None)
@given(data=st.data())
def test_schedules_are_valid(policy: str, data: st.DataObject) -> None:
    """On any graph, on cores or on an accelerator with any number of lanes and any shares."""
    dag = data.draw(dags(11))
    costs = data.draw(costs_for(dag))
    shares = tuple(data.draw(st.integers(0, 4)) / 4 for _ in range(len(dag)))
    costs = replace(costs, accelerator_share=shares, streams=data.draw(st.integers(1, 4)))
    solution = POLICIES[policy].make_solver(dag, costs)(0.0)
    check_solution(dag, costs, solution)
    assert set(solution.schedule.lanes) <= set(DeviceLanes(dag, costs).lanes)

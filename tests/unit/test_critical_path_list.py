"""Lists by critical path, beside a transcription of the textbook that shares no code."""

from __future__ import annotations

import itertools

import pytest

from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.heft import place_by_finish
from chrion.scheduler.policies.list_scheduling import Lanes, by_rank, upward_ranks
from made_machines import FAMILIES, made_problem
from solution_checks import check_solution
from textbook_schedulers import critical_path_list


def without_gaps(lanes: Lanes) -> Schedule:
    """Return the list by critical path, without transfers in its ranks and without insertion."""
    order = by_rank(lanes.dag, upward_ranks(lanes, transfers=False))
    return place_by_finish(lanes, order, insertion=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_schedule_is_that_of_the_textbook(family: str) -> None:
    """On random graphs with and without an accelerator, all operators go to the same lanes."""
    for accelerator, cores, seed in itertools.product((True, False), (1, 2, 4), (0, 1, 2)):
        dag, costs = made_problem(family, 16, cores, seed, accelerator=accelerator, weights=bool(seed % 2))
        found, expected = without_gaps(Lanes(dag, costs)), critical_path_list(dag, costs)
        assert found.lanes == expected.lanes
        solutions = [Problem(dag, costs).evaluate(schedule) for schedule in (found, expected)]
        check_solution(dag, costs, solutions[0])
        assert solutions[0].timeline.latency_ms == pytest.approx(solutions[1].timeline.latency_ms)

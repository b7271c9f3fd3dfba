"""The limit on the memory of plans."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph.opened_model import OpenedModel
from chrion.runtime.engine_table import EngineTable
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.engine import Footprint
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.plain_sessions import PlainSessions
from chrion.runtime.selection.plan_memory import LIMIT, find_excess, find_room, has_room, never_fits
from property_tests import examples


def open_plan(plan_mb: float, requests: int = 0, plain_mb: float = 100.0) -> CutEngine:
    """Return an engine with a memory and a number of requests, and nothing else."""
    engine = CutEngine.__new__(CutEngine)
    engine.footprint, engine.requests = Footprint(plain_mb, plan_mb), requests
    return engine


def open_plans(sizes_mb: Sequence[float], requests: Sequence[int] = ()) -> dict[int, CutEngine]:
    """Return engines by number."""
    return {at: open_plan(mb, requests[at] if requests else 0) for at, mb in enumerate(sizes_mb)}


def test_plans_are_opened_up_to_the_limit() -> None:
    """Beside a plain session of 100 MB there is room for three plans of 9 MB, and not for a fourth."""
    assert find_room(open_plans([9, 9]), Footprint(100, 9), 0) == []
    assert find_room(open_plans([9, 9, 9]), Footprint(100, 9), 0) is None


def test_a_plan_that_replaces_the_plain_session_may_be_as_large() -> None:
    """Without a plain session, one plan of its size has room, and a second one does not."""
    assert has_room({}, Footprint(100, 100), plain_open=False)
    assert not has_room({}, Footprint(100, 100))
    assert not has_room(open_plans([100]), Footprint(100, 100), plain_open=False)


def test_shapes_that_are_requested_much_more_often_replace_the_least_requested_plan() -> None:
    """A new plan closes the plan with the fewest requests if its shapes had at least twice as many, and 16."""
    engines = open_plans([9, 9, 9], [50, 10, 30])
    assert find_room(engines, Footprint(100, 9), 20) == [1]
    assert find_room(engines, Footprint(100, 9), 19) is None
    assert find_room(open_plans([9, 9, 9]), Footprint(100, 9), 15) is None


def test_no_plan_is_closed_if_the_new_one_has_no_room_in_the_end() -> None:
    """A large plan that would need the room of a frequently requested one is refused."""
    assert find_room(open_plans([9, 9, 9], [1000, 0, 0]), Footprint(100, 25), 20) is None


def test_plans_without_a_limit_are_never_closed() -> None:
    """Plans whose memory was not measured take no room."""
    free = CutEngine.__new__(CutEngine)
    free.footprint, free.requests = None, 0
    assert find_room({0: free, 1: open_plan(25)}, Footprint(100, 25), 16) == [1]


def test_a_plan_too_large_for_any_session_is_known() -> None:
    """A plan that holds all weights again never fits beside a session that consists of weights."""
    assert never_fits(Footprint(100, 31))
    assert not never_fits(Footprint(100, 25))


def table_of(plans: Sequence[CutEngine]) -> EngineTable:
    """Return a table with plans for the shapes ((0,),), ((1,),), ..."""
    table = EngineTable(PlainSessions(SessionConfig(OpenedModel(b""))))
    for at, plan in enumerate(plans):
        plan.plan = None  # type: ignore[assignment] # not looked at
        table.put(((at,),), plan)
    return table


def test_requests_of_plans_are_halved_with_those_of_other_shapes() -> None:
    """Numbers of requests before two halvings count a quarter."""
    engines = list(open_plans([9, 9], [80, 7]).values())
    table = table_of(engines)
    for _ in range(2):
        table.halve_requests()
    assert [engine.requests for engine in engines] == [20, 1]


def test_the_least_memory_of_a_plan_is_known() -> None:
    """It is that of the smallest plan for which room was to be found, also if it was refused."""
    table = table_of([])
    for mb in (30, 20, 25):
        table.find_room(((0,),), Footprint(100, mb), 0)
    assert table.least == Footprint(100, 20)


def test_a_plan_may_replace_the_one_of_the_same_shapes() -> None:
    """The plan that is replaced takes no room."""
    table = table_of([open_plan(25, 100)])
    assert table.find_room(((0,),), Footprint(100, 25), 0) == []
    assert table.find_room(((1,),), Footprint(100, 25), 0) is None


@examples(100)
@given(
    st.lists(st.tuples(st.floats(0.1, 40), st.integers(0, 100)), max_size=6), st.floats(0.1, 40), st.integers(0, 300)
)
def test_the_limit_holds_for_any_plans(opened: list[tuple[float, int]], new_mb: float, requests: int) -> None:
    """After plans are opened and closed as chosen, the session takes at most 1.3 times a plain session's memory."""
    engines: dict[int, CutEngine] = {}
    for at, (mb, served) in enumerate([*opened, (new_mb, requests)]):
        closed = find_room(engines, Footprint(100, mb), served)
        if closed is not None:
            for shapes in closed:
                del engines[shapes]
            engines[at] = open_plan(mb, served)
        assert 100 + sum(e.footprint.plan_mb for e in engines.values() if e.footprint) <= LIMIT * 100


@examples(100)
@given(st.lists(st.floats(0.1, 40), max_size=6))
def test_plans_that_exceed_the_limit_beside_a_plain_session_are_found(sizes_mb: list[float]) -> None:
    """Plans that were opened without a plain session fit beside one after the excess is closed."""
    engines = open_plans(sizes_mb)
    kept = set(engines) - set(find_excess(engines))
    assert 100 + sum(sizes_mb[at] for at in kept) <= LIMIT * 100

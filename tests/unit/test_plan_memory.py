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
from chrion.runtime.selection.plan_memory import SHARE, SMALL_MB, find_excess, find_room, has_room, never_fits
from property_tests import examples


def open_plan(plan_mb: float, requests: int = 0, plain_mb: float = 1000.0) -> CutEngine:
    """Return an engine with a memory and a number of requests, and nothing else."""
    engine = CutEngine.__new__(CutEngine)
    engine.footprint, engine.requests = Footprint(plain_mb, plan_mb), requests
    return engine


def open_plans(sizes_mb: Sequence[float], requests: Sequence[int] = ()) -> dict[int, CutEngine]:
    """Return engines by number."""
    return {at: open_plan(mb, requests[at] if requests else 0) for at, mb in enumerate(sizes_mb)}


def test_plans_are_opened_up_to_the_limit() -> None:
    """Beside a plain session of 1000 MB there is room for three plans of 90 MB, and not for a fourth."""
    assert find_room(open_plans([90, 90]), Footprint(1000, 90), 0) == []
    assert find_room(open_plans([90, 90, 90]), Footprint(1000, 90), 0) is None


def test_a_plan_that_replaces_the_plain_session_may_be_as_large() -> None:
    """Without a plain session, one plan of its size has room, and a second one does not."""
    assert has_room({}, Footprint(1000, 1000), plain_open=False)
    assert not has_room({}, Footprint(1000, 1000))
    assert not has_room(open_plans([1000]), Footprint(1000, 1000), plain_open=False)


def test_shapes_that_are_requested_much_more_often_replace_the_least_requested_plan() -> None:
    """A new plan closes the plan with the fewest requests if its shapes had at least twice as many, and 16."""
    engines = open_plans([90, 90, 90], [50, 10, 30])
    assert find_room(engines, Footprint(1000, 90), 20) == [1]
    assert find_room(engines, Footprint(1000, 90), 19) is None
    assert find_room(open_plans([90, 90, 90]), Footprint(1000, 90), 15) is None


def test_no_plan_is_closed_if_the_new_one_has_no_room_in_the_end() -> None:
    """A large plan that would need the room of a frequently requested one is refused."""
    assert find_room(open_plans([90, 90, 90], [1000, 0, 0]), Footprint(1000, 250), 20) is None


def test_plans_without_a_limit_are_never_closed() -> None:
    """Plans whose memory was not measured take no room."""
    free = CutEngine.__new__(CutEngine)
    free.footprint, free.requests = None, 0
    assert find_room({0: free, 1: open_plan(250)}, Footprint(1000, 250), 16) == [1]


def test_a_plan_too_large_for_any_session_is_known() -> None:
    """A plan that holds all weights again never fits beside a session that consists of weights."""
    assert never_fits(Footprint(1000, 310))
    assert not never_fits(Footprint(1000, 250))


def test_plans_of_a_small_session_may_take_more_than_it() -> None:
    """Plans of some MB are opened whatever their share, up to a total that little matters beside a process."""
    small = open_plan(SMALL_MB / 2, plain_mb=20)
    assert not never_fits(Footprint(20, 0.9 * SMALL_MB))
    assert never_fits(Footprint(20, 1.1 * SMALL_MB))
    assert has_room({0: small}, Footprint(20, 0.4 * SMALL_MB))
    assert not has_room({0: small}, Footprint(20, 0.6 * SMALL_MB))


def table_of(plans: Sequence[CutEngine]) -> EngineTable:
    """Return a table with plans for the shapes ((0,),), ((1,),), ..."""
    table = EngineTable(PlainSessions(SessionConfig(OpenedModel(b""))))
    for at, plan in enumerate(plans):
        plan.plan = None  # type: ignore[assignment] # not looked at
        table.put(((at,),), plan)
    return table


def test_requests_of_plans_are_halved_with_those_of_other_shapes() -> None:
    """Numbers of requests before two halvings count a quarter."""
    engines = list(open_plans([90, 90], [80, 7]).values())
    table = table_of(engines)
    for _ in range(2):
        table.halve_requests()
    assert [engine.requests for engine in engines] == [20, 1]


def test_the_least_memory_of_a_plan_is_known() -> None:
    """It is that of the smallest plan for which room was to be found, also if it was refused."""
    table = table_of([])
    for mb in (300, 200, 250):
        table.find_room(((0,),), Footprint(1000, mb), 0)
    assert table.least == Footprint(1000, 200)


def test_a_plan_may_replace_the_one_of_the_same_shapes() -> None:
    """The plan that is replaced takes no room."""
    table = table_of([open_plan(250, 100)])
    assert table.find_room(((0,),), Footprint(1000, 250), 0) == []
    assert table.find_room(((1,),), Footprint(1000, 250), 0) is None


@examples(100)
@given(st.lists(st.tuples(st.floats(1, 400), st.integers(0, 100)), max_size=6), st.floats(1, 400), st.integers(0, 300))
def test_the_limit_holds_for_any_plans(opened: list[tuple[float, int]], new_mb: float, requests: int) -> None:
    """After plans are opened and closed as chosen, they add at most a share of the plain session's memory."""
    engines: dict[int, CutEngine] = {}
    for at, (mb, served) in enumerate([*opened, (new_mb, requests)]):
        closed = find_room(engines, Footprint(1000, mb), served)
        if closed is not None:
            for shapes in closed:
                del engines[shapes]
            engines[at] = open_plan(mb, served)
        assert sum(e.footprint.plan_mb for e in engines.values() if e.footprint) <= SHARE * 1000


@examples(100)
@given(st.lists(st.floats(1, 400), max_size=6))
def test_plans_that_exceed_the_limit_beside_a_plain_session_are_found(sizes_mb: list[float]) -> None:
    """Plans that were opened without a plain session fit beside one after the excess is closed."""
    engines = open_plans(sizes_mb)
    kept = set(engines) - set(find_excess(engines))
    assert sum(sizes_mb[at] for at in kept) <= SHARE * 1000

"""The dispatcher of several models as a pure state machine: its policies and its invariants."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chrion.errors import OptionError
from chrion.serving.multi.dispatcher import Action, Dispatcher, ModelRules, Over, Run
from chrion.serving.multi.policies import POLICIES, assign_lanes, check_policy
from property_tests import examples


def runs(actions: Sequence[Action]) -> list[tuple[int, int, int]]:
    """Return the blocks to run as (lane, task, block)."""
    return [(a.lane, a.number, a.block) for a in actions if isinstance(a, Run)]


def over(actions: Sequence[Action]) -> list[tuple[int, str]]:
    """Return the tasks that are over."""
    return [(a.number, a.outcome) for a in actions if isinstance(a, Over)]


def served(dispatcher: Dispatcher, now_ms: float) -> list[int]:
    """Run until nothing is left on one lane whose blocks take 1 ms; return the tasks in the order of their blocks."""
    order = []
    while dispatcher.busy:
        order.append(next(task.number for task in dispatcher.tasks.values() if task.lane == 0))
        now_ms += 1
        dispatcher.finish(0, now_ms)
    return order


HEAVY, LIGHT = ModelRules((1.0,) * 4), ModelRules((1.0,), deadline_ms=3)


def test_an_urgent_task_runs_at_the_end_of_a_block() -> None:
    """On one lane, a task that is due earlier runs between two blocks of a longer one, which then continues."""
    dispatcher = Dispatcher({"heavy": HEAVY, "light": LIGHT}, 1, "edf")
    assert runs(dispatcher.submit("heavy", 0)[1]) == [(0, 0, 0)]
    assert dispatcher.submit("light", 0.5)[1] == []
    assert runs(dispatcher.finish(0, 1)) == [(0, 1, 0)]
    assert dispatcher.finish(0, 2) == [Over(1, "done"), Run(0, 0, "heavy", 1)]


def test_fifo_runs_whole_tasks() -> None:
    """First come, first served: a task that arrives later waits for all blocks of the earlier one."""
    dispatcher = Dispatcher({"heavy": HEAVY, "light": LIGHT}, 1, "fifo")
    dispatcher.submit("heavy", 0)
    dispatcher.submit("light", 0)
    assert served(dispatcher, 0) == [0, 0, 0, 0, 1]


def test_fair_gives_models_equal_time() -> None:
    """Two models with work take turns, whatever the number of their tasks."""
    dispatcher = Dispatcher({"a": HEAVY, "b": ModelRules((1.0, 1.0))}, 1, "fair")
    for name in ("a", "b", "b"):
        dispatcher.submit(name, 0)
    assert served(dispatcher, 0) == [0, 1, 0, 1, 0, 2, 0, 2]


def test_a_model_without_work_saves_no_time_for_later() -> None:
    """A model that comes back has no claim on the lanes for the time in which it had no work."""
    dispatcher = Dispatcher({"a": ModelRules((1.0,) * 6), "b": ModelRules((1.0,) * 3)}, 1, "fair")
    dispatcher.submit("a", 0)
    for now_ms in (1, 2, 3):
        dispatcher.finish(0, now_ms)
    dispatcher.submit("b", 3)
    assert served(dispatcher, 3) == [0, 1, 0, 1, 0, 1]


def test_priority_ages() -> None:
    """A task of low priority is served before those that arrive after its patience has ended."""
    rules = {"first": ModelRules((1.0,)), "second": ModelRules((1.0,), priority=1)}
    dispatcher = Dispatcher(rules, 1, "priority", patience_ms=10)
    for name, now_ms in (("first", 0), ("second", 0), ("first", 9), ("first", 11)):
        dispatcher.submit(name, now_ms)
    assert served(dispatcher, 11) == [0, 2, 1, 3]


def test_a_late_task_waits_behind_those_in_time() -> None:
    """A task that cannot meet its deadline lets one that can overtake it, and is still served."""
    dispatcher = Dispatcher({"heavy": HEAVY, "light": LIGHT}, 1, "edf")
    dispatcher.submit("heavy", 0, 3.5)
    dispatcher.submit("light", 0, 5)
    assert served(dispatcher, 0) == [0, 1, 0, 0, 0]


def test_late_tasks_are_dropped_on_request() -> None:
    """With ``drop_late``, a task stops as soon as its remaining blocks end after its deadline."""
    dispatcher = Dispatcher({"heavy": HEAVY}, 1, "edf", drop_late=True)
    dispatcher.submit("heavy", 0, 4)
    assert runs(dispatcher.finish(0, 1)) == [(0, 0, 1)]
    assert dispatcher.finish(0, 2.5) == [Over(0, "late")]
    assert not dispatcher.tasks


@pytest.mark.parametrize(("drop", "dropped"), [("newest", 3), ("oldest", 1)])
def test_a_full_queue_drops_what_it_is_told_to(drop: Any, dropped: int) -> None:
    """With one lane and a queue of two, the fourth task or the one that has waited longest is dropped."""
    dispatcher = Dispatcher({"a": ModelRules((1.0,), queue=2, drop=drop)}, 1, "fifo")
    ended = [over(dispatcher.submit("a", now_ms)[1]) for now_ms in range(4)]
    assert ended == [[], [], [], [(dropped, "full")]]


def test_cancelled_tasks_run_no_further_block() -> None:
    """A waiting task is over at once, a running one after its block, and one that is over stays as it was."""
    dispatcher = Dispatcher({"heavy": HEAVY}, 1, "fifo")
    dispatcher.submit("heavy", 0)
    dispatcher.submit("heavy", 0)
    assert dispatcher.cancel(1, 0) == [Over(1, "cancelled")]
    assert dispatcher.cancel(0, 0) == []
    assert dispatcher.finish(0, 1) == [Over(0, "cancelled")]
    assert dispatcher.cancel(0, 1) == []


def test_a_cancelled_task_is_neither_done_nor_failed() -> None:
    """A task that is cancelled while its last block runs is cancelled, whatever becomes of the block."""
    for event in (Dispatcher.finish, Dispatcher.fail):
        dispatcher = Dispatcher({"light": LIGHT}, 1, "fifo")
        dispatcher.submit("light", 0)
        dispatcher.cancel(0, 0)
        assert event(dispatcher, 0, 1) == [Over(0, "cancelled")]


def test_at_most_as_many_tasks_of_a_model_as_lanes_have_begun() -> None:
    """A task that is due earlier waits for a begun one of its model, so that the values of two suffice on two lanes."""
    dispatcher = Dispatcher({"heavy": HEAVY}, 2, "edf")
    for deadline_ms in (100, 90, 10):
        dispatcher.submit("heavy", 0, deadline_ms)
    assert runs(dispatcher.finish(0, 1)) == [(0, 0, 1)]
    assert runs(dispatcher.finish(1, 1)) == [(1, 1, 1)]


def test_removed_models_leave_nothing_behind() -> None:
    """After 5 000 models have come and gone, each while its task ran, the dispatcher is as large as after 100.

    Threads of other tests in the process may allocate some blocks meanwhile.
    """
    dispatcher = Dispatcher({}, 1, "static")

    def serve(count: int) -> int:
        for at in range(count):
            dispatcher.add(f"m{at}", HEAVY)
            dispatcher.submit(f"m{at}", at)
            dispatcher.remove(f"m{at}", at)
            dispatcher.finish(0, at)
        gc.collect()
        return sys.getallocatedblocks()

    first = serve(100)
    assert serve(5_000) < first + 4_000


def test_models_come_and_go() -> None:
    """A removed model's tasks are over, the running one after its block; a new model is served at once."""
    dispatcher = Dispatcher({"heavy": HEAVY}, 1, "static")
    for _ in range(3):
        dispatcher.submit("heavy", 0)
    assert dispatcher.remove("heavy", 0) == [Over(1, "removed"), Over(2, "removed")]
    dispatcher.add("light", LIGHT)
    number, actions = dispatcher.submit("light", 0)
    assert actions == []
    assert dispatcher.finish(0, 1) == [Over(0, "removed"), Run(0, number, "light", 0)]


def test_models_run_on_their_own_lanes() -> None:
    """A model stays on the lanes that it is given, even if others are idle, and other models stay off them."""
    dispatcher = Dispatcher({"heavy": HEAVY, "light": LIGHT}, 2, "fifo", own_lanes={"heavy": [1]})
    assert runs(dispatcher.submit("heavy", 0)[1]) == [(1, 0, 0)]
    assert dispatcher.submit("heavy", 0)[1] == []
    assert runs(dispatcher.submit("light", 0)[1]) == [(0, 2, 0)]
    assert dispatcher.submit("light", 0)[1] == []


def test_static_divides_the_lanes_that_are_left() -> None:
    """Beside a model with a lane of its own, the others have one each."""
    rules = dict.fromkeys(("own", "a", "b"), LIGHT)
    dispatcher = Dispatcher(rules, 3, "static", own_lanes={"own": [1]})
    found = {name: [runs(dispatcher.submit(name, 0)[1]) for _ in range(2)] for name in rules}
    assert [lanes[0][0][0] for lanes in found.values()] == [1, 0, 2]
    assert all(lanes[1] == [] for lanes in found.values())


def test_a_failed_block_ends_its_task_only() -> None:
    """After a failure the lane takes the next task."""
    dispatcher = Dispatcher({"heavy": HEAVY}, 1, "fifo")
    dispatcher.submit("heavy", 0)
    dispatcher.submit("heavy", 0)
    assert dispatcher.fail(0, 1) == [Over(0, "failed"), Run(0, 1, "heavy", 0)]


def test_lanes_of_static_models() -> None:
    """Further lanes go to the busiest model; too few lanes are shared so that their loads are even."""
    assert assign_lanes({"a": 1, "b": 5, "c": 1}, 5) == {"b": (0, 1, 2), "a": (3,), "c": (4,)}
    assert assign_lanes({"a": 3, "b": 2, "c": 2}, 2) == {"a": (0,), "b": (1,), "c": (1,)}


def test_an_unknown_policy_is_refused() -> None:
    """The message names the similar one."""
    with pytest.raises(OptionError, match="did you mean 'edf'"):
        check_policy("eddf")


RULES = st.builds(
    ModelRules,
    st.lists(st.integers(1, 3).map(float), min_size=1, max_size=4).map(tuple),
    st.none() | st.integers(1, 12).map(float),
    st.none() | st.integers(1, 50).map(float),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from(["newest", "oldest"]),
)


class Dispatching(RuleBasedStateMachine):
    """Any sequence of events, checked against what a dispatcher guarantees."""

    @initialize(
        lanes=st.integers(1, 3),
        policy=st.sampled_from(sorted(set(POLICIES) - {"top"})),
        drop_late=st.booleans(),
        patience_ms=st.sampled_from([0.0, 5.0, 1000.0]),
        models=st.lists(RULES, min_size=1, max_size=3),
        own=st.booleans(),
    )
    def begin(
        self, lanes: int, policy: str, *, drop_late: bool, patience_ms: float, models: list[ModelRules], own: bool
    ) -> None:
        self.rules = {f"m{at}": rules for at, rules in enumerate(models)}
        self.policy, self.lanes = policy, lanes
        self.own = {"m0": range(lanes - 1, lanes)} if own else {}
        options: dict[str, Any] = {"drop_late": drop_late, "patience_ms": patience_ms, "own_lanes": self.own}
        self.dispatcher = Dispatcher(self.rules, lanes, policy, **options)
        self.now_ms = 0.0
        self.served = [*self.rules]
        #: The block that each lane runs: (task, model, block).
        self.running: dict[int, tuple[int, str, int]] = {}
        self.blocks: dict[int, int] = {}  # run so far
        self.open: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self.cancelled: set[int] = set()

    def lanes_of(self, model: str) -> range:
        return self.own.get(model, range(max(1, self.lanes - bool(self.own))))

    def take(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Over):
                assert self.open.pop(action.number), "over twice"
                self.ended[action.number] = action.outcome
            else:
                assert action.lane not in self.running
                assert action.lane in self.lanes_of(action.model)
                assert action.model in self.served
                assert all(number != action.number for number, _, _ in self.running.values())
                assert self.blocks.get(action.number, 0) == action.block
                assert self.open[action.number] == action.model
                self.running[action.lane] = (action.number, action.model, action.block)
                self.blocks[action.number] = action.block + 1

    @rule(at=st.integers(0, 2), wait_ms=st.integers(0, 3), deadline_ms=st.none() | st.integers(0, 20))
    def submit(self, at: int, wait_ms: int, deadline_ms: int | None) -> None:
        self.now_ms += wait_ms
        model = self.served[at % len(self.served)]
        number, actions = self.dispatcher.submit(model, self.now_ms, deadline_ms)
        self.open[number] = model
        self.take(actions)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), wait_ms=st.integers(0, 3), fails=st.booleans())
    def end(self, data: st.DataObject, wait_ms: int, *, fails: bool) -> None:
        self.now_ms += wait_ms
        lane = data.draw(st.sampled_from(sorted(self.running)))
        number, model, block = self.running.pop(lane)
        actions = (self.dispatcher.fail if fails else self.dispatcher.finish)(lane, self.now_ms)
        self.take(actions)
        last = block + 1 == len(self.rules[model].block_ms)
        if model not in self.served:
            assert self.ended[number] == "removed"
        elif number in self.cancelled:
            assert self.ended[number] == "cancelled"
        elif fails:
            assert self.ended[number] == "failed"
        elif last:
            assert self.ended[number] == "done"

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, max(self.blocks)))
        runs_now = any(number == task for task, _, _ in self.running.values())
        before = number in self.open
        if before:
            self.cancelled.add(number)
        self.take(self.dispatcher.cancel(number, self.now_ms))
        assert (number in self.open) == (before and runs_now)

    @precondition(lambda self: len(self.rules) < 6)
    @rule(rules=RULES)
    def add(self, rules: ModelRules) -> None:
        name = f"m{len(self.rules)}"
        self.dispatcher.add(name, rules)
        self.rules[name] = rules
        self.served.append(name)

    @precondition(lambda self: len(self.served) > 1)
    @rule(at=st.integers(0, 2))
    def remove(self, at: int) -> None:
        name = self.served.pop(at % len(self.served))
        self.take(self.dispatcher.remove(name, self.now_ms))
        running = {number for number, _, _ in self.running.values()}
        assert all(model != name or number in running for number, model in self.open.items())

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        assert set(self.dispatcher.tasks) == set(self.open)
        assert self.dispatcher.busy == len(self.running)
        for name in self.served:
            assert self.dispatcher.waiting(name) <= self.rules[name].queue
            begun = [n for n, model in self.open.items() if model == name and self.blocks.get(n)]
            assert len(begun) <= self.lanes
        ready = [task for task in self.dispatcher.tasks.values() if task.lane is None]
        if self.policy != "static":  # of which models have lanes of their own
            idle = {*range(self.lanes)} - {*self.running}
            assert all(idle.isdisjoint(self.lanes_of(task.model)) for task in ready), "a lane is idle beside work"

    def teardown(self) -> None:
        """Every task is over after a bounded number of blocks."""
        if not hasattr(self, "dispatcher"):
            return
        left = sum(len(self.rules[model].block_ms) - self.blocks.get(n, 0) for n, model in self.open.items())
        left += len(self.running)
        while self.running:
            assert left > 0
            left -= 1
            lane = min(self.running)
            del self.running[lane]
            self.now_ms += 1
            self.take(self.dispatcher.finish(lane, self.now_ms))
        assert not self.open


TestDispatching = Dispatching.TestCase
TestDispatching.settings = examples(200)


def test_many_tasks_leave_nothing_behind() -> None:
    """After 100 000 tasks, a tenth of them cancelled, the dispatcher has as little memory as after 1 000."""
    dispatcher = Dispatcher({"a": ModelRules((1.0, 1.0), deadline_ms=5), "b": ModelRules((1.0,))}, 1, "edf")

    def serve(count: int) -> int:
        for at in range(count):
            number, _ = dispatcher.submit("ab"[at % 2], 2.0 * at)
            if at % 10 == 0:
                dispatcher.cancel(number, 2.0 * at)
            while dispatcher.busy:
                dispatcher.finish(0, 2.0 * at)
        gc.collect()
        return sys.getallocatedblocks()

    first = serve(1_000)
    assert serve(99_000) < first + 100


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"top"}))
def test_no_task_starves(policy: str) -> None:
    """Beside tasks that take all of the time and are more urgent, a task is over after a bounded time.

    The others arrive every 2 ms and take 2 ms, with the earlier deadlines and the higher priority.
    """
    rules = {"busy": ModelRules((2.0,), deadline_ms=4), "rare": ModelRules((2.0, 2.0), priority=1)}
    dispatcher = Dispatcher(rules, 1, policy, patience_ms=100)
    rare, _ = dispatcher.submit("rare", 0)
    for now_ms in range(0, 400, 2):
        dispatcher.submit("busy", now_ms)
        dispatcher.finish(0, now_ms + 2)
    assert rare not in dispatcher.tasks

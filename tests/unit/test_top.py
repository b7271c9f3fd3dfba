"""TOP: combined blocks, stages, and the dispatcher with its launcher."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
from combined_costs import combine_costs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chrion.graph.blocks import ModuleChain, combine, cut_modules, cut_pieces, split_into_blocks
from chrion.graph.dag import Dag
from chrion.profiler.costs import uniform_costs
from chrion.scheduler.policies.endings import Block, endings
from chrion.serving.multi.combined import StageTable, TopPlan, decode, separate, sub_blocks
from chrion.serving.multi.dispatcher import Action, ModelRules, Over, Replan, Run
from chrion.serving.multi.simulation import Arrival, simulate
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.virtual_lanes import PinnedLanes
from property_tests import examples
from strategies import dags

#: An Inception module of four branches: 1x1; 1x1, 3x3; 1x1, 3x3, 3x3; pool, 1x1; and their concatenation.
BRANCHES = [(0, 7), (1, 2), (2, 7), (3, 4), (4, 5), (5, 7), (6, 7)]


def chain_of(count: int) -> ModuleChain:
    return ModuleChain.straight(count)


def top(
    rules: Mapping[str, ModelRules],
    plan: TopPlan | None = None,
    *,
    lanes: int = 1,
    chains: Mapping[str, ModuleChain] | None = None,
    **options: object,
) -> TopDispatcher:
    chains = chains or {name: chain_of(len(own.block_ms)) for name, own in rules.items()}
    table = StageTable(chains, {name: (own.block_ms, own.block_ms) for name, own in rules.items()}, lanes)
    return TopDispatcher(rules, lanes, chains, plan or separate(chains), table, **options)  # type: ignore[arg-type]


def runs(actions: Sequence[Action]) -> list[tuple[int, int, int]]:
    """Return what begins as (lane, task, piece)."""
    return [(a.lane, a.number, a.block) for a in actions if isinstance(a, Run)]


@examples(100)
@given(dags())
def test_modules_are_parts_of_the_order(dag: Dag) -> None:
    """Each operator is in one piece, reads from earlier modules or its own, and no path leaves a piece and returns."""
    modules = cut_modules(dag)
    home = {i: at for at, module in enumerate(modules) for i in module}
    assert sorted(home) == list(range(len(dag)))
    assert all(home[m] <= home[i] for i in home for m in dag.predecessors[i])
    pieces = cut_pieces(dag)
    assert [sorted(itertools.chain(*own)) for own in pieces] == [sorted(module) for module in modules]
    flat = [piece for own in pieces for piece in own]
    at = {i: number for number, piece in enumerate(flat) for i in piece}
    assert all(at[m] <= at[i] for i in at for m in dag.predecessors[i])


def test_a_straight_part_joins_the_module_behind_it() -> None:
    """Between two modules with branches, a sequence belongs to the second; those at the ends are their own."""
    edges = [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5), (5, 6), (5, 7), (6, 8), (7, 8), (8, 9)]
    dag = Dag.from_edges(10, edges)
    assert split_into_blocks(dag) == [[0], [1], [2, 3, 4], [5], [6, 7, 8], [9]]
    assert cut_modules(dag) == [[0, 1], [2, 3, 4], [5, 6, 7, 8], [9]]
    assert cut_pieces(dag) == [[(0, 1)], [(2,), (3,), (4,)], [(5,), (6,), (7,), (8,)], [(9,)]]
    chain = ModuleChain.of(dag, cut_pieces(dag))
    assert chain.modules == ((0,), (1, 2, 3), (4, 5, 6, 7), (8,))
    assert chain.before == ((), (), (), (1, 2), (), (4,), (4,), (5, 6), ())


def test_combined_parts_keep_their_own_edges_only() -> None:
    """Two parts of one model serve different tasks, so that the edge between them is cut."""
    dag = Dag.from_edges(4, [(0, 1), (1, 2), (2, 3)], [1, 2, 3])
    both = combine([(dag, (2, 3)), (dag, (0, 1))])
    assert both.predecessors == ((), (0,), (), (2,))
    assert both.edge_bytes == ((), (3,), (), (1,))


def test_costs_of_combined_parts_are_those_of_their_operators() -> None:
    """Times, memory and shares follow the operators of each part, in its order."""
    first = uniform_costs(Dag.from_edges(3, []), accelerator_ms=2.0, cpu_ms=(1.0, 3.0), handoff_ms=0.5)
    first = replace(first, accelerator_share=(0.1, 0.2, 0.3), accelerator_ms=(1.0, 2.0, 3.0))
    second = replace(first, cpu_ms=((7.0, 8.0, 9.0),) * 2)
    both = combine_costs([(first, (2, 0)), (second, (1,))])
    assert both.accelerator_ms == (3.0, 1.0, 2.0)
    assert both.cpu_ms == ((1.0, 1.0, 8.0), (3.0, 3.0, 8.0))
    assert both.accelerator_share == (0.3, 0.1, 0.2)
    assert (len(both.memory), both.handoff_ms) == (3, 0.5)


@pytest.mark.parametrize("copies", [1, 2])
def test_endings_of_equal_parts_multiply(copies: int) -> None:
    """Of k equal parts with e endings each, there are (e + 1)^k - 1, counted over all subsets of operators."""
    dag = Dag.from_edges(4, [(0, 2), (1, 2), (2, 3)])
    whole = combine([(dag, range(4))] * copies)
    closed = sum(
        all(s in own for i in own for s in whole.successors[i])
        for size in range(1, len(whole) + 1)
        for own in map(set, itertools.combinations(range(len(whole)), size))
    )
    block = Block.of(whole, [(i,) for i in whole.topological_order])
    assert closed == 6**copies - 1 == sum(1 for _ in endings(block, block.whole, None, None))


def test_an_action_is_a_plan() -> None:
    """Sub-blocks in the same of five equal intervals are combined; 1.0 is in the last one (Figures 9 and 10)."""
    chains = {"a": chain_of(3), "b": chain_of(2)}
    plan = decode([0.25, 0.0, 0.1, 0.5, 1.0, 0.19, 0.9], chains)
    assert plan.intervals_ms == {"a": 250.0, "b": 0.0}
    assert plan.combined == ((("a", 0), ("b", 0)), (("a", 1),), (("a", 2), ("b", 1)))
    assert plan.largest == 2


def test_stages_of_a_combined_block_hold_each_piece_once() -> None:
    """Pieces come after those that they read from, groups of a stage do not depend, and the limits r and s hold."""
    chain = ModuleChain((tuple(range(8)), (8,)), tuple(tuple(m for m, i in BRANCHES if i == at) for at in range(9)))
    chains = {"a": chain, "b": chain_of(2)}
    table = StageTable(chains, {"a": ((1.0,) * 9,) * 2, "b": ((1.0,) * 2,) * 2}, 2)
    members = (("a", 0), ("a", 1), ("b", 1))
    stages = table.stages(members)
    placed = [(piece, at, group) for at, stage in enumerate(stages) for group in stage for piece in group]
    assert Counter(piece for piece, _, _ in placed) == Counter([*(("a", i) for i in range(9)), ("b", 1)])
    where = {piece: (at, group) for piece, at, group in placed}
    for before, after in BRANCHES:
        first, second = where["a", before], where["a", after]
        assert first[0] < second[0] or (first[1] is second[1] and first[1].index(("a", before)) < 8)
    assert all(len(group) <= 3 for stage in stages for group in stage)
    assert all(len(stage) <= 8 for stage in stages)
    assert table.stages(members) is stages


def test_two_lanes_halve_a_module_with_equal_branches() -> None:
    """Four equal branches of 1 ms and their sum take 3 ms on two lanes; the stage ends before the sum begins."""
    chains = {"a": ModuleChain(((0, 1, 2, 3, 4),), ((), (), (), (), (0, 1, 2, 3)))}
    rules = {"a": ModelRules((1.0,) * 5)}
    dispatcher = top(rules, lanes=2, chains=chains)
    served, spans = simulate(dispatcher, [Arrival(0.0, "a")], PinnedLanes(2, {"a": (rules["a"].block_ms,) * 2}))
    assert served[0].end_ms == 3.0
    assert max(span.end_ms for span in spans if span.block < 4) == 2.0


def test_the_launcher_keeps_its_interval() -> None:
    """At an interval of 10 ms, tasks that wait begin every 10 ms, whether or not lanes are idle."""
    rules = {"a": ModelRules((1.0, 1.0))}
    plan = TopPlan({"a": 10.0}, ((("a", 0),), (("a", 1),)))
    dispatcher = top(rules, plan)
    served, _ = simulate(dispatcher, [Arrival(0.0, "a")] * 3, PinnedLanes(1, {"a": ((1.0, 1.0),) * 2}))
    assert [task.end_ms for task in served] == [2.0, 12.0, 22.0]


def test_nothing_is_held_back_in_a_hurry() -> None:
    """Tasks that wait for the launcher follow at once, and are not late because of the times that it had for them."""
    dispatcher = top({"a": ModelRules((1.0,), deadline_ms=10)}, TopPlan({"a": 100.0}, ((("a", 0),),)), drop_late=True)
    for _ in range(3):
        dispatcher.submit("a", 0)
    assert dispatcher.finish(0, 1) == [Over(0, "done")]
    assert runs(dispatcher.hurry(1)) == [(0, 1, 0)]
    assert dispatcher.finish(0, 2) == [Over(1, "done"), Run(0, 2, "a", 0)]
    assert dispatcher.finish(0, 3) == [Over(2, "done")]


def test_the_block_with_more_of_its_inputs_runs_first() -> None:
    """Of a combined block with one of two tasks and one with its only task, the latter has the higher Ratio_in."""
    rules = {name: ModelRules((1.0,)) for name in "abc"}
    plan = TopPlan(dict.fromkeys("abc", 0.0), ((("a", 0), ("b", 0)), (("c", 0),)))
    dispatcher = top(rules, plan)
    assert runs(dispatcher.submit("c", 0)[1]) == [(0, 0, 0)]
    dispatcher.submit("a", 0)
    dispatcher.submit("c", 0)
    assert runs(dispatcher.finish(0, 1)) == [(0, 2, 0)]
    assert runs(dispatcher.finish(0, 2)) == [(0, 1, 0)]


def test_no_block_starves() -> None:
    """A combined block whose sub-blocks never meet runs when its task has waited longer than the patience."""
    rules = {name: ModelRules((1.0,)) for name in "abc"}
    plan = TopPlan(dict.fromkeys("abc", 0.0), ((("a", 0), ("b", 0)), (("c", 0),)))
    dispatcher = top(rules, plan, patience_ms=10.0)
    dispatcher.submit("c", 0)
    starving, _ = dispatcher.submit("a", 0)
    for now_ms in range(1, 20):
        dispatcher.submit("c", now_ms - 0.5)
        if starving in {task for _, task, _ in runs(dispatcher.finish(0, now_ms))}:
            assert now_ms > 10
            return
    pytest.fail("the task has not run")


def test_tasks_of_one_model_follow_each_other_through_its_modules() -> None:
    """With both modules of a model combined, two tasks run at the same time, each in a module of its own."""
    rules = {"a": ModelRules((1.0, 1.0))}
    plan = TopPlan({"a": 0.0}, ((("a", 0), ("a", 1)),))
    dispatcher = top(rules, plan, lanes=2)
    assert runs(dispatcher.submit("a", 0)[1]) == [(0, 0, 0)]
    dispatcher.submit("a", 0)
    dispatcher.submit("a", 0)
    assert runs(dispatcher.finish(0, 1)) == [(0, 0, 1), (1, 1, 0)]
    assert dispatcher.finish(0, 2) == []  # the combined block has not ended
    assert dispatcher.finish(1, 2) == [Over(0, "done"), Run(0, 1, "a", 1), Run(1, 2, "a", 0)]


def test_uneven_queues_ask_for_another_plan_while_tasks_go_on() -> None:
    """At a variance above T a plan is asked for once; after it is adopted, the next combined block obeys it."""
    rules = {"a": ModelRules((1.0,)), "b": ModelRules((1.0,))}
    dispatcher = top(rules, replan=lambda _: separate({"a": chain_of(1), "b": chain_of(1)}), variance=4.0)
    asked = []
    for at in range(8):
        asked += [a for a in dispatcher.submit("a", 1000.0 + 200 * at)[1] if isinstance(a, Replan)]
    assert [(a.waiting, a.rates) for a in asked] == [({"a": 5, "b": 0}, {"a": 6.0, "b": 0.0})]
    running = dispatcher.busy
    assert dispatcher.adopt(TopPlan({"a": 500.0, "b": 0.0}, ((("a", 0),), (("b", 0),))), 2400) == []
    assert dispatcher.busy == running == 1
    assert runs(dispatcher.finish(0, 2401)) == [(0, 1, 0)]
    assert runs(dispatcher.finish(0, 2402)) == []
    assert dispatcher.wake_ms == 2901.0
    assert runs(dispatcher.wake(2901.0)) == [(0, 2, 0)]


def test_a_failed_piece_ends_its_task_when_the_block_has_ended() -> None:
    """Other lanes finish their pieces of the task, none begins, and other tasks go on."""
    chains = {"a": ModuleChain(((0, 1, 2),), ((), (), (0, 1)))}
    dispatcher = top({"a": ModelRules((1.0, 1.0, 1.0))}, lanes=2, chains=chains)
    dispatcher.submit("a", 0)
    dispatcher.submit("a", 0)
    assert dispatcher.fail(0, 1) == []
    assert [a for a in dispatcher.finish(1, 1) if isinstance(a, Over)] == [Over(0, "failed")]
    assert dispatcher.busy == 2


def test_late_and_cancelled_tasks_between_modules_are_over() -> None:
    """A task that waits before a module is dropped once it cannot meet its deadline, or when it is cancelled."""
    rules = {"a": ModelRules((2.0, 2.0))}
    plan = TopPlan({"a": 0.0}, ((("a", 0),), (("a", 1),)))
    dispatcher = top(rules, plan, drop_late=True)
    dispatcher.submit("a", 0, 4.2)
    assert dispatcher.finish(0, 2.5) == [Over(0, "late")]
    dispatcher.submit("a", 3, 100)
    dispatcher.cancel(1, 3)
    assert dispatcher.finish(0, 5) == [Over(1, "cancelled")]
    dispatcher.submit("a", 5, 100)
    dispatcher.finish(0, 7)
    dispatcher.cancel(2, 8)
    assert dispatcher.finish(0, 9) == [Over(2, "cancelled")]  # also in its last module
    assert not dispatcher.tasks


@examples(60)
@given(st.integers(1, 3), st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 40), st.sampled_from("ab"))))
def test_every_task_runs_each_piece_once_in_order(lanes: int, seed: int, tasks: list[tuple[int, str]]) -> None:
    """By random plans, tasks run every piece after those that it reads from, and a module after the one before it."""
    pick = Random(seed)
    chains = {"a": ModuleChain(((0, 1, 2, 3), (4,)), ((), (0,), (0,), (1, 2), ())), "b": chain_of(3)}
    rules = {"a": ModelRules((2.0, 3.0, 1.0, 1.0, 4.0)), "b": ModelRules((1.0, 2.0, 1.0))}
    plan = decode([0.02 * pick.random(), 0.0, *(pick.random() for _ in sub_blocks(chains))], chains)
    arrivals = [Arrival(float(at), model) for at, model in sorted(tasks)]
    times = {name: (own.block_ms, own.block_ms) for name, own in rules.items()}
    dispatcher = top(rules, plan, lanes=lanes, chains=chains)
    served, spans = simulate(dispatcher, arrivals, PinnedLanes(lanes, times))
    assert Counter(task.model for task in served) == Counter(arrival.model for arrival in arrivals)
    for number, arrival in enumerate(arrivals):
        chain = chains[arrival.model]
        own = {span.block: span for span in spans if span.task == number}
        assert sorted(own) == list(range(len(chain.before)))
        assert sum(span.task == number for span in spans) == len(own)
        for at, before in enumerate(chain.before):
            assert all(own[m].end_ms <= own[at].start_ms for m in before)
        for first, second in itertools.pairwise(chain.modules):
            assert max(own[m].end_ms for m in first) <= min(own[m].start_ms for m in second)
    for lane in range(lanes):
        mine = sorted((span.start_ms, span.end_ms) for span in spans if span.lane == lane)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(mine))


class TopMachine(RuleBasedStateMachine):
    """Random events: each task is over once, lanes run one piece, and nothing waits for ever."""

    @initialize(lanes=st.integers(1, 3), seed=st.integers(0, 1000), drop=st.booleans())
    def start(self, lanes: int, seed: int, drop: bool) -> None:  # noqa: FBT001 - hypothesis passes it
        pick = Random(seed)
        self.chains = {"a": ModuleChain(((0, 1, 2), (3,)), ((), (), (0, 1), ())), "b": chain_of(2)}
        self.rules = {"a": ModelRules((1.0,) * 4, deadline_ms=9, queue=3), "b": ModelRules((2.0, 1.0), queue=3)}
        self.plan = decode([0.0, 0.004, *(pick.random() for _ in range(4))], self.chains)
        self.dispatcher = top(
            self.rules,
            self.plan,
            lanes=lanes,
            chains=self.chains,
            drop_late=drop,
            replan=lambda _: self.plan,
            variance=1.0,
        )
        self.now_ms = 0.0
        self.lanes: dict[int, tuple[int, int]] = {}
        self.done: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.submitted = 0

    def note(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                assert action.lane not in self.lanes
                assert action.number not in self.done
                assert action.number not in self.failed
                self.lanes[action.lane] = action.number, action.block
            elif isinstance(action, Over):
                self.done[action.number] += 1
                assert action.number not in {number for number, _ in self.lanes.values()}
            else:
                self.note(self.dispatcher.adopt(self.plan, self.now_ms))

    @rule(model=st.sampled_from("ab"), later=st.integers(0, 400))
    def submit(self, model: str, later: int) -> None:
        self.now_ms += later
        self.note(self.dispatcher.submit(model, self.now_ms)[1])
        self.submitted += 1

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end(self, data: st.DataObject, fails: bool) -> None:  # noqa: FBT001 - hypothesis passes it
        self.now_ms += 1
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        number, _ = self.lanes.pop(lane)
        self.failed |= {number} if fails else set()
        self.note((self.dispatcher.fail if fails else self.dispatcher.finish)(lane, self.now_ms))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.note(self.dispatcher.cancel(data.draw(st.integers(0, self.submitted - 1)), self.now_ms))

    @rule()
    def wake(self) -> None:
        if self.dispatcher.wake_ms < math.inf:
            self.now_ms = max(self.now_ms, self.dispatcher.wake_ms)
            self.note(self.dispatcher.wake(self.now_ms))

    @invariant()
    def each_task_is_over_once(self) -> None:
        if hasattr(self, "dispatcher"):
            assert all(count == 1 for count in self.done.values())
            assert set(self.dispatcher.tasks) == set(range(self.submitted)) - set(self.done)
            assert self.dispatcher.busy == len(self.lanes)

    def teardown(self) -> None:
        """Serve what is left: everything ends."""
        for _ in range(10_000):
            if not hasattr(self, "dispatcher") or not self.dispatcher.tasks:
                return
            self.now_ms += 1
            if self.lanes:
                lane = min(self.lanes)
                del self.lanes[lane]
                self.note(self.dispatcher.finish(lane, self.now_ms))
            else:
                assert self.dispatcher.wake_ms < math.inf
                self.wake()
        pytest.fail("tasks are left")


TestTopMachine = TopMachine.TestCase
TestTopMachine.settings = examples(150)

"""The dispatcher of TOP: combined blocks, one at a time on all lanes, and a launcher in front of them.

Lin, Chen, Zhang, Liu, IEEE TPDS 2024, section VI-A. The launcher takes tasks from the queues, at most one an interval.
Of the combined blocks, the one runs first of which the greatest part of the sub-blocks has a task (``Ratio_in``), and
only those sub-blocks run. Its stages follow each other; within a stage, idle lanes take the longest group that is left.

Choices, where the paper is silent or its rule has a gap:

- A task waits before a sub-block until the next sub-block is free or runs as well; otherwise values between modules
  would need memory without limit. So at most as many tasks of a model have begun as it has modules.
- A combined block whose task has waited longer than the patience comes first. By the ratio alone, one whose sub-blocks
  rarely meet would starve. Equal ratios are served by arrival.
- Queues are first come, first served. Deadlines only matter if late tasks are dropped.
- The variance of the queues is that of the tasks that have not begun. After a plan has been replaced, it is not
  replaced again before it has had a second to show its effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from chrion.graph.blocks import ModuleChain
from chrion.serving.multi.combined import Group, StageTable, SubBlock, TopPlan
from chrion.serving.multi.dispatcher import Action, Dispatcher, ModelRules, Outcome, Over, Replan, Run, Task

#: T: the variance of the lengths of the queues from which the plan is replaced. The 2e5 of the paper belongs to queues
#: of hundreds of tasks; this is a standard deviation of five.
VARIANCE = 25.0
#: The time that a new plan has to show its effect.
_SETTLE_MS = 1000.0
_ROUNDING_MS = 1e-6


@dataclass(slots=True)
class _Round:
    """A combined block that runs."""

    #: Groups of each stage that have not begun, the longest last; the current stage is the last one.
    stages: list[list[tuple[Task, Group]]]
    #: The tasks and their modules.
    members: dict[Task, int]
    failed: set[Task]


class TopDispatcher(Dispatcher):
    """Decides which pieces run by TOP; see :class:`Dispatcher` for events and actions.

    ``Run.block`` is a piece. Several lanes may run pieces of a task at a time. A lane may be idle while tasks are
    ready: until the current stage ends, and until the launcher takes the next task.

    Args:
        models: The models by name; ``block_ms`` has the times of pieces.
        lanes: The number of lanes.
        chains: The modules of the models.
        plan: The launcher's intervals and the combined blocks.
        table: The stages of combined blocks.
        replan: Returns another plan for queues that have become uneven; without it, the plan stays.
        variance: T.
        drop_late: Drop a task as soon as it cannot meet its deadline any more.
        patience_ms: The time from which a task that waits before a sub-block comes first.
    """

    def __init__(  # noqa: PLR0913 - optional arguments are keyword-only
        self,
        models: Mapping[str, ModelRules],
        lanes: int,
        chains: Mapping[str, ModuleChain],
        plan: TopPlan,
        table: StageTable,
        *,
        replan: Callable[[Replan], TopPlan] | None = None,
        variance: float = VARIANCE,
        drop_late: bool = False,
        patience_ms: float = 1000.0,
    ) -> None:
        super().__init__(models, lanes, "top", drop_late=drop_late, patience_ms=patience_ms)
        self._chains, self._table, self._variance = chains, table, variance
        self.replan = replan
        self._use(plan)
        #: The task before each sub-block, and since when it waits.
        self._slots: dict[SubBlock, tuple[Task, float]] = {}
        self._round: _Round | None = None
        #: The piece that each busy lane runs, and those that follow.
        self._groups: dict[int, Group] = {}
        self._launch_ms = dict.fromkeys(models, -math.inf)
        self._arrived = dict.fromkeys(models, 0)
        self._since_ms: float | None = None
        self._replanning = replan is None

    @property
    def plan(self) -> TopPlan:
        """The plan."""
        return self._plan

    @property
    def wake_ms(self) -> float:
        """When the launcher may take a task that waits although lanes are idle; infinite if none does."""
        if self._round:
            return math.inf
        ready = (name for name, queue in self._queues.items() if queue.waiting and (name, 0) not in self._slots)
        return min((self._launch_ms[name] for name in ready), default=math.inf)

    def submit(self, model: str, now_ms: float, deadline_ms: float | None = None) -> tuple[int, list[Action]]:
        """Add a task; see :meth:`Dispatcher.submit`."""
        self._since_ms = now_ms if self._since_ms is None else self._since_ms
        self._arrived[model] += 1
        return super().submit(model, now_ms, deadline_ms)

    def adopt(self, plan: TopPlan, now_ms: float) -> list[Action]:
        """Replace the plan from the next combined block on, and return what follows; no task stops."""
        self._use(plan)
        self._since_ms, self._arrived = now_ms, dict.fromkeys(self._arrived, 0)
        self._replanning = False
        self._launch_ms = {name: min(at, now_ms + plan.intervals_ms[name]) for name, at in self._launch_ms.items()}
        return self._assign(now_ms)

    def hurry(self, now_ms: float) -> list[Action]:
        """Take tasks from the queues without intervals from now on; see :meth:`Dispatcher.hurry`."""
        actions = self.adopt(replace(self._plan, intervals_ms=dict.fromkeys(self._plan.intervals_ms, 0.0)), now_ms)
        self._replanning = True  # the plan stays
        return actions

    def _use(self, plan: TopPlan) -> None:
        self._plan = plan
        #: The combined blocks, and their sub-blocks with later ones of a model first.
        self._combined = [(own, sorted(own, key=lambda block: -block[1])) for own in plan.combined]

    def finish(self, lane: int, now_ms: float) -> list[Action]:
        """Note that a lane has run its piece, and return what follows."""
        task = self._lanes[lane]
        rest = self._groups.pop(lane)[1:]
        assert task is not None  # noqa: S101 - the lane runs a piece
        assert self._round is not None  # noqa: S101 - of this round
        if rest and task not in self._round.failed:
            return [self._start(task, rest, lane)]
        self._lanes[lane] = None
        return self._assign(now_ms)

    def fail(self, lane: int, now_ms: float) -> list[Action]:
        """Note that the piece of a lane has failed; the task is over when no lane runs a piece of it."""
        task = self._lanes[lane]
        assert task is not None  # noqa: S101 - the lane runs a piece
        assert self._round is not None  # noqa: S101 - of this round
        self._round.failed.add(task)
        return self.finish(lane, now_ms)

    def _assign(self, now_ms: float) -> list[Action]:
        actions: list[Action] = []
        while True:
            if self._round is None:
                actions += self._launch(now_ms)
                self._round = self._choose(now_ms, actions)
            if self._round is None:
                break
            actions += self._fill(self._round)
            if any(self._lanes):
                break
            actions += self._end_round(self._round, now_ms)
        return actions + self._check_queues(now_ms)

    def _launch(self, now_ms: float) -> list[Action]:
        """Take tasks from the queues, and drop those that are too late."""
        actions: list[Action] = []
        for name, queue in self._queues.items():
            while queue.waiting and self._is_late(queue.waiting[0][2], now_ms):
                actions.append(self._end(queue.waiting[0][2], "late"))
            due_ms, interval_ms = self._launch_ms[name], self._plan.intervals_ms[name]
            if queue.waiting and (name, 0) not in self._slots and now_ms >= due_ms - _ROUNDING_MS:
                task = queue.waiting[0][2]
                queue.remove(task)
                queue.running += 1
                self._slots[name, 0] = task, now_ms
                # A combined block that runs delays the launcher, which makes up for less than an interval.
                self._launch_ms[name] = (due_ms if now_ms - due_ms < interval_ms else now_ms) + interval_ms
        return actions

    def _choose(self, now_ms: float, actions: list[Action]) -> _Round | None:
        """Return the combined block to run next, and drop tasks that are too late."""
        late = [task for task, _ in self._slots.values() if self._is_late(task, now_ms)]
        actions += [self._end(task, "late") for task in late]
        best: tuple[tuple[int, float, float], tuple[SubBlock, ...], list[SubBlock]] | None = None
        for members, later_first in self._combined:
            ready = self._ready(later_first)
            if ready:
                since_ms = min(self._slots[block][1] for block in ready)
                arrival_ms = min(self._slots[block][0].arrival_ms for block in ready)
                aged = now_ms - since_ms > self._patience_ms
                rank = (0, since_ms, 0.0) if aged else (1, -len(ready) / len(members), arrival_ms)
                if best is None or rank < best[0]:
                    best = rank, members, ready
        return self._begin(best[1], best[2]) if best else None

    def _ready(self, later_first: Sequence[SubBlock]) -> list[SubBlock]:
        """Return the sub-blocks that have a task and a place for its values."""
        ready: list[SubBlock] = []
        for block in later_first:
            if block in self._slots:
                following = block[0], block[1] + 1
                if following not in self._slots or following in ready:
                    ready.append(block)
        return ready

    def _begin(self, members: tuple[SubBlock, ...], ready: list[SubBlock]) -> _Round:
        tasks = {}
        for model, at in ready:
            for piece in self._chains[model].modules[at]:
                tasks[model, piece] = self._slots[model, at][0]
        stages = []
        for stage in self._table.stages(members):
            own = [(tasks[group[0]], group) for group in stage if group[0] in tasks]
            if own:
                stages.append(sorted(own, key=lambda part: self._group_ms(part[1])))
        round_ = _Round(stages[::-1], {self._slots[block][0]: block[1] for block in ready}, set())
        for block in ready:
            task, _ = self._slots.pop(block)
            task.lane = 0  # it is not idle
        return round_

    def _group_ms(self, group: Group) -> float:
        return sum(self._queues[model].rules.block_ms[piece] for model, piece in group)

    def _fill(self, round_: _Round) -> list[Action]:
        """Give groups of the current stage to idle lanes; begin the next stage if all lanes are idle."""
        actions: list[Action] = []
        while round_.stages:
            groups = round_.stages[-1]
            for lane, running in enumerate(self._lanes):
                while running is None and groups:
                    task, group = groups.pop()
                    if task not in round_.failed:
                        actions.append(self._start(task, group, lane))
                        break
            if groups or any(self._lanes):
                break
            round_.stages.pop()
        return actions

    def _start(self, task: Task, group: Group, lane: int) -> Run:
        self._lanes[lane] = task
        self._groups[lane] = group
        return Run(lane, task.number, *group[0])

    def _end_round(self, round_: _Round, now_ms: float) -> list[Action]:
        """Move the tasks of a combined block to their next sub-blocks."""
        actions: list[Action] = []
        self._round = None
        for task, at in round_.members.items():
            task.lane = None
            modules = self._chains[task.model].modules
            last = at + 1 == len(modules)
            if task in round_.failed or last or task.cancelled:
                self._queues[task.model].running -= 1
                outcome: Outcome = "failed" if task in round_.failed else "done"
                actions.append(self._over(task, "cancelled" if task.cancelled else outcome))
            else:
                task.block = modules[at + 1][0]
                self._slots[task.model, at + 1] = task, now_ms
        return actions

    def _check_queues(self, now_ms: float) -> list[Action]:
        """Ask for another plan if the queues have become uneven."""
        if self._replanning or self._since_ms is None or now_ms < self._since_ms + _SETTLE_MS:
            return []
        waiting = {name: len(queue.waiting) for name, queue in self._queues.items()}
        mean = sum(waiting.values()) / len(waiting)
        if sum((count - mean) ** 2 for count in waiting.values()) / len(waiting) <= self._variance:
            return []
        if not any(self._arrived.values()):  # after a burst; no rate is known
            return []
        self._replanning = True
        passed_s = (now_ms - self._since_ms) / 1e3
        return [Replan(waiting, {name: count / passed_s for name, count in self._arrived.items()})]

    def _is_late(self, task: Task, now_ms: float) -> bool:
        """Return whether a task cannot meet its deadline any more, even if all lanes work for it."""
        if not self._drop_late:
            return False
        left_ms = sum(self._queues[task.model].rules.block_ms[task.block :]) / len(self._lanes)
        return now_ms + left_ms > task.deadline_ms

    def _end(self, task: Task, outcome: Outcome) -> Over:
        """End a task that does not run."""
        for block, (other, _) in self._slots.items():
            if other is task:
                del self._slots[block]
                self._queues[task.model].running -= 1
                return self._over(task, outcome)
        return super()._end(task, outcome)

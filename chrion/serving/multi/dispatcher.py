"""The dispatcher: a state machine that decides which block of which task every lane runs next.

Events are the arrival of a task, the end or the failure of a block, and the cancellation of a task. Each returns the
actions that follow: blocks to run and tasks that are over. There are no threads and no clock: lanes of a session, the
simulation and the tests drive the same object, and pass the time in ms with every event.

Between two blocks a task waits like any other, so that one which is due earlier overtakes it. Blocks are never stopped.

Guarantees. The blocks of a task run in order, one at a time. A lane runs one block at a time. No lane is idle while a
task is ready that may run on it. Every task is over exactly once: done, failed, cancelled or dropped; a cancelled one
is never done or failed. At most as many tasks of a model as there are lanes have begun and not ended, which bounds the
memory of their values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from chrion.serving.multi.policies import assign_lanes

#: Why a task is over.
Outcome = Literal["done", "failed", "cancelled", "full", "late", "removed"]


@dataclass(frozen=True, slots=True)
class ModelRules:
    """A model, and how its tasks are treated."""

    #: The expected time of each block.
    block_ms: tuple[float, ...]
    #: The time from a task's arrival to its deadline; None without one.
    deadline_ms: float | None = None
    #: The expected tasks per second, with which ``static`` divides the lanes; None if unknown.
    rate: float | None = None
    #: 0 is served first by ``priority``.
    priority: int = 0
    #: The most tasks that wait to begin.
    queue: int = 64
    #: The task that a full queue drops: the one that arrives, or the one that has waited longest.
    drop: Literal["newest", "oldest"] = "newest"

    @property
    def total_ms(self) -> float:
        """The expected time of a task alone."""
        return sum(self.block_ms)


@dataclass(slots=True, eq=False)
class Task:
    """A task that is not over."""

    number: int
    model: str
    arrival_ms: float
    #: When it has to end; infinite without a deadline.
    deadline_ms: float
    #: The order of tasks: lower is served first.
    due_ms: float
    #: The next block, or the one that runs.
    block: int = 0
    #: The lane that runs it, or None.
    lane: int | None = None
    #: Whether it was cancelled, or its model removed, while a block ran.
    cancelled: bool = False
    #: Whether it waits behind tasks that can meet their deadlines.
    late: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A lane has to run a block of a task."""

    lane: int
    number: int
    model: str
    block: int


@dataclass(frozen=True, slots=True)
class Over:
    """A task is over."""

    number: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Replan:
    """The queues have become uneven: another plan of ``top`` is wanted, while tasks go on."""

    #: The number of waiting tasks by model.
    waiting: Mapping[str, int]
    #: The tasks per second that have arrived of each model.
    rates: Mapping[str, float]


Action = Run | Over | Replan


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """One run of a block; times as :func:`time.perf_counter` has them, in ms."""

    lane: int
    model: str
    task: int
    block: int
    start_ms: float
    end_ms: float


@dataclass(slots=True)
class _Queue:
    """The tasks of one model that no lane runs, each kind a heap by due time and number."""

    rules: ModelRules
    lanes: frozenset[int]
    waiting: list[tuple[float, int, Task]] = field(default_factory=list)
    #: Tasks that have begun, between two blocks.
    begun: list[tuple[float, int, Task]] = field(default_factory=list)
    #: Tasks that run.
    running: int = 0
    #: Time for which the model has run, for ``fair``; raised to that of the others when it had no work.
    served_ms: float = 0.0
    #: The same before its last block began: the virtual time of start-time fair queueing.
    began_ms: float = 0.0
    #: Whether the model was removed, and its last blocks run.
    removed: bool = False

    @property
    def empty(self) -> bool:
        return not (self.waiting or self.begun or self.running)

    def head(self) -> Task | None:
        """Return the task to run next, or None."""
        if not self.begun:
            return self.waiting[0][2] if self.waiting else None
        full = len(self.begun) + self.running >= len(self.lanes)
        if full or not self.waiting or self.begun[0] <= self.waiting[0]:
            return self.begun[0][2]
        return self.waiting[0][2]

    def add(self, task: Task) -> None:
        heapq.heappush(self.begun if task.block else self.waiting, (task.due_ms, task.number, task))

    def remove(self, task: Task) -> None:
        heap = self.begun if task.block else self.waiting
        heap.remove((task.due_ms, task.number, task))
        heapq.heapify(heap)


class Dispatcher:
    """Decides which blocks run.

    Args:
        models: The models by name.
        lanes: The number of lanes.
        policy: A key of :data:`chrion.serving.multi.policies.POLICIES`.
        drop_late: Drop a task as soon as it cannot meet its deadline any more; otherwise ``edf`` and ``static`` serve
            it after the tasks that can.
        patience_ms: Ageing: the time after which a task without a deadline, of a lower priority or beyond its deadline
            is served before tasks that arrive then.
        own_lanes: The lanes of some models. The other models have the lanes that are left, or all if none is left.
    """

    def __init__(  # noqa: PLR0913 - optional arguments are keyword-only
        self,
        models: Mapping[str, ModelRules],
        lanes: int,
        policy: str,
        *,
        drop_late: bool = False,
        patience_ms: float = 1000.0,
        own_lanes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._policy, self._drop_late, self._patience_ms = policy, drop_late, patience_ms
        self._own_lanes = own_lanes or {}
        self._lanes: list[Task | None] = [None] * lanes
        self._queues = {name: _Queue(rules, frozenset()) for name, rules in models.items()}
        self._tasks: dict[int, Task] = {}
        self._count = 0
        self._divide_lanes()

    @property
    def tasks(self) -> Mapping[int, Task]:
        """The tasks that are not over, by number."""
        return self._tasks

    @property
    def busy(self) -> int:
        """The number of lanes that run a block."""
        return sum(task is not None for task in self._lanes)

    @property
    def wake_ms(self) -> float:
        """The time at which :meth:`wake` is to be called if no other event comes before; infinite if never."""
        return math.inf

    def wake(self, now_ms: float) -> list[Action]:
        """Note that :attr:`wake_ms` has come, and return what follows."""
        return self._assign(now_ms)

    def hurry(self, now_ms: float) -> list[Action]:
        """Hold no task back from now on, since no further one comes, and return what follows."""
        return self._assign(now_ms)

    def rules(self, model: str) -> ModelRules:
        """Return how the tasks of a model are treated."""
        return self._queues[model].rules

    def waiting(self, model: str) -> int:
        """Return the number of a model's tasks that have not begun."""
        return len(self._queues[model].waiting)

    def add(self, model: str, rules: ModelRules) -> None:
        """Add a model, which no other one has the name of."""
        self._queues[model] = _Queue(rules, frozenset())
        self._divide_lanes()

    def remove(self, model: str, now_ms: float) -> list[Action]:
        """Remove a model, and return what follows: its tasks are over, those that run when their blocks have ended."""
        queue = self._queues[model]
        queue.removed = True
        actions: list[Action] = []
        for task in [task for task in self._tasks.values() if task.model == model]:
            if task.lane is not None:
                task.cancelled = True
            else:
                actions.append(self._end(task, "cancelled"))
        self._forget_if_removed(model)
        return actions + self._assign(now_ms)

    def submit(self, model: str, now_ms: float, deadline_ms: float | None = None) -> tuple[int, list[Action]]:
        """Add a task.

        Args:
            model: Its model.
            now_ms: The time.
            deadline_ms: The time that the task has, if it is not the model's.

        Returns:
            The number of the task, and what follows.
        """
        queue = self._queues[model]
        rules = queue.rules
        given = rules.deadline_ms if deadline_ms is None else deadline_ms
        deadline = math.inf if given is None else now_ms + given
        task = Task(self._count, model, now_ms, deadline, self._due_ms(rules, now_ms, deadline))
        self._count += 1
        if queue.empty:
            active = [q.began_ms for q in self._queues.values() if not q.empty]
            queue.served_ms = max(queue.served_ms, min(active, default=queue.served_ms))
        self._tasks[task.number] = task
        queue.add(task)
        actions = self._assign(now_ms)
        if len(queue.waiting) > rules.queue:
            tasks = (entry[2] for entry in queue.waiting)
            actions.append(self._end(task if rules.drop == "newest" else min(tasks, key=lambda t: t.number), "full"))
        return task.number, actions

    def finish(self, lane: int, now_ms: float) -> list[Action]:
        """Note that a lane has run its block, and return what follows."""
        task = self._leave(lane)
        task.block += 1
        queue = self._queues[task.model]
        actions: list[Action] = []
        if task.cancelled:
            actions.append(self._over(task, "cancelled"))
        elif task.block == len(queue.rules.block_ms):
            actions.append(self._over(task, "done"))
        else:
            queue.add(task)
        return actions + self._assign(now_ms)

    def fail(self, lane: int, now_ms: float) -> list[Action]:
        """Note that the block of a lane has failed, and return what follows."""
        task = self._leave(lane)
        return [self._over(task, "cancelled" if task.cancelled else "failed"), *self._assign(now_ms)]

    def cancel(self, number: int, now_ms: float) -> list[Action]:
        """Cancel a task; one whose block runs is over when the block has ended. Nothing happens if it is over."""
        task = self._tasks.get(number)
        if task is None:
            return []
        if task.lane is not None:
            task.cancelled = True
            return []
        return [self._end(task, "cancelled"), *self._assign(now_ms)]

    def _divide_lanes(self) -> None:
        """Give every model its lanes."""
        every = range(len(self._lanes))
        owned = {lane for lanes in self._own_lanes.values() for lane in lanes}
        left = [lane for lane in every if lane not in owned] or every
        others = {name: queue for name, queue in self._queues.items() if name not in self._own_lanes}
        own = {name: [*range(len(left))] for name in others}
        if self._policy == "static" and others:
            loads = {name: (queue.rules.rate or 1.0) * queue.rules.total_ms for name, queue in others.items()}
            own = {name: [*lanes] for name, lanes in assign_lanes(loads, len(left)).items()}
        for name, queue in self._queues.items():
            queue.lanes = frozenset(self._own_lanes[name] if name not in own else (left[at] for at in own[name]))

    def _due_ms(self, rules: ModelRules, now_ms: float, deadline_ms: float) -> float:
        if self._policy == "priority":
            return now_ms + rules.priority * self._patience_ms
        if self._policy in {"edf", "static"}:
            return deadline_ms if deadline_ms < math.inf else now_ms + self._patience_ms
        return now_ms

    def _assign(self, now_ms: float) -> list[Action]:
        """Give blocks to idle lanes, and drop tasks that are too late."""
        actions: list[Action] = []
        idle = {lane for lane, task in enumerate(self._lanes) if task is None}
        while idle:
            heads = []
            for queue in self._queues.values():
                lanes = idle & queue.lanes
                while lanes and (task := queue.head()) and self._is_late(task, now_ms):
                    actions += self._settle(task)
                if lanes and task:
                    rank = queue.served_ms if self._policy == "fair" else task.due_ms
                    heads.append((rank, task.number, min(lanes), task))
            if not heads:
                break
            _, _, lane, task = min(heads)
            idle.remove(lane)
            actions.append(self._run(task, lane))
        return actions

    def _is_late(self, task: Task, now_ms: float) -> bool:
        """Return whether a task cannot meet its deadline any more, and nothing has followed from that yet."""
        if not self._drop_late and (self._policy not in {"edf", "static"} or task.late):
            return False
        return now_ms + sum(self._queues[task.model].rules.block_ms[task.block :]) > task.deadline_ms

    def _settle(self, task: Task) -> list[Action]:
        """Drop a late task, or let it wait behind those that can meet their deadlines."""
        if self._drop_late:
            return [self._end(task, "late")]
        queue = self._queues[task.model]
        queue.remove(task)
        task.late = True
        task.due_ms = task.deadline_ms + self._patience_ms
        queue.add(task)
        return []

    def _run(self, task: Task, lane: int) -> Run:
        queue = self._queues[task.model]
        queue.remove(task)
        queue.running += 1
        queue.began_ms = queue.served_ms
        queue.served_ms += queue.rules.block_ms[task.block]
        task.lane = lane
        self._lanes[lane] = task
        return Run(lane, task.number, task.model, task.block)

    def _leave(self, lane: int) -> Task:
        """Take the task from a lane, which then is idle."""
        task = self._lanes[lane]
        assert task is not None  # noqa: S101 - the lane runs a block
        self._lanes[lane] = task.lane = None
        self._queues[task.model].running -= 1
        return task

    def _end(self, task: Task, outcome: Outcome) -> Over:
        """End a task that no lane runs."""
        self._queues[task.model].remove(task)
        return self._over(task, outcome)

    def _over(self, task: Task, outcome: Outcome) -> Over:
        del self._tasks[task.number]
        removed = self._queues[task.model].removed
        self._forget_if_removed(task.model)
        return Over(task.number, "removed" if removed and outcome == "cancelled" else outcome)

    def _forget_if_removed(self, model: str) -> None:
        """Forget a model that was removed and has no task left."""
        queue = self._queues.get(model)
        if queue is not None and queue.removed and queue.empty:
            del self._queues[model]
            self._divide_lanes()

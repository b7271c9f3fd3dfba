"""Tasks that arrive at given rates, served by a dispatcher on a virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chrion.common.suggestions import did_you_mean
from chrion.errors import OptionError
from chrion.serving.multi.dispatcher import Action, BlockSpan, Dispatcher, Over, Replan, Run
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.virtual_lanes import VirtualLanes

#: The most arrivals of one load.
MAX_ARRIVALS = 1_000_000
#: Tasks of a model that come together in a bursty load.
_BURST = 4


@dataclass(frozen=True, slots=True)
class Arrival:
    """A task of a load."""

    time_ms: float
    model: str


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a task."""

    model: str
    arrival_ms: float
    #: When it was over.
    end_ms: float
    #: As the dispatcher has it: ``done``, ``full``, ``late``, ``failed``.
    outcome: str
    #: The time that it had; infinite without a deadline.
    deadline_ms: float

    @property
    def latency_ms(self) -> float:
        """The time from its arrival to its end."""
        return self.end_ms - self.arrival_ms

    @property
    def missed(self) -> bool:
        """Whether it was dropped, failed or late."""
        return self.outcome != "done" or self.latency_ms > self.deadline_ms


def build_arrivals(rates: Mapping[str, float], seconds: float, load: str = "periodic", seed: int = 0) -> list[Arrival]:
    """Return the tasks of a load; each model's load begins at a random phase, and has its rate on average.

    Args:
        rates: The tasks per second of each model.
        seconds: The length of the load.
        load: A key of :data:`LOADS`.
        seed: Of the phases and random intervals.

    Raises:
        OptionError: There are too many tasks, or there is no such load.
    """
    if load not in LOADS:
        raise OptionError(f"load: unknown load {load!r}", hint=did_you_mean(str(load), LOADS))
    if sum(rates.values()) * seconds > MAX_ARRIVALS:
        raise OptionError(f"rates: more than {MAX_ARRIVALS} tasks in {seconds:g} s", hint="choose a shorter time")
    random_ = random.Random(seed)  # noqa: S311 - not a secret
    found = []
    for model, rate in rates.items():
        times_s = list(LOADS[load](rate, seconds, random_)) or [random_.random() * seconds]  # at least one task each
        found += [Arrival(time_s * 1e3, model) for time_s in times_s]
    return sorted(found, key=lambda arrival: arrival.time_ms)


def periodic(rate: float, seconds: float, random_: random.Random) -> Iterator[float]:
    """Yield times at constant intervals, as those of a camera."""
    first = random_.random()
    yield from ((first + at) / rate for at in range(math.floor(seconds * rate - first) + 1))


def random_load(rate: float, seconds: float, random_: random.Random) -> Iterator[float]:
    """Yield times at random intervals (a Poisson process), as those of many independent clients."""
    time_s = random_.expovariate(rate)
    while time_s < seconds:
        yield time_s
        time_s += random_.expovariate(rate)


def bursty(rate: float, seconds: float, random_: random.Random) -> Iterator[float]:
    """Yield several equal times at once, at constant intervals."""
    for time_s in periodic(rate / _BURST, seconds, random_):
        yield from [time_s] * _BURST


def stepping(rate: float, seconds: float, random_: random.Random) -> Iterator[float]:
    """Yield times at constant intervals of half the rate, and in every second quarter of the time of one and a half."""
    quarter_s = seconds / 4
    for at in range(4):
        for time_s in periodic(rate * (1.5 if at % 2 else 0.5), quarter_s, random_):
            yield at * quarter_s + time_s


#: Loads by name: each function yields the times of one model's tasks in seconds.
LOADS: dict[str, Callable[[float, float, random.Random], Iterator[float]]] = {
    "periodic": periodic,
    "random": random_load,
    "bursty": bursty,
    "stepping": stepping,
}


def simulate(
    dispatcher: Dispatcher, arrivals: Sequence[Arrival], lanes: VirtualLanes
) -> tuple[list[Served], list[BlockSpan]]:
    """Serve a load on a virtual clock.

    Args:
        dispatcher: A dispatcher without tasks.
        arrivals: The tasks, in the order of their times.
        lanes: Its lanes.

    Returns:
        What became of the tasks, and the blocks that ran.
    """
    waiting: dict[int, Arrival] = {}
    served: list[Served] = []
    spans: list[BlockSpan] = []

    def carry_out(actions: Sequence[Action], now_ms: float) -> None:
        for action in actions:
            if isinstance(action, Over):
                arrival = waiting.pop(action.number)
                deadline_ms = dispatcher.rules(arrival.model).deadline_ms
                had_ms = math.inf if deadline_ms is None else deadline_ms
                served.append(Served(arrival.model, arrival.time_ms, now_ms, action.outcome, had_ms))
            elif isinstance(action, Run):
                lanes.begin(action, now_ms, dispatcher.busy)
            else:
                carry_out(_replan(dispatcher, action, now_ms), now_ms)

    for arrival in [*arrivals, None]:
        until = arrival.time_ms if arrival else math.inf
        while (at_ms := min(wake_ms := dispatcher.wake_ms, end_ms := lanes.end_ms)) < math.inf and at_ms <= until:
            if wake_ms < end_ms:
                carry_out(dispatcher.wake(wake_ms), wake_ms)
            else:
                spans.append(lanes.end())
                carry_out(dispatcher.finish(spans[-1].lane, end_ms), end_ms)
        if arrival:
            number, actions = dispatcher.submit(arrival.model, arrival.time_ms)
            waiting[number] = arrival
            carry_out(actions, arrival.time_ms)
    return served, spans


def _replan(dispatcher: Dispatcher, request: Replan, now_ms: float) -> list[Action]:
    """Replace the plan, which takes no time on a virtual clock, and return what follows."""
    assert isinstance(dispatcher, TopDispatcher)  # noqa: S101 - no other one asks
    assert dispatcher.replan  # noqa: S101 - it asks only then
    return dispatcher.adopt(dispatcher.replan(request), now_ms)

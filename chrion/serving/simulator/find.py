"""The limit of a scenario: the fewest servers or the least memory, or the most models or the highest rate.

A simulated figure is an estimate, so a value of the searched quantity does not simply meet a condition or not: the
confidence interval of its figure over replications is below the limit, above it, or contains it. The limit is therefore
a bracket, from the first value that may meet the condition to the first one that clearly does.

Nor need a figure change in one direction with the value: with another number of servers, requests are routed
otherwise. The search first doubles its step until the condition changes and halves the interval, about 2 log2(n)
values. Then it tries the values on both sides of what it found until several in a row clearly meet the condition on the
one side and clearly do not on the other. All values that were tried are part of the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from chrion.common.records import read_record
from chrion.common.wrong_values import wrong_value
from chrion.errors import ScenarioError
from chrion.serving.simulator.confidence import Interval, interval
from chrion.serving.simulator.results import METRICS, SHARES, PatternResult, RequestSummary
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource
from chrion.serving.simulator.scenario_models import PLANNED, SHRINK
from chrion.serving.simulator.settings import MAX_MODELS, SYNTHETIC, WorkloadSpec
from chrion.serving.simulator.sweep import worker_pool

FIND_SCHEMA = "chrion.simulation-find/2"

#: Values in a row beyond a limit that must clearly not meet the condition, and before it that clearly must (a choice,
#: not measured).
BEYOND = 6
#: Equal figures of a value and of all that were tried from this part of it on show that more changes nothing: memory
#: for four times as many models changes something unless there is memory for all of them.
_PLATEAU = 1 / 4
#: Values on one side of a limit after which each step is twice the one before (a choice, not measured).
_SCANNED = 48
#: Neighbours of values above this number differ by 1 %: finer steps do not change a decision.
_RESOLUTION = 100
#: Replications of a value by default, and those after which a clear result is accepted.
REPLICATIONS, FIRST = 5, 3
#: The ratio of two rates that are tried, and the permitted powers of it.
RATE_STEP, RATES = 1.01, range(-900, 901)
#: The share of requests that figures of times leave out; of the mean, that of ``p99`` (a choice).
_LEFT_OUT = {"mean": 0.01, "p50": 0.5, "p95": 0.05, "p99": 0.01}
#: Utilisation below which a cluster idles: if each model was loaded once at most, more servers are not tried, since
#: requests wait by the choice of routing alone (a choice, not measured).
_IDLE = 0.01
#: Utilisation from which the mean of the growth of response times decides, and its interval must exclude growth for a
#: value to meet a condition; below, queues grow if the interval excludes that they do not (a choice, not measured).
_BUSY = 0.95
#: Requests of a run from which several processes save more time than they take to start (a choice, not measured).
_WORTHWHILE = 10_000

#: What is known of a value: the interval is below the limit, contains it, or is above it, or queues may grow; or they
#: do, so that the figure depends on the number of requests; or the models do not fit.
MET, OPEN, MISSED, GROWS, UNFIT = "yes", "open", "no", "queues grow", "models do not fit"


@dataclass(frozen=True, slots=True)
class Condition:
    """An upper limit of a figure."""

    #: A key of the kind's ``metrics``.
    metric: str
    #: The limit: a share, or ms.
    limit: float

    def figure(self, result: PatternResult, *, keep_warm_up: bool = False) -> float:
        """Return the figure of a result, by default without the warm-up of the run, which loads never leave out."""
        if result.settled and not keep_warm_up and self.metric in result.settled.figures:
            return result.settled.figures[self.metric]
        return METRICS[self.metric](result)

    def is_dropped(self, total: RequestSummary) -> bool:
        """Return whether so many requests were dropped or failed that their time, without end, is the figure."""
        lost = total.dropped + total.failed
        return self.metric in _LEFT_OUT and lost > _LEFT_OUT[self.metric] * total.arrivals

    def interval_text(self, figure: Interval) -> str:
        """Return an interval, within what a figure can be, with its unit; a dash without one."""
        if math.isinf(figure.mean):
            return "-"
        high = min(1.0, figure.high) if self.metric == "violations" else figure.high
        return f"{self.text(max(0.0, figure.low))} to {self.text(high)}"

    def text(self, figure: float) -> str:
        """Return a figure with its unit. Shares are infinite in runs without requests only."""
        if self.metric in SHARES:
            return "no requests" if math.isinf(figure) else f"{figure:.2%}"
        return "infinite" if math.isinf(figure) else f"{figure:.1f} ms"


@dataclass(frozen=True, slots=True)
class Searched:
    """A quantity that can be searched. Its values are numbered, and grow with the number."""

    #: Its name and unit, as they are printed.
    unit: str
    #: The permitted numbers.
    numbers: range
    #: The change of the scenario for a number.
    sets: Callable[[int], dict[str, Any]]
    #: The quantity of a scenario, as it is reported.
    amount: Callable[[Any], float]
    #: True to find the smallest value that meets the condition, false to find the largest.
    smallest: bool = True
    #: The number to begin with.
    begin: int = 1
    #: Whether successive numbers differ by 1 %, so that no coarser steps are needed for large ones.
    relative: bool = False
    #: The number from which on patterns that choose variants have room for the largest variant of each model.
    roomy: int = 0


def searched_rate(key: str, unit: str, rate: float, amount: Callable[[Any], float], numbers: range = RATES) -> Searched:
    """Return the rate of arrivals as a quantity, of which ``key`` is ``rate`` at present."""
    return Searched(unit, numbers, lambda n: {key: rate * RATE_STEP**n}, amount, smallest=False, begin=0, relative=True)


@dataclass(frozen=True, slots=True)
class Probe:
    """One simulated value."""

    #: The quantity: servers, models, GB for each server, or requests per second (traces: scale).
    amount: float
    #: The figure of the condition over replications; it and the quantity are NaN if the models do not fit.
    figure: Interval
    #: Whether the condition is met: one of :data:`MET`, :data:`OPEN`, :data:`MISSED`, :data:`GROWS`, :data:`UNFIT`.
    met: str
    replications: int = 0
    #: As in :class:`chrion.serving.simulator.results.Usage`; from 1 on, queues grow as long as requests arrive, so that
    #: the figure depends on their number.
    offered_load: float = 0.0
    #: The price of the servers that were on, for an hour.
    cost_per_hour: float = 0.0
    #: Requests that were left out as the warm-up of a replication, at most.
    warm_up_requests: int = 0

    @property
    def may_meet(self) -> bool:
        """Whether the value meets the condition, or may do so."""
        return self.met in (MET, OPEN)

    def meets(self, limit: float) -> bool:
        """Return whether the mean over replications is within the limit, in a run whose queues do not grow."""
        return self.may_meet and self.figure.mean <= limit


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of one pattern. "First" and "last" count from the values that are hardest for the condition."""

    pattern: str
    #: The first value that may meet the condition; None if none does.
    possible: Probe | None
    #: The first value whose mean meets it.
    best: Probe | None
    #: The first value that clearly meets it, as all easier ones do that were tried; None if there is none.
    certain: Probe | None
    #: The last value before ``possible``; None if it is the first permitted one.
    beyond: Probe | None
    #: All values that were tried, ascending.
    curve: tuple[Probe, ...]
    #: A value that clearly does not meet the condition, although a harder one clearly does.
    exception: Probe | None
    #: Whether more servers or memory than the largest value that was tried change nothing.
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How values are simulated."""

    #: Maximum replications of a value; fewer suffice if the result is clear.
    replications: int = REPLICATIONS
    #: True to count the requests of the warm-up, too.
    keep_warm_up: bool = False
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Replication:
    """What one replication contributes to a value."""

    figure: float
    offered_load: float
    growth_ms: float
    cost_per_hour: float
    warm_up_requests: int
    #: Whether more servers or memory can change the figure: a request waited or did not run, unless the cluster idles.
    improvable: bool


def parse_until(text: str, metrics: Collection[str] = tuple(METRICS)) -> Condition:
    """Return the condition of ``violations<=1%`` or ``p99<=250ms``; a plain number is in milliseconds.

    Args:
        text: The condition.
        metrics: The figures that it may limit.

    Raises:
        OptionError: The text has another form.
    """
    match = re.fullmatch(r"\s*([a-z0-9_]+)\s*<=\s*(\d+\.?\d*|\.\d+)\s*(%|us|ms|s)?\s*", text)
    hint = f"for example violations<=1% or {[*metrics][-1]}<=250ms; figures: {', '.join(metrics)}"
    if not match or match[1] not in metrics:
        raise wrong_value("--until", "figure<=limit", text, hint=hint)
    factors = {"%": 0.01} if match[1] in SHARES else {"us": 0.001, "ms": 1.0, "s": 1000.0}
    unit = match[3] or "ms"
    if unit not in factors:
        raise wrong_value("--until", f"a limit with its unit ({', '.join(factors)})", text, hint=hint)
    return Condition(match[1], float(match[2]) * factors[unit])


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of scenarios, as it is built, searched and simulated."""

    build: Callable[[ScenarioSource], Any]
    #: The quantities by name, given the condition and a scenario.
    quantities: Callable[[Condition, Any], Mapping[str, Searched]]
    #: Figures that a condition can limit.
    metrics: Collection[str]
    #: The changes of a scenario that leave one of its patterns, by the name of the pattern.
    patterns: Callable[[Any], Mapping[str, Mapping[str, Any]]]
    #: Whether a simulation takes so long that several processes save more time than they take to start.
    is_long: Callable[[Any], bool]
    #: Simulates a source, also in another process.
    measure: Callable[..., Replication]

    def searched(self, name: str, condition: Condition, scenario: Any) -> Searched:
        """Return a quantity by its name.

        Raises:
            OptionError: There is no such quantity.
        """
        known = self.quantities(condition, scenario)
        if name not in known:
            raise wrong_value("--find", f"one of {', '.join(known)}", name)
        return known[name]


def _quantities(_: Condition, scenario: Scenario) -> Mapping[str, Searched]:
    workload = read_record(WorkloadSpec, scenario.content.get("workload", {}), "workload")
    largest_mb = sum(max(variant.memory_mb for variant in model.variants.values()) for model in scenario.models)
    most_gb = largest_mb / 1000 + max(spec.reserved_gb for spec in scenario.servers)
    key, unit = "rate_per_s", "requests/s"
    if workload.kind not in SYNTHETIC:
        key, unit = "rate_scale", "requests for each of the trace"
    return {
        "servers": Searched(
            "servers",
            range(1, 10_001),
            lambda n: {"servers.count": n},
            lambda s: len(s.servers),
            roomy=len(scenario.models),
        ),
        "memory": Searched(
            "GB a GPU",
            range(1, 100_001),
            lambda n: {"servers.gpu_memory_gb": n / 10},
            lambda s: s.servers[0].gpu_memory_gb,
            begin=10,
            roomy=math.ceil(10 * most_gb),
        ),
        "models": Searched(
            "models", range(1, MAX_MODELS + 1), lambda n: {"total_models": n}, lambda s: len(s.models), smallest=False
        ),
        "rate": searched_rate(
            f"workload.{key}", unit, getattr(workload, key), lambda s: float(s.content["workload"][key])
        ),
    }


def find_limits(  # noqa: PLR0913, PLR0917 - the parts of a search
    kind: Kind,
    source: ScenarioSource,
    name: str,
    condition: Condition,
    options: SearchOptions = SearchOptions(),  # it cannot be changed
    progress: Callable[[int, str], None] = lambda _done, _name: None,
) -> tuple[Limit, ...]:
    """Return the limit of every pattern of a scenario.

    Args:
        kind: The kind of the scenario.
        source: The scenario.
        name: The quantity; see :attr:`Kind.quantities`.
        condition: What has to hold.
        options: How values are simulated.
        progress: Called after each value with the number of those that were tried, and the last one's text.

    Raises:
        InputError: The scenario is invalid.
    """
    scenario = kind.build(source)
    quantity = kind.searched(name, condition, scenario)
    limits: list[Limit] = []
    tried = count(1)
    with worker_pool(options.workers) if options.workers > 1 and kind.is_long(scenario) else nullcontext() as pool:
        for pattern, sets in kind.patterns(scenario).items():
            search = Search(kind, source.changed(sets), quantity, condition, options, pool.map if pool else map)
            search.note = lambda text: progress(next(tried), text)
            if quantity.smallest:
                search.ends_from = quantity.roomy if pattern in (PLANNED, SHRINK) else 0
            limits.append(search.limit(pattern))
    return tuple(limits)


class Search:
    """The search of one pattern. Positions are numbers of values, negated if the largest value is searched.

    So the condition becomes easier with the position.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a search
        self,
        kind: Kind,
        source: ScenarioSource,
        quantity: Searched,
        condition: Condition,
        options: SearchOptions,
        map_: Callable[..., Iterator[Replication]],
    ) -> None:
        self._source, self._quantity, self._condition, self._options = source, quantity, condition, options
        self._kind, self._map = kind, map_
        self._sign = 1 if quantity.smallest else -1
        ends = sorted((self._sign * quantity.numbers[0], self._sign * quantity.numbers[-1]))
        self._first, self._last = ends
        #: The minimum position from which on more servers or memory cannot help.
        self._enough = self._last
        #: The position from which on equal figures, or requests that do not wait, end the search for a smallest value.
        self.ends_from = math.inf
        self.note: Callable[[str], None] = lambda _text: None
        self._probes: dict[int, Probe] = {}

    def limit(self, pattern: str) -> Limit:
        """Return the limit."""
        edge = first_true(self._meets, self._sign * self._quantity.begin, self._first, self._last)
        start = min(edge, self._enough)
        if edge > self._last and (near := [at for at, probe in self._probes.items() if probe.may_meet]):
            start = min(near, key=lambda at: self._probes[at].figure.mean)
        self._scan(start, -1, lambda probe: not probe.may_meet)
        if edge <= self._last:
            self._scan_easier(start)
        return self._result(pattern)

    def _result(self, pattern: str) -> Limit:
        places = sorted(self._probes)
        probes = [self._probes[at] for at in places]
        possible = next((at for at, probe in zip(places, probes, strict=True) if probe.may_meet), None)
        best = next((probe for probe in probes if probe.meets(self._condition.limit)), None)
        certain, exception, seen = None, None, False
        for probe in probes:
            certain = (certain or probe) if probe.met == MET else None
            if seen and probe.met in (MISSED, GROWS) and not exception:
                exception = probe
            seen = seen or probe.met == MET
        before = [at for at in places if possible is not None and at < possible]
        return Limit(
            pattern=pattern,
            possible=None if possible is None else self._probes[possible],
            best=best,
            certain=certain,
            beyond=self._probes[before[-1]] if before else None,
            curve=tuple(probe for probe in probes[:: self._sign] if probe.met != UNFIT),
            exception=exception,
            exhausted=self._enough < self._last,
        )

    def _scan(self, start: int, direction: int, agrees: Callable[[Probe], bool]) -> int:
        """Try values from a position on, until several in a row agree with what is expected; return the last one."""
        step = direction * (1 if self._quantity.relative else max(1, abs(start) // _RESOLUTION))
        at, in_a_row, tried = start, 0, 0
        while in_a_row < BEYOND:
            after = max(self._first, min(at + step, self._last, self._enough))
            if (after - at) * direction <= 0:  # also from a value beyond what turned out to be enough
                break
            at, tried = after, tried + 1
            in_a_row = in_a_row + 1 if agrees(self._probe(at)) else 0
            step *= 2 if tried >= _SCANNED and not in_a_row else 1
        return at

    def _scan_easier(self, start: int) -> None:
        """Try easier values until several in a row clearly meet the condition, and all easier ones that were tried."""
        while True:
            at = self._scan(start, 1, lambda probe: probe.met == MET)
            easier = [tried for tried, probe in self._probes.items() if tried > at and probe.met != MET]
            if not easier:
                return
            start = max(easier)

    def _meets(self, at: int) -> bool:
        return self._probe(at).meets(self._condition.limit)

    def _probe(self, at: int) -> Probe:
        at = min(at, self._enough)
        if at not in self._probes:
            self._probes[at], runs = self._simulate(self._sign * at)
            if at >= self.ends_from and runs and (self._is_flat(at) or not any(run.improvable for run in runs)):
                self._enough = min(self._enough, at)
            amount, unit = self._probes[at].amount, self._quantity.unit
            self.note("too small for the models" if math.isnan(amount) else f"{amount:.4g} {unit}")
        return self._probes[at]

    def _is_flat(self, at: int) -> bool:
        """Return whether the figures show that larger values than a position, the largest so far, change nothing."""
        probe = self._probes[at]
        if probe.met == GROWS or probe.figure.mean in (1.0, math.inf):  # all requests violate, or are dropped
            return False
        other = [place for place, known in self._probes.items() if known.figure != probe.figure]
        equal = [place for place in self._probes if place > max(other, default=0)]
        return at == max(self._probes) and min(equal) <= _PLATEAU * at

    def _simulate(self, number: int) -> tuple[Probe, Sequence[Replication]]:
        """Return a value, and its replications."""
        source = self._source.changed(self._quantity.sets(number))
        try:
            scenario = self._kind.build(source)
        except ScenarioError:
            return Probe(math.nan, Interval(math.nan, math.nan), UNFIT), ()
        total = self._options.replications
        measure = partial(self._kind.measure, condition=self._condition, keep_warm_up=self._options.keep_warm_up)
        runs: list[Replication] = []
        for until in (min(FIRST, total), total):
            seeds = range(scenario.seed + len(runs), scenario.seed + until)
            runs += self._map(measure, [source.changed({"seed": seed}) for seed in seeds])
            probe = self._summarise(self._quantity.amount(scenario), runs)
            if probe.met != OPEN:
                break
        return probe, runs

    def _summarise(self, amount: float, runs: Sequence[Replication]) -> Probe:
        figure = interval([run.figure for run in runs])
        load = sum(run.offered_load for run in runs) / len(runs)
        growth_ms, limit = interval([run.growth_ms for run in runs]), self._condition.limit
        is_busy, met = load >= _BUSY, OPEN
        if load >= 1 or growth_ms.low > 0 or (is_busy and growth_ms.mean > 0):
            met = GROWS
        elif figure.low > limit:
            met = MISSED
        elif figure.high <= limit and not (is_busy and growth_ms.high > 0):
            met = MET
        return Probe(
            amount=amount,
            figure=figure,
            met=met,
            replications=len(runs),
            offered_load=load,
            cost_per_hour=sum(run.cost_per_hour for run in runs) / len(runs),
            warm_up_requests=max(run.warm_up_requests for run in runs),
        )


def _measure(source: ScenarioSource, condition: Condition, *, keep_warm_up: bool) -> Replication:
    (result,) = simulate(source.build())
    total, settled = result.total, result.settled
    figure = condition.figure(result, keep_warm_up=keep_warm_up)
    unknown = total.arrivals == 0 or math.isnan(
        figure
    )  # a run without requests does not show that they would be served
    return Replication(
        figure=math.inf if unknown or condition.is_dropped(total) else figure,
        offered_load=result.usage.offered_load,
        growth_ms=settled.growth_ms if settled else math.nan,
        cost_per_hour=result.cost_per_hour,
        warm_up_requests=settled.removed if settled and not keep_warm_up else 0,
        improvable=(total.completed < total.arrivals or total.loads > 0 or total.mean_wait_ms > 0)
        and (result.usage.offered_load > _IDLE or total.loads > len(result.models)),
    )


#: Scenarios of servers.
SERVERS = Kind(
    build=ScenarioSource.build,
    quantities=_quantities,
    metrics=METRICS,
    patterns=lambda s: {pattern: {"patterns": [pattern], "slo.of": s.reference} for pattern in s.patterns},
    is_long=lambda scenario: scenario.workload.requests >= _WORTHWHILE,
    measure=_measure,
)


def first_true(holds: Callable[[int], bool], begin: int, low: int, high: int) -> int:
    """Return the minimum number from ``low`` to ``high`` for which ``holds`` is true, or ``high + 1`` if there is none.

    Args:
        holds: A condition that is false up to some number and true from then on.
        begin: The number to begin with; the search is fast if the result is near it.
        low: The minimum number.
        high: The greatest number.
    """
    step = 1
    if holds(begin):
        after = begin
        while after > low and holds(max(low, after - step)):
            after, step = max(low, after - step), 2 * step
        before = max(low - 1, after - step)
    else:
        before = begin
        while before < high and not holds(min(high, before + step)):
            before, step = min(high, before + step), 2 * step
        after = min(high + 1, before + step)
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (before, middle) if holds(middle) else (middle, after)
    return after

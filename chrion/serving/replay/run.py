"""The replay of a scenario: what its simulation predicts, and what a running server does with the same requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from chrion.errors import OptionError
from chrion.serving.manager.records import ACCELERATOR, HOST
from chrion.serving.replay.http_client import HttpClient
from chrion.serving.replay.open_loop import (
    REFUSED,
    LimitedWorkload,
    OpenLoop,
    Outcome,
    count_requests,
    error_text,
    repeated,
)
from chrion.serving.replay.target import HttpCall, ServerFigures, calls_of, read_figures, served_name, wait_until_ready
from chrion.serving.simulator.metrics import RequestMetrics
from chrion.serving.simulator.results import PatternResult, ServerResult, from_metrics, plain
from chrion.serving.simulator.scenario import Scenario

#: The name of the measured pattern.
MEASURED = "measured"
#: Interval at which the server's memory is read: rare, because the server renders all metrics for it.
_SAMPLE_S = 5.0
#: Pause between requests for a model that is loaded before the replay, in seconds (a choice, not measured).
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay."""

    url: str = "http://127.0.0.1:8000"
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    #: Limits of the number of requests and of the time of their arrivals.
    max_requests: int | None = None
    until_ms: float = math.inf
    #: Time after which a request is given up.
    timeout_s: float = 60.0
    #: Time for which connections fail, without any answer, after which the server is given up.
    gone_s: float = 10.0
    connections: int = 512


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    measured: PatternResult
    #: Requests that were refused, and that failed, by reason.
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    #: By how much requests were sent late: median and 99th percentile.
    lag_ms: tuple[float, float]
    #: Differences between the server's settings and the scenario's.
    differences: tuple[str, ...]


def limited(scenario: Scenario, options: ReplayOptions) -> Scenario:
    """Return a scenario with the requests that are replayed.

    Raises:
        OptionError: There is none.
    """
    limit = math.inf if options.max_requests is None else options.max_requests
    count = count_requests(scenario.workload, limit, options.until_ms)
    if not count:
        hint = "give a longer --duration, or a larger workload.rate_scale"
        raise OptionError(f"replay: {scenario.name} has no request to send", hint=hint)
    return replace(scenario, workload=LimitedWorkload(scenario.workload, count))


def check(scenario: Scenario, options: ReplayOptions) -> None:
    """Check that a server can be reached, wait until it is ready, and check that it has the models of a scenario.

    Raises:
        OptionError: It cannot, or has not.
    """

    async def ask() -> None:
        async with _client(options) as client:
            await wait_until_ready(client)
            await read_figures(client)
            await calls_of(client, [model.name for model in scenario.models])

    asyncio.run(ask())


def replay(scenario: Scenario, options: ReplayOptions, progress: Callable[[int], None] = lambda _: None) -> Replay:
    """Send a scenario's requests to a server.

    Args:
        scenario: The scenario, with the requests to send.
        options: The server.
        progress: Called with the number of requests that have been sent.

    Raises:
        OptionError: The server cannot be reached, or lacks models.
        ServerError: The server stopped to answer.
    """
    return asyncio.run(_replay(scenario, options, progress))


async def _replay(scenario: Scenario, options: ReplayOptions, progress: Callable[[int], None]) -> Replay:
    async with _client(options) as client:
        await wait_until_ready(client)
        calls = await calls_of(client, [model.name for model in scenario.models])
        for index in _preloaded(scenario) if scenario.preload else ():
            await _load(client, scenario.models[index].name, calls[index], options.timeout_s)
        before = await read_figures(client)
        slo_ms = [model.slo_ms for model in scenario.models]
        metrics = RequestMetrics(len(calls), 1, slo_ms, from_arrival=scenario.measure == "response")
        outcome = Outcome(metrics)
        loop = OpenLoop(client, calls, outcome, options.timeout_s, options.gone_s)
        device = ACCELERATOR if ACCELERATOR in before.budget else HOST

        async def sample() -> None:
            figures = await read_figures(client)
            outcome.memory.step(max(outcome.memory.now, loop.now_ms()), figures.used.get(device, 0.0))

        outcome.memory.step(0.0, before.used.get(device, 0.0))
        async with repeated(sample, _SAMPLE_S):
            await loop.run(scenario.workload, progress)
        after = await read_figures(client)
        measured = _result(scenario, outcome, before, after, device, max(metrics.end_ms, loop.now_ms()))
    lags = outcome.lag_ms(0.5), outcome.lag_ms(0.99)
    return Replay(measured, outcome.refused, outcome.failed, lags, tuple(_differences(scenario, after, device)))


@contextlib.asynccontextmanager
async def _client(options: ReplayOptions) -> AsyncIterator[HttpClient]:
    client = HttpClient(options.url, options.headers, tls=options.tls, connections=options.connections)
    try:
        yield client
    finally:
        await client.close()


async def _load(client: HttpClient, name: str, call: HttpCall, timeout_s: float) -> None:
    """Request a model until it is in memory; with admission by deadline, the first requests may be refused.

    Another answer than a refusal means that the model was loaded, also if it raised an error.

    Raises:
        OptionError: The model was not loaded within the time.
    """
    reason = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while (answer := await client.request("POST", call.path, call.body, call.headers)).status in REFUSED:
                reason = f"{answer.status} {error_text(answer)}"
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError as error:
        text = f"model {name!r} could not be loaded within {timeout_s:g} s before the replay: {reason}"
        raise OptionError(text, hint="without preload = true in the scenario, models are loaded on demand") from error
    except OSError as error:
        raise OptionError(f"--url: model {name!r}: no answer: {error.strerror or error}") from error


def _preloaded(scenario: Scenario) -> list[int]:
    """Return the models that the simulation loads before the first request: the first ones that fit."""
    free = sum(spec.budget_bytes for spec in scenario.servers)
    level = scenario.levels(scenario.patterns[0])[0]
    chosen = []
    for index, model in enumerate(scenario.models):
        size = model.variants[level].memory_bytes
        if size <= free:
            chosen.append(index)
            free -= size
    return chosen


def _result(  # noqa: PLR0913, PLR0917 - what was measured at several places
    scenario: Scenario,
    outcome: Outcome,
    before: ServerFigures,
    after: ServerFigures,
    device: str,
    end_ms: float,
) -> PatternResult:
    def grown(metric: str) -> float:
        return after.totals.get(metric, 0.0) - before.totals.get(metric, 0.0)

    def share(seconds: float, whole: float) -> float:
        return seconds * 1000 / whole if whole else 0.0

    def loads_of(name: str) -> int:
        """Return the loads of a model that the simulation counts, too: a change to a smaller variant is none."""
        opened, smaller = (
            after.by_model.get((metric, name), 0.0) - before.by_model.get((metric, name), 0.0)
            for metric in ("chrion_model_loads_total", "chrion_model_shrinks_total")
        )
        return max(0, round(opened - smaller))

    loads = [loads_of(served_name(model.name)) for model in scenario.models]
    cores = round(after.totals.get("chrion_lane_cores", 0.0))
    width_ms, memory = outcome.memory.means(end_ms)
    server = ServerResult(
        index=0,
        arrivals=int(outcome.metrics.arrivals.sum()),
        loads=sum(loads),
        loaded_mb=grown("chrion_model_loaded_bytes_total") / 1e6,
        evictions=round(grown("chrion_model_evictions_total")),
        gpu_busy=share(grown("chrion_slot_busy_seconds_total"), end_ms),
        cpu_busy=share(grown("chrion_lane_busy_seconds_total"), cores * end_ms),
        link_busy=share(grown("chrion_model_load_seconds_total"), end_ms),
        memory_budget_mb=after.budget.get(device, 0.0) / 1e6,
        memory_peak_mb=outcome.memory.peak / 1e6,
        memory_mean_mb=outcome.memory.area / max(outcome.memory.now, 1.0) / 1e6,
        memory_bin_ms=width_ms,
        memory_mb=tuple(mean / 1e6 for mean in memory),
    )
    return from_metrics(scenario, MEASURED, outcome.metrics, loads, (server,), end_ms)


def _differences(scenario: Scenario, server: ServerFigures, device: str) -> list[str]:
    """Return what the server has set otherwise than the scenario."""
    differences = []
    budgets = [spec.budget_bytes for spec in scenario.servers]
    if len(budgets) > 1:
        differences.append(f"the scenario has {len(budgets)} servers, one is measured")
    budget = server.budget.get(device, 0.0)
    if abs(budget - budgets[0]) > 0.01 * budgets[0]:
        differences.append(f"memory for models: scenario {budgets[0] / 1e6:g} MB, server {budget / 1e6:g} MB")
    own = scenario.policies
    prefetch = str(own.prefetch).lower()
    kinds = {"eviction": own.eviction, "load_order": own.load_order, "admission": own.admission, "prefetch": prefetch}
    kinds |= {"max_waiting": str(own.max_waiting), "keep_alive_s": str(own.keep_alive_s)}
    for kind, expected in kinds.items():
        given = server.policies.get(kind, "unknown")
        if expected != given:
            differences.append(f"{kind.replace('_', ' ')}: scenario {expected}, server {given}")
    return [*differences, *(f"the scenario has {part}" for part in _simulated_only(scenario))]


def _simulated_only(scenario: Scenario) -> list[str]:
    """Return the parts of a scenario that a server does not have or is not told."""
    servers, models, details = scenario.servers, scenario.models, scenario.workload.details
    parts = {
        "servers with several GPUs, one memory is measured": any(spec.gpus > 1 for spec in servers),
        "servers that fail, the server does not": any(spec.mtbf_h for spec in servers) or bool(scenario.domains),
        "a network store, the server reads its own files": scenario.store is not None,
        "autoscaling, the server has none": scenario.autoscaling is not None,
        "batches, which are not compared with the server's": any(model.spec.max_batch > 1 for model in models),
    }
    if details:
        own_deadlines = not np.isnan(details.deadline_ms).all()
        parts |= {
            "durations of requests, the server has those of its models": not np.isnan(details.duration_ms).all(),
            "priorities of requests, which are not sent": bool(details.priority.any()),
            "deadlines of requests, the server admits by its models' objectives": own_deadlines
            and scenario.policies.admission == "deadline",
        }
    return [part for part, present in parts.items() if present]


def to_json(results: Mapping[str, Any], replayed: Replay) -> dict[str, Any]:
    """Return the result as plain data for JSON.

    Args:
        results: The results of all patterns; see :func:`chrion.serving.simulator.results.to_json`.
        replayed: The replay.
    """
    figures = {
        "refused": dict(replayed.refused),
        "failed": dict(replayed.failed),
        "lag_p50_ms": plain(replayed.lag_ms[0]),
        "lag_p99_ms": plain(replayed.lag_ms[1]),
        "differences": list(replayed.differences),
    }
    return {**results, "schema": "chrion.serving.replay/1", "replay": figures}


def remarks(replayed: Replay) -> Sequence[str]:
    """Return lines about the replay for people."""
    lines = [f"refused: {count} x {reason}" for reason, count in replayed.refused.items()]
    lines += [f"failed: {count} x {reason}" for reason, count in replayed.failed.items()]
    lines += [f"differs: {text}" for text in replayed.differences]
    p50, p99 = replayed.lag_ms
    return [*lines, f"requests were sent late by {p50:.1f} ms (median) and {p99:.1f} ms (p99)"]

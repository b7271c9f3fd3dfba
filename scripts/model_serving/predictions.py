"""Predictions of the simulation beside what the server does with the same requests, and beside plain sessions with LRU.

The scenario has 32 equal models, with memory for eight of them. Its times of requests and loads are means of a first
replay of other requests.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chrion.serving.replay import run as replays
from chrion.serving.replay.http_client import HttpClient
from chrion.serving.replay.open_loop import TIMING
from chrion.serving.replay.stand_ins import write_stand_ins
from chrion.serving.replay.target import calls_of
from chrion.serving.simulator.results import PatternResult
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource
from chrion.serving.simulator.traces import MinuteCounts, read_trace
from model_serving.servers import chrion_server, plain_server

MODELS, FITTING = 32, 8
#: Memory of a model and of its smaller variant, and time of a request, as stated to the stand-ins.
LARGE_MB, SMALL_MB, LATENCY_MS, SMALL_LATENCY_MS = 48.0, 24.0, 10.0, 12.0
BUDGET_MB = FITTING * LARGE_MB + 2.0
#: The objective of the comparison with plain sessions; that of predictions over the time of a request and its load,
#: alone: where the two are close, small differences decide about all requests that load.
SLO_MS, SLO_FACTOR = 75.0, 1.5
RATE_PER_S = 14.0
#: Length of the replay that measures the times of the scenario, and pause before a request that is timed alone.
CALIBRATION_S = 8.0
PAUSE_S = 0.03
#: The part of the trace that is replayed, in seconds of the trace.
AZURE_START_S, AZURE_LENGTH_S = 3600, 600
#: Policies of the table: eviction, load order, admission, and whether models shrink.
POLICIES = {
    "lru": ("lru", "demand", "none", False),
    "lfu": ("lfu", "demand", "none", False),
    "cost": ("cost", "demand", "none", False),
    "lru, fifo": ("lru", "fifo", "none", False),
    "lru, deadline": ("lru", "demand", "deadline", False),
    "lru, shrink": ("lru", "demand", "none", True),
}
WORKLOADS = ("zipf", "azure")


@dataclass(frozen=True, slots=True)
class Figures:
    """Measured times: of a request and of a load, of a model and of its smaller variant."""

    latency_ms: float
    load_ms: float


def scenario_of(  # noqa: PLR0913 - the parts of a row
    policy: str,
    workload: str,
    seconds: float,
    trace: Path | None,
    figures: Figures,
    *,
    slo_ms: float = SLO_MS,
    seed: int = 7,
) -> Scenario:
    """Return the scenario of one row of the table."""
    eviction, order, admission, shrinks = POLICIES[policy]
    # A megabyte takes a millisecond on this link, so that load_mb are the milliseconds of a load.
    variants = {"large": _variant(LARGE_MB, figures.latency_ms, figures.load_ms)}
    if shrinks:
        slower = SMALL_LATENCY_MS / LATENCY_MS
        variants["small"] = _variant(SMALL_MB, figures.latency_ms * slower, figures.load_ms * SMALL_MB / LARGE_MB)
    content: dict[str, Any] = {
        "models": [{"name": "m", "copies": MODELS, "slo_ms": slo_ms, "variants": variants}],
        "servers": [{"gpu_memory_gb": BUDGET_MB / 1000, "cpu_cores": 2, "pcie_gb_per_s": 1.0, "load_fixed_ms": 0.0}],
        "policies": {"eviction": eviction, "load_order": order, "admission": admission},
        "workload": _workload(workload, seconds, trace),
        "seed": seed,
        "preload": True,
        "patterns": ["shrink" if shrinks else "large"],
    }
    if shrinks:
        content["shrink"] = ["large", "small"]
    return ScenarioSource("bench", content, Path()).build()


def write_models(folder: Path, *, shrinks: bool, slo_ms: float = SLO_MS) -> Path:
    """Write the models, unless they exist; return their folder."""
    root = folder / f"{'shrinking' if shrinks else 'single'}-{LARGE_MB:g}MB-{slo_ms:g}ms"  # what the models state
    if not root.exists():
        policy = "lru, shrink" if shrinks else "lru"
        figures = Figures(LATENCY_MS, 1.0)
        write_stand_ins(scenario_of(policy, "zipf", 1.0, None, figures, slo_ms=slo_ms), root)
    return root


def measure(policy: str, workload: str, seconds: float, trace: Path | None, folder: Path) -> dict[str, Any]:
    """Return the figures of one row: predicted and measured."""
    names = POLICIES[policy]
    figures = calibrate(folder)
    slo_ms = float(round(SLO_FACTOR * (figures.latency_ms + figures.load_ms)))
    root = write_models(folder, shrinks=names[3], slo_ms=slo_ms)
    scenario = scenario_of(policy, workload, seconds, trace, figures, slo_ms=slo_ms)
    (predicted,) = simulate(scenario)
    with chrion_server(root, BUDGET_MB, ",".join(names[:3])) as url:
        found = replays.replay(scenario, replays.ReplayOptions(url))
    return {
        "policy": policy,
        "workload": workload,
        "slo_ms": slo_ms,
        "latency_ms": figures.latency_ms,
        "load_ms": figures.load_ms,
        "lag_ms": found.lag_ms[1],
        "predicted": summary(predicted),
        "measured": summary(found.measured),
    }


def measure_plain(workload: str, seconds: float, trace: Path | None, folder: Path) -> dict[str, Any]:
    """Return the figures of plain sessions with LRU, and of the server, with the same requests."""
    found: dict[str, Any] = {"workload": workload}
    figures = Figures(LATENCY_MS, 50.0)
    for name, policy in (("server", "lru"), ("shrink", "lru, shrink"), ("plain", "lru")):
        root = write_models(folder, shrinks=POLICIES[policy][3])
        scenario = scenario_of(policy, workload, seconds, trace, figures)
        names = ",".join(POLICIES[policy][:3])
        server = plain_server(root, BUDGET_MB) if name == "plain" else chrion_server(root, BUDGET_MB, names)
        with server as url:
            found[name] = summary(replays.replay(scenario, replays.ReplayOptions(url)).measured)
    return found


@functools.cache
def calibrate(folder: Path) -> Figures:
    """Return the mean times of a request in memory, as its client sees it, and of a load, in a first replay.

    Its requests differ from those that are compared. The policy is LRU without shrinking.
    """
    root = write_models(folder, shrinks=False)
    scenario = scenario_of("lru", "zipf", CALIBRATION_S, None, Figures(LATENCY_MS, 1.0), seed=1)
    with chrion_server(root, BUDGET_MB, "lru,demand,none") as url:
        found = replays.replay(scenario, replays.ReplayOptions(url)).measured
        outside_ms = asyncio.run(_outside_ms(url))
    (server,) = found.servers
    return Figures(
        found.total.execution.mean_ms + outside_ms, server.link_busy * found.duration_ms / max(1, found.total.loads)
    )


async def _outside_ms(url: str) -> float:
    """Return the median time of a request that is neither the model's nor that of waiting."""
    client = HttpClient(url, {})
    (call,) = await calls_of(client, ["m#1"])
    outside = []
    for _ in range(30):
        await asyncio.sleep(PAUSE_S)
        began = time.perf_counter()
        answer = await client.request("POST", call.path, call.body, call.headers)
        took_ms = (time.perf_counter() - began) * 1000
        outside.append(took_ms - sum(float(ms) for _, ms in TIMING.findall(answer.headers["server-timing"])))
    await client.close()
    return statistics.median(outside)


def summary(result: PatternResult) -> dict[str, Any]:
    """Return the figures of the tables."""
    total = result.total
    return {
        "requests": total.arrivals,
        "loads": total.loads,
        "swapping": total.swapping_rate,
        "violations": total.violation_rate,
        "p50_ms": total.response.p50_ms,
        "p99_ms": total.response.p99_ms,
        "mean_ms": total.response.mean_ms,
    }


def _variant(memory_mb: float, latency_ms: float, load_ms: float) -> dict[str, Any]:
    return {
        "memory_mb": memory_mb,
        "latency_ms": latency_ms,
        "gpu_busy_ms": 0.0,
        "cpu_busy_ms": latency_ms,
        "cores": 1,
        "load_mb": load_ms,
    }


def _workload(name: str, seconds: float, trace: Path | None) -> dict[str, Any]:
    if name == "zipf":
        requests = max(1, round(RATE_PER_S * seconds))
        return {"kind": "poisson", "rate_per_s": RATE_PER_S, "requests": requests, "zipf_exponent": 1.0}
    found = read_trace("azure-functions-2019", trace or Path())
    assert isinstance(found, MinuteCounts)  # noqa: S101 # that kind is
    first = AZURE_START_S // 60
    requests = int(found.counts[:, first : first + AZURE_LENGTH_S // 60].sum())
    return {
        "kind": "azure-functions-2019",
        "path": str(trace and trace.absolute()),
        "mapping": "rank",
        "start_s": AZURE_START_S,
        "length_s": AZURE_LENGTH_S,
        "time_scale": seconds / AZURE_LENGTH_S,
        "rate_scale": RATE_PER_S * seconds / requests,
    }

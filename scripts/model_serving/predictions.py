"""Predictions of the simulation beside what the server does with the same requests, and beside plain sessions with LRU.

The scenario has 32 equal models, with memory for eight of them. Its times of requests and loads are measured first, one
request after another, by a client of the server that is then measured.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chrion.replay import run as replays
from chrion.replay.http_client import HttpClient
from chrion.replay.stand_ins import write_stand_ins
from chrion.replay.target import calls_of
from chrion.simulator.results import PatternResult
from chrion.simulator.run import simulate
from chrion.simulator.scenario import Scenario, ScenarioSource
from chrion.simulator.traces import MinuteCounts, read_trace
from model_serving.servers import chrion_server, plain_server

MODELS, FITTING = 32, 8
#: Memory of a model and of its smaller variant, and time of a request, as stated to the stand-ins.
LARGE_MB, SMALL_MB, LATENCY_MS, SMALL_LATENCY_MS = 48.0, 24.0, 10.0, 12.0
BUDGET_MB = FITTING * LARGE_MB + 2.0
SLO_MS = 75.0
RATE_PER_S = 14.0
#: Pause before each request that is timed alone.
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


def scenario_of(policy: str, workload: str, seconds: float, trace: Path | None, figures: Figures) -> Scenario:
    """Return the scenario of one row of the table."""
    eviction, order, admission, shrinks = POLICIES[policy]
    # A megabyte takes a millisecond on this link, so that load_mb are the milliseconds of a load.
    variants = {"large": _variant(LARGE_MB, figures.latency_ms, figures.load_ms)}
    if shrinks:
        slower = SMALL_LATENCY_MS / LATENCY_MS
        variants["small"] = _variant(SMALL_MB, figures.latency_ms * slower, figures.load_ms * SMALL_MB / LARGE_MB)
    content: dict[str, Any] = {
        "models": [{"name": "m", "copies": MODELS, "slo_ms": SLO_MS, "variants": variants}],
        "servers": [{"gpu_memory_gb": BUDGET_MB / 1000, "cpu_cores": 2, "pcie_gb_per_s": 1.0, "load_fixed_ms": 0.0}],
        "policies": {"eviction": eviction, "load_order": order, "admission": admission},
        "workload": _workload(workload, seconds, trace),
        "seed": 7,
        "preload": True,
        "patterns": ["shrink" if shrinks else "large"],
    }
    if shrinks:
        content["shrink"] = ["large", "small"]
    return ScenarioSource("bench", content, Path()).build()


def write_models(folder: Path, *, shrinks: bool) -> Path:
    """Write the models, unless they exist; return their folder."""
    root = folder / ("shrinking" if shrinks else "single")
    if not root.exists():
        policy = "lru, shrink" if shrinks else "lru"
        figures = Figures(LATENCY_MS, 1.0)
        write_stand_ins(scenario_of(policy, "zipf", 1.0, None, figures), root)
    return root


def measure(policy: str, workload: str, seconds: float, trace: Path | None, folder: Path) -> dict[str, Any]:
    """Return the figures of one row: predicted and measured."""
    names = POLICIES[policy]
    root = write_models(folder, shrinks=names[3])
    with chrion_server(root, BUDGET_MB, ",".join(names[:3])) as url:
        figures = calibrate(url)
        scenario = scenario_of(policy, workload, seconds, trace, figures)
        (predicted,) = simulate(scenario)
        found = replays.replay(scenario, replays.ReplayOptions(url))
    return {
        "policy": policy,
        "workload": workload,
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


def calibrate(url: str) -> Figures:
    """Return the times of single requests, as their client sees them: of one in memory, and what a load adds."""

    async def ask() -> tuple[list[float], list[float]]:
        client = HttpClient(url, {})
        calls = await calls_of(client, [f"m#{number + 1}" for number in range(MODELS)])
        warm: list[float] = []
        cold: list[float] = []
        for call in calls:
            for _ in range(3):
                await asyncio.sleep(PAUSE_S)
                began = time.perf_counter()
                answer = await client.request("POST", call.path, call.body, call.headers)
                took_ms = (time.perf_counter() - began) * 1000
                timing = answer.headers.get("server-timing")  # without, it was refused
                if timing:
                    (cold if "load" in timing else warm).append(took_ms)
        await client.close()
        return warm, cold

    warm, cold = asyncio.run(ask())
    latency_ms = statistics.median(warm)
    return Figures(latency_ms, statistics.median(cold) - latency_ms)


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

"""Options of servers compared with theory, and as keys of scenarios and columns of traces."""

import csv
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.errors import ScenarioError, TraceError
from chrion.serving.server.settings import BatchingSettings
from chrion.serving.simulator.engine import ClusterEngine
from chrion.serving.simulator.export import export_requests
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.service import scaled
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from property_tests import repetitions
from simulator_support import engine_of, scenario_of

TINY = {"memory_mb": 100.0, "latency_ms": 0.001, "load_mb": 1e-6}


def test_a_keep_alive_time_makes_requests_cold() -> None:
    """A request is cold if the one before it arrived longer ago than the keep-alive time."""
    scenario = scenario_of(TINY, rate_per_s=0.5, requests=2000, keep_alive_s=3.0)
    (found,) = simulate(scenario)
    gaps_ms = np.diff(np.concatenate([chunk.times_ms for chunk in scenario.workload.chunks()]))
    assert found.total.cold == 1 + (gaps_ms > 3000.0).sum()


def test_popular_models_are_loaded_in_advance() -> None:
    """Ten seconds after memory was short, the model that fits beside the one in memory is loaded without a request.

    Models 0 and 2 leave for model 1 at 2 s, and model 1 leaves for model 0 at 3 s.
    """
    for prefetch in (False, True):
        engine = engine_of(
            [Variant("v", mb, 10.0, 10.0, load_mb=mb) for mb in (400.0, 900.0, 500.0)],
            spec=ServerSpec(gpu_memory_gb=1.0),
            rules={"prefetch": prefetch},
        )
        journal: list[tuple[float, str, int, int]] = []
        engine.cluster.journal = lambda *note, journal=journal: journal.append(note)
        engine.run([(np.array([0.0, 1000.0, 2000.0, 3000.0, 20_000.0]), np.array([0, 2, 1, 0, 2]))])
        loads = [(at // 1000, model) for at, what, _, model in journal if what == "load"]
        assert loads == [(0, 0), (1, 2), (2, 1), (3, 0), (13 if prefetch else 20, 2)]


def test_a_model_that_a_preload_has_shrunk_grows_as_soon_as_memory_is_free() -> None:
    """At 2 s one of two models has been idle for the keep-alive time and leaves, and the other one grows."""
    large, small = (Variant("v", mb, 10.0, 10.0, load_mb=mb) for mb in (600.0, 300.0))
    engine = engine_of(
        [large, large],
        spec=ServerSpec(gpu_memory_gb=1.0),
        rules={"keep_alive_ms": 1990.0},
        smaller=[[small, small]],
        preload=True,
    )
    journal: list[tuple[float, str, int, int]] = []
    engine.cluster.journal = lambda *note: journal.append(note)
    kept = next(model for model, resident in engine.servers[0].residents.items() if resident.level)
    times = np.arange(0.5, 6.0) * 1000
    engine.run([(times, np.full(len(times), kept))])
    assert [(at, event) for at, event, *_ in journal if event in {"expire", "grow"}] == [
        (1990.0, "expire"),
        (2000.0, "grow"),
    ]


@pytest.mark.parametrize(("servers", "share"), [(1, 0.2), (2, 0.04)])
def test_availability(servers: int, share: float) -> None:
    """Requests find no server with probability MTTR / (MTBF + MTTR) to the power of the servers."""
    requests = repetitions(200_000)
    sets = {"servers.count": servers, "servers.mtbf_h": 0.01, "servers.mttr_s": 9.0, "rate_per_s": 1.0}
    (found,) = simulate(scenario_of(TINY, requests=requests, **sets))
    assert found.total.failed / found.total.arrivals == pytest.approx(share, rel=0.06 * math.sqrt(200_000 / requests))
    assert found.total.violation_rate == found.total.failed / found.total.arrivals
    assert found.total.completed + found.total.failed == requests


@pytest.mark.parametrize(
    ("size", "alone", "share"),
    [(1, False, 0.04), (2, False, 0.2), (3, False, 0.2), (2, True, 0.2 + 0.8 * 0.04)],
)
def test_availability_of_servers_that_fail_together(size: int, share: float, *, alone: bool) -> None:
    """Domains are independent, and so are failures of a domain and of its two or three servers alone."""
    requests = repetitions(200_000)
    process = {"mtbf_h": 0.002, "mttr_s": 1.8}
    sets = {"servers.count": max(2, size)} | ({f"servers.{key}": value for key, value in process.items() if alone})
    (found,) = simulate(
        scenario_of(TINY, 1, {"domains": [{"size": size, **process}]}, requests=requests, rate_per_s=1.0, **sets)
    )
    tolerance = 0.06 * math.sqrt(200_000 / requests)
    assert found.total.failed / found.total.arrivals == pytest.approx(share, rel=tolerance)
    # A server is available while neither it nor its domain is being repaired.
    available = np.mean(found.series.servers_available) / max(2, size)
    assert available == pytest.approx(0.64 if alone else 0.8, rel=tolerance / 2)
    assert np.array(found.series.servers_on) == pytest.approx(max(2, size))


def test_domains_of_a_scenario_without_any_can_be_set() -> None:
    """Keys of ``--set`` make a table of their section; a key of servers alone stays theirs."""
    sets = {"domains.size": 4, "domains.mtbf_h": 100.0, "mtbf_h": 50.0}
    scenario = scenario_of(TINY, **sets)
    assert [(spec.size, spec.mtbf_h) for spec in scenario.domains] == [(4, 100.0)]
    assert scenario.servers[0].mtbf_h == 50.0
    with pytest.raises(ScenarioError, match=r"domains\[0\].mtbf_h is missing"):
        scenario_of(TINY, **{"domains.size": 4})


def test_requests_of_a_failed_domain_are_sent_to_another() -> None:
    """Of two domains, the one that fails sends its requests on; only those have failed that found no server."""
    variant = {"memory_mb": 100.0, "latency_ms": 500.0, "load_mb": 1e-6}
    sets = {"servers.count": 6, "rate_per_s": 11.0, "requests": 3000, "preload": True, "routing": "least-loaded"}
    rows: list[Any] = []
    domains = [{"size": 3, "mtbf_h": 0.03, "mttr_s": 20.0}]
    (found,) = simulate(scenario_of(variant, 1, {"domains": domains}, **sets), keep=lambda _, part: rows.append(part))
    table = np.concatenate(rows)
    started = ~np.isnan(table[:, 4])
    assert (table[started, 5] - table[started, 4]).max() == pytest.approx(500.0)
    assert table[~started, 2].tolist() == [6] * found.total.failed  # no server
    assert found.total.failed + found.total.completed == 3000
    assert found.total.failed < 0.1 * 3000


def literal_route(speeds: list[float], spill: float | None, arrival: Any, end: Any, model: Any) -> list[int]:
    """Return the server of each request by the page's rule, given the ends of those that arrived before it."""
    chosen: list[int] = []
    for i, now in enumerate(arrival):
        delays = [
            (sum(chosen[j] == s and end[j] > now for j in range(i)) + 1) / speed for s, speed in enumerate(speeds)
        ]
        homes = list(dict.fromkeys(chosen[j] for j in range(i) if model[j] == model[i]))
        # Each server has room for all models, of one size: the fewer it has received, the more memory is free.
        held = [0 if homes else len({model[j] for j in range(i) if chosen[j] == s}) for s in range(len(speeds))]
        best = min(range(len(speeds)), key=lambda s: (delays[s], held[s]))
        if spill is not None and homes:
            home = min(homes, key=delays.__getitem__)
            best = home if delays[home] < delays[best] + spill else best
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("routing", ["least-loaded", "resident-first"])
def test_routing_that_knows_speeds(routing: str) -> None:
    """Requests go to the server with the least (requests + 1) / speed, as a literal loop computes it."""
    speeds = [1.0, 1.0, 2.5, 0.5, 2.5]
    servers = [{"load_fixed_ms": 0.0, "gpu_speed": speed} for speed in speeds]
    variant = {"memory_mb": 10.0, "latency_ms": 100.0, "jitter_cv": 0.5, "load_mb": 1.0}
    sets = {"by_speed": True, "routing": routing, "spill": 1, "rate_per_s": 60.0, "requests": 600}
    rows: list[Any] = []
    simulate(scenario_of(variant, 4, {"servers": servers}, **sets), keep=lambda _, part: rows.append(part))
    table = np.concatenate(rows)
    table = table[np.argsort(table[:, 0])]
    expected = literal_route(speeds, 1 if routing == "resident-first" else None, *table[:, [3, 5, 1]].T.tolist())
    assert table[:, 2].tolist() == expected
    assert len(set(expected)) == len(speeds)


def test_an_idle_cluster_uses_its_fastest_gpu() -> None:
    """Without queues every request runs on the fast GPU, so that the mean time is half of the slow one's."""
    servers = [{"load_fixed_ms": 0.0, "gpu_speed": speed} for speed in (1.0, 2.0)]
    variant = {"memory_mb": 10.0, "latency_ms": 50.0, "load_mb": 1e-6}
    sets = {"by_speed": True, "kind": "uniform", "rate_per_s": 1.0, "requests": 50, "preload": True}
    (found,) = simulate(scenario_of(variant, 1, {"servers": servers}, **sets))
    assert found.total.response.mean_ms == pytest.approx(25.0)
    assert [server.arrivals for server in found.servers] == [0, 50]


def test_the_busy_time_of_a_batch_counts_once() -> None:
    """Eight requests in two batches of 2 s each keep the GPU busy for 4 s."""
    variant = {"memory_mb": 1.0, "latency_ms": 500.0, "batch_cost": 1.0, "load_mb": 1e-6}
    sets = {"kind": "uniform", "rate_per_s": 1e6, "requests": 8, "max_batch": 4, "max_delay_ms": 5.0, "preload": True}
    (found,) = simulate(scenario_of(variant, **sets))
    assert found.servers[0].gpu_busy * found.duration_ms == pytest.approx(4000.0)
    assert found.total.execution.mean_ms == pytest.approx(2000.0)


def test_a_batch_waits_as_long_as_in_a_server_by_default() -> None:
    """A request alone in a batch waits for others for the default of ``[batching]`` of a server's model."""
    (found,) = simulate(scenario_of(TINY, requests=1, max_batch=4, preload=True))
    assert found.total.mean_wait_ms == pytest.approx(BatchingSettings().max_delay_ms)


@pytest.mark.parametrize(("latency_ms", "load_mb"), [(1.0, 240_000.0), (20_000.0, 1e-6)])
def test_a_request_is_sent_to_three_servers(latency_ms: float, load_mb: float) -> None:
    """A request that waits for a load of 20 s, or runs as long, fails with the third server of those that soon fail."""
    variant = {"memory_mb": 100.0, "latency_ms": latency_ms, "load_mb": load_mb}
    sets = {"servers.count": 5, "mtbf_h": 1 / 3600, "mttr_s": 0.01, "requests": 1}
    (found,) = simulate(scenario_of(variant, **sets))
    assert (found.total.loads, found.total.failed) == (3, 1)


def test_a_server_that_is_switched_on_has_an_empty_host_memory() -> None:
    """A preload fills the host memory of the servers that are on at the start."""
    sets = {"preload": True, "servers.count": 3, "gpu_memory_gb": 0.1, "host_memory_gb": 1.0}
    scenario = scenario_of({"memory_mb": 100.0, "latency_ms": 1.0}, 5, {"autoscaling": {"min_servers": 2}}, **sets)
    engine = ClusterEngine(scenario.engine_config("gpu"))
    assert [len(host.memory.held) for host in engine.hosts] == [5, 5, 0]


def test_disk_reads_are_the_misses_of_an_lru_cache() -> None:
    """With equal sizes and one request at a time, host memory is an LRU cache of all requests."""
    sets = {"rate_per_s": 5.0, "requests": 4000, "gpu_memory_gb": 0.3, "host_memory_gb": 0.7, "zipf_exponent": 0.8}
    variant = {"memory_mb": 100.0, "latency_ms": 0.001}
    scenario = scenario_of(variant, 20, pcie_gb_per_s=1e6, disk_gb_per_s=1e6, **sets)
    (found,) = simulate(scenario)
    misses = []
    for places in (3, 7):
        cache: OrderedDict[int, None] = OrderedDict()
        misses.append(0)
        for model in np.concatenate([chunk.models for chunk in scenario.workload.chunks()]).tolist():
            misses[-1] += model not in cache
            cache[model] = cache.pop(model, None)
            if len(cache) > places:
                cache.popitem(last=False)
    assert (found.total.loads, found.usage.disk_loads) == tuple(misses)


def test_autoscaling_follows_its_rules() -> None:
    """Starts and stops, recomputed from the records of requests by the rules of the page, are those of the run."""
    period, target, start_ms, window = 2000.0, 2.0, 3000.0, 10_000.0
    auto = {"min_servers": 1, "target": target, "period_s": 2.0, "cold_start_s": 3.0, "stop_after_s": 10.0}
    sets = {f"autoscaling.{key}": value for key, value in auto.items()}
    variant = {"memory_mb": 100.0, "latency_ms": 300.0, "load_mb": 10.0}
    more = {"kind": "gamma", "rate_per_s": 8.0, "requests": 3000, "servers.count": 6}
    scenario = scenario_of(variant, 4, **sets, **more)
    rows: list[Any] = []
    (found,) = simulate(scenario, keep=lambda _, part: rows.append(part))
    table = np.concatenate(rows)
    arrival, end, server = table[:, 3], table[:, 5], table[:, 2]

    on, draining, wanted_at, hours, since = {0: -math.inf}, dict[int, float](), [], 0.0, {0: 0.0}
    for tick in np.arange(period, end.max(), period):
        for i in [i for i, began in draining.items() if not ((server == i) & (arrival < began) & (end > tick)).any()]:
            mine = end[(server == i) & (arrival < draining[i])]
            off = max([draining.pop(i), *mine.tolist()])
            hours += off - since[i]
            del on[i]
        flight = int(((arrival < tick) & (end > tick)).sum())
        wanted_at.append((tick, max(1, min(6, math.ceil(flight / target)))))
        present = sorted(set(on) - set(draining))
        if wanted_at[-1][1] > len(present):
            missing = wanted_at[-1][1] - len(present)
            for i in sorted(draining)[:missing]:
                del draining[i]
                missing -= 1
            for i in [i for i in range(6) if i not in on][:missing]:
                on[i], since[i] = tick + start_ms, tick
        elif tick >= window:
            needed = max(number for at, number in wanted_at if at > tick - window)
            for i in present[needed:]:
                draining[i] = tick
        during = (arrival > tick) & (arrival < tick + period)
        allowed = {i for i in on if i not in draining}
        assert set(server[during].astype(int).tolist()) <= allowed
        assert all((arrival[during][server[during] == i] >= on[i]).all() for i in allowed)
    for i in on:
        mine = end[(server == i) & (arrival < draining.get(i, math.inf))]
        hours += (max([draining[i], *mine.tolist()]) if i in draining else found.duration_ms) - since[i]
    assert found.usage.server_hours == pytest.approx(hours / 3.6e6, rel=1e-6)
    assert found.total.completed == 3000
    assert 1.5 < found.usage.server_hours * 3.6e6 / found.duration_ms < 5.5


def test_autoscaling_that_stops_servers_at_once() -> None:
    """Without a time for which fewer servers must be enough, only the latest decision counts."""
    auto = {"min_servers": 1, "target": 2.0, "period_s": 2.0, "cold_start_s": 3.0}
    more = {"kind": "gamma", "rate_per_s": 8.0, "requests": 3000, "servers.count": 6}
    variant = {"memory_mb": 100.0, "latency_ms": 300.0}
    hours = []
    for stop_after_s in (0.0, 1.0, 10.0):  # decisions are 2 s apart: a second covers the latest one, too
        sets = {f"autoscaling.{key}": value for key, value in {**auto, "stop_after_s": stop_after_s}.items()}
        (found,) = simulate(scenario_of(variant, 4, **sets, **more))
        assert found.total.completed == 3000
        hours.append(found.usage.server_hours)
    assert hours[0] == hours[1] < hours[2]


def test_the_speed_of_a_gpu_changes_the_gpu_time_of_a_request() -> None:
    """A faster GPU shortens a hybrid request by the GPU time that it saves, down to the time of its cores."""
    hybrid = Variant("v", 1.0, 50.0, 30.0, (35.0,), 1.0)
    assert (scaled(hybrid, 1.5).latency_ms, scaled(hybrid, 1.5).gpu_busy_ms) == (40.0, 20.0)
    assert scaled(hybrid, 3.0).latency_ms == 35.0
    assert scaled(hybrid, 0.5).latency_ms == 80.0
    assert scaled(Variant("v", 1.0, 50.0, 50.0), 2.0).latency_ms == 25.0


def test_columns_of_a_trace(tmp_path: Path) -> None:
    """Durations, deadlines and priorities of requests decide times, lateness and order; empty cells are defaults."""
    text = "time_s,priority,deadline_ms,model,duration_ms\n0,,,m0,100\n0.01,,,m0,\n0.02,5,1000,m0,\n0.03,1,10,m0,7.5\n"
    (tmp_path / "t.csv").write_text(text)
    variant = {"memory_mb": 100.0, "latency_ms": 20.0, "gpu_busy_ms": 20.0}
    sets = {"kind": "csv", "path": str(tmp_path / "t.csv"), "preload": True, "slo.latency_ms": 120.0}
    scenario = scenario_of(variant, **sets)
    with export_requests(tmp_path / "out.csv", scenario) as keep:
        (found,) = simulate(scenario, keep=keep)
    rows = sorted(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()), key=lambda row: int(row["number"]))
    assert [float(row["start_ms"]) for row in rows] == [0.0, 127.5, 100.0, 120.0]
    assert [float(row["end_ms"]) for row in rows] == [100.0, 147.5, 120.0, 127.5]
    assert [row["outcome"] for row in rows] == ["in time", "late", "in time", "late"]
    assert found.total.late == 2


def test_copies_of_a_request_share_its_figures(tmp_path: Path) -> None:
    """A trace replayed at three times its rate has three requests of each duration; a part of it has its own rows."""
    text = "time_s,model,duration_ms\n" + "".join(f"{i},m0,{i + 1}\n" for i in range(5))
    (tmp_path / "t.csv").write_text(text)
    sets = {"kind": "csv", "path": str(tmp_path / "t.csv"), "rate_scale": 3.0, "start_s": 2.0}
    scenario = scenario_of({"memory_mb": 1.0, "latency_ms": 20.0}, **sets)
    chunks = list(scenario.workload.chunks())
    assert sorted(np.concatenate([chunk.details.duration_ms for chunk in chunks if chunk.details]).tolist()) == [
        *[3.0] * 3,
        *[4.0] * 3,
        *[5.0] * 3,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,duration_ms\n0,-1\n", "line 2, column duration_ms: expected ms from 1e-09 to 1e+12, found '-1'"),
        ("time_s,deadline_ms\n0,x\n", "line 2, column deadline_ms: expected ms from 1e-09 to 1e+12, found 'x'"),
        ("time_s,priority\n0,1.5\n", "line 2, column priority: expected a whole number, found '1.5'"),
        ("time_s,model,model\n0,a,a\n", "line 1: expected the header time_s or timestamp, then any of model"),
        ("time_s,size\n0,1\n", "line 1: expected the header time_s or timestamp, then any of model"),
    ],
)
def test_bad_columns(tmp_path: Path, text: str, message: str) -> None:
    """Cells out of range and unknown columns are refused with their place."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TraceError) as caught:
        scenario_of(TINY, kind="csv", path=str(tmp_path / "t.csv"), default_model="m0")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"max_delay_ms": 5.0}, r"models.m0.max_delay_ms = 5: only with max_batch above 1"),
        ({"autoscaling.target": 2.0}, r"autoscaling.min_servers is missing"),
        ({"autoscaling.min_servers": 2}, r"autoscaling.min_servers: expected at most 1, the number"),
        ({"by_speed": True, "routing": "random"}, r"policies.by_speed: has no effect with routing = 'random'"),
        ({"gpus": 0}, r"servers\[0\].gpus: expected a whole number of at least 1"),
        ({"gpu_speed": 0.0}, r"servers\[0\].gpu_speed: expected a number above 0"),
        ({"variants.gpu.batch_cost": -1.0}, r"batch_cost: expected a number of at least 0"),
    ],
)
def test_options_that_are_refused(sets: dict[str, Any], message: str) -> None:
    """Values out of range, and options that have no meaning together, are refused in one line."""
    with pytest.raises(ScenarioError, match=message):
        scenario_of(TINY, **sets)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"domains": [{"size": 0, "mtbf_h": 1.0}]}, r"domains\[0\].size: expected a whole number of at least 1"),
        ({"domains": [{"size": 1}]}, r"domains\[0\].mtbf_h is missing"),
        ({"domains": [{"size": 1, "mtbf_h": 0.0}]}, r"domains\[0\].mtbf_h: expected a number above 0"),
        ({"domains": [{"size": 1, "mttr": 1.0}]}, r"domains\[0\]: unknown key 'mttr' .did you mean 'mttr_s'"),
    ],
)
def test_domains_that_are_refused(tables: dict[str, Any], message: str) -> None:
    """A domain has a size and a mean time between failures, both above 0."""
    with pytest.raises(ScenarioError, match=message):
        scenario_of(TINY, 1, tables)

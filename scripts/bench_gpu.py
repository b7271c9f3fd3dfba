"""Measure Chrion on a machine with a GPU and write all results to one JSON file.

    python scripts/bench_gpu.py --accelerator cuda -o gpu.json [--png overlap.png] [--profile profiles/gpu.json]
    python scripts/bench_gpu.py --toy --accelerator cpu     # small sizes: checks that the benchmark runs

Takes less than nine minutes; ``scripts/gpu_page.py gpu.json`` renders the result as a page. The parts:

- **table6**: the thirteen LSTMs of the paper's Table 6, unfolded, in four patterns (GPU, CPU, latency-optimal,
  memory-optimal): latency and GPU memory, predicted and measured.
- **user**: the same stacks folded, as users run them: HybridSession, given the model and the provider alone, against
  plain sessions on the accelerator (with and without a CUDA graph, buffers bound on the device) and on the CPU (one
  thread, half of the cores, all).
- **figure10**: alpha from 0 to 1 for four structures, predicted and measured.
- **overlap**: a trace in which CPU and GPU compute at the same time, as a picture.

Within a case all candidates are timed in alternating rounds, in which each runs alone, and medians are compared. Every
candidate reads its inputs from host memory and returns its outputs to it. A part starts no case after its share of the
time. The JSON lists what was left out and what failed, and is rewritten after every case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort
from derive_paper_profile import TABLE_6
from reproduction.table6 import ALPHAS, FIGURE_10

from chrion import Graph, HybridSession, Plan, Profile, load, partition, profile, zoo
from chrion.common.files import write_atomically
from chrion.devices import CPU_PROVIDER, Device, usable_provider
from chrion.devices.nvml import MemoryMonitor
from chrion.graph.model import TensorInfo
from chrion.machine.cores import physical_cores
from chrion.profiler import this_machine
from chrion.profiler.costs import FREE
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.latency import (
    Feed,
    SessionFactory,
    hybrid_candidate,
    memory_held_mb,
    plain_baseline,
    time_candidates,
)
from chrion.report.lane_chart import LaneChart, measured_chart, predicted_chart
from chrion.report.timeline_picture import plot_timelines

SCHEMA = "chrion.gpu-bench/1"
WIDTHS, BATCHES = (64, 128, 256, 512, 1024), (1, 8, 32)
#: Share of the time in which each part may start cases.
SHARES = {"overlap": 0.08, "table6": 0.42, "user": 0.33, "figure10": 0.17}
TRACES = 30
TOY = {"layers": 2, "batch": 1, "io": 8, "seq": 4}


@dataclass
class Bench:
    """The settings that all parts share, and their results."""

    provider: str
    output: Path
    toy: bool
    minutes: float
    cores: int | None
    #: GPU memory of the provider's context in this process; None if it cannot be measured.
    context_mb: float | None = None
    results: dict[str, Any] = field(default_factory=dict)
    profiles: list[Profile] = field(default_factory=list)

    @property
    def durations(self) -> dict[str, Any]:
        """The number of rounds and the duration of a trial."""
        return {"rounds": 1, "trial_s": 0.01} if self.toy else {"rounds": 3, "trial_s": 0.15}

    def build_model(self, name: str, **changes: int) -> bytes:
        """Build a model of Table 6, or a small model in its place."""
        model = zoo.build("lstm", {**TOY, **changes}) if self.toy else zoo.build(name, changes)
        return bytes(model.SerializeToString())

    def profile(self, graph: Graph) -> Profile:
        """Measure a graph; equal operators are measured once."""
        self.profiles.append(profile(graph, self.cores, self.provider))
        return self.profiles[-1]

    def run_part(self, name: str, cases: Mapping[str, Callable[[], Any]]) -> None:
        """Run the cases of a part until its share of the time is used up; record each result or failure."""
        start = time.monotonic()
        rows: dict[str, Any] = {}
        notes: dict[str, Any] = {"left_out": [], "failed": {}}
        self.results["parts"][name] = {"cases": rows, **notes}
        for case, run in cases.items():
            if time.monotonic() - start > SHARES[name] * self.minutes * 60:
                notes["left_out"].append(case)
                continue
            try:
                rows[case] = run()
            except Exception as error:  # noqa: BLE001 - the other cases still run
                notes["failed"][case] = f"{type(error).__name__}: {error}".splitlines()[0]
            self.results["parts"][name]["seconds"] = round(time.monotonic() - start, 1)
            self.save()
            print(f"{name}: {case}, {time.monotonic() - start:.0f} s", flush=True)

    def save(self) -> None:
        """Write the results so far."""
        write_atomically(self.output, json.dumps(self.results, indent=1) + "\n")


def accelerator_candidate(source: bytes, feed: Feed, provider: str, *, graph: bool = False) -> SessionFactory:
    """Return a factory of plain sessions on a provider, with buffers bound on its device.

    Each run copies the inputs to the device and the outputs back to host memory.
    """

    def make() -> tuple[Callable[[], Sequence[Any]], Callable[[], None]]:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        settings = {"enable_cuda_graph": "1"} if graph else {}
        fallback = [CPU_PROVIDER] if provider != CPU_PROVIDER else []
        session = ort.InferenceSession(source, options, providers=[(provider, settings), *fallback])
        if provider not in session.get_providers():
            raise RuntimeError(f"onnxruntime does not use {provider}")
        device = Device(provider)
        hosts = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
        binding, inputs = _bind_buffers(session, device, feed)

        def run() -> list[Any]:
            for name, buffer in inputs.items():
                device.upload(hosts[name], buffer)
            with device.exclusive():
                session.run_with_iobinding(binding)
            return list(binding.copy_outputs_to_cpu())

        return run, lambda: None

    return make


def _bind_buffers(session: ort.InferenceSession, device: Device, feed: Feed) -> tuple[Any, dict[str, ort.OrtValue]]:
    """Bind buffers on the device, or in host memory for types that the device does not support.

    Returns:
        The binding, and the buffers of the inputs on the device.
    """
    with device.exclusive():
        binding = session.io_binding()
        inputs: dict[str, ort.OrtValue] = {}
        for node in session.get_inputs():
            info = TensorInfo(node.name, node.type, tuple(node.shape))
            value = device.to_device(info, feed[node.name])
            binding.bind_ortvalue_input(node.name, value)
            if device.supports(node.type):
                inputs[node.name] = value
        for node in session.get_outputs():
            info = TensorInfo(node.name, node.type, tuple(node.shape))
            value = device.allocate(info) if device.supports(node.type) else device.host_buffer(info)
            binding.bind_ortvalue_output(node.name, value)
    return binding, inputs


def plan_candidate(bench: Bench, graph: Graph, source: bytes, plan: Plan, feed: Feed) -> SessionFactory:
    """Return a factory of sessions of a plan; a plan of a single segment runs as a plain session."""
    if len(plan.segments) > 1:
        return hybrid_candidate(graph, plan, feed)
    return accelerator_candidate(source, feed, bench.provider) if plan.accelerator else plain_baseline(source, feed, 1)


def peak_gpu_mb(bench: Bench, make: SessionFactory) -> float | None:
    """Return the most GPU memory that a candidate holds until it has run, including the context."""
    held_mb = memory_held_mb(make, MemoryMonitor())
    return None if held_mb is None else held_mb + (bench.context_mb or 0.0)


def time_all(bench: Bench, candidates: Mapping[str, SessionFactory]) -> dict[str, dict[str, Any]]:
    """Time the candidates that can run; the others have their errors in place of times."""
    working: dict[str, SessionFactory] = {}
    failed: dict[str, dict[str, Any]] = {}
    for name, make in candidates.items():
        try:
            run, close = make()
            run()
            close()
            working[name] = make
        except Exception as error:  # noqa: BLE001 - the error is part of the result
            failed[name] = {"error": str(error).splitlines()[0] if str(error) else type(error).__name__}
    return {t.name: asdict(t) for t in time_candidates(working, **bench.durations)} | failed


def measure_table6(bench: Bench, name: str) -> dict[str, Any]:
    """Predict and measure the four patterns of one column of Table 6."""
    source = bench.build_model(name)
    graph = load(source)
    feed = synthetic_inputs(graph)
    measured = bench.profile(graph)
    fastest = partition(graph, measured, policy="chrion")
    assert fastest.accelerator_only is not None  # noqa: S101 - the profile has an accelerator
    plans = {
        "gpu": partition(graph, measured, policy="accelerator"),
        "cpu": partition(graph, measured, policy="cpu"),
        "latency-optimal": fastest,
        "memory-optimal": partition(graph, measured, fastest.accelerator_only.latency_ms, policy="chrion"),
    }
    candidates = {pattern: plan_candidate(bench, graph, source, plan, feed) for pattern, plan in plans.items()}
    candidates["gpu"] = accelerator_candidate(source, feed, bench.provider)
    held = {pattern: 0.0 if pattern == "cpu" else peak_gpu_mb(bench, make) for pattern, make in candidates.items()}
    timings = time_all(bench, candidates)
    return {
        pattern: {
            "predicted": asdict(plan.predicted),
            "cores": plan.schedule.cores,
            "on_accelerator": plan.on_accelerator,
            "operators": len(plan.operators),
            "segments": len(plan.segments),
            "measured": timings[pattern],
            "measured_mb": held[pattern],
        }
        for pattern, plan in plans.items()
    }


def measure_user(bench: Bench, width: int, batch: int) -> dict[str, Any]:
    """Measure a default HybridSession of a folded stack, and the plain sessions that a user would try."""
    steps = TOY["seq"] if bench.toy else 96
    source = bench.build_model("lstm-baseline", io=width, batch=batch, chunk=steps)
    feed = synthetic_inputs(load(source))
    providers = list(dict.fromkeys([bench.provider, CPU_PROVIDER]))

    def hybrid() -> tuple[Callable[[], Sequence[Any]], Callable[[], None]]:
        session = HybridSession(source, providers=providers, tune="now")
        return lambda: session.run(None, feed), session.close

    cores = len(physical_cores())
    candidates = {"hybrid": hybrid, "accelerator": accelerator_candidate(source, feed, bench.provider)}
    if bench.provider == "CUDAExecutionProvider":
        candidates["accelerator, CUDA graph"] = accelerator_candidate(source, feed, bench.provider, graph=True)
    for threads in sorted({1, max(1, cores // 2), cores}):
        candidates[f"CPU, {threads} threads"] = plain_baseline(source, feed, threads)
    held = {name: peak_gpu_mb(bench, candidates[name]) for name in ("hybrid", "accelerator")}
    with HybridSession(source, providers=providers, tune="now") as session:
        explanation, plan = session.explain(), session.plan
    predicted = asdict(plan.predicted) if plan else None
    return {
        "timings": time_all(bench, candidates),
        "measured_mb": held,
        "predicted": predicted,
        "chunk": plan.chunk if plan else None,
        "explanation": explanation,
    }


def measure_figure10(bench: Bench, name: str) -> list[dict[str, Any]]:
    """Predict the plans for alpha from 0 to 1, and measure each distinct plan once."""
    source = bench.build_model(name)
    graph = load(source)
    feed = synthetic_inputs(graph)
    measured = bench.profile(graph)
    plans = {alpha: partition(graph, measured, alpha=alpha, policy="chrion") for alpha in ALPHAS}
    distinct = {plan.schedule: plan for plan in plans.values()}
    names = {schedule: str(at) for at, schedule in enumerate(distinct)}
    candidates = {names[s]: plan_candidate(bench, graph, source, plan, feed) for s, plan in distinct.items()}
    timings = time_all(bench, candidates)
    return [
        {
            "alpha": alpha,
            "predicted": asdict(plan.predicted),
            "plan": int(names[plan.schedule]),
            "measured": timings[names[plan.schedule]],
        }
        for alpha, plan in plans.items()
    ]


def measure_overlap(bench: Bench, png: Path | None) -> dict[str, Any]:
    """Trace the fastest plan that uses accelerator and cores, and measure how long both compute at the same time.

    The result describes the traced run of median latency.
    """
    source = bench.build_model("lstm-baseline")
    graph = load(source)
    feed = synthetic_inputs(graph)
    measured = bench.profile(graph)
    if bench.toy:
        measured = equalise(measured)
    made = [partition(graph, measured, policy=policy) for policy in ("chrion", "chrion-paper", "heft")]
    mixed = [plan for plan in made if plan.on_accelerator and plan.on_cpu]
    if not mixed:
        raise RuntimeError("no policy finds a plan that uses both accelerator and cores")
    plan = min(mixed, key=lambda plan: plan.predicted.latency_ms)
    with HybridSession(graph, plan=plan) as session:
        runs = [measured_chart(plan, session.trace(feed)) for _ in range(TRACES)][TRACES // 3 :]
    typical = sorted(runs, key=lambda chart: chart.latency_ms)[len(runs) // 2]
    if png:
        plot_timelines(plan, [predicted_chart(plan), typical], png, graph=graph)
    return {
        "latency_ms": typical.latency_ms,
        "predicted_ms": plan.predicted.latency_ms,
        "lanes_busy": typical.overlap,
        "both_sides_ms": both_sides_ms(typical),
        "on_accelerator": plan.on_accelerator,
        "operators": len(plan.operators),
        "policy": plan.policy,
    }


def equalise(found: Profile) -> Profile:
    """Return a profile with equally fast devices, and free transfers, wake-ups and reloads.

    So even small models use both devices, also if other processes used the cores while they were measured.
    """
    operators = {
        s: replace(o, cpu_ms=o.cpu_ms[:1] * len(o.cpu_ms), accelerator_ms=o.accelerator_ms and o.cpu_ms[0])
        for s, o in found.operators.items()
    }
    machine = replace(found, dispatch_ms=0.0, handoff_ms=0.0, wake_ms=0.0, reload_ms_per_byte=0.0)
    machine = replace(machine, upload=FREE, download=FREE)
    return replace(machine, operators=operators, _estimators={})


def both_sides_ms(chart: LaneChart) -> float:
    """Return the time in ms in which an accelerator lane and a core compute at the same time."""
    edges = sorted({t for bar in chart.spans for t in (bar.start_ms, bar.end_ms)})
    total = 0.0
    for start, end in itertools.pairwise(edges):
        on_cpu = {bar.lane > 0 for bar in chart.spans if bar.start_ms <= start and end <= bar.end_ms}
        total += (end - start) * (len(on_cpu) == 2)
    return total


def merge_profiles(profiles: list[Profile]) -> Profile:
    """Return a profile with the operators of all; the machine's own figures are those of the last one."""
    operators = {s: cost for p in profiles for s, cost in p.operators.items()}
    return replace(profiles[-1], operators=operators, _estimators={})


def list_parts(bench: Bench, png: Path | None) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """Yield the parts and their cases, the most important first."""
    yield "overlap", {"lstm-baseline": partial(measure_overlap, bench, png)}
    names = list(TABLE_6)[: 2 if bench.toy else None]
    yield "table6", {name: partial(measure_table6, bench, name) for name in names}
    sizes = [(8, 1)] if bench.toy else [(width, batch) for width in WIDTHS for batch in BATCHES]
    yield "user", {f"{w} wide, batch {b}": partial(measure_user, bench, w, b) for w, b in sizes}
    curves = FIGURE_10[: 1 if bench.toy else None]
    yield "figure10", {name: partial(measure_figure10, bench, name) for name in curves}


def main() -> None:
    """Run the parts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cuda", help="provider to measure (default: cuda)")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu.json"), help="default: gpu.json")
    parser.add_argument("--png", type=Path, help="where to draw the trace")
    parser.add_argument("--profile", type=Path, help="where to write the measurements as a profile")
    parser.add_argument("--minutes", type=float, default=8.5, help="time in which cases are started (default: 8.5)")
    parser.add_argument("--cores", type=int, help="CPU cores to use (default: all)")
    parser.add_argument("--toy", action="store_true", help="run few cases in small sizes")
    parser.add_argument("--only", choices=list(SHARES), help="run one part only")
    arguments = parser.parse_args()
    provider = usable_provider(arguments.accelerator)
    if provider is None:
        parser.error(f"--accelerator: {arguments.accelerator!r} is not an accelerator")
    bench = Bench(provider, arguments.output, arguments.toy, arguments.minutes, arguments.cores)
    monitor = MemoryMonitor()
    tiny = bytes(zoo.build("lstm", TOY).SerializeToString())
    accelerator_candidate(tiny, synthetic_inputs(load(tiny)), provider)()[0]()
    bench.context_mb = monitor.growth_mb()
    bench.results = {
        "schema": SCHEMA,
        "machine": asdict(this_machine(provider)),
        "accelerator": provider,
        "toy": arguments.toy,
        "context_mb": bench.context_mb,
        "parts": {},
    }
    for name, cases in list_parts(bench, arguments.png):
        if arguments.only in {None, name}:
            bench.run_part(name, cases)
    if arguments.profile and bench.profiles:
        merge_profiles(bench.profiles).save(arguments.profile)
    bench.save()
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()

"""Measure generation: selective batching alone, and iteration-level scheduling under load.

``engine``: the time of one iteration of mixed batches, by selective batching, by padding the batch to a rectangle, and
one request after another. The K/V rectangles and single caches are made outside the timed region, which favours the two
baselines. Their session waits actively between operators as that of increments does. All are timed in turn in every
round.

``load``: the end-to-end experiment of Orca (section 6.2), scaled: requests arrive at random (Poisson), with prompts of
U(32, 512) and outputs of U(1, 128) tokens divided by ``--scale``. The median latency per generated token and the
throughput are printed for iteration-level and for request-level scheduling, on the same engine, in turn at every rate.
``--points`` adds them to a file.

``report``: from such a file, the throughputs at equal latencies, in the section ``generate-load`` of pages, and a plot.

::

    python scripts/bench_generate.py engine --models "104 MB" --batches 1 8 32
    python scripts/bench_generate.py load --batches 1 8 32 --rates 10 18 24 --points loads.jsonl
    python scripts/bench_generate.py report --points loads.jsonl -o docs/generation.md --plot docs/img/generation.png
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from decoding.orca_experiment import LoadPoint, append_point, plot, read_points, table_rows
from page_markers import fill_sections, markdown_table

import chrion
from chrion import Generator, zoo
from chrion.files import write_atomically
from chrion.generation import Stream
from chrion.generation.cache import CacheManager
from chrion.generation.engine import SPINNING
from chrion.generation.generator import open_engine
from chrion.generation.iteration import Engine, Outcome, Work
from chrion.graph.decoder import DecoderSignature
from chrion.profiler import this_machine

Array = np.ndarray[Any, Any]
#: Models by name: parameters of the builder ``llama-decoder``.
MODELS: dict[str, dict[str, int]] = {
    "15 MB": {},
    "104 MB": {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 2, "inner": 1376, "vocabulary": 4096},
}
#: The share of the offered rate below which a policy is saturated, and is not measured at higher rates.
SATURATED = 0.6
#: The share of requests in their first iteration, by workload.
WORKLOADS = {"increments": 0.0, "mixed": 0.25}


@dataclass(frozen=True)
class Shape:
    """The tokens of a request in an iteration."""

    past: int
    new: int


def draw_shapes(pick: np.random.Generator, batch: int, share: float) -> list[Shape]:
    """Return requests of which a share processes a prompt, and the others one token after 16 to 128."""
    initiations = round(batch * share)
    prompts = [Shape(0, int(pick.integers(8, 65))) for _ in range(initiations)]
    return prompts + [Shape(int(pick.integers(16, 129)), 1) for _ in range(batch - initiations)]


def selective_run(engine: Engine, shapes: Sequence[Shape]) -> Callable[[], object]:
    """Return an iteration by selective batching, which can be repeated."""
    batch = []
    slots = sum(shape.past + shape.new for shape in shapes)
    manager = CacheManager(engine.signature, slots, by_token=engine.by_token)
    for at, shape in enumerate(shapes):
        cache = manager.get(at, shape.past + shape.new)
        for array in cache.arrays:
            array[...] = 0.1
        batch.append(Work(cache, np.ones(shape.new, np.int64), shape.past))

    def run() -> list[Outcome]:
        outcomes = engine.run(batch)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    return run


def rectangle_run(session: Any, signature: DecoderSignature, shapes: Sequence[Shape]) -> Callable[[], object]:
    """Return an iteration of the whole model on a batch that is padded to the longest past and the most new tokens."""
    past, new = max(shape.past for shape in shapes), max(shape.new for shape in shapes)
    mask = [[0] * (past - s.past) + [1] * s.past + [0] * (new - s.new) + [1] * s.new for s in shapes]
    positions = [[0] * (new - s.new) + [*range(s.past, s.past + s.new)] for s in shapes]
    feed: dict[str, Array] = {
        "input_ids": np.ones((len(shapes), new), np.int64),
        "attention_mask": np.array(mask),
        "position_ids": np.array(positions),
    }
    for name, (heads, width) in zip(signature.past, signature.cache_shapes, strict=True):
        feed[name] = np.full((len(shapes), heads, past, width), 0.1, np.float32)
    return lambda: session.run(None, feed)


def single_runs(session: Any, signature: DecoderSignature, shapes: Sequence[Shape]) -> Callable[[], object]:
    """Return an iteration of the whole model for each request."""
    runs = [rectangle_run(session, signature, [shape]) for shape in shapes]

    def run() -> None:
        for one in runs:
            one()

    return run


def plain_session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """Return a session of the whole model, configured as that of increments."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    for key, value in SPINNING.items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure_engine(arguments: argparse.Namespace) -> None:
    """Print the times of an iteration, and the ratios of medians over rounds."""
    columns = ["model", "requests", "batch", "selective ms", "rectangle ms", "one by one ms"]
    columns += ["rectangle / selective", "one by one / selective"]
    print_header(columns)
    for label in arguments.models:
        model = zoo.build("llama-decoder", MODELS[label])
        engine, session = open_engine(chrion.load(model), arguments.threads), plain_session(model, arguments.threads)
        for workload, batch in itertools.product(WORKLOADS, arguments.batches):
            shapes = draw_shapes(np.random.default_rng(batch), batch, WORKLOADS[workload])
            runs = {
                "selective": selective_run(engine, shapes),
                "rectangle": rectangle_run(session, engine.signature, shapes),
                "single": single_runs(session, engine.signature, shapes),
            }
            times = time_in_turn(runs, arguments.rounds)
            medians = {name: statistics.median(found) for name, found in times.items()}
            ratios = [statistics.median(np.divide(times[n], times["selective"])) for n in ("rectangle", "single")]
            cells = [f"{medians[name]:.2f}" for name in runs] + [f"{ratio:.2f}" for ratio in ratios]
            print(f"| {label} | {workload} | {batch} | {' | '.join(cells)} |", flush=True)


def print_header(columns: Sequence[str]) -> None:
    """Print the head of a table."""
    print(f"| {' | '.join(columns)} |")
    print(f"| {' | '.join('---' for _ in columns)} |", flush=True)


def time_in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the times in ms of each run in each round, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds + 1):
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            if at:
                times[name].append((time.perf_counter() - before) * 1e3)
    return times


@dataclass(frozen=True)
class LoadResult:
    """What the clients of one run have seen."""

    requests_per_s: float
    median_ms_per_token: float


def run_load(generator: Generator, rate: float, count: int, scale: int) -> LoadResult:
    """Submit requests at random times, and wait for all.

    Args:
        generator: The generator.
        rate: Requests per second.
        count: Requests.
        scale: Divides the lengths of prompts and outputs.
    """
    pick = np.random.default_rng(0)
    arrivals = np.cumsum(pick.exponential(1 / rate, count))
    prompts = pick.integers(32, 513, count) // scale
    outputs = np.maximum(pick.integers(1, 129, count) // scale, 1)
    ended: dict[int, float] = {}
    streams = []
    began = time.perf_counter()
    for at in range(count):
        time.sleep(max(0.0, began + arrivals[at] - time.perf_counter()))
        stream = generator.submit([1] * int(prompts[at]), int(outputs[at]), stop_tokens=())
        stream.add_done_callback(functools.partial(note_end, ended, at))
        streams.append(stream)
    for stream in streams:
        stream.result()
    while len(ended) < count:  # callbacks follow the end of a stream
        time.sleep(0.001)
    latencies = [(ended[at] - began - arrivals[at]) * 1e3 / outputs[at] for at in range(count)]
    return LoadResult(count / (max(ended.values()) - began), statistics.median(latencies))


def note_end(ended: dict[int, float], at: int, stream: Stream) -> None:
    """Note the time at which a stream has ended."""
    del stream
    ended[at] = time.perf_counter()


def measure_load(arguments: argparse.Namespace) -> None:
    """Print latency and throughput of both policies, rate by rate in turn."""
    print_header(["policy", "max batch", "offered requests/s", "served requests/s", "median ms per generated token"])
    for label, batch in itertools.product(arguments.models, arguments.batches):
        graph = chrion.load(zoo.build("llama-decoder", MODELS[label]))
        policies = ["iteration", "request"]
        for rate, policy in itertools.product(sorted(arguments.rates), tuple(policies)):
            if policy not in policies:
                continue
            with Generator(graph, max_batch=batch, policy=policy, threads=arguments.threads) as generator:
                generator.submit([1, 2], 3).result()
                found = run_load(generator, rate, arguments.requests, arguments.scale)
            row = f"{found.requests_per_s:.1f} | {found.median_ms_per_token:.1f}"
            print(f"| {policy} | {batch} | {rate:g} | {row} |", flush=True)
            if arguments.points:
                own = (found.requests_per_s, found.median_ms_per_token)
                append_point(arguments.points, LoadPoint(label, policy, batch, rate, *own))
            if found.requests_per_s < SATURATED * rate:
                policies.remove(policy)


def report_load(arguments: argparse.Namespace) -> None:
    """Print the throughputs at equal latencies, and fill in pages and a plot."""
    points = read_points(arguments.points)
    table = markdown_table(table_rows(points))
    print(table)
    about = f"Written by `scripts/bench_generate.py` on {this_machine()}, onnxruntime {ort.get_version_string()}"
    for path in arguments.output:
        filled = fill_sections(path.read_text(encoding="utf-8"), {"generate-load": f"{about}.\n\n{table}"})
        write_atomically(path, filled)
    if arguments.plot:
        plot(points, arguments.plot)


def main() -> None:
    """Run a measurement or write a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=("engine", "load", "report"))
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=["15 MB"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the engine")
    parser.add_argument("--rates", nargs="+", type=float, default=[5, 10, 20, 40], help="requests per second")
    parser.add_argument("--requests", type=int, default=100, help="requests of a run")
    parser.add_argument("--scale", type=int, default=4, help="divides the lengths of prompts and outputs")
    parser.add_argument("--points", type=Path, help="file to which the results of loads are added, or to report")
    parser.add_argument("-o", "--output", type=Path, nargs="*", default=[], help="pages whose section to fill in")
    parser.add_argument("--plot", type=Path, help="picture of a report")
    arguments = parser.parse_args()
    if arguments.measurement == "report" and arguments.points is None:
        parser.error("report: --points names no file")
    measurements = {"engine": measure_engine, "load": measure_load, "report": report_load}
    measurements[arguments.measurement](arguments)


if __name__ == "__main__":
    main()

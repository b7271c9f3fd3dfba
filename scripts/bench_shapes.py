"""Time and memory of models with free dimensions: HybridSession compared with a plain session.

    python scripts/bench_shapes.py                       # about ten minutes
    python scripts/bench_shapes.py --rounds 3 --tuning 20
    python scripts/bench_shapes.py -o docs/data          # also writes the results ``shapes``

Three kinds of traffic: many shapes in rotation, eight batch sizes in rotation, and a new shape in every request. Each
session has a process of its own, and the processes serve the same requests in turn, round by round. Printed are the
ratios of the total time of a round (median over rounds) and of the resident memory beyond the imports. In the first two
kinds, HybridSession is tuned before for a limited time. In the third, it tunes while it is measured and has no cache.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import onnx
import onnxruntime as ort
from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results
from serving.models import FREE_DIMENSION, free_length_lstm, perceptron

from chrion.machine.allocator import trim
from chrion.profiler import this_machine

PLAIN, HYBRID = "plain", "hybrid"
#: Rounds of traffic in which each request has a new shape: a thousand requests.
_NEW_ROUNDS = 10
HEAD = ("traffic", "model", "plain ms", "time ratio", "plain MB", "hybrid MB", "memory ratio", "plans")
TEXT = """Written by `scripts/bench_shapes.py` on {machine}, onnxruntime {version}: the time of a round of requests, and
the memory beyond the imports in MB (10^6 bytes).

{table}"""


@dataclass(frozen=True)
class Traffic:
    """Requests to a model with one free dimension.

    Attributes:
        name: Its name in the table.
        model: The model's name in the table.
        build: Builds the model.
        sizes: Sizes of the free dimension in one round.
        rotating: Whether each round has the same sizes and the session is tuned before; otherwise all sizes of all
            rounds differ.
    """

    name: str
    model: str
    build: Callable[[], onnx.ModelProto]
    sizes: Sequence[int]
    rotating: bool = True

    def sizes_of(self, number: int) -> Sequence[int]:
        """Return the sizes of a round."""
        return self.sizes if self.rotating else [size + number * len(self.sizes) for size in self.sizes]


def small_perceptron() -> onnx.ModelProto:
    """Build a perceptron with 4 MB of weights."""
    return perceptron(4, 512, FREE_DIMENSION)


def large_perceptron() -> onnx.ModelProto:
    """Build a perceptron with 40 MB of weights."""
    return perceptron(6, 1290, FREE_DIMENSION)


TRAFFIC = [
    Traffic("64 shapes in rotation", "LSTM 64", free_length_lstm, range(33, 97)),
    Traffic("64 shapes in rotation", "perceptron, 4 MB", small_perceptron, range(33, 97)),
    Traffic("8 batch sizes in rotation", "perceptron, 4 MB", small_perceptron, [2**at for at in range(8)]),
    Traffic("8 batch sizes in rotation", "perceptron, 40 MB", large_perceptron, [2**at for at in range(8)]),
    Traffic("a new shape in every request", "perceptron, 4 MB", small_perceptron, range(1, 101), rotating=False),
]


class Server:
    """A session in a process of its own."""

    def __init__(self, kind: str, model: Path, traffic: Traffic, tuning_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, kind, model, traffic, tuning_s), daemon=True)
        self._process.start()
        self._connection.recv()  # the session is open and tuned

    def round_s(self, number: int) -> float:
        """Serve a round and return its time in seconds."""
        self._connection.send(number)
        return float(self._connection.recv())

    def finish(self) -> tuple[float, int]:
        """Return the memory beyond the imports in MB and the number of plans, and end the process."""
        self._connection.send(None)
        memory_mb, plans = self._connection.recv()
        self._process.join()
        return memory_mb, plans


def serve(connection: Connection, kind: str, model: Path, traffic: Traffic, tuning_s: float) -> None:
    """Open a session, and serve the rounds whose numbers arrive; the last message is None."""
    make: Any = ort.InferenceSession
    if kind == HYBRID:
        from chrion import HybridSession  # noqa: PLC0415 - a plain session's process does not import it

        make = HybridSession
    request(model_input(model), 1)  # imports numpy's random numbers
    started_mb = resident_mb()
    session = make(str(model))
    info = model_input(model)
    if traffic.rotating:
        end_s = time.monotonic() + tuning_s
        for size in traffic.sizes:
            session.run(None, request(info, size))
        while kind == HYBRID and not session.wait_until_tuned(1.0) and time.monotonic() < end_s:
            for size in traffic.sizes:
                session.run(None, request(info, size))
        if kind == HYBRID:  # with what has been decided, so that no tuning is measured
            session.close()
            session = make(str(model), tune="never")
            for size in traffic.sizes:
                session.run(None, request(info, size))
            session.wait_until_tuned()
    connection.send(None)
    while (number := connection.recv()) is not None:
        feeds = [request(info, size) for size in traffic.sizes_of(number)]
        start_s = time.perf_counter()
        for feed in feeds:
            session.run(None, feed)
        connection.send(time.perf_counter() - start_s)
    del feeds
    engines = session._engines._table.items() if kind == HYBRID else ()  # noqa: SLF001 - reported, not used
    connection.send((resident_mb() - started_mb, sum(engine.plan is not None for _, engine in engines)))


def model_input(model: Path) -> onnx.ValueInfoProto:
    """Return the input of a model."""
    return onnx.load(model, load_external_data=False).graph.input[0]


def request(info: onnx.ValueInfoProto, size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return a request of one size of the free dimension."""
    shape = [dim.dim_value or size for dim in info.type.tensor_type.shape.dim]
    return {info.name: np.random.default_rng(size).standard_normal(shape).astype(np.float32)}


def resident_mb() -> float:
    """Return the resident memory of this process, after freed memory has been returned."""
    gc.collect()
    trim()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(traffic: Traffic, rounds: int, tuning_s: float) -> list[str]:
    """Return the line of the table for one kind of traffic."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CHRION_CACHE"] = str(Path(folder, "cache"))
        model = Path(folder, "model.onnx")
        onnx.save(traffic.build(), model)
        servers = {kind: Server(kind, model, traffic, tuning_s) for kind in (PLAIN, HYBRID)}
        times: dict[str, list[float]] = {kind: [] for kind in servers}
        for number in range(rounds if traffic.rotating else _NEW_ROUNDS):
            for kind in sorted(servers, reverse=bool(number % 2)):
                times[kind].append(servers[kind].round_s(number))
        memory = {kind: server.finish() for kind, server in servers.items()}
    pairs = zip(times[HYBRID], times[PLAIN], strict=True)
    ratio = statistics.median(hybrid / plain for hybrid, plain in pairs)
    (plain_mb, _), (hybrid_mb, plans) = memory[PLAIN], memory[HYBRID]
    figures = [f"{statistics.median(times[PLAIN]) * 1e3:.1f}", f"{ratio:.2f}", f"{plain_mb:.1f}", f"{hybrid_mb:.1f}"]
    return [traffic.name, traffic.model, *figures, f"{hybrid_mb / plain_mb:.2f}", str(plans)]


def main() -> None:
    """Measure all traffic, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each kind of traffic (default: 30)")
    parser.add_argument("--tuning", type=float, default=60.0, help="limit of tuning in seconds (default: 60)")
    add_output(parser)
    arguments = parser.parse_args()
    lines: list[Sequence[str]] = [HEAD]
    for traffic in TRAFFIC:
        lines.append(measure(traffic, arguments.rounds, arguments.tuning))
        print(" | ".join(lines[-1]), flush=True)
    content = TEXT.format(machine=this_machine(), version=ort.get_version_string(), table=markdown_table(lines))
    print(content)
    write_results(arguments.output, {"shapes": content})


if __name__ == "__main__":
    main()

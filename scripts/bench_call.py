"""Measure what a call of ``HybridSession.run`` adds to onnxruntime: this checkout against another one, in us.

    python scripts/bench_call.py --against ../before

One process of each checkout runs the same requests in turn: a product of 4 x 4 numbers on a plain session, and two
chains of products on the plan that gives each chain a lane. A trial's figure is its fastest request, which other
processes disturb least; the result is the median over all trials.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

ROUNDS, REQUESTS = 60, 400
_CHAINS = """
    <ir_version: 8, opset_import: ["" : 17]> chains (float[4,4] x) => (float[4,4] y, float[4,4] z) {
        a = MatMul(x, x)  y = MatMul(a, a)  b = Add(x, x)  z = MatMul(b, b)
    }"""
_PRODUCT = """
    <ir_version: 8, opset_import: ["" : 17]> product (float[4,4] x) => (float[4,4] y) { y = MatMul(x, x) }"""
KINDS = ("plain session", "plan on two lanes")


def open_sessions() -> list[Any]:
    """Return a session for each kind of request, of the checkout that this process measures."""
    from chrion import HybridSession  # noqa: PLC0415
    from chrion.graph import load  # noqa: PLC0415
    from chrion.scheduler import fixed_plan  # noqa: PLC0415

    plain = HybridSession(onnx.parser.parse_model(_PRODUCT).SerializeToString(), tune="now")
    graph = load(onnx.parser.parse_model(_CHAINS))
    return [plain, HybridSession(graph, plan=fixed_plan(graph, [1, 1, 2, 2]))]


def answer() -> None:
    """Time requests whenever a line is read, and write the fastest of each kind in us."""
    feed = {"x": np.eye(4, dtype=np.float32)}
    sessions = open_sessions()
    for _ in sys.stdin:
        fastest = []
        for session in sessions:
            times = []
            for _ in range(REQUESTS):
                begin = time.perf_counter_ns()
                session.run(None, feed)
                times.append(time.perf_counter_ns() - begin)
            fastest.append(min(times) / 1e3)
        print(*fastest, flush=True)


def start(stack: ExitStack, checkout: Path) -> subprocess.Popen[str]:
    """Start a process with the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--answer"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)  # noqa: S603
    return stack.enter_context(process)


def ask(process: subprocess.Popen[str]) -> list[float]:
    """Return the times of a trial of a process in us."""
    assert process.stdin  # noqa: S101 - pipes
    assert process.stdout  # noqa: S101
    print(file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the process of a checkout ended with code {process.wait()}")
    return [float(text) for text in line.split()]


def compare(against: Path, rounds: int) -> None:
    """Print the time of a call by kind of request, and what it differs from that of the other checkout."""
    trials: list[tuple[list[float], list[float]]] = []
    with ExitStack() as stack:
        own, other = (start(stack, checkout) for checkout in (Path.cwd(), against))
        for at in range(rounds + 1):
            first, second = (own, other) if at % 2 else (other, own)
            found = {id(process): ask(process) for process in (first, second)}
            if at:  # the first trial warms up
                trials.append((found[id(own)], found[id(other)]))
    for at, kind in enumerate(KINDS):
        now, before = (statistics.median(trial[side][at] for trial in trials) for side in (0, 1))
        changes = statistics.quantiles([a[at] - b[at] for a, b in trials], n=4)
        middle = f"{statistics.median(a[at] - b[at] for a, b in trials):+.2f}"
        print(f"{kind}: {now:.2f} us, before {before:.2f}; difference {middle} [{changes[0]:+.2f}, {changes[2]:+.2f}]")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer()
    elif options.against is None or not (options.against / "chrion" / "__init__.py").is_file():
        parser.error("--against: expected the folder of another checkout")
    else:
        compare(options.against.resolve(), options.rounds)


if __name__ == "__main__":
    main()

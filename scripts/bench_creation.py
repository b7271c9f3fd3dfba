"""Measure the creation time and the memory of a HybridSession with a given plan, and of a plain session.

    python scripts/bench_creation.py [--widths 64 128 256 512]

Prints a table for the folded 12-layer LSTM of 96 steps at several widths and writes no file; takes one to two minutes,
most of them for profiling and planning. Each session is created in a separate process from a file and runs five times;
memory is the growth of resident memory from just before the creation. Then it prints the CPU times of imports, with
cached byte code: the medians of processes that alternate, without that of an interpreter that imports nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil

import chrion
from chrion import zoo
from chrion.profiler.synthetic_inputs import synthetic_inputs

RUNS = 5
#: What is imported, and the number of processes of each.
IMPORTS = ("pass", "import onnxruntime", "from chrion import HybridSession")
PROCESSES = 15


def main() -> None:
    """Print the table; with ``--worker``, measure one session in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="widths of the layers")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "FEED", "PLAN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(create_session(*arguments.worker)))
        return
    print(
        "| width | plain, s | hybrid, s | plain, MB | hybrid, MB | ratio of MB |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for width in arguments.widths:
        with tempfile.TemporaryDirectory() as folder:
            print(measure_width(width, Path(folder)), flush=True)
    print()
    print(measure_imports())


def measure_imports() -> str:
    """Return the CPU times of the imports, and the ratio of Chrion's to onnxruntime's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {line: [] for line in IMPORTS}
    for _ in range(PROCESSES + 1):
        for line, own in times.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", line], check=True, env=environment)  # noqa: S603 - as above
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            own.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # The first process of each writes the byte code.
    idle, plain, hybrid = (1e3 * statistics.median(own[1:]) for own in times.values())
    ratio = (hybrid - idle) / (plain - idle)
    return f"{IMPORTS[1]}: {plain - idle:.0f} ms; {IMPORTS[2]}: {hybrid - idle:.0f} ms, {ratio:.2f} times as much"


def measure_width(width: int, folder: Path) -> str:
    """Plan the model of a width, create both sessions, and return the line of the table."""
    model, plan = folder / "model.onnx", folder / "plan.json"
    onnx.save(zoo.build("lstm", {"batch": 1, "chunk": 96, "io": width}), model)
    graph = chrion.load(model)
    chrion.partition(graph, chrion.profile(graph), policy="chrion").save(plan)
    feed = folder / "feed.npz"
    np.savez(feed, allow_pickle=False, **synthetic_inputs(graph))
    plain, hybrid = run_worker(model, feed, ""), run_worker(model, feed, str(plan))
    figures = [f"{result[unit]:.3g}" for unit in ("seconds", "mb") for result in (plain, hybrid)]
    return f"| {width} | {' | '.join(figures)} | {hybrid['mb'] / plain['mb']:.2f} |"


def run_worker(model: Path, feed: Path, plan: str) -> dict[str, float]:
    """Measure a session in a separate process; an empty plan stands for a plain session."""
    command = [sys.executable, __file__, "--worker", str(model), str(feed), plan]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - this script
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def create_session(model: str, feed_path: str, plan: str) -> dict[str, float]:
    """Create a session in this process, run it, and return its creation time and memory."""
    feed = dict(np.load(feed_path))
    process = psutil.Process()
    before, start = process.memory_info().rss, time.perf_counter()
    session: Any = chrion.HybridSession(model, plan=plan) if plan else ort.InferenceSession(model)
    seconds = time.perf_counter() - start
    for _ in range(RUNS):
        session.run(None, feed)
    return {"seconds": seconds, "mb": (process.memory_info().rss - before) / 1e6}


if __name__ == "__main__":
    main()

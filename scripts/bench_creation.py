"""What a HybridSession costs to create, beside a plain session: seconds, and resident memory of its process.

Each session is made in a process of its own, over a file, and run a few times; memory is counted from just before it is
made. ``python scripts/bench_creation.py`` prints a table for the folded 12-layer LSTM of 96 steps at several widths.
"""

from __future__ import annotations

import argparse
import json
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
from chrion.profiler.measure import synthetic_inputs

RUNS = 5


def main() -> None:
    """Print the table; with ``--plan``, be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "FEED", "PLAN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(create(*arguments.one)))
        return
    print(
        "| width | plain, s | hybrid, s | plain, MB | hybrid, MB | ratio of MB |\n| --- | --- | --- | --- | --- | --- |"
    )
    for width in arguments.widths:
        with tempfile.TemporaryDirectory() as folder:
            print(row(width, Path(folder)), flush=True)


def row(width: int, folder: Path) -> str:
    """Plan a model, then create both sessions."""
    model, plan = folder / "model.onnx", folder / "plan.json"
    onnx.save(zoo.build("lstm", {"batch": 1, "chunk": 96, "io": width}), model)
    graph = chrion.load(model)
    made = chrion.partition(graph, chrion.profile(graph), policy="chrion")
    made.save(plan)
    feed = folder / "feed.npz"
    np.savez(feed, allow_pickle=False, **synthetic_inputs(graph))
    plain, hybrid = apart(model, feed, ""), apart(model, feed, str(plan))
    figures = [f"{r[what]:.3g}" for what in ("seconds", "mb") for r in (plain, hybrid)]
    return f"| {width} | {' | '.join(figures)} | {hybrid['mb'] / plain['mb']:.2f} |"


def apart(model: Path, feed: Path, plan: str) -> dict[str, float]:
    """Create a session in another process."""
    command = [sys.executable, __file__, "--one", str(model), str(feed), plan]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - this script
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def create(model: str, arrays: str, plan: str) -> dict[str, float]:
    """Create a session in this process: with a plan, or plain without one."""
    feed = dict(np.load(arrays))
    process = psutil.Process()
    before, start = process.memory_info().rss, time.perf_counter()
    session: Any = chrion.HybridSession(model, plan=plan) if plan else ort.InferenceSession(model)
    seconds = time.perf_counter() - start
    for _ in range(RUNS):
        session.run(None, feed)
    return {"seconds": seconds, "mb": (process.memory_info().rss - before) / 1e6}


if __name__ == "__main__":
    main()

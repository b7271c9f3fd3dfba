"""Measure what it costs to run a model in blocks: the time of its chain over that of a plain session of one thread.

    python scripts/bench_blocks.py -o docs/data

Each model has several processes, one after another and pinned to one core, since memory lies elsewhere in each. In
every round a process runs the plain session and the chain in alternating order, twice each; the second runs are
compared. Ratios are medians over all rounds, with quartiles. Takes four minutes on idle cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from command_arguments import add_output, one_line_errors, positive
from page_markers import markdown_table
from result_files import write_results

from chrion.profiler import this_machine
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.runtime.block_chain import open_chain
from chrion.zoo import build

MODELS = ("googlenet", "inception-v3", "resnet-50", "squeezenet")
#: The default limit of a block's time in a MultiSession, in ms.
LIMIT_MS = 5.0
HEAD = ["model", "blocks", "chain / whole", "quartiles", "bit-equal"]


class Trial(NamedTuple):
    """What one process has measured."""

    blocks: int
    #: Whether all outputs of the chain have the bits of the whole model's.
    equal: bool
    #: The time of the chain over that of the whole model, in each round.
    ratios: list[float]


def measure(model: bytes, rounds: int, limit_ms: float = LIMIT_MS) -> Trial:
    """Measure a model in this process, which is pinned to one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    whole = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    chain = open_chain(model, limit_ms)
    feed = chain.check({info.name: synthetic_array(info) for info in chain.inputs})
    pairs = zip(chain.run(feed).values(), whole.run(None, feed), strict=True)
    equal = all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)
    runs: list[Callable[[], Any]] = [lambda: whole.run(None, feed), lambda: chain.run(feed)]
    ratios = []
    for at in range(rounds):
        times_s = [0.0, 0.0]
        for which in (at % 2, 1 - at % 2):
            runs[which]()
            begin = time.perf_counter()
            runs[which]()
            times_s[which] = time.perf_counter() - begin
        ratios.append(times_s[1] / times_s[0])
    return Trial(len(chain.block_ms), equal, ratios)


def row(name: str, trials: Sequence[Trial]) -> list[str]:
    """Return the row of a model; the number of blocks may differ, since they are cut by measured times."""
    low, middle, high = np.percentile([ratio for trial in trials for ratio in trial.ratios], (25, 50, 75))
    counts = sorted({trial.blocks for trial in trials})
    blocks = f"{counts[0]} to {counts[-1]}" if counts[1:] else f"{counts[0]}"
    equal = "yes" if all(trial.equal for trial in trials) else "no"
    return [name, blocks, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", equal]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--rounds", type=positive, default=40, help="rounds of each process")
    parser.add_argument("--processes", type=positive, default=4, help="processes of each model")
    arguments = parser.parse_args()
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for name in MODELS:
            model = build(name).SerializeToString()
            trials = pool.map(measure, [model] * arguments.processes, [arguments.rounds] * arguments.processes)
            rows.append(row(name, [*trials]))
    table = markdown_table([HEAD, *rows])
    print(table)
    text = f"{this_machine()}, onnxruntime {ort.__version__}, blocks of {LIMIT_MS:g} ms."
    write_results(arguments.output, {"blocks": f"{text}\n\n{table}"})


if __name__ == "__main__":
    with one_line_errors():
        main()

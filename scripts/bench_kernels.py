"""Time native recurrent operators beside those of onnxruntime, on one core: GFLOP/s, and shares of the CPU time.

    python scripts/bench_kernels.py -o docs/data

Layers of 48 steps with inputs as wide as their states, in float32 and, where the processor multiplies it, in bfloat16.
Sessions of one thread run in turn; figures are medians over the rounds. Takes two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnxruntime as ort
from command_arguments import add_output, positive
from page_markers import markdown_table
from result_files import write_results

from chrion import zoo
from chrion.graph.native_operators import with_native_operators
from chrion.native import bfloat16_available, register_operators
from chrion.profiler import this_machine

STEPS, TRIAL_S = 48, 0.02
WIDTHS, BATCHES = (64, 128, 256, 512), (1, 4, 8)
GATES = {"lstm": 4, "gru": 3}
HEAD = ["layer", "onnxruntime", "native", "bf16", "native / onnxruntime", "bf16 / onnxruntime"]


def layer_runs(cell: str, width: int, batch: int) -> list[Callable[[], object]]:
    """Return functions that run a layer: onnxruntime's operator, the native one, and the latter in bfloat16."""
    model = zoo.build(cell, {"layers": 1, "seq": STEPS, "chunk": STEPS, "io": width, "batch": batch})
    precisions = (False, True) if bfloat16_available() else (False,)
    runs: list[Callable[[], object]] = []
    for variant in (model, *(with_native_operators(model, bfloat16=precision) for precision in precisions)):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        register_operators(options)
        session = ort.InferenceSession(variant.SerializeToString(), options, providers=["CPUExecutionProvider"])
        generator = np.random.default_rng(0)
        feed = {i.name: generator.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}
        runs.append(partial(session.run, None, feed))
    return runs


def cpu_time_s(run: Callable[[], object]) -> float:
    """Return the mean CPU time of a run over a trial."""
    count, end, begin = 0, time.perf_counter() + TRIAL_S, time.process_time()
    while not count or time.perf_counter() < end:
        run()
        count += 1
    return (time.process_time() - begin) / count


def rows(rounds: int) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for cell, batch, width in itertools.product(GATES, BATCHES, WIDTHS):
        runs = layer_runs(cell, width, batch)
        times = [[cpu_time_s(run) for run in runs] for _ in range(rounds + 1)][1:]
        gflop = 2e-9 * GATES[cell] * width * 2 * width * STEPS * batch
        rates = [f"{gflop / statistics.median(own):.1f}" for own in zip(*times, strict=True)]
        shares = []
        for at in range(1, len(runs)):
            low, middle, high = statistics.quantiles(own[at] / own[0] for own in times)
            shares.append(f"{middle:.2f} [{low:.2f} to {high:.2f}]")
        missing = [""] * (3 - len(runs))
        yield [f"{cell.upper()} {width}, batch {batch}", *rates, *missing, *shares, *missing]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--rounds", type=positive, default=21)
    arguments = parser.parse_args()
    table = markdown_table([HEAD, *rows(arguments.rounds)])
    print(table)
    text = f"{this_machine()}, one core, onnxruntime {ort.__version__}. GFLOP/s; shares of the CPU time with quartiles."
    write_results(arguments.output, {"kernels": f"{text}\n\n{table}"})


if __name__ == "__main__":
    main()

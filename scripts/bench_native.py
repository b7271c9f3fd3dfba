"""What plans and decoders take without the native libraries, as where there was no C compiler.

    python scripts/bench_native.py -o docs/data

Two processes, one of them with a copy of the package without these libraries, run the same requests in turn. Takes two
minutes. The figures are medians of ratios side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results

import chrion
from chrion.zoo import build

ROUNDS, TRIAL_S = 21, 0.5
#: Models by name: what the zoo builds them from.
PLANS = {
    "LSTM, 10 layers of 96, 24 steps": ("lstm", {"layers": 10, "seq": 24, "io": 96, "batch": 1}),
    "GRU, 8 layers of 160, 24 steps": ("gru", {"layers": 8, "seq": 24, "io": 160, "batch": 1}),
}
DECODERS = {
    "decoder, 4 layers of 256": ("llama-decoder", {"layers": 4, "hidden": 256}),
}


def request_of(folder: Path) -> Callable[[], object]:
    """Return a function that serves a request of the model in a folder, by its plan or as a decoder."""
    model = folder / "model.onnx"
    if (folder / "plan.json").exists():
        session = chrion.HybridSession(model, plan=chrion.Plan.load(folder / "plan.json"))
        feed = {i.name: np.ones([int(d or 1) for d in i.shape], np.float32) for i in session.get_inputs()}
        return lambda: session.run(None, feed)
    generator = chrion.Generator(model)
    return lambda: generator.submit([1, 2, 3], 64, stop_tokens=()).result(60)


def answer(folder: Path) -> None:
    """Serve requests for a while whenever a line is read, and write the median time of one in ms."""
    serve = request_of(folder)
    serve()
    for _ in sys.stdin:
        times: list[float] = []
        end = time.perf_counter() + TRIAL_S
        while time.perf_counter() < end or len(times) < 3:
            begin = time.perf_counter()
            serve()
            times.append(time.perf_counter() - begin)
        print(1e3 * statistics.median(times), flush=True)


@contextlib.contextmanager
def process(packages: Path, folder: Path) -> Iterator[Callable[[], float]]:
    """Start a process with the package in a folder; yield a function that returns the time of its requests in ms."""
    command = [sys.executable, __file__, "--answer", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(Path(__file__).parent)])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as running:  # noqa: S603
        assert running.stdin  # noqa: S101 - a pipe
        assert running.stdout  # noqa: S101 - a pipe

        def ask() -> float:
            print(file=running.stdin, flush=True)
            return float(running.stdout.readline())  # type: ignore[union-attr]

        yield ask
        running.stdin.close()


def without_libraries(scratch: Path) -> Path:
    """Copy the package without its native libraries; return the folder of the copy."""
    shutil.copytree(Path(chrion.__file__).parent, scratch / "chrion", ignore=shutil.ignore_patterns("*.so"))
    return scratch


def measure(folder: Path, copy: Path) -> list[float]:
    """Return the ratios of the time without the libraries to that with them, one a round."""
    own = Path(chrion.__file__).parent.parent
    with process(own, folder) as native, process(copy, folder) as plain:
        return [plain() / native() for _ in range(ROUNDS)]


def rows(scratch: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table."""
    copy = without_libraries(scratch / "copy")
    for name, (kind, parameters) in {**PLANS, **DECODERS}.items():
        folder = Path(tempfile.mkdtemp(dir=scratch))
        onnx.save(build(kind, parameters), folder / "model.onnx")
        if name in PLANS:
            graph = chrion.load(folder / "model.onnx")
            profile = chrion.profile(graph, accelerator=None)
            chrion.partition(graph, profile).save(folder / "plan.json")
        ratios = sorted(measure(folder, copy))
        middle, quarter = statistics.median(ratios), len(ratios) // 4
        yield name, f"{middle:.2f}", f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        answer(arguments.answer)
        return
    with tempfile.TemporaryDirectory() as scratch:
        head = ("request", "time without the libraries", "quartiles")
        table = markdown_table([head, *rows(Path(scratch))])
    print(table)
    write_results(arguments.output, {"native": table})


if __name__ == "__main__":
    main()

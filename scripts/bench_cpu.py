"""Measure HybridSession and plain onnxruntime on the CPU cores of this machine, over a set of models.

    python scripts/bench_cpu.py [--wide] [-o docs/data] [--only REGEX] [--patience SECONDS] [--cache FOLDER]

Takes half an hour on two cores, an hour if other processes use them. Prints a line for each model; ``-o`` writes
the results ``cpu`` at the end or when interrupted. With ``--wide`` it measures models on which lanes of several cores
may pay, and writes the results ``cpu-wide``. With ``--only``, rows of models that are not measured stay in them, so
that a busy machine can be kept free for one model at a time.

The candidates are HybridSession and plain sessions with one thread, with as many as there are cores, with onnxruntime's
default, and with its parallel executor. Each runs alone, in alternating rounds, and medians are compared. HybridSession
is given the model alone, so that its guard chooses, before the trials that are timed.

Rounds continue until the ratio is known to within a few per cent, whatever it is, or for ``--patience`` seconds a
model; ``ratios.py`` selects the trials that count.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from command_arguments import add_output
from onnx import TensorProto, helper, numpy_helper
from page_markers import markdown_table
from ratios import TimedTrial, ratio_to_best, undisturbed_trials
from result_files import read_rows, write_results

import chrion
from chrion import Graph, HybridSession, Profile, zoo
from chrion.machine.cores import physical_cores
from chrion.profiler import this_machine
from chrion.profiler.interference import CoreMonitor
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.profiler.widths import measured_widths, times_at
from chrion.report.benchmark.latency import Feed, RunRequest, SessionFactory, plain_baselines, time_candidates
from chrion.scheduler.plan import Plan

HYBRID = "hybrid"
#: Names of results.
MEASURED, WIDE = "cpu", "cpu-wide"
#: Short, so that many trials are free of interference.
TRIAL_S = 0.05
#: Rounds between estimates of the ratio, and number of each candidate's trials that must count.
ROUNDS, LEAST = 6, 16
#: Width of the 90 % interval of a ratio that is known well enough.
PRECISION = 0.03
#: Largest ratio that is shown as a gain.
GAIN = 0.97
#: A plain session is dropped if even its best trial is slower than the best plain session by this factor.
DROP_FACTOR = 1.3
MANY_CORES = (4, 8, 16)


@dataclass(frozen=True)
class Case:
    """A model of the benchmark, and the ratio to the best plain session that it should not exceed."""

    name: str
    build: Callable[[], onnx.ModelProto]
    aim: float = 1.03


def recurrent_case(cell: str, name: str, aim: float = 1.03, **parameters: int | bool) -> Case:
    """Return a folded stack of 12 layers and 96 steps with batch 1, unless parameters differ."""
    given = {"batch": 1, "chunk": 96, **parameters}
    return Case(name, lambda: zoo.build(cell, given), aim)


def light_models() -> Iterator[Case]:
    """Yield the nine architectures that the onnx package contains."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(folder.glob("light_*.onnx")):
        yield Case(path.stem.removeprefix("light_"), lambda path=path: onnx.load(path))  # type: ignore[misc]


def transformer_block(width: int = 256, heads: int = 4, tokens: int = 64) -> onnx.ModelProto:
    """Build an encoder block: attention with separate projections, then two dense layers, both with residuals."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def weight(name: str, value: np.ndarray[Any, Any]) -> str:
        weights.append(numpy_helper.from_array(value, name))
        return name

    def node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def dense(source: str, name: str, rows: int, columns: int) -> str:
        matrix = (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)
        return node("MatMul", [source, weight(f"{name}.w", matrix)], name)

    split = weight("heads", np.array([tokens, heads, width // heads], np.int64))
    parts = {}
    for part in "qkv":
        shaped = node("Reshape", [dense("x", part, width, width), split], f"{part}.heads")
        parts[part] = node("Transpose", [shaped], f"{part}.t", perm=[1, 2, 0] if part == "k" else [1, 0, 2])
    scores = node("MatMul", [parts["q"], parts["k"]], "scores")
    mixed = node("MatMul", [node("Softmax", [scores], "weights", axis=-1), parts["v"]], "mixed")
    flat = weight("flat", np.array([tokens, width], np.int64))
    joined = node("Reshape", [node("Transpose", [mixed], "mixed.t", perm=[1, 0, 2]), flat], "joined")
    attended = node("Add", [dense(joined, "out", width, width), "x"], "attended")
    hidden = node("Relu", [dense(attended, "up", width, 4 * width)], "hidden")
    node("Add", [dense(hidden, "down", 4 * width, width), attended], "y")
    return _model(nodes, weights, [tokens, width])


def small_chain(length: int = 40) -> onnx.ModelProto:
    """Build a chain of operators of about a microsecond each, on which parallel lanes can only lose time."""
    names = ["x", *(f"v{i}" for i in range(length - 1)), "y"]
    kinds = ("Relu", "Neg", "Abs", "Sigmoid")
    nodes = [helper.make_node(kinds[i % 4], [names[i]], [names[i + 1]], name=f"n{i}") for i in range(length)]
    return _model(nodes, [], [1, 64])


def single_operator() -> onnx.ModelProto:
    """Build a model of one matrix product."""
    weight = numpy_helper.from_array(np.ones((512, 512), np.float32), "w")
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], [weight], [64, 512])


def _model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], shape: list[int]) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "model", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CASES = [
    recurrent_case("lstm", "LSTM 64", 0.82, io=64),
    recurrent_case("lstm", "LSTM 128", 0.82, io=128),
    recurrent_case("lstm", "LSTM 192", 0.92, io=192),
    recurrent_case("lstm", "LSTM 256", 1.03, io=256),
    recurrent_case("lstm", "LSTM 512", 1.03, io=512),
    recurrent_case("gru", "GRU 128", 0.72, io=128),
    recurrent_case("gru", "GRU 192", 0.82, io=192),
    recurrent_case("lstm", "LSTM 64, batch 8, unfolded", 0.60, io=64, batch=8, chunk=1),
    recurrent_case("lstm", "LSTM 128, 6 layers, bidirectional", 0.80, io=128, layers=6, bidirectional=True),
    recurrent_case("lstm", "LSTM 64, batch 8", io=64, batch=8),
    recurrent_case("lstm", "LSTM 128, batch 8", io=128, batch=8),
    recurrent_case("gru", "GRU 128, batch 8", io=128, batch=8),
    *light_models(),
    Case("transformer block", transformer_block),
    Case("chain of small operators", small_chain),
    Case("single operator", single_operator),
]


def zoo_case(name: str, builder: str, batch: int, **parameters: int | bool) -> Case:
    """Return a model of the zoo with a batch size."""
    return Case(f"{name}, batch {batch}", lambda: zoo.build(builder, {**parameters, "batch": batch}))


WIDE_CASES = [
    case
    for batch in (1, 8)
    for case in (
        recurrent_case("lstm", f"LSTM 256, batch {batch}", io=256, batch=batch),
        recurrent_case("lstm", f"LSTM 320, batch {batch}", io=320, batch=batch),
        recurrent_case("gru", f"GRU 256, batch {batch}", io=256, batch=batch),
        zoo_case("seq2seq with attention", "seq2seq", batch, layers=2, hidden=256, vocabulary=2000),
        zoo_case("GoogLeNet", "googlenet", batch),
        zoo_case("Inception-v3", "inception-v3", batch),
        zoo_case("NASNet-A mobile", "nasnet-a", batch, cells=4, channels=44, stem=32),
        zoo_case("RandWire small", "randwire", batch, channels=78, small=True),
    )
]


def hybrid_factory(source: bytes, feed: Feed, precision: str = "float32") -> SessionFactory:
    """Return a factory of HybridSessions with a precision."""

    def make() -> tuple[RunRequest, Callable[[], None]]:
        session = HybridSession(source, tune="now", precision=precision)
        return lambda: session.run(None, feed), session.close

    return make


def parallel_factory(source: bytes, feed: Feed) -> SessionFactory:
    """Return a factory of plain sessions with onnxruntime's parallel executor."""

    def make() -> tuple[RunRequest, Callable[[], None]]:
        options = ort.SessionOptions()
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.log_severity_level = 3
        session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, feed), lambda: None

    return make


def predicted_ms(graph: Graph, profile: Profile, cores: int) -> float:
    """Return the planner's prediction for more cores, assuming that they contend no more than those measured.

    Times of operators on several cores follow Amdahl's law.
    """
    more = {
        s: replace(
            o,
            cpu_ms=(o.cpu_ms + o.cpu_ms[-1:] * cores)[:cores],
            native_ms=(o.native_ms + o.native_ms[-1:] * cores)[:cores],
            wide_ms=times_at(o.cpu_ms[0], o.by_width, measured_widths(cores)) if o.wide_ms else (),
            native_wide_ms=(),
        )
        for s, o in profile.operators.items()
    }
    larger = replace(profile, cores=cores, operators=more, _estimators={})
    return chrion.partition(graph, larger, policy="chrion").predicted.latency_ms


class RecordingMonitor(CoreMonitor):
    """A monitor that never waits, and records the speed of the cores before and after each trial."""

    def __init__(self) -> None:
        super().__init__(physical_cores(), patience_s=0.0)
        self.recorded_ms: list[float] = []

    def wait(self) -> bool:
        """Record the speed before a trial."""
        self.recorded_ms.append(self.measure_ms())
        return True

    def has_interference(self) -> bool:
        """Record the speed after a trial, which is never repeated."""
        self.recorded_ms.append(self.measure_ms())
        return False


def run_rounds(candidates: Mapping[str, SessionFactory], monitor: RecordingMonitor) -> list[TimedTrial]:
    """Run some rounds of all candidates."""
    monitor.recorded_ms.clear()
    order: list[str] = []
    timings = time_candidates(
        candidates, rounds=ROUNDS, trial_s=TRIAL_S, monitor=monitor, progress=lambda _at, _of, name: order.append(name)
    )
    times = {timing.name: iter(timing.trials_ms) for timing in timings}
    around = zip(monitor.recorded_ms[::2], monitor.recorded_ms[1::2], strict=True)
    return [TimedTrial(name, next(times[name]), max(both)) for name, both in zip(order, around, strict=True)]


def time_until_precise(
    candidates: Mapping[str, SessionFactory], monitor: RecordingMonitor, patience_s: float
) -> tuple[int, dict[str, list[float]]]:
    """Run rounds until the ratio is known well enough, or until the patience is used up.

    Returns:
        The number of HybridSession's trials, and the medians in ms of the trials that count, by remaining candidate.
    """
    trials: list[TimedTrial] = []
    remaining, end = dict(candidates), time.monotonic() + patience_s
    while True:
        trials += run_rounds(remaining, monitor)
        counted = undisturbed_trials([t for t in trials if t.candidate in remaining], monitor.fastest_ms, LEAST)
        _, low, high = ratio_to_best(counted, HYBRID)
        known = high - low <= PRECISION and all(len(counted[name]) >= LEAST for name in remaining)
        if known or time.monotonic() > end:
            return sum(t.candidate == HYBRID for t in trials), counted
        limit_ms = DROP_FACTOR * float(np.median(counted[best_plain(counted)]))
        dropped = {name for name, times in counted.items() if len(times) >= LEAST and min(times) > limit_ms}
        remaining = {name: make for name, make in remaining.items() if name == HYBRID or name not in dropped}


def best_plain(trials: Mapping[str, Sequence[float]]) -> str:
    """Return the plain session with the smallest median."""
    return min((name for name in trials if name != HYBRID), key=lambda name: float(np.median(trials[name])))


@dataclass(frozen=True)
class Measured:
    """The trials of a model, and the plan that HybridSession chose, if any."""

    case: Case
    source: bytes
    #: Number of HybridSession's trials.
    taken: int
    #: Medians in ms of the trials that count, by candidate.
    counted: dict[str, list[float]]
    plan: Plan | None
    profile: Profile | None

    def row(self) -> list[str]:
        """Return the model's line of the table, without predictions for more cores."""
        best = best_plain(self.counted)
        own_ms, best_ms = (float(np.median(self.counted[name])) for name in (HYBRID, best))
        quotient, low, high = ratio_to_best(self.counted, HYBRID)
        row = [self.case.name, f"{best_ms:.3g}", best.removeprefix("plain, "), f"{own_ms:.3g}"]
        row += [f"**{quotient:.2f}**" if quotient <= GAIN else f"{quotient:.2f}", f"{low:.2f} to {high:.2f}"]
        row += [f"{len(self.counted[HYBRID])} of {self.taken}"]
        row += [f"{self.case.aim:.2f}", self._chosen()]
        if not self.plan:
            return [*row, "", ""]
        predicted_ms = self.plan.predicted.latency_ms
        return [*row, f"{predicted_ms:.3g}", f"{predicted_ms / own_ms - 1:+.0%}"]

    def _chosen(self) -> str:
        if not self.plan:
            return "plain"
        wide = sum(width > 1 for width in self.plan.schedule.widths)
        return f"plan, {wide / len(self.plan.operators):.0%} of operators on 2 cores" if wide else "plan"

    def more_cores_cells(self) -> list[str]:
        """Return predictions for more cores over the best plain session's time; this takes longer than measuring."""
        if self.profile is None:
            return [""] * len(MANY_CORES)
        graph, best_ms = chrion.load(self.source), float(np.median(self.counted[best_plain(self.counted)]))
        return [f"{predicted_ms(graph, self.profile, cores) / best_ms:.2f}" for cores in MANY_CORES]


def measure(case: Case, monitor: RecordingMonitor, patience_s: float, cache: Path | None = None) -> Measured:
    """Measure a model and print its line.

    Args:
        case: The model.
        monitor: Records the speed of the cores.
        patience_s: Most seconds of trials.
        cache: Folder of measurements and choices of earlier calls to reuse; by default none are reused.
    """
    source = case.build().SerializeToString()
    feed = synthetic_inputs(chrion.load(source))
    folder = nullcontext(str(cache)) if cache else TemporaryDirectory()
    with folder as os.environ["CHRION_CACHE"]:
        with HybridSession(source, tune="now") as session:
            plan = session.plan
        candidates = {
            HYBRID: hybrid_factory(source, feed),
            **plain_baselines(source, feed, "plain"),
            "ORT_PARALLEL": parallel_factory(source, feed),
        }
        taken, counted = time_until_precise(candidates, monitor, patience_s)
        profile = chrion.profile(chrion.load(source)) if plan and case in CASES else None
    measured = Measured(case, source, taken, counted, plan, profile)
    print(" | ".join(measured.row()), flush=True)
    return measured


HEAD = ["model", "best plain, ms", "which", "hybrid, ms", "ratio", "90 %", "trials", "aim", "chosen"]
HEAD += ["predicted, ms", "error"]

TEXT = """Written by `scripts/bench_cpu.py` on {machine} (shared, noisy: only ratios mean anything), onnxruntime
{version}.

HybridSession, given the model alone, is compared with the best of four plain sessions (1 thread, all threads, default,
ORT_PARALLEL); each runs alone, in alternating rounds. *ms* are medians over the trials that count: those before and
after which all cores ran within 10 % of their full speed, or slightly below if a candidate had fewer than {least} of
those (*trials*: how many of HybridSession's count). *ratio* compares such medians; the best plain session is selected
on one half of the trials and timed on the other, and then the halves are exchanged. Its 90 % interval is a bootstrap
over trials. Recurrent models have 12 layers, 96 steps, batch 1 and are folded, unless stated. *chosen* is the guard's
choice: with *plain*, HybridSession is a plain session. The last columns are the planner's predictions for more cores,
over the same best plain time of this machine: they are not measured, and assume that further cores contend no more
than the two measured.

{table}

Prediction error of the models that run a plan: median {median:.0%}, 90th percentile {p90:.0%}."""


WIDE_TEXT = """Written by `scripts/bench_cpu.py --wide` on {machine} (shared, noisy: only ratios mean anything),
onnxruntime {version}. Columns are those of the table above.

{table}"""


def format_results(found: Sequence[Measured]) -> dict[str, str]:
    """Return the results ``cpu`` by name."""
    more = [f"{cores} cores (predicted)" for cores in MANY_CORES]
    rows = [measured.row() for measured in found]
    errors = [abs(float(row[-1].rstrip("%"))) / 100 for row in rows if row[-1]] or [0.0]
    extended = [row + measured.more_cores_cells() for row, measured in zip(rows, found, strict=True)]
    content = TEXT.format(
        machine=this_machine(),
        version=ort.get_version_string(),
        least=LEAST,
        table=markdown_table([HEAD + more, *extended]),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
    )
    return {MEASURED: content}


def format_wide(folder: Path | None, found: Sequence[Measured]) -> dict[str, str]:
    """Return the results ``cpu-wide``, with stored rows of models that were not measured."""
    rows = {row[0]: row for row in read_rows(folder, WIDE)}
    rows |= {measured.case.name: measured.row() for measured in found}
    table = markdown_table([HEAD, *(rows[case.name] for case in WIDE_CASES if case.name in rows)])
    return {WIDE: WIDE_TEXT.format(machine=this_machine(), version=ort.get_version_string(), table=table)}


def main() -> None:
    """Measure all models, print the line of each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--only", default="", help="a regular expression that names of models must match")
    parser.add_argument("--patience", type=float, default=120.0, help="most seconds of trials a model (default: 120)")
    parser.add_argument("--wide", action="store_true", help="measure models on which lanes of several cores may pay")
    parser.add_argument("--cache", type=Path, help="folder of measurements and choices to reuse (default: none)")
    arguments = parser.parse_args()
    ort.set_default_logger_severity(3)  # some models have unused weights
    known = WIDE_CASES if arguments.wide else CASES
    cases = [case for case in known if re.search(arguments.only, case.name)]
    if not cases:
        parser.error(
            f"--only: no model matches {arguments.only!r}; models are {', '.join(case.name for case in known)}"
        )
    monitor = RecordingMonitor()
    print(" | ".join(HEAD))
    found: list[Measured] = []
    try:
        for case in cases:
            measured = measure(case, monitor, arguments.patience, arguments.cache)
            found.append(measured)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if found:
        contents = format_wide(arguments.output, found) if arguments.wide else format_results(found)
        write_results(arguments.output, contents)


if __name__ == "__main__":
    main()

"""HybridSession beside plain onnxruntime on this machine's CPU cores, over a set of models.

Rivals are plain sessions with one thread, with as many as there are cores, with onnxruntime's own choice, and with its
parallel executor; each has the machine to itself, in alternating turns, and medians are compared. HybridSession is used
as a user would: nothing given but the model, so that its guard has its say (before the turns that are timed).

``python scripts/bench_cpu.py -o docs/cpu.md`` takes half an hour on two cores, an hour on busy
ones, and replaces what stands between the pages' markers, at its end or when interrupted: all of it where they are
of ``measured``, the table without what is predicted for more cores where they are of ``ratios``. ``--only`` picks
models by a regular expression over their names.

Turns are taken until the ratio is known to within a few per cent, whatever it is, or for ``--patience`` seconds a
model; ``ratios.py`` says which of them count.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from page_markers import fill_sections, markdown_table
from ratios import Turn, quiet, ratio

import chrion
from chrion import Graph, HybridSession, Profile, zoo
from chrion.benchmark.latency import Feed, RunRequest, SessionFactory, plain_baselines, time_candidates
from chrion.cores import physical_cores
from chrion.files import write_atomically
from chrion.profiler import this_machine
from chrion.profiler.interference import CoreMonitor
from chrion.profiler.measure import synthetic_inputs
from chrion.scheduler.plan import Plan

HYBRID = "hybrid"
MEASURED, RATIOS = "measured", "ratios"
#: Short, so that turns fit into quiet moments.
TURN_S = 0.05
#: Turns of each rival before the ratio is looked at, and how many have to count.
CYCLES, LEAST = 6, 16
#: The 90 % interval of a ratio that is known well enough, from its lower to its upper end.
PRECISION = 0.03
#: A ratio that is called a gain.
GAIN = 0.97
#: A plain session that even in its best turn of enough is so far behind the best one takes no more.
FAR = 1.3
MANY_CORES = (4, 8, 16)


@dataclass(frozen=True)
class Case:
    """A model of the set, and the ratio to the best plain session it should not exceed."""

    name: str
    build: Callable[[], onnx.ModelProto]
    aim: float = 1.03


def recurrent(cell: str, name: str, aim: float = 1.03, **parameters: int | bool) -> Case:
    """A folded stack of 96 steps and 12 layers, batch 1, unless said otherwise."""
    given = {"batch": 1, "chunk": 96, **parameters}
    return Case(name, lambda: zoo.build(cell, given), aim)


def light_models() -> Iterator[Case]:
    """The nine architectures that come with the onnx package."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(folder.glob("light_*.onnx")):
        yield Case(path.stem.removeprefix("light_"), lambda path=path: onnx.load(path))  # type: ignore[misc]


def transformer_block(width: int = 256, heads: int = 4, tokens: int = 64) -> onnx.ModelProto:
    """One encoder block: attention with separate projections, then two dense layers, both with residuals."""
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
    """Operators of about a microsecond, one after another: nothing to gain, much to lose."""
    names = ["x", *(f"v{i}" for i in range(length - 1)), "y"]
    kinds = ("Relu", "Neg", "Abs", "Sigmoid")
    nodes = [helper.make_node(kinds[i % 4], [names[i]], [names[i + 1]], name=f"n{i}") for i in range(length)]
    return _model(nodes, [], [1, 64])


def single_operator() -> onnx.ModelProto:
    """One matrix product."""
    weight = numpy_helper.from_array(np.ones((512, 512), np.float32), "w")
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], [weight], [64, 512])


def _model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], shape: list[int]) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "model", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CASES = [
    recurrent("lstm", "LSTM 64", 0.82, io=64),
    recurrent("lstm", "LSTM 128", 0.82, io=128),
    recurrent("lstm", "LSTM 192", 0.92, io=192),
    recurrent("lstm", "LSTM 256", 1.03, io=256),
    recurrent("lstm", "LSTM 512", 1.03, io=512),
    recurrent("gru", "GRU 128", 0.72, io=128),
    recurrent("gru", "GRU 192", 0.82, io=192),
    recurrent("lstm", "LSTM 64, batch 8, unfolded", 0.60, io=64, batch=8, chunk=1),
    recurrent("lstm", "LSTM 128, 6 layers, both ways", 0.80, io=128, layers=6, bidirectional=True),
    recurrent("lstm", "LSTM 64, batch 8", io=64, batch=8),
    recurrent("lstm", "LSTM 128, batch 8", io=128, batch=8),
    recurrent("gru", "GRU 128, batch 8", io=128, batch=8),
    *light_models(),
    Case("transformer block", transformer_block),
    Case("chain of small operators", small_chain),
    Case("single operator", single_operator),
]


def hybrid(source: bytes, feed: Feed) -> SessionFactory:
    """HybridSession on its own."""

    def make() -> tuple[RunRequest, Callable[[], None]]:
        session = HybridSession(source)
        return lambda: session.run(None, feed), session.close

    return make


def parallel(source: bytes, feed: Feed) -> SessionFactory:
    """Onnxruntime's parallel executor."""

    def make() -> tuple[RunRequest, Callable[[], None]]:
        options = ort.SessionOptions()
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.log_severity_level = 3
        session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, feed), lambda: None

    return make


def predicted_ms(graph: Graph, profile: Profile, cores: int) -> float:
    """What the planner predicts for more cores, if they contend no more than those measured."""
    more = {s: replace(o, cpu_ms=(o.cpu_ms + (o.cpu_ms[-1],) * cores)[:cores]) for s, o in profile.operators.items()}
    wide = replace(profile, cores=cores, operators=more, _estimators={})
    return chrion.partition(graph, wide, policy="chrion").predicted.latency_ms


class Looks(CoreMonitor):
    """Waits for nothing, and notes how fast the cores are before and after each turn."""

    def __init__(self) -> None:
        super().__init__(physical_cores(), patience_s=0.0)
        self.ms: list[float] = []

    def wait(self) -> bool:
        """Before a turn."""
        self.ms.append(self.measure_ms())
        return True

    def has_interference(self) -> bool:
        """After it: it need not be taken again."""
        self.ms.append(self.measure_ms())
        return False


def some_turns(rivals: Mapping[str, SessionFactory], looks: Looks) -> list[Turn]:
    """Some turns of each rival."""
    looks.ms.clear()
    order: list[str] = []
    timings = time_candidates(
        rivals, rounds=CYCLES, trial_s=TURN_S, monitor=looks, progress=lambda _at, _of, name: order.append(name)
    )
    times = {timing.name: iter(timing.trials_ms) for timing in timings}
    around = zip(looks.ms[::2], looks.ms[1::2], strict=True)
    return [Turn(name, next(times[name]), max(both)) for name, both in zip(order, around, strict=True)]


def timed(rivals: Mapping[str, SessionFactory], looks: Looks, patience_s: float) -> tuple[int, dict[str, list[float]]]:
    """As many turns as it takes: how many there were of each rival left in the end, and medians of those that count."""
    turns: list[Turn] = []
    racing, end = dict(rivals), time.monotonic() + patience_s
    while True:
        turns += some_turns(racing, looks)
        counted = quiet([turn for turn in turns if turn.rival in racing], looks.fastest_ms, LEAST)
        _, low, high = ratio(counted, HYBRID)
        known = high - low <= PRECISION and all(len(counted[name]) >= LEAST for name in racing)
        if known or time.monotonic() > end:
            return sum(turn.rival == HYBRID for turn in turns), counted
        far_ms = FAR * float(np.median(counted[best_plain(counted)]))
        behind = {name for name, times in counted.items() if len(times) >= LEAST and min(times) > far_ms}
        racing = {name: make for name, make in racing.items() if name == HYBRID or name not in behind}


def best_plain(turns: Mapping[str, Sequence[float]]) -> str:
    """The fastest of the others."""
    return min((name for name in turns if name != HYBRID), key=lambda name: float(np.median(turns[name])))


@dataclass(frozen=True)
class Measured:
    """A model's turns, and the plan that HybridSession runs by, if it does."""

    case: Case
    source: bytes
    #: How many turns HybridSession took.
    taken: int
    #: Medians of the turns that count, by rival.
    counted: dict[str, list[float]]
    plan: Plan | None
    profile: Profile | None

    def row(self) -> list[str]:
        """Its line of the table, without predictions for more cores."""
        best = best_plain(self.counted)
        own_ms, best_ms = (float(np.median(self.counted[name])) for name in (HYBRID, best))
        quotient, low, high = ratio(self.counted, HYBRID)
        row = [self.case.name, f"{best_ms:.3g}", best.removeprefix("plain, "), f"{own_ms:.3g}"]
        row += [f"**{quotient:.2f}**" if quotient <= GAIN else f"{quotient:.2f}", f"{low:.2f} to {high:.2f}"]
        row += [f"{len(self.counted[HYBRID])} of {self.taken}"]
        row += [f"{self.case.aim:.2f}", "plan" if self.plan else "plain"]
        if not self.plan:
            return [*row, "", ""]
        predicted_ms = self.plan.predicted.latency_ms
        return [*row, f"{predicted_ms:.3g}", f"{predicted_ms / own_ms - 1:+.0%}"]

    def with_more_cores(self) -> list[str]:
        """What is predicted for more cores, over the best plain session's time; takes longer than measuring."""
        if self.profile is None:
            return [""] * len(MANY_CORES)
        graph, best_ms = chrion.load(self.source), float(np.median(self.counted[best_plain(self.counted)]))
        return [f"{predicted_ms(graph, self.profile, cores) / best_ms:.2f}" for cores in MANY_CORES]


def measure(case: Case, looks: Looks, patience_s: float) -> Measured:
    """Measure a model, and print its line."""
    source = case.build().SerializeToString()
    feed = synthetic_inputs(chrion.load(source))
    with TemporaryDirectory() as os.environ["CHRION_CACHE"]:  # what was chosen before is of no account
        with HybridSession(source) as session:
            plan = session.plan
        rivals = {
            HYBRID: hybrid(source, feed),
            **plain_baselines(source, feed, "plain"),
            "ORT_PARALLEL": parallel(source, feed),
        }
        taken, counted = timed(rivals, looks, patience_s)
        profile = chrion.profile(chrion.load(source)) if plan else None
    measured = Measured(case, source, taken, counted, plan, profile)
    print(" | ".join(measured.row()), flush=True)
    return measured


HEAD = ["model", "best plain, ms", "which", "hybrid, ms", "ratio", "90 %", "turns", "aim", "chosen"]
HEAD += ["predicted, ms", "error"]
MORE = [f"{cores} cores (predicted)" for cores in MANY_CORES]

TEXT = """Written by `scripts/bench_cpu.py` on {machine} (shared, noisy: only ratios mean anything), onnxruntime
{version}.

HybridSession with nothing given but the model, beside the best of four plain sessions (1 thread, all threads, default,
ORT_PARALLEL), each with the machine to itself in alternating turns. *ms* are medians over the turns that count: those
before and after which all cores ran within 10 % of their full speed, or a bit below where a rival had fewer than
{least} of those (*turns*: how many of HybridSession's count). *ratio* compares such medians, the best plain session
picked on one half of the turns and timed on the other, and the other way round; beside it is its 90 % interval
(bootstrap over turns). Recurrent models: 12 layers, 96 steps, batch 1, folded, unless said otherwise. *chosen* is what
the guard settled for: where it says plain, HybridSession is a plain session. The last columns are what the planner
predicts on more cores, over the same best plain time of this machine: predictions, not measurements, and they assume
that further cores contend no more than the two measured.

{table}

Prediction of those that run by a plan: median error {median:.0%}, 90th percentile {p90:.0%}."""


def sections(found: Sequence[Measured]) -> dict[str, str]:
    """What goes into the pages, by the names of their markers."""
    rows = [measured.row() for measured in found]
    errors = [abs(float(row[-1].rstrip("%"))) / 100 for row in rows if row[-1]] or [0.0]
    wide = [row + measured.with_more_cores() for row, measured in zip(rows, found, strict=True)]
    whole = TEXT.format(
        machine=this_machine(),
        version=ort.get_version_string(),
        least=LEAST,
        table=markdown_table([HEAD + MORE, *wide]),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
    )
    return {MEASURED: whole, RATIOS: markdown_table([HEAD, *rows])}


def main() -> None:
    """Run the set, print each line as it comes, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, nargs="*", default=[], help="pages whose markers to fill")
    parser.add_argument("--only", default="")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds of turns a model")
    arguments = parser.parse_args()
    for path in arguments.output:
        fill_sections(
            path.read_text(encoding="utf-8"), {MEASURED: "", RATIOS: ""}
        )  # refuses it before anything is measured
    ort.set_default_logger_severity(3)  # some models have unused weights
    cases = [case for case in CASES if re.search(arguments.only, case.name)]
    if not cases:
        parser.error(f"--only {arguments.only}: no such model; there are {', '.join(case.name for case in CASES)}")
    looks = Looks()
    print(" | ".join(HEAD))
    found: list[Measured] = []
    try:
        for case in cases:
            found.append(measure(case, looks, arguments.patience))  # noqa: PERF401 - kept when interrupted
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if not found:
        return
    contents = sections(found)
    for path in arguments.output:
        write_atomically(path, fill_sections(path.read_text(encoding="utf-8"), contents))


if __name__ == "__main__":
    main()

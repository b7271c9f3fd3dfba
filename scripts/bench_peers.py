"""Measure HybridSession beside OpenVINO, PyTorch and plain onnxruntime on the CPU cores of this machine.

    pip install openvino torch onnx2torch
    python scripts/bench_peers.py [-o docs/data] [--only REGEX] [--rounds N]

Takes hours; ``-o`` writes the results ``peers``, in which rows of models that ``--only`` leaves out stay.
OpenVINO is timed in float32 with one thread, with as many as there are cores and with its own choice, and with its
default precision, which is bfloat16 where the CPU has it; its inputs and outputs share memory with numpy. PyTorch is
timed eager and compiled, with one thread and with all cores: on stacks of LSTMs and GRUs as a module of the same sizes,
on other models as onnx2torch converts them, if it can: not with recurrent operators, for example. It is left out if it
is not installed. HybridSession is timed in float32, and in bfloat16 where the CPU has it.
Each candidate runs alone, in alternating rounds; trials count as in ``bench_cpu.py``.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from bench_cpu import (
    CASES,
    HYBRID,
    LEAST,
    WIDE_CASES,
    Case,
    RecordingMonitor,
    hybrid_factory,
    recurrent_case,
    run_rounds,
)
from command_arguments import add_output
from page_markers import markdown_table
from ratios import ratio_to_best, undisturbed_trials
from result_files import read_rows, write_results
from serving.models import perceptron

import chrion
from chrion.machine.cores import physical_cores
from chrion.native import bfloat16_available
from chrion.profiler import this_machine
from chrion.profiler.precision import relative_error
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.latency import Feed, RunRequest, SessionFactory, plain_baselines
from chrion.zoo.convolutional import ConvNet, Image

try:
    import openvino
except ImportError:
    openvino = None
try:
    import torch
except ImportError:
    torch = None
try:
    import onnx2torch
except ImportError:
    onnx2torch = None

PLAIN, FLOAT32, DEFAULT, TORCH = "onnxruntime", "OpenVINO float32", "OpenVINO default", "PyTorch"
BFLOAT16 = "HybridSession in bf16"
#: Operators of a stack that PyTorch's module does itself.
STACK = {"LSTM", "GRU", "Squeeze", "Split", "Concat", "Identity"}
HEAD = ["model", *(f"{kind}, ms" for kind in (PLAIN, FLOAT32, TORCH)), "hybrid, ms", "chosen"]
HEAD += [f"{DEFAULT}, ms", "bf16, ms", "chosen in bf16"]
#: The columns of ratios: name, candidate, and the kind whose fastest candidate it is compared with.
RATIOS = [
    *((f"hybrid / {kind}", HYBRID, kind) for kind in (PLAIN, FLOAT32, TORCH)),
    *((f"bf16 / {kind}", BFLOAT16, kind) for kind in (PLAIN, DEFAULT)),
]
HEAD += [*(name for name, _, _ in RATIOS), "error of bf16", "error of default"]
#: Name of the results.
NAME = "peers"

TEXT = """Written by `scripts/bench_peers.py` on {machine} (shared, noisy: only ratios mean anything), onnxruntime
{ort}, OpenVINO {openvino}{torch}.

HybridSession, given the model alone, beside the fastest session of onnxruntime and of OpenVINO in float32 (1 thread,
all, or the default), and of PyTorch (eager or compiled, 1 thread or all): its own modules for stacks (its GRU resets
after the product), and what onnx2torch makes of other models, if it can.
*bf16*: `precision="bf16"`, beside OpenVINO's default precision. Ratios below 1 are in HybridSession's favour, with 90 %
intervals. *error*: largest difference from onnxruntime's outputs relative to the largest output, without meaning for
networks with random weights. *chosen* and the method are as in the table above.

{table}"""


def speech(frames: int = 200, features: int = 80, layers: int = 3, hidden: int = 256) -> onnx.ModelProto:
    """Build a recogniser of speech: two convolutions, bidirectional LSTMs, and a dense layer.

    Its shape is that of Deep Speech 2 (Amodei et al., 2015, arXiv:1512.02595), with fewer and narrower layers. Input
    ``X`` is [1, 1, frames, features]; output ``Y`` is [frames / 4, 1, 29].
    """
    net = ConvNet(0)
    image = Image(net.input("X", [1, 1, frames, features]), 1)
    for _ in range(2):
        convolved = net.conv(image, 32, 5, stride=2, bias=True)
        image = Image(net.op("Relu", convolved.name), convolved.channels)
    steps, width = frames // 4, features // 4 * image.channels
    value = net.op("Reshape", net.op("Transpose", image.name, perm=[2, 0, 1, 3]), net.integers(steps, 1, width))
    for _ in range(layers):
        weights = [net.normal("W", 2, 4 * hidden, width, deviation=width**-0.5)]
        weights += [net.normal("R", 2, 4 * hidden, hidden, deviation=hidden**-0.5)]
        output = net.op("LSTM", value, *weights, hidden_size=hidden, direction="bidirectional")
        width = 2 * hidden
        value = net.op("Reshape", net.op("Transpose", output, perm=[0, 2, 1, 3]), net.integers(steps, 1, width))
    net.output(net.dense(value, width, 29, "letters"), "Y", [steps, 1, 29])
    return net.model("speech")


#: All models of ``bench_cpu.py``, and others.
MODELS = [
    *CASES,
    *(case for case in WIDE_CASES if case.name != "LSTM 256, batch 1"),  # is among the others
    recurrent_case("lstm", "LSTM 96, 4 layers", io=96, layers=4),
    recurrent_case("gru", "GRU 160, 14 layers", io=160, layers=14),
    recurrent_case("lstm", "LSTM 128, batch 4", io=128, batch=4),
    recurrent_case("lstm", "LSTM 64, batch 16", io=64, batch=16),
    Case("speech, 3 bidirectional LSTMs of 256", speech),
    Case("perceptron, 100 MB", perceptron),
]


def openvino_factory(source: bytes, feed: Feed, properties: Mapping[str, Any]) -> SessionFactory:
    """Return a factory of OpenVINO's requests."""
    core = openvino.Core()
    model = core.read_model(source)

    def make() -> tuple[RunRequest, Callable[[], None]]:
        request = core.compile_model(model, "CPU", {"PERFORMANCE_HINT": "LATENCY", **properties}).create_infer_request()
        for name, array in feed.items():
            request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
        outputs = [tensor.data for tensor in request.output_tensors]

        def run() -> Sequence[Any]:
            request.infer()
            return outputs

        return run, lambda: None

    return make


def stack_module(source: bytes) -> Any:
    """Return PyTorch's module of the same sizes if a model is a stack of LSTMs or GRUs, else None."""
    graph = onnx.load_from_string(source).graph
    cells = [node for node in graph.node if node.op_type in {"LSTM", "GRU"}]
    # Cells of an unfolded stack share the weights of their layer.
    directions = {
        cell.input[1]: next((a.s.decode() for a in cell.attribute if a.name == "direction"), "forward")
        for cell in cells
    }
    if torch is None or not cells or any(node.op_type not in STACK for node in graph.node):
        return None
    width = next(w.dims[2] for w in graph.initializer if w.name == cells[0].input[1])
    hidden = next(r.dims[2] for r in graph.initializer if r.name == cells[0].input[2])
    layers = list(directions.values()).count("forward")
    kind = getattr(torch.nn, cells[0].op_type)
    return kind(width, hidden, layers, bidirectional="reverse" in directions.values()).eval()


def converted_module(source: bytes) -> Any:
    """Return a model as onnx2torch converts it after constants are folded, or None if it cannot."""
    if torch is None or onnx2torch is None:
        return None
    with TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(folder, "folded.onnx"))
        ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        try:
            return onnx2torch.convert(options.optimized_model_filepath).eval()
        except NotImplementedError:
            return None


def compiled_module(module: Any, feed: Feed) -> Any:
    """Return a module as PyTorch compiles it for inputs, or None if it cannot."""
    compiled = torch.compile(module)
    try:
        with torch.inference_mode():
            compiled(*map(torch.from_numpy, feed.values()))
    except torch._dynamo.exc.TorchDynamoException:  # noqa: SLF001 - it has no other name
        return None
    return compiled


def torch_factory(module: Any, feed: Feed, threads: int) -> SessionFactory:
    """Return a factory of calls of a module with a number of threads."""
    tensors = [torch.from_numpy(array) for array in feed.values()]

    def run() -> Sequence[Any]:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            found = module(*tensors)
            return [(found[0] if isinstance(found, list | tuple) else found).numpy()]

    return lambda: (run, lambda: None)


def candidates(source: bytes, feed: Feed) -> dict[str, SessionFactory]:
    """Return the candidates by name."""
    module = stack_module(source) or converted_module(source)
    modules = {"eager": module, "compiled": compiled_module(module, feed)} if module else {}
    cores, float32 = len(physical_cores()), {"INFERENCE_PRECISION_HINT": "f32"}
    return {
        **{
            f"{TORCH} {kind}, {threads} threads": torch_factory(one, feed, threads)
            for kind, one in modules.items()
            if one is not None
            for threads in (1, cores)
        },
        HYBRID: hybrid_factory(source, feed),
        **({BFLOAT16: hybrid_factory(source, feed, "bf16")} if bfloat16_available() else {}),
        **plain_baselines(source, feed, PLAIN),
        f"{FLOAT32}, 1 thread": openvino_factory(source, feed, float32 | {"INFERENCE_NUM_THREADS": 1}),
        f"{FLOAT32}, {cores} threads": openvino_factory(source, feed, float32 | {"INFERENCE_NUM_THREADS": cores}),
        f"{FLOAT32}, default": openvino_factory(source, feed, float32),
        DEFAULT: openvino_factory(source, feed, {}),
    }


def error_of(factory: SessionFactory | None, expected: Sequence[Any]) -> str:
    """Return the error of a candidate's outputs as text; nothing without a candidate."""
    if factory is None:
        return ""
    run, close = factory()
    found = [np.array(array) for array in run()]
    close()
    return f"{relative_error(found, expected):.1e}"


def fastest(counted: Mapping[str, Sequence[float]], kind: str) -> str:
    """Return the smallest median of the candidates of a kind as text; nothing without any."""
    medians = [float(np.median(times)) for name, times in counted.items() if name.startswith(kind)]
    return f"{min(medians):.3g}" if medians else ""


def ratio(counted: Mapping[str, Sequence[float]], own: str, kind: str) -> str:
    """Return the ratio of a candidate to the fastest of a kind, with its interval; nothing without one of them."""
    others = {name: times for name, times in counted.items() if name.startswith(kind)}
    if not others or own not in counted:
        return ""
    middle, low, high = ratio_to_best(others | {own: counted[own]}, own)
    return f"{middle:.2f} [{low:.2f} to {high:.2f}]"


def chosen(source: bytes, precision: str) -> str:
    """Tune a model in a precision; return what was selected."""
    with chrion.HybridSession(source, tune="now", precision=precision) as session:
        return "plain" if session.plan is None else f"plan in {session.plan.precision}"


def measure(case: Case, monitor: RecordingMonitor, rounds: int) -> list[str]:
    """Return a model's line of the table."""
    source = case.build().SerializeToString()
    feed = synthetic_inputs(chrion.load(source))
    expected = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feed)
    with TemporaryDirectory() as os.environ["CHRION_CACHE"]:
        known = candidates(source, feed)
        selected = [chosen(source, "float32"), chosen(source, "bf16") if BFLOAT16 in known else ""]
        trials = [trial for _ in range(rounds) for trial in run_rounds(known, monitor)]
        errors = [error_of(known.get(name), expected) for name in (BFLOAT16, DEFAULT)]
    counted = undisturbed_trials(trials, monitor.fastest_ms, LEAST)
    own = {name: f"{float(np.median(counted[name])):.3g}" if name in counted else "" for name in (HYBRID, BFLOAT16)}
    row = [case.name, *(fastest(counted, kind) for kind in (PLAIN, FLOAT32, TORCH)), own[HYBRID], selected[0]]
    row += [fastest(counted, DEFAULT), own[BFLOAT16], selected[1]]
    row += [*(ratio(counted, name, kind) for _, name, kind in RATIOS), *errors]
    print(" | ".join(row), flush=True)
    return row


def format_results(folder: Path | None, found: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the results ``peers``, with stored rows of models that were not measured."""
    rows = {row[0]: row for row in (*read_rows(folder, NAME), *found) if len(row) == len(HEAD)}
    content = TEXT.format(
        machine=this_machine(),
        ort=ort.get_version_string(),
        openvino=openvino.__version__.partition("-")[0] if openvino else "",
        torch=f", PyTorch {torch.__version__}" if torch else "",
        table=markdown_table([HEAD, *(rows[case.name] for case in MODELS if case.name in rows)]),
    )
    return {NAME: content}


def main() -> None:
    """Measure the models, print the line of each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--only", default="", help="a regular expression that names of models must match")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of six trials of each candidate (default: 4)")
    arguments = parser.parse_args()
    if openvino is None:
        parser.error("OpenVINO is missing: pip install openvino")
    cases = [case for case in MODELS if re.search(arguments.only, case.name)]
    if not cases:
        parser.error(f"--only: no model matches {arguments.only!r}; models are {', '.join(c.name for c in MODELS)}")
    ort.set_default_logger_severity(3)
    monitor = RecordingMonitor()
    print(" | ".join(HEAD))
    found: list[list[str]] = []
    try:
        for case in cases:
            found.append(measure(case, monitor, arguments.rounds))  # noqa: PERF401 - those before an interrupt count
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if found:
        write_results(arguments.output, format_results(arguments.output, found))


if __name__ == "__main__":
    main()

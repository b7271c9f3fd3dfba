"""Measure HybridSession beside OpenVINO, PyTorch and plain onnxruntime on the CPU cores of this machine.

    pip install openvino torch
    python scripts/bench_peers.py [-o docs/data] [--only REGEX] [--rounds N]

Takes half an hour on two cores; ``-o`` writes the results ``peers``. Models are those of ``bench_cpu.py``. OpenVINO is
timed in float32 with one thread, with as many as there are cores and with its own choice, and with its default
precision, which is bfloat16 where the CPU has it; its inputs and outputs share memory with numpy. PyTorch is timed on
stacks of LSTMs and GRUs, as a module of the same sizes, eager and compiled, with one thread and with all cores, and is
left out if it is not installed. Each candidate runs alone, in alternating rounds; trials count as in ``bench_cpu.py``.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from bench_cpu import CASES, HYBRID, LEAST, Case, RecordingMonitor, hybrid_factory, run_rounds
from command_arguments import add_output
from page_markers import markdown_table
from ratios import ratio_to_best, undisturbed_trials
from result_files import write_results

import chrion
from chrion.machine.cores import physical_cores
from chrion.profiler import this_machine
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.accuracy import largest_difference
from chrion.report.benchmark.latency import Feed, RunRequest, SessionFactory, plain_baselines

try:
    import openvino
except ImportError:
    openvino = None
try:
    import torch
except ImportError:
    torch = None

PLAIN, FLOAT32, DEFAULT, TORCH = "onnxruntime", "OpenVINO float32", "OpenVINO default", "PyTorch"
PEERS = (FLOAT32, DEFAULT, TORCH)
#: One model of each kind.
MODELS = r"LSTM (64|128|256|512)|GRU 128|LSTM 128, 6 layers.*|LSTM 128, batch 8|resnet50|squeezenet|transformer block"
#: Operators of a stack that PyTorch's module does itself.
STACK = {"LSTM", "GRU", "Squeeze", "Concat", "Identity"}
HEAD = ["model", *(f"{kind}, ms" for kind in (PLAIN, *PEERS)), "hybrid, ms", "chosen"]
HEAD += [*(f"hybrid / {kind}" for kind in PEERS), "difference of default"]

TEXT = """Written by `scripts/bench_peers.py` on {machine} (shared, noisy: only ratios mean anything), onnxruntime
{ort}, OpenVINO {openvino}{torch}.

HybridSession, given the model alone, beside the fastest plain onnxruntime session and the fastest OpenVINO session in
float32, each of 1 thread, all threads and the library's default, beside OpenVINO with its default precision, and beside
the fastest of PyTorch's modules of the same sizes, eager or compiled, with 1 thread or all (its GRU resets after the
product, which costs no more). Ratios below 1 are in HybridSession's favour, with 90 % intervals. *difference of
default* is the largest difference of OpenVINO's default outputs from onnxruntime's, relative to the largest output; in
float32 it is at most {largest:.1e}. It says nothing for resnet50 and squeezenet, which come without trained weights.
*chosen* is the guard's choice, as in the table of HybridSession and plain sessions; the method is the same.

{table}"""


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
    directions = [
        next((attribute.s.decode() for attribute in cell.attribute if attribute.name == "direction"), "forward")
        for cell in cells
    ]
    if torch is None or not cells or any(node.op_type not in STACK for node in graph.node):
        return None
    width = next(w.dims[2] for w in graph.initializer if w.name == cells[0].input[1])
    hidden = next(r.dims[2] for r in graph.initializer if r.name == cells[0].input[2])
    layers = directions.count("forward")
    kind = getattr(torch.nn, cells[0].op_type)
    return kind(width, hidden, layers, bidirectional="reverse" in directions).eval()


def torch_factory(module: Any, feed: Feed, threads: int) -> SessionFactory:
    """Return a factory of calls of a module with a number of threads."""
    (array,) = feed.values()
    tensor = torch.from_numpy(array)

    def run() -> Sequence[Any]:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return [module(tensor)[0].numpy()]

    return lambda: (run, lambda: None)


def candidates(source: bytes, feed: Feed) -> dict[str, SessionFactory]:
    """Return the candidates by name."""
    module = stack_module(source)
    modules = {"eager": module, "compiled": torch.compile(module)} if module else {}
    cores, float32 = len(physical_cores()), {"INFERENCE_PRECISION_HINT": "f32"}
    return {
        **{
            f"{TORCH} {kind}, {threads} threads": torch_factory(one, feed, threads)
            for kind, one in modules.items()
            for threads in (1, cores)
        },
        HYBRID: hybrid_factory(source, feed),
        **plain_baselines(source, feed, PLAIN),
        f"{FLOAT32}, 1 thread": openvino_factory(source, feed, float32 | {"INFERENCE_NUM_THREADS": 1}),
        f"{FLOAT32}, {cores} threads": openvino_factory(source, feed, float32 | {"INFERENCE_NUM_THREADS": cores}),
        f"{FLOAT32}, default": openvino_factory(source, feed, float32),
        DEFAULT: openvino_factory(source, feed, {}),
    }


def relative_difference(factory: SessionFactory, expected: Sequence[Any]) -> float:
    """Return the largest difference of a candidate's outputs, relative to the largest expected number."""
    run, close = factory()
    found = [np.array(array) for array in run()]
    close()
    return largest_difference(found, expected) / max(float(np.abs(array).max()) for array in expected)


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the smallest median as text, or nothing where nothing was timed."""
    return f"{min(float(np.median(own)) for own in times.values()):.3g}" if times else ""


def measure(case: Case, monitor: RecordingMonitor, rounds: int) -> tuple[list[str], float]:
    """Return a model's line of the table, and the difference of OpenVINO's outputs in float32."""
    source = case.build().SerializeToString()
    feed = synthetic_inputs(chrion.load(source))
    with TemporaryDirectory() as os.environ["CHRION_CACHE"]:
        with chrion.HybridSession(source, tune="now") as session:
            chosen = "plan" if session.plan else "plain"
            expected = session.run(None, feed)
        known = candidates(source, feed)
        trials = [trial for _ in range(rounds) for trial in run_rounds(known, monitor)]
    counted = undisturbed_trials(trials, monitor.fastest_ms, LEAST)
    groups = {
        kind: {name: times for name, times in counted.items() if name.startswith(kind)} for kind in (PLAIN, *PEERS)
    }
    row = [case.name, *(fastest(groups[kind]) for kind in (PLAIN, *PEERS))]
    row += [f"{float(np.median(counted[HYBRID])):.3g}", chosen]
    for kind in PEERS:
        if groups[kind]:
            ratio, low, high = ratio_to_best(groups[kind] | {HYBRID: counted[HYBRID]}, HYBRID)
            row.append(f"{ratio:.2f} [{low:.2f} to {high:.2f}]")
        else:
            row.append("")
    row.append(f"{relative_difference(known[DEFAULT], expected):.1e}")
    print(" | ".join(row), flush=True)
    return row, relative_difference(known[f"{FLOAT32}, default"], expected)


def main() -> None:
    """Measure the models, print the line of each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--only", default=MODELS, help="a regular expression that the names of models must match")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of six trials of each candidate (default: 4)")
    arguments = parser.parse_args()
    if openvino is None:
        parser.error("OpenVINO is missing: pip install openvino")
    cases = [case for case in CASES if re.fullmatch(arguments.only, case.name)]
    if not cases:
        parser.error(f"--only: no model matches {arguments.only!r}; models are {', '.join(c.name for c in CASES)}")
    ort.set_default_logger_severity(3)
    monitor = RecordingMonitor()
    print(" | ".join(HEAD))
    found = [measure(case, monitor, arguments.rounds) for case in cases]
    content = TEXT.format(
        machine=this_machine(),
        ort=ort.get_version_string(),
        openvino=openvino.__version__.partition("-")[0],
        torch=f", PyTorch {torch.__version__}" if torch else "",
        largest=max(difference for _, difference in found),
        table=markdown_table([HEAD, *(row for row, _ in found)]),
    )
    write_results(arguments.output, {"peers": content})


if __name__ == "__main__":
    main()

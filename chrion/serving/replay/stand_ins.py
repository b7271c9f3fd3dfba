"""Stand-ins for a scenario's models: ONNX models that take the memory and the time that the scenario states.

A stand-in multiplies a small matrix as often as its latency requires, on one core, and holds the rest of its memory as
weights of a branch that is never taken: onnxruntime reads them when it opens a session, so that a load takes time and
memory as it does for weights that are used. The weights are zeros in a sparse file, which takes no space on a disk.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime as ort
from onnx import numpy_helper

from chrion.common.files import write_atomically
from chrion.errors import OptionError, ScenarioError
from chrion.serving.manager.records import MAX_QUEUE
from chrion.serving.replay.target import served_name
from chrion.serving.server.repository import session_bytes
from chrion.serving.simulator.scenario import Scenario
from chrion.serving.simulator.scenario_models import SHRINK, ServedModel
from chrion.serving.variants import Variant

#: Sides of the small matrix, the unit of stated latencies, and of the weights.
_SIDE, _ROW = 256, 4096
_ROW_BYTES = _ROW * 4
#: Maximum rows of one weight, 64 MB: many below the 2 GB of one tensor.
_MAX_ROWS = 4096
#: Memory of a session besides its weights, in MB, as the server counts it.
_SESSION_MB = session_bytes(0) / 1e6
_WEIGHTS = "weights.bin"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_OPSET, _IR = 17, 9


def write_stand_ins(scenario: Scenario, folder: Path) -> None:
    """Write a repository with a stand-in for every model of a scenario, of its pattern ``shrink`` or its first one.

    Args:
        scenario: The scenario.
        folder: The repository; it must not exist, or be empty.

    Raises:
        OptionError: The folder is not empty or cannot be written.
        ScenarioError: A name cannot be that of a model of a repository.
    """
    levels = scenario.levels(SHRINK if SHRINK in scenario.patterns else scenario.patterns[0])
    _check_names(scenario)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise OptionError(f"--write-models {folder}: the folder is not empty")
        round_ms = measure_round_ms()
        for model in scenario.models:
            _write_model(scenario, model, folder / served_name(model.name), levels, round_ms)
    except OSError as error:
        raise OptionError(f"--write-models {folder}: cannot be written: {error.strerror}") from error


def measure_round_ms() -> float:
    """Return the time of one multiplication of the small matrix on one core of this machine."""
    few, many = 100, 500
    sessions = {rounds: _session(compute_model(rounds, 0.0)) for rounds in (few, many)}
    feed = {"x": np.ones(1, np.float32)}
    differences = []
    for _ in range(9):
        took = {}
        for rounds, session in sessions.items():
            began = time.perf_counter()
            session.run(None, feed)
            took[rounds] = time.perf_counter() - began
        differences.append((took[many] - took[few]) * 1000 / (many - few))
    return max(statistics.median(differences), 1e-4)


def compute_model(rounds: int, weights_mb: float) -> onnx.ModelProto:
    """Build a model with one input of one number, which computes for a time and holds weights.

    Args:
        rounds: Multiplications of the small matrix.
        weights_mb: Size of the weights; they are in the file ``weights.bin`` beside the model.
    """
    matrix = f"float[{_SIDE}, {_SIDE}]"
    model = onnx.parser.parse_model(f"""
        <ir_version: {_IR}, opset_import: ["": {_OPSET}]>
        stand_in (float[1] x) => (float y) <int64 rounds = {{{rounds}}}, bool always = {{1}}> {{
          first = Mul(eye, x)
          last = Loop (rounds, always, first) <
            body: graph = body (int64 i, bool condition, {matrix} state) => (bool continues, {matrix} next) {{
              continues = Identity(condition)
              next = MatMul(state, eye)
            }}
          >
          mean = ReduceMean <keepdims: int = 0> (last)
          {_branch(round(weights_mb * 1e6 / _ROW_BYTES))}
        }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(_SIDE, dtype=np.float32), "eye"))
    return model


def _branch(rows: int) -> str:
    """Return the nodes of the branch with the weights, which runs only if the input is NaN; replays send no NaN."""
    if not rows:
        return "y = Identity(mean)"
    parts = [(at, min(_MAX_ROWS, rows - at)) for at in range(0, rows, _MAX_ROWS)]
    weights, nodes = [], []
    for i, (at, size) in enumerate(parts):
        place = f'"location": "{_WEIGHTS}", "offset": "{at * _ROW_BYTES}", "length": "{size * _ROW_BYTES}"'
        weights += [f"float[{size}, {_ROW}] w{i} = [{place}]", f"int64[2] shape{i} = {{1, {size}}}"]
        nodes += [f"row{i} = Expand(mean, shape{i})", f"product{i} = MatMul(row{i}, w{i})"]
        nodes += [f"mean{i} = ReduceMean <keepdims: int = 0> (product{i})"]
    nodes.append(f"taken = Sum({', '.join(f'mean{i}' for i in range(len(parts)))})")
    return f"""never = IsNaN(mean)
          y = If (never) <
            then_branch: graph = taken () => (float taken) <{", ".join(weights)}> {{ {" ".join(nodes)} }},
            else_branch: graph = other () => (float other) {{ other = Identity(mean) }}
          >"""


def _write_model(scenario: Scenario, model: ServedModel, folder: Path, levels: Sequence[str], round_ms: float) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    spec, variants = model.spec, [model.variants[name] for name in levels]
    lines = [f'slo = "{model.slo_ms:.6g}ms"'] if scenario.measure == "response" else []
    lines += ["pinned = true"] if spec.pinned else []
    lines += [f"weight = {spec.weight:g}"] if spec.weight != 1.0 else []
    lines += [f"max_queue = {spec.max_queue}"] if spec.max_queue != MAX_QUEUE else []
    max_rows = 0
    for number, variant in enumerate(variants):
        file = "model.onnx" if number == 0 else f"{variant.name}.onnx"
        weights_mb = max(0.0, variant.memory_mb - _SESSION_MB)
        max_rows = max(max_rows, round(weights_mb * 1e6 / _ROW_BYTES))
        proto = compute_model(max(1, round(variant.latency_ms / round_ms)), weights_mb)
        write_atomically(version / file, proto.SerializeToString())
        lines += ["", *_variant_lines(variant, file)]
    with (version / _WEIGHTS).open("wb") as weights:
        weights.truncate(max(1, max_rows) * _ROW_BYTES)
    write_atomically(folder / "model.toml", "\n".join(lines).lstrip() + "\n")


def _variant_lines(variant: Variant, file: str) -> list[str]:
    return [
        f"[variants.{variant.name}]",
        f'model = "{file}"',
        f"host_mb = {max(variant.memory_mb, 0.001):.6g}",
        f"latency_ms = {variant.latency_ms:.6g}",
    ]


def _check_names(scenario: Scenario) -> None:
    served = [served_name(model.name) for model in scenario.models]
    names = {*served, *(name for pattern in scenario.patterns for name in scenario.levels(pattern))}
    wrong = sorted(name for name in names if not _NAME.fullmatch(name))
    if wrong:
        raise ScenarioError(f"{wrong[0]!r}: expected a name of letters, digits and ._- for a model of a repository")
    if len(set(served)) < len(served):
        raise ScenarioError(f"two models would be served as {max(served, key=served.count)!r}", hint="rename one")


def _session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

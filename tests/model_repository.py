"""Model repositories for tests, and servers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Element types of ONNX by the protocol's datatypes.
ELEMENTS = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}
_SERVING = re.compile(
    r"^chrion: serving (\d+) models? at https?://127\.0\.0\.1:(\d+)(?: and grpc://127\.0\.0\.1:(\d+))?"
)


def identity(datatype: str) -> onnx.ModelProto:
    """Build ``y = x`` for one datatype and any shape with two dimensions."""
    kind = ELEMENTS[datatype]
    infos = [helper.make_tensor_value_info(name, kind, ["n", "m"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def product(side: int = 4, seed: int = 0, *, layers: int = 1) -> onnx.ModelProto:
    """Build ``y = x w ... w`` with rows of ``side`` numbers."""
    weight = np.random.default_rng(seed).standard_normal((side, side), np.float32) / side
    names = ["x", *(f"h{i}" for i in range(layers - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], "w"], [names[i + 1]]) for i in range(layers)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", side]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "product", infos[:1], infos[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def slow_model(side: int = 512, rounds: int = 2000) -> onnx.ModelProto:
    """Build a model that multiplies matrices ``rounds`` times in a loop, which takes seconds."""
    weight = numpy_helper.from_array(np.eye(side, dtype=np.float32), "w")
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["condition"], ["go_on"]),
            helper.make_node("MatMul", ["state", "w"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("condition", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [side, side]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [side, side]),
        ],
    )
    nodes = [
        helper.make_node("Mul", ["w", "x"], ["first"]),
        helper.make_node("Loop", ["rounds", "", "first"], ["last"], body=body),
        helper.make_node("ReduceMean", ["last"], ["y"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "slow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
        [weight, numpy_helper.from_array(np.array(rounds, np.int64), "rounds")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def put(root: Path, name: str, model: onnx.ModelProto | bytes, version: int = 1, toml: str = "") -> Path:
    """Put a model into a repository; return its file."""
    file = root / name / str(version) / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    if toml:
        (root / name / "model.toml").write_text(toml, encoding="utf-8")
    return file


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    http: int
    grpc: int
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def get(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Send a request; return status, JSON or text, and headers."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, named)  # noqa: S310 - http only
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
                status, content, found = answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                status, content, found = error.code, error.read(), dict(error.headers)
        kind = found.get("content-type", "")
        return status, json.loads(content) if kind == "application/json" else content, found

    def infer(self, model: str, x: Any, datatype: str = "FP32", **more: Any) -> tuple[int, Any, Mapping[str, str]]:
        """Send an inference request with one input x."""
        array = np.asarray(x)
        entry = {"name": "x", "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}
        return self.get(f"/v2/models/{model}/infer", {"inputs": [entry], **more})

    def metric(self, name: str, *, missing_ok: bool = False, **labels: str) -> float:
        """Return the sum of a metric's samples that have some labels."""
        total, found = 0.0, missing_ok
        for line in self.get("/metrics")[1].decode().splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total, found = total + float(match[2]), True
        assert found, f"no {name} with {labels}"
        return total

    def computes(self) -> bool:
        """Return whether requests for inference are in flight and none of them waits."""
        return self.metric("chrion_request_bytes") > 0 and self.metric("nv_inference_pending_request_count") == 0

    def rss_mb(self) -> float:
        """Return the memory of the server's process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def events(self) -> list[dict[str, Any]]:
        """Return the log so far."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]


def server_command(repository: Path, *arguments: str, program: Sequence[str] = ("-m", "chrion")) -> list[str]:
    """Return the command of a server on free ports; ``program`` is what Python runs."""
    ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    return [sys.executable, *program, "serve", str(repository), *ports, *arguments]


@contextlib.contextmanager
def serving(
    repository: Path, *arguments: str, program: Sequence[str] = ("-m", "chrion"), within: Sequence[str] = ()
) -> Iterator[Server]:
    """Run a server, and check that it ends by itself with exit code 0 on SIGTERM.

    Args:
        repository: Its repository.
        arguments: Its options.
        program: What Python runs.
        within: A command that becomes the server's.
    """
    command = [*within, *server_command(repository, *arguments, program=program)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
    lines: list[str] = []
    try:
        assert process.stderr
        for line in process.stderr:
            lines.append(line)
            match = _SERVING.match(line)
            if match:
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        reader.start()
        yield Server(process, int(match[2]), int(match[3] or 0), lines)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, "".join(lines[-20:])
        reader.join(10)
        assert not any("Traceback" in line for line in lines), "".join(lines)
    finally:
        if process.poll() is None:  # a test has failed; replicas on Ray are removed only if the server ends by itself
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
        if process.stderr:
            process.stderr.close()


def wait_until(condition: Any, limit_s: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.05)

"""Damaged, hostile and unlucky requests: a clear error each, other requests are served, and memory stays flat."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from chrion.serving.server.sessions import is_out_of_memory
from local_server import LocalServer, local_server
from model_repository import product, put
from property_tests import examples
from server_client import wait_until

ROWS = np.ones((1, 4), np.float32)
INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
INFER = "/v2/models/product/infer"


def changed(**more: Any) -> dict[str, Any]:
    """Return a request whose input differs from a valid one."""
    return {"inputs": [{key: value for key, value in (INPUT | more).items() if value is not None}]}


WRONG = [
    (b"", "not JSON"),
    (b"[1", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 20_000, "not JSON"),
    (b'{"inputs":' * 20_000, "not JSON"),
    ([], "expected an object"),
    ({}, "inputs: expected a list"),
    ({"inputs": {}}, "inputs: expected a list"),
    ({"inputs": [1]}, "input: expected an object"),
    ({"inputs": []}, "missing input 'x'"),
    ({"inputs": [INPUT, INPUT]}, "given twice"),
    (changed(name=None), "input name: expected text"),
    (changed(name="../../etc/passwd"), "unknown input"),
    (changed(datatype="FP33"), "unknown datatype"),
    (changed(datatype=["FP32"]), "expected text"),
    (changed(datatype="INT32"), "expected datatype FP32"),
    (changed(datatype="BF16"), "must be sent as binary"),
    (changed(shape=None), "shape: expected a list"),
    (changed(shape=[4]), "expected shape"),
    (changed(shape=[-1, 4]), "whole numbers"),
    (changed(shape=[1.0, 4]), "whole numbers"),
    (changed(shape=[True, 4]), "whole numbers"),
    (changed(shape=[1] * 65), "at most 64"),
    (changed(shape=[250_000_000, 4]), "expected 1000000000 elements"),
    (changed(shape=[2**62, 2**62]), "elements"),
    (changed(data=None), "data: expected a list"),
    (changed(data=[1, 2, 3]), "expected 4 elements"),
    (changed(data=[[1, 2], [3]]), "different lengths"),
    (changed(data=[[1, 2], 3, 4]), "same depth"),
    (changed(data=["1", 2, 3, 4]), "cannot be str"),
    (changed(data=[None, 2, 3, 4]), "cannot be NoneType"),
    (changed(data=[{}, 2, 3, 4]), "cannot be dict"),
    (changed(parameters=[]), "expected an object"),
    (changed(parameters={"binary_data_size": 16}, data=None), "at most 0, the bytes"),
    (changed(parameters={"binary_data_size": -1}, data=None), "at most 0, the bytes"),
    (changed(parameters={"binary_data_size": 1}), "both data and"),
    (changed() | {"outputs": [{"name": "z"}]}, "unknown output"),
    (changed() | {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "true or false"),
    (changed() | {"id": 7}, "id: expected text"),
    (changed() | {"parameters": {"timeout": -1}}, "microseconds"),
    (changed() | {"parameters": {"timeout": "1s"}}, "microseconds"),
]


def test_a_wrong_request_is_refused_with_its_reason(server: LocalServer) -> None:
    """The status is 400, and the message says what is wrong."""
    for body, about in WRONG:
        status, found, _ = server.get(INFER, body)
        assert (status, about in found["error"]) == (400, True), (str(body)[:200], about, found)


def test_unsupported_parameters_are_named(server: LocalServer) -> None:
    """A part of the protocol that is missing is 501, not ignored."""
    for parameters in ({"sequence_id": 1}, {"sequence_start": True}):
        assert server.get(INFER, changed() | {"parameters": parameters})[0] == 501, parameters
    assert server.get(INFER, changed(parameters={"shared_memory_region": "r"}))[0] == 501


def test_a_wrong_header_length_is_refused(server: LocalServer) -> None:
    """The length of the JSON part must be within the body."""
    for length in ("-1", "99999999", "x", "", "9" * 5000):
        status, found, _ = server.get(INFER, changed(), Inference_Header_Content_Length=length)
        assert status == 400, (length, found)
    for size in (200, 100_000):  # a large document is parsed in parts
        body = json.dumps({"inputs": [], "id": "x" * size}).encode()
        status, found, _ = server.get(INFER, body, Inference_Header_Content_Length=str(size))
        assert status == 400
        assert f"part of the body ({size} bytes by Inference-Header-Content-Length) is not JSON" in found["error"]


def test_names_do_not_lead_out_of_the_repository(server: LocalServer) -> None:
    """Names are looked up among the models, so that a path is an unknown name."""
    for path in ("..%2f..%2fetc/infer", "%2e%2e/%2e%2e/etc/passwd", "product/versions/..%2f1/infer", "%00/infer"):
        assert server.get(f"/v2/models/{path}", changed())[0] in (404, 405), path


def test_a_damaged_encoding_is_refused(server: LocalServer) -> None:
    """Bytes that are not of their encoding, and unknown encodings, are 400."""
    for encoding in ("gzip", "deflate", "br"):
        assert server.get(INFER, b"not compressed", Content_Encoding=encoding)[0] == 400, encoding


def test_a_body_over_the_limit_is_refused(server: LocalServer) -> None:
    """Bodies above the limit are 413: declared, sent in chunks, or compressed."""
    large = b" " * 5_000_000
    assert server.get(INFER, large)[0] == 413
    status, found, _ = server.get(INFER, gzip.compress(large), Content_Encoding="gzip")
    assert (status, "when decompressed" in found["error"]) == (413, True), found
    assert server.send("POST", INFER, [b" " * 65536] * 100, {})[0] == 413


def test_declared_sizes_are_those_of_the_body(server: LocalServer) -> None:
    """A tensor of a gigabyte needs as many bytes."""
    entry = {"name": "x", "datatype": "FP32", "shape": [67_108_864, 4], "parameters": {"binary_data_size": 1 << 30}}
    header = json.dumps({"inputs": [entry]}).encode()
    status, found, _ = server.get(INFER, header + b"x", Inference_Header_Content_Length=str(len(header)))
    assert (status, "at most 1, the bytes" in found["error"]) == (400, True), found


def test_request_memory_is_bounded(tmp_path: Path) -> None:
    """Requests beyond the memory for requests are refused with a time to retry, and others are served."""
    put(tmp_path, "p", product())
    with local_server(tmp_path, request_bytes=1_000_000) as server:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [50_000, 4], "data": [1] * 200_000}]}
        status, found, headers = server.get("/v2/models/p/infer", body)
        assert status == 429
        assert "memory" in found["error"]
        assert int(headers["retry-after"]) >= 1
        assert server.infer("p", ROWS)[0] == 200
        assert server.metric("chrion_request_bytes") == 0


def test_the_memory_of_an_answer_is_taken_until_it_is_read(server: LocalServer) -> None:
    """The limit of the requests in flight includes answers that wait for their clients."""
    size = (2 + 4) * 50_000  # "1," and "1.0,"
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 50_000], "data": [1] * 50_000}]}
    before = server.metric("chrion_request_bytes")
    with server.in_flight("/v2/models/identity-FP32/infer", body) as first:
        assert first.response().status_code == 200
        with server.in_flight("/v2/models/identity-FP32/infer", body) as second:
            answer = second.response()
            assert server.metric("chrion_request_bytes") - before >= 2 * size
            assert len(json.loads(answer.read())["outputs"][0]["data"]) == 50_000
            assert size <= server.metric("chrion_request_bytes") - before < 2 * size
    wait_until(lambda: server.metric("chrion_request_bytes") == before)


def test_a_full_disk_is_a_lack_of_memory() -> None:
    """The next smaller variant is tried after each of these errors, and after no other."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        assert is_out_of_memory(OSError(number, "full")), number
    assert not is_out_of_memory(OSError(errno.EACCES, "denied"))


NAMES = st.sampled_from(
    ["x", "y", "inputs", "name", "shape", "datatype", "data", "parameters", "binary_data_size", "id"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["x", "y", "FP32", "INT64", "BYTES", 4, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("x") | VALUES,
        "datatype": st.sampled_from(["FP32", "BYTES", "BF16", "INT64"]) | VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | VALUES,
        "data": st.lists(st.floats(width=32) | st.integers(), max_size=8) | VALUES,
        "parameters": st.dictionaries(NAMES, VALUES, max_size=2) | VALUES,
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(TENSORS, max_size=2) | VALUES,
        "outputs": st.lists(TENSORS, max_size=2) | VALUES,
        "parameters": st.dictionaries(NAMES, VALUES, max_size=2) | VALUES,
        "id": VALUES,
    },
)


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES, tail=st.binary(max_size=20), split=st.none() | st.integers(-2, 200))
def test_random_bodies_are_answered(server: LocalServer, body: Any, tail: bytes, split: int | None) -> None:
    """Whatever JSON and bytes a body has, the answer is a result or an error of the client."""
    text = json.dumps(body).encode()
    headers = {} if split is None else {"Inference_Header_Content_Length": str(len(text) + split)}
    status, found, _ = server.get("/v2/models/identity-FP32/infer", text + tail, **headers)
    assert status in (200, 400, 501), found
    assert status == 200 or set(found) == {"error"}


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60))
def test_random_bytes_are_answered(server: LocalServer, body: bytes) -> None:
    """Bytes that are no request are an error of the client."""
    status, found, _ = server.get(INFER, body)
    assert status == 400
    assert set(found) == {"error"}


def recurrent(kind: str, *, nested: bool) -> onnx.ModelProto:
    """Build a recurrent layer of two units, alone or in both bodies of an ``If``."""
    gates = {"LSTM": 4, "GRU": 3}[kind]
    layer = helper.make_node(kind, ["x", "w", "r"], ["y"], hidden_size=2)
    weights = [
        numpy_helper.from_array(np.ones((1, 2 * gates, 4), np.float32), "w"),
        numpy_helper.from_array(np.ones((1, 2 * gates, 2), np.float32), "r"),
        numpy_helper.from_array(np.ones((), bool), "always"),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["steps", "batch", 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["steps", 1, "batch", 2])
    nodes = [layer]
    if nested:
        body = helper.make_graph([layer], "body", [], [y])
        nodes = [helper.make_node("If", ["always"], ["y"], then_branch=body, else_branch=body)]
    graph = helper.make_graph(nodes, "recurrent", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def with_inputs(kind: str, dimensions: dict[str, list[str]], **attributes: Any) -> onnx.ModelProto:
    """Build a model of one operator, all of whose inputs are the request's."""
    values = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in dimensions.items()}
    node = helper.make_node(kind, [*dimensions], ["y"], **attributes)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "operator", [*values.values()], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def tensor(name: str, shape: list[int]) -> dict[str, Any]:
    """Return an input of zeros."""
    return {"name": name, "datatype": "FP32", "shape": shape, "data": [0.0] * int(np.prod(shape))}


def test_tensors_without_elements_do_not_end_the_process(tmp_path: Path) -> None:
    """Onnxruntime would abort; the request is refused with the operator, and the next one is answered."""
    cases = {f"{kind}-{nested}": (kind, nested) for kind in ("LSTM", "GRU") for nested in (False, True)}
    for name, (kind, nested) in cases.items():
        put(tmp_path, name, recurrent(kind, nested=nested))
    with local_server(tmp_path) as server:
        for name, (kind, _) in cases.items():
            for shape in ([2, 0, 4], [0, 2, 4], [0, 0, 4], [1, 1, 4]):
                status, body, _ = server.get(f"/v2/models/{name}/infer", {"inputs": [tensor("x", shape)]})
                if 0 not in shape:
                    assert (status, body["outputs"][0]["shape"]) == (200, [1, 1, 1, 2])
                else:
                    assert (status, f"on which onnxruntime's {kind} may end" in body["error"]) == (400, True), body


def test_tensors_without_heads_or_channels_are_refused(tmp_path: Path) -> None:
    """Other tensors without elements are served; on these, onnxruntime would end the process or never return."""
    heads = {name: [f"{name}0", f"{name}1", f"{name}2", f"{name}3"] for name in ("q", "k", "v")}
    put(tmp_path, "attention", with_inputs("Attention", heads))
    put(tmp_path, "conv", with_inputs("Conv", {"x": ["n", "c", "l"], "w": ["m", "d", "k"]}, kernel_shape=[1]))
    transposed = {"x": ["n", "c", "d", "h", "w"], "k": ["c", "m", "a", "b", "e"]}
    put(tmp_path, "transposed", with_inputs("ConvTranspose", transposed))
    shapes = {
        "transposed": ({"x": [1, 1, 0, 4, 5], "k": [1, 2, 3, 3, 3]}, {"x": [1, 1, 1, 1, 1], "k": [1, 1, 1, 1, 1]}),
        "attention": ({key: [1, 0, 2, 4] for key in heads}, {key: [1, 1, 2, 4] for key in heads}),
        "conv": ({"x": [1, 0, 4], "w": [2, 0, 1]}, {"x": [0, 3, 4], "w": [2, 3, 1]}),
    }
    with local_server(tmp_path) as server:
        for name, (fatal, served) in shapes.items():
            for given, expected in ((fatal, 400), (served, 200)):
                inputs = [tensor(key, shape) for key, shape in given.items()]
                status, body, _ = server.get(f"/v2/models/{name}/infer", {"inputs": inputs})
                assert status == expected, (name, given, body)

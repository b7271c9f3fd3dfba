"""Tensors of every datatype and of few dimensions, by each way to send and to receive them, against onnxruntime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from chrion.serving.server.grpc_codec import SERVICE, message
from chrion.serving.server.rest_codec import HEADER_LENGTH
from chrion.serving.server.tensors import DTYPES, to_raw
from local_server import LocalServer, local_server
from model_repository import ELEMENTS, put

SHAPES = [(), (1,), (3,), (0,), (2, 0, 3), (2, 3)]


def identity(datatype: str, rank: int) -> onnx.ModelProto:
    """Build ``y = x`` for one datatype and a number of dimensions."""
    infos = [helper.make_tensor_value_info(name, ELEMENTS[datatype], [None] * rank) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def values(datatype: str, shape: tuple[int, ...]) -> Any:
    """Return an array of a datatype; of BF16, the upper halves of numbers above 1."""
    numbers = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    if datatype == "BYTES":
        return np.array([f"é{n}" for n in numbers.ravel()], object).reshape(shape)
    if datatype == "BF16":
        return np.asarray(0x3F80 + numbers, np.uint16)
    return np.asarray(numbers % 2 if datatype == "BOOL" else numbers).astype(DTYPES[datatype])


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LocalServer]]:
    """Return a server of a model for each datatype and number of dimensions, with its repository."""
    root = tmp_path_factory.mktemp("shapes")
    for datatype in ELEMENTS:
        for rank in range(4):
            put(root, f"{datatype}-{rank}", identity(datatype, rank))
    with local_server(root) as running:
        yield root, running


def plain(root: Path, datatype: str, array: Any) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the binary data of what plain onnxruntime answers."""
    session = ort.InferenceSession(root / f"{datatype}-{array.ndim}" / "1" / "model.onnx")
    if datatype != "BF16":
        (found,) = session.run(None, {"x": array})
        return np.shape(found), to_raw(datatype, np.asarray(found))
    given = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENTS["BF16"])
    (value,) = session.run_with_ort_values(None, {"x": given})
    return tuple(value.shape()), array.tobytes()


@pytest.mark.parametrize("datatype", [*ELEMENTS])
def test_every_way_keeps_shape_and_data(identities: tuple[Path, LocalServer], datatype: str) -> None:
    """A scalar has no dimension, an empty tensor no element, and both come back as plain onnxruntime has them."""
    root, server = identities
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=message("ModelInferResponse").FromString,
        )
        for shape in SHAPES:
            array = values(datatype, shape)
            assert array.shape == shape
            expected = plain(root, datatype, array)
            for found in (by_rest(server, datatype, array), by_grpc(call, datatype, array)):
                assert found == expected, (datatype, shape)
            if datatype != "BF16":
                assert by_json(server, datatype, array) == (expected[0], array.ravel().tolist()), (datatype, shape)


def by_rest(server: LocalServer, datatype: str, array: Any) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the binary data of an answer with binary data."""
    raw = to_raw(datatype, array)
    entry = {
        "name": "x",
        "datatype": datatype,
        "shape": list(array.shape),
        "parameters": {"binary_data_size": len(raw)},
    }
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    headers = {HEADER_LENGTH: str(len(header))}
    status, content, found = server.send("POST", f"/v2/models/{datatype}-{array.ndim}/infer", header + raw, headers)
    assert status == 200, content
    size = int(found[HEADER_LENGTH.lower()])
    return tuple(json.loads(content[:size])["outputs"][0]["shape"]), content[size:]


def by_json(server: LocalServer, datatype: str, array: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and the elements of an answer in JSON."""
    status, found, _ = server.infer(f"{datatype}-{array.ndim}", array, datatype)
    assert status == 200, found
    return tuple(found["outputs"][0]["shape"]), found["outputs"][0]["data"]


def by_grpc(call: Any, datatype: str, array: Any) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the raw contents of an answer by gRPC."""
    request = message("ModelInferRequest")(model_name=f"{datatype}-{array.ndim}")
    request.inputs.add(name="x", datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(to_raw(datatype, array))
    found = call(request, timeout=60)
    return tuple(found.outputs[0].shape), found.raw_output_contents[0]

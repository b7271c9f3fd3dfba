"""Checks of a server with Triton's client, run as a program: ``triton_checks.py HTTP_PORT GRPC_PORT CHECK...``.

The repository has a model ``identity-DATATYPE`` for each datatype, ``product`` in two versions, and is explicit.
"""

from __future__ import annotations

import asyncio
import queue
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

HTTP, GRPC = (f"127.0.0.1:{port}" for port in sys.argv[1:3])


def samples() -> dict[str, np.ndarray[Any, Any]]:
    """Return an array of shape [2, 3] for each datatype, with its extreme values."""
    found: dict[str, np.ndarray[Any, Any]] = {"BOOL": np.array([[True, False, True]] * 2)}
    for bits in (8, 16, 32, 64):
        for name, kind in ((f"INT{bits}", f"int{bits}"), (f"UINT{bits}", f"uint{bits}")):
            limits = np.iinfo(kind)
            found[name] = np.array([[limits.min, 0, limits.max], [1, 2, 3]], kind)
    for name, kind in (("FP16", "float16"), ("FP32", "float32"), ("FP64", "float64")):
        found[name] = np.array([[np.finfo(kind).max, -0.0, np.inf], [1.5, -np.inf, 1e-3]], kind)
    found["BYTES"] = np.array([[b"", b"a\0b", "é".encode()], [b"x" * 1000, b" ", b"\n"]], np.object_)
    found["BF16"] = np.array([[1.5, -2.0, 0.0], [256.0, -0.5, np.inf]], ml_dtypes.bfloat16)
    return found


def tensors(module: Any, name: str, datatype: str, array: Any, *, binary: bool) -> tuple[list[Any], list[Any]]:
    """Return the inputs and outputs of a request."""
    given = module.InferInput(name, array.shape, datatype)
    if module is triton_http:
        given.set_data_from_numpy(array, binary_data=binary)
        return [given], [module.InferRequestedOutput("y", binary_data=binary)]
    given.set_data_from_numpy(array)
    return [given], [module.InferRequestedOutput("y")]


def same(found: Any, array: np.ndarray[Any, Any]) -> None:
    """Assert that two arrays have the same elements."""
    assert found.shape == array.shape
    if array.dtype == np.object_:
        values = [v.encode() if isinstance(v, str) else bytes(v) for v in found.ravel()]
        assert values == list(array.ravel())
    else:
        assert found.dtype == array.dtype, (found.dtype, array.dtype)
        assert np.array_equal(found, array)


def check_http() -> None:
    """Send every datatype as JSON and as binary data, compressed and not."""
    with triton_http.InferenceServerClient(HTTP) as client:
        for datatype, array in samples().items():
            for binary in (True, False):
                if not binary and datatype in ("FP16", "BF16"):
                    continue  # the client refuses these in JSON
                if not binary and datatype.startswith("FP"):
                    array = np.nan_to_num(array, posinf=3, neginf=4)  # noqa: PLW2901
                inputs, outputs = tensors(triton_http, "x", datatype, array, binary=binary)
                for compression in (None, "gzip", "deflate"):
                    result = client.infer(
                        f"identity-{datatype}", inputs, outputs=outputs, request_id="7",
                        request_compression_algorithm=compression, response_compression_algorithm=compression,
                    )  # fmt: skip
                    same(result.as_numpy("y"), array)
                    assert result.get_response()["id"] == "7"


def check_grpc() -> None:
    """Send every datatype as raw contents."""
    with triton_grpc.InferenceServerClient(GRPC) as client:
        for datatype, array in samples().items():
            inputs, outputs = tensors(triton_grpc, "x", datatype, array, binary=True)
            result = client.infer(f"identity-{datatype}", inputs, outputs=outputs, request_id="7")
            same(result.as_numpy("y"), array)
            assert result.get_response().id == "7"


def check_asyncio() -> None:
    """Send every datatype by both protocols, all requests at the same time."""

    async def run() -> None:
        async with (
            triton_http_aio.InferenceServerClient(HTTP) as http,
            triton_grpc_aio.InferenceServerClient(GRPC) as grpc,
        ):
            assert await http.is_server_ready()
            assert await grpc.is_server_ready()
            calls, sent = [], []
            for datatype, array in [*samples().items()] * 3:
                for client, module in ((http, triton_http), (grpc, triton_grpc)):
                    inputs, outputs = tensors(module, "x", datatype, array, binary=True)
                    calls.append(client.infer(f"identity-{datatype}", inputs, outputs=outputs))
                    sent.append(array)
            for result, array in zip(await asyncio.gather(*calls), sent, strict=True):
                same(result.as_numpy("y"), array)

    asyncio.run(run())


def check_stream() -> None:
    """Send requests on one stream: answers come in order, and an error does not end the stream."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        arrays = [np.full((1, 3), number, np.float32) for number in range(40)]
        for number, array in enumerate(arrays):
            inputs, _ = tensors(triton_grpc, "x", "FP32", array, binary=True)
            client.async_stream_infer("missing" if number == 20 else "identity-FP32", inputs, request_id=str(number))
        for number, array in enumerate(arrays):
            result, error = answers.get(timeout=30)
            if number == 20:
                assert "unknown model" in str(error)
            else:
                assert error is None, error
                assert result.get_response().id == str(number)
                same(result.as_numpy("y"), array)
        client.stop_stream()


def check_management() -> None:
    """Read metadata, configuration, statistics and the index; load and unload."""
    with triton_http.InferenceServerClient(HTTP) as http, triton_grpc.InferenceServerClient(GRPC) as grpc:
        for client, json in ((http, {}), (grpc, {"as_json": True})):
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("product")
            assert client.is_model_ready("product", "1")
            assert client.get_server_metadata(**json)["name"] == "chrion"
            metadata = client.get_model_metadata("product", **json)
            assert metadata["versions"] == ["1", "2"]
            assert [int(d) for d in metadata["inputs"][0]["shape"]] == [-1, 4]
            config = client.get_model_config("product", **json)
            config = config.get("config", config)
            assert config["input"][0]["data_type"] == "TYPE_FP32"
            statistics = client.get_inference_statistics("product", "1", **json)["model_stats"]
            before = int(statistics[0].get("inference_count", 0))
            module = triton_http if client is http else triton_grpc
            inputs, outputs = tensors(module, "x", "FP32", np.ones((2, 4), np.float32), binary=True)
            first = client.infer("product", inputs, model_version="1", outputs=outputs).as_numpy("y")
            second = client.infer("product", inputs, outputs=outputs).as_numpy("y")
            assert not np.array_equal(first, second)
            statistics = client.get_inference_statistics("product", "1", **json)["model_stats"]
            assert int(statistics[0]["inference_count"]) == before + 1
            client.unload_model("product")
            assert not is_ready(client, "product")
            index = client.get_model_repository_index(**json)
            states = {m["name"]: m["state"] for m in (index["models"] if json else index)}
            assert states["product"] == "UNAVAILABLE"
            assert states["identity-FP32"] == "READY"
            client.load_model("product")
            assert client.is_model_ready("product")


def is_ready(client: Any, name: str) -> bool:
    """Return whether a model is ready; gRPC has an error for an unknown model."""
    try:
        return bool(client.is_model_ready(name))
    except InferenceServerException:
        return False


def check_errors() -> None:
    """Every error of a request is an InferenceServerException with the protocol's status."""
    with triton_http.InferenceServerClient(HTTP) as http, triton_grpc.InferenceServerClient(GRPC) as grpc:
        for client, module, codes in (
            (http, triton_http, {"missing": "404", "wrong": "400"}),
            (grpc, triton_grpc, {"missing": "StatusCode.NOT_FOUND", "wrong": "StatusCode.INVALID_ARGUMENT"}),
        ):

            def refused(code: str, model: str, name: str, datatype: str, shape: tuple[int, ...], **more: Any) -> None:
                array = np.zeros(shape, np.int32 if datatype == "INT32" else np.float32)
                inputs, _ = tensors(module, name, datatype, array, binary=True)  # noqa: B023
                with pytest.raises(InferenceServerException) as found:
                    client.infer(model, inputs, **more)  # noqa: B023
                assert found.value.status() == codes[code], found.value.message()  # noqa: B023

            refused("missing", "missing", "x", "FP32", (1, 4))
            refused("missing", "product", "x", "FP32", (1, 4), model_version="9")
            refused("wrong", "product", "z", "FP32", (1, 4))
            refused("wrong", "product", "x", "INT32", (1, 4))
            refused("wrong", "product", "x", "FP32", (1, 5))
            refused("wrong", "product", "x", "FP32", (4,))
            refused("wrong", "product", "x", "FP32", (1, 4), outputs=[module.InferRequestedOutput("z")])


def check_columns() -> None:
    """Send columns of texts and numbers to a pipeline by both protocols; texts come back as labels."""
    given = {
        "city": ("BYTES", np.array([[b"Oslo"], ["é".encode()], [b"Rome"]], np.object_)),
        "distance": ("FP32", np.array([[0.5], [0.5], [2.0]], np.float32)),
    }
    with triton_http.InferenceServerClient(HTTP) as http, triton_grpc.InferenceServerClient(GRPC) as grpc:
        for client, module, options in (
            (http, triton_http, {"binary_data": True}),
            (http, triton_http, {"binary_data": False}),
            (grpc, triton_grpc, {}),
        ):
            inputs = [module.InferInput(name, array.shape, datatype) for name, (datatype, array) in given.items()]
            for sent, (_, array) in zip(inputs, given.values(), strict=True):
                sent.set_data_from_numpy(array, **options)
            outputs = [module.InferRequestedOutput(name, **options) for name in ("label", "probabilities")]
            result = client.infer("columns", inputs, outputs=outputs)
            same(result.as_numpy("label"), np.array([b"late", b"in time", b"late"], np.object_))
            same(result.as_numpy("probabilities"), np.array([[0, 1], [1, 0], [0.25, 0.75]], np.float32))


if __name__ == "__main__":
    for check in sys.argv[3:]:
        globals()[f"check_{check}"]()
    print("passed")  # noqa: T201 - the test looks for it

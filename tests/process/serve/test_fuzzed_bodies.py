"""Damaged bodies of both protocols and of the OpenAI API get a documented answer, and leave the server as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.serving.server.grpc_codec import SERVICE, message
from decoder_support import small_decoder
from model_repository import identity, product, put
from property_tests import examples
from request_mutations import damaged_bytes, damaged_json, damaged_message
from served_decoders import put_decoder
from server_client import infer_body, wait_until
from server_process import Server, serving

#: Documented statuses of damaged requests; 504 since a timeout may be a microsecond.
STATUSES = {200, 400, 404, 413, 429, 501, 504}
CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"}
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
INPUT = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
JSON_BODY = infer_body(ROWS) | {"id": "1", "outputs": [{"name": "y"}], "parameters": {"timeout": 10_000_000}}
BINARY_HEAD = {
    "inputs": [INPUT | {"parameters": {"binary_data_size": ROWS.nbytes}}],
    "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
}
TEXTS = infer_body(["a", "bc"], "BYTES")
TEXTS["inputs"][0]["shape"] = [1, 2]
TYPED = message("ModelInferRequest")(
    model_name="numbers", inputs=[INPUT | {"contents": {"fp32_contents": ROWS.ravel().tolist()}}]
)
RAW = message("ModelInferRequest")(
    model_name="numbers", id="1", inputs=[INPUT], outputs=[{"name": "y"}], raw_input_contents=[ROWS.tobytes()]
)
COMPLETION = {"model": "llama", "prompt": [1, 2], "max_tokens": 2, "temperature": 0.5, "seed": 1, "stop": ["w9"]}
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 2, "top_p": 0.9}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server, and check at the end that it has what it had before the requests."""
    root = tmp_path_factory.mktemp("models")
    put(root, "numbers", identity("FP32"))
    put(root, "texts", identity("BYTES"))
    put(root, "product", product())
    put_decoder(root, "llama", model=small_decoder("llama-decoder", context=64))
    with serving(root, "--max-request", "4MB") as running:
        process = psutil.Process(running.process.pid)
        assert [running.get(f"/v2/models/{m}/infer", b)[0] for m, b in (("texts", TEXTS), ("product", JSON_BODY))] == [
            200
        ] * 2
        for _ in range(20):  # threads start with the first requests, as models are loaded with theirs
            require_honest_answer(running)
        before, threads, handles = running.rss_mb(), process.num_threads(), process.num_fds()
        yield running
        require_honest_answer(running)
        wait_until(lambda: not connections(process))
        wait_until(lambda: process.num_fds() <= handles)
        assert running.metric("chrion_request_bytes") == 0
        assert running.metric("nv_inference_pending_request_count") == 0
        assert process.num_threads() <= threads + 8  # gRPC's and those of large bodies, which start when needed
        assert running.rss_mb() <= before + 60


def connections(process: psutil.Process) -> list[Any]:
    """Return the open connections of a process."""
    return [found for found in process.net_connections("tcp") if found.status == psutil.CONN_ESTABLISHED]


def require_honest_answer(server: Server) -> None:
    """Send a valid request, and check its outputs."""
    status, found, _ = server.infer("numbers", ROWS)
    assert (status, found["outputs"][0]["data"]) == (200, ROWS.ravel().tolist())


def check(status: int, found: Any) -> None:
    """Check that an answer is documented, and its text, if it failed, one line."""
    assert status in STATUSES, (status, found)
    if status != 200:
        error = found["error"]
        text = error if isinstance(error, str) else error["message"]
        assert text
        assert len(text.splitlines()) == 1, text
        assert len(text) < 2000, text


@examples(300)
@given(body=damaged_json(JSON_BODY) | damaged_json(TEXTS), model=st.sampled_from(["numbers", "texts", "product"]))
def test_damaged_json(server: Server, body: Any, model: str) -> None:
    """Documents in which fields of a valid request are replaced, missing or repeated."""
    check(*server.get(f"/v2/models/{model}/infer", body)[:2])
    require_honest_answer(server)


@examples(300)
@given(head=damaged_json(BINARY_HEAD), content=damaged_bytes(ROWS.tobytes()), shift=st.just(0) | st.integers(-40, 40))
def test_damaged_binary_bodies(server: Server, head: Any, content: bytes, shift: int) -> None:
    """Heads, tensors and lengths that do not belong together."""
    encoded = json.dumps(head).encode()
    given_length = {"Inference_Header_Content_Length": str(len(encoded) + shift)}
    check(*server.get("/v2/models/numbers/infer", encoded + content, **given_length)[:2])
    require_honest_answer(server)


@examples(200)
@given(body=damaged_bytes(json.dumps(JSON_BODY).encode(), 8))
def test_damaged_texts(server: Server, body: bytes) -> None:
    """Bytes of a valid document are changed or missing."""
    check(*server.get("/v2/models/numbers/infer", body)[:2])
    require_honest_answer(server)


@examples(300)
@given(request=damaged_message(TYPED) | damaged_message(RAW))
def test_damaged_messages(server: Server, request: bytes) -> None:
    """Messages in which fields or bytes of a valid one are changed, in a call and in a stream."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        code, text = "OK", "none"
        try:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(request, timeout=60)
        except grpc.RpcError as error:
            code, text = error.code().name, error.details()
        assert code in CODES, text
        assert len(text.splitlines()) == 1, text
        (answer,) = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter([request]), timeout=60)
        assert (message("ModelStreamInferResponse").FromString(answer).error_message == "") == (code == "OK")
    require_honest_answer(server)


@examples(200)
@given(body=damaged_json(COMPLETION) | damaged_json(CHAT), chat=st.booleans())
def test_damaged_openai_bodies(server: Server, body: Any, *, chat: bool) -> None:
    """Documents of the OpenAI API, of the other of its paths as well."""
    status, found, headers = server.get("/v1/chat/completions" if chat else "/v1/completions", body)
    if status == 200 and headers["content-type"].startswith("text/event-stream"):
        assert found.endswith(b"data: [DONE]\n\n")
    else:
        check(status, found)
    require_honest_answer(server)

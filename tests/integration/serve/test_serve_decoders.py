"""Decoders by the Open Inference Protocol: streams of gRPC, timeouts, and texts by REST."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from chrion.serving.server.disconnects import EventResponse
from chrion.serving.server.grpc_codec import message
from decoder_support import PlainDecoder, small_decoder
from local_server import LocalServer, local_server
from model_repository import product, put
from served_decoders import put_decoder, words_of
from server_client import wait_until

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
MODEL = small_decoder("llama-decoder", context=60_000)
PROMPTS = [[2, 3, 4], [5], [6, 7], [8, 9, 10, 11], [12, 13], [14]]
#: Tokens of a text that fills the slots and takes far longer than the timeouts of requests behind it.
LONG = 46_000
LATE = "the text did not begin within its timeout"
COUNTS = [12, 3, 20, 7, 1, 15]


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[int]]]:
    """Return prompts and what plain onnxruntime generates after them."""
    plain = PlainDecoder(MODEL)
    return {"prompts": PROMPTS, "tokens": [plain.generate(*pair) for pair in zip(PROMPTS, COUNTS, strict=True)]}


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Return a server of a decoder whose slots one long text fills, and of a model of another kind."""
    root = tmp_path_factory.mktemp("streamed")
    put_decoder(root, "llama", '[generation]\nmax_batch = 4\nkv_memory = "12MB"\n', model=MODEL)
    put(root, "product", product())
    with local_server(root) as running:
        yield running


def request(prompt: list[int], count: int, **parameters: Any) -> bytes:
    """Return a streamed request for tokens."""
    entry = {"name": "input_ids", "datatype": "INT64", "shape": [len(prompt)], "contents": {"int64_contents": prompt}}
    found = message("ModelInferRequest")(model_name="llama", inputs=[entry])
    found.parameters["max_tokens"].int64_param = count
    found.parameters["stream"].bool_param = True
    for name, value in parameters.items():
        found.parameters[name].int64_param = value
    return bytes(found.SerializeToString())


def slots(server: LocalServer) -> float:
    return server.metric("chrion_kv_reserved_slots", model="llama")


def generated(server: LocalServer) -> float:
    return server.metric("chrion_generated_tokens_total", model="llama")


def test_a_client_that_does_not_read_stalls_no_other(decoders: LocalServer, known: dict[str, Any]) -> None:
    """While one client reads nothing, another one has its texts; the first one finds all of its tokens later."""
    count = 1_000  # more than the buffers of a connection hold
    kind = message("ModelStreamInferResponse")
    with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as silent, contextlib.ExitStack() as stack:
        call = silent.stream_stream(STREAM)(iter([request([1], count)]), timeout=120)
        wait_until(lambda: slots(decoders) > 0)
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}"))
        for prompt, tokens in zip(known["prompts"], known["tokens"], strict=True):
            answers = channel.stream_stream(STREAM)(iter([request(prompt, len(tokens))]), timeout=30)
            assert len([*answers]) == len(tokens) + 1
        wait_until(lambda: slots(decoders) == 0, 60)
        responses = [kind.FromString(content).infer_response for content in call]
    assert len(responses) == count + 1
    assert [response.parameters["triton_final_response"].bool_param for response in responses] == [False] * count + [
        True
    ]


def test_a_text_that_cannot_start_in_time_fails(decoders: LocalServer) -> None:
    """A request behind one that fills the slots fails after its timeout, and leaves the queue."""
    with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as channel:
        infer = channel.stream_stream(STREAM)
        long = infer(iter([request([1], LONG)]))
        next(long)
        kind = message("ModelStreamInferResponse")
        (late,) = [kind.FromString(content) for content in infer(iter([request([2], 1_000, timeout=100_000)]))]
        assert late.error_message == LATE
        assert late.infer_response.parameters["triton_final_response"].bool_param
        wait_until(lambda: decoders.metric("chrion_generation_requests", model="llama") == 1)  # after an iteration
        long.cancel()
        wait_until(lambda: slots(decoders) == 0)


def test_a_text_by_rest_that_cannot_start_in_time_fails(decoders: LocalServer) -> None:
    """The parameter ``timeout``, in microseconds, ends a waiting text by all paths; one that can start is served."""
    entry = {"name": "input_ids", "datatype": "INT64", "shape": [1], "data": [2]}
    plain = {"input_ids": [2], "max_tokens": 1_000, "timeout": 100_000}
    nested = {"input_ids": [2], "parameters": {"max_tokens": 1_000, "timeout": 100_000, "stream": True}}
    with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as channel:
        long = channel.stream_stream(STREAM)(iter([request([1], LONG)]))
        next(long)
        for path, body in (
            ("generate", plain),
            ("infer", {"inputs": [entry], "parameters": {"max_tokens": 1_000, "timeout": 100_000}}),
        ):
            status, document, _ = decoders.get(f"/v2/models/llama/{path}", body)
            assert (status, document["error"]) == (504, LATE)
        status, content, _ = decoders.get("/v2/models/llama/generate_stream", nested)
        assert (status, events(content)) == (200, [{"error": LATE}])
        wait_until(lambda: decoders.metric("chrion_generation_requests", model="llama") == 1)
        long.cancel()
        wait_until(lambda: slots(decoders) == 0)
    status, document, _ = decoders.get("/v2/models/llama/generate", {**plain, "max_tokens": 3, "timeout": 60_000_000})
    assert (status, len(document["output_ids"])) == (200, 3)
    status, document, _ = decoders.get("/v2/models/llama/generate", {**plain, "timeout": "soon"})
    assert (status, document["error"]) == (400, "parameter 'timeout': expected a whole number of microseconds")


def test_a_call_whose_deadline_passes_frees_its_slots(decoders: LocalServer) -> None:
    """A deadline of gRPC ends the text."""
    call = message("ModelInferRequest")()
    call.MergeFromString(request([1], LONG))
    call.parameters["stream"].bool_param = False
    with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as late:
            infer(call.SerializeToString(), timeout=0.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: slots(decoders) == 0)


def events(content: bytes) -> list[dict[str, Any]]:
    """Return the documents of server-sent events."""
    return [json.loads(part.removeprefix("data: ")) for part in content.decode().split("\n\n") if part]


def test_a_response_whose_client_leaves_at_once_ends_its_request() -> None:
    """If the first event cannot be sent, the requests of the response end all the same."""
    ended: list[bool] = []

    async def tokens() -> AsyncIterator[str]:
        yield "data: never sent"

    async def refuse(_: Any) -> None:
        raise OSError("the client has left")

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    response = EventResponse(tokens(), lambda: ended.append(True))
    with contextlib.suppress(Exception):
        asyncio.run(response({"type": "http"}, receive, refuse))
    assert ended == [True]


def test_generate(decoders: LocalServer, known: dict[str, Any]) -> None:
    """Triton's generate extension returns the text, for parameters in an object of their own or beside the prompt."""
    tokens = known["tokens"][0]
    for body in (
        {"text_input": "w2 w3 w4", "max_tokens": 12, "bad_words": "", "stop_words": ""},
        {"text_input": "w2 w3 w4", "id": "7", "parameters": {"max_tokens": 12, "temperature": 0, "stream": False}},
        {"input_ids": [2, 3, 4], "max_tokens": 12},
    ):
        status, document, _ = decoders.get("/v2/models/llama/versions/1/generate", body)
        assert status == 200, document
        assert document.pop("id", "") == body.get("id", "")
        assert document == {
            "model_name": "llama",
            "model_version": "1",
            "text_output": words_of(tokens),
            "output_ids": tokens,
            "finish_reason": "length",
        }


@pytest.mark.parametrize("damaged", [False, True])
def test_a_decoder_without_a_tokenizer_is_served_by_tokens(
    tmp_path: Path, known: dict[str, Any], *, damaged: bool
) -> None:
    """It generates from token ids, at once and as a stream; what needs text is refused, and says what does not."""
    file = put(tmp_path, "mute", MODEL, toml='[generation]\nkv_memory = "1MB"\n')
    if damaged:
        (file.parent / "tokenizer.json").write_text("{}")
    tokens = {"input_ids": [2, 3, 4], "max_tokens": 12}
    with local_server(tmp_path) as server:
        document = server.get("/v2/models/mute/generate", tokens)[1]
        assert (document["output_ids"], document["text_output"]) == (known["tokens"][0], "")
        streamed = events(server.get("/v2/models/mute/generate_stream", {**tokens, "stream": True})[1])
        assert [event["output_ids"] for event in streamed] == [[token] for token in known["tokens"][0]] + [[]]
        for field, body in (
            ("text_input", {"text_input": "w1"}),
            ("stop_words", {**tokens, "stop_words": ["w1"]}),
            ("exclude_input_in_output", {**tokens, "exclude_input_in_output": False}),
        ):
            status, document, _ = server.get("/v2/models/mute/generate", body)
            reason = f"{field}: model 'mute' has no tokenizer (give input_ids, read output_ids)"
            assert (status, document["error"]) == (400, reason)
        assert server.get("/v1/models")[1]["data"] == []
        status, document, _ = server.get("/v1/completions", {"model": "mute", "prompt": [2, 3, 4]})
        error = document["error"]
        assert (status, error["type"], error["param"]) == (501, "invalid_request_error", "model")
        assert "/v2/models/mute/generate takes input_ids and returns output_ids" in error["message"]


def test_generate_stream(decoders: LocalServer, known: dict[str, Any]) -> None:
    """Each token is an event, or the whole text is one."""
    body = {"text_input": "w2 w3 w4", "max_tokens": 12}
    status, content, headers = decoders.get("/v2/models/llama/generate_stream", {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = events(content)
    assert [event["output_ids"] for event in found] == [[token] for token in known["tokens"][0]] + [[]]
    assert "".join(event["text_output"] for event in found) == words_of(known["tokens"][0])
    assert [event["finish_reason"] for event in found] == [""] * 12 + ["length"]
    (whole,) = events(decoders.get("/v2/models/llama/generate_stream", body)[1])
    assert whole["output_ids"] == known["tokens"][0]


def test_wrong_texts_are_refused(decoders: LocalServer) -> None:
    """The status and the message are those of the protocol, also for events."""
    for path, body, status, about in (
        ("llama/generate", {"text_input": "w1", "stream": True}, 400, "several responses need generate_stream"),
        ("llama/generate", {"text_input": "w1", "max_tokens": 0}, 400, "expected at least 1, found 0"),
        ("llama/generate_stream", {"text_input": "w1", "max_tokens": 70_000}, 400, "the request needs 70000"),
        ("llama/generate", {"text_input": ""}, 400, "prompt: expected at least one token"),
        ("llama/generate", {"parameters": 3}, 400, "parameters: expected an object"),
        ("llama/generate", {"text_input": "w1", "id": float("inf")}, 400, "id: expected text, found 'inf'"),
        ("llama/generate_stream", {"text_input": "w1", "id": 7}, 400, "id: expected text, found '7'"),
        ("llama/generate", {"text_input": "w1 \ud800"}, 400, "not JSON: a text has half a surrogate pair"),
        ("llama/generate", {"text_input": "w1", "\udfff": 1}, 400, "not JSON: a text has half a surrogate pair"),
        ("llama/versions/2/generate", {"text_input": "w1"}, 404, "does not exist in this version"),
        ("product/generate", {"text_input": "w1"}, 404, "has no table [generation]"),
    ):
        found, document, _ = decoders.get(f"/v2/models/{path}", body)
        assert (found, about in document["error"]) == (status, True), (path, document)


def test_model_control_chooses_the_generators(tmp_path: Path, known: dict[str, Any]) -> None:
    """In explicit mode, those that the command names are opened at the start, and stay open."""
    for name in ("llama", "other"):
        put_decoder(tmp_path, name, '[generation]\nkv_memory = "1MB"\n', model=MODEL)
    text = {"text_input": "w2 w3 w4", "max_tokens": 3}
    with local_server(tmp_path, control="explicit", load=("llama",)) as server:
        assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["llama"]
        assert server.get("/v2/repository/models/other/load", {})[0] == 200
        status, document, _ = server.get("/v2/models/other/generate", text)
        assert (status, "was not opened at the start" in document["error"]) == (404, True)
        assert server.get("/v2/repository/models/other/unload", {})[0] == 200
        status, document, _ = server.get("/v2/repository/models/llama/unload", {})
        assert (status, "its generator stays open" in document["error"]) == (501, True)
        assert server.get("/v2/models/llama/generate", text)[1]["output_ids"] == known["tokens"][0][:3]
    with local_server(tmp_path, control="explicit", load=("*",)) as server:
        assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["llama", "other"]

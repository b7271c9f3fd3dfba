"""Decoders by the Open Inference Protocol, with Triton's client in a process of its own, and by REST."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from decoder_support import PlainDecoder, small_decoder
from served_decoders import put_decoder, words_of
from server_process import Server, product, put, serving, wait_until

grpc = pytest.importorskip("grpc", reason="grpc: pip install 'chrion[serve]'")

CLIENT = Path(__file__).parents[2] / "decoder_checks.py"
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
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of a decoder whose slots one long text fills, and of a model of another kind."""
    root = tmp_path_factory.mktemp("streamed")
    put_decoder(root, "llama", '[generation]\nmax_batch = 4\nkv_memory = "12MB"\n', model=MODEL)
    put(root, "product", product())
    with serving(root) as running:
        yield running


def message(name: str, **fields: Any) -> Any:
    return importlib.import_module("chrion.server.grpc_messages").message(name)(**fields)


def request(prompt: list[int], count: int, **parameters: Any) -> bytes:
    """Return a streamed request for tokens."""
    entry = {"name": "input_ids", "datatype": "INT64", "shape": [len(prompt)], "contents": {"int64_contents": prompt}}
    found = message("ModelInferRequest", model_name="llama", inputs=[entry])
    found.parameters["max_tokens"].int64_param = count
    found.parameters["stream"].bool_param = True
    for name, value in parameters.items():
        found.parameters[name].int64_param = value
    return bytes(found.SerializeToString())


def slots(server: Server) -> float:
    return server.metric("chrion_kv_reserved_slots", model="llama")


def generated(server: Server) -> float:
    return server.metric("chrion_generated_tokens_total", model="llama")


def run_client(server: Server, known: dict[str, Any], folder: Path, *checks: str) -> None:
    """Run checks of Triton's client in a process of its own."""
    (folder / "known.json").write_text(json.dumps(known))
    command = [sys.executable, str(CLIENT), str(server.http), str(server.grpc), str(folder / "known.json"), *checks]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "passed"


needs_client = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient: pip install 'tritonclient[all]'"
)


@needs_client
@pytest.mark.parametrize("check", ["metadata", "infer", "stream", "asyncio", "sampling", "errors"])
def test_tritons_client_generates(decoders: Server, known: dict[str, Any], tmp_path: Path, check: str) -> None:
    """Triton's client gets the tokens of plain onnxruntime, whole and streamed."""
    run_client(decoders, known, tmp_path, check)
    wait_until(lambda: slots(decoders) == 0)


@needs_client
def test_a_cancelled_stream_frees_its_slots(decoders: Server, known: dict[str, Any], tmp_path: Path) -> None:
    """A text whose client cancels in the middle ends as cancelled, before its last token, and reserves no slots."""
    reason = {"model": "llama", "reason": "cancelled"}
    tokens, texts = generated(decoders), decoders.metric("chrion_generation_finish_reasons_total", **reason)
    run_client(decoders, known, tmp_path, "cancel")
    wait_until(lambda: slots(decoders) == 0)
    assert decoders.metric("chrion_generation_finish_reasons_total", **reason) == texts + 1
    assert generated(decoders) - tokens < 40_000


def test_a_client_that_does_not_read_stalls_no_other(decoders: Server, known: dict[str, Any]) -> None:
    """While one client reads nothing, another one has its texts; the first one finds all of its tokens later."""
    count = 4_000  # more than the buffers of a connection hold
    kind = message("ModelStreamInferResponse").__class__
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


def test_a_text_that_cannot_start_in_time_fails(decoders: Server) -> None:
    """A request behind one that fills the slots fails after its timeout, and leaves the queue."""
    with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as channel:
        infer = channel.stream_stream(STREAM)
        long = infer(iter([request([1], LONG)]))
        next(long)
        kind = message("ModelStreamInferResponse").__class__
        (late,) = [kind.FromString(content) for content in infer(iter([request([2], 1_000, timeout=100_000)]))]
        assert late.error_message == LATE
        assert late.infer_response.parameters["triton_final_response"].bool_param
        wait_until(lambda: decoders.metric("chrion_generation_requests", model="llama") == 1)  # after an iteration
        long.cancel()
        wait_until(lambda: slots(decoders) == 0)


def test_a_text_by_rest_that_cannot_start_in_time_fails(decoders: Server) -> None:
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


def test_a_call_whose_deadline_passes_frees_its_slots(decoders: Server) -> None:
    """A deadline of gRPC ends the text."""
    call = message("ModelInferRequest")
    call.MergeFromString(request([1], LONG))
    call.parameters["stream"].bool_param = False
    with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as late:
            infer(call.SerializeToString(), timeout=0.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: slots(decoders) == 0)


def test_many_streamed_texts_leave_no_memory(decoders: Server) -> None:
    """The memory of the server after 1500 texts is that after 500, within a few MB."""

    def serve(count: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{decoders.grpc}") as channel:
            for _ in range(count // 50):
                texts = iter([request([1 + at, 2], 4) for at in range(50)])
                assert len([*channel.stream_stream(STREAM)(texts, timeout=60)]) == 250

    serve(500)
    before = decoders.rss_mb()
    serve(1000)
    assert decoders.rss_mb() - before < 8
    assert slots(decoders) == 0


def events(content: bytes) -> list[dict[str, Any]]:
    """Return the documents of server-sent events."""
    return [json.loads(part.removeprefix("data: ")) for part in content.decode().split("\n\n") if part]


def test_a_response_whose_client_leaves_at_once_ends_its_request() -> None:
    """If the first event cannot be sent, the requests of the response end all the same."""
    disconnects = importlib.import_module("chrion.server.disconnects")
    ended: list[bool] = []

    async def tokens() -> AsyncIterator[str]:
        yield "data: never sent"

    async def refuse(_: Any) -> None:
        raise OSError("the client has left")

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    response = disconnects.EventResponse(tokens(), lambda: ended.append(True))
    with contextlib.suppress(Exception):
        asyncio.run(response({"type": "http"}, receive, refuse))
    assert ended == [True]


def test_generate(decoders: Server, known: dict[str, Any]) -> None:
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


def test_generate_stream(decoders: Server, known: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("path", "body", "status", "about"),
    [
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
    ],
)
def test_wrong_texts_are_refused(decoders: Server, path: str, body: dict[str, Any], status: int, about: str) -> None:
    """The status and the message are those of the protocol, also for events."""
    found, document, _ = decoders.get(f"/v2/models/{path}", body)
    assert found == status, document
    assert about in document["error"]


def test_model_control_chooses_the_generators(tmp_path: Path, known: dict[str, Any]) -> None:
    """In explicit mode, those that the command names are opened at the start, and stay open."""
    for name in ("llama", "other"):
        put_decoder(tmp_path, name, '[generation]\nkv_memory = "1MB"\n', model=MODEL)
    text = {"text_input": "w2 w3 w4", "max_tokens": 3}
    with serving(tmp_path, "--model-control", "explicit", "--load-model", "llama") as server:
        assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["llama"]
        assert server.get("/v2/repository/models/other/load", {})[0] == 200
        status, document, _ = server.get("/v2/models/other/generate", text)
        assert (status, "was not opened at the start" in document["error"]) == (404, True)
        assert server.get("/v2/repository/models/other/unload", {})[0] == 200
        status, document, _ = server.get("/v2/repository/models/llama/unload", {})
        assert (status, "its generator stays open" in document["error"]) == (501, True)
        assert server.get("/v2/models/llama/generate", text)[1]["output_ids"] == known["tokens"][0][:3]
    with serving(tmp_path, "--model-control", "explicit", "--load-model", "*") as server:
        assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["llama", "other"]

"""The OpenAI API of a server, by the client of OpenAI."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from chrion.serving.manager import PolicySpec
from decoder_support import PlainDecoder
from local_server import LocalServer, local_server
from served_decoders import put_decoder, words_of
from server_client import wait_until


def test_models_with_generation_are_listed(client: Any) -> None:
    """Only models with a table [generation] are models of this API."""
    assert [model.id for model in client.models.list()] == [
        *("bytes", "ending", "llama", "plain", "small", "thinking", "tools")
    ]
    assert client.models.retrieve("llama").id == "llama"
    with pytest.raises(openai.NotFoundError, match="unknown"):
        client.models.retrieve("unknown")


def test_completions(client: Any, plain: PlainDecoder) -> None:
    """Text and tokens are continued as plain onnxruntime does, and tokens are counted."""
    expected = words_of(plain.generate([2, 3, 4], 12))
    for prompt in ("w2 w3 w4", [2, 3, 4]):
        answer = client.completions.create(model="llama", prompt=prompt, max_tokens=12, temperature=0)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)


def test_the_page_has_the_generators(client: Any, decoders: LocalServer) -> None:
    """The events of the web page count the tokens and the texts of each generator."""

    def state() -> dict[str, Any]:
        with decoders.in_flight("/events") as events:
            assert events.response().status_code == 200
            generators = json.loads(next(iter(events)).removeprefix(b"data: "))["generators"]
        return next(found for found in generators if found["name"] == "llama")

    before = state()
    client.completions.create(model="llama", prompt="w2", max_tokens=3, temperature=0)
    wait_until(lambda: state()["finished_requests"] > before["finished_requests"])
    assert state()["generated_tokens"] == before["generated_tokens"] + 3


def test_streams(client: Any, plain: PlainDecoder) -> None:
    """The pieces of a stream are the text; the numbers of tokens come last if they are asked for."""
    given = {"model": "llama", "prompt": "w2 w3 w4", "max_tokens": 12, "temperature": 0}
    chunks = [*client.completions.create(**given, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == words_of(plain.generate([2, 3, 4], 12))
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_several_prompts_and_choices(client: Any) -> None:
    """Each prompt has n choices with seeds of their own, which are repeatable."""
    given = {"model": "llama", "prompt": ["w2", "w3 w4"], "n": 2, "max_tokens": 10, "seed": 5}
    first, again = (client.completions.create(**given).choices for _ in range(2))
    assert [choice.index for choice in first] == [0, 1, 2, 3]
    assert [choice.text for choice in first] == [choice.text for choice in again]
    assert len({choice.text for choice in first}) == 4
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in first]


def test_chats(client: Any, plain: PlainDecoder) -> None:
    """The template gives the prompt, and the answer is a message."""
    messages = [
        {"role": "user", "content": "w8 w9"},
        {"role": "assistant", "content": "w10"},
        {"role": "user", "content": [{"type": "text", "text": "w11"}]},
    ]
    expected = words_of(plain.generate([1, 5, 8, 9, 5, 10, 5, 11, 6], 9))
    given = {"model": "llama", "messages": messages, "max_completion_tokens": 9, "temperature": 0}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    chunks = [*client.chat.completions.create(**given, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_chats_with_calls_of_tools(client: Any) -> None:
    """A template gets the calls of an assistant's message without content, with their arguments as objects."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "w8", "days": "w9"}'}}
    messages = [
        {"role": "user", "content": "w7"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "w11"}]},
    ]
    given = {"model": "tools", "max_tokens": 2, "temperature": 0}
    usage = client.chat.completions.create(**given, messages=messages).usage
    assert usage.prompt_tokens == 7  # w1 w7 w2 w8 w9 w3 w11
    del messages[1]["content"]
    assert client.chat.completions.create(**given, messages=messages).usage == usage


def test_stop_strings(client: Any, plain: PlainDecoder) -> None:
    """The text ends before the stop string."""
    tokens = plain.generate([2, 3, 4], 12)
    text = words_of(tokens)
    stop = f"w{tokens[3]}"
    answer = client.completions.create(model="llama", prompt="w2 w3 w4", max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].text == text[: text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_clients_at_the_same_time(client: Any, plain: PlainDecoder) -> None:
    """Each of twelve clients has its own answer."""

    def ask(first: int) -> str:
        given = {"model": "llama", "prompt": [first, 2], "max_tokens": 20, "temperature": 0}
        return str(client.completions.create(**given).choices[0].text)

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(12)))
    assert found == [words_of(plain.generate([first, 2], 20)) for first in range(12)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(decoders: LocalServer, stream: bool) -> None:  # noqa: FBT001
    """A text whose client leaves in the middle ends as cancelled, and reserves no slots any more."""

    def generated() -> float:
        return decoders.metric("chrion_generated_tokens_total", model="llama")

    def cancelled() -> float:
        return decoders.metric("chrion_generation_finish_reasons_total", model="llama", reason="cancelled")

    tokens, texts = generated(), cancelled()
    body = {"model": "llama", "prompt": [1], "max_tokens": 19_000, "temperature": 0, "stream": stream}
    with decoders.in_flight("/v1/completions", body):
        wait_until(lambda: generated() > tokens + 20)
        assert decoders.metric("chrion_kv_reserved_slots", model="llama") == 19_000
    wait_until(lambda: decoders.metric("chrion_kv_reserved_slots", model="llama") == 0)
    assert cancelled() == texts + 1


def test_metrics_have_the_times_of_tokens(decoders: LocalServer, client: Any) -> None:
    """A request of five tokens is one time to a first token and four times between tokens."""
    names = [f"chrion_time_{name}_seconds_count" for name in ("to_first_token", "between_tokens")]
    client.completions.create(model="llama", prompt=[1], max_tokens=2)  # else there is no time between tokens yet
    before = [decoders.metric(name, model="llama") for name in names]
    client.completions.create(model="llama", prompt=[1], max_tokens=5)
    assert [decoders.metric(name, model="llama") - old for name, old in zip(names, before, strict=True)] == [1, 4]
    assert decoders.metric("chrion_kv_slots", model="llama") > 15_000


def test_wrong_completions_are_refused(decoders: LocalServer) -> None:
    """The error is a document of the API with a message that names the field."""
    for body, status, message in (
        ({"model": "none", "prompt": "w1"}, 404, "model 'none' does not exist"),
        ({"model": "product", "prompt": "w1"}, 404, "no table [generation]"),
        ({"prompt": "w1"}, 400, "model is missing"),
        ({"model": "llama"}, 400, "prompt: expected"),
        ({"model": "llama", "prompt": "w1", "temperature": "hot"}, 400, "temperature: expected a number"),
        ({"model": "llama", "prompt": "w1", "stream": "true"}, 400, "stream: expected true or false"),
        (
            {"model": "llama", "prompt": "w1", "temperature": 10**400},
            400,
            "temperature: expected a number of at most 1e+12, found 1000",
        ),
        (
            {"model": "llama", "prompt": "w1", "max_tokens": 0},
            400,
            "max_tokens: expected a whole number",
        ),
        ({"model": "llama", "prompt": "w1", "max_tokens": 30_000}, 400, "context length is 20000 tokens"),
        ({"model": "llama", "prompt": "w1", "stop": 5}, 400, "stop: expected text or a list"),
        ({"model": "llama", "prompt": "w1", "stop": ["w9"] * 17}, 400, "expected a list of at most 16 entries"),
        ({"model": "llama", "prompt": ["w1"] * 3, "n": 64}, 400, "expected at most 128 choices, found 192"),
    ):
        found, document, _ = decoders.get("/v1/completions", body)
        error = document["error"]
        assert (found, error["type"], message in error["message"]) == (status, "invalid_request_error", True), error


def test_wrong_chats_are_refused(decoders: LocalServer) -> None:
    """The error names the message at fault."""
    for model, messages, message in (
        ("plain", [{"role": "user", "content": "w1"}], "no chat template"),
        ("llama", [], "messages: expected a list"),
        ("llama", [{"content": "w1"}], "messages[0]: expected an object with a role"),
        ("llama", [{"role": "user", "content": 5}], "messages[0].content: expected text"),
        ("llama", [{"role": "other", "content": "w1"}], "the chat template refuses them: unknown role"),
    ):
        found, document, _ = decoders.get("/v1/chat/completions", {"model": model, "messages": messages})
        assert (found, message in document["error"]["message"]) == (400, True), document


def test_limits_of_requests_and_tokens(tmp_path: Path) -> None:
    """More choices than may ever wait are refused; a chat has an equal share of the slots unless it says more."""
    put_decoder(tmp_path, "llama", '[generation]\nmax_batch = 4\nkv_memory = "100KB"\n')
    with local_server(tmp_path, policies=PolicySpec(max_waiting=3)) as server:
        status, document, _ = server.get("/v1/completions", {"model": "llama", "prompt": "w1", "n": 4})
        assert (status, document["error"]["param"]) == (400, "n")  # it would never be served, so that none repeats it
        assert "at most 3 choices (--max-waiting), found 4" in document["error"]["message"]
        assert server.get("/v1/completions", {"model": "llama", "prompt": "w1", "n": 3})[0] == 200
        share = server.metric("chrion_kv_slots", model="llama") // 4
        chat = {"model": "llama", "messages": [{"role": "user", "content": "w2"}]}
        usage = server.get("/v1/chat/completions", chat)[1]["usage"]
        assert usage["total_tokens"] - 1 == share > 10  # the last token is not in the cache


def test_unknown_paths_have_errors_of_the_api(client: Any, decoders: LocalServer) -> None:
    """A part of the API that is not offered is an error that its client understands."""
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: not found") as missing:
        client.embeddings.create(model="llama", input="w1")
    assert missing.value.type == "invalid_request_error"
    status, document, headers = decoders.get("/v1/completions")
    assert (status, document["error"]["message"]) == (405, "GET /v1/completions: not allowed, expected POST")
    assert headers["allow"] == "POST"


def test_a_server_without_decoders_says_so(server: LocalServer) -> None:
    """Its list of models for text is empty, and requests for text are answered with what a model lacks."""
    assert server.get("/v1/models")[1]["data"] == []
    chat = {"model": "product", "messages": [{"role": "user", "content": "w2"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v2/models/product/generate", {"text_input": "w2"})):
        status, found, _ = server.get(path, body)
        assert status == 404
        assert "has no table [generation]" in str(found)


def test_the_memory_of_requests_is_limited(tmp_path: Path) -> None:
    """Requests that generate count with those of tensors, until their answers have been read."""
    put_decoder(tmp_path, "llama")
    given = {"model": "llama", "prompt": [1], "max_tokens": 19_000, "stream": True}
    with local_server(tmp_path, request_bytes=100_000) as server:
        status, document, headers = server.get("/v1/completions", {"model": "llama", "prompt": "w1 " * 20_000})
        assert status == 413
        assert "all requests together have 100000" in document["error"]["message"]
        assert "retry-after" not in headers
        assert server.metric("chrion_request_bytes") == 0
        assert server.get("/v1/completions", {"model": "llama", "prompt": "w1", "max_tokens": 2})[0] == 200
        with server.in_flight("/v1/completions", given) as text:
            parts = text.response().iter_raw()  # kept: an iterator that is freed closes the connection
            assert next(parts).startswith(b"data: ")
            least = 2 * len(json.dumps(given, separators=(",", ":")))
            wait_until(lambda: server.metric("chrion_request_bytes") >= least)
        wait_until(lambda: server.metric("chrion_request_bytes") == 0)
        assert server.get("/v1/completions", {"model": "llama", "prompt": 7})[0] == 400
        assert server.metric("chrion_request_bytes") == 0


def test_bodies_are_as_large_as_the_option_allows(tmp_path: Path) -> None:
    """A text with metadata of two megabytes is served, unless that exceeds --max-request or has too many values."""
    put_decoder(tmp_path, "llama")
    given = {"model": "llama", "prompt": "w1", "max_tokens": 2}
    with local_server(tmp_path, body_bytes=10_000_000) as server:
        for path, name in (("/v1/completions", "prompt"), ("/v2/models/llama/generate", "text_input")):
            body = {name: "w1", "max_tokens": 2}
            status, document, _ = server.get(path, json.dumps(given | body).encode() + b" " * 2_000_000)
            assert status == (200 if name == "prompt" else 400), document
            assert server.get(path, json.dumps(body).encode() + b" " * 10_000_000)[0] == 413
        assert server.get("/v1/completions", {**given, "metadata": {"a": "b" * 2_000_000}})[0] == 200
        status, document, _ = server.get("/v1/completions", {**given, "metadata": [[]] * 200_000})
        assert (status, document["error"]["type"]) == (413, "invalid_request_error")
        assert "values of JSON" in document["error"]["message"]


def test_decoders_are_still_models_of_the_inference_protocol(decoders: LocalServer, plain: PlainDecoder) -> None:
    """Requests with keys and values are answered with logits, as they are without the table [generation]."""
    entries: list[dict[str, Any]] = [
        {"name": name, "datatype": "INT64", "shape": [1, 2], "data": data}
        for name, data in (("input_ids", [3, 4]), ("attention_mask", [1, 1]), ("position_ids", [0, 1]))
    ]
    entries += [
        {"name": f"past_key_values.{layer}.{part}", "datatype": "FP32", "shape": [1, 1, 0, 16], "data": []}
        for layer in range(2)
        for part in ("key", "value")
    ]
    status, document, _ = decoders.get("/v2/models/llama/infer", {"inputs": entries, "outputs": [{"name": "logits"}]})
    assert status == 200, document
    expected = plain.scores([3, 4])
    assert document["outputs"][0]["data"] == pytest.approx(expected.ravel().tolist(), abs=1e-4)

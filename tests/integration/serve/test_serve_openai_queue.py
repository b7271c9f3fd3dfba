"""Requests of the OpenAI API that wait, and how requests end, by the client of OpenAI and by the metrics."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from chrion.serving.manager import PolicySpec
from decoder_support import PlainDecoder
from grafana_queries import check_queries
from local_server import LocalServer, local_server
from served_decoders import put_decoder, words_of
from server_client import wait_until

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "w2"}], "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory, plain: PlainDecoder) -> Iterator[LocalServer]:
    """Return a server that generates one text at a time, behind which one other may wait."""
    root = tmp_path_factory.mktemp("queue")
    put_decoder(root, "llama", '[generation]\nmax_batch = 1\nkv_memory = "64MB"\n')
    end = plain.generate([2, 3, 4], 3)[2]
    put_decoder(root, "ending", '[generation]\nkv_memory = "1MB"\n', config={"eos_token_id": end})
    with local_server(root, policies=PolicySpec(max_waiting=1)) as running:
        yield running


@contextlib.contextmanager
def busy(client: Any) -> Iterator[None]:
    """Keep the decoder busy with a text of 19 000 tokens, until its client leaves."""
    with client.completions.create(model="llama", prompt=[1], max_tokens=19_000, stream=True) as stream:
        next(iter(stream))
        yield


def waiting(server: LocalServer) -> bool:
    return server.metric("chrion_generation_requests", model="llama") == 2


def reasons(server: LocalServer, model: str) -> dict[str, float]:
    """Return how many requests of a model have ended by their reasons."""
    name = "chrion_generation_finish_reasons_total"
    return {
        reason: server.metric(name, model=model, reason=reason) for reason in ("length", "stop", "cancelled", "error")
    }


def test_more_requests_than_may_wait_are_refused(decoders: LocalServer, client: Any) -> None:
    """OpenAI's client raises its error for too many requests, and is told when to try again."""
    with ThreadPoolExecutor(1) as pool:
        with busy(client):
            second = pool.submit(client.chat.completions.create, **CHAT)
            wait_until(lambda: waiting(decoders))
            with pytest.raises(openai.RateLimitError, match="too many requests wait") as refused:
                client.chat.completions.create(**CHAT)
        assert (refused.value.type, refused.value.code) == ("rate_limit_error", "rate_limit_exceeded")
        assert refused.value.response.headers["retry-after"] == "1"
        assert second.result(60).usage.completion_tokens == 4


def test_a_stream_begins_with_its_first_token(decoders: LocalServer, client: Any, plain: PlainDecoder) -> None:
    """While a chat waits, its stream is open and empty, so that clients measure the time to the first token."""
    parts: list[bytes] = []
    with contextlib.ExitStack() as stack:
        with busy(client):
            chat = stack.enter_context(decoders.in_flight("/v1/chat/completions", {**CHAT, "stream": True}))
            assert chat.response().status_code == 200
            reading = stack.enter_context(ThreadPoolExecutor(1)).submit(lambda: parts.extend(chat))
            wait_until(lambda: waiting(decoders))
            time.sleep(0.1)
            assert parts == []
        reading.result(60)
    received = b"".join(parts).decode()
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith('data: {"')]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == words_of(plain.generate([1, 5, 2, 6], 4))


def test_requests_are_counted_by_how_they_end(decoders: LocalServer, client: Any) -> None:
    """A text that ends by itself, one that has its most tokens, and one whose client leaves are distinguished."""
    before = reasons(decoders, "ending")
    client.completions.create(model="ending", prompt=[2, 3, 4], temperature=0)
    for _ in range(2):
        client.completions.create(model="ending", prompt=[2, 3, 4], temperature=0, max_tokens=2)
    with client.completions.create(
        model="ending", prompt=[2], max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    wait_until(lambda: not decoders.metric("chrion_generation_requests", model="ending"))
    after = reasons(decoders, "ending")
    assert {reason: after[reason] - before[reason] for reason in after} == {
        "length": 2,
        "stop": 1,
        "cancelled": 1,
        "error": 0,
    }
    assert decoders.metric("chrion_generation_finished_requests_total", model="ending") == sum(after.values())


def counts(server: LocalServer) -> tuple[float, ...]:
    """Return Triton's numbers of requests, failures and rows of a decoder, and those whose client has left."""
    names = ("request_success", "request_failure", "count")
    left = server.metric("chrion_request_cancelled_total", model="ending")
    return *(server.metric(f"nv_inference_{name}", model="ending") for name in names), left


def test_requests_for_texts_are_in_the_statistics_of_the_protocol(decoders: LocalServer, client: Any) -> None:
    """Each API's requests count once; so do refusals, wrong prompts, and clients that leave."""
    before = counts(decoders)
    url = "/v2/models/ending/generate"
    assert decoders.get(url, {"input_ids": [2, 3], "max_tokens": 2})[0] == 200
    assert b"finish_reason" in decoders.get(f"{url}_stream", {"input_ids": [2], "max_tokens": 2, "stream": True})[1]
    client.completions.create(model="ending", prompt=[2, 3, 4], temperature=0, max_tokens=2)
    assert decoders.get(url, {"input_ids": [10**6], "max_tokens": 2})[0] == 400
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="ending", prompt=[2], n=2, max_tokens=1)
    options = {"max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="ending", prompt=[2], **options) as stream:
        next(iter(stream))
    wait_until(lambda: counts(decoders)[3] > before[3])
    assert [now - old for now, old in zip(counts(decoders), before, strict=True)] == [3, 2, 3, 1]
    (own,) = decoders.get("/v2/models/ending/stats")[1]["model_stats"]
    assert own["inference_stats"]["success"]["count"] == counts(decoders)[0]
    assert own["inference_stats"]["success"]["ns"] > 0
    assert own["last_inference"] > 0


def test_the_dashboard_has_the_metrics_of_texts(decoders: LocalServer, client: Any) -> None:
    """The server exports every metric of the row about text of the Grafana dashboard, with its labels."""
    client.completions.create(model="ending", prompt=[2, 3, 4], temperature=0, max_tokens=2)
    check_queries(decoders.get("/metrics")[1].decode(), "text")
    check_queries(decoders.get("/metrics")[1].decode())

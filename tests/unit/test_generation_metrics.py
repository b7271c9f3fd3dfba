"""Metrics of generation: the times of tokens are those at which they were generated."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client: pip install 'chrion[serve]'")
pytest.importorskip("starlette", reason="starlette: pip install 'chrion[serve]'")

from chrion import Generator
from chrion.generation import Stream, Token
from chrion.server import rest
from chrion.server.chat_template import find_chat_template
from chrion.server.generation_metrics import GenerationMetrics
from chrion.server.generation_service import GenerationService
from chrion.server.generators import ServedGenerator
from served_decoders import put_decoder


def value(text: bytes, name: str) -> float:
    """Return a sample of a metric of the model m."""
    found = re.search(rf'^{name}{{model="m"}} (\S+)$', text.decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def test_times_are_those_of_the_tokens() -> None:
    """They count from the arrival, however late tokens are read; text that was held back is no token."""
    stream = Stream(1, lambda _: None)
    for at in (103.0, 104.5, 104.75):
        stream.put(Token(5, "a", time=at))
    stream.finish("length", text="held back")
    metrics = GenerationMetrics({})

    async def read() -> list[Token]:
        return [token async for token in metrics.timed("m", stream.events(), 100.0)]

    assert [token.text for token in asyncio.run(read())] == ["a", "a", "a", "held back"]
    text = metrics.render()
    names = [f"chrion_time_{name}_seconds" for name in ("to_first_token", "between_tokens")]
    assert [value(text, f"{name}_count") for name in names] == [1, 2]
    assert [value(text, f"{name}_sum") for name in names] == [3.0, 1.75]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "w2"}], "max_tokens": 2}'),
        ("/v1/completions", b'{"model": "m", "prompt": "w2", "max_tokens": 2}'),
        ("/v2/models/m/generate", b'{"text_input": "w2", "max_tokens": 2}'),
    ],
)
def test_a_request_arrives_before_it_is_read(
    tmp_path: Path, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to the first token includes the chat template and the tokenisation."""
    clock = itertools.count()
    monkeypatch.setattr(rest.time, "perf_counter", lambda: next(clock))
    encoded: list[int] = []
    arrivals: list[float] = []
    encode, events = ServedGenerator.encode, GenerationService.events

    def encode_later(served: ServedGenerator, prompt: Any, *, special: bool = True) -> list[int]:
        encoded.append(next(clock))
        return encode(served, prompt, special=special)

    def seen(service: GenerationService, model: str, streams: Any, arrival_s: float, *more: Any) -> Any:
        arrivals.append(arrival_s)
        return events(service, model, streams, arrival_s, *more)

    monkeypatch.setattr(ServedGenerator, "encode", encode_later)
    monkeypatch.setattr(GenerationService, "events", seen)
    file = put_decoder(tmp_path, "m")
    with Generator(file, threads=1, max_batch=2) as generator:
        served = ServedGenerator("m", "1", generator, find_chat_template(file), 0, float("inf"))
        status = asyncio.run(post(GenerationService({"m": served}, 8), path, body))
    assert status == 200
    assert arrivals[0] < encoded[0]


async def post(service: GenerationService, path: str, body: bytes) -> int:
    """Send a request to the application of a service; return the status of the answer."""
    account: Any = type("Target", (), {"account": type("Account", (), {"take": id, "give": id})()})()
    app = rest.RestService(account, body_bytes=1000, generation=service).app
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])
    found: list[int] = []

    async def receive() -> Any:
        message = next(sent, None)
        if message is None:
            await asyncio.sleep(60)
        return message

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    await app(scope, receive, send)
    return found[0]

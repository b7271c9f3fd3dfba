"""Metrics of generation: the times of tokens are those at which they were generated."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from chrion import Generator
from chrion.generation import Stream, Token
from chrion.serving.server.chat_template import find_chat_template
from chrion.serving.server.generation_metrics import GenerationMetrics
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.generators import ServedGenerator
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.request_memory import ByteAccount
from chrion.serving.server.rest import RestService
from local_server import LocalServer
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


class NotedGenerator(ServedGenerator):
    """A generator that notes when prompts are tokenised."""

    encoded: ClassVar[list[float]] = []

    def encode(self, prompt: Any, *, special: bool = True) -> list[int]:
        self.encoded.append(time.perf_counter())
        return super().encode(prompt, special=special)


class NotedService(GenerationService):
    """A service that notes when requests arrived."""

    arrivals: ClassVar[list[float]] = []

    def events(self, model: str, streams: Any, arrival_s: float, *more: Any) -> Any:
        self.arrivals.append(arrival_s)
        return super().events(model, streams, arrival_s, *more)


def test_a_request_arrives_before_it_is_read(tmp_path: Path) -> None:
    """The time to the first token includes the chat template and the tokenisation."""
    file = put_decoder(tmp_path, "m")
    target: Any = SimpleNamespace(account=ByteAccount(1 << 20))
    with Generator(file, threads=1, max_batch=2) as generator:
        served = NotedGenerator("m", "1", generator, find_chat_template(file), 0, float("inf"))
        service = NotedService({"m": served}, 8)
        server = LocalServer(RestService(ServerOptions(tmp_path), target, service).app, 0, 0, "")
        for path, body in (
            ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "w2"}]}),
            ("/v1/completions", {"model": "m", "prompt": "w2"}),
            ("/v2/models/m/generate", {"text_input": "w2"}),
        ):
            started = time.perf_counter()
            status, document, _ = server.get(path, {"max_tokens": 2} | body)
            assert status == 200, document
            assert started < service.arrivals[-1] < served.encoded[-1], path

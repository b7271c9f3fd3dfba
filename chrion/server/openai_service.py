"""The OpenAI API: completions, chat completions and models, with server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from chrion.errors import ChrionError, InputError
from chrion.generation import Generator, Stream, Token
from chrion.server.chat_template import ChatTemplate
from chrion.server.failures import RequestFailure, Status
from chrion.server.generation_metrics import GenerationMetrics
from chrion.server.generators import ServedGenerator, drain_generators
from chrion.server.openai_bodies import (
    MOST_CHOICES,
    Answers,
    Settings,
    failure_document,
    read_messages,
    read_prompts,
    read_settings,
)

ReadBody = Callable[[Request], Awaitable[dict[str, Any]]]
Handler = Callable[[Request], Awaitable[Response]]


class OpenAiService:
    """The handlers of the API.

    Args:
        served: The models by name.
        max_waiting: The most requests that wait at the same time, of all models.
    """

    def __init__(self, served: Mapping[str, ServedGenerator], max_waiting: int) -> None:
        self._served, self._max_waiting = served, max_waiting
        self._draining = False
        self._created = int(time.time())
        self._metrics = GenerationMetrics(served)

    def routes(self, read: ReadBody) -> list[tuple[str, Handler, str]]:
        """Return paths with their handlers and methods.

        Args:
            read: Returns the JSON object in the body of a request.
        """

        def reading(answer: Callable[[Request, dict[str, Any]], Awaitable[Response]]) -> Handler:
            async def handler(request: Request) -> Response:
                try:
                    return await answer(request, await read(request))
                except ChrionError as error:
                    raise _failure(error) from error

            return handler

        return [
            ("/v1/models", self._models, "GET"),
            ("/v1/completions", reading(self._completions), "POST"),
            ("/v1/chat/completions", reading(self._chat), "POST"),
        ]

    def metrics(self) -> bytes:
        """Return metrics in Prometheus's text format."""
        return self._metrics.render()

    async def close(self, grace_s: float) -> None:
        """Refuse new requests, wait for those in flight for a time at most, and close the generators."""
        self._draining = True
        await asyncio.to_thread(drain_generators, list(self._served.values()), grace_s)

    async def _models(self, request: Request) -> Response:
        del request
        common = {"object": "model", "created": self._created, "owned_by": "chrion"}
        return JSONResponse({"object": "list", "data": [{"id": name, **common} for name in sorted(self._served)]})

    async def _completions(self, request: Request, body: dict[str, Any]) -> Response:
        settings = read_settings(body)
        return await self._answer(request, settings, read_prompts(body), Answers(settings, chat=False))

    async def _chat(self, request: Request, body: dict[str, Any]) -> Response:
        settings = read_settings(body)
        served = self._find(settings.model)
        if served.template is None:
            raise RequestFailure(Status.INVALID, f"model {settings.model!r} has no chat template")
        self._admit(settings, 1)
        ids = await asyncio.to_thread(_encode_chat, served.generator, served.template, read_messages(body))
        return await self._answer(request, settings, [ids], Answers(settings, chat=True))

    def _find(self, name: str) -> ServedGenerator:
        served = self._served.get(name)
        if served is None:
            raise RequestFailure(Status.NOT_FOUND, f"model {name!r} does not exist, or has no table [generation]")
        return served

    def _admit(self, settings: Settings, prompts: int) -> None:
        """Raise a failure unless the choices of a number of prompts may be queued now."""
        count = prompts * len(settings.samplings)
        if count > MOST_CHOICES:
            raise RequestFailure(Status.INVALID, f"prompt, n: expected at most {MOST_CHOICES} choices, found {count}")
        if self._draining:
            raise RequestFailure(Status.UNAVAILABLE, "the server is shutting down", retry_s=1.0)
        queued = sum(served.generator.statistics().waiting_requests for served in self._served.values())
        if queued + count > self._max_waiting:
            raise RequestFailure(Status.OVERLOADED, "too many requests wait", retry_s=1.0)

    async def _answer(
        self, request: Request, settings: Settings, prompts: Sequence[str | list[int]], answers: Answers
    ) -> Response:
        generator = self._find(settings.model).generator
        self._admit(settings, len(prompts))
        encoded = await asyncio.to_thread(lambda: [generator.encode(prompt) for prompt in prompts])
        self._admit(settings, len(prompts))  # others may have come; nothing is awaited from here to their submission
        streams = _submit(generator, settings, encoded, answers)
        prompt = sum(stream.prompt_tokens for stream in streams[:: len(settings.samplings)])
        events = self._events(settings.model, streams)
        if settings.stream:
            content = self._chunks(settings, answers, streams, events, prompt)
            return StreamingResponse(content, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        left = asyncio.create_task(_disconnected(request))
        reading = asyncio.create_task(_exhaust(events))
        try:
            await asyncio.wait((left, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ClientDisconnect
            generated = reading.result()
        finally:
            _cancel(streams)
            for task in (left, reading):
                task.cancel()
            await asyncio.gather(left, reading, return_exceptions=True)
        texts, reasons = [stream.text for stream in streams], [stream.finish_reason for stream in streams]
        return JSONResponse(answers.whole(texts, reasons, prompt, generated))

    async def _events(self, model: str, streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Token | None]]:
        """Yield the tokens of several streams as they come, with the index of each; None ends a stream."""
        queue: asyncio.Queue[tuple[int, Token | BaseException | None]] = asyncio.Queue()

        async def forward(index: int, stream: Stream) -> None:
            try:
                async for token in self._metrics.timed(model, stream.events()):
                    queue.put_nowait((index, token))
                if stream.finish_reason == "cancelled":  # not by this service, which then reads no more
                    raise RequestFailure(Status.UNAVAILABLE, "the server ended the request", retry_s=1.0)  # noqa: TRY301
            except Exception as error:  # noqa: BLE001 - raised where the events are read
                queue.put_nowait((index, error))
            else:
                queue.put_nowait((index, None))

        tasks = [asyncio.create_task(forward(at, stream)) for at, stream in enumerate(streams)]
        try:
            running = len(tasks)
            while running:
                index, event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                running -= event is None
                yield index, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _chunks(
        self,
        settings: Settings,
        answers: Answers,
        streams: Sequence[Stream],
        events: AsyncIterator[tuple[int, Token | None]],
        prompt: int,
    ) -> AsyncIterator[str]:
        """Yield server-sent events. If the client leaves, the requests are cancelled."""
        generated = 0
        try:
            for index in range(len(streams)):
                if first := answers.first(index):
                    yield _event(first)
            async for index, token in events:
                if token is None:
                    yield _event(answers.last(index, streams[index].finish_reason))
                    continue
                generated += token.id is not None
                if token.text:
                    yield _event(answers.piece(index, token.text))
            if settings.usage:
                yield _event(answers.totals(prompt, generated))
            yield "data: [DONE]\n\n"
        except (ChrionError, RequestFailure) as error:
            failure = _failure(error)
            yield _event(failure_document(failure.message, failure.status.http))
        finally:
            _cancel(streams)


def _encode_chat(generator: Generator, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the tokens of a chat. The template writes the special tokens itself."""
    return generator.encode(template.render(messages), special=False)


def _submit(generator: Generator, settings: Settings, prompts: Sequence[list[int]], answers: Answers) -> list[Stream]:
    """Queue all choices of all prompts, or none."""
    streams: list[Stream] = []
    try:
        for ids in prompts:
            most = settings.max_tokens or answers.default_tokens or generator.default_new_tokens(len(ids))
            for sampling in settings.samplings:
                stream = generator.submit(ids, most, sampling=sampling, stop=settings.stop)
                streams.append(stream)
    except BaseException as error:
        _cancel(streams)
        if isinstance(error, RuntimeError) and not isinstance(error, ChrionError):
            raise RequestFailure(Status.UNAVAILABLE, "the generator is closed") from error
        raise
    return streams


def _cancel(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.cancel()


async def _exhaust(events: AsyncIterator[tuple[int, Token | None]]) -> int:
    """Read all events; return the number of tokens."""
    return sum([token is not None and token.id is not None async for _, token in events])


async def _disconnected(request: Request) -> None:
    """Wait until the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _failure(error: ChrionError | RequestFailure) -> RequestFailure:
    if isinstance(error, RequestFailure):
        return error
    return RequestFailure(Status.INVALID if isinstance(error, InputError) else Status.INTERNAL, str(error))

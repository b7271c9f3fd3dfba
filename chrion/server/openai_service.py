"""The OpenAI API: completions, chat completions and models, with server-sent events."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chrion.errors import ChrionError
from chrion.generation import Generator, Stream, Token
from chrion.server.chat_template import ChatTemplate
from chrion.server.disconnects import EventResponse, until_disconnect
from chrion.server.failures import RequestFailure, Status
from chrion.server.generation_service import GenerationService, Prompt, cancel, failure_of
from chrion.server.generators import ServedGenerator
from chrion.server.openai_bodies import (
    MOST_CHOICES,
    Answers,
    Settings,
    failure_document,
    read_prompts,
    read_settings,
)
from chrion.server.openai_messages import read_messages

ReadBody = Callable[[Request], Awaitable[dict[str, Any]]]
Handler = Callable[[Request], Awaitable[Response]]


class OpenAiService:
    """The handlers of the API.

    Args:
        service: The models.
    """

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._created = int(time.time())

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
                    raise failure_of(error) from error

            return handler

        return [
            ("/v1/models", self._models, "GET"),
            ("/v1/models/{name}", self._model, "GET"),
            ("/v1/completions", reading(self._completions), "POST"),
            ("/v1/chat/completions", reading(self._chat), "POST"),
        ]

    async def _models(self, request: Request) -> Response:
        del request
        models = [self._describe(name) for name in sorted(self._service.served)]
        return JSONResponse({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._find(name)
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "chrion"}

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
        served = self._service.served.get(name)
        if served is None:
            raise self._service.unknown(name)
        return served

    def _admit(self, settings: Settings, prompts: int) -> None:
        """Raise a failure unless the choices of a number of prompts may be queued now."""
        count = prompts * len(settings.samplings)
        if count > MOST_CHOICES:
            raise RequestFailure(Status.INVALID, f"prompt, n: expected at most {MOST_CHOICES} choices, found {count}")
        self._service.admit(count)

    async def _answer(
        self, request: Request, settings: Settings, prompts: Sequence[Prompt], answers: Answers
    ) -> Response:
        generator = self._find(settings.model).generator
        self._admit(settings, len(prompts))

        def most(length: int) -> int:
            default = answers.default_tokens or generator.default_new_tokens(length)
            return settings.max_tokens or min(default, generator.most_new_tokens(length))

        streams = await self._service.submit(generator, prompts, settings.samplings, settings.stop, most)
        prompt = sum(stream.prompt_tokens for stream in streams[:: len(settings.samplings)])
        events = self._service.events(settings.model, streams)
        if settings.stream:
            content = self._chunks(settings, answers, streams, events, prompt)
            return EventResponse(content, functools.partial(cancel, streams))
        try:
            generated = await until_disconnect(request, _exhaust(events))
        finally:
            cancel(streams)
        texts, reasons = [stream.text for stream in streams], [stream.finish_reason for stream in streams]
        return JSONResponse(answers.whole(texts, reasons, prompt, generated))

    async def _chunks(
        self,
        settings: Settings,
        answers: Answers,
        streams: Sequence[Stream],
        events: AsyncIterator[tuple[int, Token | None]],
        prompt: int,
    ) -> AsyncIterator[str]:
        """Yield server-sent events."""
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
            failure = failure_of(error)
            yield _event(failure_document(failure.message, failure.status.http))


def _encode_chat(generator: Generator, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the tokens of a chat. The template writes the special tokens itself."""
    return generator.encode(template.render(messages), special=False)


async def _exhaust(events: AsyncIterator[tuple[int, Token | None]]) -> int:
    """Read all events; return the number of tokens."""
    return sum([token is not None and token.id is not None async for _, token in events])


def _event(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"

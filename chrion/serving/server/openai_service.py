"""The OpenAI API: completions, chat completions and models, with server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chrion.errors import ChrionError, ContextLengthError
from chrion.generation import Token
from chrion.serving.server.disconnects import EventResponse, Handler, ReadBody, until_disconnect
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.generation_service import GenerationService, cancel, failure_of
from chrion.serving.server.generators import Prompt, ServedGenerator
from chrion.serving.server.openai_answers import Answers, RunningChoice
from chrion.serving.server.openai_bodies import Settings, read_prompts, read_settings
from chrion.serving.server.openai_failures import failure_document, too_long
from chrion.serving.server.openai_fields import MAX_CHOICES
from chrion.serving.server.openai_logprobs import TokenLog
from chrion.serving.server.openai_messages import read_messages


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
            read: Returns the JSON object in the body of a request, whose time it stores as
                ``request.state.arrival_s``.
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
        settings = read_settings(body, chat=False)
        return await self._answer(request, settings, read_prompts(body), Answers(settings, chat=False))

    async def _chat(self, request: Request, body: dict[str, Any]) -> Response:
        settings = read_settings(body, chat=True)
        served = self._find(settings.model)
        if served.template is None:
            raise RequestFailure(Status.INVALID, f"model {settings.model!r} has no chat template", param="model")
        self._admit(settings, 1)
        render = functools.partial(
            served.template.render,
            read_messages(body),
            settings.template_variables,
            add_generation_prompt=settings.add_generation_prompt,
        )
        with _explaining(settings, chat=True):
            # The template writes the special tokens itself.
            ids = await asyncio.to_thread(lambda: served.encode(render(), special=False))
        return await self._answer(request, settings, [ids], Answers(settings, chat=True))

    def _find(self, name: str) -> ServedGenerator:
        served = self._service.served.get(name)
        if served is None:
            raise self._service.unknown(name)
        return served

    def _admit(self, settings: Settings, prompts: int) -> None:
        """Raise a failure unless the choices of a number of prompts may be queued now."""
        count = prompts * len(settings.samplings)
        if count > MAX_CHOICES:
            text = f"prompt, n: expected at most {MAX_CHOICES} choices, found {count}"
            raise RequestFailure(Status.INVALID, text, param="n")
        self._service.admit(count)

    async def _answer(
        self, request: Request, settings: Settings, prompts: Sequence[Prompt], answers: Answers
    ) -> Response:
        served = self._find(settings.model)
        self._admit(settings, len(prompts))

        def most(length: int) -> int:
            default = answers.default_tokens or served.generator.default_new_tokens(length)
            return settings.max_tokens or min(default, served.generator.most_new_tokens(length))

        with _explaining(settings, chat=answers.chat):
            streams = await self._service.submit(served, prompts, settings.samplings, settings.options, most)
        answers.prompt_tokens = sum(stream.prompt_tokens for stream in streams[:: len(settings.samplings)])
        events = self._service.events(settings.model, streams, request.state.arrival_s)
        choices = [
            RunningChoice(
                stream,
                prompt=served.text_of(prompts[at // len(settings.samplings)]) if settings.echo else "",
                log=None if settings.options.logprobs is None else TokenLog(served.pieces, chat=answers.chat),
            )
            for at, stream in enumerate(streams)
        ]
        if settings.stream:
            return EventResponse(_chunks(settings, answers, choices, events), functools.partial(cancel, streams))
        try:
            answers.generated_tokens = await until_disconnect(request, _exhaust(events))
        finally:
            cancel(streams)
        return JSONResponse(answers.whole([choice.complete() for choice in choices]))


async def _chunks(
    settings: Settings,
    answers: Answers,
    choices: Sequence[RunningChoice],
    events: AsyncIterator[tuple[int, Token | None]],
) -> AsyncIterator[str]:
    """Yield server-sent events. Each choice begins when its first token has been generated."""
    begun = set()
    try:
        async for index, token in events:
            choice = choices[index]
            if index not in begun:
                begun.add(index)
                if first := answers.first(index, choice.prompt):
                    yield _event(first)
            if token is None:
                yield _event(answers.last(index, choice.stream.finish_reason, choice.finish()))
                continue
            answers.generated_tokens += token.id is not None
            logprobs = choice.add(token)
            if token.text or logprobs:
                yield _event(answers.piece(index, token.text, logprobs))
        if settings.usage:
            yield _event(answers.totals())
        yield "data: [DONE]\n\n"
    except (ChrionError, RequestFailure) as error:
        yield _event(failure_document(failure_of(error)))


@contextlib.contextmanager
def _explaining(settings: Settings, *, chat: bool) -> Iterator[None]:
    """Raise the failure of the API for a prompt that is too long."""
    try:
        yield
    except ContextLengthError as error:
        raise too_long(error, chat=chat, limit_field=settings.limit_field) from error


async def _exhaust(events: AsyncIterator[tuple[int, Token | None]]) -> int:
    """Read all events; return the number of tokens."""
    return sum([token is not None and token.id is not None async for _, token in events])


def _event(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"

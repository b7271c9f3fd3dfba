"""The OpenAI API: completions, chat completions and models, with server-sent events."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chrion.errors import ChrionError, ContextLengthError
from chrion.generation import Token
from chrion.serving.server.disconnects import EventResponse, Handler, ReadBody, event, until_disconnect
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.generation_service import GenerationService, cancel, failure_of
from chrion.serving.server.generators import Prompt, ServedGenerator
from chrion.serving.server.openai_answers import Answers, Choice
from chrion.serving.server.openai_bodies import MAX_CHOICES, Body, ChatBody, CompletionBody, TextBody, read_body
from chrion.serving.server.openai_logprobs import TokenLog
from chrion.serving.server.openai_messages import read_messages

_DEFAULT_TOKENS = 16  # of the completions of the API
#: The name of a field at the beginning of a message, with the part of it that is at fault.
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*): ")
#: Follows the limit of a request if it is not that of the model.
_MEMORY = " on this server, whose memory for keys and values (kv_memory) has slots for no more"
_TYPES = {Status.OVERLOADED: "rate_limit_error", Status.UNSUPPORTED: "invalid_request_error"}
_CODES = {Status.OVERLOADED: "rate_limit_exceeded", Status.UNAUTHENTICATED: "invalid_api_key"}


class OpenAiService:
    """The handlers of the API.

    Args:
        service: The models.
        read: Reads bodies.
    """

    def __init__(self, service: GenerationService, read: ReadBody) -> None:
        self._service, self._read_body = service, read
        self._created = int(time.time())

    def routes(self) -> list[tuple[str, Handler, str]]:
        """Return paths with their handlers and methods."""

        def reading(kind: type[Body], answer: Callable[[Request, Body], Awaitable[Response]]) -> Handler:
            async def handler(request: Request) -> Response:
                body = read_body(kind, await self._read_body(request))
                try:
                    return await answer(request, body)
                except ContextLengthError as error:
                    raise _too_long(error, body) from error
                except ChrionError as error:
                    raise failure_of(error) from error

            return handler

        return [
            ("/v1/models", self._models, "GET"),
            ("/v1/models/{name}", self._model, "GET"),
            ("/v1/completions", reading(CompletionBody, self._completions), "POST"),
            ("/v1/chat/completions", reading(ChatBody, self._chat), "POST"),
        ]

    async def _models(self, _: Request) -> Response:
        served = self._service.served.items()
        models = [self._describe(name) for name, one in sorted(served) if one.generator.tokenizer is not None]
        return JSONResponse({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._find(name)
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "chrion"}

    async def _completions(self, request: Request, body: CompletionBody) -> Response:
        return await self._answer(request, body, body.prompts(), echo=body.echo)

    async def _chat(self, request: Request, body: ChatBody) -> Response:
        served = self._find(body.model)
        if served.template is None:
            raise RequestFailure(Status.INVALID, f"model {body.model!r} has no chat template", param="model")
        self._admit(body, 1)
        render = functools.partial(
            served.template.render,
            read_messages(body.messages),
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
        # The template writes the special tokens itself.
        ids = await asyncio.to_thread(lambda: served.encode(render(), special=False))
        return await self._answer(request, body, [ids])

    def _find(self, name: str) -> ServedGenerator:
        served = self._service.served.get(name)
        if served is None:
            raise self._service.unknown(name)
        if served.generator.tokenizer is None:
            text = f"model {name!r} has no tokenizer: /v2/models/{name}/generate takes input_ids and returns output_ids"
            raise RequestFailure(Status.UNSUPPORTED, text, param="model")
        return served

    def _admit(self, body: TextBody, prompts: int) -> None:
        """Raise a failure unless the choices of a number of prompts may be queued now."""
        count = prompts * body.n
        with self._service.counted(body.model, time.perf_counter()):
            if count > MAX_CHOICES:
                text = f"prompt, n: expected at most {MAX_CHOICES} choices, found {count}"
                raise RequestFailure(Status.INVALID, text, param="n")
            self._service.admit(count)

    async def _answer(
        self, request: Request, body: TextBody, prompts: Sequence[Prompt], *, echo: bool = False
    ) -> Response:
        served = self._find(body.model)
        self._admit(body, len(prompts))

        def most(length: int) -> int:
            default = served.generator.default_new_tokens(length) if body.chat else _DEFAULT_TOKENS
            return body.limit or min(default, served.generator.most_new_tokens(length))

        streams = await self._service.submit(served, prompts, body.samplings(), body.options(), most)
        answers = Answers(body)
        answers.prompt_tokens = sum(stream.prompt_tokens for stream in streams[:: body.n])
        events = self._service.events(body.model, streams, request.state.arrival_s)
        choices = [
            Choice(
                stream,
                prompt=served.text_of(prompts[at // body.n]) if echo else "",
                log=None if body.logprob_count is None else TokenLog(served.pieces, chat=body.chat),
            )
            for at, stream in enumerate(streams)
        ]
        if body.stream:
            return EventResponse(_chunks(body, answers, choices, events), functools.partial(cancel, streams))
        try:
            answers.generated_tokens = await until_disconnect(request, _exhaust(events))
        finally:
            cancel(streams)
        return JSONResponse(answers.whole(choices))


async def _chunks(
    body: TextBody, answers: Answers, choices: Sequence[Choice], events: AsyncIterator[tuple[int, Token | None]]
) -> AsyncIterator[str]:
    """Yield server-sent events. Each choice begins when its first token has been generated."""
    begun = set()
    try:
        async for index, token in events:
            choice = choices[index]
            if index not in begun:
                begun.add(index)
                if first := answers.first(index, choice.prompt):
                    yield event(first)
            if token is None:
                yield event(answers.last(index, choice.stream.finish_reason, choice.finish()))
                continue
            answers.generated_tokens += token.id is not None
            logprobs = choice.add(token)
            if token.text or logprobs:
                yield event(answers.piece(index, token.text, logprobs))
        if body.usage:
            yield event(answers.totals())
        yield "data: [DONE]\n\n"
    except (ChrionError, RequestFailure) as error:
        yield event(failure_document(failure_of(error)))


async def _exhaust(events: AsyncIterator[tuple[int, Token | None]]) -> int:
    """Read all events; return the number of tokens."""
    return sum([token is not None and token.id is not None async for _, token in events])


def failure_document(failure: RequestFailure) -> dict[str, Any]:
    """Return the document of an error. Its ``param`` is the field that the message names at its beginning."""
    kind = _TYPES.get(failure.status, "invalid_request_error" if failure.status.http < 500 else "server_error")
    named = _FIELD.match(failure.message)
    param = failure.param or (named[1] if named and failure.status is Status.INVALID else None)
    code = failure.code or _CODES.get(failure.status)
    return {"error": {"message": failure.message, "type": kind, "param": param, "code": code}}


def _too_long(error: ContextLengthError, body: TextBody) -> RequestFailure:
    """Return the failure of a request that needs more tokens than there are, in the words that clients look for."""
    field = "messages" if body.chat else "prompt"
    prompt, new = error.prompt_tokens, error.new_tokens
    if not prompt:  # it has not been tokenised
        text = f"However, {error.message}."
    elif prompt > error.limit:
        text = f"However, your {field} resulted in {prompt} tokens. Please reduce the length of the {field}."
    else:
        text = (
            f"However, you requested {prompt + new} tokens ({prompt} in the {field}, {new} in the completion). "
            f"Please reduce the length of the {field} or completion."
        )
        field = body.limit_field
    memory = _MEMORY if error.memory else ""
    text = f"This model's maximum context length is {error.limit} tokens{memory}. {text}"
    return RequestFailure(Status.INVALID, text, param=field, code="context_length_exceeded")

"""Answers of the OpenAI API: a document, or the documents of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chrion.generation import Stream, Token
from chrion.serving.server.openai_bodies import Settings
from chrion.serving.server.openai_logprobs import TokenLog

_DEFAULT_TOKENS = 16  # of the completions of the API


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of an answer that is complete."""

    text: str
    #: As in :attr:`chrion.generation.Stream.finish_reason`.
    reason: str
    #: The document of the probabilities of its tokens.
    logprobs: Mapping[str, Any] | None = None


class RunningChoice:
    """A choice of an answer while its tokens come.

    Args:
        stream: Its tokens.
        prompt: The text that it begins with.
        log: The probabilities of its tokens; None if they are not wanted.
    """

    def __init__(self, stream: Stream, *, prompt: str = "", log: TokenLog | None = None) -> None:
        self.stream, self.prompt = stream, prompt
        self._log = log

    def add(self, token: Token) -> dict[str, Any] | None:
        """Return the document of the probabilities that are returned with a token."""
        return self._log.document(self._log.add(token)) if self._log else None

    def finish(self) -> dict[str, Any] | None:
        """Return the document of the probabilities that are returned at the end."""
        return self._log.document(self._log.finish(self.stream.finish_reason)) if self._log else None

    def complete(self) -> Choice:
        """Return the whole choice. Its stream has ended, and no token has been added."""
        logprobs = None
        if log := self._log:
            entries = [entry for token in self.stream.events() for entry in log.add(token)]
            logprobs = log.document([*entries, *log.finish(self.stream.finish_reason)])
        return Choice(self.prompt + self.stream.text, self.stream.finish_reason, logprobs)


class Answers:
    """The answers to one request: a document, or the documents of a stream.

    Args:
        settings: The settings of the request.
        chat: Whether it is a chat.
    """

    def __init__(self, settings: Settings, *, chat: bool) -> None:
        self.chat, self._settings = chat, settings
        kind = "chat.completion" if chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chat and settings.stream else kind,
            "created": int(time.time()),
            "model": settings.model,
        }
        #: The numbers of tokens so far: of the prompts, and those that have been generated.
        self.prompt_tokens = self.generated_tokens = 0

    @property
    def default_tokens(self) -> int | None:
        """The maximum tokens of an answer if the request does not say; None for as many as fit."""
        return None if self.chat else _DEFAULT_TOKENS

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer with all choices and the numbers of tokens."""
        documents = []
        for at, choice in enumerate(choices):
            text = {"message": {"role": "assistant", "content": choice.text}} if self.chat else {"text": choice.text}
            ends = {"logprobs": choice.logprobs, "finish_reason": choice.reason}
            documents.append({"index": at, **text, **ends})
        return {**self._common, "choices": documents, "usage": self._usage()}

    def first(self, index: int, prompt: str = "") -> dict[str, Any] | None:
        """Return the document that begins a choice: that of a chat, or of a completion that begins with its prompt."""
        if self.chat:
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        return self.piece(index, prompt) if prompt else None

    def piece(self, index: int, text: str, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a document with a piece of text."""
        return self._chunk(index, {"delta": {"content": text}} if self.chat else {"text": text}, logprobs)

    def last(self, index: int, reason: str, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the document that ends a choice."""
        return self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, logprobs, reason)

    def totals(self) -> dict[str, Any]:
        """Return the document with the numbers of tokens."""
        return {**self._common, "choices": [], "usage": self._usage()}

    def _chunk(
        self, index: int, content: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, reason: str = ""
    ) -> dict[str, Any]:
        ends = {"logprobs": logprobs, "finish_reason": reason or None}
        usage: dict[str, Any] = {}
        if self._settings.usage:
            usage = {"usage": self._usage() if self._settings.continuous_usage else None}
        return {**self._common, "choices": [{"index": index, **content, **ends}], **usage}

    def _usage(self) -> dict[str, int]:
        prompt, generated = self.prompt_tokens, self.generated_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

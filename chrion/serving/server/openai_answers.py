"""Answers of the OpenAI API: a document, or the documents of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from chrion.generation import Stream, Token
from chrion.serving.server.openai_bodies import TextBody
from chrion.serving.server.openai_logprobs import TokenLog


class Choice:
    """A choice of an answer, while its tokens come and afterwards.

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

    def logprobs(self) -> dict[str, Any] | None:
        """Return the document of all probabilities. The stream has ended, and no token has been added."""
        if not (log := self._log):
            return None
        entries = [entry for token in self.stream.events() for entry in log.add(token)]
        return log.document([*entries, *log.finish(self.stream.finish_reason)])


class Answers:
    """The answers to one request: a document, or the documents of a stream.

    Args:
        body: The request.
    """

    def __init__(self, body: TextBody) -> None:
        self._body = body
        kind = "chat.completion" if body.chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if body.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if body.chat and body.stream else kind,
            "created": int(time.time()),
            "model": body.model,
        }
        #: The numbers of tokens so far: of the prompts, and those that have been generated.
        self.prompt_tokens = self.generated_tokens = 0

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer with all choices and the numbers of tokens."""
        documents = []
        for at, choice in enumerate(choices):
            text = choice.prompt + choice.stream.text
            content = {"message": {"role": "assistant", "content": text}} if self._body.chat else {"text": text}
            documents.append(_choice(at, content, choice.logprobs(), choice.stream.finish_reason))
        return {**self._common, "choices": documents, "usage": self._usage()}

    def first(self, index: int, prompt: str = "") -> dict[str, Any] | None:
        """Return the document that begins a choice: that of a chat, or of a completion that begins with its prompt."""
        if self._body.chat:
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        return self.piece(index, prompt) if prompt else None

    def piece(self, index: int, text: str, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a document with a piece of text."""
        return self._chunk(index, {"delta": {"content": text}} if self._body.chat else {"text": text}, logprobs)

    def last(self, index: int, reason: str, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the document that ends a choice."""
        return self._chunk(index, {"delta": {}} if self._body.chat else {"text": ""}, logprobs, reason)

    def totals(self) -> dict[str, Any]:
        """Return the document with the numbers of tokens."""
        return {**self._common, "choices": [], "usage": self._usage()}

    def _chunk(
        self, index: int, content: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, reason: str = ""
    ) -> dict[str, Any]:
        document = {**self._common, "choices": [_choice(index, content, logprobs, reason)]}
        if self._body.usage:
            document["usage"] = self._usage() if self._body.continuous_usage else None
        return document

    def _usage(self) -> dict[str, int]:
        prompt, generated = self.prompt_tokens, self.generated_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _choice(index: int, content: Mapping[str, Any], logprobs: Mapping[str, Any] | None, reason: str) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason or None}

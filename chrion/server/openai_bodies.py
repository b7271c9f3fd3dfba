"""Bodies of the OpenAI API: completions and chat completions.

A field that Chrion does not implement is refused unless it has the value that changes nothing. Beyond the API,
``top_k`` and ``repetition_penalty`` are accepted, as other servers do.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chrion.generation import Sampling
from chrion.server.failures import RequestFailure, Status

#: Fields that are not implemented, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
#: Fields that are implemented, and fields that do not change the text.
_KNOWN = frozenset(
    {
        *(
            "max_completion_tokens",
            "max_tokens",
            "messages",
            "model",
            "n",
            "prompt",
            "repetition_penalty",
            "seed",
            "stop",
        ),
        *("stream", "stream_options", "temperature", "top_k", "top_p"),
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"),
    }
)
#: The most texts that one request may ask for.
MOST_CHOICES = 128
_MOST_STOPS = 16
_DEFAULT_TOKENS = 16  # of the completions of the API
_FINISH = {"length": "length", "stop": "stop"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a body says of the generation."""

    model: str
    max_tokens: int | None
    #: One per choice of a prompt.
    samplings: tuple[Sampling, ...]
    stop: tuple[str, ...]
    stream: bool
    #: Whether a stream ends with the numbers of tokens.
    usage: bool


def read_settings(body: Mapping[str, Any]) -> Settings:
    """Return the settings of a body.

    Raises:
        RequestFailure: A field has a wrong type or is not implemented.
        OptionError: A number is out of range.
    """
    for name, value in body.items():
        if name not in _KNOWN and not any(_same(value, neutral) for neutral in _NEUTRAL.get(name, (None,))):
            raise RequestFailure(Status.INVALID, f"{name[:100]}: not supported")
    stream = body.get("stream")
    if not isinstance(stream, bool | None):
        raise RequestFailure(Status.INVALID, f"stream: expected true or false, found {str(stream)[:100]!r}")
    count = _number(body, "n", int, 1)
    if not 1 <= count <= MOST_CHOICES:
        raise RequestFailure(Status.INVALID, f"n: expected 1 to {MOST_CHOICES}, found {count}")
    seed = _number(body, "seed", int, secrets.randbits(32))
    numbers = {
        "temperature": _number(body, "temperature", float, 1.0),
        "top_p": _number(body, "top_p", float, 1.0),
        "repetition_penalty": _number(body, "repetition_penalty", float, 1.0),
    }
    top_k = max(_number(body, "top_k", int, 0), 0)  # other servers write -1 for all tokens
    samplings = tuple(Sampling(**numbers, top_k=top_k, seed=seed + at) for at in range(count))
    stop = body.get("stop") or []
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else (None,)
    if not all(isinstance(text, str) for text in stops):
        raise RequestFailure(Status.INVALID, "stop: expected a text or a list of texts")
    if len(stops) > _MOST_STOPS:
        raise RequestFailure(Status.INVALID, f"stop: expected at most {_MOST_STOPS} texts, found {len(stops)}")
    most = body.get("max_completion_tokens")
    limit = _number({"max_tokens": most if most is not None else body.get("max_tokens")}, "max_tokens", int, None)
    options = body.get("stream_options") or {}
    usage = isinstance(options, Mapping) and options.get("include_usage") is True
    model = body.get("model")
    if not isinstance(model, str):
        raise RequestFailure(Status.INVALID, "model: expected the name of a model")
    if limit is not None and limit < 1:
        raise RequestFailure(Status.INVALID, f"max_tokens: expected at least 1, found {limit}")
    return Settings(model, limit, samplings, stops, stream is True, usage)


def read_prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a completion: texts or lists of tokens.

    Raises:
        RequestFailure: There is none, or one has another type.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str) or _tokens(prompt):
        return [prompt]  # type: ignore[list-item] # checked
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _tokens(one) for one in prompt):
        return prompt
    raise RequestFailure(Status.INVALID, "prompt: expected a text, a list of tokens, or a list of these")


class Answers:
    """The answers to one request: a document, or the documents of a stream.

    Args:
        settings: The settings of the request.
        chat: Whether it is a chat.
    """

    def __init__(self, settings: Settings, *, chat: bool) -> None:
        self._chat, self._settings = chat, settings
        kind = "chat.completion" if chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chat and settings.stream else kind,
            "created": int(time.time()),
            "model": settings.model,
        }

    @property
    def default_tokens(self) -> int | None:
        """The most tokens of an answer if the request does not say; None for as many as fit."""
        return None if self._chat else _DEFAULT_TOKENS

    def whole(self, texts: Sequence[str], reasons: Sequence[str], prompt: int, generated: int) -> dict[str, Any]:
        """Return the answer with all choices and the numbers of tokens."""
        choices = [
            {"index": at, "logprobs": None, "finish_reason": _FINISH.get(reason, "stop"), **self._content(text)}
            for at, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._common, "choices": choices, "usage": usage(prompt, generated)}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the document that begins a choice of a chat; None for a completion."""
        if not self._chat:
            return None
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a document with a piece of text."""
        content = {"delta": {"content": text}} if self._chat else {"text": text, "logprobs": None}
        return self._chunk({"index": index, "finish_reason": None, **content})

    def last(self, index: int, reason: str) -> dict[str, Any]:
        """Return the document that ends a choice."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": "", "logprobs": None}
        return self._chunk({"index": index, "finish_reason": _FINISH.get(reason, "stop"), **content})

    def totals(self, prompt: int, generated: int) -> dict[str, Any]:
        """Return the document with the numbers of tokens."""
        return {**self._common, "choices": [], "usage": usage(prompt, generated)}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._common, "choices": [choice], **({"usage": None} if self._settings.usage else {})}


def usage(prompt: int, generated: int) -> dict[str, int]:
    """Return numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def failure_document(message: str, status: int) -> dict[str, Any]:
    """Return an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _number(body: Mapping[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """Return a number of a body, which may be missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and not isinstance(value, int)):
        raise RequestFailure(Status.INVALID, f"{name}: expected a number, found {value!r}")
    try:
        return kind(value)
    except OverflowError:
        raise RequestFailure(Status.INVALID, f"{name}: the number is too large") from None


def _same(value: Any, neutral: Any) -> bool:
    """Return whether two values of JSON are equal; true is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)

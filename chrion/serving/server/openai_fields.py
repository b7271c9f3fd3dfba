"""The fields of bodies of the OpenAI API: typed values, and fields that are not implemented.

A field that Chrion does not implement is refused unless it has a value that changes nothing, as clients send it by
default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from chrion.common.records import LARGEST, read_record
from chrion.errors import InputError
from chrion.serving.server.failures import RequestFailure, Status, invalid
from chrion.serving.server.neutral_values import is_neutral

#: Maximum texts of one request, as in the OpenAI API.
MAX_CHOICES = 128
#: Maximum texts that end a text: each is searched in every token.
MAX_STOPS = 16
_Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Positive = Annotated[int, Meta(ge=1)]
#: The number of most probable tokens that each token may have, as in the API.
_TopTokens = Annotated[int, Meta(ge=0, le=20)]


class TextFields(Struct, frozen=True, kw_only=True):
    """The fields of both kinds of request."""

    model: str
    #: Read by themselves; the one of the other kind of request changes nothing.
    prompt: Any = None
    messages: Any = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    seed: int | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: _Number = 1.0
    top_k: Annotated[int, Meta(le=int(LARGEST))] = 0
    top_p: _Number = 1.0
    min_p: _Number = 0.0
    repetition_penalty: _Number = 1.0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] = {}
    stop: str | Annotated[tuple[str, ...], Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = {}


class CompletionFields(TextFields, frozen=True, kw_only=True):
    """The fields of a completion."""

    logprobs: _TopTokens | None = None
    echo: bool = False


class ChatFields(TextFields, frozen=True, kw_only=True):
    """The fields of a chat."""

    logprobs: bool = False
    top_logprobs: _TopTokens = 0
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


#: Fields of the API that are not implemented, with the values that change nothing beside null.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}
#: The same, of one kind of request only.
_NEUTRAL_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True, False),
    "add_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "top_logprobs": (0,),
}
_NEUTRAL_CHATS: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "echo": (False,),
}
#: Fields that do not change the text.
_IGNORED = frozenset(
    {
        *("cache_prompt", "cache_salt", "metadata", "parallel_tool_calls", "prompt_cache_key"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
    }
)


def read_fields(body: Mapping[str, Any], *, chat: bool) -> CompletionFields | ChatFields:
    """Return the fields of a body, of which those that are null count as missing.

    Whole numbers may be written as 5.0.

    Raises:
        RequestFailure: A value has a wrong type or is out of range, or a field is not implemented and would change
            something.
    """
    given = {name: value for name, value in body.items() if value is not None}
    kind: type[CompletionFields | ChatFields] = ChatFields if chat else CompletionFields
    # A selection of the best of several choices returns all of them if there are no others.
    choices = {"best_of": (1, given.get("n", 1))}
    neutral = {**_NEUTRAL, **(_NEUTRAL_CHATS if chat else _NEUTRAL_COMPLETIONS), **choices}
    for name, value in given.items():
        if name not in kind.__struct_fields__ and name not in _IGNORED and not is_neutral(name, value, neutral):
            raise invalid(f"{name[:100]}: not supported")
        if isinstance(value, float) and value.is_integer():
            given[name] = int(value)
    if not chat and given.get("logprobs") is False:
        del given["logprobs"]
    try:
        return read_record(kind, given)
    except InputError as error:
        message = error.message.replace(": expected a table", ": expected an object", 1)
        raise RequestFailure(Status.INVALID, message, param=re.split(r"\W", message, maxsplit=1)[0]) from error


def is_tokens(value: Any) -> bool:
    """Return whether a value is a list of token ids, at least one."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)

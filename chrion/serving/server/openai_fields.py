"""The fields of bodies of the OpenAI API: typed values, and fields that are not implemented.

A field that Chrion does not implement is refused unless it has a value that changes nothing, as clients send it by
default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chrion.serving.server.failures import invalid
from chrion.serving.server.neutral_values import is_neutral

#: The greatest number that a field may have.
_MOST = 1 << 1023
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
#: Fields that are implemented for both kinds of request.
_KNOWN = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "n", "seed"),
        *("stop", "stop_token_ids", "ignore_eos"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs"),
    }
)
_KNOWN_COMPLETIONS = frozenset({"echo"})
_KNOWN_CHATS = frozenset({"top_logprobs", "add_generation_prompt", "chat_template_kwargs"})
#: Fields that do not change the text.
_IGNORED = frozenset(
    {
        *("cache_prompt", "cache_salt", "metadata", "parallel_tool_calls", "prompt_cache_key"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
    }
)


class Fields:
    """The fields of a body, of which those that are null count as missing.

    All methods raise RequestFailure for a value of another type.

    Args:
        body: The body.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._given = {name: value for name, value in body.items() if value is not None}

    def refuse_unknown(self, *, chat: bool) -> None:
        """Raise a failure for a field that is not implemented and would change something."""
        known = _IGNORED | _KNOWN | (_KNOWN_CHATS if chat else _KNOWN_COMPLETIONS)
        # A selection of the best of several choices returns all of them if there are no others.
        choices = {"best_of": (1, self._given.get("n", 1))}
        neutral = {**_NEUTRAL, **(_NEUTRAL_CHATS if chat else _NEUTRAL_COMPLETIONS), **choices}
        for name, value in self._given.items():
            if name not in known and not is_neutral(name, value, neutral):
                raise invalid(f"{name[:100]}: not supported")

    def number(self, name: str, default: float) -> float:
        """Return a number."""
        return float(self._number(name, default))

    def whole(self, name: str, default: int = 0, least: int | None = None) -> int:
        """Return a whole number, which may be written as 5.0.

        Args:
            name: The field.
            default: What it is without a value.
            least: The least value that is allowed.
        """
        value = self._number(name, default)
        if isinstance(value, float) and not value.is_integer():
            raise invalid(f"{name}: expected a whole number, found {value!r}")
        if least is not None and value < least:
            raise invalid(f"{name}: expected at least {least}, found {int(value)}")
        return int(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise invalid(f"{name}: expected true or false, found {str(value)[:100]!r}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object; an empty one if it is missing."""
        value = self._given.get(name, {})
        if not isinstance(value, Mapping):
            raise invalid(f"{name}: expected an object, found {str(value)[:100]!r}")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return texts, of which a single one need not be in a list."""
        value = self._given.get(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise invalid(f"{name}: expected a text or a list of texts")
        if len(texts) > most:
            raise invalid(f"{name}: expected at most {most} texts, found {len(texts)}")
        return tuple(texts)

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return token ids; none if they are missing."""
        value = self._given.get(name, [])
        if not (value == [] or is_tokens(value)):
            raise invalid(f"{name}: expected a list of tokens")
        return tuple(value)

    def has(self, name: str) -> bool:
        """Return whether a field has a value."""
        return name in self._given

    def is_false(self, name: str) -> bool:
        """Return whether a field is false, which is no number."""
        return self._given.get(name) is False

    def _number(self, name: str, default: float) -> float:
        value = self._given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{name}: expected a number, found {str(value)[:100]!r}")
        if isinstance(value, int) and abs(value) > _MOST:
            raise invalid(f"{name}: the number is too large")
        if not math.isfinite(value):
            raise invalid(f"{name}: {value} is not a finite number")
        return value


def is_tokens(value: Any) -> bool:
    """Return whether a value is a list of token ids, at least one."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)

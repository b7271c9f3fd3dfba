"""Bodies of the OpenAI API: completions and chat completions.

Beyond the API, ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``stop_token_ids``, ``ignore_eos``,
``add_generation_prompt`` and ``chat_template_kwargs`` are accepted, as vLLM and other servers do. A field that Chrion
does not implement is refused unless it has a value that changes nothing, as clients send it by default.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta, Struct

from chrion.common.records import LARGEST, read_record
from chrion.errors import InputError
from chrion.generation import Sampling
from chrion.serving.server.chat_template import RESERVED
from chrion.serving.server.failures import RequestFailure, Status, invalid
from chrion.serving.server.generation_service import TextOptions

#: Options of requests for text that are not implemented, with the values that change nothing. Clients send many of
#: them with the defaults of vLLM, SGLang, llama.cpp or TensorRT-LLM.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words": ([], ""),
    "beam_width": (1,),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": ([],),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_return_sequences": (1,),
    "options": ({},),
    "priority": (0,),
    "repeat_penalty": (1,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_log_probs": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}


def is_neutral(name: str, value: Any, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> bool:
    """Return whether an option has a value that changes nothing.

    Args:
        name: The option.
        value: Its value.
        more: Further options, and those that have other values in a protocol.
    """
    return any(_same(value, neutral) for neutral in more.get(name, NEUTRAL.get(name, ())))


def _same(value: Any, neutral: Any) -> bool:
    """Return whether two values of JSON are equal; true is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


#: Maximum texts of one request, as in the OpenAI API.
MAX_CHOICES = 128
#: Maximum texts that end a text: each is searched in every token.
MAX_STOPS = 16
_Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Positive = Annotated[int, Meta(ge=1)]
#: The number of most probable tokens that each token may have, as in the API.
_TopTokens = Annotated[int, Meta(ge=0, le=20)]


class TextBody(Struct, frozen=True, kw_only=True):
    """The fields of both kinds of request."""

    chat: ClassVar[bool]

    model: str
    #: Read by themselves; the one of the other kind of request changes nothing.
    prompt: Any = None
    messages: Any = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    seed: int
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: _Number = 1.0
    top_k: int = 0
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

    def __post_init__(self) -> None:
        limit = self.limit
        if limit is not None and self.min_tokens > limit:
            raise invalid(f"min_tokens: expected at most {limit}, the maximum of new tokens, found {self.min_tokens}")
        if not all(token.isascii() and token.isdigit() for token in self.logit_bias):
            raise invalid("logit_bias: expected an object of token ids with numbers")

    @property
    def limit_field(self) -> str:
        """The field with the maximum new tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        """The maximum new tokens; None for the default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprob_count(self) -> int | None:
        """The number of most probable tokens that each token has beside its own probability; None for neither."""
        raise NotImplementedError

    @property
    def usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return self.stream_options.get("include_usage") is True

    @property
    def continuous_usage(self) -> bool:
        """True if each document of such a stream has them."""
        return self.stream_options.get("continuous_usage_stats") is True

    def options(self) -> TextOptions:
        """Return the options of each text."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return TextOptions(stop, self.stop_token_ids, self.ignore_eos, self.min_tokens, self.logprob_count)

    def samplings(self) -> list[Sampling]:
        """Return how the tokens of each choice of a prompt are chosen: choices have consecutive seeds.

        Raises:
            OptionError: A number is out of range.
        """
        first = Sampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),  # other servers write -1 for all tokens
            top_p=self.top_p or math.ulp(0.0),  # the API allows 0: only the most probable token
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias={int(token[:20]): bias for token, bias in self.logit_bias.items()},
            seed=self.seed % (1 << 64),  # the API has signed seeds
        )
        return [replace(first, seed=first.seed + at) for at in range(self.n)]


class CompletionBody(TextBody, frozen=True, kw_only=True):
    """The fields of a completion."""

    chat: ClassVar[bool] = False

    logprobs: _TopTokens | None = None
    #: True if the text begins with the prompt.
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo and self.logprobs is not None:
            raise invalid("echo: not supported together with logprobs, which the tokens of a prompt do not have")

    @property
    def logprob_count(self) -> int | None:
        """The number of most probable tokens that each token has beside its own probability; None for neither."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: texts or lists of tokens.

        Raises:
            RequestFailure: There is none, or one has another type.
        """
        prompts = [self.prompt] if isinstance(self.prompt, str) or _is_tokens(self.prompt) else self.prompt
        if isinstance(prompts, list) and prompts and all(isinstance(one, str) or _is_tokens(one) for one in prompts):
            return prompts
        raise invalid("prompt: expected a text, a list of tokens, or a list of these")


class ChatBody(TextBody, frozen=True, kw_only=True):
    """The fields of a chat."""

    chat: ClassVar[bool] = True

    logprobs: bool = False
    top_logprobs: _TopTokens = 0
    #: True if the text of the chat ends with the beginning of the answer.
    add_generation_prompt: bool = True
    #: Variables of the chat template, none of which has a field of its own.
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs: expected logprobs to be true")
        for name in self.chat_template_kwargs:
            if name in RESERVED:
                raise invalid(f"chat_template_kwargs: {name!r} is not a variable of its own")

    @property
    def logprob_count(self) -> int | None:
        """The number of most probable tokens that each token has beside its own probability; None for neither."""
        return self.top_logprobs if self.logprobs else None


Body = TypeVar("Body", CompletionBody, ChatBody)

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


def read_body(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """Return the fields of a body, of which those that are null count as missing.

    Whole numbers may be written as 5.0.

    Raises:
        RequestFailure: A value has a wrong type or is out of range, or a field is not implemented and would change
            something.
    """
    given = {name: value for name, value in body.items() if value is not None}
    # A selection of the best of several choices returns all of them if there are no others.
    choices = {"best_of": (1, given.get("n", 1))}
    neutral = {**_NEUTRAL, **(_NEUTRAL_CHATS if kind.chat else _NEUTRAL_COMPLETIONS), **choices}
    for name, value in given.items():
        if name not in kind.__struct_fields__ and name not in _IGNORED and not is_neutral(name, value, neutral):
            raise invalid(f"{name[:100]}: not supported")
        if isinstance(value, float) and value.is_integer():
            given[name] = int(value)
    if given.get("logprobs") is False:  # of completions, too
        del given["logprobs"]
    try:
        return read_record(kind, {"seed": secrets.randbits(32), **given})
    except InputError as error:
        message = error.message.replace(": expected a table", ": expected an object", 1)
        raise RequestFailure(Status.INVALID, message, param=re.split(r"\W", message, maxsplit=1)[0]) from error


def _is_tokens(value: Any) -> bool:
    """Return whether a value is a list of token ids, at least one."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)

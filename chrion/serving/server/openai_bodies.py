"""Bodies of the OpenAI API: completions and chat completions.

Beyond the API, ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``stop_token_ids``, ``ignore_eos``,
``add_generation_prompt`` and ``chat_template_kwargs`` are accepted, as vLLM and other servers do.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from chrion.generation import Sampling
from chrion.serving.server.chat_template import RESERVED
from chrion.serving.server.failures import invalid
from chrion.serving.server.generation_service import TextOptions
from chrion.serving.server.openai_fields import Fields, is_tokens

#: The most texts that one request may ask for.
MOST_CHOICES = 128
_MOST_STOPS = 16
#: The most probable tokens that each token may have, as in the API.
_MOST_LOGPROBS = 20
_MOST_PENALTY, _MOST_BIAS = 2, 100


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the generation in a body."""

    model: str
    max_tokens: int | None
    #: The field with the most tokens.
    limit_field: str
    #: One per choice of a prompt.
    samplings: tuple[Sampling, ...]
    options: TextOptions
    stream: bool
    #: True if a stream ends with the numbers of tokens, and true if each of its documents has them.
    usage: bool
    continuous_usage: bool
    #: True if a completion begins with its prompt.
    echo: bool = False
    #: True if the text of a chat ends with the beginning of the answer.
    add_generation_prompt: bool = True


def read_settings(body: Mapping[str, Any], *, chat: bool) -> Settings:
    """Return the settings of a body.

    Raises:
        RequestFailure: A field has a wrong type or is not implemented.
        OptionError: A number is out of range.
    """
    fields = Fields(body)
    fields.refuse_unknown(chat=chat)
    model = body.get("model")
    if not isinstance(model, str):
        raise invalid("model: expected the name of a model")
    limit_field = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    limit = fields.whole(limit_field, least=1) if fields.has(limit_field) else None
    options = _read_options(fields, limit, chat=chat)
    echo = not chat and fields.flag("echo")
    if echo and options.logprobs is not None:
        raise invalid("echo: not supported together with logprobs, which the tokens of a prompt do not have")
    streamed = fields.mapping("stream_options")
    return Settings(
        model,
        limit,
        limit_field,
        _read_samplings(fields),
        options,
        stream=fields.flag("stream"),
        usage=streamed.get("include_usage") is True,
        continuous_usage=streamed.get("continuous_usage_stats") is True,
        echo=echo,
        add_generation_prompt=not chat or fields.flag("add_generation_prompt", default=True),
    )


def read_prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a completion: texts or lists of tokens.

    Raises:
        RequestFailure: There is none, or one has another type.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str) or is_tokens(prompt):
        return [prompt]  # type: ignore[list-item] # checked
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or is_tokens(one) for one in prompt):
        return prompt
    raise invalid("prompt: expected a text, a list of tokens, or a list of these")


def read_variables(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the variables of the chat template that a body sets.

    Raises:
        RequestFailure: They are no object, or one of them has a field of its own.
    """
    variables = Fields(body).mapping("chat_template_kwargs")
    for name in variables:
        if name in RESERVED:
            raise invalid(f"chat_template_kwargs: {name!r} is not a variable of its own")
    return variables


def _read_options(fields: Fields, limit: int | None, *, chat: bool) -> TextOptions:
    least = fields.whole("min_tokens", least=0)
    if limit is not None and least > limit:
        raise invalid(f"min_tokens: expected at most {limit}, the most tokens, found {least}")
    return TextOptions(
        stop=fields.texts("stop", _MOST_STOPS),
        end_tokens=fields.tokens("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=least,
        logprobs=_read_logprobs(fields, chat=chat),
    )


def _read_logprobs(fields: Fields, *, chat: bool) -> int | None:
    """Return the number of most probable tokens that each token has beside its own probability; None for neither."""
    name = "top_logprobs" if chat else "logprobs"
    if chat and not fields.flag("logprobs"):
        if fields.has(name) and fields.whole(name):
            raise invalid("top_logprobs: expected logprobs to be true")
        return None
    if not chat and (not fields.has(name) or fields.is_false(name)):
        return None
    count = fields.whole(name, least=0)
    if count > _MOST_LOGPROBS:
        raise invalid(f"{name}: expected at most {_MOST_LOGPROBS}, found {count}")
    return count


def _read_samplings(fields: Fields) -> tuple[Sampling, ...]:
    """Return how the tokens of each choice are chosen: choices have consecutive seeds."""
    count = fields.whole("n", 1)
    if not 1 <= count <= MOST_CHOICES:
        raise invalid(f"n: expected 1 to {MOST_CHOICES}, found {count}")
    seed = fields.whole("seed", secrets.randbits(32))
    seed = seed % (1 << 64) if seed < 0 else seed  # the API has signed seeds
    penalties = {name: fields.number(name, 0.0) for name in ("frequency_penalty", "presence_penalty")}
    for name, penalty in penalties.items():
        if abs(penalty) > _MOST_PENALTY:
            raise invalid(f"{name}: expected -{_MOST_PENALTY} to {_MOST_PENALTY}, found {penalty}")
    first = Sampling(
        temperature=fields.number("temperature", 1.0),
        top_k=max(fields.whole("top_k"), 0),  # other servers write -1 for all tokens
        top_p=fields.number("top_p", 1.0) or math.ulp(0.0),  # the API allows 0: only the most probable token
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        logit_bias=_read_bias(fields),
        seed=seed,
        **penalties,
    )
    return tuple(replace(first, seed=seed + at) for at in range(count))


def _read_bias(fields: Fields) -> dict[int, float]:
    """Return the biases of tokens, whose ids are the keys of an object."""
    found = {}
    for token, value in fields.mapping("logit_bias").items():
        if not (token.isascii() and token.isdigit()) or isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid("logit_bias: expected an object of token ids with numbers")
        if not abs(value) <= _MOST_BIAS:
            raise invalid(f"logit_bias: expected -{_MOST_BIAS} to {_MOST_BIAS}, found {str(value)[:100]}")
        found[int(token[:20])] = float(value)
    return found

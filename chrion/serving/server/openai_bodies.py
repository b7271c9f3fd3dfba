"""Bodies of the OpenAI API: completions and chat completions.

Beyond the API, ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``stop_token_ids``, ``ignore_eos``,
``add_generation_prompt`` and ``chat_template_kwargs`` are accepted, as vLLM and other servers do.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chrion.generation import Sampling
from chrion.serving.server.chat_template import RESERVED
from chrion.serving.server.failures import invalid
from chrion.serving.server.generation_service import TextOptions
from chrion.serving.server.openai_fields import ChatFields, CompletionFields, is_tokens, read_fields


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the generation in a body."""

    model: str
    max_tokens: int | None
    #: The field with the maximum tokens.
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
    #: Variables of the chat template.
    template_variables: Mapping[str, Any] = field(default_factory=dict)


def read_settings(body: Mapping[str, Any], *, chat: bool) -> Settings:
    """Return the settings of a body.

    Raises:
        RequestFailure: A field has a wrong type, is out of range or is not implemented.
        OptionError: A number is out of range.
    """
    fields = read_fields(body, chat=chat)
    limit_field = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(fields, limit_field)
    if limit is not None and fields.min_tokens > limit:
        raise invalid(f"min_tokens: expected at most {limit}, the maximum of new tokens, found {fields.min_tokens}")
    echo = isinstance(fields, CompletionFields) and fields.echo
    logprobs = _read_logprobs(fields)
    if echo and logprobs is not None:
        raise invalid("echo: not supported together with logprobs, which the tokens of a prompt do not have")
    return Settings(
        fields.model,
        limit,
        limit_field,
        _read_samplings(fields),
        TextOptions(
            stop=(fields.stop,) if isinstance(fields.stop, str) else fields.stop,
            end_tokens=fields.stop_token_ids,
            ignore_eos=fields.ignore_eos,
            min_tokens=fields.min_tokens,
            logprobs=logprobs,
        ),
        stream=fields.stream,
        usage=fields.stream_options.get("include_usage") is True,
        continuous_usage=fields.stream_options.get("continuous_usage_stats") is True,
        echo=echo,
        add_generation_prompt=isinstance(fields, CompletionFields) or fields.add_generation_prompt,
        template_variables={} if isinstance(fields, CompletionFields) else _check_variables(fields),
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


def _check_variables(fields: ChatFields) -> Mapping[str, Any]:
    """Return the variables of the chat template, none of which has a field of its own."""
    for name in fields.chat_template_kwargs:
        if name in RESERVED:
            raise invalid(f"chat_template_kwargs: {name!r} is not a variable of its own")
    return fields.chat_template_kwargs


def _read_logprobs(fields: CompletionFields | ChatFields) -> int | None:
    """Return the number of most probable tokens that each token has beside its own probability; None for neither."""
    if isinstance(fields, CompletionFields):
        return fields.logprobs
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs: expected logprobs to be true")
    return fields.top_logprobs if fields.logprobs else None


def _read_samplings(fields: CompletionFields | ChatFields) -> tuple[Sampling, ...]:
    """Return how the tokens of each choice are chosen: choices have consecutive seeds."""
    if not all(token.isascii() and token.isdigit() for token in fields.logit_bias):
        raise invalid("logit_bias: expected an object of token ids with numbers")
    seed = secrets.randbits(32) if fields.seed is None else fields.seed % (1 << 64)  # the API has signed seeds
    first = Sampling(
        temperature=fields.temperature,
        top_k=max(fields.top_k, 0),  # other servers write -1 for all tokens
        top_p=fields.top_p or math.ulp(0.0),  # the API allows 0: only the most probable token
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        logit_bias={int(token[:20]): bias for token, bias in fields.logit_bias.items()},
        seed=seed,
    )
    return tuple(replace(first, seed=seed + at) for at in range(fields.n))

"""Errors of the OpenAI API, as OpenAI's client raises them: types, codes, the field at fault, and familiar words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from local_server import local_server
from served_decoders import put_decoder

#: The context length of the decoder, and the tokens that its chat template adds to a message.
CONTEXT, ADDED = 20_000, 3


def refused(client: Any, **fields: Any) -> Any:
    """Return the error of a request, by the fields of which it is a chat or a completion."""
    api = client.chat.completions if "messages" in fields else client.completions
    with pytest.raises(openai.BadRequestError) as found:
        api.create(**{"model": "llama", **fields})
    return found.value


def chat(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "w2 " * words}]


def test_prompts_that_are_too_long(client: Any) -> None:
    """Clients find the code and OpenAI's words, by which they shorten a conversation, and the number of tokens."""
    known = f"maximum context length is {CONTEXT} tokens"
    for fields, param, tokens in (
        ({"prompt": [2] * (CONTEXT + 1)}, "prompt", CONTEXT + 1),
        ({"prompt": "w2 " * (CONTEXT + 1), "stream": True}, "prompt", CONTEXT + 1),
        ({"messages": chat(CONTEXT)}, "messages", CONTEXT + ADDED),
        ({"messages": chat(CONTEXT), "stream": True}, "messages", CONTEXT + ADDED),
    ):
        error = refused(client, **fields)
        assert (error.code, error.param, error.type) == ("context_length_exceeded", param, "invalid_request_error")
        assert known in str(error)
        assert "memory" not in str(error)
        assert f"your {param} resulted in {tokens} tokens" in str(error)


def test_most_tokens_that_do_not_fit(client: Any) -> None:
    """If the prompt by itself fits, the field at fault is the one with the most tokens."""
    for field, fields in (
        ("max_tokens", {"prompt": "w2"}),
        ("max_tokens", {"messages": chat(1)}),
        ("max_completion_tokens", {"messages": chat(1)}),
    ):
        error = refused(client, **fields, **{field: CONTEXT + 1})
        assert (error.code, error.param) == ("context_length_exceeded", field)
        assert f"This model's maximum context length is {CONTEXT} tokens. However, you requested" in str(error)


def test_prompts_that_are_longer_than_the_memory(client: Any) -> None:
    """The slots for keys and values limit a request as the context length does; the message names that memory."""
    for prompt in ([2] * 2000, "w2 " * 20_000):
        error = refused(client, model="small", prompt=prompt)
        assert (error.code, error.param) == ("context_length_exceeded", "prompt")
        expected = (
            r"maximum context length is \d+ tokens on this server, whose memory for keys and values \(kv_memory\)"
        )
        assert re.search(expected, str(error))


def test_texts_that_cannot_fit_are_not_tokenised(client: Any) -> None:
    """A text with more characters than the most tokens may have is refused, since its tokens would take memory."""
    for fields, param in (({"prompt": " " * 300_000}, "prompt"), ({"messages": chat(100_000)}, "messages")):
        error = refused(client, **fields)
        assert (error.code, error.param) == ("context_length_exceeded", param)
        assert f"maximum context length is {CONTEXT} tokens. However, the prompt has" in str(error)


def test_models_that_do_not_exist(client: Any) -> None:
    """The code is that of the API."""
    for ask in (
        lambda: client.completions.create(model="none", prompt="w1"),
        lambda: client.chat.completions.create(model="none", messages=chat(1)),
        lambda: client.models.retrieve("none"),
    ):
        with pytest.raises(openai.NotFoundError) as found:
            ask()
        assert (found.value.code, found.value.param) == ("model_not_found", "model")
        assert found.value.type == "invalid_request_error"


def test_tokens_of_clients(tmp_path: Path) -> None:
    """A wrong key raises the client's error for it; a request without a key has an error of the API, too."""
    put_decoder(tmp_path, "llama")
    with local_server(tmp_path, token="secret") as server:  # noqa: S106 - a test's
        for key, right in (("secret", True), ("other", False)):
            with server.openai(key) as client:
                if right:
                    assert client.models.list().data[0].id == "llama"
                    continue
                with pytest.raises(openai.AuthenticationError, match="a valid bearer token is required") as found:
                    client.models.list()
                assert (found.value.code, found.value.type) == ("invalid_api_key", "invalid_request_error")
        status, document, _ = server.get("/v1/completions", {"model": "llama", "prompt": "w1"})
        assert (status, document["error"]["code"]) == (401, "invalid_api_key")


def test_errors_of_a_stream_that_has_begun(tmp_path: Path) -> None:
    """A text that does not begin in time is an error that the client raises while it reads."""
    put_decoder(tmp_path, "late", 'timeout = "100ms"\n[generation]\nmax_batch = 1\nkv_memory = "64MB"\n')
    with local_server(tmp_path) as server, server.openai() as own:
        given = {"model": "late", "stream": True}
        with own.completions.create(prompt=[1], max_tokens=19_000, **given) as busy:
            next(iter(busy))
            with pytest.raises(openai.APIError, match="did not begin within its timeout") as found:
                list(own.chat.completions.create(messages=chat(1), **given))
    assert found.value.type == "server_error"

"""Messages of chats, as clients of the OpenAI API send them."""

from __future__ import annotations

from typing import Any

import pytest

from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.openai_messages import read_messages

USER = {"role": "user", "content": "hi"}


def call(arguments: Any) -> dict[str, Any]:
    """Return a call of a tool as the API describes it."""
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def read(*messages: Any) -> list[dict[str, Any]]:
    return read_messages([*messages])


def test_messages_that_clients_send_back_are_accepted() -> None:
    """An answer of OpenAI's client has null for all that it lacks, as its ``model_dump`` writes it."""
    chat_types = pytest.importorskip("openai.types.chat")
    answer = chat_types.ChatCompletionMessage(
        role="assistant", content=None, tool_calls=[{**call('{"city": "Rom", "days": 2}')}]
    ).model_dump()
    assert answer["refusal"] is None
    tool = {"role": "tool", "tool_call_id": "1", "content": "42"}
    _, found, last = read(USER, answer, tool)
    assert found["content"] is None
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Rom", "days": 2}}
    assert {"refusal", "function_call", "audio"}.isdisjoint(found)
    assert last == tool


def test_a_message_with_calls_needs_no_content() -> None:
    """A content that is missing stays so."""
    (found,) = read({"role": "assistant", "tool_calls": [call("{}")]})
    assert "content" not in found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("not JSON", "not JSON"),
    ],
)
def test_arguments_of_calls(arguments: Any, expected: Any) -> None:
    """A text with an object is parsed, as vLLM does for templates that iterate over arguments; others stay."""
    (found,) = read({"role": "assistant", "content": "x", "tool_calls": [call(arguments)]})
    assert found["tool_calls"][0]["function"]["arguments"] == expected


def test_parts() -> None:
    """Texts and refusals are the parts of the API that are text."""
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, {"text": "c"}, "d"]
    assert read({"role": "assistant", "content": parts}) == [{"role": "assistant", "content": "abcd"}]
    assert read({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_a_refusal_is_the_content() -> None:
    """An answer that refused has no content, and its refusal is what the model had written."""
    found = read({"role": "assistant", "content": None, "refusal": "no"}, USER)
    assert found[0]["content"] == "no"


@pytest.mark.parametrize(
    ("message", "about"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[1].content[0]: only text parts are supported, found 'image_url'",
        ),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[1].content[0]: only text parts are supported"),
        ({"role": "user", "content": ["a", 5]}, "messages[1].content[1]: expected an object with a type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text: expected text"),
        ({"role": "user", "content": None}, "messages[1].content: expected text"),
        ({"role": "user", "tool_calls": [call("{}")]}, "messages[1].content: expected text"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[1].content: expected text"),
        ({"role": "assistant", "content": None}, "messages[1].content: expected text"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content: expected text"),
        ({"role": "assistant", "content": "", "tool_calls": 3}, "messages[1].tool_calls: expected a list"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[1].tool_calls[0]: expected an object"),
        ({"content": "a"}, "messages[1]: expected an object with a role"),
        ("a", "messages[1]: expected an object with a role"),
    ],
)
def test_wrong_messages_are_refused(message: Any, about: str) -> None:
    """The error names the message, and the part of it, that is at fault."""
    with pytest.raises(RequestFailure) as refused:
        read(USER, message)
    assert refused.value.status is Status.INVALID
    assert refused.value.message.startswith(about)

"""The messages of a chat in the OpenAI API, as chat templates render them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chrion.common.files import parse_json
from chrion.serving.server.failures import invalid

#: The types of parts of a content, with the keys of their texts.
_TEXTS = {"text": "text", "refusal": "refusal"}


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat: contents as texts, and arguments of tool calls as objects.

    A content that is null or missing, as beside tool calls, stays so. Other keys without a value are left out, since
    clients send back all keys of an answer.

    Raises:
        RequestFailure: A message has no role, has contents that are not text, or lacks one that it needs.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: expected a list with at least one message")
    return [_read_message(f"messages[{at}]", message) for at, message in enumerate(messages)]


def _read_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise invalid(f"{where}: expected an object with a role and a content")
    read = {name: value for name, value in message.items() if value is not None or name == "content"}
    if "tool_calls" in read:
        read["tool_calls"] = _read_calls(f"{where}.tool_calls", read["tool_calls"])
    content, refusal = read.get("content"), read.get("refusal")
    if isinstance(content, list):
        read["content"] = "".join(_read_part(f"{where}.content[{at}]", part) for at, part in enumerate(content))
    elif content is None and isinstance(refusal, str):
        read["content"] = refusal
    elif not isinstance(content, str) and not (content is None and _calls(read)):
        raise invalid(f"{where}.content: expected text")
    return read


def _calls(message: Mapping[str, Any]) -> bool:
    """Return whether a message calls a tool, so that it needs no content."""
    return message["role"] == "assistant" and bool(message.get("tool_calls") or message.get("function_call"))


def _read_part(where: str, part: Any) -> str:
    """Return the text of a part of a content."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise invalid(f"{where}: expected an object with a type and a text")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise invalid(f"{where}: only text parts are supported, found {str(kind)[:100]!r}")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise invalid(f"{where}.{_TEXTS[kind]}: expected text")
    return text


def _read_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return the calls of tools, with their arguments as objects, which templates iterate over."""
    if not isinstance(calls, list):
        raise invalid(f"{where}: expected a list of calls")
    read = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise invalid(f"{where}[{at}]: expected an object with a function")
        parsed = {"arguments": _parse_arguments(function["arguments"])} if "arguments" in function else {}
        read.append({**call, "function": {**function, **parsed}})
    return read


def _parse_arguments(arguments: Any) -> Any:
    """Return the object that a JSON text of arguments has; anything else stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = parse_json(arguments.encode()) if arguments.strip() else {}
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments

"""Errors of the OpenAI API."""

from __future__ import annotations

import re
from typing import Any

from chrion.errors import ContextLengthError
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.openai_bodies import TextBody

#: The name of a field at the beginning of a message, with the part of it that is at fault.
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*): ")
#: Follows the limit of a request if it is not that of the model.
_MEMORY = " on this server, whose memory for keys and values (kv_memory) has slots for no more"
_TYPES = {Status.OVERLOADED: "rate_limit_error"}
_CODES = {Status.OVERLOADED: "rate_limit_exceeded", Status.UNAUTHENTICATED: "invalid_api_key"}


def failure_document(failure: RequestFailure) -> dict[str, Any]:
    """Return the document of an error. Its ``param`` is the field that the message names at its beginning."""
    kind = _TYPES.get(failure.status, "invalid_request_error" if failure.status.http < 500 else "server_error")
    named = _FIELD.match(failure.message)
    param = failure.param or (named[1] if named and failure.status is Status.INVALID else None)
    code = failure.code or _CODES.get(failure.status)
    return {"error": {"message": failure.message, "type": kind, "param": param, "code": code}}


def too_long(error: ContextLengthError, body: TextBody) -> RequestFailure:
    """Return the failure of a request that needs more tokens than there are, in the words that clients look for."""
    field = "messages" if body.chat else "prompt"
    prompt, new = error.prompt_tokens, error.new_tokens
    if not prompt:  # it has not been tokenised
        text = f"However, {error.message}."
    elif prompt > error.limit:
        text = f"However, your {field} resulted in {prompt} tokens. Please reduce the length of the {field}."
    else:
        text = (
            f"However, you requested {prompt + new} tokens ({prompt} in the {field}, {new} in the completion). "
            f"Please reduce the length of the {field} or completion."
        )
        field = body.limit_field
    memory = _MEMORY if error.memory else ""
    text = f"This model's maximum context length is {error.limit} tokens{memory}. {text}"
    return RequestFailure(Status.INVALID, text, param=field, code="context_length_exceeded")

"""Failures of requests, with the status that each protocol has for them, and texts without this machine's folders."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from chrion.common.units import format_mb, format_ms
from chrion.serving.manager import ManagedModel, Reason


class Status(Enum):
    """Kinds of failure: the HTTP status and the name of the gRPC status."""

    INVALID = (400, "INVALID_ARGUMENT")
    UNAUTHENTICATED = (401, "UNAUTHENTICATED")
    FORBIDDEN = (403, "PERMISSION_DENIED")
    NOT_FOUND = (404, "NOT_FOUND")
    NOT_ALLOWED = (405, "UNIMPLEMENTED")
    TIMED_OUT = (408, "DEADLINE_EXCEEDED")
    TOO_LARGE = (413, "RESOURCE_EXHAUSTED")
    MEDIA_TYPE = (415, "INVALID_ARGUMENT")
    CANCELLED = (499, "CANCELLED")
    OVERLOADED = (429, "RESOURCE_EXHAUSTED")
    INTERNAL = (500, "INTERNAL")
    UNSUPPORTED = (501, "UNIMPLEMENTED")
    UNAVAILABLE = (503, "UNAVAILABLE")
    EXPIRED = (504, "DEADLINE_EXCEEDED")

    @property
    def http(self) -> int:
        """HTTP status."""
        return self.value[0]

    @property
    def grpc(self) -> str:
        """Name of the gRPC status."""
        return self.value[1]


class RequestFailure(Exception):  # noqa: N818 - a failure of one request, not of the server
    """A request that is answered with an error.

    Attributes:
        status: The kind of failure.
        message: The text for the client.
        retry_s: Time after which the client should try again; None for no such time.
        param: The field at fault, in the OpenAI API; empty if the message begins with it.
        code: The code of the OpenAI API; empty for the one that the status has.
    """

    def __init__(
        self, status: Status, message: str, *, retry_s: float | None = None, param: str = "", code: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_s = retry_s
        self.param = param
        self.code = code


class ModelRemoved(RequestFailure):
    """A request whose model was removed, or replaced, before the request could start."""


def require_token(token: str, given: bytes) -> None:
    """Raise a failure unless a request has the bearer token of the server, if that has one.

    Args:
        token: The token; empty for none.
        given: The value of the header ``Authorization``.
    """
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise RequestFailure(Status.UNAUTHENTICATED, "a valid bearer token is required")


def invalid(message: str) -> RequestFailure:
    """Return the failure of a request that contradicts the protocol or the model."""
    return RequestFailure(Status.INVALID, message)


_REASONS = {
    Reason.QUEUE_FULL: Status.OVERLOADED,
    Reason.NO_TIME: Status.OVERLOADED,
    Reason.EXPIRED: Status.EXPIRED,
    Reason.LOAD_FAILED: Status.UNAVAILABLE,
    Reason.TOO_LARGE: Status.UNAVAILABLE,
    Reason.REMOVED: Status.UNAVAILABLE,
}


def describe_need(model: ManagedModel, budgets: Mapping[str, int]) -> str:
    """Return, in words, the memory of a model that does not fit, and the budgets.

    Args:
        model: The model.
        budgets: Bytes of memory for models by device.
    """
    needs = {device: model.variants[-1].bytes.get(device, 0) for device in budgets}
    shares = [
        f"{format_mb(need / 1e6)} of {format_mb(budgets[device] / 1e6)} of {device} memory"
        for device, need in needs.items()
    ]
    rest = ", part of which pinned models take" if all(needs[d] <= budgets[d] for d in needs) else ""
    return f"it needs {' and '.join(shares)}{rest}"


def describe_delay(expected_ms: float, objective_ms: float) -> str:
    """Return, in words, why a request is not expected to meet its latency objective.

    Args:
        expected_ms: The model's expected latency, if that alone exceeds the objective; else 0.
        objective_ms: The objective.
    """
    if not expected_ms:
        return "requests before it, or a load of the model, take too long"
    return f"the model itself takes too long: expected {format_ms(expected_ms)}, objective {format_ms(objective_ms)}"


def refusal(model: str, reason: Reason, retry_ms: float, detail: str = "") -> RequestFailure:
    """Return the failure of a request that the manager refused."""
    text = f"model {model!r}: {reason.value}" + (f": {without_folders(detail)}" if detail else "")
    kind = ModelRemoved if reason is Reason.REMOVED else RequestFailure
    return kind(_REASONS[reason], text, retry_s=retry_ms / 1000 if retry_ms > 0 else None)


#: The beginning of an absolute path, which does not follow a part of a relative path or of a URL.
_BEGINNING = re.compile(r"(?<![\w.:/\\~-])(?:[A-Za-z]:)?[/\\](?=\w)")
_SEPARATOR = re.compile(r"[/\\]")


def without_folders(text: str) -> str:
    """Return a reason with file names in the place of absolute paths.

    Only folders that exist are removed: names of nodes have the form of paths, too. Therefore the text must not contain
    what a client has sent, which could find out so which folders exist.
    """
    parts, at = [], 0
    for match in _BEGINNING.finditer(text):
        if match.start() >= at:
            parts.append(text[at : match.start()])
            at = _end_of_folders(text, match.start(), match.end())
    return "".join(parts) + text[at:]


def _end_of_folders(text: str, start: int, first: int) -> int:
    """Return where the name begins that follows the existing folders of a path; its start if there are none.

    Args:
        text: The text.
        start: The start of the path.
        first: The start of the first name in the path.
    """
    end = start
    for separator in _SEPARATOR.finditer(text, first):
        if not _is_folder(text[start : separator.start()]):
            break
        end = separator.end()
    return end


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a character that no path has
        return False

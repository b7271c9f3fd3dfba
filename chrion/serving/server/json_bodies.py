"""Bounded parsing of JSON bodies.

A parser in C holds the GIL, and with it the event loop, as long as it parses, whatever thread it runs in. So no call
gets more than a small document. The numbers of tensors, which are what makes honest bodies large, are cut out of a body
and become arrays piece by piece (:mod:`chrion.serving.server.number_text`); what remains of it has few values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from chrion.common.files import parse_json
from chrion.serving.server.failures import RequestFailure, Status, invalid
from chrion.serving.server.number_text import NumberText

Take = Callable[[int], None]
Kind = TypeVar("Kind", bool, str, list[Any], dict[str, Any])

#: The kinds of values in words.
_KINDS: dict[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "an object"}

#: Limits of a document without numbers of tensors, bytes, values, and lists and objects among them, which
#: one call of the parser takes with the GIL held.
_MAX_BYTES, _MAX_VALUES, _MAX_CONTAINERS = 1 << 22, 1 << 17, 1 << 15
#: Limit of the text of these numbers, which keeps a thread busy for seconds.
_MAX_NUMBER_BYTES = 1 << 26
#: Documents below this size are parsed as a whole (a choice, not measured).
_SMALL = 1 << 16
#: Number lists below this size stay in their document (a choice, not measured).
_SHORT = 1 << 10
#: Bytes of a value beside its text, and more of a list and of an object, by ``sys.getsizeof`` of CPython with the
#: entry in the container.
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES = 64, 32, 170
#: Bytes of a character of text that is not ASCII: CPython stores up to four.
_CHARACTER_BYTES = 4
#: Bytes that are searched in one call, which holds the GIL, and those that the next call searches again, more than a
#: key has.
_WINDOW, _OVERLAP = 1 << 18, 64
#: The beginning of a tensor's data. In a text its quotes would be escaped: the second one does not match, and before
#: the first one is a backslash, which is looked for afterwards: the search for a fixed beginning is ten times as fast.
_DATA = re.compile(rb'"data"\s{0,8}:\s{0,8}(?=\[)')
_NO_NUMBER = re.compile(rb'["{}]')
_BACKSLASH = ord("\\")
_HINT = "send large tensors as binary data"


def parse_body(document: bytes | memoryview, take: Take, name: str = "the body") -> Any:
    """Return the data of a JSON document.

    Args:
        document: The document.
        take: Takes a bound on the memory of its values, in bytes.
        name: The name of the document in messages.

    Raises:
        RequestFailure: It is too large, or not JSON.
    """
    if len(document) > _MAX_BYTES:
        text = f"{name} has {len(document)} bytes of JSON beside the numbers of tensors, more than {_MAX_BYTES}"
        raise RequestFailure(Status.TOO_LARGE, f"{text}: {_HINT}")
    content = bytes(document)
    take(json_bytes(content, name))
    return _parse(content, name)


def parse_tensors(document: memoryview, take: Take, name: str = "the body") -> Any:
    """Return the data of a JSON document whose tensors may have any number of numbers.

    Args:
        document: The document.
        take: As in :func:`parse_body`; also called for the arrays of tensors when they are read.
        name: The name of the document in messages.

    Returns:
        The data, in which long lists below a key ``data`` without strings and objects are a :class:`NumberText`.

    Raises:
        RequestFailure: It is too large, or not JSON.
    """
    if len(document) <= _SMALL:
        return parse_body(document, take, name)
    spans = list(_number_lists(document))
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(document)]
    size = sum(end - start for start, end in spans)
    if size > _MAX_NUMBER_BYTES:
        text = f"{name} has {size} bytes of numbers in JSON, more than {_MAX_NUMBER_BYTES}"
        raise RequestFailure(Status.TOO_LARGE, f"{text}: {_HINT}")
    if not spans or len(document) - size > _MAX_BYTES:
        return parse_body(document[: len(document) - size], take, name)
    parts = [bytes(document[start:end]) for start, end in zip(starts, ends, strict=True)]
    if any(word in part for word in (b"NaN", b"Infinity") for part in parts):
        return parse_body(document, take, name)  # the parser could not tell these from the placeholders
    # The parser calls a function for each constant that JSON does not have, in the order of the text.
    texts = (document[start:end] for start, end in spans)
    numbers = iter([NumberText(text, take, partial(parse_body, text, take, "data")) for text in texts])
    content = b"NaN".join(parts)
    take(json_bytes(content, name))
    return _parse(content, name, lambda _: next(numbers))


def typed(kind: type[Kind], value: Any, name: str) -> Kind:
    """Return a value of JSON that must be of a kind.

    Raises:
        RequestFailure: It is of another one.
    """
    if type(value) is not kind:
        raise invalid(f"{name}: expected {_KINDS[kind]}")
    return value


def json_bytes(document: bytes, name: str = "the body") -> int:
    """Return a bound on the memory of the values in a JSON document.

    Each value but the first follows a bracket, a comma or a colon. Those in texts are counted, too.

    Raises:
        RequestFailure: It may have too many values.
    """
    objects, lists = document.count(b"{"), document.count(b"[")
    values = 1 + objects + lists + document.count(b",") + document.count(b":")
    if values > _MAX_VALUES or objects + lists > _MAX_CONTAINERS:
        counts = f"{values} values of JSON, {objects + lists} of them lists and objects"
        limits = f"more than {_MAX_VALUES}, or {_MAX_CONTAINERS} of them"
        raise RequestFailure(Status.TOO_LARGE, f"{name} may have {counts}, {limits}: {_HINT}")
    width = 1 if document.isascii() and b"\\" not in document else _CHARACTER_BYTES
    return width * len(document) + _VALUE_BYTES * values + _LIST_BYTES * lists + _OBJECT_BYTES * objects


def _parse(content: bytes, name: str, constant: Callable[[str], Any] | None = None) -> Any:
    try:
        return parse_json(content, constant)
    except ValueError as error:
        raise invalid(f"{name} is not JSON: {error}") from error


def _number_lists(document: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each long list of numbers below a key ``data``."""
    at = others = 0
    while (match := _search(_DATA, document, at)) and others <= _MAX_BYTES:
        start = match.end()
        end = start
        if document[match.start() - 1] != _BACKSLASH:
            stop = _search(_NO_NUMBER, document, start)
            end = _list_end(document, start, stop.start() if stop else len(document))
        others += (start if end - start > _SHORT else end) - at
        if end - start > _SHORT:
            yield start, end
        at = end


def _list_end(document: memoryview, start: int, stop: int) -> int:
    """Return the end of the list before the next key or the end of the object; ``start`` without one."""
    tail = bytes(document[max(start, stop - _OVERLAP) : stop]).rstrip().removesuffix(b",").rstrip()
    return max(start, stop - _OVERLAP) + len(tail) if tail.endswith(b"]") else start


def _search(pattern: re.Pattern[bytes], document: memoryview, at: int) -> re.Match[bytes] | None:
    """Search a document from a position on, in several calls."""
    while at < len(document):
        if match := pattern.search(document, at, at + _WINDOW):
            return match
        at += _WINDOW - _OVERLAP
    return None

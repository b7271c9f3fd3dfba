"""Hypothesis strategies that damage valid requests: JSON documents, protobuf messages, and bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_LARGEST = 2**63 - 1
#: Numbers at the limits of types and sizes.
_INTEGERS = st.sampled_from([0, 1, -1, 2, 3, 2**31 - 1, 2**31, -(2**31), 2**32, _LARGEST, -_LARGEST - 1, 2**64])
_TEXTS = st.sampled_from(
    ["", "x", "y", "FP32", "INT64", "BYTES", "BF16", "\0", "\n", "é\u2028", "../../etc", "x" * 500]
)
_LEAVES = st.none() | st.booleans() | _INTEGERS | st.floats() | _TEXTS
_VALUES = _LEAVES | st.lists(_LEAVES, max_size=3) | st.dictionaries(_TEXTS, _LEAVES, max_size=2)


@st.composite
def damaged_json(draw: st.DrawFn, valid: Any, most: int = 3) -> Any:
    """Draw a document in which a few values are replaced, removed, repeated or added."""
    document = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, most))):
        places = list(_containers(document))
        container = draw(st.sampled_from(places)) if places else None
        if isinstance(container, dict):
            _damage_object(draw, container)
        elif container is not None:
            _damage_list(draw, container)
    return document


def _containers(value: Any) -> Iterator[Any]:
    """Yield the objects and lists of a document."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


def _damage_object(draw: st.DrawFn, content: dict[str, Any]) -> None:
    key = draw(st.sampled_from([*content, "parameters", "extra"]))
    if draw(st.booleans()):
        content[key] = draw(_VALUES)
    else:
        content.pop(key, None)


def _damage_list(draw: st.DrawFn, content: list[Any]) -> None:
    at = draw(st.integers(0, len(content)))
    if content and draw(st.booleans()):
        del content[at - 1]
    else:
        content.insert(at, copy.deepcopy(content[at - 1]) if content and draw(st.booleans()) else draw(_VALUES))


@st.composite
def damaged_bytes(draw: st.DrawFn, valid: bytes, most: int = 3) -> bytes:
    """Draw bytes of which a few are changed, and of which the end is cut off or repeated."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(0, most)) if content else 0):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    kept = draw(st.just(len(content)) | st.integers(0, len(content)))
    return bytes(content[:kept]) + draw(st.just(b"") | st.binary(max_size=8))


@st.composite
def damaged_message(draw: st.DrawFn, valid: Message, most: int = 3) -> bytes:
    """Draw a serialised message in which a few fields are changed, and now and then some bytes."""
    found = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, most))):
        _damage_message(draw, found)
    content = found.SerializeToString()
    return draw(st.just(content) | damaged_bytes(content))


def _damage_message(draw: st.DrawFn, found: Any) -> None:
    field = draw(st.sampled_from([*found.DESCRIPTOR.fields]))
    value = getattr(found, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _damage_message(draw, value[draw(st.sampled_from(["timeout", "binary_data_size", "id", ""]))])
    elif field.message_type is None:
        if isinstance(value, str | bytes | int | float):
            setattr(found, field.name, draw(_scalars(field)))
        elif value and draw(st.booleans()):
            del value[draw(st.integers(0, len(value) - 1)) :]
        else:
            value.extend(draw(st.lists(_scalars(field), max_size=4)))
    elif isinstance(value, Message):
        _damage_message(draw, value)
    elif value and draw(st.booleans()):
        _damage_message(draw, value[draw(st.integers(0, len(value) - 1))])
    elif value and draw(st.booleans()):
        del value[-1]
    else:
        value.add().CopyFrom(value[0]) if value else value.add()


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    """Return values of a field."""
    kinds = {
        FieldDescriptor.CPPTYPE_STRING: _TEXTS,
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
        FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
        FieldDescriptor.CPPTYPE_INT32: _INTEGERS.filter(lambda n: -(2**31) <= n < 2**31),
        FieldDescriptor.CPPTYPE_UINT32: _INTEGERS.filter(lambda n: 0 <= n < 2**32),
        FieldDescriptor.CPPTYPE_INT64: _INTEGERS.filter(lambda n: -(2**63) <= n < 2**63),
        FieldDescriptor.CPPTYPE_UINT64: _INTEGERS.filter(lambda n: 0 <= n < 2**64),
    }
    return st.binary(max_size=20) if field.type == FieldDescriptor.TYPE_BYTES else kinds[field.cpp_type]

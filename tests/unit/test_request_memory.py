"""The memory of requests: bounds on what is parsed of a body."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.json_bodies import json_bytes

MANY = 5_000


@pytest.mark.parametrize(
    "values",
    [
        "[]",
        "[1]",
        "{}",
        '{"a":1}',
        '{"a":{"b":{}}}',
        '{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}',
        "1",
        "1.5",
        "1000",
        '"ab"',
    ],
)
def test_the_bound_of_many_small_values(values: str) -> None:
    """Python needs no more memory than counted for a list of values, each an object of its own."""
    check(f"[{','.join([values] * MANY)}]")


@pytest.mark.parametrize(
    "document",
    [
        "[" * 900 + "]" * 900,
        json.dumps([str(at) for at in range(MANY)]),
        json.dumps({str(at): at + 1000 for at in range(MANY)}),
        json.dumps("a" * MANY),
        json.dumps("a" * MANY + "\N{GRINNING FACE}", ensure_ascii=False),
        json.dumps("a" * MANY + "\N{GRINNING FACE}"),
        json.dumps("\N{CJK UNIFIED IDEOGRAPH-4E2D}" * MANY, ensure_ascii=False),
    ],
    ids=lambda document: document[:20],
)
def test_the_bound_of_other_documents(document: str) -> None:
    """Lists in lists, texts, keys, and characters of several bytes are within the bound."""
    check(document)


def check(document: str) -> None:
    """Assert that the values of a document fit in the bound."""
    tracemalloc.start()
    try:
        kept = json.loads(document)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept or kept == {}
    assert used <= json_bytes(document.encode()) + 1000


def test_documents_of_too_many_values_are_refused() -> None:
    """Their parser would block the server for seconds."""
    with pytest.raises(RequestFailure, match="may have 5000001 values of JSON") as refused:
        json_bytes(b"[" + b"1," * 4_999_999 + b"1]")
    assert refused.value.status is Status.TOO_LARGE

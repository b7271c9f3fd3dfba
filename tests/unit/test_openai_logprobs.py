"""Probabilities of tokens in answers of the OpenAI API: with which text each token is returned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from chrion.generation import Token
from chrion.serving.server.openai_logprobs import TokenLog


class Pieces:
    """The bytes of tokens, given by the test; tokens from 100 on are special."""

    def __init__(self, known: Mapping[int, bytes]) -> None:
        self.known = known
        self.special = {token: "<e>" for token in known if token >= 100}

    def of(self, token: int) -> bytes:
        return self.known[token]


KNOWN = {0: b"a", 1: b"b\xc3", 2: b"\xa9", 3: b"\x98", 4: b"\x80", 5: b"c", 100: b"<e>"}


def log(*, chat: bool = False) -> TokenLog:
    pieces: Any = Pieces(KNOWN)
    return TokenLog(pieces, chat=chat)


def ids(entries: list[Any]) -> list[Any]:
    return [(entry.token.id, entry.offset) for entry in entries]


def test_tokens_are_returned_with_the_text_in_which_they_begin() -> None:
    """A token whose text is held back waits; one in the middle of a character counts as its beginning."""
    kept = log()
    assert ids(kept.add(Token(0, "a", -0.5))) == [(0, 0)]
    assert ids(kept.add(Token(1, "", -0.5))) == []
    assert ids(kept.add(Token(2, "bé", -0.5))) == [(1, 1), (2, 2)]
    assert ids(kept.add(Token(5, "", -0.5))) == []
    assert ids(kept.add(Token(None, "c"))) == [(5, 3)]
    assert kept.finish("stop") == []


def test_tokens_of_a_stop_string_are_left_out() -> None:
    """They are not part of the text, unlike special tokens, and unlike those of a text that has its most tokens."""
    for reason, expected in (("stop", [(100, 1)]), ("length", [(100, 1), (5, 1)])):
        kept = log()
        kept.add(Token(0, "a", -0.5))
        kept.add(Token(100, "", -0.5))
        kept.add(Token(5, "", -0.5))
        assert ids(kept.finish(reason)) == expected


def test_a_character_that_the_prompt_began_counts_once() -> None:
    """Its bytes at the beginning have no place of their own."""
    kept = log()
    found = [entry for token, text in ((3, ""), (4, "x"), (0, "a")) for entry in kept.add(Token(token, text, -0.5))]
    assert ids(found) == [(3, 0), (4, 0), (0, 1)]


def test_the_documents_of_the_api() -> None:
    """Parts of characters are bytes, special tokens have none, and the logarithm of zero is a number of JSON."""
    token = Token(1, "b", -0.5, ((5, -0.25), (1, -0.5), (100, -math.inf)))
    completion = log()
    assert completion.document(completion.add(token)) == {
        "tokens": ["bytes:\\x62\\xc3"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"c": -0.25, "bytes:\\x62\\xc3": -0.5, "<e>": -9999.0}],
        "text_offset": [0],
    }
    chat = log(chat=True)
    (content,) = (chat.document(chat.add(token)) or {})["content"]
    assert content == {
        "token": "\\x62\\xc3",
        "logprob": -0.5,
        "bytes": [0x62, 0xC3],
        "top_logprobs": [
            {"token": "c", "logprob": -0.25, "bytes": [0x63]},
            {"token": "\\x62\\xc3", "logprob": -0.5, "bytes": [0x62, 0xC3]},
            {"token": "<e>", "logprob": -9999.0, "bytes": None},
        ],
    }


@pytest.mark.parametrize("chat", [True, False])
def test_no_tokens_are_no_document(chat: bool) -> None:  # noqa: FBT001
    """A piece of text without a token of its own has none."""
    assert log(chat=chat).document([]) is None

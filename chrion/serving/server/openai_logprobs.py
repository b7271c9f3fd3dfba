"""Log probabilities of tokens in the OpenAI API: of completions (``logprobs``) and of chats (``top_logprobs``).

A token is returned with the text in which it begins. Tokens of a stop string are not part of the text and are left out.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chrion.generation import Token
from chrion.generation.token_bytes import TokenBytes

#: What the API has for the logarithm of zero.
_MIN_LOGPROB = -9999.0
#: Bytes that continue a character.
_CONTINUATION = bytes(range(0x80, 0xC0))


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token of a choice."""

    token: Token
    #: The bytes that it adds to the text; none for a special token.
    data: bytes
    #: The number of characters of the text before it.
    offset: int


class _CharacterCounter:
    """Counts the characters of a text of which the bytes are known, with a replacement for each damaged one."""

    def __init__(self) -> None:
        self._count = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = self._continues = False

    def add(self, data: bytes) -> int:
        """Add the bytes of a token; return the number of characters before that in which it begins.

        Bytes that continue a character, at the beginning of all, are of the last character of the prompt.
        """
        rest = data if self._begun else data.lstrip(_CONTINUATION)
        first = len(rest) < len(data)
        self._continues |= first
        if rest and not self._begun:
            self._begun = True
            self._count = int(self._continues)
        before = 0 if first else self._count
        self._count += len(self._decoder.decode(rest))
        return before


class TokenLog:
    """The tokens of one choice, in the order in which they are returned.

    Args:
        pieces: The bytes of tokens.
        chat: Whether the choice is one of a chat.
    """

    def __init__(self, pieces: TokenBytes, *, chat: bool) -> None:
        self._pieces, self._chat = pieces, chat
        self._counter = _CharacterCounter()
        self._released = 0
        self._waiting: deque[LogprobEntry] = deque()

    def add(self, token: Token) -> list[LogprobEntry]:
        """Add a token, or text that was held back; return the tokens that begin in the text so far."""
        if token.id is not None:
            data = b"" if token.id in self._pieces.special else self._pieces.of(token.id)
            self._waiting.append(LogprobEntry(token, data, self._counter.add(data)))
        self._released += len(token.text)
        entries = []
        while self._waiting and self._waiting[0].offset < self._released:
            entries.append(self._waiting.popleft())
        return entries

    def finish(self, reason: str) -> list[LogprobEntry]:
        """Return the last tokens at the end of the choice."""
        entries = [entry for entry in self._waiting if reason == "length" or not entry.data]
        self._waiting.clear()
        return entries

    def document(self, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        """Return tokens as the API has them; None for no tokens."""
        if not entries:
            return None
        if self._chat:
            return {"content": [self._content(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._name(entry.token.id) for entry in entries],
            "token_logprobs": [_limited(entry.token.logprob) for entry in entries],
            "top_logprobs": [self._by_name(entry.token) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _content(self, entry: LogprobEntry) -> dict[str, Any]:
        top = [self._described(token, logprob) for token, logprob in entry.token.top]
        return {**self._described(entry.token.id, entry.token.logprob), "top_logprobs": top}

    def _described(self, token: int | None, logprob: float | None) -> dict[str, Any]:
        special = token in self._pieces.special
        data = None if special or token is None else [*self._pieces.of(token)]
        return {"token": self._name(token), "logprob": _limited(logprob), "bytes": data}

    def _by_name(self, token: Token) -> dict[str, float]:
        """Return the most probable tokens by their names; the one that was chosen is always among them."""
        return {self._name(number): _limited(logprob) for number, logprob in (*token.top, (token.id, token.logprob))}

    def _name(self, token: int | None) -> str:
        """Return the text of a token, or its bytes if they are a part of a character."""
        data = b"" if token is None else self._pieces.of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return ("" if self._chat else "bytes:") + "".join(f"\\x{byte:02x}" for byte in data)


def _limited(logprob: float | None) -> float:
    return _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)

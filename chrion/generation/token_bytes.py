"""The bytes that single tokens add to a text, also if they are a part of a character."""

from __future__ import annotations

import json
import re
from typing import Any

from chrion.generation.special_tokens import special_tokens
from chrion.generation.text import INCOMPLETE

#: A token of one byte, in vocabularies of SentencePiece.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: The first tokens of a vocabulary, which are tried as the token before others.
_CANDIDATES = 1000


def byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that stand for them in vocabularies of byte-level BPE, as GPT-2 defines them.

    A byte that is a printable character of Latin-1 stands for itself, and the others for those from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class TokenBytes:
    """The bytes of tokens in the middle of a text: those of a word begin with its space.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        #: The special tokens, which texts omit.
        self.special = {number: text for text, number in special_tokens(tokenizer).items()}
        kinds = _decoder_kinds(tokenizer)
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds
        self._before = self._find_before()
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; those of a special token are its name."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        if token in self.special:
            return str(self.special[token]).encode()
        piece = str(self._tokenizer.id_to_token(token) or "")
        if self._alphabet and all(character in self._alphabet for character in piece):
            return bytes(self._alphabet[character] for character in piece)
        if self._has_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return self._decode([*self._before, token])[len(self._decode(self._before)) :].encode()

    def _find_before(self) -> list[int]:
        """Return a token to decode before others, since decoders strip the space at the beginning of a text."""
        for token in range(_CANDIDATES):
            text = self._decode([token])
            usual = token not in self.special and text.strip() and INCOMPLETE not in text
            if usual and self._decode([token, token]).startswith(text):
                return [token]
        return []

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Return the types of a tokenizer's decoder, and of the parts of a sequence of them."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part.get("type", "") for part in (state, *state.get("decoders", ()))}

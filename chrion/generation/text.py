"""Text: the tokenizer of a model, and text that grows token by token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chrion.common.installation import install_hint
from chrion.errors import ModelError, OptionError
from chrion.generation.rewrites.model_folder import find_beside

#: What a decoder of bytes writes for a character of which bytes are missing.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
#: The most bytes of a character.
_BYTES = 4
#: Tokens of a prompt that are enough for the decoding of the next one.
_CONTEXT = 8
#: Tokens after which an incomplete character is not awaited any longer: the bytes are damaged.
_MOST_PENDING = 16


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a ``tokenizer.json``.

    Raises:
        ModelError: The file does not exist or is damaged.
        OptionError: The library ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise OptionError("text needs the library tokenizers", hint=install_hint("text")) from error
    if not Path(path).is_file():
        raise ModelError(f"{path}: no such tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path}: not a tokenizer: {error}") from error
    # A file that was saved during training may have both, which would change prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_tokenizer(model: Path) -> Path | None:
    """Return the ``tokenizer.json`` beside a model, if there is one."""
    return find_beside(model, "tokenizer.json")


class TextBuilder:
    """The text of a stream, in pieces that never change afterwards.

    A piece ends before an incomplete character and before what may be the beginning of a stop string. Each token is
    decoded after the few tokens before it, so that a stream takes time in proportion to its tokens, and the text
    continues that of the prompt: decoders strip the space at the beginning of what they decode.

    Args:
        tokenizer: The tokenizer.
        stop: Strings that end the text and are not part of it.
        prompt: The tokens that the text continues.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._ids = self._end_of(prompt)
        # The text of the tokens before _read is known. Decoding begins at _prefix, where no character is cut.
        self._prefix, self._read = 0, len(self._ids)
        self._held = ""
        #: True if a stop string has been found.
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        if self.stopped:
            return ""
        self._ids.append(token)
        self._held += self._grow(final=len(self._ids) - self._read >= _MOST_PENDING)
        return self._release(self._uncertain)

    def finish(self) -> str:
        """Return the text that was held back, at the end of a stream."""
        if self.stopped:
            return ""
        self._held += self._grow(final=True)
        return self._release(lambda: 0)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt, from the beginning of a character.

        The last tokens may begin a character. A decoder may then write all bytes before them as damaged ones, too.
        """
        ends = [[*prompt[-count:]] for count in range(_CONTEXT, _CONTEXT + _BYTES)]
        for cut, ids in itertools.product(range(_BYTES), ends):
            text = self._decode(ids[: len(ids) - cut])
            if not text.startswith(INCOMPLETE) and not text.endswith(INCOMPLETE):
                return ids
        return next((ids for ids in ends if not self._decode(ids).startswith(INCOMPLETE)), ends[-1])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _grow(self, *, final: bool) -> str:
        """Return the text of the tokens since ``_read``; nothing if it is incomplete and not final."""
        known = self._ids[self._prefix : self._read]
        before = self._decode(known)
        now = self._decode(self._ids[self._prefix :])
        whole = now.startswith(before)
        if not whole:  # a character is complete that the prompt began
            before = self._whole_characters(known, now)
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not final):
            if final:
                del self._ids[self._read :]  # they have no text
            return ""
        if whole:
            self._prefix = self._read
        self._read = len(self._ids)
        return now[len(before) :]

    def _whole_characters(self, ids: Sequence[int], now: str) -> str:
        """Return the text of tokens without a character that they begin, as the text with its other bytes begins."""
        cut = (self._decode(ids[: len(ids) - count]).rstrip(INCOMPLETE) for count in range(_BYTES))
        return max((text for text in cut if now.startswith(text)), key=len, default="")

    def _release(self, uncertain: Callable[[], int]) -> str:
        """Return the text up to a stop string, or all but the characters at the end that are uncertain."""
        stops = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        self.stopped = bool(stops)
        end = min(stops) if stops else len(self._held) - uncertain()
        piece, self._held = self._held[:end], self._held[end:]
        return piece

    def _uncertain(self) -> int:
        """Return how many characters at the end may belong to a stop string."""
        lengths = (
            length
            for stop in self._stop
            for length in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:length])
        )
        return max(lengths, default=0)

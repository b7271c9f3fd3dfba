"""Text: the tokenizer of a model, and text that grows token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chrion.errors import ModelError, OptionError

#: What a decoder of bytes writes for a character of which bytes are missing.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a ``tokenizer.json``.

    Raises:
        ModelError: The file does not exist or is damaged.
        OptionError: The library ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise OptionError("text needs the library tokenizers", hint="pip install 'chrion[text]'") from error
    if not Path(path).is_file():
        raise ModelError(f"{path}: no such tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path}: not a tokenizer: {error}") from error


def find_tokenizer(model: Path) -> Path | None:
    """Return the ``tokenizer.json`` beside a model, if there is one."""
    found = model.parent / "tokenizer.json"
    return found if found.is_file() else None


class TextBuilder:
    """The text of a stream, in pieces that never change afterwards.

    A piece ends before an incomplete character and before what may be the beginning of a stop string.

    Args:
        tokenizer: The tokenizer.
        stop: Strings that end the text and are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._ids: list[int] = []
        self._given = 0
        #: The text so far, without a stop string.
        self.text = ""
        #: True if a stop string has been found.
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._give(text[: min(found)])
        return self._give(text[: len(text) - self._uncertain(text)])

    def finish(self) -> str:
        """Return the text that was held back, at the end of a stream."""
        if self.stopped:
            return ""
        return self._give(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        self.text += piece
        return piece

    def _uncertain(self, text: str) -> int:
        """Return how many characters at the end may still change or belong to a stop string."""
        held = len(text) - len(text.rstrip(_INCOMPLETE))
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:length]):
                    held = length
                    break
        return held


def find_stop_tokens(model: Path) -> frozenset[int]:
    """Return the tokens that end a text, from the configuration beside a model that transformers writes."""
    for name in ("generation_config.json", "config.json"):
        path = model.parent / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path}: not JSON: {error}") from error
        found = content.get("eos_token_id") if isinstance(content, dict) else None
        if found is not None:
            return frozenset(int(token) for token in (found if isinstance(found, list) else [found]))
    return frozenset()

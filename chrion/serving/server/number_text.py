"""Numbers of tensors in JSON, which become arrays piece by piece.

The parser of the standard library holds the GIL for a whole call. Pieces of a list are short enough that other threads
wait for a few milliseconds only, and their objects are freed before the next piece is read: a list takes the memory of
its text and its array.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

#: Bytes of text that are parsed in one call, and that are searched in one call: each call holds the
#: GIL.
_PIECE, _WINDOW = 1 << 15, 1 << 18
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
#: Maximum depth of a nested list, the maximum number of dimensions in numpy.
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class NumberText:
    """A list of numbers that has not been parsed, or another text without strings and objects.

    Attributes:
        text: The text.
        take: Takes the memory of what the text becomes, in bytes; raises RequestFailure.
        parse: Returns the data of the text if it is a small list; raises RequestFailure otherwise.
    """

    text: memoryview
    take: Callable[[int], None]
    parse: Callable[[], Any]

    def count(self) -> int:
        """Return the number of elements of a list that has any."""
        return 1 + sum(bytes(self.text[at : at + _WINDOW]).count(b",") for at in range(0, len(self.text), _WINDOW))

    def read(
        self, shape: Sequence[int], elements: int, dtype: np.dtype[Any], convert: Callable[[list[Any]], Any]
    ) -> npt.NDArray[Any] | None:
        """Return the numbers of a list that is flat, or nested like the shape.

        Args:
            shape: The shape.
            elements: The number of its elements.
            dtype: The type of the array.
            convert: Returns an array of some elements; raises RequestFailure if they do not fit.

        Returns:
            A flat array; None if the text is another list, or no JSON.

        Raises:
            RequestFailure: As ``take`` and ``convert`` raise it.
        """
        levels = self._levels(shape, elements)
        if not levels:
            return None
        self.take(elements * dtype.itemsize)
        numbers = np.empty(elements, dtype)
        at = depth = 0
        for piece in self._pieces():
            self.take(0)  # raises if the request has ended
            end = depth + piece.count("[") - piece.count("]")
            if not 0 <= end <= levels:
                return None
            try:
                values = json.loads("[" * depth + piece + "]" * end)
                for _ in range(levels - 1):
                    values = list(itertools.chain.from_iterable(values))
            except (TypeError, ValueError):
                return None
            numbers[at : at + len(values)] = convert(values)
            at, depth = at + len(values), end
        return numbers

    def _levels(self, shape: Sequence[int], elements: int) -> int:
        """Return the depth of the list: 1 if it is flat, or that of the shape; 0 for every other list."""
        windows = (bytes(self.text[at : at + _WINDOW]) for at in range(0, len(self.text), _WINDOW))
        structure = b"".join([window.translate(None, _NO_STRUCTURE) for window in windows])
        if not elements or len(structure) <= elements:
            return 0
        if structure == b"[" + b"," * (elements - 1) + b"]":
            return 1
        nested = b""
        for length in reversed(shape):
            nested = b"[" + ((nested + b",") * length)[:-1] + b"]"
        return len(shape) if len(shape) <= _MAX_DEPTH and structure == nested else 0

    def _pieces(self) -> Iterator[str]:
        """Yield the text between some of its commas; what is not ASCII becomes a character that JSON does not have."""
        at, size = 0, len(self.text)
        while at < size:
            piece = bytes(self.text[at : at + _PIECE])
            cut = len(piece) if at + len(piece) == size else piece.rfind(b",")
            if cut < 0:  # no number is that long
                yield "?"
                return
            yield piece[:cut].decode("ascii", "replace")
            at += cut + 1

"""Moving the large weights of a model to files of their own before the model is parsed.

A model with its weights inside takes their size several times while it is loaded: as bytes, as a message, as the bytes
for onnxruntime and as its message. Parsing also holds the GIL, so that requests of other threads wait. So the outermost
levels of the protobuf encoding are read here: large weights are copied from file to file, and what remains is small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from chrion.graph.weights_folder import WeightsFolder

#: Weights of at least so many bytes are moved (a choice).
LARGE_BYTES = 1 << 20
#: Fields that are read at most: beyond, the library is far faster (a choice).
_MOST_FIELDS = 1_000_000
#: Numbers of fields: of a model its graph, of a graph its initialisers; of a tensor its data, where else it is, and
#: whether it is there.
_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
#: Wire types of protobuf: an integer, eight bytes, a length and bytes, four bytes.
_INTEGER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
#: Bytes of an integer at most; of a field's tag and length; of a part that is read, or copied, at a time.
_INTEGER_BYTES, _HEAD_BYTES, _BUFFER_BYTES, _PART_BYTES = 10, 20, 1 << 16, 1 << 22

#: Returns a number of bytes from a position of the model on; fewer at its end.
Read = Callable[[int, int], bytes]


class MovedWeight(NamedTuple):
    """A weight that was moved: its number among the graph's initialisers, its file, and its number of bytes."""

    number: int
    file: Path
    length: int


class _Field(NamedTuple):
    """A field of a message: its number and wire type, and where it, its content and what follows it begin."""

    number: int
    wire: int
    start: int
    content: int
    stop: int


class _EncodingError(Exception):
    """The bytes are not what is expected; the protobuf library decides what they are."""


def split(source: str | bytes, folder: WeightsFolder) -> tuple[bytes, list[MovedWeight]]:
    """Copy the large weights of a model to files.

    Args:
        source: The path of the model's file, or its bytes.
        folder: The folder of the files.

    Returns:
        The model without the data of these weights, and where they are. No bytes if no weight was moved, because none
        is large or the model is not encoded as usual: it has to be read as it is.

    Raises:
        OSError: The file cannot be read, or those of the weights cannot be written.
    """
    with _reader(source) as (read, size):
        splitter = _Splitter(read, folder)
        try:
            return splitter.model(size) or b"", splitter.moved
        except (_EncodingError, IndexError):  # cut off within an integer
            splitter.discard()
            return b"", []
        except OSError:
            splitter.discard()
            raise


@contextmanager
def _reader(source: str | bytes) -> Iterator[tuple[Read, int]]:
    if isinstance(source, bytes):
        yield (lambda at, count: source[at : at + count]), len(source)
        return
    with Path(source).open("rb", buffering=_BUFFER_BYTES) as file:

        def read(at: int, count: int) -> bytes:
            file.seek(at)
            return file.read(count)

        yield read, os.fstat(file.fileno()).st_size


class _Splitter:
    """Reads a model, and copies its large weights.

    Args:
        read: Reads the model.
        folder: The folder of the weights.

    Attributes:
        moved: The weights that were copied.
    """

    def __init__(self, read: Read, folder: WeightsFolder) -> None:
        self._read = read
        self._folder = folder
        self._initialisers = self._fields_read = 0
        self.moved: list[MovedWeight] = []

    def discard(self) -> None:
        """Remove the copies."""
        for weight in self.moved:
            weight.file.unlink(missing_ok=True)
        self.moved.clear()

    def model(self, size: int) -> bytes | None:
        """Return the model without the data of large weights; None if there are none."""
        return self._message(0, size, lambda field: self._graph(field) if field.number == _GRAPH else None)

    def _graph(self, own: _Field) -> bytes | None:
        def initialiser(field: _Field) -> bytes | None:
            if field.number != _INITIALIZER:
                return None
            self._initialisers += 1
            large = field.stop - field.content >= LARGE_BYTES
            return self._tensor(field, self._initialisers - 1) if large else None

        return self._message(own.content, own.stop, initialiser)

    def _tensor(self, own: _Field, index: int) -> bytes | None:
        """Copy the data of a tensor; return the rest, or None if it stays where it is."""
        fields = list(self._fields(own.content, own.stop))
        data = [field for field in fields if field.number == _RAW_DATA and field.wire == _BYTES]
        elsewhere = any(self._is_elsewhere(field) for field in fields)
        if len(data) != 1 or elsewhere or data[0].stop - data[0].content < LARGE_BYTES:
            return None
        file = self._folder.path / f"moved-{index}.bin"
        at, stop = data[0].content, data[0].stop
        self.moved.append(MovedWeight(index, file, stop - at))
        with file.open("xb") as copy:
            while at < stop:
                part = self._bytes(at, min(_PART_BYTES, stop - at))
                copy.write(part)
                at += len(part)
        return self._message(own.content, own.stop, lambda field: b"" if field == data[0] else None, lengths=False)

    def _is_elsewhere(self, field: _Field) -> bool:
        """Return whether a field says that the data of its tensor is in another file."""
        if field.number != _DATA_LOCATION or field.wire != _INTEGER:
            return field.number == _EXTERNAL_DATA
        return _integer(self._bytes(field.content, field.stop - field.content), 0)[0] != 0

    def _message(
        self, at: int, end: int, replace: Callable[[_Field], bytes | None], *, lengths: bool = True
    ) -> bytes | None:
        """Return a message in which some fields have another content; None if there is no such field.

        Args:
            at: Its start.
            end: Its end.
            replace: Returns the content of a field; None leaves it as it is.
            lengths: Write the field with its tag and length before the content; otherwise the content alone.
        """
        parts: list[bytes] = []
        kept = at
        for field in self._fields(at, end):
            content = replace(field) if field.wire == _BYTES else None
            if content is not None:
                parts.append(self._bytes(kept, field.start - kept))
                if lengths:
                    parts += [_as_integer(field.number << 3 | _BYTES), _as_integer(len(content))]
                parts.append(content)
                kept = field.stop
        if not parts:
            return None
        return b"".join([*parts, self._bytes(kept, end - kept)])

    def _fields(self, at: int, end: int) -> Iterator[_Field]:
        while at < end:
            head = self._bytes(at, min(_HEAD_BYTES, end - at))
            self._fields_read += 1
            if self._fields_read > _MOST_FIELDS:
                raise _EncodingError
            tag, used = _integer(head, 0)
            wire, length = tag & 7, 0
            if wire == _INTEGER:
                content = used
                _, used = _integer(head, used)
            elif wire == _BYTES:
                length, used = _integer(head, used)
                content = used
            elif wire in {_EIGHT, _FOUR}:
                content, length = used, 8 if wire == _EIGHT else 4
            else:
                raise _EncodingError
            stop = at + used + length
            if stop > end:
                raise _EncodingError
            yield _Field(tag >> 3, wire, at, at + content, stop)
            at = stop

    def _bytes(self, at: int, count: int) -> bytes:
        """Return exactly so many bytes."""
        found = self._read(at, count)
        if len(found) < count:  # the file was cut off meanwhile
            raise _EncodingError
        return found


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of variable length, and where it ends."""
    value = 0
    for used in range(_INTEGER_BYTES):
        byte = data[at + used]
        value |= (byte & 0x7F) << 7 * used
        if byte < 0x80:  # the highest bit says that another byte follows
            return value, at + used + 1
    raise _EncodingError


def _as_integer(value: int) -> bytes:
    """Return an integer in the fewest bytes."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)

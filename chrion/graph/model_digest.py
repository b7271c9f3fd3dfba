"""Digest of a model's file without the values of its weights.

It identifies a model wherever its file lies and whenever it was written: copies have the same digest, and so has a
model that was trained further. It covers every byte of the file except the values of weights of more than
:data:`_SMALL_BYTES`, of which it has the name, the type, the dimensions and the number of bytes, and it does not cover
the content of files of external weights, whose names are part of it. So it takes about as long as parsing the graph,
however large the weights are.

Decisions between engines are stored under it. Times do not depend on the values of weights, and a decision is a
placement, without weights: whatever it is applied to, the weights are those of that model's own file. Two models of the
same digest could at most be served at another speed. A limit of the error in bfloat16 depends on the values of weights;
decisions with one are stored under those, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

#: The size limit of a protobuf file.
MAX_BYTES = (1 << 31) - 1
#: Returns a part of a file: at most a number of bytes from a position; less at its end.
Reader = Callable[[int, int], bytes]

#: Values of weights of at most this many bytes are covered: shapes, axes and other constants, on which times depend.
_SMALL_BYTES = 1024
_BLOCK_BYTES = 1 << 16
#: Files with more fields are read as a whole. Each layer of a large model has some tens of them (a choice).
_MAX_FIELDS = 1_000_000

#: Fields of onnx.proto: ``ModelProto.graph``, ``GraphProto.initializer`` and, in a ``TensorProto``, all with values
#: (``float_data``, ``int32_data``, ``string_data``, ``int64_data``, ``raw_data``, ``double_data``, ``uint64_data``).
_MODEL: Mapping[int, Mapping[int, object]] = {7: {5: dict.fromkeys((4, 5, 6, 7, 9, 10, 11))}}
#: Wire types of protobuf, and the sizes of those that have a fixed one.
_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, 5: 4}
#: The longest varint, in bytes.
_LONGEST = 10


class _FormatError(Exception):
    """The file is no ONNX model, or one that is written in an unusual way."""


def model_digest(read: Reader, size: int) -> str:
    """Return the digest of a model.

    Args:
        read: Reads the file.
        size: Its size in bytes.
    """
    try:
        digest = _Digest(read)
        digest.add_message(0, size, _MODEL)
    except _FormatError:  # onnxruntime's own format, for example
        digest = _Digest(read)
        digest.add_bytes(0, size)
    return digest.hexdigest()


class _Digest:
    """A hash of the parts of a file.

    Args:
        read: Reads the file.
    """

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._hash = hashlib.sha256()
        self._fields = 0
        #: The block that was read last, and its position.
        self._block, self._at = b"", 0

    def hexdigest(self) -> str:
        """Return the digest of all that was added."""
        return self._hash.hexdigest()[:32]

    def add_bytes(self, at: int, end: int) -> None:
        """Add all bytes of a range."""
        while at < end and (part := self._part(at)[: end - at]):  # none if the file was cut off meanwhile
            self._hash.update(part)
            at += len(part)

    def add_message(self, at: int, end: int, inner: Mapping[int, object]) -> None:
        """Add a message of protobuf.

        Args:
            at: Its position.
            end: Its end.
            inner: The fields that are messages with fields of their own, and those (None) whose large values are left
                out.

        Raises:
            _FormatError: It is not a message, or has too many fields.
        """
        while at < end:
            start = at
            key, at = self._varint(at)
            number, kind = key >> 3, key & 7
            size = _SIZES.get(kind, 0)
            if kind == _BYTES:
                size, at = self._varint(at)
            elif kind == _VARINT:
                _, at = self._varint(at)
            elif not size:
                raise _FormatError
            self._fields += 1
            if at + size > end or self._fields > _MAX_FIELDS:
                raise _FormatError
            self.add_bytes(start, at)
            fields = inner.get(number) if kind == _BYTES else None
            if isinstance(fields, Mapping):
                self.add_message(at, at + size, fields)
            elif number not in inner or size <= _SMALL_BYTES:
                self.add_bytes(at, at + size)
            at += size

    def _varint(self, at: int) -> tuple[int, int]:
        """Return the number at a position, and the position after it.

        Raises:
            _FormatError: There is none.
        """
        value = 0
        for place, byte in enumerate(self._part(at, _LONGEST)[:_LONGEST]):
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value, at + place + 1
        raise _FormatError

    def _part(self, at: int, least: int = 1) -> bytes:
        """Return the bytes from a position on, of which a block was read; at least a number of them, or to the end."""
        if not self._at <= at <= self._at + len(self._block) - least:
            self._block, self._at = self._read(at, _BLOCK_BYTES), at
        return self._block[at - self._at :]

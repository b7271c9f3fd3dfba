"""A model as it was when it was opened, whatever happens to its file afterwards.

A session opens its model again: for one thread, for other shapes, without an accelerator, for a plan. Meanwhile the
file may be replaced (the usual deployment renames a new file over it), changed or deleted, or the process may change
its folder. Opened again by its path, one session would answer with the weights of two models. So a model is opened by
its path only while its files are what they were. After that, the file that is still open is read, which a rename or a
deletion leaves as it is. If that is not possible either, the model cannot be opened again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from chrion.errors import ModelError, UnsafeModelError
from chrion.graph.external import check_external, external_files, has_weights_beside
from chrion.graph.file_states import stat_state
from chrion.graph.model_digest import MAX_BYTES, model_digest

log = logging.getLogger(__name__)

#: Device, inode, size and time of modification of a file, and a digest of a small one.
Identity = tuple[int, int, int, int, str]
Result = TypeVar("Result")

#: Files of at most this many bytes are compared by their content, too: the time of modification may be too coarse.
_DIGEST_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 24
#: Without waiting for the other end of a pipe that has taken the place of a file.
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
#: The key of every weight that is in another file, and what the names of all operators with trees begin with.
_EXTERNAL, _TREES = b"location", b"TreeEnsemble"
#: What follows the first four bytes of a model in onnxruntime's own format.
_ORT_FORMAT = b"ORTM"


class OpenedModel:
    """A model file as it was when this object was created, or a model in memory.

    Args:
        source: A file, which need not exist, or the bytes of a model.
        files: The identities of its files, if the model was opened before, in another process for example.
        weights_given: Whether session options may hold the external weights of a model in memory, whose names are then
            not those of files.

    Attributes:
        source: The file or the bytes, as given.
        path: Absolute path of the file; empty for a model in memory.
        files: Identities of the file and of those of its external weights by path; empty if it could not be read.
        note: What has happened to the files; empty if nothing was noticed.
    """

    def __init__(
        self, source: str | Path | bytes, files: Mapping[str, Identity] | None = None, *, weights_given: bool = False
    ) -> None:
        self.source = source if isinstance(source, bytes) else os.fspath(source)
        self.path = "" if isinstance(source, bytes) else os.path.abspath(source)  # noqa: PTH100 - links stay
        self.note = ""
        self._descriptor: int | None = None
        #: The link or the file that it leads to, whichever has the external weights beside it.
        self._beside = self.path
        self.files: dict[str, Identity] = {}
        #: Why no session may open the model.
        self._refusal: UnsafeModelError | None = None
        if isinstance(source, bytes):
            marked = _TREES in source or (_EXTERNAL in source and not weights_given)
            _, _, self._refusal = _inspect(source if marked else b"", "", external=not weights_given)
        else:
            self._open()
        if files and self.path:
            self.files = {path: _as_identity(*identity) for path, identity in files.items()}

    @property
    def size(self) -> int:
        """Size of the model with its external weights, in bytes."""
        return len(self.source) if isinstance(self.source, bytes) else sum(file[2] for file in self.files.values())

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the model's file or bytes; see :mod:`chrion.graph.model_digest`.

        If the file has changed since it was opened, it is a text that no other model has.
        """
        source = self.source
        if isinstance(source, bytes):
            return model_digest(lambda at, count: source[at : at + count], len(source))
        descriptor = _open_regular(self.path) if self._descriptor is None else os.dup(self._descriptor)
        if descriptor is not None:
            try:
                digest = model_digest(lambda at, count: _part(descriptor, at, count), os.fstat(descriptor).st_size)
                if self.files and _same(_identity(descriptor), self.files[self.path]):
                    return digest
            finally:
                os.close(descriptor)
        return repr((self.path, self.files))

    @functools.cached_property
    def content_digest(self) -> str:
        """The digest of the model with the values of all weights, also external ones, for which all files are read.

        If a file has changed since it was opened, and cannot be read any more, it is a text that no other model has.
        """
        try:
            return self.use(self._hash_content)
        except ModelError:
            return repr((self.path, self.files))

    def _hash_content(self, opened: str | bytes) -> str:
        content = hashlib.sha256(opened if isinstance(opened, bytes) else b"")
        external = [] if isinstance(opened, bytes) else [opened, *sorted(self.files.keys() - {self.path})]
        for descriptor in filter(None, map(_open_regular, external)):
            try:
                at = 0
                while part := _part(descriptor, at):
                    content.update(part)
                    at += len(part)
            finally:
                os.close(descriptor)
        return content.hexdigest()[:32]

    def use(self, function: Callable[[str | bytes], Result]) -> Result:
        """Call a function that opens the model, with its path or its bytes.

        Raises:
            ModelError: A file has changed, and what it was can no longer be read.
            UnsafeModelError: The model names files outside of its folder, or its trees would end the process.
            Exception: Raised by the function.
        """
        if self._refusal:
            raise self._refusal
        if isinstance(self.source, bytes):
            return function(self.source)
        if not self.files:  # not a readable file: the function reports why
            return function(self._usable_path())
        if self.is_unchanged():
            try:
                result = function(self._usable_path())
            except Exception:
                if self.is_unchanged():
                    raise
            else:
                if self.is_unchanged():  # not meanwhile either
                    return result
        return function(self._kept())

    def _open(self) -> None:
        """Note the identities of all files; keep the file open if all of the model is in it."""
        descriptor = _open_regular(self.path)
        if descriptor is None:
            return
        try:
            files = {self.path: _identity(descriptor)}
            external, self._beside, self._refusal = _inspect(_marked(descriptor), self.path)
            for path in external:
                if (identity := _identity_of(str(path))) is not None:
                    files[str(path)] = identity
            self.files = files
            if not external and os.name != "nt":  # Windows would not let others replace an open file
                self._descriptor = descriptor
                weakref.finalize(self, os.close, descriptor).atexit = False  # requests in flight may still read it
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def is_unchanged(self) -> bool:
        """Return whether the files, if they could be read, are what they were."""
        return bool(self.files or not self.path) and all(
            _same(_identity_of(path), identity) for path, identity in self.files.items()
        )

    def is_readable(self) -> bool:
        """Return whether the model can be opened again, from its path or from the file that is still open."""
        return self.is_unchanged() or self._is_kept()

    def _is_kept(self) -> bool:
        return self._descriptor is not None and _same(_identity(self._descriptor), self.files[self.path])

    def _usable_path(self) -> str:
        """Return the path as it was given, which messages then contain, unless the process has changed its folder."""
        given = str(self.source)
        try:
            return given if os.path.abspath(given) == self._beside else self._beside  # noqa: PTH100
        except OSError:  # the folder of the process is gone
            return self._beside

    def _kept(self) -> bytes:
        """Return the content of the file that was opened."""
        kept = self._is_kept()
        effect = "the model that was opened is used" if kept else "the model cannot be opened again"
        note = f"{self.path} has changed since the model was opened: {effect}"
        if note != self.note:
            self.note = note
            log.warning("%s", note)
        if not kept:
            raise ModelError(note, hint="create the session again")
        assert self._descriptor is not None  # noqa: S101 - kept
        return _read(self._descriptor)


def _as_identity(device: int, inode: int, size: int, modified_ns: int, digest: str) -> Identity:
    return int(device), int(inode), int(size), int(modified_ns), str(digest)


def _same(now: Identity | None, before: Identity) -> bool:
    """Return whether a file is what it was: by its content if it is small, so that a new time does not matter."""
    if now is None:
        return False
    return now[4] == before[4] if now[4] and before[4] else now[:4] == before[:4]


def _open_regular(path: str) -> int | None:
    """Open a file; return None for what is none, such as a pipe, which opening would disturb, or cannot be read."""
    try:
        return os.open(path, _READ) if stat.S_ISREG(os.stat(path).st_mode) else None  # noqa: PTH116 - a string
    except (OSError, ValueError):  # a damaged cache file may hold a null byte
        return None


def _identity(descriptor: int) -> Identity:
    status = os.fstat(descriptor)
    digest = ""
    if status.st_size <= _DIGEST_BYTES and stat.S_ISREG(status.st_mode):
        digest = hashlib.blake2b(_read(descriptor), digest_size=16).hexdigest()
    return *stat_state(status), digest


def _identity_of(path: str) -> Identity | None:
    """Return the identity of the file of a path; None if it cannot be read."""
    descriptor = _open_regular(path)
    if descriptor is None:
        return None
    try:
        return _identity(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    """Return the content of an open file, from its beginning, whatever other threads have read."""
    parts = []
    at = 0
    while part := _part(descriptor, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _part(descriptor: int, at: int, count: int = _CHUNK_BYTES) -> bytes:
    """Return a part of an open file; empty at its end."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, at)
    os.lseek(descriptor, at, os.SEEK_SET)  # Windows, where no other thread has the descriptor
    return os.read(descriptor, count)


def _marked(descriptor: int) -> bytes:
    """Return the content of an open file that has external weights or trees, and is not too large; else nothing."""
    if os.fstat(descriptor).st_size <= MAX_BYTES:
        at, before = 0, b""
        while part := _part(descriptor, at):  # a mapped file could be cut off meanwhile
            if _EXTERNAL in (near := before + part) or _TREES in near:
                return _read(descriptor)
            at, before = at + len(part), part[-len(_TREES) :]
    return b""


def _inspect(content: bytes, path: str, *, external: bool = True) -> tuple[list[Path], str, UnsafeModelError | None]:
    """Return the files of a model's external weights, the path that they are beside, and why no session may open it.

    There are no such files if it is no model, or names impossible files.
    """
    if not content:
        return [], path, None
    where = path or "model"
    if content[4:8] == _ORT_FORMAT and _TREES in content:
        reason = f"{where}: a model in ORT format with tree ensembles, which cannot be checked"
        return [], path, UnsafeModelError(reason, hint="give its .onnx file")
    from chrion.graph.reading import parse  # noqa: PLC0415 - onnx is slow to import, and few models need it
    from chrion.graph.unsafe_trees import check_trees  # noqa: PLC0415 - as above

    try:
        proto = parse(content, path)
        check_trees(proto, where)
        file = Path(path) if path else None
        if file and not has_weights_beside(proto, file):
            file = file.resolve()
        if external:
            check_external(proto, file)
        return external_files(proto, file) if file else [], str(file or ""), None
    except UnsafeModelError as refusal:
        return [], path, refusal
    except (ModelError, OSError, ValueError, RuntimeError):
        return [], path, None

"""Temporary folders for the weights of loaded graphs.

All folders of a process are in one parent folder, which also has a file that the process keeps locked. The process that
created the folders removes them; its forked children do not. If a process is killed, its parent folder remains. The
next process that loads a graph finds the lock released and removes the folder. Forked children share the lock, so a
folder remains while any process may read it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import stat
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING

from chrion.common.files import write_atomically
from chrion.common.units import format_mb
from chrion.errors import ModelError, SpaceError
from chrion.graph.external import tensors_of
from chrion.graph.file_states import StatState, stat_state

if TYPE_CHECKING:
    import onnx
if sys.platform != "win32":
    import fcntl

#: Weights of fewer bytes stay inside the model file.
INLINE_BYTES = 1024
#: Numbers of the errors of a full disk.
FULL = {errno.ENOSPC, errno.EDQUOT}
_PREFIX = "chrion-weights-"
_LOCK = "lock"
#: The attempts to create a parent folder, which another process may remove before it is locked.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the original model's weights, as it was when the model was loaded."""

    path: Path
    state: StatState

    def check(self) -> None:
        """Check that the file is still the same.

        Raises:
            ModelError: The file has changed or does not exist any more.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise ModelError(f"{self.path}: weights of a loaded model cannot be read: {error.strerror}") from error
        if stat_state(status) != self.state:
            raise ModelError(f"{self.path}: changed since the model was loaded", hint="load the model again")


@contextlib.contextmanager
def space_for(needed: int, where: str, what: str = "weights", *, refused: bool = True) -> Iterator[None]:
    """Raise a failure within the context as one of the system, if it is due to a full disk.

    onnxruntime reports that it cannot write a file, but not why.

    Args:
        needed: Bytes that are written, at least.
        where: The model.
        what: What is written, for the message.
        refused: Whether a model that is refused may also be due to a full disk.

    Raises:
        SpaceError: The context failed, and the folder of temporary files lacks the space.
    """
    hint = "free some space, or name another folder in the environment variable TMPDIR"
    try:
        folder = gettempdir()
    except FileNotFoundError as error:
        raise SpaceError(f"{where}: {error.strerror}", hint=hint) from error
    free = shutil.disk_usage(folder).free
    try:
        yield
    except (OSError, ModelError) as error:
        full = isinstance(error, OSError) and error.errno in FULL
        if not full and (not refused or min(free, shutil.disk_usage(folder).free) >= needed):
            raise
        sizes = f"{format_mb(needed / 1e6)} of {what} are written there, {format_mb(free / 1e6)} were free"
        raise SpaceError(f"{where}: no space in {folder}: {sizes}", hint=hint) from error


class WeightsFolder:
    """A temporary folder, removed with this object or at exit.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        self._sources: Sequence[SourceFile] = ()
        try:
            self.path = Path(mkdtemp(dir=_parent_folder(os.getpid())))
        except FileNotFoundError:  # the system has removed old temporary files
            _parent_folder.cache_clear()
            self.path = Path(mkdtemp(dir=_parent_folder(os.getpid())))
        self._root = self.path
        self._locations: dict[Path, str] = {}
        weakref.finalize(self, _remove, self.path, os.getpid())

    @property
    def root(self) -> Path:
        """The folder that the locations of external weights are relative to.

        Raises:
            ModelError: A file of the original model's weights has changed.
        """
        for source in self._sources:
            source.check()
        return self._root

    def refer_to(self, sources: Sequence[SourceFile]) -> bool:
        """Include files of the original model, before any weight has been located; return False if that is impossible.

        onnxruntime reads the weights of a model from one folder and refuses links that lead out of it. So the common
        parent of all files becomes that folder.
        """
        try:
            self._root = Path(os.path.commonpath([self.path.resolve(), *(source.path for source in sources)]))
        except ValueError:  # on several drives
            return False
        self._sources = sources
        self._locations.clear()
        return True

    def store(self, tensor: onnx.TensorProto) -> None:
        """Move the data of a large weight, in place, to a file of its own, which is named by its content."""
        data = tensor.raw_data  # each access copies it
        if len(data) < INLINE_BYTES:
            return
        path = self.path / f"{hashlib.sha256(data).hexdigest()[:32]}.bin"
        if not path.exists():
            write_atomically(path, data)
        tensor.ClearField("raw_data")
        self.refer(tensor, path, len(data))

    def refer(self, tensor: onnx.TensorProto, path: Path, length: int) -> None:
        """Have a tensor without data read it from a file of its own, in place."""
        tensor.data_location = tensor.EXTERNAL
        for key, entry in {"location": self.location(path), "offset": "0", "length": str(length)}.items():
            tensor.external_data.add(key=key, value=entry)

    def remove_unused(self, model: onnx.ModelProto) -> None:
        """Remove the files that no weight of a model refers to."""
        used = {entry.value for tensor in tensors_of(model) for entry in tensor.external_data}
        for file in self.path.glob("*.bin"):
            if self.location(file) not in used:
                with contextlib.suppress(OSError):  # Windows removes no file that a session reads
                    file.unlink()

    def location(self, path: Path) -> str:
        """Return the location of a file in :attr:`root`, as an external weight states it."""
        known = self._locations.get(path)
        if known is None:  # paths are resolved once: thousands of weights refer to the same file
            known = self._locations[path] = path.resolve().relative_to(self._root.resolve()).as_posix()
        return known


@functools.cache
def _parent_folder(process: int) -> Path:
    """Create the parent folder of a process and lock it until the process ends; remove those of dead processes."""
    _remove_stale(Path(gettempdir()))
    for _ in range(_ATTEMPTS):
        folder = Path(mkdtemp(prefix=_PREFIX))
        weakref.finalize(_parent_folder, _remove, folder, process)
        if _lock(folder):
            break
    return folder


def _lock(folder: Path) -> bool:
    """Lock a folder for as long as this process lives; return False if another process is removing it."""
    if sys.platform == "win32":
        return True
    # Never closed: the end of the process releases the lock.
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where no process removes the folder of another
        return True
    return (folder / _LOCK).exists()


def _remove_stale(parent: Path) -> None:
    """Remove the folders of dead processes of this user."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(folder: Path, process: int) -> None:
    """Remove a folder, unless this is a forked child of the process that created it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)

"""The catalogue: which versions of the repository are served, changed by polling or on request.

Modes, as Triton has them: ``none`` serves what the repository has when the server starts; ``poll`` adds, replaces and
removes versions as the repository changes; ``explicit`` serves what clients load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from chrion.errors import ChrionError
from chrion.server.core import ServingCore
from chrion.server.failures import RequestFailure, Status
from chrion.server.public_texts import without_folders
from chrion.server.repository import BadVersion, Found, ServedVersion, scan

log = logging.getLogger("chrion.server")

#: Modes of model control.
CONTROL_MODES = ("none", "poll", "explicit")


class Catalogue:
    """The versions of a repository.

    Args:
        root: The repository.
        core: The server that serves them.
        mode: One of :data:`CONTROL_MODES`.
        accelerator: Whether there is an accelerator.

    Attributes:
        found: All versions of the last scan, also those that cannot be served.
    """

    def __init__(self, root: Path, core: ServingCore, mode: str, *, accelerator: bool) -> None:
        self.root = root
        self.mode = mode
        self.found: Found = {}
        self._core = core
        self._accelerator = accelerator
        self._lock = asyncio.Lock()

    async def start(self, load: Iterable[str] = ()) -> None:
        """Read the repository, and serve all of it, or in explicit mode the named models.

        Raises:
            OptionError: The repository cannot be read.
        """
        self.found = await self._scan()
        names = set(load)
        for entry in self.found.values():
            if self.mode != "explicit" or entry.name in names or "*" in names:
                self._serve(entry)

    async def poll(self) -> None:
        """Read the repository again, and serve what has been added or changed, and no longer what has been removed."""
        async with self._lock:
            try:
                now = await self._scan()
            except ChrionError as error:
                log.warning("poll failed", extra={"fields": {"reason": str(error)}})
                return
            before, self.found = self.found, now
            for key in before.keys() - now.keys():
                self._core.remove(key)
            for key, entry in now.items():
                if before.get(key) != entry:
                    self._serve(entry)

    async def poll_forever(self, interval_s: float) -> None:
        """Poll until the task is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.poll()

    async def load(self, name: str) -> None:
        """Serve all versions of a model, read again.

        Raises:
            RequestFailure: Model control is off, or the model cannot be served.
        """
        self._require_control()
        async with self._lock:
            now = await self._scan()
            entries = {key: entry for key, entry in now.items() if entry.name == name}
            served = {key: entry for key, entry in entries.items() if isinstance(entry, ServedVersion)}
            if not served:
                found = "; ".join(e.reason for e in entries.values() if isinstance(e, BadVersion))
                reasons = without_folders(found)
                status = Status.INVALID if entries else Status.NOT_FOUND
                raise RequestFailure(status, f"failed to load {name[:200]!r}: {reasons or 'not in the repository'}")
            self.found = {key: e for key, e in self.found.items() if e.name != name} | entries
            for key in [key for key in self._core.models if key[0] == name and key not in served]:
                self._core.remove(key)
            for entry in entries.values():
                current = self._core.models.get(entry.key)
                if current is None or current.failure or current.version != entry:
                    self._serve(entry)

    def unload(self, name: str) -> None:
        """Stop serving all versions of a model.

        Raises:
            RequestFailure: Model control is off, or the model is not served.
        """
        self._require_control()
        keys = [key for key in self._core.models if key[0] == name]
        if not keys:
            raise RequestFailure(Status.NOT_FOUND, f"failed to unload {name[:200]!r}: it is not loaded")
        for key in keys:
            self._core.remove(key)

    def _require_control(self) -> None:
        if self.mode != "explicit":
            raise RequestFailure(
                Status.UNAVAILABLE, f"model control is {self.mode!r}: start the server with --model-control explicit"
            )

    async def _scan(self) -> Found:
        return await asyncio.to_thread(scan, self.root, accelerator=self._accelerator, before=self.found)

    def _serve(self, entry: ServedVersion | BadVersion) -> None:
        if isinstance(entry, ServedVersion):
            self._core.add(entry)
            return
        self._core.remove(entry.key)
        fields = {"model": entry.name, "version": entry.version, "reason": entry.reason}
        log.warning("model cannot be served", extra={"fields": fields})

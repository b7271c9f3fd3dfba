"""The catalogue: which versions of the repository are served, changed by polling or on request.

Modes, as Triton has them: ``none`` serves what the repository has when the server starts; ``poll`` adds, replaces and
removes versions as the repository changes; ``explicit`` serves what clients load.

A version that works is served until the one that replaces it has opened and run once. A repository without a single
model that could be served is taken for a file system that is missing, as is the empty folder of a model: neither ends
what is served. The folder of a model ends it by its absence, if there are other models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from chrion.errors import ChrionError, OptionError
from chrion.serving.manager.residency import Place
from chrion.serving.server.core import CANNOT_BE_SERVED, ServingCore
from chrion.serving.server.core_records import Served
from chrion.serving.server.failures import RequestFailure, Status, without_folders
from chrion.serving.server.repository import (
    EXPECTED_FILES,
    BadVersion,
    Key,
    ServedVersion,
    Versions,
    find_misplaced,
    scan,
)

log = logging.getLogger("chrion.server")

#: Modes of model control.
CONTROL_MODES = ("none", "poll", "explicit")
#: The event of a version that cannot be served, in the log, if the one that it would replace is served on.
_NOT_REPLACED = "replacement cannot be served: the version before is served on"


class Catalogue:
    """The versions of a repository.

    Args:
        root: The repository.
        core: The server that serves them.
        mode: One of :data:`CONTROL_MODES`.
        accelerator: Whether there is an accelerator.
        generated: Versions that are open already, as generators; they are not tried at the start.

    Attributes:
        scanned: All versions of the last scan, also those that cannot be served.
    """

    def __init__(
        self, root: Path, core: ServingCore, mode: str, *, accelerator: bool, generated: Collection[Key] = ()
    ) -> None:
        self.root = root
        self.mode = mode
        self.scanned: Versions = {}
        self._core = core
        self._accelerator = accelerator
        self._generated = generated
        self._lock = asyncio.Lock()
        #: What the server started with and has not tried yet.
        self._untried: list[Served] = []
        self._replacing: set[asyncio.Task[None]] = set()
        self._ready_log: asyncio.Task[None] | None = None
        self._missing = False

    @property
    def attempted(self) -> bool:
        """Whether all versions that the server started with have been tried, successfully or not."""
        self._untried = [served for served in self._untried if not served.attempted.is_set()]
        return not self._untried

    @property
    def served(self) -> list[Key]:
        """The versions that are served, with those that have not been tried yet."""
        return [key for key, served in self._core.models.items() if not served.failure]

    @property
    def unserved(self) -> dict[Key, str]:
        """The versions that cannot be served, with the reasons; those that are unloaded are not among them."""
        models = self._core.models
        reasons = {k: e.reason for k, e in self.scanned.items() if isinstance(e, BadVersion) and k not in models}
        return reasons | {key: served.failure for key, served in models.items() if served.failure}

    @property
    def waiting(self) -> set[str]:
        """The names of the models that could be served and are not loaded."""
        found = {entry.name for entry in self.scanned.values() if isinstance(entry, ServedVersion)}
        return found - {name for name, _ in self._core.models}

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of models and versions that are served, and of versions that cannot be served."""
        names = {name for name, _ in self.served}
        return {"models": len(names), "versions": len(self.served), "unserved": len(self.unserved)}

    def find(self, name: str, version: str = "") -> Served:
        """Return a version of a model that the core has, by default the highest that has worked, or the highest.

        Raises:
            RequestFailure: It does not exist, is not loaded, or cannot be served.
        """
        if version:
            served = self._core.models.get((name, version))
        else:
            versions = [served for (own, _), served in self._core.models.items() if own == name]
            served = max(versions, key=lambda own: (own.tried, int(own.version.version)), default=None)
        if served is None:
            raise self._missing_version(name, version)
        return served

    def _missing_version(self, name: str, version: str) -> RequestFailure:
        """Return the failure of a request for a version that the core does not have."""
        entries = [e for e in self.scanned.values() if e.name == name and (version in ("", e.version) or not e.version)]
        if not entries:
            text = f"unknown model {name[:200]!r}" + (f", version {version[:20]!r}" if version else "")
            return RequestFailure(Status.NOT_FOUND, text)
        entry = entries[-1]
        reason = f"it is in the repository but not loaded; POST /v2/repository/models/{name}/load loads it"
        if isinstance(entry, BadVersion):
            reason = f"{entry.version and f'version {entry.version} '}cannot be served: {without_folders(entry.reason)}"
        return RequestFailure(Status.UNAVAILABLE, f"model {name!r}: {reason}")

    async def start(self, load: Iterable[str] = ()) -> None:
        """Read the repository, and serve all of it, or in explicit mode the named models.

        Raises:
            OptionError: The repository cannot be read, or has no model of a name.
        """
        self.scanned = await self._scan()
        names = set(load)
        if not self.scanned and self.mode == "none":
            text = f"the repository has no model: expected {EXPECTED_FILES}"
            log.warning(text, extra={"fields": {"repository": str(self.root)}})
        if misplaced := await asyncio.to_thread(find_misplaced, self.root):
            text = f"model files outside the folder of a version are not served: expected {EXPECTED_FILES}"
            log.warning(text, extra={"fields": {"files": misplaced}})
        if unknown := sorted(names - {"*"} - {entry.name for entry in self.scanned.values()}):
            known = ", ".join(sorted({entry.name for entry in self.scanned.values()}))[:500] or "none"
            raise OptionError(
                f"--load-model {unknown[0]}: no such model in the repository", hint=f"models found: {known}"
            )
        for entry in _pinned_first(self.scanned):
            # A version that cannot be served is logged even if it is not loaded.
            if self.mode != "explicit" or isinstance(entry, BadVersion) or names & {entry.name, "*"}:
                await self._start(entry)
        self._ready_log = asyncio.create_task(self._log_when_tried())

    async def _log_when_tried(self) -> None:
        """Log what is served once all versions that the server started with have been tried."""
        for served in self._untried:
            await served.attempted.wait()
        if not self._core.draining:
            log.info("ready", extra={"fields": self.counts})

    async def _start(self, entry: ServedVersion | BadVersion) -> None:
        if isinstance(entry, ServedVersion) and entry.key in self._generated:
            served = self._core.add(entry)
            served.tried = True
            served.attempted.set()
        else:
            self._untried += filter(None, [await self._serve(entry)])

    async def poll(self) -> None:
        """Read the repository again, and serve what has been added or changed, and no longer what has been removed."""
        async with self._lock:
            try:
                now = await self._scan()
            except (ChrionError, OSError) as error:
                log.warning("poll failed", extra={"fields": {"reason": str(error)}})
                return
            before, self.scanned = self.scanned, now
            for entry in _pinned_first(now):
                if before.get(entry.key) != entry:
                    await self._serve(entry)
            gone = self._core.models.keys() - now.keys()
            missing = bool(gone) and not any(isinstance(entry, ServedVersion) for entry in now.values())
            if missing and not self._missing:
                log.warning("the repository has no model: the models stay", extra={"fields": {"models": len(gone)}})
            self._missing = missing
            for key in gone:
                if not missing and self._is_removed(key):
                    self._core.remove(key)

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
            if not entries:
                raise RequestFailure(
                    Status.NOT_FOUND, f"failed to load {name[:200]!r}: the repository has no such folder"
                )
            self.scanned = {key: e for key, e in self.scanned.items() if e.name != name} | entries
            begun = [await self._serve(entry, keep=True) for entry in entries.values()]
        failures = [
            f"{e.version and f'version {e.version}: '}{e.reason}" for e in entries.values() if isinstance(e, BadVersion)
        ]
        for served in filter(None, begun):
            await served.attempted.wait()
            self._settle(served)
            if served.failure or not served.tried:
                failures.append(f"version {served.version.version}: {served.failure or 'the server is shutting down'}")
        for key in [key for key in self._core.models if key[0] == name and key not in self.scanned]:
            if self._is_removed(key):
                self._core.remove(key)
        if failures:
            raise RequestFailure(
                Status.INVALID, f"failed to load {name[:200]!r}: {without_folders('; '.join(failures))}"
            )

    def unload(self, name: str) -> None:
        """Stop serving all versions of a model.

        Raises:
            RequestFailure: Model control is off, or the model is not served.
        """
        self._require_control()
        keys = [key for key in self._core.models if key[0] == name]
        if not keys:
            raise RequestFailure(Status.NOT_FOUND, f"failed to unload {name[:200]!r}: no model of this name is loaded")
        for key in keys:
            self._core.remove(key)

    def _require_control(self) -> None:
        if self.mode != "explicit":
            raise RequestFailure(
                Status.UNAVAILABLE,
                f"clients load and unload models only with --model-control explicit; here it is {self.mode}",
            )

    async def _scan(self) -> Versions:
        return await asyncio.to_thread(scan, self.root, accelerator=self._accelerator, before=self.scanned)

    async def _serve(self, entry: ServedVersion | BadVersion, *, keep: bool = False) -> Served | None:
        """Serve a version: at once if none works in its place, else as soon as it has been tried.

        Args:
            entry: The version.
            keep: Whether it stays in memory after its trial.

        Returns:
            What is being tried, or has been; None for a version that cannot be served.
        """
        current = self._core.models.get(entry.key)
        if current is not None and current.version == entry and not current.failure:
            self._core.reject(entry.key)
            current.note = ""
            self._core.try_out(current, keep=keep)
            return current
        works = current is not None and await self._works(current) and self._core.models.get(entry.key) is current
        if isinstance(entry, BadVersion):
            self._refuse(entry, current if works else None)
            return None
        if not works:
            served = self._core.add(entry)
            self._core.try_out(served, keep=keep)
            return served
        candidate = self._core.candidates.get(entry.key)
        if candidate is None or candidate.version != entry:
            candidate = self._core.propose(entry)
            task = asyncio.create_task(self._replace(candidate))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
        return candidate

    async def _works(self, served: Served) -> bool:
        """Return whether a version has run, and can do so again."""
        if not served.tried or served.failure or served.opened is None:
            return False
        resident = self._core.place(served)[0] is Place.RESIDENT
        return resident or await asyncio.to_thread(served.opened.are_readable)

    def _refuse(self, entry: BadVersion, current: Served | None) -> None:
        """Do not serve a version; one that works in its place is served on."""
        log.warning(_NOT_REPLACED if current else CANNOT_BE_SERVED, extra={"fields": _fields(entry, entry.reason)})
        self._core.reject(entry.key)
        if current is None:
            self._core.remove(entry.key)
        else:
            current.note = entry.reason

    async def _replace(self, candidate: Served) -> None:
        await candidate.attempted.wait()
        self._settle(candidate)

    def _settle(self, served: Served) -> None:
        """Serve a version that has been tried in the place of another one, or keep that one."""
        key = served.version.key
        if self._core.candidates.get(key) is not served:
            return
        if served.tried and not served.failure:
            self._core.replace(served)
            return
        log.warning(_NOT_REPLACED, extra={"fields": _fields(served.version, served.failure)})
        self._core.models[key].note = served.failure
        self._core.reject(key)

    def _is_removed(self, key: Key) -> bool:
        """Return whether a version that the repository lacks has been removed, and not only emptied or replaced."""
        name = key[0]
        others = [served for other, served in self._core.models.items() if other[0] == name and other in self.scanned]
        return all(own != name for own, _ in self.scanned) or any(
            served.tried and not served.failure for served in others
        )


def _pinned_first(versions: Versions) -> list[ServedVersion | BadVersion]:
    """Return versions in an order in which none is tried that does not fit beside the pinned ones."""
    return sorted(versions.values(), key=lambda own: not (isinstance(own, ServedVersion) and own.managed.pinned))


def _fields(entry: ServedVersion | BadVersion, reason: str) -> dict[str, str]:
    return {"model": entry.name, "version": entry.version, "reason": reason}

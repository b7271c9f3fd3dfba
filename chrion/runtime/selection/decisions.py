"""Decisions of the guard, and the cache in which sessions share them.

A decision is stored twice: by the graph it was made for, which requires the model to be loaded, and by the model's
file or bytes, which costs a few system calls. The second finds it again without loading a model that runs plain.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chrion.errors import PlanError
from chrion.files import cache_folder, read_cached, write_cached
from chrion.scheduler.plan import Plan

#: One file that a decision depends on: its absolute path, size in bytes and modification time in ns.
FileState = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of comparing plans with plain sessions."""

    #: Name of the fastest candidate.
    winner: str
    #: The plan, if a plan is the fastest candidate.
    plan: Plan | None
    #: Reason, for :meth:`chrion.HybridSession.explain`.
    why: str
    #: State of the model's files when the decision was made; empty for a model given as bytes.
    files: tuple[FileState, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the decision as data for JSON."""
        plan = self.plan.to_json() if self.plan else None
        return {"winner": self.winner, "plan": plan, "why": self.why, "files": self.files}


def decision_from_json(content: Mapping[str, Any]) -> Decision:
    """Read a decision.

    Raises:
        KeyError, TypeError, ValueError: A field is missing or of another type.
        PlanError: The plan is damaged.
    """
    plan = None if content["plan"] is None else Plan.from_json(content["plan"])
    files = tuple((str(path), int(size), int(changed)) for path, size, changed in content["files"])
    return Decision(str(content["winner"]), plan, str(content["why"]), files)


class DecisionCache:
    """Decisions under one key, in a small file of the cache folder.

    Args:
        key: Everything the decision depends on. Values are compared by their ``repr``.
    """

    def __init__(self, *key: object) -> None:
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        self._path = cache_folder() / "choices" / f"{name}.json"

    def recall(self) -> Decision | None:
        """Return the stored decision; None if there is none, it is damaged, or the model's files have changed."""
        content = read_cached(self._path)
        if content is None:
            return None
        try:
            decision = decision_from_json(content)
        except (KeyError, TypeError, ValueError, PlanError):
            return None
        return decision if all(file_state(path) == (path, *state) for path, *state in decision.files) else None

    def keep(self, decision: Decision) -> None:
        """Store a decision; a cache that cannot be written is left as it is."""
        write_cached(self._path, decision.to_json())


def file_state(path: str | Path) -> FileState | None:
    """Return a file's absolute path, size and modification time; None if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return os.path.abspath(path), found.st_size, found.st_mtime_ns  # noqa: PTH100 - links stay as they are


def model_files(path: str, external: Sequence[str]) -> tuple[FileState, ...]:
    """Return the state of a model's file and of the files that hold its external weights.

    Args:
        path: The model's file.
        external: Locations of external weights, relative to its folder.
    """
    folder = Path(path).parent
    states = (file_state(file) for file in (path, *sorted({str(folder / location) for location in external})))
    return tuple(state for state in states if state is not None)


def model_identity(source: str | bytes) -> str:
    """Return text that differs for models that differ: of a file, its state; of bytes, their SHA-256."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    return repr(file_state(source))

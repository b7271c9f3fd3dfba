"""Measurements kept between runs: one small file for each machine and signature.

A file is written whole or not at all and never changed, so that any number of processes may share the folder. One
that cannot be read, for whatever reason, counts as not there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chrion.errors import ChrionError
from chrion.files import cache_folder, write_atomically
from chrion.profiler.profiles import OperatorCost, operator_cost_from_json


class Cache:
    """The measurements of one machine with one setting (cores, accelerator)."""

    def __init__(self, fingerprint: str, cores: int) -> None:
        self._folder = cache_folder() / "measurements" / f"{fingerprint}-{cores}"

    def get(self, signature: str) -> OperatorCost | None:
        """The costs measured for a signature, or None."""
        content = self._read(self._path(signature))
        if content is None or content.get("signature") != signature:
            return None
        try:
            return operator_cost_from_json(content["cost"])
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, signature: str, cost: OperatorCost) -> None:
        """Keep the costs of a signature; a folder that cannot be written is left alone."""
        self._write(self._path(signature), {"signature": signature, "cost": asdict(cost)})

    def _path(self, signature: str) -> Path:
        return self._folder / f"{hashlib.sha256(signature.encode()).hexdigest()[:32]}.json"

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    @staticmethod
    def _write(path: Path, content: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content))
        except (OSError, ChrionError):
            return

"""A cache of measurements on disk: one small file for each machine and signature.

Files are written atomically and never changed, so that any number of processes may share the folder. A damaged file
counts as missing.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

from chrion.common.files import cache_folder, read_cached, write_cached
from chrion.native import operators_available
from chrion.profiler.precision import Precision
from chrion.profiler.profiles import OperatorCost, operator_cost_from_json

#: The version of the method of measurement. Files of other versions are ignored.
_METHOD = 6


class MeasurementCache:
    """The cached measurements of one machine with one number of cores and one accelerator."""

    def __init__(self, fingerprint: str, cores: int, precision: Precision = "float32") -> None:
        self.precision = precision
        kernels = "-native" if operators_available() else ""  # both kernels of an operator are measured, or one
        kernels += "" if precision == "float32" else f"-{precision}"
        self._folder = cache_folder() / "measurements" / f"{fingerprint}-{cores}-{_METHOD}{kernels}"

    def get(self, signature: str) -> OperatorCost | None:
        """Return the costs measured for a signature, or None."""
        content = read_cached(self._path(signature))
        if content is None or content.get("signature") != signature:
            return None
        try:
            return operator_cost_from_json(content["cost"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def put(self, signature: str, cost: OperatorCost) -> None:
        """Store the costs of a signature, if the folder can be written."""
        write_cached(self._path(signature), {"signature": signature, "cost": asdict(cost)})

    def _path(self, signature: str) -> Path:
        return self._folder / f"{hashlib.sha256(signature.encode()).hexdigest()[:32]}.json"

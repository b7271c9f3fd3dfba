"""Batches: the inputs of several requests joined along the first dimension, and the outputs split again.

A batch that raises is run again in halves, and each half that raises in halves of its own, so that only the requests
fail that raise alone. One such request among n costs at most 2 log2 n further runs, and n of them cost n - 1 runs more
than without batches.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chrion.serving.server.sessions import Session
from chrion.serving.server.tensors import Array, TensorSpec

Feeds = Mapping[str, tuple[str, Array]]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outputs of each request, or what it raised, and the times of joining, running and splitting."""

    outputs: list[list[Array] | Exception]
    parts_ms: tuple[float, float, float]

    @property
    def failed(self) -> bool:
        """Whether a request raised."""
        return any(isinstance(outcome, Exception) for outcome in self.outputs)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that run together.

    Args:
        feeds: The inputs of each request.
        output_specs: The outputs that each request asks for.
        offered: All outputs of the model.
    """

    feeds: Sequence[Feeds]
    output_specs: Sequence[tuple[TensorSpec, ...]]
    offered: tuple[TensorSpec, ...]

    def run(self, session: Session, options: Any) -> BatchResult:
        """Run the batch on a session: together, or what raises together in parts."""
        count = len(self.feeds)
        try:
            return self._run(session, options)
        except Exception as error:  # noqa: BLE001 - each request gets its own
            if count <= 1:
                return BatchResult([error], (0.0, 0.0, 0.0))
        halves = [
            Batch(self.feeds[part], self.output_specs[part], self.offered).run(session, options)
            for part in (slice(count // 2), slice(count // 2, count))
        ]
        first, second = (half.parts_ms for half in halves)
        parts_ms = first[0] + second[0], first[1] + second[1], first[2] + second[2]
        return BatchResult([outcome for half in halves for outcome in half.outputs], parts_ms)

    def _run(self, session: Session, options: Any) -> BatchResult:
        """Run the batch together.

        Raises:
            RuntimeError: An output does not have one row for each row of the inputs.
            Exception: As onnxruntime raises it.
        """
        began = time.perf_counter()
        if len(self.feeds) == 1:
            outputs = session.run(self.output_specs[0], self.feeds[0], options)
            return BatchResult([outputs], (0.0, (time.perf_counter() - began) * 1000, 0.0))
        rows = [next(iter(feeds.values()))[1].shape[0] for feeds in self.feeds]
        first = self.feeds[0]
        joined = {
            name: (datatype, np.concatenate([feeds[name][1] for feeds in self.feeds]))
            for name, (datatype, _) in first.items()
        }
        names = {spec.name for specs in self.output_specs for spec in specs}
        specs = [spec for spec in self.offered if spec.name in names]
        ready = time.perf_counter()
        arrays = session.run(specs, joined, options)
        ran = time.perf_counter()
        outputs_by_name = {spec.name: _split(spec.name, array, rows) for spec, array in zip(specs, arrays, strict=True)}
        split: list[list[Array] | Exception] = [
            [outputs_by_name[spec.name][at] for spec in own] for at, own in enumerate(self.output_specs)
        ]
        ended = time.perf_counter()
        return BatchResult(split, ((ready - began) * 1000, (ran - ready) * 1000, (ended - ran) * 1000))


def rows_and_key(max_batch: int, feeds: Feeds) -> tuple[int, Hashable]:
    """Return the rows of a request, and the key that it shares with requests of the same batch.

    Returns:
        The key is None for a request that runs alone: the model does not batch, the inputs have different numbers of
        rows, or more than a batch has.
    """
    if max_batch <= 1 or any(array.ndim == 0 for _, array in feeds.values()):
        return 1, None
    rows = {array.shape[0] for _, array in feeds.values()}
    if len(rows) != 1:
        return 1, None
    (count,) = rows
    if not 0 < count <= max_batch:
        return max(1, count), None
    return count, tuple(sorted((name, datatype, array.shape[1:]) for name, (datatype, array) in feeds.items()))


def _split(name: str, array: Array, rows: Sequence[int]) -> list[Array]:
    if array.ndim == 0 or array.shape[0] != sum(rows):
        raise RuntimeError(f"output {name!r}: {array.shape} has not one row for each of {sum(rows)} input rows")
    ends = np.cumsum(rows)[:-1]
    return np.split(array, ends)

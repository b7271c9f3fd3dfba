"""Metrics of a run, in memory that does not grow with the number of requests.

Latencies are counted in histograms; see :mod:`chrion.serving.simulator.histograms`. Sums are exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import pack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chrion.serving.manager.policies import rounding_ms
from chrion.serving.simulator.averages import BinnedCounts
from chrion.serving.simulator.histograms import BINS, Counts, Floats, SparseHistograms, bin_index
from chrion.serving.simulator.request_batches import RequestBatches
from chrion.serving.simulator.requests import MAX_CLASSES, Objectives

#: Number of columns of a request's record: number, model, server; arrival, start and end in ms (start and end are NaN
#: for a dropped request, the start alone for one that failed); 1 if the request waited for a load, else 0; kind (see
#: :mod:`chrion.serving.simulator.service`) plus the number of kinds times the further requests of its batch.
COLUMNS = 8
#: Outcomes of requests by number, see :meth:`RequestMetrics.flush`.
OUTCOMES = ("in time", "late", "dropped", "failed")
_LATE, _DROPPED, _FAILED = range(1, 4)
#: Requests that are recorded before the histograms are updated, 2 MB: numpy's fixed costs are negligible for so many.
_BATCH = 1 << 15


class BusyShares(NamedTuple):
    """Busy time over latency."""

    #: Of a GPU slot, and of all cores together. Both of shape [classes, kinds].
    gpu: Floats
    cores: Floats
    #: The class of each server, an index of the shares. Shape [servers].
    classes: Counts


class RequestMetrics:
    """Counts, sums and histograms of requests, by model and by server.

    Args:
        models: The number of models.
        servers: The number of servers.
        slo_ms: The objective of each model.
        from_arrival: True to compare the response time with the objective, false to compare the execution time.
        busy_shares: Busy times; default: zero.
    """

    def __init__(
        self,
        models: int,
        servers: int,
        slo_ms: Sequence[float],
        *,
        from_arrival: bool,
        busy_shares: BusyShares | None = None,
    ) -> None:
        self.objectives = Objectives(slo_ms)
        self._from_arrival = from_arrival
        zeros = np.zeros((1, models))
        self._busy_shares = busy_shares or BusyShares(zeros, zeros, np.zeros(servers, np.int64))
        self.arrivals, self.dropped, self.failed, self.late, self.cold = (np.zeros(models, np.int64) for _ in range(5))
        self.wait_ms, self.execution_ms, self.response_ms = (np.zeros(models) for _ in range(3))
        self.responses, self.executions = SparseHistograms(), SparseHistograms()
        self.cold_responses = np.zeros(BINS, np.int64)
        #: The latest arrival or end of a request that was recorded.
        self.end_ms = 0.0
        #: Busy time by server: of GPU slots, and of cores.
        self.gpu_ms, self.cores_ms = np.zeros(servers), np.zeros(servers)
        self.server_arrivals = np.zeros(servers, np.int64)
        #: Over time: arrivals, requests that left the queue (those dropped at their arrival), and violations by the
        #: arrival of the request.
        self.series = BinnedCounts(3)
        #: The requests by their numbers.
        self.batches = RequestBatches()
        #: Arrivals and violations by class, shape [2, classes], and response times.
        self.class_counts: Counts = np.zeros((2, MAX_CLASSES), np.int64)
        self.class_responses = SparseHistograms()
        self._rows = array("d")
        self._recent: list[float] = []
        #: Adds the record of one request; see :data:`COLUMNS`.
        self.record = self._recent.extend

    def pack(self) -> None:
        """Move the records of single requests into an array, which takes less memory."""
        self._rows.frombytes(pack(f"{len(self._recent)}d", *self._recent))
        self._recent.clear()

    def flush(self, *, force: bool = False) -> tuple[Floats, Counts] | None:
        """Add the recorded requests to the metrics, if there are many or if ``force`` is true.

        Returns:
            The records that were added, shape [n, 8], and their outcomes, shape [n]; None if none were added.
        """
        self.pack()
        if not self._rows or (len(self._rows) < _BATCH * COLUMNS and not force):
            return None
        rows = np.frombuffer(self._rows.tobytes()).reshape(-1, COLUMNS)
        del self._rows[:]
        return rows, self.add(rows)

    def add(self, rows: Floats) -> Counts:
        """Add records, shape [n, 8]; return their outcomes, shape [n]."""
        models, servers = rows[:, 1].astype(np.int64), rows[:, 2].astype(np.int64)
        self.arrivals += _count(models, len(self.arrivals))
        self.server_arrivals += _count(servers, len(self.server_arrivals))
        self.end_ms = max(self.end_ms, float(rows[:, 3].max()))
        self.series.add(0, rows[:, 3])
        ended = ~np.isnan(rows[:, 4])
        if ended.all():
            return self._add_ended(rows, models, servers)
        outcomes = np.full(len(rows), _DROPPED)
        failed = ~ended & ~np.isnan(rows[:, 5])
        outcomes[failed] = _FAILED
        self.failed += _count(models[failed], len(self.arrivals))
        self.dropped += _count(models[~ended & ~failed], len(self.arrivals))
        self.series.add(1, np.where(failed, rows[:, 5], rows[:, 3])[~ended])
        self.series.add(2, rows[~ended, 3])
        numbers = rows[~ended, 0].astype(np.int64)
        self._add_violations(numbers, np.ones(len(numbers), bool))
        if ended.any():
            outcomes[ended] = self._add_ended(rows[ended], models[ended], servers[ended])
        return outcomes

    def _add_ended(self, rows: Floats, models: Counts, servers: Counts) -> Counts:
        arrival, start, end, cold, kinds = rows[:, 3], rows[:, 4], rows[:, 5], rows[:, 6] > 0, rows[:, 7]
        response, execution = end - arrival, end - start
        size = len(self.arrivals)
        measured = response if self._from_arrival else execution
        # A latency that equals the objective may exceed it by rounding.
        late = measured > self.objectives.of_requests(rows[:, 0], models) + rounding_ms(end)
        self.series.add(1, start)
        self.late += _count(models[late], size)
        self.series.add(2, arrival[late])
        self.cold += _count(models[cold], size)
        self.wait_ms += np.bincount(models, start - arrival, size)
        self.execution_ms += np.bincount(models, execution, size)
        self.response_ms += np.bincount(models, response, size)
        bins, numbers = bin_index(response), rows[:, 0].astype(np.int64)
        classes = self._add_violations(numbers, late)
        self.batches.add_responses(numbers, response, bins)
        if len(classes):
            self.class_responses.add(classes, bins)
        self.responses.add(models, bins)
        self.executions.add(models, bin_index(execution))
        self.cold_responses += _count(bins[cold], BINS)
        self._add_busy(execution, servers, kinds.astype(np.int64))
        self.end_ms = max(self.end_ms, float(end.max()))
        outcomes: Counts = late.astype(np.int64) * _LATE
        return outcomes

    def _add_violations(self, numbers: Counts, violated: npt.NDArray[np.bool_]) -> Counts:
        """Count requests by number and by class; return their classes, if there are any."""
        self.batches.add(numbers, violated)
        classes = self.objectives.classes_of(numbers)
        if len(classes):
            self.class_counts += [_count(own, MAX_CLASSES) for own in (classes, classes[violated])]
        return classes

    def _add_busy(self, execution: Floats, servers: Counts, kinds: Counts) -> None:
        gpu, cores, classes = self._busy_shares
        number = gpu.shape[1]
        each = execution
        if len(kinds) and kinds.max() >= number:  # the requests of a batch share its time
            each = execution / (kinds // number + 1)
            kinds = kinds % number
        rows = kinds if len(gpu) == 1 else classes[servers] * number + kinds
        self.gpu_ms += np.bincount(servers, each * gpu.ravel()[rows], len(self.gpu_ms))
        self.cores_ms += np.bincount(servers, each * cores.ravel()[rows], len(self.cores_ms))


def _count(values: Counts, size: int) -> Counts:
    return np.bincount(values, minlength=size).astype(np.int64)

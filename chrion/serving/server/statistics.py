"""Statistics of models and times of requests, as the protocols and the metrics report them."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

#: Upper limits of the buckets of histograms, in seconds; the last bucket has none. The
#: shortest is a request of a small model, the longest the default timeout of proxies.
BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKETS_MS = [1000 * limit_s for limit_s in BUCKETS_S]
#: Requests that the quantiles of the web page are taken from: five of them are above the 99th percentile, and they are
#: sorted once a second.
RECENT = 500


@dataclass(slots=True)
class Duration:
    """A number of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ms: float) -> None:
        """Add an event that took ``ms`` milliseconds."""
        self.count += 1
        self.ns += round(ms * 1e6)


@dataclass(slots=True)
class Histogram:
    """Times by bucket: for each of :data:`BUCKETS_S`, and the last bucket, the number of times in it alone."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_ms: float = 0.0

    def add(self, ms: float) -> None:
        """Add a time of ``ms`` milliseconds."""
        self.counts[bisect_left(_BUCKETS_MS, ms)] += 1
        self.sum_ms += ms


@dataclass(slots=True)
class BatchStatistics:
    """Batches of one number of rows."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """Counts and times of one version of a model."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    cancelled: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    #: Times of successful requests: the whole of it, waiting for cores, waiting for a load (if it did), and running.
    total_times: Histogram = field(default_factory=Histogram)
    queue_times: Histogram = field(default_factory=Histogram)
    load_times: Histogram = field(default_factory=Histogram)
    compute_times: Histogram = field(default_factory=Histogram)
    #: Times of the last successful requests.
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    #: Rows of successful requests, and batches that ran.
    inferences: int = 0
    executions: int = 0
    #: Time of the last request, in ms since 1970.
    last_inference_ms: int = 0
    slo_violations: int = 0
    loads: int = 0
    load_failures: int = 0
    load_ms: float = 0.0
    loaded_bytes: int = 0
    evictions: int = 0
    shrinks: int = 0
    grows: int = 0

    @contextmanager
    def failures_counted(self, elapsed_ms: Callable[[], float]) -> Iterator[None]:
        """Count a request as failed, or as cancelled by its client, if this context ends with an exception.

        Args:
            elapsed_ms: Returns the time since its arrival.
        """
        try:
            yield
        except Exception:
            self.fail.add(elapsed_ms())
            raise
        except BaseException:
            self.cancelled.add(elapsed_ms())
            raise

    def add_load(self, load_ms: float, size: int) -> None:
        """Add a load, and the bytes that it loaded."""
        self.loads += 1
        self.load_ms += load_ms
        self.loaded_bytes += size

    def add_run(self, rows: int, input_ms: float, infer_ms: float, output_ms: float) -> None:
        """Add a batch that ran."""
        self.executions += 1
        batch = self.batches.setdefault(rows, BatchStatistics())
        batch.compute_input.add(input_ms)
        batch.compute_infer.add(infer_ms)
        batch.compute_output.add(output_ms)

    def add_success(self, rows: int, total_ms: float, queue_ms: float, parts_ms: tuple[float, float, float]) -> None:
        """Add a successful request.

        Args:
            rows: Its rows.
            total_ms: Its time from arrival to end.
            queue_ms: Its time from arrival to start.
            parts_ms: Its shares of the batch's input, inference and output times.
        """
        self.success.add(total_ms)
        self.queue.add(queue_ms)
        for duration, ms in zip((self.compute_input, self.compute_infer, self.compute_output), parts_ms, strict=True):
            duration.add(ms)
        self.inferences += rows
        self.last_inference_ms = round(time.time() * 1000)

    def add_answer(self, rows: int, timing: RequestTiming, parts_ms: tuple[float, float, float]) -> None:
        """Add a successful request, also to the histograms; arguments as in :meth:`add_success`."""
        self.add_success(rows, timing.total_ms, timing.total_ms - timing.compute_ms, parts_ms)
        self.recent_ms.append(timing.total_ms)
        self.total_times.add(timing.total_ms)
        self.queue_times.add(timing.queue_ms)
        if timing.load_ms is not None:
            self.load_times.add(timing.load_ms)
        self.compute_times.add(timing.compute_ms)

    def quantiles_ms(self, *shares: float) -> list[float | None]:
        """Return quantiles of the last times: the least of them that the share does not exceed; None without any."""
        times = sorted(self.recent_ms)
        return [times[max(0, math.ceil(share * len(times)) - 1)] if times else None for share in shares]


#: The header with the times of a request (W3C).
SERVER_TIMING = "Server-Timing"
_TIMING = re.compile(r"(queue|load|compute);dur=(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where the time of a request went: waiting for cores, waiting for the model's load, and running."""

    queue_ms: float
    #: None if the model was in memory.
    load_ms: float | None
    compute_ms: float

    @property
    def total_ms(self) -> float:
        """Time from arrival to the end of the run."""
        return self.queue_ms + (self.load_ms or 0.0) + self.compute_ms

    def header(self) -> str:
        """Return the value of the header :data:`SERVER_TIMING`."""
        load = "" if self.load_ms is None else f"load;dur={self.load_ms:.3f}, "
        return f"queue;dur={self.queue_ms:.3f}, {load}compute;dur={self.compute_ms:.3f}"

    @classmethod
    def of_header(cls, text: str) -> RequestTiming | None:
        """Return the times of such a header; None without them."""
        parts = {name: float(ms) for name, ms in _TIMING.findall(text)}
        return cls(parts["queue"], parts.get("load"), parts["compute"]) if {"queue", "compute"} <= {*parts} else None

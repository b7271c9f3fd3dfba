"""The records of the core: the versions that are served, and their requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from chrion.serving.manager import Reason, Request
from chrion.serving.server.repository import ServedVersion
from chrion.serving.server.run_watch import WatchedRun
from chrion.serving.server.sessions import OpenedFiles, Session
from chrion.serving.server.statistics import ModelStatistics, RequestTiming
from chrion.serving.server.tensors import Array, OutputSizes, TensorSpec


@dataclass(slots=True)
class Served:
    """A version that is served, with its session while it is in memory."""

    version: ServedVersion
    number: int
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    session: Session | None = None
    #: Reason of the last failed load; empty after a successful one.
    failure: str = ""
    #: Why a newer version of its files is not served instead; empty if there is none.
    note: str = ""
    removed: bool = False
    #: What was opened first: a later load opens the same.
    opened: OpenedFiles | None = None
    #: Whether it has opened and run once.
    tried: bool = False
    #: Set when that has succeeded or failed, or is not done any more.
    attempted: asyncio.Event = field(default_factory=asyncio.Event)
    #: Requests that wait for a load, by their numbers.
    cold: dict[int, Pending] = field(default_factory=dict)
    output_sizes: OutputSizes = field(init=False)

    def __post_init__(self) -> None:
        self.output_sizes = OutputSizes(self.version.inputs, self.version.outputs)

    @property
    def too_large(self) -> bool:
        """Whether it is not served because it does not fit into the budgets."""
        return self.failure.startswith(Reason.TOO_LARGE.value)


@dataclass(slots=True)
class Result:
    """The outputs of a request, spec and array of each, its times and rows, and its shares of a batch's times."""

    served: Served
    outputs: list[tuple[TensorSpec, Array]]
    timing: RequestTiming
    rows: int
    parts_ms: tuple[float, float, float]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the request: as a success if this context, which makes the answer, ends without an exception."""
        statistics, began_s = self.served.statistics, time.monotonic()

        def elapsed_ms() -> float:
            return self.timing.total_ms + (time.monotonic() - began_s) * 1000

        with statistics.failures_counted(elapsed_ms):
            yield
        statistics.add_answer(self.rows, self.timing, self.parts_ms)


@dataclass(slots=True)
class Pending:
    """A request that has not been answered."""

    served: Served
    request: Request
    feeds: Mapping[str, tuple[str, Array]]
    outputs: tuple[TensorSpec, ...]
    future: asyncio.Future[Result]
    #: The run that it is part of, once it has started.
    run: WatchedRun | None = None
    #: End of the load that the request waited for.
    loaded_ms: float | None = None

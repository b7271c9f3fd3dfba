"""The records of the core: the versions that are served, and their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from chrion.serving.manager import Request
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


@dataclass(slots=True)
class Result:
    """The outputs of a request, spec and array of each, and its times."""

    served: Served
    outputs: list[tuple[TensorSpec, Array]]
    timing: RequestTiming


@dataclass(slots=True)
class Pending:
    """A request that has not been answered."""

    served: Served
    request: Request
    feeds: Mapping[str, tuple[str, Array]]
    outputs: tuple[TensorSpec, ...]
    future: asyncio.Future[tuple[list[Array], RequestTiming]]
    #: The run that it is part of, once it has started.
    run: WatchedRun | None = None
    #: End of the load that the request waited for.
    loaded_ms: float | None = None

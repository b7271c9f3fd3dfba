"""The time from the creation of a session to the end of its first request."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ratios import ratio_to_best

from chrion import HybridSession
from serving.models import feeds_of
from serving.report import format_ratio
from serving.worker import DEFAULT, OWN, plain_session

#: Least number of sessions of each kind, time after which no further ones are created, and limit of a process.
_LEAST, _ENOUGH_S, _LIMIT_S = 8, 3.0, 120.0
HEAD = ("model", "plain: created, ms", "first request done, ms", "HybridSession: created, ms", "done, ms", "ratio")
TITLE = "Start"
TEXT = """Time from the beginning of the creation to the end of the first request; *ratio*: HybridSession, without a
cached decision, to a plain session with onnxruntime's default."""


def start_row(model: str, source: bytes) -> tuple[str, ...]:
    """Return the line of a model, measured in a process of its own.

    Raises:
        RuntimeError: The process has failed or takes too long.
    """
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=_create_sessions, args=(other, source), daemon=True)
    process.start()
    other.close()
    times: Mapping[str, Any] = {}
    with suppress(EOFError):
        times = own.recv() if own.poll(_LIMIT_S) else {}
    process.kill()
    process.join()
    if not times:
        raise RuntimeError(f"{model}: the process that creates sessions has failed or takes longer than {_LIMIT_S} s")
    medians = {name: np.median(pairs, axis=0) * 1e3 for name, pairs in times.items()}
    ratio = ratio_to_best({name: [done for _, done in pairs] for name, pairs in times.items()}, OWN)
    cells = [f"{time_ms:.2f}" for name in (DEFAULT, OWN) for time_ms in medians[name]]
    return (model, *cells, format_ratio(ratio))


def _create_sessions(connection: Connection, source: bytes) -> None:
    """Create sessions of both kinds in turn, and send the times of each: created, and first request done."""
    feed = feeds_of(source)[0]
    times: dict[str, list[tuple[float, float]]] = {DEFAULT: [], OWN: []}
    create: dict[str, Callable[[], Any]] = {
        DEFAULT: lambda: plain_session(source, None),
        OWN: lambda: HybridSession(source, tune="background"),
    }
    end = time.monotonic() + _ENOUGH_S
    with TemporaryDirectory() as os.environ["CHRION_CACHE"]:
        while time.monotonic() < end or len(times[OWN]) <= _LEAST:
            for name, open_session in create.items():
                start_s = time.perf_counter()
                session = open_session()
                created_s = time.perf_counter() - start_s
                session.run(None, feed)
                times[name].append((created_s, time.perf_counter() - start_s))
                if name == OWN:
                    session.close()
                del session
    connection.send({name: pairs[1:] for name, pairs in times.items()})  # the first ones load libraries

"""Memory of a plan beside a plain session, measured in a process of its own.

A model with free dimensions keeps its plain session, so a plan adds to the memory. How much depends on the number of
segments, on weights that onnxruntime packs again, and on buffers; only a measurement says. The process that serves
requests cannot measure it, since other threads allocate memory at the same time, and neither can the tuning process,
whose heap has gaps from earlier candidates. A new process opens the plain session and then the plan, as a session does.
"""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from chrion.errors import ChrionError
from chrion.graph.loader import load
from chrion.graph.model import Graph, TensorInfo
from chrion.machine.allocator import resident_mb
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.engine import Footprint
from chrion.runtime.selection.configuration import SessionConfig, config_from_data, config_to_data
from chrion.runtime.selection.helper_process import command, environment, open_replies
from chrion.scheduler.plan import Plan

#: Requests that each engine serves before its memory is read, so that its arenas have grown.
_RUNS = 3
_LIMIT_S = 120.0
_STATISTICS = Path("/proc/self/statm")
_PROGRAM = "from chrion.runtime.selection.footprint import main; main()"


class MeasurementError(ChrionError):
    """The process that measures memory failed."""


def can_measure() -> bool:
    """Return whether the system reports the memory of a process as Linux does."""
    return _STATISTICS.exists()


def measure_footprint(config: SessionConfig, graph: Graph, plan: Plan | None) -> Footprint:
    """Measure the memory of a plain session, and of a plan beside it.

    Args:
        config: The session's configuration.
        graph: The graph of known shapes.
        plan: A plan of this graph for the CPU alone; None to measure the plain session only.

    Raises:
        MeasurementError: The process cannot be started, fails, or takes too long.
    """
    shapes = {info.name: info.shape for info in graph.inputs}
    content = {"shapes": shapes, "optimise": graph.optimised, "plan": plan.to_json() if plan else None}
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, a module of this package
            command(_PROGRAM),
            input=b"".join([*config_to_data(config), json.dumps(content).encode(), b"\n"]),
            capture_output=True,
            check=True,
            timeout=_LIMIT_S,
            env=environment(),
        )
        plain_mb, plan_mb = json.loads(done.stdout.splitlines()[-1])
        return Footprint(float(plain_mb), float(plan_mb))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").split("\n")
        said = [line for line in lines if line.strip()] if error.returncode > 0 else []  # not if a signal ended it
        raise _unknown(said[-1] if said else f"exit code {error.returncode} of the process") from error
    except (OSError, TypeError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise _unknown(f"{type(error).__name__}: {error}") from error


def _unknown(reason: str) -> MeasurementError:
    return MeasurementError(f"memory of the plan is not known: {reason}")


def main() -> None:
    """Answer one request on stdin by a line on stdout."""
    reply = open_replies()
    print(json.dumps(_measure(sys.stdin.buffer)), file=reply, flush=True)


def _measure(stream: BinaryIO) -> tuple[float, float]:
    config = config_from_data(stream)
    request = json.loads(stream.readline())
    shapes = {name: tuple(shape) for name, shape in request["shapes"].items()}
    plan = None if request["plan"] is None else Plan.from_json(request["plan"])
    synthetic_array(TensorInfo("", "tensor(float)", (1,)))  # imports numpy's random numbers
    started_mb = _resident_mb()
    plain = config.plain("measured")
    feed = {
        info.name: synthetic_array(TensorInfo(info.name, info.type, shapes[info.name]))
        for info in plain.session.get_inputs()
    }
    for _ in range(_RUNS):
        plain.session.run(None, feed)
    plain_mb = _resident_mb()
    kept: list[CutEngine] = []
    if plan is not None:
        # In a thread, as the tuning thread opens it: the C library gives each thread a heap of its own.
        thread = threading.Thread(target=lambda: kept.append(_open(config, shapes, plan, request["optimise"])))
        thread.start()
        thread.join()
        for _ in range(_RUNS):
            kept[0].run(None, feed, None)
    return plain_mb - started_mb, _resident_mb() - plain_mb


def _open(config: SessionConfig, shapes: Mapping[str, tuple[int, ...]], plan: Plan, optimise: bool) -> CutEngine:  # noqa: FBT001
    reload = functools.partial(load, config.model, shapes, optimise=optimise)
    return CutEngine(plan.apply(reload()), plan, config.options, {}, reload)


def _resident_mb() -> float:
    """Return the resident memory of this process without memory that can be returned."""
    gc.collect()
    return resident_mb()

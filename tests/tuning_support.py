"""Support for tests of tuning in the background: a stand-in for the tuning process, and decisions made by tests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from chrion import load
from chrion.graph.model import Graph
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes


def wait_for(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Return once a condition holds; fail if it does not within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def alternate(graph: Graph) -> Decision:
    """Decide on a plan that alternates between two lanes."""
    return Decision("plan 1", fixed_plan(graph, alternating_lanes(graph)), "by the test")


def deciding_with(decide: Callable[[Graph], Decision], asked: list[NamedShapes], wait: threading.Event) -> type:
    """Return a stand-in for the tuning process.

    Args:
        decide: Makes the decision on a graph of known shapes.
        asked: Receives the shapes that the process is asked for.
        wait: The process answers once this event is set.
    """

    class StandIn:
        def __init__(self, config: SessionConfig) -> None:
            self._source = config.source

        def ask(self, shapes: NamedShapes, **_: bool) -> dict[str, Any]:
            asked.append(shapes)
            wait.wait(30)
            decision = decide(load(self._source, {name: tuple(shape) for name, shape in shapes.items()}))
            return {"decision": json.loads(json.dumps(decision.to_json()))}

        def kill(self) -> None:
            wait.set()

    return StandIn

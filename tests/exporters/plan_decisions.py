"""Decisions for plans whatever their latency, written to the cache in which a HybridSession looks for decisions.

Usage: ``python plan_decisions.py FOLDER``. The process decides on the shapes of each request of a case as the tuning
process does, but selects the plan with the best prediction without timing it. So the memory of sessions with plans can
be measured on any machine, also while other processes use its cores.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import read_feeds

from chrion.graph.opened_model import OpenedModel
from chrion.runtime.selection import selector
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.guard import Candidate, Comparison
from chrion.runtime.selection.worker import Decider


def decide_on_plans(folder: Path) -> None:
    """Write a decision for the shapes of each request of the case in a folder."""
    selector.compare = _prefer_plans
    source = str(folder / "model.onnx")
    config = SessionConfig(OpenedModel(source))
    decider, own = Decider(config), selector.EngineSelector(config)
    inputs = [info for info in own.plain_sessions.get("").session.get_inputs() if info.type.startswith("tensor(")]
    free = any(not all(isinstance(d, int) for d in info.shape) for info in inputs)
    for feed in read_feeds(folder) if free else [{}]:
        shapes = {info.name: tuple(feed[info.name].shape) for info in inputs} if feed else {}
        with contextlib.suppress(Exception):  # a session that cannot decide runs plain as well
            decision = decider.decide(shapes)
            own.known.of_source(shapes).keep(decision)


def _prefer_plans(candidates: Sequence[Candidate], *_: Any) -> Comparison:
    """Select the first plan, or the first candidate without one."""
    return Comparison(next((c for c in candidates if not c.plain), candidates[0]).name, ())


if __name__ == "__main__":
    decide_on_plans(Path(sys.argv[1]))

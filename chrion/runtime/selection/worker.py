"""The program of the tuning process, which compares candidates for its parent process at low priority.

Timing and planning hold the GIL and the cores for seconds, so they do not run in the process that serves requests. The
protocol is one JSON object a line. The first line on stdin is a configuration, followed by the model's bytes if it has
no file; each further line asks for the decision on one set of shapes, and is answered by a line on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from chrion.graph.loader import load
from chrion.graph.model import Graph
from chrion.runtime.execution.engine import CannotCutError
from chrion.runtime.options.transport import options_from_data, options_to_data
from chrion.runtime.selection.admission import admit
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, files_of
from chrion.runtime.selection.selector import PLAIN, EngineSelector, why_plain

#: Interval at which the process checks that its parent still exists, in seconds.
_CHECK_S = 1.0


class Decider:
    """Decisions for one model, for any number of shapes.

    Args:
        config: The session's configuration.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._selector = EngineSelector(config)
        self._graph, self._reason = admit(config.source, config)
        self._files = files_of(config.source)

    def decide(self, shapes: Mapping[str, Sequence[int]]) -> Decision:
        """Compare the candidates.

        Args:
            shapes: Shapes of the inputs by name, for a model with free dimensions; empty for any other model.

        Returns:
            The decision. If the model cannot be cut, it selects a plain session and has the reason.
        """
        if self._graph is None:
            return Decision(PLAIN, None, self._reason, self._files)
        try:
            decision = self._selector.decide(self._with_shapes(self._graph, shapes))
        except CannotCutError as reason:
            return Decision(PLAIN, None, str(reason), self._files)
        return replace(decision, files=self._files)

    def _with_shapes(self, graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
        if not shapes:
            return graph
        return load(graph.source, {name: tuple(shape) for name, shape in shapes.items()}, optimise=graph.optimised)


def config_to_data(config: SessionConfig) -> tuple[bytes, ...]:
    """Return the configuration as the protocol sends it, in parts; the last is the model's bytes, not copied.

    Raises:
        TypeError: An argument of the session cannot be passed to another process.
    """
    source = config.source
    header = {
        "path": source if isinstance(source, str) else None,
        "bytes": len(source) if isinstance(source, bytes) else 0,
        "options": options_to_data(config.options),
        "providers": config.providers,
        "provider_options": config.provider_options,
        "slo_ms": config.slo_ms,
        "alpha": config.alpha,
        "cores": config.cores,
        "budget_mb": config.budget_mb,
        "rest": dict(config.rest),
    }
    return json.dumps(header).encode(), b"\n", source if isinstance(source, bytes) else b""


def config_from_data(stream: BinaryIO) -> SessionConfig:
    """Read the configuration from the beginning of the stream; see :func:`config_to_data`."""
    header = json.loads(stream.readline())
    providers = header["providers"] and [tuple(p) if isinstance(p, list) else p for p in header["providers"]]
    return SessionConfig(
        source=header["path"] or stream.read(header["bytes"]),
        options=options_from_data(header["options"]),
        providers=providers,
        provider_options=header["provider_options"],
        plan=None,
        slo_ms=header["slo_ms"],
        alpha=header["alpha"],
        cores=header["cores"],
        budget_mb=header["budget_mb"],
        rest=header["rest"],
    )


def answers(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield an answer to each request until the stream ends: a decision, or the reason why there is none."""
    config = config_from_data(stream)
    decider: Decider | None = None
    for line in stream:
        try:
            decider = decider or Decider(config)
            yield {"decision": decider.decide(json.loads(line)["shapes"]).to_json()}
        except Exception as error:  # noqa: BLE001 - whatever fails, the model runs plain
            yield {"failure": why_plain(error)}


def main() -> None:
    """Answer the requests that the parent process writes to stdin."""
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print
    for answer in answers(sys.stdin.buffer):
        print(json.dumps(answer), file=replies, flush=True)


def _exit_with(parent: int) -> None:
    """Exit when the parent process has ended: the system then assigns another parent to this process."""
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()

"""The program of the tuning process, which compares candidates for its parent process at low priority.

Timing and planning hold the GIL and the cores for seconds, so they do not run in the process that serves requests. The
protocol is one JSON object a line. The first line on stdin is a configuration, followed by the model's bytes if it has
no file; each further line asks for the decision on one set of shapes, and is answered by a line on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from chrion.errors import ModelError
from chrion.graph.model import Graph
from chrion.machine.allocator import return_large_blocks
from chrion.runtime.execution.engine import CannotCutError, Footprint
from chrion.runtime.selection.comparison_summary import PLAIN
from chrion.runtime.selection.configuration import SessionConfig, config_from_data
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.footprint import MeasurementError, can_measure, measure_footprint
from chrion.runtime.selection.helper_process import open_replies
from chrion.runtime.selection.model_loading import load_to_cut
from chrion.runtime.selection.plan_memory import explain_refusal, never_fits
from chrion.runtime.selection.selector import EngineSelector, why_plain

#: Operators that read some rows of a weight.
_PICKING = {"Gather", "GatherND", "GatherElements", "GatherBlockQuantized"}


class Decider:
    """Decisions for one model, for any number of shapes.

    Args:
        config: The session's configuration.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._selector = EngineSelector(config)
        self._graph, self._reason = load_to_cut(config)

    def decide(self, shapes: Mapping[str, Sequence[int]], *, anew: bool = False, busy: bool = False) -> Decision:
        """Compare the candidates.

        Args:
            shapes: Shapes of the inputs by name, for a model with free dimensions; empty for any other model.
            anew: Whether to compare them even if a decision is cached.
            busy: As for :meth:`chrion.runtime.selection.selector.EngineSelector.decide`.

        Returns:
            The decision. If the model cannot be cut, it selects a plain session and has the reason.

        Raises:
            ModelError: The model cannot be read, or it is not the one that the configuration names.
        """
        if self._graph is None:
            if not self._config.model.is_unchanged():
                raise ModelError(self._reason)
            return Decision(PLAIN, None, self._reason)
        graph = self._with_shapes(self._graph, shapes)
        if shapes and (least := self._least_memory(graph)) and never_fits(least):
            return Decision(PLAIN, None, explain_refusal(least), footprint=least)
        try:
            return self._selector.decide(graph, anew=anew, busy=busy)
        except CannotCutError as reason:
            return Decision(PLAIN, None, str(reason))

    def digest(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return the digest of the graph of these shapes; empty if the model cannot be cut."""
        return self._with_shapes(self._graph, shapes).digest if self._graph else ""

    def _least_memory(self, graph: Graph) -> Footprint | None:
        """Return the memory of the smallest plan possible, which holds all weights; None if that is little or unknown.

        Weights that operators pick rows from are mapped from a file, so that they take no memory unless they are read.
        """
        dag = graph.dag
        held = {
            weight for i, op_type in enumerate(dag.op_types) if op_type not in _PICKING for weight in dag.weights[i]
        }
        weights_mb = sum(dag.weight_bytes[weight] for weight in held) / 1e6
        if not never_fits(Footprint(0.0, weights_mb)) or self._config.accelerator or not can_measure():
            return None
        try:
            return Footprint(measure_footprint(self._config, graph, None).plain_mb, weights_mb)
        except MeasurementError:
            return None

    def _with_shapes(self, graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
        if not shapes:
            return graph
        given = {name: tuple(shape) for name, shape in shapes.items()}
        return self._config.load(given, optimise=graph.optimised)


def answers(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield an answer to each request until the stream ends: a decision, or the reason why there is none."""
    config = config_from_data(stream)
    decider: Decider | None = None
    for line in stream:
        try:
            decider = decider or Decider(config)
            question = json.loads(line)
            decision = decider.decide(question["shapes"], anew=question["anew"], busy=question["busy"])
            yield {"decision": decision.to_json()}
        except Exception as error:  # noqa: BLE001 - whatever fails, the model runs plain
            yield {"failure": why_plain(error)}


def main() -> None:
    """Answer the requests that the parent process writes to stdin."""
    replies = open_replies()
    return_large_blocks()  # of candidates and measurements that are closed
    for answer in answers(sys.stdin.buffer):
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()

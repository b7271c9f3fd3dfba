"""Decisions that were made before: in the cache of this machine, and in the file beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chrion.common.version import __version__
from chrion.graph.model import Graph
from chrion.native import available, operators_available
from chrion.profiler.machine import this_machine
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, DecisionCache
from chrion.runtime.selection.shipped import Conditions, recall
from chrion.scheduler.plan import Plan

#: Number of plans that are kept as candidates for further shapes of a model (a choice, not measured).
_EARLIER_PLANS = 4


@dataclass(frozen=True, slots=True)
class KnownDecisions:
    """Decisions on the engines of a model with one configuration."""

    config: SessionConfig

    def recall(self, graph: Graph) -> Decision | None:
        """Return the decision of the cache, or else of the file beside the model."""
        return self.of_graph(graph).recall() or self.shipped(graph=graph.digest)

    def keep(self, graph: Graph, decision: Decision) -> Decision:
        """Store a decision in the cache, and return what was stored; its plan may serve further shapes."""
        if decision.plan and graph.declared_free:
            self._of_slot(int(graph.digest[:8], 16) % _EARLIER_PLANS).keep(decision)
        return self.of_graph(graph).keep(decision)

    def keep_for_source(self, graph: Graph, decision: Decision) -> None:
        """Store a decision where sessions find it that tune in the background or not at all, unless there is one."""
        shapes = {info.name: info.fixed_dimensions for info in graph.inputs} if graph.declared_free else {}
        entry = self.of_source(shapes)
        if not decision.origin and entry.recall() is None:
            entry.store(decision)

    def mark_uncertain(self, digest: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Mark a decision as uncertain, so that it is made again after a while.

        Args:
            digest: The digest of the graph.
            shapes: Shapes of the inputs by name, for a model with free dimensions; empty for any other model.
        """
        self.of_digest(digest, free=bool(shapes)).mark_uncertain()
        self.of_source(shapes).mark_uncertain()

    def earlier_plans(self, graph: Graph) -> list[Plan]:
        """Return plans that were selected for other shapes of a model, unless devices or limits determine the plan."""
        config = self.config
        if not graph.declared_free or config.accelerator or (config.slo_ms, config.alpha) != (None, None):
            return []
        decisions = [self._of_slot(slot).recall() for slot in range(_EARLIER_PLANS)]
        return [decision.plan for decision in decisions if decision and decision.plan]

    def of_source(self, shapes: Mapping[str, tuple[int, ...]]) -> DecisionCache:
        """Return the cache entry for decisions on the model's file or bytes, which need no graph.

        Args:
            shapes: Shapes of the inputs by name, for a model with free dimensions; empty for any other model.
        """
        return self._cache("source", self.config.model.digest, sorted(shapes.items()))

    def of_graph(self, graph: Graph) -> DecisionCache:
        """Return the cache entry for decisions on a graph."""
        return self.of_digest(graph.digest, free=graph.declared_free)

    def of_digest(self, digest: str, *, free: bool) -> DecisionCache:
        """Return the cache entry for decisions on a graph.

        Args:
            digest: The graph's digest, which is the same for a model of fixed shapes and one of free dimensions that
                has these shapes.
            free: Whether the model declares free dimensions: then it keeps its plain session, and its candidates are
                others.
        """
        return self._cache(digest, free)

    def shipped(self, *, shapes: Mapping[str, tuple[int, ...]] | None = None, graph: str = "") -> Decision | None:
        """Return the decision in the file beside the model; see :func:`chrion.runtime.selection.shipped.recall`."""
        model = self.config.model
        if not model.path:
            return None
        return recall(model, self.conditions, shapes=shapes, graph=graph)

    @property
    def conditions(self) -> Conditions:
        """What decisions depend on besides the model: machine and accelerator, versions, native code, configuration."""
        accelerator = self.config.accelerator
        machine = this_machine(accelerator[0] if accelerator else None).fingerprint
        return Conditions.of(machine, (__version__, available(), operators_available()), self.config.decision_key)

    def _of_slot(self, slot: int) -> DecisionCache:
        """Return the cache entry of a plan for any shapes of the model."""
        return self._cache("plan for any shapes", self.config.model.digest, slot)

    def _cache(self, *model: object) -> DecisionCache:
        """Return the cache entry for decisions on a model and its shapes."""
        return DecisionCache(self.conditions, model)

"""What a plan chose for the tree ensembles of a model: onnxruntime's kernel or another form, and what others cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chrion.common.units import format_ms
from chrion.graph.external import nodes_of
from chrion.graph.model import Graph
from chrion.graph.trees import is_tree_ensemble, tree_forms
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.search.initial_solutions import GraphFacts, InitialSolutions

KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """The forms that tree ensembles have: ``kernel``, or one of :data:`chrion.graph.trees.FORMS` or ``PARTS``."""

    chosen: str
    #: The predicted latency of the whole model: of the plan for the chosen form, of HEFT for others.
    predicted_ms: Mapping[str, float]
    #: Forms with operators of which only estimates are known, chosen only if that holds for the model, too.
    unmeasured: tuple[str, ...]
    #: Why ensembles do not have the other forms.
    refused: Mapping[str, str]

    def __str__(self) -> str:
        names = {form: form for form in self.predicted_ms} | {KERNEL: "onnxruntime's kernel"}
        others = [
            f"{names[form]} {format_ms(ms)}{' (estimated)' if form in self.unmeasured else ''}"
            for form, ms in self.predicted_ms.items()
            if form != self.chosen
        ]
        reasons = [
            f"no {', '.join(form for form, own in self.refused.items() if own == reason)}: {reason}"
            for reason in dict.fromkeys(self.refused.values())
        ]
        first = f"trees: {names[self.chosen]}, predicted {format_ms(self.predicted_ms[self.chosen])}"
        return "; ".join([first, *([", ".join(others)] if others else []), *reasons])


def tree_choice(graph: Graph, profile: Profile, plan: Plan, options: PlanOptions) -> TreeChoice | None:
    """Return what a plan chose for tree ensembles; None for a graph without any.

    Args:
        graph: The graph that the plan is for.
        profile: The profile that the plan was made with.
        plan: The plan.
        options: The options that it was made with.
    """
    if not any(map(is_tree_ensemble, nodes_of(graph.model))):
        return None

    def costs_of(variant: Graph) -> Costs:
        return profile.costs(variant.dag, options.cores, options.streams)

    costs = costs_of(graph)
    forms = tree_forms(graph, costs.cores if costs.accelerator_ms is None else 0)
    graphs = {KERNEL: graph} | {form: found for form, found in forms.items() if isinstance(found, Graph)}
    chosen, known = plan.trees or KERNEL, profile.unmeasured(graph.dag)
    return TreeChoice(
        chosen,
        {f: plan.predicted.latency_ms if f == chosen else _heft_ms(own, costs_of(own)) for f, own in graphs.items()},
        tuple(form for form, own in graphs.items() if not profile.unmeasured(own.dag) <= known),
        {form: found.message for form, found in forms.items() if not isinstance(found, Graph)},
    )


def _heft_ms(graph: Graph, costs: Costs) -> float:
    """Return the latency that HEFT is predicted to have."""
    initial = InitialSolutions(GraphFacts(graph.dag, costs), costs)
    return min(solution.timeline.latency_ms for solution in initial.by_finish([0.0]))

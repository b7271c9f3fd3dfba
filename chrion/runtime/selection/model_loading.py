"""Loading of models that may be cut; for any other, the reason why it runs plain is found."""

from __future__ import annotations

from chrion.errors import InputError, ShapeError, SpaceError, UnsafeModelError
from chrion.graph.model import Graph
from chrion.graph.optimise import original_name
from chrion.graph.reading import read_model
from chrion.machine.allocator import trim
from chrion.runtime.execution.engine import input_obstacle
from chrion.runtime.options.session_options import hidden_reason, session_reason
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.selector import why_plain
from chrion.scheduler.plan import Plan


def load_to_cut(config: SessionConfig, graph: Graph | None = None) -> tuple[Graph | None, str]:
    """Load a model, or find the reason why it runs plain.

    Options are checked first, since with some of them onnxruntime writes files whenever a session is created.

    Args:
        config: The session's configuration.
        graph: The model, if the caller has loaded it.

    Returns:
        The graph and an empty text; or None and the reason why the model runs plain.

    Raises:
        PlanError: The caller gave a plan for another model.
        InputError: The caller gave a plan, and the model cannot be loaded for it.
        SpaceError: The same, since a disk is full.
        UnsafeModelError: The model names files outside of its folder, or its trees would end the process. If session
            options may hold its weights, that is left to the plain session.
    """
    if reason := session_reason(config.options, config.rest):
        return None, reason
    try:
        if isinstance(config.plan, Plan):
            graph = _load_planned(config, config.plan, graph)
        elif graph is None:
            graph = config.load({})
        reason = reason_of_options(config, graph)
    except Exception as error:
        planned = isinstance(config.plan, Plan) and isinstance(error, InputError | SpaceError)
        if planned or (isinstance(error, UnsafeModelError) and config.options is None):
            raise
        return None, why_plain(error)
    finally:
        trim()
    return (None, reason) if reason else (graph, "")


def _load_planned(config: SessionConfig, plan: Plan, graph: Graph | None) -> Graph:
    """Return the model that was given, or loaded with the shapes of a plan, which must fix all of its free dimensions.

    Raises:
        PlanError: They do not: the plan is for another model.
    """
    try:
        fixed = graph if graph and not graph.free_dimensions else config.load(plan.shapes, optimise=True)
    except ShapeError as error:
        raise plan.misfit(config.name, error.message) from error
    if fixed.free_dimensions and not input_obstacle(fixed.inputs):
        free = ", ".join(fixed.free_dimensions)
        raise plan.misfit(fixed.name, f"the model has free dimensions that the plan does not fix: {free}")
    return graph or fixed


def reason_of_options(config: SessionConfig, graph: Graph) -> str:
    """Return why options that cannot be read make the model run plain; empty if they do not, or there are none."""
    if config.options is None:
        return ""
    names = {original_name(weight) for weight in graph.weight_names}
    return hidden_reason(config.options, config.model.use(read_model)[0], names, config.accelerator)

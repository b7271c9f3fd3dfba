"""Plans with a given or random placement, for tests of the runtime.

They need no costs. Of their predictions, only that of the memory of frames is more than a placeholder. Tests use them
to check that any plan runs and has the same results as plain onnxruntime.
"""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.model import Graph
from chrion.graph.segments import cut
from chrion.profiler.costs import BufferSupport
from chrion.profiler.machine import this_machine
from chrion.scheduler.evaluation.frame_buffers import plan_frame
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.schedule import Schedule


def fixed_plan(  # noqa: PLR0913 - the parts of a plan that can be given
    graph: Graph,
    lanes: Sequence[int],
    order: Sequence[int] | None = None,
    accelerator: str | None = None,
    *,
    stages: Sequence[int] = (),
    widths: Sequence[int] = (),
    segments: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """Return a plan with a given placement.

    Args:
        graph: The graph.
        lanes: The lane of every operator, by operator index.
        order: All operators in a topological order; the graph's own order if missing.
        accelerator: Execution provider of the accelerator's lanes.
        stages: The stage of every operator, by operator index; empty: no barriers.
        widths: The number of cores of every operator, by operator index; empty: one each.
        segments: Consecutive operators of a lane that run as one call, in topological order; if missing, operators
            are joined if that delays no other.
    """
    order = tuple(order or graph.dag.topological_order)
    if segments is None:
        segments = cut(graph.dag, order, lanes, stages=stages, widths=widths)
    parts = tuple(tuple(s) for s in segments)
    ends = [lane + width - 1 for lane, width in zip(lanes, widths or [1] * len(lanes), strict=True)]
    cores, streams = max([1, *ends]), 1 - min([0, *lanes])
    schedule = Schedule(order, tuple(lanes), cores, streams, tuple(stages), tuple(widths))
    frame = plan_frame(graph.dag, schedule, parts, BufferSupport.of(accelerator))
    placeholder = Prediction(float(len(parts)), 0.0, frame.bytes / 1e6, frame.bytes / 1e6)
    return Plan(
        model=graph.name,
        digest=graph.digest,
        shapes=graph.shapes,
        chunk=None,
        policy="fixed placement",
        alpha=0.0,
        slo_ms=None,
        budget_mb=None,
        accelerator=accelerator,
        machine=this_machine(),
        estimated=0,
        schedule=schedule,
        operators=graph.dag.names,
        segments=parts,
        segment_ms=tuple((float(at), float(at + 1)) for at in range(len(parts))),
        predicted=placeholder,
        busy_ms=(1.0,) * (cores + streams),
        lower_bound_ms=0.0,
        accelerator_only=None,
        cpu_only=Prediction(float(len(parts)), 0.0, 0.0),
    )

"""Plans: a schedule with its segments and its predicted latency and memory; saved as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from chrion.common.files import parse_json, read_fields, read_json, write_atomically
from chrion.common.lane_numbers import is_accelerator_lane
from chrion.common.units import (
    format_beyond_ms,
    format_count,
    format_mb,
    format_ms,
    format_shape,
    format_shapes,
    format_share,
)
from chrion.errors import ModelError, PlanError
from chrion.graph.model import Graph
from chrion.profiler.machine import Machine, machine_to_json
from chrion.profiler.precision import Precision
from chrion.scheduler.priced_memory import Memory
from chrion.scheduler.schedule import Schedule

SCHEMA = "chrion.plan/1"
#: Fields of plans that are in the object ``predicted`` of a file, and what an error says of them.
_OF_PREDICTION = ("busy_ms", "lower_bound_ms", "accelerator_only", "cpu_only")
_AT_PREDICTED = re.compile(rf"\$\.({'|'.join(_OF_PREDICTION)})")
#: The key of a model's metadata under which :mod:`chrion.scheduler.annotation` writes a plan.
PLAN_KEY = "chrion-plan"
#: Fields that are the last ones in a file, and those that have parts of a file for themselves or are in the prediction.
_LONG = ("operators", "segments", "segment_ms")
_NESTED = ("machine", "schedule", "predicted", "busy_ms", "lower_bound_ms", "accelerator_only", "cpu_only")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted latency and accelerator memory."""

    latency_ms: float
    #: Paper memory (Equation 4): every tensor of every operator on the accelerator, summed.
    memory_mb: float
    #: Resident memory with one request in flight.
    resident_mb: float
    #: The part of it that every further request in flight adds: the buffers of a frame.
    frame_mb: float = 0.0

    def accelerator_mb(self, memory: Memory) -> float:
        """Return the accelerator memory by one of its definitions, in MB."""
        return self.resident_mb if memory == "resident" else self.memory_mb


@dataclass(frozen=True)
class Plan:
    """A schedule of one graph, made for one machine. It runs on any machine with its provider and as many cores."""

    #: The model's name.
    model: str
    #: Digest of the graph that the plan is for.
    digest: str
    #: Shapes of inputs with free dimensions, as given.
    shapes: Mapping[str, tuple[int, ...]]
    #: Steps of the chunks that recurrent operators are cut into; None for the graph as it is.
    chunk: int | None
    policy: str
    #: Price of accelerator memory, in ms per MB: the given one, or that which the limits imply.
    alpha: float
    slo_ms: float | None
    #: Limit on resident accelerator memory, or None.
    budget_mb: float | None
    #: Execution provider of the accelerator's lanes, or None if no operator runs on them.
    accelerator: str | None
    #: The machine that the plan was made for.
    machine: Machine
    #: Number of operators whose costs were estimated, not measured.
    estimated: int
    schedule: Schedule
    #: Names of the operators, by operator index.
    operators: tuple[str, ...]
    #: The operators of each segment, which a lane runs as one call; segments are in topological order.
    segments: tuple[tuple[int, ...], ...]
    #: Predicted start and end of each segment, in ms.
    segment_ms: tuple[tuple[float, float], ...]
    predicted: Prediction
    #: Predicted busy time of each lane in ms, by lane number; see :mod:`chrion.common.lane_numbers`.
    busy_ms: tuple[float, ...]
    #: Lower bound on the latency of any schedule of these operators on the same lanes.
    lower_bound_ms: float
    #: Prediction for the whole graph on the accelerator; None without one.
    accelerator_only: Prediction | None
    #: Latency of the whole graph on CPU cores: that of the fastest plain session if the profile has it, else that which
    #: is predicted for the paper's schedule; None without cores.
    cpu_only: Prediction | None
    #: Remarks of the planner, one sentence each.
    remarks: tuple[str, ...] = ()
    #: Names of the operators that are merged into one; see :mod:`chrion.graph.merge`.
    merged: tuple[tuple[str, ...], ...] = ()
    #: The memory that alpha prices.
    memory: Memory = "resident"
    #: The policy or the initial solution that the schedule comes from.
    origin: str = ""
    #: Number of operators that ``accelerator_only`` has on a core, since the accelerator has no kernel for them.
    off_accelerator: int = 0
    #: Number of cores that ``cpu_only`` uses; 0 if unknown.
    cpu_only_cores: int = 0
    #: True if ``cpu_only`` was measured.
    cpu_only_measured: bool = False
    #: Number of the model's operators before any are cut into chunks or merged; 0 if unknown.
    model_operators: int = 0
    #: Names of the operators that run on Chrion's native kernels on the machine of the plan; on other machines, and
    #: without native libraries, they run on onnxruntime's.
    native: tuple[str, ...] = ()
    #: Whether alpha was given, and is a part of the objective.
    priced: bool = True
    #: The form of tree ensembles, tensor operators or parts; empty for none. See :mod:`chrion.graph.trees`.
    trees: str = ""
    #: The precision of products in native kernels.
    precision: Precision = "float32"
    #: The error to expect of outputs in bfloat16, relative to the largest output; 0 in float32.
    expected_error: float = 0.0
    #: True if ``chunk`` is the longest sequence: then chains of recurrent operators are folded and directions are
    #: separated, but nothing is cut.
    uncut: bool = False
    #: Host memory of the packed copies of weights that native kernels have, without padding.
    packed_mb: float = 0.0

    def __repr__(self) -> str:
        summary = f"{self.policy}, {format_ms(self.predicted.latency_ms)}"
        memory = f", {format_mb(self.predicted.accelerator_mb(self.memory))}" if self.accelerator else ""
        return f"<Plan of {self.model}: {summary}{memory}>"

    @property
    def meets_slo(self) -> bool:
        """True if the predicted latency is within the SLO, or there is no SLO."""
        return self.slo_ms is None or self.predicted.latency_ms <= self.slo_ms

    @property
    def meets_budget(self) -> bool:
        """True if the predicted resident memory is within the budget, or there is no budget."""
        return self.budget_mb is None or self.predicted.resident_mb <= self.budget_mb

    @property
    def missed(self) -> tuple[str, ...]:
        """A line for each of the SLO and the budget that the plan misses: then no plan that was found keeps it."""
        lines = []
        if self.slo_ms is not None and not self.meets_slo:
            within = "" if self.budget_mb is None else f" within the GPU budget of {format_mb(self.budget_mb)}"
            fastest = format_beyond_ms(self.predicted.latency_ms, self.slo_ms)
            lines.append(f"no plan meets the SLO of {format_ms(self.slo_ms)}{within}: the fastest takes {fastest}")
        if self.budget_mb is not None and not self.meets_budget:
            smallest = f"the smallest holds {format_mb(self.predicted.resident_mb)}"
            lines.append(f"no plan of this policy fits the GPU budget of {format_mb(self.budget_mb)}: {smallest}")
        return tuple(lines)

    @property
    def precision_line(self) -> str:
        """A line on operators that multiply in bfloat16; empty if there are none."""
        if self.precision == "float32":
            return ""
        count = f"{len(self.native)} of {format_count(len(self.operators), 'operator')}"
        return f"{self.precision}: {count}; expected error {format_share(self.expected_error)}, of all operators"

    @property
    def operator_counts(self) -> str:
        """The number of operators in words, and that of the model's operators if they are cut or merged."""
        details = [f"{self.model_operators} in the model"] if self.model_operators else []
        if self.uncut:
            folded = len(self.operators) < self.model_operators
            details.append("chains of recurrent operators folded" if folded else "directions of recurrent layers apart")
        elif self.chunk is not None:
            details.append(f"recurrent layers in chunks of {format_count(self.chunk, 'step')}")
        if self.trees:
            details.append(f"tree ensembles as {self.trees}")
        if self.merged:
            details.append(f"{sum(map(len, self.merged))} merged into {len(self.merged)}")
        cut = self.chunk is not None or self.trees or self.merged
        return format_count(len(self.operators), "operator") + (f" ({'; '.join(details)})" if cut else "")

    @property
    def is_plain(self) -> bool:
        """True if the plan runs the model as it is as one segment, as a plain session does."""
        rewritten = self.chunk is not None or bool(self.trees or self.merged)
        return len(self.segments) < 2 and not rewritten and not self.native

    @property
    def on_accelerator(self) -> int:
        """The number of operators on the accelerator."""
        return sum(is_accelerator_lane(lane) for lane in self.schedule.lanes)

    @property
    def on_cpu(self) -> int:
        """The number of operators on CPU lanes."""
        return len(self.schedule.lanes) - self.on_accelerator

    def apply(self, graph: Graph) -> Graph:
        """Return the graph of the plan's operators: ``graph`` with operators changed as planned.

        Raises:
            PlanError: The plan is not for this graph; the message says what differs.
        """
        graph = self.rewritten(graph)
        if self.digest == graph.digest:
            self._check_segments(graph)
            return graph
        hint = ""
        if self.shapes and self.shapes != graph.shapes:
            difference = f"the plan is for {format_shapes(self.shapes)}, not {format_shapes(graph.shapes)}"
            hint = f"give the plan's shapes, {_shape_options(self.shapes)}, or "
        elif len(self.operators) != len(graph.dag):
            counts = f"the plan has {len(self.operators)} operators, the model {len(graph.dag)}"
            difference = f"{counts} after optimisation and the plan's rewrites"
        else:
            pairs = zip(self.operators, graph.dag.names, strict=True)
            other = next(((p, m) for p, m in pairs if p != m), None)
            difference = (
                f"the plan's operator {other[0]!r} is {other[1]!r} in the model"
                if other
                else "operators of the same names have different shapes or attributes"
            )
        raise self.misfit(graph.name, difference, hint)

    def misfit(self, model: str, difference: str, hint: str = "") -> PlanError:
        """Return the error that the plan is not for a model, with what differs and what to do beside a new plan."""
        message = f"plan of {self.model!r} does not fit model {model!r}: {difference}"
        return PlanError(message, hint=f"{hint}make a plan with: chrion partition")

    def rewritten(self, graph: Graph) -> Graph:
        """Return a graph, perhaps of other shapes, with operators changed as planned.

        Raises:
            PlanError: The plan is for another model.
        """
        try:
            if self.chunk is not None:
                from chrion.graph.recurrent import unroll  # noqa: PLC0415 - most plans rewrite nothing

                graph = unroll(graph, self.chunk)
            if self.trees:
                from chrion.graph.trees import tensor_trees  # noqa: PLC0415

                graph = tensor_trees(graph, self.trees)
            if self.merged:
                from chrion.graph.merge import merge_operators  # noqa: PLC0415

                index = {name: i for i, name in enumerate(graph.dag.names)}
                graph = merge_operators(graph, [[index[name] for name in group] for group in self.merged])
        except (KeyError, ModelError) as error:
            raise self.misfit(graph.name, f"cannot rewrite operators: {error}") from error
        return graph

    def _check_segments(self, graph: Graph) -> None:
        done: set[int] = set()
        for segment in self.segments:
            done.update(segment)
            if any(m not in done for i in segment for m in graph.dag.predecessors[i]):
                raise PlanError(f"plan of {self.model!r}: a segment precedes one that it depends on")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically.

        Raises:
            OptionError: The file cannot be written.
        """
        write_atomically(Path(path), json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible data."""
        own = sorted((field.name for field in fields(self)), key=_LONG.__contains__)
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in own if name not in _NESTED},
            "machine": machine_to_json(self.machine),
            **asdict(self.schedule),
            "predicted": {
                **asdict(self.predicted),
                "busy_ms": self.busy_ms,
                "lower_bound_ms": self.lower_bound_ms,
                "accelerator_only": asdict(self.accelerator_only) if self.accelerator_only else None,
                "cpu_only": asdict(self.cpu_only) if self.cpu_only else None,
            },
        }

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its own file, or from a model that is annotated with it (``.onnx``).

        Raises:
            PlanError: The file cannot be read, or is damaged; or the model has no plan.
            ModelError: The model cannot be read.
        """
        where = Path(path)
        if where.suffix == ".onnx":
            return cls.from_json(_read_annotation(where), str(path))
        return cls.from_json(read_json(where, SCHEMA, PlanError), str(path))

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str = "plan") -> Plan:
        """Read the data of :meth:`to_json`.

        Raises:
            PlanError: A key is missing, or a value is invalid.
        """
        try:
            return _from_json(content)
        except (KeyError, TypeError, ValueError) as error:
            problem = _AT_PREDICTED.sub(r"$.predicted.\1", str(error).replace("$.schedule", "$"))  # as in the file
            raise PlanError(f"{where}: damaged plan: {type(error).__name__}: {problem}") from error


def _shape_options(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the options of a command that give shapes."""
    return " ".join(f"--shape {name}={format_shape(shape)}" for name, shape in shapes.items())


def _read_annotation(path: Path) -> Mapping[str, Any]:
    """Return the plan that a model is annotated with, as JSON-compatible data."""
    from chrion.graph.reading import read_model  # noqa: PLC0415 - as above

    entries = read_model(path)[0].metadata_props
    text = next((entry.value for entry in entries if entry.key == PLAN_KEY), None)
    if text is None:
        raise PlanError(f"{path}: the model has no plan", hint="annotate it with: chrion partition --annotate")
    try:
        content = parse_json(text.encode())
    except ValueError as error:
        raise PlanError(f"{path}: metadata {PLAN_KEY}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = repr(content.get("schema")) if isinstance(content, dict) else "no object"
        raise PlanError(f"{path}: metadata {PLAN_KEY}: expected schema {SCHEMA}, found {found}")
    return content


def _from_json(content: Mapping[str, Any]) -> Plan:
    predicted = content["predicted"]
    of_prediction = {name: predicted[name] for name in _OF_PREDICTION}
    plan = read_fields({"budget_mb": None, **content, **of_prediction, "schedule": content}, Plan)
    schedule, segments, n = plan.schedule, plan.segments, len(plan.operators)
    _check_figures(plan)
    if plan.trees:
        from chrion.graph.trees import FORMS, PARTS  # noqa: PLC0415 - as above

        if plan.trees not in [*FORMS, *PARTS]:
            raise ValueError(f"trees must be one of {', '.join([*FORMS, *PARTS])}, or empty")
    if sorted(schedule.order) != list(range(n)) or len(schedule.lanes) != n:
        raise ValueError(f"order must contain each of the {n} operators once, and lanes a lane for each")
    if sorted(i for s in segments for i in s) != list(range(n)):
        raise ValueError(f"segments must contain each of the {n} operators once")
    if any(len({schedule.lanes[i] for i in s}) != 1 for s in segments):
        raise ValueError("the operators of a segment must be on one lane")
    if len(plan.segment_ms) != len(segments):
        raise ValueError("segment_ms must contain a start and an end for each segment")
    if schedule.streams < 1 or any(not -schedule.streams < lane <= schedule.cores for lane in schedule.lanes):
        raise ValueError(f"lanes must be {1 - schedule.streams} to {schedule.cores}")
    if schedule.widths:
        _check_widths(schedule, segments)
    if schedule.stages:
        _check_stages(schedule.stages, segments)
    return plan


def _check_figures(plan: Plan) -> None:
    predictions = filter(None, (plan.predicted, plan.accelerator_only, plan.cpu_only))
    figures = [*plan.busy_ms, *chain(*plan.segment_ms), *chain(*map(astuple, predictions)), plan.lower_bound_ms]
    figures += [plan.alpha, plan.slo_ms or 0.0, plan.budget_mb or 0.0, plan.expected_error, plan.packed_mb]
    figures += [plan.estimated, plan.off_accelerator, plan.cpu_only_cores, plan.model_operators, plan.machine.memory_mb]
    if plan.off_accelerator > max(plan.model_operators, len(plan.operators)):
        raise ValueError(f"off_accelerator is {plan.off_accelerator}, more than the operators")
    if wrong := [figure for figure in figures if not 0 <= figure < math.inf]:
        raise ValueError(f"{wrong[0]!r} is not a finite number of 0 or more")


def _check_widths(schedule: Schedule, segments: Sequence[Sequence[int]]) -> None:
    if len(schedule.widths) != len(schedule.lanes) or min(schedule.widths) < 1:
        raise ValueError("widths must contain one entry of 1 or more for each operator")
    for i, lane in enumerate(schedule.lanes):
        if schedule.width(i) > 1 and (is_accelerator_lane(lane) or lane + schedule.width(i) - 1 > schedule.cores):
            raise ValueError(f"width {schedule.width(i)} on lane {lane} exceeds the {schedule.cores} cores")
    if any(len({schedule.width(i) for i in s}) != 1 for s in segments):
        raise ValueError("the operators of a segment must have one width")


def _check_stages(stages: Sequence[int], segments: Sequence[Sequence[int]]) -> None:
    if len(stages) != sum(map(len, segments)):
        raise ValueError("stages must contain one entry for each operator")
    along = [stages[i] for segment in segments for i in segment]
    if along != sorted(along) or any(len({stages[i] for i in s}) != 1 for s in segments):
        raise ValueError("stages must not decrease along the segments, and must be equal within a segment")

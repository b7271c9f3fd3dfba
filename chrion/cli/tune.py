"""``chrion tune``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.cli import outputs
from chrion.cli.console import note, show, show_json, step
from chrion.cli.exit_codes import FAILED, OUT_OF_REACH
from chrion.cli.options import (
    AcceleratorOption,
    AlphaOption,
    CoresOption,
    ForceOption,
    GpuBudgetOption,
    JsonOption,
    MaxErrorOption,
    PrecisionOption,
    SloOption,
)
from chrion.common.units import format_ms, format_shape, parse_shape
from chrion.devices import usable_provider
from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ModelError, OptionError
from chrion.graph import load
from chrion.graph.opened_model import OpenedModel
from chrion.profiler.interference import OTHERS_USED_CORES
from chrion.profiler.precision import check_max_error, check_precision
from chrion.report.figure_table import FigureTable, key, text
from chrion.runtime.selection.comparison_summary import candidate_name
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.known_decisions import KnownDecisions
from chrion.runtime.selection.offline_tuning import tune_offline
from chrion.runtime.selection.plan_memory import explain_refusal, never_fits
from chrion.runtime.selection.shipped import ShippedDecision, holds_decisions, shipped_path, write_beside
from chrion.scheduler.plan_options import PlanOptions

Shapes = Mapping[str, tuple[int, ...]]

ModelsArgument = Annotated[list[Path], typer.Argument(help="ONNX models.", metavar="MODEL", show_default=False)]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=SHAPE",
        help="Shape of an input by its name, x=1x96x64, or size of a named dimension, batch=8. Repeatable; repeat a "
        "name for several sets of shapes.",
    ),
]


def tune(
    models: ModelsArgument,
    shape: ShapesOption = None,
    slo: SloOption = None,
    alpha: AlphaOption = None,
    gpu_budget: GpuBudgetOption = None,
    cores: CoresOption = None,
    accelerator: AcceleratorOption = None,
    precision: PrecisionOption = None,
    max_error: MaxErrorOption = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Also write the decisions to MODEL.chrion.json beside each model.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached decisions and decide again.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Choose between plans and plain onnxruntime for models, before any session does.

    Sessions with the same options find the decisions in the cache. With --beside they are also written to a file that
    can be shipped with the model; sessions use it on machines of the same kind, with the same versions of Chrion and
    onnxruntime. Decisions are added to such a file; any other needs --force. Exit code 1: with --beside, a decision is
    not in the file, since other processes or virtual machines used the cores. Exit code 3: no candidate meets the SLO.
    """
    limits = PlanOptions(slo, alpha, cores=cores, gpu_budget=gpu_budget).limits
    check_max_error(max_error, used := check_precision(precision or "float32"))
    for model in models if beside else ():
        path = shipped_path(model)
        outputs.check_outputs({"--beside": path}, force=force or holds_decisions(path))
    sets = list(_shape_sets(shape or []))
    work = [_Work(model, _resolve(model, sets)) for model in models]
    provider = usable_provider(accelerator or "auto")
    arguments = {
        "providers": [provider, CPU_PROVIDER] if provider else None,
        "slo": limits.slo_ms,
        "alpha": alpha,
        "cores": cores,
        "gpu_budget": limits.budget_mb,
        "precision": used if used != "float32" else None,
        "max_error": max_error,
    }
    configs = [_config(item.model, arguments) for item in work]
    results = [_tune(item, config, anew=fresh) for item, config in zip(work, configs, strict=True)]
    written = [_write(config, result) if beside else None for config, result in zip(configs, results, strict=True)]
    given = "".join(f", {name}={value!r}" for name, value in arguments.items() if value is not None)
    _show(work, results, written, f"HybridSession(MODEL{given})", configs[0].threads, as_json=as_json)
    raise typer.Exit(_exit_code(results, beside=beside))


@dataclass(frozen=True, slots=True)
class _Work:
    """A model and the sets of shapes to tune."""

    model: Path
    shape_sets: Sequence[Shapes]


def _shape_sets(options: Sequence[str]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the sets of shapes that the values of ``--shape`` describe: the n-th value of each name.

    A name that is given once is part of every set.

    Raises:
        OptionError: A value is invalid, or two names are repeated differently often.
    """
    given = [parse_shape(option) for option in options]
    counts = Counter(name for name, _ in given)
    set_count = max(counts.values(), default=1)
    for name, count in counts.items():
        if count not in {1, set_count}:
            raise OptionError(
                f"--shape: {count} values for {name!r}, but {set_count} for another name",
                hint="give one value of each name for each set of shapes, or one value for all sets",
            )
    values = {name: [shape for other, shape in given if other == name] for name in counts}
    for at in range(set_count):
        yield {name: shapes[at if len(shapes) > 1 else 0] for name, shapes in values.items()}


def _resolve(model: Path, sets: Sequence[Shapes]) -> list[Shapes]:
    """Return the shapes of all inputs for each set; one empty set for a model without free dimensions.

    Raises:
        ModelError: The model cannot be loaded.
        ShapeError: A shape does not fit the model, or a free dimension has none.
    """
    distinct: list[Shapes] = []
    for given in sets:
        graph = load(model, given)
        graph.require_shapes()
        shapes = {info.name: info.fixed_dimensions for info in graph.inputs}
        resolved = shapes if graph.declared_free else {}
        if resolved not in distinct:
            distinct.append(resolved)
    return distinct


def _config(model: Path, arguments: Mapping[str, Any]) -> SessionConfig:
    """Return the configuration of a session with these arguments."""
    return SessionConfig(
        model=OpenedModel(model),
        providers=arguments["providers"],
        slo_ms=arguments["slo"],
        alpha=arguments["alpha"],
        cores=arguments["cores"],
        budget_mb=arguments["gpu_budget"],
        precision=arguments["precision"] or "float32",
        max_error=arguments["max_error"],
    )


def _tune(item: _Work, config: SessionConfig, *, anew: bool) -> Sequence[ShippedDecision]:
    count = len(item.shape_sets)
    with step(f"tuning {item.model.name}", animated=False) as update:
        result = tune_offline(
            config,
            item.shape_sets,
            anew=anew,
            on_start=lambda at: update(at, count, _format(item.shape_sets[at])),
            on_wait=lambda: note("waiting for another process that tunes"),
        )
        update(count, count, "")
    return result


def _write(config: SessionConfig, result: Sequence[ShippedDecision]) -> Path | None:
    """Write the decisions that are certain beside the model; return the file's path, or None if there are none.

    Raises:
        ModelError: The model's file has changed meanwhile.
    """
    model = Path(str(config.model.source))
    if not config.model.is_unchanged():
        raise ModelError(f"{model}: changed while it was tuned", hint="tune it again")
    certain = [shipped for shipped in result if not shipped.decision.uncertain]
    for shipped in result:
        if shipped.decision.uncertain:
            where = f"{model}{_format(shipped.shapes, before=', ')}"
            note(f"warning: {where}: not written, since {OTHERS_USED_CORES}; repeat it when they do not")
    return write_beside(config.model, KnownDecisions(config).conditions, certain) if certain else None


def _show(
    work: Sequence[_Work],
    results: Sequence[Sequence[ShippedDecision]],
    written: Sequence[Path | None],
    call: str,
    threads: int,
    *,
    as_json: bool,
) -> None:
    """Print the decisions, and the call that creates sessions which find them."""
    rows = [
        (item.model, path, shipped)
        for item, result, path in zip(work, results, written, strict=True)
        for shipped in result
    ]
    if as_json:
        show_json({"session": call, "decisions": [_summary(model, path, shipped) for model, path, shipped in rows]})
        return
    plain_columns = "fastest plain", text("plain sessions")
    table = FigureTable("", [key("model"), text("shapes"), text("runs"), "latency", *plain_columns, text("reliable")])
    for model, _, shipped in rows:
        decision = shipped.decision
        latency, plain = (format_ms(ms) if ms else "" for ms in (decision.latency_ms, decision.plain_ms))
        sessions = [candidate_name(timed.name, threads) for timed in decision.timings if timed.plain]
        among = "; ".join(name.removeprefix("plain, ") for name in sessions)
        winner, reliable = candidate_name(decision.winner, threads), "no" if decision.uncertain else "yes"
        table.add_row(model.name, _format(shipped.shapes), winner, latency, plain, among, reliable)
    reasons = [f"{model.name}{_format(s.shapes, before=', ')}: {s.decision.evidence}" for model, _, s in rows]
    refused = [
        f"{model.name}{_format(s.shapes, before=', ')}: sessions run plain all the same: "
        f"{explain_refusal(s.decision.footprint)}"
        for model, _, s in rows
        if s.decision.plan and s.decision.footprint and never_fits(s.decision.footprint)
    ]
    missed = [f"{model.name}: {s.decision.missed}" for model, _, s in rows if s.decision.missed]
    show(
        table,
        *reasons,
        *refused,
        *missed,
        f"for sessions created with: {call}",
        *(f"written: {path}" for path in written if path),
    )


def _summary(model: Path, path: Path | None, shipped: ShippedDecision) -> dict[str, Any]:
    decision = shipped.decision
    return {
        "model": str(model),
        "shapes": {name: list(shape) for name, shape in shipped.shapes.items()},
        "winner": decision.winner,
        "runs_plan": decision.plan is not None,
        "latency_ms": decision.latency_ms,
        "best_plain_ms": decision.plain_ms,
        "uncertain": decision.uncertain,
        "reason": decision.why,
        "missed_slo": bool(decision.missed),
        "written": str(path) if path and not decision.uncertain else None,
    }


def _format(shapes: Mapping[str, Sequence[int]], before: str = "") -> str:
    formatted = " ".join(f"{name}={format_shape(tuple(shape))}" for name, shape in shapes.items())
    return f"{before}{formatted}" if formatted else ""


def _exit_code(results: Sequence[Sequence[ShippedDecision]], *, beside: bool) -> int:
    decisions = [shipped.decision for result in results for shipped in result]
    if beside and any(decision.uncertain for decision in decisions):
        return FAILED
    return OUT_OF_REACH if any(decision.missed for decision in decisions) else 0

"""``chrion finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.cli import outputs
from chrion.cli.console import show, show_json, step
from chrion.cli.exit_codes import OUT_OF_REACH
from chrion.cli.options import ForceOption, JsonOption, ModelArgument
from chrion.common.files import write_atomically
from chrion.common.units import format_count, format_ms
from chrion.graph.reading import serialise
from chrion.pipelines import FinetuningReport
from chrion.pipelines import finetune as tune_pipeline
from chrion.pipelines.measures import Interval
from chrion.pipelines.report import Rival
from chrion.report.figure_table import FigureTable, key, text

_TITLES = {"auc": "AUC", "log_loss": "log loss", "r2": "R2", "mae": "mean absolute error"}


def finetune(
    model: ModelArgument,
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE", help="New rows in the order of time: .parquet or .csv.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The tuned model.")],
    target: Annotated[str, typer.Option("--target", metavar="COLUMN", help="The column to predict.")] = "y",
    validation: Annotated[
        Path | None,
        typer.Option(
            "--validation", metavar="FILE", help="Held-out rows.", show_default="the last fifth of the new rows"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the intervals.")] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Adapt the trees of a pipeline to new rows, and write the model if it is proven better.

    Tables of target encoders are updated, and the leaves of the tree ensemble are fitted anew. The tuned model is
    written only if it is better than the original on held-out rows in both measures, by intervals that exclude zero.
    Otherwise nothing is written, and the exit code is 3.
    """
    [written] = outputs.check_outputs({"-o": output}, force=force)
    with step(f"tuning {model.name}") as update:
        tuned, report = tune_pipeline(model, data, target, validation=validation, seed=seed, progress=update)
    if report.adopted:
        write_atomically(output, serialise(tuned, str(output)))
    if as_json:
        show_json({**report.to_json(), "written": str(output) if report.adopted else None})
    else:
        _show(report, written)
    if not report.adopted:
        raise typer.Exit(OUT_OF_REACH)


def _show(report: FinetuningReport, written: outputs.Output) -> None:
    fit, choose, held = report.rows
    gain, loss = (_TITLES[name] for name in report.measures)
    table = FigureTable(f"{held} held-out rows", [key("model"), gain, loss, "calibration error", text("")])
    for rival in report.rivals:
        table.add_row(rival.name, *_figures(rival), rival.note)
    show(
        table,
        f"tuned vs. original: {gain} {_change(report.gain)}, {loss} {_change(report.loss)}",
        *([report.shift_line] if report.shift_line else []),
        f"fitted {_parts(report)} on {fit + choose} rows in {format_ms(report.seconds * 1e3)}",
        f"{written.message}: {report.reason}" if report.adopted else f"kept the original: {report.reason}",
    )


def _parts(report: FinetuningReport) -> str:
    parts = [format_count(report.tables, "table")] if report.tables else []
    return " and ".join([*parts, *(["leaves"] if report.ridge is not None else [])]) or "nothing"


def _figures(rival: Rival) -> tuple[str, str, str]:
    measures = rival.measures
    if measures is None:
        return "", "", ""
    calibration = "" if measures.calibration is None else f"{measures.calibration:.4f}"
    return f"{measures.gain:.4f}", f"{measures.loss:.4f}", calibration


def _change(interval: Interval) -> str:
    return f"{interval.value:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"

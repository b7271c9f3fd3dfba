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
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.graph.reading import serialise
from chrion.pipelines import FinetuningReport
from chrion.pipelines import finetune as tune_pipeline
from chrion.pipelines.measures import Interval
from chrion.pipelines.report import ComparedModel
from chrion.report.figure_table import FigureTable, key, text
from chrion.report.learning_curve import plot_learning_curve

_TITLES = {"auc": "AUC", "log_loss": "log loss", "r2": "R2", "mae": "mean absolute error"}


def finetune(
    model: ModelArgument,
    data: Annotated[Path, typer.Option(metavar="FILE", help="New rows in the order of time: .parquet or .csv.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The tuned model.")],
    target: Annotated[str, typer.Option(metavar="COLUMN", help="The column to predict.")] = "y",
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Held-out rows.", show_default="the last fifth of the new rows")
    ] = None,
    old: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The rows that the model was fitted on, to compare with retraining."),
    ] = None,
    soft: Annotated[
        bool,
        typer.Option("--soft", help="Tune a differentiable network, which makes trees slower; linear models need it."),
    ] = False,
    level: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help="What is tuned: L1, the leaves of trees, or with --soft L1 to L4.",
            show_default="L1, or L2 with --soft",
        ),
    ] = None,
    base_rate: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="The known share of the second class, or CLASS=SHARE,... of each."),
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Learning curve: .png, .svg, .pdf. For --soft.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="State from which an interrupted run continues. For --soft.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the intervals and of the training.")] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Adapt the trees or linear models of a pipeline to new rows, and write the model if it is proven better.

    Tables of target encoders are updated, and the leaves of the tree ensemble are fitted anew. The tuned model is
    written only if it is better than the original on held-out rows in both measures, by intervals that exclude zero.
    Otherwise nothing is written, and the exit code is 3. Ctrl-C ends the tuning with the best model until then.
    """
    written = outputs.check_outputs({"-o": output}, pictures={"--curve": curve}, force=force)[0]
    level = _level(level, soft=soft)
    if level == "L1" and curve:
        raise OptionError("--curve: trees have no learning curve", hint="it is for --soft")
    with step(f"tuning {model.name}") as update:
        tuned, report = tune_pipeline(
            model,
            data,
            target,
            validation=validation,
            old=old,
            level=level,
            base_rate=None if base_rate is None else _shares(base_rate),
            checkpoint=checkpoint,
            seed=seed,
            progress=update,
        )
    if curve:
        plot_learning_curve(report, curve)
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
    table = FigureTable(f"{held} held-out rows", [key("model"), gain, loss, "calibration error", text("")], sparse=True)
    for own in report.compared:
        table.add_row(own.name, *_figures(own), own.note)
    written_line = f"{written.message}, the model of the row 'tuned': {report.reason}"
    starred = any("*" in cell for own in report.compared for cell in _figures(own))
    show(
        table,
        *(["*: differs from the original beyond chance; --json has the intervals of 95 %"] if starred else []),
        f"tuned vs. original, mean of all times: {gain} {_change(report.gain)}, {loss} {_change(report.loss)}",
        *filter(None, [report.shift_line, report.calibration_line, report.better_line, report.cost_line]),
        *(["interrupted"] if report.interrupted else []),
        f"fitted {_parts(report)} on {fit + choose} rows in {format_ms(report.seconds * 1e3)}",
        written_line if report.adopted else f"kept the original: {report.reason}",
    )


def _level(level: str | None, *, soft: bool) -> str:
    """Return the level that is tuned.

    Raises:
        OptionError: It is one of a differentiable network, but ``--soft`` is missing.
    """
    if soft:
        return level or "L2"
    if level in {"L2", "L3", "L4"}:
        raise OptionError(f"--level: {level} is of a differentiable network, which is slower", hint="add --soft")
    return level or "L1"


def _shares(text: str) -> float | dict[str | int, float]:
    """Return the shares that ``--base-rate`` names.

    Raises:
        OptionError: It is no number, and no list of them.
    """
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.rsplit("=", 1) for part in text.split(",")]
        return {int(name) if name.lstrip("-").isdigit() else name: float(share) for name, share in pairs}
    except ValueError as error:
        raise wrong_value("--base-rate", "a share such as 0.2, or CLASS=SHARE,CLASS=SHARE", text) from error


def _parts(report: FinetuningReport) -> str:
    tables = sum(prior is not None for prior in report.priors)
    kind = "thresholds" if report.cost is None else "a network"
    trained = report.level != "L1" and (report.adopted or report.cost)
    parts = [
        format_count(tables, "table") if tables else "",
        "leaves" if report.ridge is not None else "",
        format_count(report.trees, "new tree") if report.trees else "",
        f"{kind} ({report.level}, {format_count(report.epochs, 'epoch')})" if trained else "",
    ]
    return ", ".join(filter(None, parts)) or "nothing"


def _figures(own: ComparedModel) -> tuple[str, str, str]:
    """Return the measures, with a star if the interval of the difference from the original excludes zero."""

    def cell(name: str) -> str:
        value, difference = getattr(own.measures, name, None), getattr(own.difference, name, None)
        return "" if value is None else f"{value:.4f}{'*' if difference and difference.excludes_zero else ''}"

    return cell("gain"), cell("loss"), cell("calibration")


def _change(interval: Interval) -> str:
    return f"{interval.value:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"

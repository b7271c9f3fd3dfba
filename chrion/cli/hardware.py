"""``chrion hardware``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from chrion.cli.console import show, show_json
from chrion.cli.options import JsonOption, complete_hardware
from chrion.hardware import Accelerator, Link, Part, Processor, known_parts
from chrion.hardware import hardware as find_hardware
from chrion.report.figure_table import FigureTable, key, text


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A machine, l4+epyc-16 for example: parts joined with +, by name or TOML file.",
            show_default="list the known parts",
            autocompletion=complete_hardware,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the parts that --hardware knows, or show all figures of a machine's parts with their sources."""
    if name is None:
        parts = list(known_parts().values())
        if as_json:
            show_json({"parts": [_summary(part) for part in parts]})
        else:
            show(_list_table(parts))
        return
    machine = find_hardware(name)
    given: tuple[Part | None, ...] = (machine.processor, machine.accelerator, machine.link)
    parts = [part for part in given if part is not None]
    if as_json:
        figures = [{**_summary(part), "figures": {k: asdict(v) for k, v in part.figures.items()}} for part in parts]
        show_json({"hardware": name, "title": machine.title, "estimated": True, "parts": figures})
    else:
        show(*(_figure_table(part) for part in parts))


def _kind(part: Part) -> str:
    return type(part).__name__.lower()


def _summary(part: Part) -> dict[str, Any]:
    return {"name": part.name, "kind": _kind(part), "title": part.title}


def _list_table(parts: list[Part]) -> FigureTable:
    figures = ("cores", "memory", "bandwidth", "peak, float32", "USD/hour")
    title = "Parts for --hardware, from datasheets; join them with +. Peaks of GPUs with TF32 are those of TF32"
    table = FigureTable(title, [key("name"), text("kind"), text("title"), *figures])
    for kind in (Accelerator, Processor, Link):
        for part in parts:
            if isinstance(part, kind):
                table.add_row(part.name, _kind(part), part.title, *_figures(part))
    return table


def _figures(part: Part) -> tuple[str, ...]:
    bandwidth = f"{part.bandwidth_gb_per_s:g} GB/s"
    if isinstance(part, Link):
        return "", "", bandwidth, "", ""
    memory, price = f"{part.memory_gb:g} GB", f"{part.price_per_hour:.2f}" if part.price_per_hour else ""
    if isinstance(part, Accelerator):
        return "", memory, bandwidth, f"{part.matrix_tflops.float32:g} TFLOPS", price
    peak = part.cores * part.all_core_ghz * part.flops_per_cycle.float32 / 1e3
    return str(part.cores), memory, bandwidth, f"{peak:.3g} TFLOPS", price


def _figure_table(part: Part) -> FigureTable:
    title = f"{part.title} ({part.name})" if isinstance(part, Link) else f"{part.title} ({part.name}), link {part.link}"
    table = FigureTable(title, [key("figure"), "value", text("source")])
    for name, figure in part.figures.items():
        table.add_row(name, f"{figure.value:g}", figure.source)
    return table

"""``chrion model``: every parameter of any builder is an option."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from chrion import zoo
from chrion.cli import outputs
from chrion.cli.completion import complete_model
from chrion.cli.console import show, show_json, step
from chrion.cli.model_list import show_models
from chrion.cli.options import ForceOption, JsonOption
from chrion.common.units import format_mb
from chrion.errors import OptionError

#: Help texts of the builders' parameters, by the heading that help shows them under.
HELP = {
    "Sizes": {
        "batch": "Batch size.",
        "layers": "Layers.",
        "seq": "Steps of a sequence.",
        "target": "Steps of the target sequence.",
        "io": "Width of a recurrent stack's input and output.",
        "hidden": "Width of a layer.",
        "heads": "Attention heads.",
        "kv_heads": "Heads of keys and values.",
        "context": "Maximum tokens per request.",
        "inner": "Width between two dense layers.",
        "vocabulary": "Words, or categories of a field.",
        "fields": "Categorical fields.",
        "numbers": "Numerical fields.",
        "embedding": "Width of an embedding.",
        "rows": "Maximum rows of an embedding table.",
        "lookups": "Categories of a field in a request.",
        "experts": "Experts of a block.",
        "skew": "Use of the first expert relative to the last.",
        "seed": "Seed of random weights and wiring.",
    },
    "Recurrent stacks": {
        "chunk": "Steps of one operator: 1 for an unfolded model, SEQ for a folded one.",
        "bidirectional": "Run every layer in both directions.",
    },
    "Networks on images": {
        "resolution": "Height and width of the image.",
        "width": "Channels, as a share of the published number.",
        "channels": "Channels of the first cells.",
        "stem": "Channels of the first convolution.",
        "cells": "Cells, in all or in a row.",
        "nodes": "Nodes of a randomly wired stage.",
        "neighbours": "Neighbours of a node before edges are moved.",
        "probability": "Probability that an edge is moved.",
        "small": "Build the smaller network of the paper.",
        "classes": "Width of the output.",
    },
}
_METAVARS = {int: "N", float: "X", bool: None}


def model(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A builder or a specification; see --list.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write.", show_default="NAME.onnx in the current folder"
        ),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List builders and specifications.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    **given: float | None,
) -> None:
    """Build a model with seeded random weights."""
    if list_all:
        show_models(as_json=as_json)
        return
    if not name:
        raise OptionError("model: no name given", hint="chrion model --list shows the names")
    parameters = {key: value for key, value in given.items() if value is not None}
    zoo.specification(name, parameters)  # refuses wrong parameters before the file is looked at
    path = output or Path(f"{Path(name).stem}.onnx")
    weights = zoo.weights_path(path) if zoo.streams_weights(name) else None
    (target,) = outputs.check_outputs({"-o": output}, defaults={"-o": path}, force=force)
    outputs.check_outputs({"-o": weights}, force=force)
    with step(f"building {name}"):
        written = zoo.write(name, path, parameters)
    if as_json:
        show_json({"model": str(path), "operators": written.nodes, "bytes": written.bytes})
    else:
        where = f", weights in {weights}" if weights else ""
        show(f"{target.message} ({written.nodes} operators, {format_mb(written.bytes / 1e6)}{where})")


def _builder_options() -> Iterator[inspect.Parameter]:
    """Yield an option for each parameter that a builder takes."""
    types = {"int": int, "float": float, "bool": bool}
    kinds = {name: types[kind] for builder in zoo.BUILDERS.values() for name, kind in builder.parameters.items()}
    for heading, texts in HELP.items():
        for name, text in texts.items():
            settings = typer.Option(metavar=_METAVARS[kinds[name]], help=text, rich_help_panel=heading)
            option = Annotated[kinds[name] | None, settings]  # type: ignore[valid-type] # a type all the same
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


_own = inspect.signature(model, eval_str=True)
_named = [parameter for parameter in _own.parameters.values() if parameter.name != "given"]
model.__signature__ = _own.replace(parameters=[*_named, *_builder_options()])  # type: ignore[attr-defined] # Typer reads it

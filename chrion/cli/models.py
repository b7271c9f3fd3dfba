"""``chrion model``: every parameter of any builder is an option."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.message import EncodeError

from chrion import zoo
from chrion.cli.console import show, stderr
from chrion.errors import OptionError
from chrion.files import write_atomically

#: What the options are for, and the headings that help shows them under.
HELP = {
    "Sizes": {
        "batch": "Batch size.",
        "layers": "Layers.",
        "seq": "Steps of a sequence.",
        "target": "Steps of the target sequence.",
        "io": "Width of a recurrent stack.",
        "hidden": "Width of a layer.",
        "heads": "Heads of an attention.",
        "inner": "Width between two dense layers.",
        "vocabulary": "Words, or categories of a field.",
        "fields": "Categorical fields.",
        "numbers": "Numerical fields.",
        "embedding": "Width of an embedding.",
        "seed": "Of weights and wiring.",
    },
    "Recurrent stacks": {
        "chunk": "Steps an operator takes: 1 unfolds all, SEQ folds all.",
        "bidirectional": "Run every layer in both directions.",
    },
    "Networks on images": {
        "resolution": "Height and width of the image.",
        "width": "Share of the published channels.",
        "channels": "Channels of the first cells.",
        "stem": "Channels of the first convolution.",
        "cells": "Cells, in all or in a row.",
        "nodes": "Nodes of a randomly wired stage.",
        "neighbours": "Neighbours of a node before edges are moved.",
        "probability": "That an edge is moved.",
        "small": "The small regime.",
        "classes": "Width of the output.",
    },
}


def model(
    name: Annotated[str, typer.Argument(help="A builder or a specification; see --list.", show_default=False)] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.  [default: NAME.onnx]")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List builders and specifications.")] = False,
    **given: float | None,
) -> None:
    """Build a model with seeded random weights."""
    if list_all:
        show("\n".join(zoo.names()))
        return
    if not name:
        raise OptionError("model: a name is missing", hint="chrion model --list shows them")
    built = zoo.build(name, {key: value for key, value in given.items() if value is not None})
    path = output or Path(f"{Path(name).stem}.onnx")
    try:
        content = built.SerializeToString()
    except (ValueError, EncodeError) as error:
        raise OptionError(f"model {name}: more than 2 GB, which no .onnx file holds", hint="choose less") from error
    write_atomically(path, content)
    stderr.print(f"{path}: {len(built.graph.node)} nodes", highlight=False)


def _options() -> Iterator[inspect.Parameter]:
    """An option for each parameter that a builder takes."""
    types = {"int": int, "float": float, "bool": bool}
    kinds = {name: types[kind] for builder in zoo.BUILDERS.values() for name, kind in builder.parameters.items()}
    for heading, texts in HELP.items():
        for name, text in texts.items():
            option = Annotated[kinds[name] | None, typer.Option(help=text, rich_help_panel=heading)]  # type: ignore[valid-type] # a type all the same
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


_own = inspect.signature(model, eval_str=True)
_named = [parameter for parameter in _own.parameters.values() if parameter.name != "given"]
model.__signature__ = _own.replace(parameters=[*_named, *_options()])  # type: ignore[attr-defined] # Typer reads it

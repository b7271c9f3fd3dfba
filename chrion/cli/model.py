"""``chrion model``: every parameter of any builder is an option."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion import zoo
from chrion.cli import outputs
from chrion.cli.console import show, show_json, step
from chrion.cli.options import ForceOption, JsonOption, complete_model, output_option
from chrion.common.files import bundled_folder
from chrion.common.units import format_mb
from chrion.errors import OptionError
from chrion.report.figure_table import FigureTable, key, text

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
#: The families of builders, in words.
_FAMILIES = {
    "bert": "BERT encoder",
    "darts": "DARTS cell network on images",
    "deepfm": "DeepFM recommendation network",
    "dlrm": "DLRM recommendation network with large tables",
    "googlenet": "GoogLeNet on images",
    "gpt2-decoder": "decoder like GPT-2, with a cache",
    "gpt2-decoder-grouped": "the same with GroupQueryAttention",
    "gpt2-decoder-onnx": "the same with ONNX's Attention",
    "gru": "stack of GRU layers",
    "inception-v3": "Inception-v3 on images",
    "llama": "Llama on whole sequences, without a cache",
    "llama-decoder": "decoder like Llama 2, with a cache",
    "llama-decoder-grouped": "the same with GroupQueryAttention",
    "llama-decoder-onnx": "the same with ONNX's Attention",
    "lstm": "stack of LSTM layers",
    "moe": "decoder blocks with a mixture of experts",
    "nasnet-a": "NASNet-A on images",
    "randwire": "randomly wired network on images",
    "resnet-50": "ResNet-50 on images",
    "rnn": "stack of simple recurrent layers",
    "seq2seq": "LSTM translation with attention",
    "squeezenet": "SqueezeNet on images",
    "t5": "T5 encoder and decoder",
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
    output: Annotated[Path | None, output_option("NAME.onnx in the current folder")] = None,
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
        where = f", weights in {weights}" if weights and weights.exists() else ""
        show(f"{target.message} ({written.nodes} operators, {format_mb(written.bytes / 1e6)}{where})")


def _builder_options() -> Iterator[inspect.Parameter]:
    """Yield an option for each parameter that a builder takes."""
    types = {"int": int, "float": float, "bool": bool}
    kinds = {name: types[kind] for builder in zoo.BUILDERS.values() for name, kind in builder.parameters.items()}
    for heading, texts in HELP.items():
        for name, meaning in texts.items():
            settings = typer.Option(metavar=_METAVARS[kinds[name]], help=meaning, rich_help_panel=heading)
            option = Annotated[kinds[name] | None, settings]  # type: ignore[valid-type] # a type all the same
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def model_descriptions() -> list[dict[str, Any]]:
    """Return name, kind, description, operators and size in MB of each builder and specification.

    Sizes are stored in ``models/sizes.json``, since building all models takes minutes.
    """
    sizes = json.loads((bundled_folder("models") / "sizes.json").read_text(encoding="utf-8"))
    return [{**_describe(name), **sizes.get(name, {"operators": None, "size_mb": None})} for name in zoo.names()]


def show_models(*, as_json: bool) -> None:
    """Print a table of builders and specifications, or the same as JSON."""
    descriptions = model_descriptions()
    if as_json:
        show_json({"models": descriptions})
        return
    table = FigureTable("", [key("model"), text("description"), "operators", "size"])
    for entry in descriptions:
        known = entry["operators"] is not None
        size = (str(entry["operators"]), format_mb(entry["size_mb"])) if known else ("", "")
        table.add_row(entry["name"], entry["description"], *size)
    show(table, "Build one with: chrion model NAME. Parameters are options: chrion model --help.")


def _describe(name: str) -> dict[str, str]:
    if name in zoo.BUILDERS:
        return {"name": name, "kind": "builder", "description": _FAMILIES[name]}
    spec = zoo.specification(name)
    family = next(f for f, builder in zoo.BUILDERS.items() if _is_of(spec, builder))
    default = zoo.specification(family)
    parameters = zoo.BUILDERS[family].parameters
    changed = [key for key in parameters if getattr(spec, key) != getattr(default, key)]
    details = ", ".join(f"{key} {getattr(spec, key)}" for key in changed) or "its defaults"
    return {"name": name, "kind": "specification", "description": f"{family} with {details}"}


def _is_of(spec: object, builder: Any) -> bool:
    """Return whether a builder builds a specification; recurrent builders share a class and differ in a fixed field."""
    return isinstance(spec, builder.spec) and all(getattr(spec, key) == value for key, value in builder.fixed.items())


_own = inspect.signature(model, eval_str=True)
_named = [parameter for parameter in _own.parameters.values() if parameter.name != "given"]
model.__signature__ = _own.replace(parameters=[*_named, *_builder_options()])  # type: ignore[attr-defined] # Typer reads it

"""``chrion model --list``."""

from __future__ import annotations

import json
from typing import Any

from chrion import zoo
from chrion.cli.console import show, show_json
from chrion.common.files import bundled_folder
from chrion.common.units import format_mb
from chrion.report.figure_table import FigureTable, key, text

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

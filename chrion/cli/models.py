"""``chrion model``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion import zoo
from chrion.cli.console import show, stderr
from chrion.errors import OptionError
from chrion.files import write_atomically


def model(
    name: Annotated[str, typer.Argument(help="lstm, gru, rnn, or a specification.", show_default=False)] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.  [default: NAME.onnx]")] = None,
    layers: Annotated[int | None, typer.Option(help="Recurrent layers.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size.")] = None,
    io: Annotated[int | None, typer.Option(help="Width of the input and of every layer.")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, steps.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Steps an operator takes: 1 unfolds all, SEQ folds all.")] = None,
    bidirectional: Annotated[bool | None, typer.Option(help="Run every layer in both directions.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List builders and specifications.")] = False,
) -> None:
    """Build a model with seeded random weights."""
    if list_all:
        show("\n".join(zoo.names()))
        return
    if not name:
        raise OptionError("model: a name is missing", hint="chrion model --list shows them")
    given = {
        "layers": layers,
        "batch": batch,
        "io": io,
        "seq": seq,
        "chunk": chunk,
        "bidirectional": bidirectional,
        "seed": seed,
    }
    built = zoo.build(name, {key: value for key, value in given.items() if value is not None})
    path = output or Path(f"{Path(name).stem}.onnx")
    write_atomically(path, built.SerializeToString())
    stderr.print(f"{path}: {len(built.graph.node)} nodes", highlight=False)

"""What commands share: where text goes, and options that several of them take.

Results go to stdout; progress, remarks and errors to stderr. With ``--json`` stdout holds one object and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chrion.errors import OptionError
from chrion.graph import Graph, load
from chrion.profiler import Profile, profile
from chrion.scheduler.policies.ios_merging import merged_variants
from chrion.scheduler.policies.registry import MERGING_POLICY
from chrion.units import parse_shape

stderr = Console(stderr=True, soft_wrap=True)

ModelArgument = Annotated[Path, typer.Argument(help="An ONNX model.", show_default=False)]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME=DxD", help="Shape of an input, or size of a named dimension. Repeatable."),
]
CoresOption = Annotated[int | None, typer.Option("--cores", metavar="K", help="CPU cores to use.  [default: all]")]
AcceleratorOption = Annotated[
    str | None,
    typer.Option(
        "--accelerator",
        metavar="NAME",
        help="cuda, webgpu, none, or any execution provider by name.  [default: what works here]",
    ),
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", metavar="P.json", help="A stored profile, of this or another machine.")
]
SloOption = Annotated[str | None, typer.Option("--slo", metavar="60ms", help="Latency that must not be exceeded.")]
AlphaOption = Annotated[
    float | None, typer.Option("--alpha", help="ms that a megabyte of accelerator memory is worth.")
]
GpuBudgetOption = Annotated[
    str | None,
    typer.Option("--gpu-budget", metavar="600MB", help="Resident accelerator memory that must not be exceeded."),
]
PolicyOption = Annotated[str, typer.Option("--policy", help="The scheduler.")]
StreamsOption = Annotated[
    int | None,
    typer.Option("--streams", metavar="N", help="Lanes of the accelerator, where a policy uses several.  [default: 4]"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def show(*renderables: Any) -> None:
    """Print results for people."""
    width = None if sys.stdout.isatty() else 140
    console = Console(width=width)
    for renderable in renderables:
        console.print(renderable, highlight=False)


def show_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(content))  # noqa: T201 - this is what stdout is for


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr; yields what to call with done, all, and what was done last."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task(text, total=None)

        def update(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{text}: {label}")

        yield update


def load_graph(model: Path, shapes: list[str] | None) -> Graph:
    """Load a model with ``--shape`` options."""
    return load(model, dict(parse_shape(text) for text in shapes or ()))


def stored_or_measured(
    graph: Graph,
    stored: Path | None,
    cores: int | None,
    accelerator: str | None,
    *,
    policies: Collection[str] = (),
    fresh: bool = False,
) -> Profile:
    """The profile of ``--profile``, or one measured here, with a progress bar; also of what policies may merge."""
    if stored is not None:
        if accelerator is not None:
            raise OptionError("--accelerator: a stored profile says itself which accelerator it has")
        return Profile.load(stored)
    variants = merged_variants(graph) if MERGING_POLICY in policies else ()
    with progress_bar("profile") as progress:
        return profile(graph, cores, accelerator or "auto", progress=progress, fresh=fresh, variants=variants)

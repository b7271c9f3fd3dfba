"""Arguments and options that several commands share, and the completion of their values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.devices.providers import PROVIDER_NAMES, SHORT_NAMES
from chrion.hardware import known_parts
from chrion.scheduler import describe_policies, policy_names
from chrion.serving.simulator.scenario import scenario_descriptions
from chrion.zoo import names


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    """Return the policies that begin with a text, with their descriptions."""
    return [(name, text) for name, text in describe_policies().items() if name.startswith(incomplete)]


def complete_policies(incomplete: str) -> list[str]:
    """Return comma-separated lists whose last policy begins with the last part of a text."""
    *before, last = incomplete.split(",")
    prefix = "".join(f"{name}," for name in before)
    return [prefix + name for name in policy_names() if name.startswith(last) and name not in before]


def complete_accelerator(incomplete: str) -> list[str]:
    """Return the short names of execution providers, and ``none``, that begin with a text."""
    return [name for name in (*PROVIDER_NAMES, "none") if name.startswith(incomplete)]


def complete_hardware(incomplete: str) -> list[str]:
    """Return machines whose last part begins with the last part of a text."""
    *before, last = incomplete.split("+")
    prefix = "".join(f"{name}+" for name in before)
    return [prefix + name for name in known_parts() if name.startswith(last) and name not in before]


def complete_model(incomplete: str) -> list[str]:
    """Return the builders and specifications that begin with a text."""
    return [name for name in names() if name.startswith(incomplete)]


def complete_scenario(incomplete: str) -> Iterator[tuple[str, str]]:
    """Return the bundled scenarios that begin with a text, with their descriptions."""
    return ((s.name, s.description) for s in scenario_descriptions() if s.name.startswith(incomplete))


#: The end of the help of an option that names a picture.
PICTURE = "a PNG, SVG or PDF file. Needs the extra plot (matplotlib)."


def output_option(default: str) -> Any:
    """Return the option that names the file to write, given the default in words."""
    return typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default=default)


ModelArgument = Annotated[Path, typer.Argument(help="An ONNX model.", metavar="MODEL", show_default=False)]
PlanArgument = Annotated[
    Path, typer.Argument(help="A plan, as `chrion partition` writes it.", metavar="PLAN", show_default=False)
]
ScenarioArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="A scenario file, or the name of a bundled scenario; see `chrion simulate --list`.",
        autocompletion=complete_scenario,
        show_default=False,
    ),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=SHAPE",
        help="Shape of an input by its name, x=1x96x64, or size of a named dimension, batch=8. Repeatable.",
    ),
]
CoresOption = Annotated[
    int | None,
    typer.Option(
        "--cores",
        metavar="K",
        min=1,
        help="Maximum number of CPU cores; of this machine, at most those of the process.",
        show_default="all physical cores",
    ),
]
AcceleratorOption = Annotated[
    str | None,
    typer.Option(
        "--accelerator",
        metavar="NAME",
        autocompletion=complete_accelerator,
        help=f"{SHORT_NAMES}, or an execution provider by its full name.",
        show_default="the first that works",
    ),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="l4+epyc-16",
        autocompletion=complete_hardware,
        help="Estimate costs from the datasheets of a machine's parts: names of `chrion hardware`, or TOML files.",
    ),
]
SloOption = Annotated[
    str | None, typer.Option("--slo", metavar="60ms", help="Latency limit: 60ms, 0.06s; a plain number is in ms.")
]
AlphaOption = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        metavar="A",
        help="Price of accelerator memory in ms per MB: L + A * M is minimised.",
        show_default="the least memory that meets the SLO; without an SLO, 0",
    ),
]
GpuBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-budget", metavar="600MB", help="Limit of resident accelerator memory; a plain number is in MB."
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="Precision of LSTM, GRU, RNN, MatMul and Gemm on CPU lanes: float32, or bf16 (faster, less exact).",
        show_default="float32",
    ),
]
MaxErrorOption = Annotated[
    float | None,
    typer.Option(
        "--max-error",
        metavar="E",
        help="Largest error with --precision bf16, relative to the largest output, for example 0.01.",
    ),
]
StreamsOption = Annotated[
    int | None,
    typer.Option(
        "--streams", metavar="N", help="Streams of the accelerator, for policies that use several.", show_default="4"
    ),
]
RoundsOption = Annotated[
    int, typer.Option("--rounds", min=1, metavar="N", help="Rounds; in each, every candidate is run for a while.")
]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Replace existing files.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the scenario. Repeatable.")
]

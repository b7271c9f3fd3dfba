"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chrion.cli.completion import complete_accelerator, complete_hardware, complete_policy
from chrion.profiler.profiles import stored_profiles
from chrion.scheduler import policy_names

ModelArgument = Annotated[Path, typer.Argument(help="An ONNX model.", metavar="MODEL", show_default=False)]
PlanArgument = Annotated[
    Path,
    typer.Argument(help="A plan, as `chrion partition` writes it.", metavar="PLAN", show_default=False),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=DxD",
        help="Shape of an input (x=1x3x224x224), or size of a named dimension (batch=8). Repeatable.",
    ),
]
CoresOption = Annotated[
    int | None,
    typer.Option("--cores", metavar="K", min=1, help="Maximum number of CPU cores.", show_default="all physical cores"),
]
AcceleratorOption = Annotated[
    str | None,
    typer.Option(
        "--accelerator",
        metavar="NAME",
        autocompletion=complete_accelerator,
        help="cuda, webgpu, none, or an execution provider by its full name.",
        show_default="the first that works",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="P.json",
        help=f"A stored profile of this or another machine: a file, or {', '.join(stored_profiles())}.",
        show_default="measure this machine",
    ),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="L4+EPYC-16",
        autocompletion=complete_hardware,
        help="Estimate costs from the datasheets of a machine's parts: names of `chrion hardware`, or TOML files.",
    ),
]
CorrectionsOption = Annotated[
    Path | None,
    typer.Option(
        "--corrections",
        metavar="P.json",
        help="A profile of some operators, measured on the machine of --hardware, to correct the estimates by.",
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
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="KIND",
        help="The memory that alpha prices in the default policy: resident, or paper for Equation 4.",
        show_default="resident if the profile has measured accelerator memory, else paper",
    ),
]
GpuBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-budget", metavar="600MB", help="Limit of resident accelerator memory; a plain number is in MB."
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy", metavar="NAME", autocompletion=complete_policy, help=f"The scheduler: {', '.join(policy_names())}."
    ),
]
StreamsOption = Annotated[
    int | None,
    typer.Option(
        "--streams", metavar="N", help="Lanes of the accelerator, for policies that use several.", show_default="4"
    ),
]
InputOption = Annotated[
    Path | None,
    typer.Option(
        "--input", metavar="X.npz", help="Arrays by input name, as numpy.savez writes them.", show_default="synthetic"
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Rounds per candidate.")]
ForceOption = Annotated[
    bool, typer.Option("--force", "-f", help="Replace existing files, also those that Chrion did not write.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
RunPlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN.json", help="Run this plan.", show_default="the session chooses")
]
RunPolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        autocompletion=complete_policy,
        help=f"Run the plan of this scheduler: {', '.join(policy_names())}.",
        show_default="the session chooses",
    ),
]

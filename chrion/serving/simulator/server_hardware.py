"""Servers whose figures come from datasheets: ``hardware = "l4+epyc-16"`` in a ``[[servers]]`` table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chrion.common.wrong_values import wrong_value
from chrion.errors import HardwareError, ScenarioError
from chrion.hardware import Hardware
from chrion.hardware import hardware as find_hardware

#: The GPU on which the times of variants were measured, unless a server's ``times_on`` names another one: the paper's.
TIMES_ON = "gtx-1080-ti"


@dataclass(frozen=True, slots=True)
class DatasheetFigures:
    """The figures of servers that datasheets provide."""

    hardware: str
    #: Figures that the servers have, by key.
    used: Mapping[str, float]
    #: Figures in whose place the servers have others, which the scenario gives.
    replaced: Mapping[str, float]


def complete_server(table: Any, folder: Path) -> tuple[Any, DatasheetFigures | None]:
    """Return a ``[[servers]]`` table with the figures of its hardware; keys of the table itself take precedence.

    The figures are estimates: the GPU's speed is the ratio of two rooflines.

    Args:
        table: The table.
        folder: The folder that paths of files refer to.

    Returns:
        The table, and the figures; None if the table names no hardware.

    Raises:
        ScenarioError: A part is unknown or damaged, or a machine has no GPU.
    """
    if not isinstance(table, Mapping) or not table.get("hardware"):
        return table, None
    machine = find_machine(table, "hardware", "", folder, "servers")
    reference = find_machine(table, "times_on", TIMES_ON, folder, "servers")
    try:
        speed = machine.gpu_speed(reference)
    except HardwareError as error:
        raise ScenarioError(f"servers.hardware: {error.message}") from error
    gpus = table.get("gpus", 1)  # what is not a number is refused later, with the other keys
    price = machine.price_per_hour * (gpus if type(gpus) is int else 1)
    figures = {"gpu_memory_gb": machine.gpu_memory_gb, "gpu_speed": speed, "pcie_gb_per_s": machine.pcie_gb_per_s}
    figures |= {"cost_per_hour": price} if price else {}
    figures |= {"cpu_cores": machine.cpu_cores} if machine.processor else {}
    used = {key: figure for key, figure in figures.items() if key not in table}
    replaced = {key: figure for key, figure in figures.items() if table.get(key, figure) != figure}
    return {**figures, **table}, DatasheetFigures(table["hardware"], used, replaced)


def find_machine(table: Mapping[str, Any], key: str, default: str, folder: Path, section: str) -> Hardware:
    """Return the machine that a key of a section names.

    Raises:
        ScenarioError: A part is unknown or damaged.
    """
    name = table.get(key) or default
    if not isinstance(name, str):
        raise wrong_value(f"{section}.{key}", "text", name, failure=ScenarioError)
    try:
        return find_hardware(name, folder)
    except HardwareError as error:
        raise ScenarioError(f"{section}.{key}: {error.message}", hint=error.hint) from error

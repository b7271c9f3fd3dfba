"""A description of the machine that a profile is measured on."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from chrion.machine.cores import physical_cores


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of a machine on which measurements depend."""

    #: The CPU model, as the system names it.
    cpu: str
    #: The number of physical cores that this process may use.
    cores: int
    #: The size of main memory.
    memory_mb: float
    #: The operating system and the architecture.
    system: str
    #: The version of onnxruntime.
    onnxruntime: str
    #: The name of the accelerator, or of its provider if unknown; None without an accelerator.
    accelerator: str | None = None
    #: The parts whose datasheets its costs are estimated from, ``l4+epyc-16`` for example; None if they were measured.
    hardware: str | None = None

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for machines with comparable measurements."""
        return hashlib.sha256(json.dumps(self._facts(), sort_keys=True).encode()).hexdigest()[:16]

    def difference(self, other: Machine) -> str:
        """Return the properties in which this machine differs from another; empty if measurements are comparable."""
        others = other._facts()
        differing = {name: fact for name, fact in self._facts().items() if fact != others.get(name)}
        gigabytes = differing.pop("memory_mb", None)
        parts = [f"{name} {fact}" for name, fact in differing.items()]
        return ", ".join(parts + ([f"memory {gigabytes} GB"] if gigabytes is not None else []))

    def _facts(self) -> dict[str, Any]:
        """Return the properties as plain data, with the memory in whole GB."""
        return machine_to_json(self) | {"memory_mb": round(self.memory_mb / 1000)}

    def __str__(self) -> str:
        extra = f", {self.accelerator}" if self.accelerator else ""
        estimated = ", estimated from datasheets" if self.hardware else ""
        return f"{self.cpu}, {self.cores} cores{extra}{estimated}"


def this_machine(accelerator: str | None = None) -> Machine:
    """Return a description of this machine.

    Args:
        accelerator: The execution provider in use, or None. A GPU that NVML lists is described by its own name.
    """
    # Planning reads descriptions of machines, but needs no onnxruntime.
    import onnxruntime as ort  # noqa: PLC0415

    from chrion.devices.nvml import gpus  # noqa: PLC0415
    from chrion.devices.providers import PROVIDER_NAMES  # noqa: PLC0415

    cards = gpus() if accelerator == PROVIDER_NAMES["cuda"] else ()
    return Machine(
        cpu=_cpu_model(),
        cores=len(physical_cores()),
        memory_mb=psutil.virtual_memory().total / 1e6,
        system=f"{platform.system()} {platform.machine()}",
        onnxruntime=ort.get_version_string(),
        accelerator=cards[0].name if cards else accelerator,
    )


def is_this_machine(machine: Machine) -> bool:
    """Return whether measurements of a machine hold on this one, so that its plans can be run and timed here."""
    return machine.fingerprint == this_machine(machine.accelerator).fingerprint


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """Return a machine as plain data; ``hardware`` is left out if it is None, as in files of earlier versions."""
    content = asdict(machine)
    if machine.hardware is None:
        del content["hardware"]
    return content


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

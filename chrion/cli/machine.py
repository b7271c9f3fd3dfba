"""``chrion devices``."""

from __future__ import annotations

from dataclasses import asdict

import onnxruntime as ort

from chrion.cli.console import JsonOption, show, show_json
from chrion.cores import physical_cores
from chrion.profiler.machine import this_machine
from chrion.devices.probe import why_unusable
from chrion.report import machine_table


def devices(as_json: JsonOption = False) -> None:
    """Show what this machine offers: cores, memory, execution providers."""
    machine = this_machine()
    providers = {name: why_unusable(name) for name in ort.get_available_providers()}
    if as_json:
        found = [{"name": n, "works": reason is None, "reason": reason} for n, reason in providers.items()]
        show_json(
            {**asdict(machine), "fingerprint": machine.fingerprint, "lanes": physical_cores(), "providers": found}
        )
    else:
        show(machine_table(machine, physical_cores(), providers))

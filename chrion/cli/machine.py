"""``chrion devices``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import onnxruntime as ort

from chrion.cli.console import JsonOption, show, show_json
from chrion.cores import physical_cores
from chrion.devices.nvml import gpus
from chrion.devices.probe import probe_provider
from chrion.devices.providers import CPU_PROVIDER, detect_accelerator, remedy
from chrion.profiler.machine import this_machine
from chrion.report import machine_table


def devices(as_json: JsonOption = False) -> None:
    """Show what this machine offers: cores, memory, execution providers, and why some of them do not work."""
    accelerator = detect_accelerator()
    machine = this_machine(accelerator)
    providers = [_described(name) for name in ort.get_available_providers()]
    cards = [asdict(gpu) for gpu in gpus()]
    found: dict[str, Any] = {
        **asdict(machine),
        "provider": accelerator,
        "fingerprint": machine.fingerprint,
        "lanes": physical_cores(),
        "providers": providers,
        "gpus": cards,
    }
    if as_json:
        show_json(found)
    else:
        show(machine_table(machine, physical_cores(), providers, cards))


def _described(provider: str) -> dict[str, Any]:
    trial = probe_provider(provider)
    working = trial.reason is None
    return {
        "name": provider,
        "works": working,
        "reason": trial.reason,
        "remedy": "" if working or provider == CPU_PROVIDER else remedy(provider),
        "base_memory_mb": trial.memory_mb,
    }

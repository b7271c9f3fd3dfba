"""``chrion devices``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import onnxruntime as ort

from chrion.cli.console import show, show_json, step
from chrion.cli.options import JsonOption
from chrion.devices.nvml import gpus
from chrion.devices.probe import probe_provider
from chrion.devices.providers import CPU_PROVIDER, detect_accelerator, remedy
from chrion.machine.cores import physical_cores
from chrion.native import available, operators_available
from chrion.profiler.machine import machine_to_json, this_machine
from chrion.report.tables import machine_table


def devices(as_json: JsonOption = False) -> None:
    """Show this machine's cores, memory, native libraries and execution providers, and why one does not work."""
    names = ort.get_available_providers()
    with step(f"trying {len(names)} execution providers") as update:
        accelerator = detect_accelerator()
        machine = this_machine(accelerator)
        providers = []
        for done, name in enumerate(names, start=1):
            providers.append(_probe(name))
            update(done, len(names), name)
        cards = [asdict(gpu) for gpu in gpus()]
    native = {"lanes": available(), "operators": operators_available()}
    if as_json:
        content: dict[str, Any] = {
            **machine_to_json(machine),
            "provider": accelerator,
            "fingerprint": machine.fingerprint,
        }
        show_json({**content, "lanes": physical_cores(), "native": native, "providers": providers, "gpus": cards})
    else:
        show(machine_table(machine, physical_cores(), native, providers, cards))


def _probe(provider: str) -> dict[str, Any]:
    """Return whether a provider works, and if not, why and what to install."""
    result = probe_provider(provider)
    works = result.reason is None
    return {
        "name": provider,
        "works": works,
        "reason": result.reason,
        "remedy": "" if works or provider == CPU_PROVIDER else remedy(provider),
        "base_memory_mb": result.memory_mb,
    }

"""Execution providers: names, probes, device memory and copies, and the options of particular providers."""

from chrion.devices.device import Device
from chrion.devices.providers import CPU_PROVIDER, provider_name, usable_provider

__all__ = ["CPU_PROVIDER", "Device", "provider_name", "usable_provider"]

"""Execution providers, their memory and copies to and from it, and what is particular to one of them."""

from chrion.devices.device import Device
from chrion.devices.providers import CPU_PROVIDER, provider_name, usable_provider

__all__ = ["CPU_PROVIDER", "Device", "provider_name", "usable_provider"]

"""Between graphs and costs: execution providers, their memory, copies to it and from it, and what is particular to one."""

from chrion.devices.device import Device
from chrion.devices.providers import CPU_PROVIDER, provider_name, usable_provider

__all__ = ["CPU_PROVIDER", "Device", "provider_name", "usable_provider"]

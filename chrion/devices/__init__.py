"""Execution providers: names, probes, device memory and copies, and the options of particular providers.

``Device`` is imported on first use: it needs onnx, which plain sessions do not.
"""

from typing import TYPE_CHECKING

from chrion.common.lazy_names import import_on_first_use
from chrion.devices.providers import CPU_PROVIDER, provider_name, usable_provider

if TYPE_CHECKING:
    from chrion.devices.device import Device
else:
    __getattr__ = import_on_first_use(__name__, {"Device": "chrion.devices.device"})

__all__ = ["CPU_PROVIDER", "Device", "provider_name", "usable_provider"]

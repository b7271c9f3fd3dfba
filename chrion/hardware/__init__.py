"""Hardware described by datasheets: accelerators, processors, links, and machines made of them."""

from chrion.hardware.catalogue import Hardware, hardware, known_parts
from chrion.hardware.parts import Accelerator, Cache, Figure, Link, Part, Processor, Rates

__all__ = [
    "Accelerator",
    "Cache",
    "Figure",
    "Hardware",
    "Link",
    "Part",
    "Processor",
    "Rates",
    "hardware",
    "known_parts",
]

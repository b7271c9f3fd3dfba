"""The known parts, and machines made of them: ``l4+epyc-16``, or ``./mine.toml+epyc-16+pcie-3``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from chrion.common.files import bundled_folder
from chrion.common.suggestions import did_you_mean
from chrion.errors import HardwareError
from chrion.hardware.parts import Accelerator, Link, Part, Processor, read_part

#: The intensity in operations per byte at which :meth:`Hardware.gpu_speed` compares machines. It is that of a matrix
#: product with few rows, as in recurrent networks and generation, and lies below the ridge point of every accelerator.
SPEED_INTENSITY = 16.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine made of parts. Everything that is derived from it is an estimate."""

    #: The parts as they were given, joined with ``+``.
    name: str
    accelerator: Accelerator | None
    processor: Processor | None
    #: The link between both; None without an accelerator.
    link: Link | None

    @property
    def title(self) -> str:
        """The titles of the processor and the accelerator."""
        parts: list[str] = [part.title for part in (self.processor, self.accelerator) if part]
        return ", ".join(parts)

    @property
    def gpu_memory_gb(self) -> float:
        """The size of the accelerator's memory; zero without one."""
        return self.accelerator.memory_gb if self.accelerator else 0.0

    @property
    def cpu_cores(self) -> int:
        """The number of CPU cores; zero if no processor was given."""
        return self.processor.cores if self.processor else 0

    @property
    def pcie_gb_per_s(self) -> float:
        """The bandwidth of large copies over the link; zero without an accelerator."""
        return self.link.copy_gb_per_s if self.link else 0.0

    @property
    def price_per_hour(self) -> float:
        """The price of a server for an hour in US dollars; zero if unknown.

        The price of an accelerator includes the cores that it is rented with, so a processor adds nothing to it.
        """
        part = self.accelerator or self.processor
        return part.price_per_hour if part else 0.0

    def gpu_speed(self, reference: Hardware, intensity: float = SPEED_INTENSITY) -> float:
        """Return how many times faster this accelerator is than that of another machine, by their rooflines.

        Args:
            reference: The other machine.
            intensity: Operations for each byte of memory traffic.

        Raises:
            HardwareError: One of the machines has no accelerator.
        """
        rates = []
        for machine in (self, reference):
            if machine.accelerator is None:
                raise HardwareError(f"hardware {machine.name!r}: it has no accelerator")
            rates.append(attainable_tflops(machine.accelerator, intensity))
        return rates[0] / rates[1]


def attainable_tflops(accelerator: Accelerator, intensity: float) -> float:
    """Return the attainable rate of matrix products in float32, min(peak, bandwidth * intensity), in TFLOPS.

    Source: S. Williams, A. Waterman and D. Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
    Architectures", Communications of the ACM 52(4), 2009.
    """
    return min(accelerator.matrix_tflops.float32, accelerator.bandwidth_gb_per_s * intensity / 1e3)


@functools.cache
def known_parts() -> dict[str, Part]:
    """Return the bundled parts by name, in alphabetical order."""
    return {path.stem: read_part(path) for path in sorted(bundled_folder("profiles").glob("hardware/*.toml"))}


def hardware(name: str, folder: Path | None = None) -> Hardware:
    """Return the machine of a text such as ``l4+epyc-16``.

    Args:
        name: An accelerator, a processor and a link, each at most once and in any order, joined with ``+``. Each is
            the name of a bundled part, or the path of a TOML file, which ends in ``.toml``. Without a link, it is the
            slower one of those that the accelerator and the processor have.
        folder: The folder in which files are looked for first; paths are relative to the current folder otherwise.

    Raises:
        HardwareError: A part is unknown or damaged, or there are two of one kind.
    """
    parts = [_find(text, name, folder) for text in _split(name, folder)]
    accelerators = [part for part in parts if isinstance(part, Accelerator)]
    processors = [part for part in parts if isinstance(part, Processor)]
    links = [part for part in parts if isinstance(part, Link)]
    for same in (accelerators, processors, links):
        if len(same) > 1:
            raise HardwareError(
                f"hardware {name!r}: {same[0].name} and {same[1].name} are both of kind {_kind(same[0])}",
                hint="name one accelerator, one processor and one link at most",
            )
    if not accelerators and not processors:
        raise HardwareError(f"hardware {name!r}: expected an accelerator or a processor", hint=_known_hint())
    processor = processors[0] if processors else None
    if not accelerators:
        return Hardware(name, None, processor, None)
    link = links[0] if links else _slower_link(accelerators[0], processor)
    return Hardware(name, accelerators[0], processor, link)


def _split(name: str, folder: Path | None) -> list[str]:
    """Return the parts of a text; a ``+`` in the path of an existing file does not divide it."""
    pieces = name.split("+")
    parts: list[str] = []
    while pieces:
        joined = ("+".join(pieces[:count]) for count in range(len(pieces), 1, -1))
        path = next((text for text in joined if text.endswith(".toml") and _path(text, folder).is_file()), pieces[0])
        del pieces[: path.count("+") + 1]
        parts.append(path.strip())
    return parts


def _path(text: str, folder: Path | None) -> Path:
    """Return the path of a file: in the folder if there is one, else relative to the current folder."""
    inside = None if folder is None else folder / text
    return inside if inside is not None and inside.is_file() else Path(text)


def _find(text: str, name: str, folder: Path | None = None) -> Part:
    if text.endswith(".toml"):
        return read_part(_path(text, folder))
    parts = known_parts()
    if text not in parts:
        hint = did_you_mean(text, parts, _known_hint())
        raise HardwareError(f"hardware {name!r}: unknown part {text!r}", hint=hint)
    return parts[text]


def _slower_link(accelerator: Accelerator, processor: Processor | None) -> Link:
    """Return the slower one of the links of an accelerator and a processor."""
    links = []
    for part in (accelerator, processor):
        if part is not None:
            link = _find(part.link, part.name)
            if not isinstance(link, Link):
                raise HardwareError(f"{part.name}: link = {part.link!r}: it is of kind {_kind(link)}")
            links.append(link)
    return min(links, key=lambda link: link.copy_gb_per_s)


def _kind(part: Part) -> str:
    return type(part).__name__.lower()


def _known_hint() -> str:
    kinds = {"accelerators": Accelerator, "processors": Processor, "links": Link}
    names = {
        kind: ", ".join(name for name, part in known_parts().items() if isinstance(part, part_type))
        for kind, part_type in kinds.items()
    }
    return "; ".join([*(f"{kind}: {text}" for kind, text in names.items()), "or a TOML file of your own: PART.toml"])

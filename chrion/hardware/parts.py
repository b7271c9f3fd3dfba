"""Parts of a machine as their datasheets describe them, each read from a TOML file.

::

    kind = "accelerator"                    # or "processor", "link"
    title = "NVIDIA L4"
    provider = "CUDAExecutionProvider"
    link = "pcie-4"

    [figures]
    memory_gb = { value = 24, source = "NVIDIA L4 Tensor Core GPU datasheet" }
    bandwidth_gb_per_s = 300                # a number alone is allowed too; its source is then the file

    [matrix_tflops]
    float32 = { value = 60, source = "..." }

``docs/hardware.md`` lists the keys of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, structs

from chrion.common.files import read_toml
from chrion.common.records import NonNegative, Positive, Record, read_record, refuse_unknown
from chrion.common.wrong_values import wrong_value
from chrion.errors import HardwareError


class Figure(Record, frozen=True):
    """A value, and the document that it is from."""

    value: float
    source: str


class Rates(Record, frozen=True):
    """Rates by element type; any other type is converted to one of these."""

    float32: Positive
    float64: Positive | None = None
    float16: Positive | None = None
    bfloat16: Positive | None = None
    int8: Positive | None = None


def rate_of(rates: Rates, element: str) -> float:
    """Return the rate of an element type; a type without a rate of its own is computed as float32."""
    return getattr(rates, element, None) or rates.float32


class Cache(Record, frozen=True):
    """A cache of a processor."""

    kilobytes: Positive
    #: The number of cores that share it.
    cores: Annotated[int, Meta(ge=1)]
    #: Bytes that one core reads from it in a cycle.
    bytes_per_cycle: Positive

    @property
    def bytes(self) -> float:
        """Its size."""
        return self.kilobytes * 1024


class Accelerator(Record, frozen=True):
    """An accelerator."""

    name: str
    title: str
    #: The execution provider that runs operators on it.
    provider: str
    #: The name of the link to the host.
    link: str
    memory_gb: Positive
    #: The bandwidth of its memory.
    bandwidth_gb_per_s: Positive
    #: Time of a kernel in addition to its arithmetic and memory traffic.
    launch_us: NonNegative
    #: Peak rates of matrix products, by element type; 1 TFLOPS = 10^12 operations per second.
    matrix_tflops: Rates
    #: Peak rates of all other arithmetic, by element type.
    vector_tflops: Rates
    #: Memory that is taken as soon as any model runs on it.
    base_memory_mb: NonNegative = 0.0
    #: The price of a server with this accelerator for an hour; zero if unknown.
    price_per_hour: NonNegative = 0.0
    #: Every figure of the file by its dotted key, with its source.
    figures: dict[str, Figure] = {}  # noqa: RUF012 - each record gets its own


class Processor(Record, frozen=True):
    """A processor."""

    name: str
    title: str
    link: str
    cores: Annotated[int, Meta(ge=1)]
    memory_gb: Positive
    #: The bandwidth of main memory, which all cores share.
    bandwidth_gb_per_s: Positive
    #: The bandwidth of main memory that one core reaches.
    core_bandwidth_gb_per_s: Positive
    #: The clock with one busy core, and with all cores busy.
    clock_ghz: Positive
    all_core_ghz: Positive
    #: Peak rates of one core by element type; a multiply-add counts as two operations.
    flops_per_cycle: Rates
    #: Caches, the smallest first.
    caches: tuple[Cache, ...] = ()
    price_per_hour: NonNegative = 0.0
    figures: dict[str, Figure] = {}  # noqa: RUF012 - each record gets its own

    def clock(self, busy: int) -> float:
        """Return the clock in GHz while ``busy`` cores are busy: linear between one core and all cores."""
        if self.cores <= 1:
            return self.clock_ghz
        return self.clock_ghz + (self.all_core_ghz - self.clock_ghz) * (busy - 1) / (self.cores - 1)


class Link(Record, frozen=True):
    """A link between the host and an accelerator."""

    name: str
    title: str
    #: The bandwidth of one direction.
    bandwidth_gb_per_s: Positive
    #: The share of the bandwidth that large copies reach.
    efficiency: Annotated[float, Meta(gt=0, le=1)]
    #: The fixed time of a copy.
    latency_us: NonNegative
    figures: dict[str, Figure] = {}  # noqa: RUF012 - each record gets its own

    @property
    def copy_gb_per_s(self) -> float:
        """The bandwidth that large copies reach."""
        return self.bandwidth_gb_per_s * self.efficiency


Part = Accelerator | Processor | Link


#: Keys of a file outside of ``[figures]``.
_TOP_KEYS = ("title", "provider", "link", "figures", "matrix_tflops", "vector_tflops", "flops_per_cycle", "caches")
_KINDS: Mapping[str, type[Part]] = {"accelerator": Accelerator, "processor": Processor, "link": Link}


def read_part(path: Path) -> Part:
    """Read a part from a TOML file.

    Raises:
        HardwareError: The file cannot be read, a key is unknown or missing, or a value has a wrong type or is out of
            range.
    """
    try:
        content = read_toml(path)
    except OSError as error:
        raise HardwareError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(f"{path}: not TOML: {error}") from error
    try:
        return _read(path, content)
    except HardwareError as error:
        raise HardwareError(f"{path}: {error.message}", hint=error.hint) from error


def _read(path: Path, content: dict[str, Any]) -> Part:
    name = content.pop("kind", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise wrong_value("kind", f"one of {', '.join(_KINDS)}", name, failure=HardwareError)
    known = {"figures", *kind.__struct_fields__}
    refuse_unknown(content, [key for key in _TOP_KEYS if key in known], "", HardwareError)
    figures: dict[str, Any] = {}
    values = _collect_figures(content, "", path.name, figures)
    numbers = read_record(dict[str, Any], values.pop("figures", {}), "figures", HardwareError)
    fields = [field for field in structs.fields(kind) if field.name not in {*_TOP_KEYS, "name"}]
    refuse_unknown(numbers, [field.name for field in fields], "figures", HardwareError)
    for field in fields:
        if field.required and field.name not in numbers:
            raise HardwareError(f"figures.{field.name} is missing")
    values |= numbers
    if str(values.get("link")).endswith(".toml") and (beside := path.parent / values["link"]).is_file():
        values["link"] = str(beside)
    caches = read_record(dict[str, Cache], values.pop("caches", {}), "caches", HardwareError)
    if caches:
        values["caches"] = tuple(sorted(caches.values(), key=lambda cache: cache.bytes))
    return read_record(kind, {**values, "name": path.stem, "figures": figures}, "", HardwareError)


def _collect_figures(table: Mapping[str, Any], prefix: str, source: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Return a table with numbers in place of figures, which are collected by their dotted keys, with their sources."""
    plain: dict[str, Any] = {}
    for key, given in table.items():
        at = f"{prefix}{key}"
        if isinstance(given, Mapping) and "value" not in given:
            plain[key] = _collect_figures(given, "" if at == "figures" else f"{at}.", source, figures)
            continue
        figure = given if isinstance(given, Mapping) else {"value": given}
        if isinstance(given, Mapping) or type(given) in {int, float}:
            figures[at] = {"source": source, **figure}
        value = figure["value"]
        plain[key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return plain

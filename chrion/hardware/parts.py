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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chrion.common.files import read_toml
from chrion.common.suggestions import did_you_mean
from chrion.errors import HardwareError

#: Element types with rates of their own; any other type is converted to one of these.
ELEMENT_TYPES = ("float64", "float32", "float16", "bfloat16", "int8")
#: The range of every figure: sums and quotients stay finite.
_SMALLEST, _LARGEST = 1e-6, 1e12
#: Figures that may be zero.
_MAY_BE_ZERO = ("launch_us", "latency_us", "base_memory_mb", "price_per_hour")


@dataclass(frozen=True, slots=True)
class Figure:
    """A value, and the document that it is from."""

    value: float
    source: str


#: Rates by element type; float32 always has one.
Rates = Mapping[str, float]


def rate_of(rates: Rates, element: str) -> float:
    """Return the rate of an element type; a type without a rate of its own is computed as float32."""
    return rates.get(element, rates["float32"])


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache of a processor."""

    name: str
    bytes: float
    #: The number of cores that share it.
    cores: int
    #: Bytes that one core reads from it in a cycle.
    bytes_per_cycle: float


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An accelerator."""

    name: str
    title: str
    #: The execution provider that runs operators on it.
    provider: str
    #: The name of the link to the host.
    link: str
    memory_gb: float
    #: The bandwidth of its memory.
    bandwidth_gb_per_s: float
    #: Time of a kernel in addition to its arithmetic and memory traffic.
    launch_us: float
    #: Peak rates of matrix products, by element type; 1 TFLOPS = 10^12 operations per second.
    matrix_tflops: Rates
    #: Peak rates of all other arithmetic, by element type.
    vector_tflops: Rates
    #: Memory that is taken as soon as any model runs on it.
    base_memory_mb: float = 0.0
    #: The price of a server with this accelerator for an hour; zero if unknown.
    price_per_hour: float = 0.0
    #: Every figure of the file by its dotted key, with its source.
    figures: Mapping[str, Figure] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor."""

    name: str
    title: str
    link: str
    cores: int
    memory_gb: float
    #: The bandwidth of main memory, which all cores share.
    bandwidth_gb_per_s: float
    #: The bandwidth of main memory that one core reaches.
    core_bandwidth_gb_per_s: float
    #: The clock with one busy core, and with all cores busy.
    clock_ghz: float
    all_core_ghz: float
    #: Peak rates of one core by element type; a multiply-add counts as two operations.
    flops_per_cycle: Rates
    #: Caches, the smallest first.
    caches: tuple[Cache, ...] = ()
    price_per_hour: float = 0.0
    figures: Mapping[str, Figure] = field(default_factory=dict, repr=False)

    def clock(self, busy: int) -> float:
        """Return the clock in GHz while ``busy`` cores are busy: linear between one core and all cores."""
        if self.cores <= 1:
            return self.clock_ghz
        return self.clock_ghz + (self.all_core_ghz - self.clock_ghz) * (busy - 1) / (self.cores - 1)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between the host and an accelerator."""

    name: str
    title: str
    #: The bandwidth of one direction.
    bandwidth_gb_per_s: float
    #: The share of the bandwidth that large copies reach.
    efficiency: float
    #: The fixed time of a copy.
    latency_us: float
    figures: Mapping[str, Figure] = field(default_factory=dict, repr=False)

    @property
    def copy_gb_per_s(self) -> float:
        """The bandwidth that large copies reach."""
        return self.bandwidth_gb_per_s * self.efficiency


Part = Accelerator | Processor | Link


@dataclass(frozen=True, slots=True)
class _Kind:
    """The keys of one kind of part."""

    texts: tuple[str, ...]
    figures: tuple[str, ...]
    optional: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()


_KINDS = {
    "accelerator": _Kind(
        texts=("title", "provider", "link"),
        figures=("memory_gb", "bandwidth_gb_per_s", "launch_us"),
        optional=("base_memory_mb", "price_per_hour"),
        rates=("matrix_tflops", "vector_tflops"),
    ),
    "processor": _Kind(
        texts=("title", "link"),
        figures=(
            "cores",
            "memory_gb",
            "bandwidth_gb_per_s",
            "core_bandwidth_gb_per_s",
            "clock_ghz",
            "all_core_ghz",
        ),
        optional=("price_per_hour",),
        rates=("flops_per_cycle",),
    ),
    "link": _Kind(texts=("title",), figures=("bandwidth_gb_per_s", "efficiency", "latency_us")),
}
_CACHE_KEYS = ("kilobytes", "cores", "bytes_per_cycle")


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
    return _Reader(path, content).part()


class _Reader:
    """A reader of one file's content; it collects every figure with its source."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path, self._content = path, content
        self._figures: dict[str, Figure] = {}

    def part(self) -> Part:
        """Return the part."""
        name = self._content.get("kind")
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise self._error(f"kind = {name!r}: expected one of {', '.join(_KINDS)}")
        tables = ("figures", *kind.rates, *(("caches",) if name == "processor" else ()))
        self._refuse_unknown(self._content, ("kind", *kind.texts, *tables), "")
        values: dict[str, Any] = {"name": self._path.stem}
        values |= {key: self._text(key) for key in kind.texts}
        if "link" in values:
            values["link"] = self._beside(values["link"])
        values |= self._read_figures("figures", kind.figures, kind.optional)
        values |= {key: self._read_figures(key, ("float32",), ELEMENT_TYPES) for key in kind.rates}
        if name == "link":
            self._check_share(values["efficiency"], "figures.efficiency")
            return Link(**values, figures=self._figures)
        if name == "accelerator":
            return Accelerator(**values, figures=self._figures)
        values["cores"] = self._whole(values["cores"], "figures.cores")
        return Processor(**values, caches=self._caches(), figures=self._figures)

    def _beside(self, name: str) -> str:
        """Return the path of a file in the folder of this one, if there is one of that name; else the name."""
        path = self._path.parent / name
        return str(path) if name.endswith(".toml") and path.is_file() else name

    def _caches(self) -> tuple[Cache, ...]:
        tables = self._table(self._content.get("caches", {}), "caches")
        found = []
        for name in tables:
            given = self._read_figures(f"caches.{name}", _CACHE_KEYS, (), tables[name])
            cores = self._whole(given["cores"], f"caches.{name}.cores")
            found.append(Cache(name, given["kilobytes"] * 1024, cores, given["bytes_per_cycle"]))
        return tuple(sorted(found, key=lambda cache: cache.bytes))

    def _read_figures(
        self, where: str, required: Iterable[str], optional: Iterable[str], given: Any = None
    ) -> dict[str, float]:
        """Return the figures of a table, and keep them with their sources."""
        table = self._table(self._content.get(where, {}) if given is None else given, where)
        required = tuple(required)
        self._refuse_unknown(table, (*required, *optional), f"{where}.")
        for key in required:
            if key not in table:
                raise self._error(f"{where}.{key} is missing")
        return {key: self._figure(value, f"{where}.{key}") for key, value in table.items()}

    def _figure(self, given: Any, where: str) -> float:
        value, source = given, self._path.name
        if isinstance(given, Mapping):
            self._refuse_unknown(given, ("value", "source"), f"{where}.")
            value, source = given.get("value"), given.get("source", source)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(f"{where}: expected a number, or {{ value = NUMBER, source = TEXT }}, found {given!r}")
        if not isinstance(source, str):
            raise self._error(f"{where}.source = {source!r}: expected text")
        least = 0.0 if where.rsplit(".", 1)[-1] in _MAY_BE_ZERO else _SMALLEST
        if not least <= value <= _LARGEST:
            raise self._error(f"{where} = {value!r}: expected a number from {least:g} to {_LARGEST:g}")
        self._figures[where.removeprefix("figures.")] = Figure(float(value), source)
        return float(value)

    def _whole(self, value: float, where: str) -> int:
        if value != int(value):
            raise self._error(f"{where} = {value:g}: expected a whole number")
        return int(value)

    def _check_share(self, value: float, where: str) -> None:
        if value > 1:
            raise self._error(f"{where} = {value:g}: expected a number above 0, at most 1")

    def _text(self, key: str) -> str:
        value = self._content.get(key)
        if not isinstance(value, str) or not value:
            raise self._error(f"{key} is missing" if value is None else f"{key} = {value!r}: expected text")
        return value

    def _table(self, value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error(f"{where}: expected a table, found {value!r}")
        return value

    def _refuse_unknown(self, table: Mapping[str, Any], known: Iterable[str], prefix: str) -> None:
        known = list(dict.fromkeys(known))
        for key in table:
            if key not in known:
                raise HardwareError(f"{self._path}: unknown key {prefix + key!r}", hint=did_you_mean(key, known))

    def _error(self, message: str) -> HardwareError:
        return HardwareError(f"{self._path}: {message}")

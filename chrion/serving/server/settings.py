"""``model.toml``: the settings of one model of a repository."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chrion.common.files import read_toml
from chrion.common.units import parse_duration_ms, parse_size_mb
from chrion.errors import InputError, ModelError
from chrion.serving.toml_sections import above_zero, at_least, one_of, read_section


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """``[batching]``: dynamic batching along the first dimension."""

    #: Rows of a batch at most.
    max_size: int = at_least(8, 2, 65536)
    #: Time for which a request waits for others; zero not to wait.
    max_delay: str = "1ms"

    @property
    def max_delay_ms(self) -> float:
        """Time for which a request waits for others."""
        return parse_duration_ms(self.max_delay, "batching.max_delay", zero=True)


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """``[generation]``: text by a decoder with a cache, through the OpenAI API."""

    #: Requests of an iteration at most.
    max_batch: int = at_least(8, 1, 65536)
    #: Host memory for keys and values.
    kv_memory: str = "256MB"
    #: Tokens of a prompt that one iteration processes at most; 0 for all.
    chunk: int = at_least(0, 0, 1_000_000)


@dataclass(frozen=True, slots=True)
class VariantSettings:
    """``[variants.NAME]``: one way to serve the model; the first is preferred, the last is the smallest."""

    #: Another ONNX file in the version's folder, with the same inputs and outputs; a quantised one for example.
    model: str = ""
    #: A plan of ``chrion partition``, relative to the version's folder.
    plan: str = ""
    device: str = one_of("cpu", ("cpu", "accelerator"))
    #: Memory on the accelerator; 0 for an estimate.
    memory_mb: float = at_least(0.0)
    #: Host memory; 0 for an estimate.
    host_mb: float = at_least(0.0)
    #: Expected time of a request; measurements replace it. 0 if unknown.
    latency_ms: float = at_least(0.0)
    #: CPU cores of a request; 0 for the model's.
    cores: int = at_least(0, 0, 1024)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The top level of ``model.toml``."""

    slo: str = ""
    #: Time within which a request must start, unless it has a timeout of its own.
    timeout: str = ""
    #: Time that a run may take; the server's if empty.
    max_run: str = ""
    #: Price of accelerator memory, in ms per MB: variants before the one with the least L + alpha * M are not used.
    alpha: float = at_least(0.0)
    priority: int = at_least(0, -1000, 1000)
    weight: float = above_zero(1.0)
    pinned: bool = False
    cores: int = at_least(1, 1, 1024)
    max_queue: int = at_least(256, 1, 1_000_000)
    versions: Any = "all"
    batching: BatchingSettings | None = None
    generation: GenerationSettings | None = None
    variants: Mapping[str, VariantSettings] = field(default_factory=dict)

    @property
    def slo_ms(self) -> float:
        """Latency objective; infinite for none."""
        return parse_duration_ms(self.slo, "slo") if self.slo else math.inf

    @property
    def timeout_ms(self) -> float:
        """Time within which a request must start; infinite for none."""
        return parse_duration_ms(self.timeout, "timeout") if self.timeout else math.inf

    @property
    def max_run_ms(self) -> float | None:
        """Time that a run may take; None for the server's."""
        return parse_duration_ms(self.max_run, "max_run") if self.max_run else None


def read_settings(path: Path) -> ModelSettings:
    """Return the settings of a ``model.toml``; defaults if it does not exist.

    Raises:
        ModelError: The file is not TOML, a key is unknown, or a value is out of range.
    """
    if not path.exists():
        return ModelSettings()
    try:
        content = read_toml(path)
        settings = _settings(content)
        _ = settings.slo_ms, settings.timeout_ms, settings.max_run_ms
        if settings.batching:
            _ = settings.batching.max_delay_ms
        if settings.generation:
            parse_size_mb(settings.generation.kv_memory, "generation.kv_memory")
    except (InputError, OSError, ValueError) as error:
        raise ModelError(f"{path.name}: {error}") from error
    return settings


def _settings(content: dict[str, Any]) -> ModelSettings:
    nested = {key: content.pop(key) for key in ("batching", "generation", "variants", "versions") if key in content}
    top = read_section(ModelSettings, content, "model")
    batching = read_section(BatchingSettings, nested["batching"], "batching") if "batching" in nested else None
    generation = (
        read_section(GenerationSettings, nested["generation"], "generation") if "generation" in nested else None
    )
    tables = nested.get("variants", {})
    if not isinstance(tables, Mapping):
        raise ModelError("variants: expected tables [variants.NAME]")
    variants = {name: read_section(VariantSettings, table, f"variants.{name}") for name, table in tables.items()}
    versions = nested.get("versions", "all")
    listed = isinstance(versions, list) and all(type(v) is int and v > 0 for v in versions)
    if versions not in ("all", "latest") and not listed:
        raise ModelError(f"versions = {versions!r}: expected 'all', 'latest' or a list of numbers")
    own = ("batching", "generation", "variants", "versions")
    known = {name: getattr(top, name) for name in top.__slots__ if name not in own}
    return ModelSettings(**known, versions=versions, batching=batching, generation=generation, variants=variants)

"""``model.toml``: the settings of one model of a repository."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from chrion.common.files import read_toml
from chrion.common.records import NonNegative, Positive, Record, read_record
from chrion.common.units import parse_duration_ms, parse_size_mb
from chrion.errors import InputError, ModelError
from chrion.graph.blocks import parse_block_ms
from chrion.profiler.precision import Precision
from chrion.serving.manager.records import MAX_DELAY_MS, MAX_QUEUE

#: A duration or a size with its unit, or a plain number in ms or MB.
Quantity = str | float
#: Faults of a file that its message has.
_NAMED = 5


class BatchingSettings(Record, frozen=True):
    """``[batching]``: dynamic batching along the first dimension."""

    #: Maximum rows of a batch.
    max_size: Annotated[int, Meta(ge=2, le=65536)] = 8
    #: Time for which a request waits for others; zero not to wait.
    max_delay: Quantity = f"{MAX_DELAY_MS:g}ms"

    @property
    def max_delay_ms(self) -> float:
        """Time for which a request waits for others."""
        return parse_duration_ms(self.max_delay, "batching.max_delay", zero=True)


class GenerationSettings(Record, frozen=True):
    """``[generation]``: text by a decoder with a cache, through the OpenAI API."""

    #: Maximum requests of an iteration.
    max_batch: Annotated[int, Meta(ge=1, le=65536)] = 8
    #: Host memory for keys and values.
    kv_memory: Quantity = "256MB"
    #: Maximum tokens of a prompt that one iteration processes; 0 for all.
    chunk: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class VariantSettings(Record, frozen=True):
    """``[variants.NAME]``: one way to serve the model; the first is preferred, the last is the smallest."""

    #: Another ONNX file in the version's folder, with the same inputs and outputs; a quantised one for example.
    model: str = ""
    #: A plan of ``chrion partition``, relative to the version's folder.
    plan: str = ""
    device: Literal["cpu", "accelerator"] = "cpu"
    #: Memory on the accelerator; 0 for an estimate.
    memory_mb: NonNegative = 0.0
    #: Host memory; 0 for an estimate.
    host_mb: NonNegative = 0.0
    #: Expected time of a request; measurements replace it. 0 if unknown.
    latency_ms: NonNegative = 0.0
    #: CPU cores of a request; 0 for the model's.
    cores: Annotated[int, Meta(ge=0, le=1024)] = 0


class ModelSettings(Record, frozen=True):
    """The top level of ``model.toml``."""

    slo: Quantity = ""
    #: Time within which a request must start, unless it has a timeout of its own.
    timeout: Quantity = ""
    #: Time that a run may take; the server's if empty.
    max_run: Quantity = ""
    #: Precision that plans of the model may have: with ``bf16``, outputs may be less exact than onnxruntime's.
    precision: Precision = "float32"
    #: Price of accelerator memory, in ms per MB: variants before the one with the least L + alpha * M are not used.
    alpha: NonNegative = 0.0
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    weight: Positive = 1.0
    pinned: bool = False
    cores: Annotated[int, Meta(ge=1, le=1024)] = 1
    #: Limit of a block's time; the model is served in blocks, between which others have their turn. Empty for whole.
    blocks: Quantity = ""
    max_queue: Annotated[int, Meta(ge=1, le=1_000_000)] = MAX_QUEUE
    versions: Literal["all", "latest"] | tuple[Annotated[int, Meta(ge=1)], ...] = "all"
    batching: BatchingSettings | None = None
    generation: GenerationSettings | None = None
    variants: dict[str, VariantSettings] = {}  # noqa: RUF012 - each record gets its own

    @property
    def slo_ms(self) -> float:
        """Latency objective; infinite for none."""
        return parse_duration_ms(self.slo, "slo") if self.slo != "" else math.inf

    @property
    def timeout_ms(self) -> float:
        """Time within which a request must start; infinite for none."""
        return parse_duration_ms(self.timeout, "timeout") if self.timeout != "" else math.inf

    @property
    def block_ms(self) -> float | None:
        """Limit of a block's time; None if the model is served whole."""
        return parse_block_ms(self.blocks, "blocks") if self.blocks != "" else None

    @property
    def max_run_ms(self) -> float | None:
        """Time that a run may take; None for the server's."""
        return parse_duration_ms(self.max_run, "max_run") if self.max_run != "" else None


def read_settings(path: Path) -> ModelSettings:
    """Return the settings of a ``model.toml``; defaults if it does not exist.

    Raises:
        ModelError: The file is not TOML, keys are unknown, or values are out of range; the message has all of these.
    """
    if not path.exists():
        return ModelSettings()
    try:
        table = read_toml(path)
    except (InputError, OSError, ValueError) as error:
        raise ModelError(f"{path.name}: {error}") from error
    faults = list(filter(None, map(_find_fault, _single_keys(table))))
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise ModelError(f"{path.name}: {'; '.join(faults[:_NAMED])}{more}")
    return read_record(ModelSettings, table)


def _single_keys(table: Mapping[str, Any], depth: int = 3) -> Iterator[dict[str, Any]]:
    """Yield a table for each key of a table and of those in it, so that each can be checked by itself.

    No key of the settings is required, and records are at most three deep: ``variants.NAME.cores``.
    """
    for key, value in table.items():
        if isinstance(value, dict) and value and depth > 1:
            yield from ({key: inner} for inner in _single_keys(value, depth - 1))
        else:
            yield {key: value}


def _find_fault(table: Mapping[str, Any]) -> str:
    """Return what is wrong with a table of settings, or an empty text."""
    try:
        settings = read_record(ModelSettings, table)
        _ = settings.slo_ms, settings.timeout_ms, settings.max_run_ms, settings.block_ms
        if settings.batching:
            _ = settings.batching.max_delay_ms
        if settings.generation:
            parse_size_mb(settings.generation.kv_memory, "generation.kv_memory")
    except (InputError, ValueError) as error:
        return str(error)
    return ""

"""The table ``[decoder]`` of a scenario; with ``hardware = "l4"`` in it, costs come from a datasheet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from chrion.common.records import Count, Positive, PositiveCount, Record, read_record
from chrion.errors import ScenarioError
from chrion.hardware.parts import rate_of
from chrion.serving.simulator.decoder_costs import TABULATED
from chrion.serving.simulator.server_hardware import find_machine

#: Keys that count with ``hardware`` only.
_OF_HARDWARE = ("weights_gb", "element_type", "kernels", "query_heads")
#: Bytes of an element.
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class DecoderSpec(Record, frozen=True):
    """``[decoder]``: what the cache needs and has."""

    #: Memory of the keys and values of one token in all layers.
    slot_bytes: PositiveCount = 131_072
    #: Memory for keys and values.
    cache_gb: Positive = 2.0
    #: Tokens whose keys and values are kept, in place of ``cache_gb``; 0 uses that.
    slots: Count = 0
    #: An accelerator whose datasheet provides costs and memory that are not given; see :mod:`chrion.hardware`.
    hardware: str = ""
    #: The weights that it reads in an iteration, their type, and its kernels; only with ``hardware``.
    weights_gb: Positive = 1.0
    element_type: Literal["float32", "float16", "bfloat16", "int8"] = "float16"
    kernels: Count = 400
    #: Query heads for each head of keys and values.
    query_heads: PositiveCount = 1
    #: Costs of iterations in which each request has one new token, and of the others; see
    #: :mod:`chrion.serving.simulator.decoder_costs`.
    costs: dict[str, Any] = {}  # noqa: RUF012 - each record gets its own
    prompt_costs: dict[str, Any] = {}  # noqa: RUF012


def complete_decoder(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a ``[decoder]`` table with costs and memory of its hardware, if it has any; its own keys take precedence.

    Costs are not completed if they are measured times.

    The figures are estimates: an iteration starts the kernels of the model, and takes the larger of the times of its
    arithmetic and its memory traffic. Each new token takes two operations for each weight. Each pair of a new token and
    one that it attends to takes two for each element of a token's keys and values and each query head of these. All
    weights are read once, and so are the keys and values of each request.

    Args:
        table: The table, in which ``hardware`` names an accelerator that has the weights, keys and values.
        folder: The folder that paths of files refer to.

    Raises:
        ScenarioError: A value is invalid, a part is unknown or damaged, there is no accelerator, or it has no room for
            the keys and values; or there are figures of weights without hardware.
    """
    spec = read_record(DecoderSpec, table, "decoder")
    if not spec.hardware:
        if useless := next((key for key in _OF_HARDWARE if key in table), None):
            raise ScenarioError(f"decoder.{useless}: has no effect without hardware", hint='add hardware = "l4"')
        return dict(table)
    accelerator = find_machine(table, "hardware", "", folder, "decoder").accelerator
    if accelerator is None:
        raise ScenarioError(f"decoder.hardware: {table['hardware']!r} has no accelerator")
    room_gb = accelerator.memory_gb - accelerator.base_memory_mb / 1e3 - spec.weights_gb
    if room_gb <= 0:
        raise ScenarioError(
            f"decoder.weights_gb = {spec.weights_gb:g}: {accelerator.title} has no room for keys and values",
            hint=f"it has {accelerator.memory_gb:g} GB",
        )
    given_gb = {"cache_gb": spec.cache_gb if "cache_gb" in table else 0.0, "slots": spec.slots * spec.slot_bytes / 1e9}
    for name, needed_gb in given_gb.items():
        if needed_gb > room_gb:
            raise ScenarioError(
                f"decoder.{name} = {getattr(spec, name):.12g}: {accelerator.title} has room for {room_gb:.3g} GB of "
                f"keys and values, found {needed_gb:.4g} GB",
                hint=f"it has {accelerator.memory_gb:g} GB, of which weights take {spec.weights_gb:g}",
            )
    if TABULATED in spec.costs:
        return {"cache_gb": room_gb, **table}
    per_ms = accelerator.bandwidth_gb_per_s * 1e6
    weights = spec.weights_gb * 1e9 / ELEMENT_BYTES[spec.element_type]
    per_operation = 1 / (rate_of(accelerator.matrix_tflops, spec.element_type) * 1e9)
    elements = spec.slot_bytes / ELEMENT_BYTES[spec.element_type]
    costs = {
        "fixed_ms": spec.kernels * accelerator.launch_us / 1e3,
        "token_ms": 2 * weights * per_operation,
        "pair_ms": 2 * elements * spec.query_heads * per_operation,
        "weights_ms": spec.weights_gb * 1e9 / per_ms,
        "context_ms": spec.slot_bytes / per_ms,
    }
    return {"cache_gb": room_gb, **table, "costs": {**costs, **spec.costs}}

"""Scenarios with a decoder: its costs, how requests are batched, and the requests.

A scenario file with the table ``[decoder]`` is of this kind; ``docs/simulate-decoders.md`` lists its keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, structs

from chrion.common.records import Count, NonNegative, PositiveCount, Record, read_record
from chrion.common.suggestions import did_you_mean
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError, ScenarioError
from chrion.serving.simulator.decoder_costs import Costs, IterationCosts, RooflineCosts, TabulatedCosts, read_costs
from chrion.serving.simulator.decoder_requests import GenerationSpec, check_requests, has_groups
from chrion.serving.simulator.decoder_table import DecoderSpec, complete_decoder
from chrion.serving.simulator.scenario import ScenarioSource

#: The table that makes a scenario one of this kind.
DECODER = "decoder"
#: Maximum replicas of a scenario (a choice, not measured).
MAX_REPLICAS = 10_000


class BatchingSpec(Record, frozen=True):
    """``[batching]``: the arguments of the scheduler."""

    max_batch: PositiveCount = 8
    #: Batches in flight, each on another part of the model.
    n_workers: Annotated[int, Meta(ge=1, le=1000)] = 1
    #: Maximum tokens of a prompt that one iteration processes; 0 for all.
    chunk: Count = 0
    #: Slots of a block of keys and values, which requests take as they grow; 0 to reserve all slots of a request.
    block: Count = 0


class ReplicasSpec(Record, frozen=True):
    """``[replicas]``: equal decoders, and which one a request goes to."""

    count: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] = 1
    routing: Literal["least-loaded", "random", "session", "prefix"] = "least-loaded"


class ObjectivesSpec(Record, frozen=True):
    """``[slo]``: objectives of a request; 0 for none."""

    first_token_ms: NonNegative = 0.0
    #: Of the mean time between two tokens of a request.
    between_tokens_ms: NonNegative = 0.0


class DecoderFile(Record, frozen=True):
    """The top level of a scenario with a decoder."""

    decoder: DecoderSpec
    name: str = ""
    description: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0
    policies: Annotated[tuple[Literal["iteration", "request"], ...], Meta(min_length=1)] = ("iteration", "request")
    batching: BatchingSpec = BatchingSpec()
    replicas: ReplicasSpec = ReplicasSpec()
    requests: GenerationSpec = GenerationSpec()
    slo: ObjectivesSpec = ObjectivesSpec()


_SECTIONS: Mapping[str, type[Record]] = {
    "decoder": DecoderSpec,
    "batching": BatchingSpec,
    "replicas": ReplicasSpec,
    "requests": GenerationSpec,
    "slo": ObjectivesSpec,
}
_COSTS = (IterationCosts, TabulatedCosts, RooflineCosts)
_PROMPT_COSTS = "decoder.prompt_costs"
_TOP_KEYS = ("name", "description", "seed", "policies")


class DecoderScenario(DecoderFile, frozen=True, kw_only=True):
    """A checked scenario with a decoder: its file with all changes, costs and the memory that follow from it."""

    #: Of iterations in which each request has one new token, and of the others.
    costs: Costs
    prompt_costs: Costs
    #: The folder of a relative path of a trace.
    folder: Path
    #: The content of the scenario file with all changes.
    content: Mapping[str, Any]

    @property
    def estimated_hardware(self) -> tuple[str, ...]:
        """The hardware whose figures are from a datasheet."""
        return (self.decoder.hardware,) if self.decoder.hardware else ()

    @property
    def is_steady(self) -> bool:
        """Whether requests arrive at the same rate all the time."""
        return not (self.requests.is_replay or self.requests.curve)

    @property
    def slots(self) -> int:
        """Tokens whose keys and values have room."""
        return self.decoder.slots or max(1, int(self.decoder.cache_gb * 1e9) // self.decoder.slot_bytes)

    def iteration_ms(self, tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> float:
        """Return the time of an iteration; see :class:`chrion.serving.simulator.decoder_costs.Costs`."""
        costs = self.costs if max(tokens) == 1 else self.prompt_costs
        return costs.iteration_ms(tokens, past, chosen)


def build_decoder_scenario(source: ScenarioSource) -> DecoderScenario:
    """Return the scenario of a source, with all changes and defaults, checked.

    Raises:
        OptionError: The key of a change is unknown.
        ScenarioError: The scenario is invalid.
    """
    content = _changed(source.content, source.sets)
    with source.named():
        return _build(content, source)


def _build(content: Mapping[str, Any], source: ScenarioSource) -> DecoderScenario:
    if other := next((key for key in ("servers", "models", "workload") if key in content), None):
        raise ScenarioError(f"{other}: not in a scenario with [decoder]", hint="simulate clusters in another file")
    file = read_record(DecoderFile, content)
    if len(set(file.policies)) < len(file.policies):
        raise ScenarioError(f"policies = {list(file.policies)!r}: a policy occurs twice")
    decoder = read_record(DecoderSpec, complete_decoder(content[DECODER], source.folder), "decoder")
    costs, prompt_costs = read_costs(decoder.costs, decoder.prompt_costs, of_hardware=bool(decoder.hardware))
    check_requests(file.requests, content.get("requests", {}), source.folder)
    given = structs.asdict(file) | {"name": content.get("name", source.name), "decoder": decoder}
    scenario = DecoderScenario(**given, costs=costs, prompt_costs=prompt_costs, folder=source.folder, content=content)
    _check_combination(scenario)
    return scenario


def _check_combination(scenario: DecoderScenario) -> None:
    """Refuse what keys and values in blocks do not support, what has an effect with them only, and useless routing.

    Raises:
        ScenarioError: There is something of the kind.
    """
    batching, block = scenario.batching, scenario.batching.block
    if block and scenario.policies != ("iteration",):
        hint = 'set policies = ["iteration"]'
        raise ScenarioError("batching.block: request-level scheduling reserves all slots of a request", hint=hint)
    if block and batching.n_workers > 1:
        raise ScenarioError(f"batching.n_workers = {batching.n_workers}: expected 1 with batching.block")
    if block > scenario.slots:
        raise wrong_value(
            "batching.block", f"at most the {scenario.slots} slots of the memory", block, failure=ScenarioError
        )
    if not block and (scenario.requests.prefixes or scenario.replicas.routing == "prefix"):
        key = "requests.prefixes" if scenario.requests.prefixes else "replicas.routing = 'prefix'"
        raise ScenarioError(f"{key}: keys and values of prefixes are kept in blocks", hint="set batching.block")
    routing = scenario.replicas.routing
    if routing in ("session", "prefix") and not has_groups(scenario.requests, routing, scenario.folder):
        raise ScenarioError(f"replicas.routing = {routing!r}: no request has a {routing}")


def _changed(content: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with some values changed, by path (``batching.max_batch``) or by the last part of it.

    The terms of ``[decoder.prompt_costs]`` have the names of those of ``[decoder.costs]``, and are changed by path.
    """
    changed = copy.deepcopy(dict(content))
    for key, value in sets.items():
        if key in _TOP_KEYS:
            changed[key] = value
            continue
        *path, last = decoder_path(key)
        table = changed
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise wrong_value(part, "a table", table, failure=ScenarioError)
        table[last] = value
    return changed


def decoder_path(key: str) -> list[str]:
    """Return the full path of a key of a scenario with a decoder.

    Raises:
        OptionError: No section has it.
    """
    sections = [(name, kind) for name, kind in _SECTIONS.items()]
    sections += [(name, kind) for name in ("decoder.costs", _PROMPT_COSTS) for kind in _COSTS]
    paths = list(dict.fromkeys(f"{name}.{key}" for name, kind in sections for key in kind.__struct_fields__))
    by_last = [path for path in paths if path.rsplit(".", 1)[-1] == key and not path.startswith(_PROMPT_COSTS)]
    matches = [key] if key in paths else by_last
    if len(matches) != 1:
        known = [*paths, *(path.rsplit(".", 1)[-1] for path in paths)]
        hint = did_you_mean(key, known, "docs/simulate-decoders.md lists all keys")
        raise OptionError(f"unknown key {key!r}", hint=hint)
    return matches[0].split(".")

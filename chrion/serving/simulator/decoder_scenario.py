"""Scenarios with a decoder: its costs, how requests are batched, and the requests.

A scenario file with the table ``[decoder]`` is of this kind; ``docs/simulate-decoders.md`` lists its keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from chrion.common.suggestions import did_you_mean
from chrion.errors import OptionError, ScenarioError
from chrion.generation.scheduling import POLICIES
from chrion.serving.simulator.decoder_table import COSTS, DecoderSpec, complete_decoder, costs_table
from chrion.serving.simulator.scenario import ScenarioSource
from chrion.serving.toml_sections import above_zero, at_least, read_section, refuse_unknown

#: The table that makes a scenario one of this kind.
DECODER = "decoder"
#: The most requests of a scenario; their figures are in memory.
_MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class IterationCosts:
    """``[decoder.costs]`` and ``[decoder.prompt_costs]``: the time of an iteration as a sum of terms, in ms."""

    #: For each iteration.
    fixed_ms: float = at_least(5.0)
    #: For each new token of a request: the matrix products.
    token_ms: float = at_least(0.05)
    #: For each request that gets a token: its choice.
    request_ms: float = at_least(0.05)
    #: For each pair of a new token and a token that it attends to: the attention.
    pair_ms: float = at_least(0.0)
    #: For each iteration of several requests: products of matrices in place of a matrix and a vector.
    batch_ms: float = at_least(0.0)

    @staticmethod
    def features(tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> tuple[float, ...]:
        """Return the numbers that the terms multiply.

        Args:
            tokens: New tokens of each request.
            past: Tokens of each request in the cache.
            chosen: The requests that get a token; None for all.
        """
        pairs = sum(new * before + new * (new + 1) / 2 for new, before in zip(tokens, past, strict=True))
        count = len(tokens) if chosen is None else chosen
        return 1.0, float(sum(tokens)), float(count), pairs, float(len(tokens) > 1)

    def iteration_ms(self, tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> float:
        """Return the time of an iteration; see :meth:`features`."""
        terms = (self.fixed_ms, self.token_ms, self.request_ms, self.pair_ms, self.batch_ms)
        return sum(term * number for term, number in zip(terms, self.features(tokens, past, chosen), strict=True))


@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """``[batching]``: the arguments of the scheduler."""

    max_batch: int = at_least(8, 1)
    #: Batches in flight, each on another part of the model.
    n_workers: int = at_least(1, 1, 1000)
    #: The most tokens of a prompt that one iteration processes; 0 for all.
    chunk: int = at_least(0)


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """``[requests]``: Poisson arrivals, and lengths with uniform distributions, both ends included."""

    rate_per_s: float = above_zero(1.0)
    requests: int = at_least(1000, 1, _MOST_REQUESTS)
    prompt_least: int = at_least(32, 1)
    prompt_most: int = at_least(512, 1)
    new_least: int = at_least(1, 1)
    new_most: int = at_least(128, 1)


_SECTIONS: Mapping[str, type] = {"decoder": DecoderSpec, "batching": BatchingSpec, "requests": GenerationSpec}
_PROMPT_COSTS = "decoder.prompt_costs"
_TOP_KEYS = ("name", "description", "seed", "policies")


@dataclass(frozen=True, slots=True)
class DecoderScenario:
    """A checked scenario with a decoder."""

    name: str
    seed: int
    #: Names of policies of batching, all of which get the same requests.
    policies: tuple[str, ...]
    decoder: DecoderSpec
    #: Of iterations in which each request has one new token, and of the others.
    costs: IterationCosts
    prompt_costs: IterationCosts
    batching: BatchingSpec
    requests: GenerationSpec
    #: The content of the scenario file with all changes.
    content: Mapping[str, Any] = field(repr=False)

    @property
    def estimated_hardware(self) -> tuple[str, ...]:
        """The hardware whose figures are from a datasheet."""
        return (self.decoder.hardware,) if self.decoder.hardware else ()

    @property
    def slots(self) -> int:
        """Tokens whose keys and values have room."""
        return self.decoder.slots or max(1, int(self.decoder.cache_gb * 1e9) // self.decoder.slot_bytes)

    def iteration_ms(self, tokens: Sequence[int], past: Sequence[int], chosen: int | None = None) -> float:
        """Return the time of an iteration; see :meth:`IterationCosts.features`.

        Costs of measured iterations with prompts are averages over all of their requests. Those of a datasheet are not:
        the attention of requests with one new token reads as much beside prompts as without them.
        """
        if max(tokens) == 1:
            return self.costs.iteration_ms(tokens, past, chosen)
        time_ms = self.prompt_costs.iteration_ms(tokens, past, chosen)
        if self.decoder.hardware:
            pairs = sum(before + 1 for new, before in zip(tokens, past, strict=True) if new == 1)
            time_ms += (self.costs.pair_ms - self.prompt_costs.pair_ms) * pairs
        return time_ms


def is_decoder_scenario(source: ScenarioSource) -> bool:
    """Return whether a scenario has a decoder."""
    return DECODER in source.content


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
    refuse_unknown(content, (*_TOP_KEYS, *_SECTIONS), "scenario")
    seed, policies = content.get("seed", 0), content.get("policies", list(POLICIES))
    if type(seed) is not int or seed < 0:
        raise ScenarioError(f"seed = {seed!r}: expected a whole number of at least 0")
    if not isinstance(policies, list) or not policies or not set(map(str, policies)) <= set(POLICIES):
        raise ScenarioError(f"policies = {policies!r}: expected a list of {', '.join(POLICIES)}")
    if len(set(policies)) < len(policies):
        raise ScenarioError(f"policies = {policies!r}: a policy occurs twice")
    decoder = dict(_table(content, "decoder"))
    decoder = complete_decoder(decoder, source.folder)
    tables = {name: costs_table(decoder, name) for name in COSTS}
    costs = _read_costs(tables["costs"], "decoder.costs")
    prompt_table = {**asdict(costs), **tables["prompt_costs"]}
    # Those of hardware may be 0 if the file changes its costs: then only tokens in the cache take time.
    written = "prompt_costs" in content.get("decoder", {})
    prompt_costs = _read_costs(prompt_table, _PROMPT_COSTS, may_be_zero=not written)
    requests = read_section(GenerationSpec, _table(content, "requests"), "requests")
    for name in ("prompt", "new"):
        least, most = (getattr(requests, f"{name}_{end}") for end in ("least", "most"))
        if least > most:
            raise ScenarioError(f"requests.{name}_least = {least}: expected at most {name}_most = {most}")
    return DecoderScenario(
        name=str(content.get("name", source.name)),
        seed=seed,
        policies=tuple(policies),
        decoder=read_section(DecoderSpec, {key: decoder[key] for key in decoder if key not in COSTS}, "decoder"),
        costs=costs,
        prompt_costs=prompt_costs,
        batching=read_section(BatchingSpec, _table(content, "batching"), "batching"),
        requests=requests,
        content=content,
    )


def _read_costs(table: Any, where: str, *, may_be_zero: bool = False) -> IterationCosts:
    costs = read_section(IterationCosts, table, where)
    if not may_be_zero and not any((costs.fixed_ms, costs.token_ms, costs.request_ms, costs.pair_ms)):
        raise ScenarioError(f"{where}: expected a term above 0")
    return costs


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, Mapping):
        raise ScenarioError(f"{name}: expected a table, found {table!r}")
    return table


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
                raise ScenarioError(f"{part}: expected a table, found {table!r}")
        table[last] = value
    return changed


def decoder_path(key: str) -> list[str]:
    """Return the full path of a key of a scenario with a decoder.

    Raises:
        OptionError: No section has it.
    """
    sections = {**_SECTIONS, "decoder.costs": IterationCosts, _PROMPT_COSTS: IterationCosts}
    paths = [f"{name}.{entry.name}" for name, kind in sections.items() for entry in fields(kind)]
    by_last = [path for path in paths if path.rsplit(".", 1)[-1] == key and not path.startswith(_PROMPT_COSTS)]
    found = [key] if key in paths else by_last
    if len(found) != 1:
        known = [*paths, *(path.rsplit(".", 1)[-1] for path in paths)]
        raise OptionError(f"unknown key {key!r}", hint=did_you_mean(key, known, f"known: {', '.join(paths)}"))
    return found[0].split(".")

"""Scenarios with a decoder: its costs, how requests are batched, and the requests.

A scenario file with the table ``[decoder]`` is of this kind; ``docs/simulate-decoders.md`` lists its keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import asdict

from chrion.common.records import Count, NonNegative, Positive, PositiveCount, Record, read_record
from chrion.common.suggestions import did_you_mean
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError, ScenarioError
from chrion.serving.simulator.decoder_table import DecoderSpec, complete_decoder
from chrion.serving.simulator.scenario import ScenarioSource

#: The table that makes a scenario one of this kind.
DECODER = "decoder"
#: Maximum requests of a scenario, whose figures are in memory (a choice, not measured).
_MAX_REQUESTS = 10_000_000


class IterationCosts(Record, frozen=True):
    """``[decoder.costs]`` and ``[decoder.prompt_costs]``: the time of an iteration as a sum of terms, in ms."""

    #: For each iteration.
    fixed_ms: NonNegative = 5.0
    #: For each new token of a request: the matrix products.
    token_ms: NonNegative = 0.05
    #: For each request that gets a token: its choice.
    request_ms: NonNegative = 0.05
    #: For each pair of a new token and a token that it attends to: the attention.
    pair_ms: NonNegative = 0.0
    #: For each iteration of several requests: products of matrices in place of a matrix and a vector.
    batch_ms: NonNegative = 0.0

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


class BatchingSpec(Record, frozen=True):
    """``[batching]``: the arguments of the scheduler."""

    max_batch: PositiveCount = 8
    #: Batches in flight, each on another part of the model.
    n_workers: Annotated[int, Meta(ge=1, le=1000)] = 1
    #: Maximum tokens of a prompt that one iteration processes; 0 for all.
    chunk: Count = 0


class GenerationSpec(Record, frozen=True):
    """``[requests]``: Poisson arrivals, and lengths with uniform distributions, both ends included."""

    rate_per_s: Positive = 1.0
    requests: Annotated[int, Meta(ge=1, le=_MAX_REQUESTS)] = 1000
    prompt_least: PositiveCount = 32
    prompt_most: PositiveCount = 512
    new_least: PositiveCount = 1
    new_most: PositiveCount = 128


class DecoderFile(Record, frozen=True):
    """The top level of a scenario with a decoder."""

    decoder: DecoderSpec
    name: str = ""
    description: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0
    policies: Annotated[tuple[Literal["iteration", "request"], ...], Meta(min_length=1)] = ("iteration", "request")
    batching: BatchingSpec = BatchingSpec()
    requests: GenerationSpec = GenerationSpec()


_SECTIONS: Mapping[str, type[Record]] = {"decoder": DecoderSpec, "batching": BatchingSpec, "requests": GenerationSpec}
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
    file = read_record(DecoderFile, content)
    if len(set(file.policies)) < len(file.policies):
        raise ScenarioError(f"policies = {list(file.policies)!r}: a policy occurs twice")
    decoder = read_record(DecoderSpec, complete_decoder(content[DECODER], source.folder), "decoder")
    costs = _read_costs(decoder.costs, "decoder.costs")
    prompt_table = {**asdict(costs), **decoder.prompt_costs}
    # Those of hardware may be 0 if the file changes its costs: then only tokens in the cache take time.
    written = "prompt_costs" in content[DECODER]
    prompt_costs = _read_costs(prompt_table, _PROMPT_COSTS, may_be_zero=not written)
    for name in ("prompt", "new"):
        minimum, maximum = (getattr(file.requests, f"{name}_{end}") for end in ("least", "most"))
        if minimum > maximum:
            expected = f"at most {name}_most = {maximum}"
            raise wrong_value(f"requests.{name}_least", expected, minimum, failure=ScenarioError)
    return DecoderScenario(
        name=content.get("name", source.name),
        seed=file.seed,
        policies=file.policies,
        decoder=decoder,
        costs=costs,
        prompt_costs=prompt_costs,
        batching=file.batching,
        requests=file.requests,
        content=content,
    )


def _read_costs(table: Any, where: str, *, may_be_zero: bool = False) -> IterationCosts:
    costs = read_record(IterationCosts, table, where)
    if not may_be_zero and not any((costs.fixed_ms, costs.token_ms, costs.request_ms, costs.pair_ms)):
        raise ScenarioError(f"{where}: expected a term above 0")
    return costs


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
    sections: dict[str, type[Record]] = {**_SECTIONS, "decoder.costs": IterationCosts, _PROMPT_COSTS: IterationCosts}
    paths = [f"{name}.{key}" for name, kind in sections.items() for key in kind.__struct_fields__]
    by_last = [path for path in paths if path.rsplit(".", 1)[-1] == key and not path.startswith(_PROMPT_COSTS)]
    matches = [key] if key in paths else by_last
    if len(matches) != 1:
        known = [*paths, *(path.rsplit(".", 1)[-1] for path in paths)]
        raise OptionError(f"unknown key {key!r}", hint=did_you_mean(key, known, f"known: {', '.join(paths)}"))
    return matches[0].split(".")

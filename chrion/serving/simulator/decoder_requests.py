"""The requests to a decoder: their times of arrival, and the lengths of prompts and outputs, drawn or from a trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from chrion.common.records import Count, NonNegative, Positive, PositiveCount
from chrion.common.wrong_values import wrong_value
from chrion.errors import ScenarioError, TraceError
from chrion.serving.simulator.rate_curve import RateCurve
from chrion.serving.simulator.requests import Floats, Indices
from chrion.serving.simulator.settings import SYNTHETIC, ArrivalsSpec
from chrion.serving.simulator.traces import Arrivals, Tokens, read_trace
from chrion.serving.simulator.workload import TraceReplay

#: Maximum requests of a scenario, whose figures are in memory (a choice, not measured).
MAX_REQUESTS = 10_000_000
#: Distributions of lengths with a mean and a variation; the others are uniform, or from a trace.
_SHAPED = ("lognormal", "gamma")
#: Keys that have an effect with some kinds of arrivals or lengths only.
_OF_DRAWN_TIMES = ("rate_per_s", "requests", "curve", "lengths", "sessions", "prefixes", "prefix_tokens")
_OF_REPLAYS = ("rate_scale", "time_scale")
_OF_TRACES = ("path", "start_s", "length_s")
_BOUNDS = ("prompt_least", "prompt_most", "new_least", "new_most")
_SHAPES = ("prompt_mean", "prompt_cv", "new_mean", "new_cv")


class GenerationSpec(ArrivalsSpec, frozen=True):
    """``[requests]``: their arrivals and lengths."""

    kind: Literal["poisson", "uniform", "gamma", "csv", "azure-llm-2023"] = "poisson"
    rate_per_s: Positive = 1.0
    requests: Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] = 1000
    #: The distribution of lengths, or the format of a trace whose requests are drawn at random, with their lengths.
    lengths: Literal["uniform", "lognormal", "gamma", "csv", "azure-llm-2023"] = "uniform"
    #: The ends of a uniform distribution, both included; lengths of the others are clipped to them.
    prompt_least: PositiveCount = 32
    prompt_most: PositiveCount = 512
    new_least: PositiveCount = 1
    new_most: PositiveCount = 128
    #: Mean, 0 for the middle of the ends, and standard deviation over mean, for ``lognormal`` and ``gamma``.
    prompt_mean: NonNegative = 0.0
    prompt_cv: Positive = 1.0
    new_mean: NonNegative = 0.0
    new_cv: Positive = 1.0
    #: Sessions and prefixes of prompts, one of which each request has with equal probability, and the tokens of a
    #: prefix; 0 for none.
    sessions: Count = 0
    prefixes: Count = 0
    prefix_tokens: Count = 0

    @property
    def rate_curve(self) -> RateCurve | None:
        """The curve; None for a constant rate."""
        return RateCurve(self.curve, "requests") if self.curve else None

    @property
    def is_replay(self) -> bool:
        """Whether the times of arrival are those of a trace."""
        return self.kind not in SYNTHETIC


class DecoderWorkload(NamedTuple):
    """The requests, in the order of their arrival. All of shape [n]."""

    #: Times of arrival in ms.
    arrivals_ms: Floats
    #: Tokens of the prompts, and tokens to generate.
    prompts: Indices
    new: Indices
    #: Numbers of sessions and prefixes, -1 for none, and the tokens of prefixes; None if no request has any.
    sessions: Indices | None = None
    prefixes: Indices | None = None
    prefix_tokens: Indices | None = None


def check_requests(spec: GenerationSpec, given: Collection[str], folder: Path) -> None:
    """Check the table ``[requests]`` and read its trace.

    Args:
        spec: The table.
        given: Its keys that are not defaults.
        folder: The folder of a relative path of a trace.

    Raises:
        ScenarioError: A key has no effect, a minimum is above its maximum, or there is no trace of tokens.
        TraceError: A row of the trace is malformed.
    """
    if useless := next((key for key in _useless(spec) if key in given), None):
        kinds = f"kind = {spec.kind!r}" + ("" if spec.is_replay else f" and lengths = {spec.lengths!r}")
        raise ScenarioError(f"requests.{useless}: has no effect with {kinds}", hint="leave it out")
    _ = spec.rate_curve  # refuses what is none
    for name in ("prompt", "new"):
        minimum, maximum = (getattr(spec, f"{name}_{end}") for end in ("least", "most"))
        if minimum > maximum:
            expected = f"at most {name}_most = {maximum}"
            raise wrong_value(f"requests.{name}_least", expected, minimum, failure=ScenarioError)
    if (spec.prefixes > 0) != (spec.prefix_tokens > 0):
        raise ScenarioError("requests.prefixes and requests.prefix_tokens: expected both or none")
    if spec.is_replay or spec.lengths not in ("uniform", *_SHAPED):
        times_s, _ = _trace(spec, folder)
        count = len(times_s) * spec.rate_scale
        if spec.is_replay and count > MAX_REQUESTS:
            raise ScenarioError(
                f"requests: {count:.3g} requests: expected at most {MAX_REQUESTS:g}", hint="reduce rate_scale"
            )


def has_groups(spec: GenerationSpec, name: str, folder: Path) -> bool:
    """Return whether any request has a ``session``, or a ``prefix``."""
    plural = {"session": "sessions", "prefix": "prefixes"}[name]
    if spec.is_replay:
        _, tokens = _trace(spec, folder)
        return bool((getattr(tokens, plural) >= 0).any())
    return bool(getattr(spec, plural))


def draw_workload(spec: GenerationSpec, seed: int, folder: Path) -> DecoderWorkload:
    """Return the requests; see ``docs/simulate-decoders.md`` for the order of random numbers.

    Args:
        spec: The table ``[requests]``.
        seed: Equal seeds give equal requests.
        folder: The folder of a relative path of a trace.

    Raises:
        ScenarioError: No request of a trace is left at its rate.
    """
    if spec.is_replay:
        return _replay(spec, seed, folder)
    rng, count = np.random.default_rng(seed), spec.requests
    mean_ms = 1e3 / spec.rate_per_s
    if spec.kind == "poisson":
        gaps_ms = rng.exponential(mean_ms, count)
    elif spec.kind == "gamma":
        gaps_ms = rng.gamma(spec.burst_cv**-2, mean_ms * spec.burst_cv**2, count)
    else:
        gaps_ms = np.full(count, mean_ms)
    if spec.lengths in ("uniform", *_SHAPED):
        prompts, new = (_lengths(spec, name, rng) for name in ("prompt", "new"))
    else:
        _, tokens = _trace(spec, folder)
        rows = rng.integers(0, len(tokens.prompts), count)
        prompts, new = tokens.prompts[rows], tokens.new[rows]
    sessions = rng.integers(0, spec.sessions, count) if spec.sessions else None
    prefixes = rng.integers(0, spec.prefixes, count) if spec.prefixes else None
    prefix_tokens = np.full(count, spec.prefix_tokens) if spec.prefixes else None
    arrivals_ms, curve = np.cumsum(gaps_ms), spec.rate_curve
    if curve:
        arrivals_ms = 1000 * curve.times_s(arrivals_ms / 1000)
    return DecoderWorkload(arrivals_ms, prompts, new, sessions, prefixes, prefix_tokens)


def _useless(spec: GenerationSpec) -> Iterator[str]:
    """Yield the keys that have no effect."""
    if spec.is_replay:
        yield from _OF_DRAWN_TIMES
    else:
        yield from _OF_REPLAYS
    if spec.kind != "gamma":
        yield "burst_cv"
    shaped, drawn = (not spec.is_replay and spec.lengths in names for names in (_SHAPED, ("uniform", *_SHAPED)))
    if not shaped:
        yield from _SHAPES
    yield from _OF_TRACES if drawn else _BOUNDS


def _lengths(spec: GenerationSpec, name: str, rng: np.random.Generator) -> Indices:
    minimum, maximum = (getattr(spec, f"{name}_{end}") for end in ("least", "most"))
    if spec.lengths == "uniform":
        return rng.integers(minimum, maximum, spec.requests, endpoint=True)
    mean, cv = getattr(spec, f"{name}_mean") or (minimum + maximum) / 2, getattr(spec, f"{name}_cv")
    if spec.lengths == "gamma":
        drawn = rng.gamma(cv**-2, mean * cv**2, spec.requests)
    else:
        variance = np.log1p(cv**2)
        drawn = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), spec.requests)
    return np.clip(np.rint(drawn), minimum, maximum).astype(np.int64)


def _replay(spec: GenerationSpec, seed: int, folder: Path) -> DecoderWorkload:
    times_s, tokens = _trace(spec, folder)
    times_ms = (times_s - spec.start_s) * 1e3 * spec.time_scale
    replay = TraceReplay(times_ms, np.arange(len(times_ms)), np.zeros(0), spec.rate_scale, seed)
    chunks = list(replay.chunks())
    rows = np.concatenate([chunk.models for chunk in chunks])
    if not len(rows):
        raise ScenarioError(f"requests.rate_scale = {spec.rate_scale:g}: no request of the trace is left")
    groups = (tokens.sessions[rows], tokens.prefixes[rows], tokens.prefix_tokens[rows])
    arrivals_ms = np.concatenate([chunk.times_ms for chunk in chunks])
    return DecoderWorkload(arrivals_ms, tokens.prompts[rows], tokens.new[rows], *groups)


def _trace(spec: GenerationSpec, folder: Path) -> tuple[Floats, Tokens]:
    """Return the times in seconds and the tokens of the part of the trace that the table names.

    Raises:
        ScenarioError: There is no file, it has no tokens, or the part has no requests.
        TraceError: A row is malformed, or a request has no tokens.
    """
    form = spec.kind if spec.is_replay else spec.lengths
    if not spec.path:
        raise ScenarioError(f"requests.path is missing: {form!r} requires a trace file", hint="--set path=FILE")
    path = folder / spec.path
    trace = read_trace(form, path, "requests.path")
    if not isinstance(trace, Arrivals) or trace.tokens is None:
        raise ScenarioError(f"requests.path: {path}: expected columns prompt_tokens and new_tokens")
    part = spec.part(trace.times_s, "requests")
    for name, counts in (("prompt", trace.tokens.prompts), ("new", trace.tokens.new)):
        if (empty := np.flatnonzero(part & (counts < 1))).size:
            found = f"request {empty[0] + 1} has no {name} tokens"
            raise TraceError(f"{path}: {found}: expected at least one", hint="remove such requests from the trace")
    return trace.times_s[part], Tokens(*(own[part] for own in trace.tokens))

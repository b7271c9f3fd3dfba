"""Limits of decoders: rates, replicas and batches that follow from arithmetic, and replications."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.errors import OptionError
from chrion.serving.simulator.confidence import interval
from chrion.serving.simulator.decoder_find import DECODERS
from chrion.serving.simulator.decoder_results import METRICS, intervals, summarise, sweep_decoder
from chrion.serving.simulator.decoder_scenario import build_decoder_scenario
from chrion.serving.simulator.find import GROWS, MET, Condition, Limit, SearchOptions, find_limits, parse_until
from chrion.serving.simulator.iterations import simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource
from chrion.serving.simulator.sweep import seeds


def source(*, new: int = 1, max_batch: int = 1, **requests: Any) -> ScenarioSource:
    """Return a scenario with requests at equal distances and iterations of 10 ms."""
    costs = {"fixed_ms": 10.0, "token_ms": 0, "request_ms": 0, "pair_ms": 0}
    lengths = {"prompt_least": 1, "prompt_most": 1, "new_least": new, "new_most": new}
    content = {
        "decoder": {"costs": costs, "slots": 500},
        "policies": ["iteration"],
        "batching": {"max_batch": max_batch},
        "requests": {"kind": "uniform", "requests": 400, **lengths, **requests},
    }
    return ScenarioSource("made", content, Path())


def find(scenario: ScenarioSource, name: str, condition: str) -> Limit:
    """Return the limit of a scenario with one policy."""
    until = parse_until(condition, METRICS)
    (limit,) = find_limits(DECODERS, scenario, name, until, SearchOptions(replications=2))
    return limit


def test_the_highest_rate_is_that_of_the_iterations() -> None:
    """An iteration of 10 ms with one request serves 100 a second; the rate has steps of 1 %."""
    limit = find(source(rate_per_s=50.0), "rate", "first_p99<=12ms")
    assert limit.best is not None
    assert limit.beyond is not None
    assert limit.best.amount == pytest.approx(50 * 1.01**69)  # 99.3
    assert limit.beyond.amount == pytest.approx(50 * 1.01**70)
    assert limit.best.figure.mean == pytest.approx(10.0)


def test_a_rate_at_which_queues_grow_is_refused() -> None:
    """A limit that a short run does not exceed is no capacity: at 110 a second each request waits 0.9 ms longer."""
    limit = find(source(rate_per_s=80.0), "rate", "first_p99<=100000ms")
    assert limit.best is not None
    assert limit.best.amount <= 100.0 * 1.01
    assert {probe.met for probe in limit.curve if probe.amount > 105} == {GROWS}


def test_a_rate_above_the_capacity_is_refused_in_short_runs() -> None:
    """Random lengths hide growth in 200 requests: of 40 tokens on average, one by one, 2.5 a second are served."""
    scenario = source(kind="poisson", rate_per_s=1.0, requests=200).changed({"new_least": 1, "new_most": 79})
    limit = find(scenario, "rate", "between_p99<=12ms")
    assert limit.best is not None
    assert limit.best.amount <= 2.5 * 1.25


def test_the_fewest_replicas() -> None:
    """At 250 a second, two replicas with 100 a second each are too few, and three are enough."""
    limit = find(source(rate_per_s=250.0), "replicas", "first_p99<=15ms")
    assert limit.best is not None
    assert limit.certain is not None
    assert (limit.best.amount, limit.certain.amount) == (3, 3)


def test_the_smallest_batch() -> None:
    """Requests of four iterations, 45 a second, need 1.8 places."""
    limit = find(source(rate_per_s=45.0, new=4), "max_batch", "first_p99<=40ms")
    assert limit.best is not None
    assert limit.best.amount == 2
    assert next(probe.met for probe in limit.curve if probe.amount == 1) == GROWS
    assert [probe.met for probe in limit.curve if probe.amount >= 2] == [MET] * (len(limit.curve) - 1)


@pytest.mark.parametrize(
    ("metric", "smallest"), [("first_p99", True), ("violations", True), ("between_p99", False), ("gap_p99", False)]
)
def test_the_largest_batch_is_searched_if_it_makes_the_condition_harder(metric: str, smallest: bool) -> None:  # noqa: FBT001
    """A larger batch shortens the wait for the first token and lengthens the time between tokens."""
    scenario = build_decoder_scenario(source())
    assert DECODERS.searched("max_batch", Condition(metric, 1.0), scenario).smallest is smallest


def test_the_rate_of_a_trace_is_scaled(tmp_path: Path) -> None:
    """Values of the rate are those of the trace in steps of 1 %, with 30 to ten million requests."""
    lines = [f"{at / 10},1,1" for at in range(200)]
    (tmp_path / "trace.csv").write_text("\n".join(["time_s,prompt_tokens,new_tokens", *lines]), encoding="utf-8")
    content = {**source().content, "requests": {"kind": "csv", "path": "trace.csv"}}
    scenario = ScenarioSource("made", content, tmp_path)
    for scale in (1.0, 1000.0):
        built = build_decoder_scenario(scenario.changed({"rate_scale": scale}))
        searched = DECODERS.searched("rate", Condition("first_p99", 1.0), built)
        assert searched.sets(10) == {"requests.rate_scale": pytest.approx(scale * 1.01**10)}
        least, most = (200 * scale * 1.01**number for number in (searched.numbers[0], searched.numbers[-1]))
        assert 30 <= least < 31 or searched.numbers[0] == -900
        assert 9.9e6 < most <= 1e7 or searched.numbers[-1] == 900


def test_an_unknown_quantity_is_refused() -> None:
    """The message names the known ones."""
    with pytest.raises(OptionError, match="--find: expected one of rate, replicas, max_batch, found 'servers'"):
        DECODERS.searched("servers", Condition("first_p99", 1.0), build_decoder_scenario(source()))


def test_replications_are_independent_simulations() -> None:
    """The interval of a figure is that of simulations with successive seeds."""
    scenario = source(kind="poisson", rate_per_s=60.0)
    found = intervals([point.summaries for point in sweep_decoder(scenario, seeds(5, 4))])["iteration"]
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for seed in range(5, 9):
        (result,) = simulate_decoder(build_decoder_scenario(scenario.changed({"seed": seed})))
        summary = summarise(result)
        for name, figure in METRICS.items():
            values[name].append(figure(summary))
    for name in ("violations", "first_p50", "first_p99", "token_p99"):
        assert found[name] == interval(values[name])
        assert np.ptp(values[name]) > 0 or name == "violations"

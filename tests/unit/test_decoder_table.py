"""Simulated decoders whose costs come from a datasheet."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from chrion.errors import ScenarioError
from chrion.report.decoder_tables import decoder_table
from chrion.serving.simulator.decoder_results import summarise, to_json
from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.iterations import simulate_decoder
from chrion.serving.simulator.scenario import ScenarioSource


def scenario(**decoder: Any) -> DecoderScenario:
    """Return a scenario of a few requests."""
    content = {"decoder": decoder, "requests": {"requests": 5}}
    return build_decoder_scenario(ScenarioSource("test", content, Path()))


def test_costs_follow_from_the_datasheet() -> None:
    """An L4: 300 GB/s, 121 TFLOPS in half precision, 3.8 us a kernel, 24 GB."""
    found = scenario(hardware="l4+epyc-16", weights_gb=3.0, kernels=100, slot_bytes=30_000, query_heads=4)
    token_ms, pair_ms = 2 * 1.5e9 / 121e12 * 1e3, 2 * 15_000 * 4 / 121e12 * 1e3
    weights_ms, context_ms = 10.0, 30_000 / 300e9 * 1e3
    assert found.costs == found.prompt_costs
    # One token of each request: the traffic of weights and of 8 x 1000 tokens.
    assert found.iteration_ms([1] * 8, [999] * 8) == pytest.approx(0.38 + weights_ms + 8000 * context_ms)
    # A prompt of 4096 tokens: arithmetic.
    pairs = 4096 * 4097 / 2
    assert found.iteration_ms([4096], [0]) == pytest.approx(0.38 + 4096 * token_ms + pairs * pair_ms)
    assert found.decoder.cache_gb == pytest.approx(24 - 0.3 - 3.0)
    wide = scenario(hardware="l4", weights_gb=3.0, element_type="float32")
    assert wide.iteration_ms([4096], [0]) == pytest.approx(
        400 * 3.8e-3 + (4096 * 2 * 0.75e9 + 2 * pairs * 131_072 / 4) / 60e12 * 1e3
    )


@pytest.mark.parametrize("batch", [1, 64, 403, 404, 1000])
def test_the_ridge_of_the_roofline(batch: int) -> None:
    """Without keys and values, an L4 is bound by traffic up to 121e12 / 300e9 = 403.3 operations for each byte."""
    found = scenario(hardware="l4", weights_gb=3.0, kernels=0, slot_bytes=1, costs={"pair_ms": 0, "context_ms": 0})
    traffic_ms, arithmetic_ms = 10.0, batch * 2 * 1.5e9 / 121e12 * 1e3
    assert (arithmetic_ms > traffic_ms) == (batch >= 404)
    assert found.iteration_ms([1] * batch, [0] * batch) == pytest.approx(max(traffic_ms, arithmetic_ms))


def test_given_values_take_precedence() -> None:
    """A term and a memory are those of the file; the source is not changed."""
    found = scenario(hardware="l4", cache_gb=1.5, costs={"fixed_ms": 7.0})
    usual = scenario(hardware="l4", kernels=0)
    assert found.iteration_ms([1], [0]) == pytest.approx(7.0 + usual.iteration_ms([1], [0]))
    assert found.decoder.cache_gb == 1.5
    assert "token_ms" not in found.content["decoder"]["costs"]


def test_measured_times_replace_the_roofline() -> None:
    """The memory is still that of the accelerator."""
    found = scenario(hardware="l4", weights_gb=3.0, costs={"tokens": [1, 3], "ms": [5.0, 7.0]})
    assert found.iteration_ms([1, 1], [0, 900]) == 6.0
    assert found.decoder.cache_gb == pytest.approx(24 - 0.3 - 3.0)


def test_another_request_never_shortens_an_iteration() -> None:
    """Beside a prompt, the caches of the other requests are read as without it."""
    found = scenario(hardware="l4")
    increments, prompts = [(1, 2000), (1, 0), (1, 700)], [(16, 0), (2, 9), (500, 100)]
    for batch in itertools.permutations([*increments, *prompts]):
        times_ms = [found.iteration_ms(*zip(*batch[:size], strict=True)) for size in range(1, len(batch) + 1)]
        assert times_ms == sorted(times_ms)


def test_one_request_is_singular() -> None:
    """The title of the table has no plural of one."""
    content = {"decoder": {"slots": 1}, "requests": {"requests": 1, "prompt_most": 1, "prompt_least": 1, "new_most": 1}}
    found = build_decoder_scenario(ScenarioSource("test", content, Path()))
    title = decoder_table(found, [summarise(result) for result in simulate_decoder(found)]).title
    assert title.splitlines()[0] == "test: 1 request, 1 slot for keys and values"


def test_results_are_marked() -> None:
    """The table and the JSON name the hardware."""
    found = scenario(hardware="l4")
    summaries = [summarise(result) for result in simulate_decoder(found)]
    assert "l4: estimated from datasheets" in str(decoder_table(found, summaries).title)
    assert to_json(found, summaries)["estimated_hardware"] == ["l4"]
    assert to_json(scenario(), summaries)["estimated_hardware"] == []


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"hardware": "l44"}, "decoder.hardware: hardware 'l44': unknown part 'l44'"),
        ({"hardware": 4}, "decoder.hardware: expected text"),
        ({"hardware": "epyc-16"}, "decoder.hardware: 'epyc-16' has no accelerator"),
        ({"hardware": "l4", "weights_gb": 30.0}, "decoder.weights_gb = 30: NVIDIA L4 has no room"),
        ({"hardware": "l4", "weights_gb": 30.0, "cache_gb": 2}, "decoder.weights_gb = 30: NVIDIA L4 has no room"),
        ({"hardware": "l4", "weights_gb": 30.0, "slots": 9}, "decoder.weights_gb = 30: NVIDIA L4 has no room"),
        ({"hardware": "l4", "weights_gb": 30.0, "slots": 0}, "decoder.weights_gb = 30: NVIDIA L4 has no room"),
        ({"hardware": "l4", "cache_gb": 500}, "decoder.cache_gb = 500: NVIDIA L4 has room for 22.7 GB of keys"),
        ({"hardware": "l4", "slots": 1_000_000}, "decoder.slots = 1000000: NVIDIA L4 has room for 22.7 GB of keys"),
        ({"hardware": "l4", "element_type": "int4"}, "decoder.element_type: expected one of"),
        ({"hardware": "l4", "costs": 1}, "decoder.costs: expected a table, found 1"),
        ({"hardware": "l4", "costs": {"request_ms": 1}}, "decoder.costs: unknown key 'request_ms'"),
        ({"hardware": "l4", "prompt_costs": {"fixed_ms": 1}}, "decoder.prompt_costs: has no effect with hardware"),
        ({"hardware": "l4", "weight_gb": 1}, "decoder: unknown key 'weight_gb'"),
    ],
)
def test_errors_name_the_key(decoder: dict[str, Any], message: str) -> None:
    """Parts that are unknown or too small, and wrong values, are refused in one line."""
    with pytest.raises(ScenarioError) as found:
        scenario(**decoder)
    assert str(found.value).startswith(f"test.toml: {message}")

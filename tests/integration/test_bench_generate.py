"""The benchmark of generation: what it compares computes the same, and a run under load gives its numbers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import bench_decoders
import bench_generate
import numpy as np
import pytest
from bench_generate import Mix, draw_shapes, plain_session
from decoding.costs import CostMeter, MeasuredCosts, append_costs, read_costs
from decoding.live_server import live_server
from decoding.load import SIZES, load_scenario, run_load, scheduled
from decoding.on_device import WAYS, DeviceDecoder
from decoding.prediction import FIGURES, measure_load, predict
from decoding.recorder import recorded
from decoding.repeated_iterations import Shape, draw_inputs, padded_run, selective_run, single_runs

import chrion
from chrion import Generator
from chrion.generation.open_engine import open_engine
from chrion.serving.simulator.decoder_costs import IterationCosts
from chrion.serving.simulator.iterations import draw_requests, simulate_decoder
from chrion.zoo.cached_decoder import LlamaDecoderSpec
from decoder_support import small_decoder
from seams.commands import scheduler_of, set_arguments

ROOT = Path(__file__).parents[2]
DATA = ROOT / "scripts" / "decoding" / "measured"


@pytest.mark.parametrize("mix", bench_generate.WORKLOADS.values())
def test_a_padded_batch_computes_what_selective_batching_does(mix: Mix) -> None:
    """The last logits of every request are equal, so that the times are those of the same work; requests differ."""
    model = small_decoder("llama-decoder", context=512)
    engine, session = open_engine(chrion.load(model), threads=1), plain_session(model, 1)
    shapes = draw_shapes(np.random.default_rng(0), 8, mix)
    assert sum(shape.past == 0 for shape in shapes) == round(8 * mix.share)
    found = selective_run(engine, shapes)()
    expected = padded_run(session, engine.signature, shapes)()
    assert isinstance(found, list)
    assert isinstance(expected, list)
    logits = expected[0][:, -1]
    np.testing.assert_allclose(np.stack(found), logits, atol=1e-4)
    assert min(np.abs(one - other).max() for one, other in itertools.combinations(logits, 2)) > 1e-2


def test_single_runs_have_the_requests_of_the_padded_batch() -> None:
    """Each request has its own tokens and caches, unbatched as well."""
    model = small_decoder("llama-decoder", context=512)
    signature, feeds = open_engine(chrion.load(model), threads=1).signature, []

    class Session:
        def run(self, _: None, feed: dict[str, Any]) -> None:
            feeds.append(feed)

    shapes = [Shape(3, 1), Shape(3, 1), Shape(0, 5)]
    single_runs(Session(), signature, shapes)()
    for number, (shape, feed) in enumerate(zip(shapes, feeds, strict=True)):
        ids, caches = draw_inputs(signature, shape, number)
        np.testing.assert_array_equal(feed["input_ids"], ids[None])
        for name, cache in zip(signature.past, caches, strict=True):
            np.testing.assert_array_equal(feed[name], cache[None])


def test_a_run_under_load_counts_all_requests() -> None:
    """Ten requests at a thousand per second end, at a positive latency per token."""
    with Generator(small_decoder("gpt2-decoder", context=256), threads=1) as generator:
        result = run_load(generator, draw_requests(load_scenario(8, 1000.0, 10)))
        assert generator.statistics().finished_requests == 10
    assert result.requests_per_s > 0
    assert result.median_ms_per_token > 0
    assert result.iterations.time_ms > 0
    assert result.iterations.prompt_features[0] >= 2  # at most 8 requests of a batch have their prompts processed


def test_iterations_last_until_the_next_one_or_an_idle_time() -> None:
    """The choice of tokens counts, however long it takes, waiting for a request does not; the last one has no end."""
    with Generator(small_decoder("gpt2-decoder", context=256), threads=1) as generator:
        with recorded(generator) as recorder:
            for _ in range(2):
                generator.submit([1, 2, 3], 2).result()
            recorder.times_s = [(1.0, 1.004), (1.005, 1.008), (1.5, 1.6), (1.7, 1.8)]
        generator.submit([1, 2, 3], 2).result()
    assert len(recorder.batches) == 4  # those of another engine do not count
    iterations = recorder.iterations()
    assert [batch for batch, _ in iterations] == [([3], [0], 1), ([1], [3], 1), ([3], [0], 1)]
    assert [time_ms for _, time_ms in iterations] == pytest.approx([5.0, 3.0, 200.0])


def test_costs_of_a_generator(tmp_path: Path) -> None:
    """Both kinds of iterations get costs, and the generator is as before; a file gives the mean of two measurements."""
    with Generator(small_decoder("llama-decoder", context=256), threads=1) as generator:
        meter, rows = CostMeter(generator, 8), [0]
        for batches in ((1,), (3, 1)):
            meter.measure(batches)
            rows.append(len(meter.rows))
        assert rows[2] > 2 * rows[1] > 0  # all measurements count
        costs, prompt_costs = meter.fit()
        assert generator.submit([1, 2], 3).result()
        assert generator.statistics().finished_requests == 40 + (24 + 3) + 2 * (24 + 1) + 1
    assert costs.iteration_ms([1], [20]) > 0
    assert prompt_costs.iteration_ms([30], [0]) > 0
    path = tmp_path / "costs.jsonl"
    for factor in (1.0, 3.0):
        append_costs(path, MeasuredCosts("small", 8, IterationCosts(factor, 0, 0, 0), prompt_costs))
    assert read_costs(path) == {("small", 8): (IterationCosts(2.0, 0, 0, 0), prompt_costs)}


def test_latencies_of_tokens_are_those_of_the_clients() -> None:
    """A request has its first token after it was sent to the server, and the other ones in the time until its end."""
    workload = draw_requests(load_scenario(8, 50.0, 12))
    spec = LlamaDecoderSpec(layers=2, hidden=32, heads=2, kv_heads=1, inner=48, vocabulary=61, context=256)
    with live_server(spec, 4, 1) as server:
        began = time.perf_counter()
        run = measure_load(server, workload)
        took_ms = (time.perf_counter() - began) * 1e3
        assert server.generator.statistics().generated_tokens == workload.new.sum() + 1  # of the first connection
    found = run.figures
    assert list(found) == list(FIGURES)
    assert 0 < found["first ms p50"] <= found["first ms p99"] < took_ms
    assert 0 < found["between ms p50"] <= found["between ms p99"] < took_ms
    assert 12e3 / took_ms <= found["requests/s"] < 12e3 / (workload.arrivals_ms[-1] - workload.arrivals_ms[0])
    costs = IterationCosts(2.0, 0.1, 0.0, 0.0), IterationCosts(4.0, 0.1, 0.0, 0.0)
    scenario = load_scenario(8, 50.0, 12, 4, costs)
    predicted, (result, _) = predict(scenario, workload), simulate_decoder(scenario)
    assert predicted["first ms p99"] == pytest.approx(np.quantile(result.first_token_ms, 0.99))
    assert predicted["requests/s"] == pytest.approx(result.requests_per_s)


def test_a_policy_is_set_for_a_while() -> None:
    """The scheduler is as before, also after an exception."""
    with Generator(small_decoder("llama-decoder", context=256), max_batch=5, threads=1) as generator:
        scheduler = scheduler_of(generator)

        def fail() -> None:
            with scheduled(generator, "request", 2):
                assert (scheduler.policy, scheduler.max_batch) == ("request", 2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert (scheduler.policy, scheduler.max_batch) == ("iteration", 5)


def test_a_device_with_all_keys_and_values_computes_what_selective_batching_does() -> None:
    """The scores of a bound batch are those of a plain session, and every way has its times."""
    model = small_decoder("llama-decoder")
    decoder = DeviceDecoder(model, "CPUExecutionProvider", threads=1)
    shapes = [Shape(9, 1)] * 3
    expected = padded_run(plain_session(model, 1), decoder.signature, shapes)()
    assert isinstance(expected, list)
    np.testing.assert_allclose(decoder.on_device(shapes)(), expected[0][:, -1], atol=1e-5)
    found = decoder.time([1, 2], 9, 1, WAYS)
    assert [(times.way, times.batch) for times in found] == [(way, batch) for batch in (1, 2) for way in WAYS]
    assert min(times.tokens_per_s for times in found) > 0


def test_the_folder_of_results_is_checked_before_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that does not exist is named, and nothing is measured."""
    folder = tmp_path / "missing"
    monkeypatch.setitem(SIZES, "15 MB", None)  # a measurement would build this model
    for script, words in ((bench_decoders, ["device", "--provider", "cpu"]), (bench_generate, ["engine"])):
        set_arguments(monkeypatch, "script", *words, "-o", str(folder))
        with pytest.raises(SystemExit):
            script.main()
        assert f"{folder}: no such folder" in capsys.readouterr().err

"""The benchmark of generation: what it compares computes the same, and a run under load gives its numbers."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import bench_decoders
import bench_generate
import numpy as np
import pytest
from bench_generate import Mix, draw_shapes, plain_session
from decoding.costs import CostMeter, MeasuredCosts, append_costs, read_costs
from decoding.load import SIZES, load_scenario, run_load, scheduled
from decoding.load_rates import LEAST_FACTOR, RATE_FACTORS
from decoding.on_device import HOST, WAYS, DeviceDecoder
from decoding.orca_experiment import median_points, read_points
from decoding.recorder import recorded
from decoding.repeated_iterations import Shape, draw_inputs, padded_run, selective_run, single_runs

import chrion
from chrion import Generator
from chrion.generation.open_engine import open_engine
from chrion.simulator.decoder_scenario import IterationCosts
from chrion.simulator.iterations import draw_requests
from chrion.zoo.cached_decoder import LlamaDecoderSpec, build_llama_decoder
from decoder_support import small_decoder

ROOT = Path(__file__).parents[2]
DATA, DOCS = ROOT / "scripts" / "decoding" / "measured", ROOT / "docs"
PAGES = ("generation.md", "generation-measured.md", "simulate-decoders.md")


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
        engine = generator._loop.engine
        with recorded(generator) as recorder:
            for _ in range(2):
                generator.submit([1, 2, 3], 2).result()
            recorder._times_s = [(1.0, 1.004), (1.005, 1.008), (1.5, 1.6), (1.7, 1.8)]
        assert generator._loop.engine is engine
    iterations = recorder.iterations()
    assert [batch for batch, _ in iterations] == [([3], [0], 1), ([1], [3], 1), ([3], [0], 1)]
    assert [time_ms for _, time_ms in iterations] == pytest.approx([5.0, 3.0, 200.0])


def test_costs_of_a_generator(tmp_path: Path) -> None:
    """Both kinds of iterations get costs, and the generator is as before; a file gives the mean of two measurements."""
    with Generator(small_decoder("llama-decoder", context=256), threads=1) as generator:
        meter, rows = CostMeter(generator, 8), [0]
        for batches in ((1,), (3, 1)):
            meter.measure(batches)
            rows.append(len(meter._rows))
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


def test_a_policy_is_set_for_a_while() -> None:
    """The scheduler is as before, also after an exception."""
    with Generator(small_decoder("llama-decoder", context=256), max_batch=5, threads=1) as generator:
        scheduler = generator._loop.scheduler

        def fail() -> None:
            with scheduled(generator, "request", 2):
                assert (scheduler.policy, scheduler.max_batch) == ("request", 2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert (scheduler.policy, scheduler.max_batch) == ("iteration", 5)


def test_loads_and_their_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repetition measures every load once; the loads of a policy ascend, and each has a simulated one."""
    monkeypatch.setitem(SIZES, "small", LlamaDecoderSpec(layers=1))
    points, costs = tmp_path / "points.jsonl", tmp_path / "costs.jsonl"
    files = ["--points", str(points), "--costs", str(costs), "--threads", "1"]
    sizes = ["--models", "small", "--scale", "16", "--requests", "8", "--batches", "1", "3", "--repeats", "2"]
    monkeypatch.setattr("sys.argv", ["bench_generate.py", "load", *sizes, *files, "--seed", "4"])
    bench_generate.main()
    runs = read_points(points)
    assert {(run.seed, run.requests, run.workload) for run in runs} == {(seed, 8, ("small", 16)) for seed in (4, 5)}
    for run in runs:
        assert run.iterations is not None
        iterations, tokens = run.iterations.features[:2]
        assert iterations <= tokens <= run.max_batch * iterations
    for policy, batch in (("iteration", 1), ("iteration", 3), ("request", 1), ("request", 3)):
        own = [run for run in runs if (run.policy, run.max_batch) == (policy, batch)]
        for seed in (4, 5):
            rates = [run.offered_per_s for run in own if run.seed == seed]
            assert rates == sorted(rates)
            factors = [run.target for run in own if run.seed == seed]
            least = policy == "request" or batch == 3
            assert factors == [*[LEAST_FACTOR] * least, *RATE_FACTORS][: len(rates)]
    assert len(read_costs(costs)) == 1
    agreement, curves, loads = bench_decoders.simulation_sections(points, costs)
    assert agreement.startswith("| simulated / measured within 15 % |")
    assert curves.startswith("| weights |")
    assert sum(line.startswith("| small |") for line in loads.splitlines()) == len(median_points(runs))


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


def test_keys_and_values_on_the_device_limit_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Past and present of ten requests of 100 tokens fit beside the weights; eighty are served from host memory."""
    arguments = argparse.Namespace(provider="CPUExecutionProvider", threads=1, tokens=100, rounds=1)
    weights = build_llama_decoder(SIZES["15 MB"]).ByteSize()
    slot = 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, width, bytes
    arguments.budget = (weights + 10.5 * (100 + 101) * slot) / 1e9
    rows = bench_decoders.device_rows(arguments, "15 MB")
    assert {row[2] for row in rows if row[1] == "device"} == {"1", "2", "4", "8", "10"}
    assert [row[2] for row in rows if row[1] == HOST][-1] == "80"
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    decoder = DeviceDecoder(small_decoder("llama-decoder"), "CPUExecutionProvider", threads=1)
    pair = decoder.signature.slot_bytes * (7 + 8)
    assert [decoder.most_requests(decoder.weight_bytes + size, 7) for size in (-1, pair - 1, pair)] == [0, 0, 1]


def test_pages_are_checked_before_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without the section of a part is named in one line, and nothing is measured."""
    page = tmp_path / "page.md"
    page.write_text("A page.\n", encoding="utf-8")
    monkeypatch.setattr(bench_decoders, "device_rows", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(bench_generate, "open_engine", lambda *_, **__: pytest.fail("measured"))
    for script, words, section in (
        (bench_decoders, ["device", "--provider", "cpu"], "decoders-device"),
        (bench_generate, ["engine"], "generate-engine"),
    ):
        monkeypatch.setattr("sys.argv", ["script", *words, "-o", str(page)])
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert str(ended.value) == f"error: {page}: no section to fill; expected the markers of {section}"


@pytest.mark.parametrize("part", ["genai", "simulation", "device"])
def test_the_pages_have_all_sections(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section of a script is on one of its pages, once."""
    points, costs = (str(DATA / name) for name in ("loads.jsonl", "costs.jsonl"))
    words = {"genai": ["--python", "python"], "simulation": ["--points", points, "--costs", costs]}
    monkeypatch.setattr("sys.argv", ["script", part, *words.get(part, ["--provider", "cpu"])])
    sections = bench_decoders.read_arguments().sections
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in PAGES]
    for section in (*sections, bench_generate.ENGINE_SECTION, *bench_generate.REPORT_SECTIONS):
        assert sum(page.count(f"<!-- begin: {section} -->") for page in pages) == 1

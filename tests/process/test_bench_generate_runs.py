"""The benchmarks of generation, run from their arguments to their tables."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_decoders
import bench_generate
import pytest
from decoding.costs import read_costs
from decoding.load import SIZES
from decoding.load_rates import LEAST_FACTOR, RATE_FACTORS
from decoding.on_device import HOST, DeviceDecoder
from decoding.orca_experiment import median_points, read_points
from reproduction import orca

from chrion.zoo.cached_decoder import LlamaDecoderSpec, build_llama_decoder
from decoder_support import small_decoder
from seams.commands import set_arguments


def test_loads_and_their_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repetition measures every load once; the loads of a policy ascend, and each has a simulated one."""
    monkeypatch.setitem(SIZES, "small", LlamaDecoderSpec(layers=1))
    points, costs = tmp_path / "points.jsonl", tmp_path / "costs.jsonl"
    files = ["--points", str(points), "--costs", str(costs), "--threads", "1"]
    sizes = ["--models", "small", "--scale", "16", "--requests", "8", "--batches", "1", "3", "--repeats", "2"]
    set_arguments(monkeypatch, "bench_generate.py", "load", *sizes, *files, "--seed", "4")
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


def test_orcas_experiment_measures_both_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace has throughputs of both policies and their ratio, for each max batch and the best one."""
    monkeypatch.setitem(SIZES, "small", LlamaDecoderSpec(layers=1))
    monkeypatch.setattr(orca, "REQUESTS", 8)
    head, *rows = orca.orca_measured("small", threads=1, seeds=1)["orca measured"]
    assert head[1:] == ["ms per token", "max batch 1", "max batch 8", "max batch 32", "best"]
    assert [row[0] for row in rows] == ["random", "equal"]
    for _, latency, *cells in rows:
        assert float(latency) > 0
        assert all(len(cell.replace("=", "/").split("/")) == 3 for cell in cells)


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

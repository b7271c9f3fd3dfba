"""Throughputs at equal latencies, read off curves whose readings are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoding.load import IterationTotals, load_scenario
from decoding.orca_experiment import (
    LoadPoint,
    append_point,
    median_points,
    normalise_speed,
    plot,
    read_points,
    table_rows,
    throughput_at,
)
from decoding.scheduling_gain import simulate_summary

from chrion.simulator.decoder_scenario import IterationCosts


def curve(policy: str, batch: int, *pairs: tuple[float, float]) -> list[LoadPoint]:
    """Return points of throughput and latency, offered at the rates 1, 2, ..."""
    return [
        LoadPoint("small", 1, policy, batch, at, float(at), 60, 0, throughput, latency)
        for at, (throughput, latency) in enumerate(pairs, 1)
    ]


OURS = curve("iteration", 8, (10.0, 1.0), (20.0, 1.5), (30.0, 3.5))
OUTLIERS = {1: (0.1, 50.0), 2: (99.0, 0.1)}
THEIRS = [*curve("request", 1, (8.0, 1.5), (9.0, 9.0)), *curve("request", 8, (10.0, 3.0), (11.0, 30.0))]


@pytest.mark.parametrize(("latency", "expected"), [(1.5, 20.0), (2.5, 25.0), (3.5, 30.0), (4.0, 30.0)])
def test_throughput_is_interpolated(latency: float, expected: float) -> None:
    """Halfway between two latencies the throughput is halfway, too; after the last point it is a lower bound."""
    found = throughput_at(OURS, latency)
    assert found is not None
    assert found.requests_per_s == pytest.approx(expected)
    assert found.bound == (latency >= 3.5)


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [((30.0, 1.0), (10.0, 9.0), "at least 3.00"), ((30.0, 9.0), (10.0, 1.0), "at most 1.25")],
)
def test_ratios_of_lower_bounds(ours: tuple[float, float], theirs: tuple[float, float], ratio: str) -> None:
    """A ratio with a lower bound is a bound itself; of two of them nothing follows."""
    first = (10.0, 1.0)
    points = [*curve("iteration", 8, first, ours), *curve("request", 8, first, theirs)]
    assert table_rows(points)[1][-2] == ratio
    both = [*curve("iteration", 8, first, (30.0, 1.0)), *curve("request", 8, first, (10.0, 1.0))]
    assert table_rows(both)[1][-2] == "-"


def test_a_latency_below_all_points_has_no_throughput() -> None:
    """Nothing is extrapolated."""
    assert throughput_at(OURS, 0.9) is None


def test_a_table_from_a_file(tmp_path: Path) -> None:
    """Of three runs of a load the medians count; the first row is at twice 1 ms."""
    path = tmp_path / "points.jsonl"
    outliers = [LoadPoint("small", 1, "iteration", 8, 1, 1.0, 60, seed, *pair) for seed, pair in OUTLIERS.items()]
    for point in [outliers[0], *OURS, *THEIRS, outliers[1]]:
        append_point(path, point)
    runs = read_points(path)
    assert [run.seed for run in runs] == [1, *[0] * (len(OURS) + len(THEIRS)), 2]
    points = median_points(runs)
    assert len(points) == len(OURS) + len(THEIRS)
    request_8_at_4 = 10 + 1 / 27
    ends = [
        ("2.0 ms", "1", "none", "8.1", "-"),
        ("2.0 ms", "8", "22.5", "none", "-"),
        ("2.0 ms", "best", "22.5", "8.1", f"{22.5 / (8 + 0.5 / 7.5):.2f}"),
        ("4.0 ms", "1", "none", "8.3", "-"),
        ("4.0 ms", "8", "at least 30.0", "10.0", f"at least {30 / request_8_at_4:.2f}"),
        ("4.0 ms", "best", "at least 30.0", "10.0", f"at least {30 / request_8_at_4:.2f}"),
    ]
    lengths = ("small", "32 to 512, 1 to 128")
    assert table_rows(points)[1:] == [(*lengths, *end, "-") for end in ends]
    simulated = [replace(point, requests_per_s=point.requests_per_s / 2) for point in points]
    assert [row[-1] for row in table_rows(points, simulated)[1:]] == [end[-1] for end in ends]
    plot(points, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_medians_are_those_of_each_figure() -> None:
    """Of three runs, medians of rates, throughputs and latencies come from different ones; targets are kept apart."""
    figures = [(1.0, 10.0, 5.0), (3.0, 30.0, 4.0), (2.0, 40.0, 9.0)]
    runs = [
        LoadPoint("small", 1, "iteration", 8, target, rate, 60, seed, throughput, latency)
        for seed, (rate, throughput, latency) in enumerate(figures)
        for target in (1.4, 6.0)
    ]
    expected = [LoadPoint("small", 1, "iteration", 8, target, 2.0, 60, 0, 30.0, 5.0) for target in (1.4, 6.0)]
    assert median_points(runs) == expected


def test_the_slowdown_is_that_of_the_times_of_iterations() -> None:
    """Iterations that took three times as long as the costs, one by one, have a slowdown of three; none have one."""
    rng, costs = np.random.default_rng(0), (IterationCosts(2.0, 0.3, 0.1, 0.01, 0.5), IterationCosts(5.0, 0.2))
    iterations = []
    for new in ([1], [1, 1, 1], [30, 1], [7, 1, 9, 1]):
        past = rng.integers(1, 50, len(new)).tolist()
        time_ms = costs[max(new) > 1].iteration_ms(new, past, len(new))
        iterations.append(((new, past, len(new)), 3 * time_ms))
    assert IterationTotals.of(iterations).slowdown(costs) == pytest.approx(3.0)
    assert IterationTotals.of([]).slowdown(costs) == 1.0


@pytest.mark.parametrize("policy", ["iteration", "request"])
def test_a_slow_run_at_the_usual_speed(tmp_path: Path, policy: str) -> None:
    """A simulated run with doubled costs becomes that with the costs at twice the rate, also after a file."""
    costs, doubled = (
        (IterationCosts(4.0 * times, 0.2 * times, 0.0), IterationCosts(8.0 * times, 0.2 * times, 0.0))
        for times in (1, 2)
    )
    slow = simulate_summary(load_scenario(4, 3.0, 60, 8, doubled, seed=5), policy)
    usual = simulate_summary(load_scenario(4, 6.0, 60, 8, costs, seed=5), policy)
    totals = IterationTotals(2 * (10 * 4.0 + 50 * 0.2), (10.0, 50.0, 0.0, 0.0, 0.0), (0.0,) * 5)
    run = LoadPoint("m", 4, policy, 8, 0, 3.0, 60, 5, slow.requests_per_s, slow.normalised_p50_ms, totals)
    append_point(tmp_path / "points.jsonl", run)
    (found,) = read_points(tmp_path / "points.jsonl")
    assert found == run
    point = normalise_speed(found, costs)
    assert point.offered_per_s == pytest.approx(6.0)
    assert (point.requests_per_s, point.ms_per_token) == pytest.approx((usual.requests_per_s, usual.normalised_p50_ms))
    assert normalise_speed(point, costs) == point  # once is enough

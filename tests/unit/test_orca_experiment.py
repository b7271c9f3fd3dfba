"""Throughputs at equal latencies, read off curves whose readings are known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoding.load import IterationTotals, load_scenario
from decoding.orca_experiment import (
    Interval,
    LoadPoint,
    append_point,
    median_points,
    normalise_speed,
    plot,
    read_points,
    summary_rows,
    table_rows,
    throughput_at,
)
from decoding.scheduling_gain import simulate_summary

from chrion.serving.simulator.decoder_costs import IterationCosts


def curve(policy: str, batch: int, *pairs: tuple[float, float]) -> list[LoadPoint]:
    """Return points of throughput and latency, offered at the rates 1, 2, ..."""
    return [
        LoadPoint("small", 1, policy, batch, at, float(at), 60, 0, throughput, latency)
        for at, (throughput, latency) in enumerate(pairs, 1)
    ]


OURS = curve("iteration", 8, (10.0, 1.0), (20.0, 1.5), (30.0, 3.5))
THEIRS = [*curve("request", 1, (8.0, 1.5), (9.0, 9.0)), *curve("request", 8, (10.0, 3.0), (11.0, 30.0))]


@pytest.mark.parametrize(
    ("latency", "expected"),
    [
        (1.5, Interval(20.0, 20.0)),
        (2.5, Interval(25.0, 25.0)),
        (3.5, Interval(30.0, math.inf)),
        (4.0, Interval(30.0, math.inf)),
        (0.9, Interval(0.0, 10.0)),
    ],
)
def test_throughput_is_interpolated(latency: float, expected: Interval) -> None:
    """Halfway between two latencies the throughput is halfway, too; outside the points there are bounds."""
    assert throughput_at(OURS, latency) == expected


def test_no_points_say_nothing() -> None:
    """Without points every throughput is possible."""
    assert throughput_at([], 1.0) == Interval(0.0, math.inf)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(1.0, 1.0), "1.0"),
        (Interval(1.0, 2.0), "1.0 to 2.0"),
        (Interval(1.0, math.inf), "at least 1.0"),
        (Interval(0.0, 2.0), "at most 2.0"),
        (Interval(0.0, math.inf), "-"),
    ],
)
def test_intervals_as_text(interval: Interval, text: str) -> None:
    """What is not known is not printed."""
    assert interval.format(1) == text


@pytest.mark.parametrize(("low", "high", "text"), [(34.74, 34.74, "35"), (0.976, 1.04, "0.98 to 1"), (346, 346, "350")])
def test_significant_digits(low: float, high: float, text: str) -> None:
    """Estimates have few digits, whatever their size."""
    assert Interval(low, high).format(2, significant=True) == text


def test_a_table_with_significant_digits() -> None:
    """Throughputs and ratios are rounded, latencies are not."""
    assert table_rows([*OURS, *THEIRS], significant=1)[2][1:] == (
        "2.0 ms",
        "8",
        "20",
        "at most 10",
        "at least 2",
        "-",
        "-",
    )


def test_quotients_and_medians_of_intervals() -> None:
    """Of all figures within intervals, none has a quotient or a median outside of those of the intervals."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        ends = np.sort(rng.uniform(0, 9, (5, 2)))
        intervals = [Interval(*pair) for pair in ends]
        figures = rng.uniform(*ends.T, (20, 5))
        quotient, middle = intervals[0].over(intervals[1]), Interval.median(intervals)
        assert np.all(quotient.low <= figures[:, 0] / figures[:, 1])
        assert np.all(figures[:, 0] / figures[:, 1] <= quotient.high)
        medians = np.median(figures, axis=1)
        assert np.all((middle.low <= medians) & (medians <= middle.high))
    assert Interval(2.0, 3.0).over(Interval(0.0, math.inf)) == Interval(0.0, math.inf)


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        ((30.0, 1.0), (10.0, 9.0), "at least 3.00"),
        ((30.0, 9.0), (10.0, 1.0), "at most 1.25"),
        ((30.0, 1.0), (10.0, 1.0), "-"),
    ],
)
def test_ratios_of_lower_bounds(ours: tuple[float, float], theirs: tuple[float, float], ratio: str) -> None:
    """A ratio with a lower bound is a bound itself; of two of them nothing follows."""
    first = (10.0, 1.0)
    points = [*curve("iteration", 8, first, ours), *curve("request", 8, first, theirs)]
    assert table_rows(points)[1][-3:] == (ratio, "-", "-")


def test_a_table_from_a_file(tmp_path: Path) -> None:
    """The first rows are at twice 1 ms; a best batch is bounded by those that are not known."""
    path = tmp_path / "points.jsonl"
    for point in [*OURS, *THEIRS]:
        append_point(path, point)
    runs = read_points(path)
    assert runs == [*OURS, *THEIRS]
    request_8_at_4 = 10 + 1 / 27
    bound = f"at least {30 / request_8_at_4:.2f}"
    ends = [
        ("2.0 ms", "1", "-", "8.1", "-"),
        ("2.0 ms", "8", "22.5", "at most 10.0", "at least 2.25"),
        ("2.0 ms", "best", "at least 22.5", "8.1 to 10.0", "at least 2.25"),
        ("4.0 ms", "1", "-", "8.3", "-"),
        ("4.0 ms", "8", "at least 30.0", "10.0", bound),
        ("4.0 ms", "best", "at least 30.0", "10.0", bound),
    ]
    assert table_rows(runs)[1:] == [("small", *end, "-", "-") for end in ends]
    faster = [
        replace(run, requests_per_s=2 * run.requests_per_s, ms_per_token=run.ms_per_token / 2, offered_per_s=9 + at)
        for at, run in enumerate(runs)
    ]
    simulated = [replace(run, requests_per_s=run.requests_per_s / 3) for run in faster]
    assert [row[-3:] for row in table_rows(runs, faster, simulated)[1:]] == [(end[-1],) * 3 for end in ends]
    plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_policies_are_compared_in_each_repetition() -> None:
    """A machine of half the speed has latencies of its own; a repetition that misses one bounds the median."""
    fast = [*curve("iteration", 8, (30.0, 1.0), (60.0, 5.0)), *curve("request", 8, (10.0, 1.0), (20.0, 5.0))]
    slow = [
        replace(run, seed=1, requests_per_s=run.requests_per_s / 2, ms_per_token=run.ms_per_token * 2) for run in fast
    ]
    missed = [replace(run, seed=2, ms_per_token=run.ms_per_token + 9 * (run.policy == "request")) for run in fast]
    assert table_rows([*fast, *slow])[1][1:] == ("3.0 ms", "8", "28.1", "9.4", "3.00", "-", "-")
    # At twice 1 ms: 37.5 of iteration-level, 12.5 of request-level, but at most 10 where it was missed.
    assert table_rows([*fast, *missed])[1][1:-2] == ("2.0 ms", "8", "37.5", "6.2 to 11.2", "at least 3.38")
    assert table_rows([*fast, *slow, *missed])[1][-3] == "3.00"


def test_a_summary_has_ratios_as_measured_and_at_equal_speed() -> None:
    """Each max batch has both, in this order; a batch that was not measured has none."""
    runs = [*OURS, *THEIRS]
    scaled = [replace(run, requests_per_s=run.requests_per_s * (2 if run.policy == "iteration" else 1)) for run in runs]
    rows = table_rows(runs, scaled)
    found = summary_rows(rows)
    assert found[0] == (
        *("weights", "latency per token", "max batch 8, measured", "max batch 8, at equal speed"),
        *("max batch 32, measured", "max batch 32, at equal speed", "best batches, measured"),
        "best batches, at equal speed",
    )
    assert found[1] == (
        *("small", "2.0 ms", "at least 2.25", "at least 4.50", "-", "-", "at least 2.25", "at least 4.50"),
    )
    assert [row[:2] for row in found[1:]] == [("small", "2.0 ms"), ("small", "4.0 ms")]


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

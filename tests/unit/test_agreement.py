"""Measured and simulated loads side by side: ratios, counts and sentences of points whose figures are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoding.agreement import CURVE_HEAD, LOAD_HEAD, Both, agreement_text, curve_readings, curve_rows, load_rows
from decoding.orca_experiment import LoadPoint
from page_markers import markdown_table


def curve(policy: str, seed: int, speed: float = 1.0) -> list[LoadPoint]:
    """Return points of 10, 20 and 30 requests/s at 1, 2 and 5 ms per token, at a multiple of that speed."""
    figures = ((10.0, 1.0), (20.0, 2.0), (30.0, 5.0))
    return [
        LoadPoint("small", 1, policy, 8, at, served, 60, seed, speed * served, latency / speed)
        for at, (served, latency) in enumerate(figures)
    ]


def scaled(points: list[LoadPoint], *, throughput: float = 1.0, latency: float = 1.0) -> list[LoadPoint]:
    """Return points with their throughputs and latencies multiplied."""
    return [
        replace(point, requests_per_s=throughput * point.requests_per_s, ms_per_token=latency * point.ms_per_token)
        for point in points
    ]


@pytest.fixture
def both() -> tuple[Both, Both]:
    """Return two repetitions, whose simulated throughputs are 1.1 and 1.3 times the measured ones; and at equal speed.

    Of request-level scheduling there is one repetition, whose throughputs are simulated as measured, and at equal speed
    0.9 times as high.
    """
    runs = [*curve("iteration", 0), *curve("iteration", 1), *curve("request", 0)]
    simulated = [*scaled(runs[:3], throughput=1.1), *scaled(runs[3:6], throughput=1.3), *scaled(runs[6:])]
    equal = [*scaled(runs[:6]), *scaled(runs[6:], throughput=0.9)]
    return (runs, simulated), (runs, equal)


def test_readings_are_medians_of_the_repetitions_that_cover_a_latency(both: tuple[Both, Both]) -> None:
    """At 2 ms a curve has 20 requests/s, and at 4 ms 26.7, between its second and third point."""
    found = curve_readings(*both[0])
    assert list(found) == [(("small", 1), factor, "8", p) for factor in (2.0, 4.0) for p in ("iteration", "request")]
    ours, theirs = (found[("small", 1), 2.0, "8", policy] for policy in ("iteration", "request"))
    assert (ours.latency_ms, ours.covered, ours.measured) == (2.0, "2 of 2", 20.0)
    assert (ours.simulated, ours.ratio) == pytest.approx((24.0, 1.2))
    assert (theirs.covered, theirs.ratio) == ("1 of 2", 1.0)  # the other repetition has no such curve
    at_4_ms = found[("small", 1), 4.0, "8", "iteration"]
    assert (at_4_ms.latency_ms, at_4_ms.measured) == pytest.approx((4.0, 20 + 10 * 2 / 3))


def test_a_simulated_curve_that_ends_earlier_does_not_count(both: tuple[Both, Both]) -> None:
    """If the first repetition is simulated faster than 4 ms everywhere, it has no reading there."""
    (runs, simulated), _ = both
    shorter = [*scaled(list(simulated[:3]), latency=0.7), *simulated[3:]]
    found = curve_readings(runs, shorter)[("small", 1), 4.0, "8", "iteration"]
    assert (found.covered, found.ratio) == ("1 of 2", pytest.approx(1.3))


def test_rows_of_curves(both: tuple[Both, Both]) -> None:
    """Each row has the repetitions of both comparisons; a curve without a reading at equal speed has none."""
    as_measured, at_equal_speed = both
    head, first, second, *_ = curve_rows(as_measured, at_equal_speed)
    assert head == CURVE_HEAD
    assert first == ("small", "8", "iteration", "2.0 ms", "2 of 2", "20.0", "24.0", "1.20", "2 of 2", "1.00")
    assert second == ("small", "8", "request", "2.0 ms", "1 of 2", "20.0", "20.0", "1.00", "1 of 2", "0.90")
    without = (as_measured[0][:6], as_measured[1][:6])
    assert curve_rows(as_measured, without)[2][-2:] == ("-", "-")


def test_rows_of_loads(both: tuple[Both, Both]) -> None:
    """Ratios are simulated / measured of medians, and slowdowns have their range."""
    as_measured, _ = both
    equal = (scaled(list(as_measured[0]), throughput=2.0), scaled(list(as_measured[0]), throughput=1.0, latency=3.0))
    slowdowns = {as_measured[0][0].load: [1.5, 0.75, 1.0]}
    head, *rows = load_rows(as_measured, equal, slowdowns)
    assert head == LOAD_HEAD
    assert len(rows) == 6
    cells = ("10.0", "12.0", "1.20", "1.0", "1.0", "1.00", "0.75 to 1.50", "0.50", "3.00")
    assert rows[0] == ("small", "8", "iteration", "10.0", *cells)
    assert rows[1][-3:] == ("-", "0.50", "3.00")
    assert rows[3][:4] == ("small", "8", "request", "10.0")


def test_the_summary_counts_and_states_ranges(both: tuple[Both, Both]) -> None:
    """Iteration-level throughputs are 1.2 times the measured ones, which is not within 15 %; others are."""
    slowdowns = {run.load: [0.5, 2.0] for run in both[0][0][:2]} | {both[0][0][2].load: [1.25]}
    table, sentences = agreement_text(*both, slowdowns).split("\n\n")
    assert table == markdown_table(
        [
            ("simulated / measured within 15 %", "as measured", "at equal speed"),
            ("throughput at equal latency", "2 of 4", "4 of 4"),
            ("throughput of iteration-level points", "0 of 3", "3 of 3"),
            ("throughput of request-level points", "3 of 3", "3 of 3"),
            ("latency of iteration-level points", "3 of 3", "3 of 3"),
            ("latency of request-level points", "3 of 3", "3 of 3"),
        ]
    )
    assert sentences == (
        "The iterations of a run took 0.50 to 2.00 (median 1.25) times as long as by the fitted costs. "
        "Simulated / measured throughput at equal latency: as measured 1.00 to 1.20 (median 1.10) over 4 curves "
        "(6 of 8 repetitions); at equal speed 0.90 to 1.00 (median 0.95) over 4 curves (6 of 8 repetitions)."
    )


def test_nothing_is_said_without_points() -> None:
    """Without runs there are zeros and no sentences."""
    text = agreement_text(([], []), ([], []), {})
    assert "took" not in text
    assert text.count("0 of 0") == 10

"""Metrics compared with numpy's results for whole samples, and with calculations by hand."""

import numpy as np
import pytest

from chrion.serving.simulator.averages import BinnedAverage, BinnedCounts
from chrion.serving.simulator.histograms import SparseHistograms, bin_edges, bin_index, quantile
from chrion.serving.simulator.metrics import COLUMNS, OUTCOMES, BusyShares, RequestMetrics


def test_quantiles_within_half_a_percent() -> None:
    """A histogram's quantiles equal those of the sample, to half a bin of 1 %."""
    values = np.random.default_rng(0).lognormal(4, 1, 100_000)
    counts = np.bincount(bin_index(values), minlength=len(bin_edges()) - 1)
    for share in (0.5, 0.95, 0.99):
        assert quantile(counts, share) == pytest.approx(np.quantile(values, share), rel=0.0055)


def test_every_value_lies_in_its_bin() -> None:
    """A bin counts the values between its edges; the first and the last bin also count values out of range."""
    values = np.array([0.5, 1.0, 59.3, 1643.0, 1e6])
    index = bin_index(values)
    assert (bin_edges()[index] <= values * (1 + 1e-12)).all()
    assert (values <= bin_edges()[index + 1] * (1 + 1e-12)).all()
    assert bin_index(np.array([0.0, 1e30])).tolist() == [0, len(bin_edges()) - 2]


def test_quantile_of_nothing() -> None:
    """The quantile of an empty histogram is NaN."""
    assert np.isnan(quantile(np.zeros(10, np.int64), 0.5))


def test_binned_means_of_a_step_function() -> None:
    """Bins have the exact means, before and after pairs of them are merged."""
    average = BinnedAverage(bins=4, width_ms=10.0)
    for now, value in [(0.0, 2.0), (5.0, 4.0), (25.0, 0.0), (35.0, 8.0)]:
        average.step(now, value)
    assert average.means(40.0 - 1e-9) == (10.0, pytest.approx([3.0, 4.0, 2.0, 4.0]))
    average.step(60.0, 0.0)
    assert average.means(70.0) == (20.0, pytest.approx([3.5, 3.0, 8.0, 0.0]))
    assert average.peak == 8.0
    assert average.area == pytest.approx(2 * 5 + 4 * 20 + 8 * 25)


def test_the_number_of_bins_is_bounded() -> None:
    """A long run does not add bins, and the integral is exact."""
    average = BinnedAverage(bins=8, width_ms=1.0)
    for now in range(100_000):
        average.step(float(now), now % 2)
    width, means = average.means(100_000.0)
    assert len(means) <= 8
    assert width * sum(means[:-1]) + (100_000 - width * (len(means) - 1)) * means[-1] == pytest.approx(50_000)


def record(metrics: RequestMetrics, **row: float) -> None:
    names = ("number", "model", "server", "arrival", "start", "end", "cold", "kind")
    metrics.record(tuple(row.get(name, 0.0) for name in names))


@pytest.mark.parametrize(("from_arrival", "late"), [(True, [1, 1]), (False, [0, 1])])
def test_late_by_response_or_by_execution(*, from_arrival: bool, late: list[int]) -> None:
    """The objective is compared with the response time or with the execution time."""
    shares = BusyShares(np.array([[1.0, 0.5]]), np.array([[0.0, 2.0]]), np.zeros(1, np.int64))
    metrics = RequestMetrics(2, 1, [50.0, 10.0], from_arrival=from_arrival, busy_shares=shares)
    record(metrics, model=0, arrival=0.0, start=20.0, end=60.0, cold=1.0)
    record(metrics, model=1, arrival=0.0, start=0.0, end=11.0, kind=1.0)
    record(metrics, model=1, arrival=0.0, start=float("nan"), end=float("nan"))
    added = metrics.flush(force=True)
    assert added is not None
    rows, outcomes = added
    assert rows.shape == (3, COLUMNS)
    assert [OUTCOMES[outcome] for outcome in outcomes] == [["in time", "late"][late[0]], "late", "dropped"]
    assert metrics.late.tolist() == late
    assert metrics.dropped.tolist() == [0, 1]
    assert metrics.cold.tolist() == [1, 0]
    assert metrics.wait_ms.tolist() == [20.0, 0.0]
    assert metrics.gpu_ms.tolist() == [40.0 + 11.0 / 2]
    assert metrics.cores_ms.tolist() == [2 * 11.0]


def test_few_records_are_counted_only_if_forced() -> None:
    """Records are counted in batches unless forced, and no record is counted twice."""
    metrics = RequestMetrics(1, 1, [1.0], from_arrival=True)
    record(metrics, end=1.0)
    assert metrics.flush() is None
    assert metrics.flush(force=True) is not None
    assert metrics.flush(force=True) is None
    assert metrics.arrivals.tolist() == [1]


@pytest.mark.parametrize("latency_ms", [1e-5, 9e7, 3e9, 1e15])
def test_quantiles_do_not_saturate(latency_ms: float) -> None:
    """Latencies far below 0.01 ms and far above a day have their own bins."""
    counts = np.bincount(bin_index(np.full(3, latency_ms)), minlength=len(bin_edges()) - 1)
    assert quantile(counts, 0.5) == pytest.approx(latency_ms, rel=0.0055)


def test_sparse_histograms_are_dense_ones() -> None:
    """Histograms that were added in parts have the counts and the quantiles of dense ones, also in groups."""
    rng = np.random.default_rng(1)
    models, bins = rng.integers(0, 4, 5000), bin_index(rng.lognormal(3, 1, 5000))
    dense = np.zeros((5, len(bin_edges()) - 1), np.int64)
    np.add.at(dense, (models, bins), 1)
    sparse = SparseHistograms()
    for part in (slice(0, 10), slice(10, 3000), slice(3000, 5000)):
        sparse.add(models[part], bins[part])
    assert np.array_equal(sparse.total(), dense.sum(axis=0))
    quantiles = sparse.quantiles(5, (0.5, 0.99))
    for i in range(5):
        assert np.array_equal(sparse.row(i), dense[i])
        assert quantiles[i] == pytest.approx((quantile(dense[i], 0.5), quantile(dense[i], 0.99)), nan_ok=True)
    assert str(SparseHistograms().quantiles(2, (0.5,))) == "[(nan,), (nan,)]"
    grouped = sparse.grouped(np.array([1, 0, 1, 0, 0]))
    assert np.array_equal(grouped.row(0), dense[[1, 3, 4]].sum(axis=0))
    assert np.array_equal(grouped.row(1), dense[[0, 2]].sum(axis=0))


def test_a_latency_equal_to_the_objective_is_in_time() -> None:
    """Rounding of times does not make a request late; a microsecond more does."""
    assert (1e6 + 0.3) - 1e6 > 0.3
    for extra, late in [(0.0, 0), (1e-3, 1)]:
        metrics = RequestMetrics(1, 1, [0.3], from_arrival=True)
        record(metrics, arrival=1e6, start=1e6, end=1e6 + 0.3 + extra)
        metrics.flush(force=True)
        assert metrics.late.tolist() == [late]


def test_binned_counts_keep_all_events() -> None:
    """Counts are those of a histogram with as wide bins, however often the bins were merged."""
    times = np.random.default_rng(0).uniform(0, 5000, (4, 700)).cumsum(axis=0)
    counts = BinnedCounts(2, bins=8, width_ms=1.0)
    for part in times:
        counts.add(1, part)
    edges = np.arange(9) * counts.width_ms
    assert counts.counts[0].sum() == 0
    assert counts.counts[1].tolist() == np.histogram(times, edges)[0].tolist()
    assert times.max() < edges[-1] < 4 * times.max()

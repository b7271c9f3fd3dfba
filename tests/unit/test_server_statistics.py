"""Statistics of served models."""

from __future__ import annotations

from chrion.serving.server.statistics import RECENT, ModelStatistics, RequestTiming


def test_quantiles_are_those_of_the_last_requests() -> None:
    """A quantile is a time that occurred; times before the last 500 do not count."""
    statistics = ModelStatistics()
    assert statistics.quantiles_ms(0.5, 0.99) == [None, None]
    for ms in [1e6] * RECENT + list(range(1, RECENT + 1)):
        statistics.add_answer(1, RequestTiming(0.0, None, float(ms)), (0.0, float(ms), 0.0))
    assert statistics.quantiles_ms(0.0, 0.5, 0.99, 1.0) == [1.0, 250.0, 495.0, 500.0]
    statistics.recent_ms.clear()
    statistics.add_answer(1, RequestTiming(2.0, 1.0, 4.0), (0.0, 4.0, 0.0))
    assert statistics.quantiles_ms(0.5, 0.99) == [7.0, 7.0]

"""What the soak of the server takes as growth."""

from __future__ import annotations

from soak_serve import Sample, grown


def test_growth_is_noticed() -> None:
    """Memory that grows by more than a tenth, and more threads and files, are problems; a warm-up is none."""
    flat = [Sample(50.0 + 10 * i, 5, 9) for i in range(10)] + [Sample(200.0, 12, 20)] * 30
    assert grown(flat) == []
    leaking = [Sample(200.0 + 2 * i, 12 + i, 20 + i) for i in range(40)]
    assert [problem.split()[0] for problem in grown(leaking)] == ["memory_mb", "threads", "files"]

"""The paper's cluster evaluation: orderings over seeds, and rates compared with theory."""

from statistics import NormalDist

import numpy as np
import pytest

from chrion.serving.simulator.histograms import bin_edges
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import find_scenario

SEEDS = 20


@pytest.fixture(scope="module")
def rates() -> np.ndarray:
    """Return swapping and violation rates. Shape [seeds, patterns, 2]."""
    return np.array(
        [
            [
                (result.total.swapping_rate, result.total.violation_rate)
                for result in simulate(find_scenario("table7").changed({"seed": seed, "requests": 4000}).build())
            ]
            for seed in range(SEEDS)
        ]
    )


def test_orderings_hold_for_every_seed(rates: np.ndarray) -> None:
    """Swapping decreases from GPU to latency- to memory-optimal; latency-optimal has fewest violations (Table 7)."""
    gpu, fastest, smallest, _ = rates.transpose(1, 2, 0)
    assert (gpu[0] > fastest[0]).all()
    assert (fastest[0] > smallest[0]).all()
    assert (fastest[1] < gpu[1]).all()
    assert (fastest[1] < smallest[1]).all()


def test_models_that_shrink_are_not_swapped(rates: np.ndarray) -> None:
    """All memory-optimal plans fit, so models that shrink are never loaded again; most keep a faster plan."""
    _, _, smallest, shrink = rates.transpose(1, 2, 0)
    assert (shrink[0] == 0).all()
    assert (shrink[1] < smallest[1]).all()


def test_swapping_is_what_memory_allows(rates: np.ndarray) -> None:
    """One request in nine swaps if eight of nine equally probable plans fit.

    In 8 GB any eight latency-optimal plans fit, but not all nine, which take 8.21 GB; all memory-optimal plans fit.
    """
    gpu, fastest, smallest, _ = rates[:, :, 0].mean(axis=0)
    assert fastest == pytest.approx(1 / 9, abs=0.005)
    assert smallest == 0
    assert gpu == pytest.approx(0.44, abs=0.04)


def test_violations_are_the_tails_of_the_jitter(rates: np.ndarray) -> None:
    """Violation rates are the mean probabilities that a log-normal execution time exceeds its objective."""
    scenario = find_scenario("table7").build()
    for pattern, found in zip(scenario.patterns[:3], rates[:, :3, 1].mean(axis=0), strict=True):
        tails = []
        for model in scenario.models:
            variant = model.variants[pattern]
            sigma = np.sqrt(np.log1p(variant.jitter_cv**2))
            slack = np.log(1.05 * model.variants["gpu"].latency_ms / variant.latency_ms)
            tails.append(1 - NormalDist().cdf((slack + sigma**2 / 2) / sigma))
        assert found == pytest.approx(np.mean(tails), rel=0.06)


@pytest.mark.parametrize(("pattern", "mode_ms"), [("gpu", (57.5, 60.0)), ("latency-optimal", (50.0, 52.5))])
def test_modes_of_figure11(pattern: str, mode_ms: tuple[float, float]) -> None:
    """The most frequent execution time of twenty copies of the baseline is that of the paper (Section 6.4)."""
    scenario = find_scenario("figure11-baseline").changed({"requests": 20_000, "patterns": [pattern]}).build()
    assert len(scenario.models) == 20
    (result,) = simulate(scenario)
    middles = np.sqrt(bin_edges()[:-1] * bin_edges()[1:])
    shares, edges = np.histogram(middles, np.arange(40, 75, 2.5), weights=result.executions["baseline"])
    top = int(shares.argmax())
    assert (edges[top], edges[top + 1]) == mode_ms

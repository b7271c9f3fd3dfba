"""Corrections of estimates, fitted to operators with known factors, and judged by operators that were not measured."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from chrion.profiler.corrections import CorrectionSample, Factors, fit_factors
from chrion.profiler.datasheet import Bound, Parts

TYPES = ("Conv", "MatMul", "Add", "Concat", "Gather", "Relu")


def operators(
    count: int, bounds: dict[Bound, float], types: dict[str, float], noise: float = 0.0, seed: int = 0
) -> list[CorrectionSample]:
    """Return operators with parts of random sizes, on a machine with these factors."""
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        parts = Parts(
            arithmetic_ms=10 ** rng.uniform(-4, 0),
            traffic_ms=10 ** rng.uniform(-4, 0),
            overhead_ms=10 ** rng.uniform(-4, -2),
            level=rng.choice([Bound.CACHE, Bound.MEMORY]),
        )
        op_type = rng.choice(TYPES)
        exact = Factors(bounds, types).time_ms(op_type, (parts,))
        samples.append(CorrectionSample(op_type, (parts,), exact * math.exp(rng.gauss(0, noise))))
    return samples


def median_error(samples: list[CorrectionSample], factors: Factors) -> float:
    return statistics.median(abs(factors.time_ms(s.op_type, s.parts) / s.measured_ms - 1) for s in samples)


def test_the_factors_of_the_bounds_are_found() -> None:
    """Memory is twice as slow, calls half as fast, arithmetic 1.5 times: forty operators show it within a tenth."""
    truth = dict.fromkeys(Bound, 1.0) | {Bound.ARITHMETIC: 1.5, Bound.MEMORY: 2.0, Bound.OVERHEAD: 2.0}
    found = fit_factors(operators(40, truth, {})).bounds
    assert found == {bound: pytest.approx(factor, rel=0.1) for bound, factor in truth.items()}


@pytest.mark.parametrize("seed", range(5))
def test_a_few_operators_correct_the_others(seed: int) -> None:
    """Of 300 operators with errors of 20 %, twelve are measured: the error of the others falls from 55 % to 30 %."""
    truth = {Bound.ARITHMETIC: 2.5, Bound.CACHE: 2.0, Bound.MEMORY: 3.0, Bound.OVERHEAD: 2.0}
    samples = operators(300, truth, {}, 0.2, seed)
    few, rest = samples[:12], samples[12:]
    before, after = median_error(rest, Factors()), median_error(rest, fit_factors(few))
    assert before > 0.55
    assert after < 0.3


@pytest.mark.parametrize("seed", range(5))
def test_estimates_without_a_bias_stay_as_they_are(seed: int) -> None:
    """Errors of 25 % without a common factor: few measurements worsen the others by less than a tenth."""
    samples = operators(300, {}, {}, 0.25, seed)
    few, rest = samples[:18], samples[18:]
    assert median_error(rest, fit_factors(few)) < median_error(rest, Factors()) + 0.1


def test_a_type_has_a_factor_of_its_own() -> None:
    """One type at three times the estimate moves part of the way, and the others by less than a fifth."""
    samples = operators(60, {}, {"Gather": 3.0})
    found = fit_factors(samples)
    assert found.types["Gather"] > 1.5 * found.types["Conv"]
    rest = operators(100, {}, {"Gather": 3.0}, seed=1)
    assert median_error([s for s in rest if s.op_type != "Gather"], found) < 0.2
    gathers = [s for s in rest if s.op_type == "Gather"]
    assert median_error(gathers, found) < median_error(gathers, Factors()) - 0.1


def test_one_outlier_changes_little() -> None:
    """A measurement of a hundred times the estimate, among twenty exact ones, moves no other operator by a fifth."""
    samples = operators(20, {}, {})
    spoilt = [*samples[1:], CorrectionSample(samples[0].op_type, samples[0].parts, 100 * samples[0].measured_ms)]
    factors = fit_factors(spoilt)
    assert max(abs(factors.time_ms(s.op_type, s.parts) / s.measured_ms - 1) for s in samples) < 0.2


def test_one_operator_corrects_with_caution() -> None:
    """A single operator at four times the estimate, bound by arithmetic, says nothing about memory.

    The mean of two normal distributions in logarithms, weighted by precision: that of the factors, with variances
    0.7^2 and 0.15^2, and that of the measurement, 0.4^2.
    """
    parts = Parts(arithmetic_ms=1.0)
    factors = fit_factors([CorrectionSample("Conv", (parts,), 4.0)])
    expected = 4 ** ((0.7**2 + 0.15**2) / (0.7**2 + 0.15**2 + 0.4**2))
    assert factors.time_ms("Conv", (parts,)) == pytest.approx(expected)
    assert factors.time_ms("Add", (parts,)) < expected
    assert factors.time_ms("Add", (Parts(traffic_ms=1.0),)) == pytest.approx(1.0)


def test_nothing_measured_corrects_nothing() -> None:
    """Without operators, or with times of zero, all factors are 1."""
    parts = (Parts(arithmetic_ms=1.0),)
    for samples in (
        [],
        [CorrectionSample("Conv", parts, 0.0)],
        [CorrectionSample("Conv", (Parts(),), 1.0)],
        [CorrectionSample("Conv", (), 1.0)],
    ):
        assert fit_factors(samples).time_ms("Conv", parts) == 1.0


def test_operators_of_several_nodes_are_corrected_node_by_node() -> None:
    """The sum of the nodes' times, each with its own bound."""
    nodes = (Parts(arithmetic_ms=1.0, traffic_ms=0.8), Parts(traffic_ms=1.0, level=Bound.MEMORY))
    factors = Factors({Bound.ARITHMETIC: 2.0, Bound.CACHE: 3.0, Bound.MEMORY: 5.0})
    assert factors.time_ms("Conv", nodes) == pytest.approx(2.4 + 5.0)

"""The pattern ``planned``: one variant for each model, chosen for the memory of the whole cluster.

As in planning, memory has a price alpha in ms per MB, and each model has the variant with the least
``requests * latency + alpha * memory``. Alpha is the lowest price at which all models fit into the memory of all GPUs.
The memory that is then left is used for further exchanges, in the order of the latency that they save for each MB.

The choice minimises the total latency of all requests for the memory that it uses, if it ends with the first exchange
that does not fit (H. Everett, "Generalized Lagrange multiplier method", Operations Research 11(3), 1963).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chrion.errors import ScenarioError
from chrion.serving.simulator.eligibility import Eligibility
from chrion.serving.simulator.requests import Floats
from chrion.serving.simulator.scenario_models import PLANNED, ServedModel
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.simulator.workload import MinuteReplay, SyntheticWorkload, Workload
from chrion.serving.variants import Variant


def with_planned(
    models: Sequence[ServedModel], gpus: Sequence[ServerSpec], workload: Workload
) -> tuple[ServedModel, ...]:
    """Return the models with their variants in the pattern ``planned``.

    Args:
        models: The models.
        gpus: The server of each GPU.
        workload: The requests, whose numbers by model count.

    Raises:
        ScenarioError: A model names a variant that it does not have, or no server can serve any of its variants.
    """
    eligibility = Eligibility(gpus)
    candidates = [_candidates(model, eligibility) for model in models]
    budget = sum(spec.budget_bytes for spec in gpus)
    chosen = choose_variants(candidates, request_counts(workload, len(models)).tolist(), budget)
    return tuple(
        replace(model, variants={**model.variants, PLANNED: variant})
        for model, variant in zip(models, chosen, strict=True)
    )


def request_counts(workload: Workload, models: int) -> Floats:
    """Return the number of requests for each model, expected if they are drawn. Shape [models]."""
    if isinstance(workload, SyntheticWorkload):
        return workload.chances * workload.requests
    if isinstance(workload, MinuteReplay):
        return np.bincount(workload.models, workload.counts.sum(axis=1) * workload.rate_scale, models).astype(float)
    counts = np.zeros(models)
    for chunk in workload.chunks():
        counts += np.bincount(chunk.models, minlength=models)
    return counts


def choose_variants(
    candidates: Sequence[Sequence[Variant]], requests: Sequence[float], budget_bytes: int
) -> list[Variant]:
    """Return one of the candidates of each model.

    Args:
        candidates: The permitted variants of each model, at least one.
        requests: The number of requests for each model.
        budget_bytes: The memory for all models. If not even the smallest variants fit, they are chosen.
    """
    ladders = [pareto_hull(own) for own in candidates]
    levels = [0] * len(ladders)
    remaining_bytes = budget_bytes - sum(ladder[0].memory_bytes for ladder in ladders)
    exchanges = []
    for i, ladder in enumerate(ladders):
        for level in range(1, len(ladder)):
            small, large = ladder[level - 1], ladder[level]
            more = large.memory_bytes - small.memory_bytes
            saved_ms = requests[i] * (small.latency_ms - large.latency_ms)
            exchanges.append((-saved_ms / more, i, level, more))
    for _, i, level, more in sorted(exchanges):
        if levels[i] == level - 1 and more <= remaining_bytes:
            levels[i] = level
            remaining_bytes -= more
    return [ladder[level] for ladder, level in zip(ladders, levels, strict=True)]


def pareto_hull(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that some price of memory selects, by increasing memory and decreasing latency.

    They are the lower convex hull of the points (memory, latency), found with a stack (Andrew's monotone chain).
    """
    hull: list[Variant] = []
    for variant in sorted(variants, key=lambda v: (v.memory_bytes, v.latency_ms)):
        if hull and variant.latency_ms >= hull[-1].latency_ms:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], variant):
            hull.pop()
        hull.append(variant)
    return hull


def _is_above(middle: Variant, left: Variant, right: Variant) -> bool:
    """Return whether a point is on or above the line between its neighbours."""
    first = (middle.latency_ms - left.latency_ms) * (right.memory_bytes - left.memory_bytes)
    return first >= (right.latency_ms - left.latency_ms) * (middle.memory_bytes - left.memory_bytes)


def _candidates(model: ServedModel, eligibility: Eligibility) -> list[Variant]:
    """Return the variants that fit a server and, if any does, meet the objective; or the one that the model names."""
    name = model.spec.variant
    if name and name not in model.variants:
        known = ", ".join(model.variants)
        raise ScenarioError(f"models.{model.spec.name}.variant = {name!r}: not a variant", hint=f"known: {known}")
    own = [model.variants[name]] if name else list(model.variants.values())
    fitting = [variant for variant in own if eligibility.of([variant])]
    if not fitting:
        raise ScenarioError(f"models.{model.name}: no server can serve any of its variants")
    return [variant for variant in fitting if variant.latency_ms <= model.slo_ms] or fitting

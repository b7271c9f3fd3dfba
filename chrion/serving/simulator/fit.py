"""The check that every model fits a server."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.common.units import format_count
from chrion.errors import ScenarioError
from chrion.serving.simulator.eligibility import Eligibility
from chrion.serving.simulator.scenario_models import ServedModel
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant


def check_fit(models: Sequence[ServedModel], servers: Sequence[ServerSpec], levels: Sequence[str]) -> None:
    """Refuse models that fit no server, alone or beside the pinned models.

    Args:
        models: The models.
        servers: The servers.
        levels: The variants of a pattern; with several, the last and smallest one has to fit, and the first one of a
            pinned model.

    Raises:
        ScenarioError: A model does not fit.
    """
    max_bytes = max(spec.budget_bytes for spec in servers)
    pinned = [0] * len(servers)
    eligibility = Eligibility(servers)
    fitting: set[tuple[int, ...]] = set()
    for model in sorted(models, key=lambda m: not m.spec.pinned):
        variants = [model.variants[name] for name in levels]
        key = tuple(map(id, variants))
        if key in fitting and not model.spec.pinned:  # a copy of a model that fits
            continue
        fitting.add(key)
        variant = variants[0 if model.spec.pinned else -1]
        where = f"models.{model.name}: variant {variant.name}"
        eligible = eligibility.of(variants)
        if not eligible and variant.memory_bytes > max_bytes:
            available = f"the largest server has {max_bytes / 1e6:g} MB for models"
            raise ScenarioError(f"{where} needs {variant.memory_mb:g} MB, {available}")
        if not eligible:
            raise ScenarioError(f"{where} needs {_needs(variants)}; no server has all of them")
        for i in eligible:
            if pinned[i] + variant.memory_bytes > servers[i].budget_bytes:
                raise ScenarioError(f"{where} needs {variant.memory_mb:g} MB, too much beside the pinned models")
            pinned[i] += variant.memory_bytes if model.spec.pinned else 0


def _needs(variants: Sequence[Variant]) -> str:
    cores = max(variant.cores for variant in variants)
    needs = [f"{variants[-1].memory_mb:g} MB"]
    needs += ["a GPU slot"] if any(variant.gpu_busy_ms for variant in variants) else []
    needs += [format_count(cores, "core")] if cores else []
    return ", ".join(needs)

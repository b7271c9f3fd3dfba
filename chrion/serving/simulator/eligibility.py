"""Which servers can serve which models, and the check that every model has one."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.common.units import format_count
from chrion.errors import ScenarioError
from chrion.serving.simulator.scenario_models import ServedModel
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant


class Eligibility:
    """The resources of servers, compared with the needs of models.

    Args:
        servers: One entry for each GPU: its memory and slots, and the cores of its server.
    """

    def __init__(self, servers: Sequence[ServerSpec]) -> None:
        kinds: dict[tuple[int, int, int], int] = {}
        keys = [(spec.budget_bytes, spec.cpu_cores, spec.gpu_slots) for spec in servers]
        #: The kind of each server, and the resources of each kind.
        self._kinds = [kinds.setdefault(key, len(kinds)) for key in keys]
        self._resources = list(kinds)
        self._known: dict[tuple[int, int, bool], Sequence[int]] = {}
        #: By the kinds of servers; equal results are one object.
        self._results: dict[tuple[bool, ...], Sequence[int]] = {}

    def of(self, levels: Sequence[Variant]) -> Sequence[int]:
        """Return the indices of the servers that can serve a model, in ascending order.

        Args:
            levels: The model's variants, the smallest one last. A server needs memory for the smallest one, and the
                cores and the GPU slot of all of them.
        """
        size, cores = levels[-1].memory_bytes, max(v.cores for v in levels)
        on_gpu = any(v.gpu_busy_ms for v in levels)
        key = size, cores, on_gpu
        if key not in self._known:
            possible = tuple(
                size <= own_bytes and cores <= own_cores and (own_slots > 0 or not on_gpu)
                for own_bytes, own_cores, own_slots in self._resources
            )
            if possible not in self._results:
                indices = tuple(i for i, kind in enumerate(self._kinds) if possible[kind])
                self._results[possible] = range(len(self._kinds)) if all(possible) else indices
            self._known[key] = self._results[possible]
        return self._known[key]


def eligible_by_model(variants: Sequence[Sequence[Variant]], servers: Sequence[ServerSpec]) -> list[Sequence[int]]:
    """Return the eligible servers of each model, given the variants by level and model."""
    eligibility = Eligibility(servers)
    return [eligibility.of(levels) for levels in zip(*variants, strict=True)]


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
    free = [spec.budget_bytes for spec in servers]
    max_bytes = max(free)
    #: The least free memory of the servers that can serve a model, beside the pinned ones, by the servers.
    least: dict[int, int] = {}
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
            largest = max(servers, key=lambda spec: spec.budget_bytes)
            available = f"the largest server has {max_bytes / 1e6:g} MB for models"
            reserved = f" (reserved_gb = {largest.reserved_gb:g} of its {largest.gpu_memory_gb:g} GB)"
            raise ScenarioError(f"{where} needs {variant.memory_mb:g} MB, {available}{reserved}")
        if not eligible:
            raise ScenarioError(f"{where} needs {_needs(variants)}; no server has all of them")
        if id(eligible) not in least:
            least[id(eligible)] = min(free[i] for i in eligible)
        if variant.memory_bytes > least[id(eligible)]:
            raise ScenarioError(f"{where} needs {variant.memory_mb:g} MB, too much beside the pinned models")
        if model.spec.pinned:
            least.clear()
            for i in eligible:
                free[i] -= variant.memory_bytes


def _needs(variants: Sequence[Variant]) -> str:
    cores = max(variant.cores for variant in variants)
    needs = [f"{variants[-1].memory_mb:g} MB"]
    needs += ["a GPU slot"] if any(variant.gpu_busy_ms for variant in variants) else []
    needs += [format_count(cores, "core")] if cores else []
    return ", ".join(needs)

"""The models of a scenario and their variants, and the patterns that select variants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from chrion.common.records import read_record
from chrion.common.wrong_values import wrong_value
from chrion.errors import PlanError, ScenarioError
from chrion.serving.simulator.settings import ModelSpec, SloSpec
from chrion.serving.variants import MEASURED_KEYS, PLAN_KEYS, Variant, VariantTable, from_plan, from_table

#: The pattern in which models change to smaller variants before they are evicted.
SHRINK = "shrink"
#: The pattern with one variant for each model, which the planner chooses.
PLANNED = "planned"
#: A ``[[models]]`` entry and its variants by name.
Family = tuple[ModelSpec, dict[str, Variant]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of the cluster; copies of one ``[[models]]`` entry share its name as their family."""

    name: str
    family: str
    spec: ModelSpec
    #: The variants that can serve it, by name, and the one of the pattern ``planned``.
    variants: Mapping[str, Variant]
    slo_ms: float
    #: The latency of the reference variant, to which the durations of single requests refer.
    reference_ms: float


def read_family(entry: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]], folder: Path) -> Family:
    """Return the record of a ``[[models]]`` entry and its variants."""
    where = f"models.{entry.get('name', '?')}"
    spec = read_record(ModelSpec, {key: value for key, value in entry.items() if key != "variants"}, where)
    tables = entry.get("variants")
    if not isinstance(tables, Mapping) or not tables:
        raise ScenarioError(f"{where}: expected tables [models.variants.NAME]")
    full = {k: {**defaults.get(k, {}), **own} if isinstance(own, Mapping) else own for k, own in tables.items()}
    read = read_record(dict[str, VariantTable], full, f"{where}.variants")
    return spec, {name: _variant(name, table, where, folder) for name, table in read.items()}


def _variant(name: str, table: VariantTable, where: str, folder: Path) -> Variant:
    """Return a variant; refuse figures beside the plan that provides them, and keys that need a plan without one."""
    for key in MEASURED_KEYS if table.plan else PLAN_KEYS:
        if getattr(table, key) is not None:
            at = f"{where}.variants.{name}.{key}"
            if table.plan:
                raise ScenarioError(f"{at}: the plan file provides it", hint="leave out the key or the plan")
            raise ScenarioError(f"{at} = {getattr(table, key)!r}: only for a variant with the key 'plan'")
    try:
        return from_plan(name, folder / table.plan, table) if table.plan else from_table(name, table)
    except PlanError as error:
        raise PlanError(f"{where}.variants.{name}.plan: {error.message}", hint=error.hint) from error
    except ValueError as error:
        raise ScenarioError(f"{where}: {error}") from error


def check_shrink(given: tuple[str, ...], families: Sequence[Family]) -> None:
    """Check the variants of the pattern ``shrink``: all models must have them, and memory must not increase."""
    if len(given) == 1 or len(set(given)) < len(given):
        expected = "a list of two or more names of variants, the largest first"
        raise wrong_value("shrink", expected, list(given), failure=ScenarioError)
    for spec, variants in families:
        for name in given:
            if name not in variants:
                hint = f"known: {', '.join(variants)}"
                raise ScenarioError(f"shrink: models.{spec.name} has no variant {name!r}", hint=hint)
        for before, after in pairwise(given):
            if variants[after].memory_bytes > variants[before].memory_bytes:
                raise ScenarioError(
                    f"shrink: models.{spec.name}: variant {after!r} needs {variants[after].memory_mb:g} MB, "
                    f"more than {before!r} with {variants[before].memory_mb:g} MB",
                    hint="list the largest variant first",
                )
        if given and SHRINK in variants:
            raise ScenarioError(f"models.{spec.name}: a variant cannot have the name {SHRINK!r}", hint="rename it")


def read_patterns(
    given: tuple[str, ...] | None, families: Sequence[Family], shrink: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the patterns of a scenario; by default, every variant that all models have, and ``shrink``."""
    if not families:
        raise ScenarioError("models: expected at least one model")
    common = tuple(name for name in families[0][1] if all(name in variants for _, variants in families))
    if shrink:
        common = (*common, SHRINK)
    if given is None and not common:
        names = "; ".join(f"{spec.name}: {', '.join(variants)}" for spec, variants in families)
        raise ScenarioError(f"models: no variant is common to all models ({names})", hint="rename variants")
    patterns = common if given is None else given
    if not patterns or len(set(patterns)) < len(patterns):
        raise wrong_value("patterns", "a list of distinct names of variants", list(patterns), failure=ScenarioError)
    for spec, variants in families:
        for pattern in patterns:
            if pattern == SHRINK and not (shrink or SHRINK in variants):
                raise ScenarioError("patterns: 'shrink' needs the key shrink, a list of variants, the largest first")
            if pattern not in variants and not (pattern == SHRINK and shrink) and pattern != PLANNED:
                known = ", ".join(variants)
                raise ScenarioError(
                    f"models.{spec.name}: pattern {pattern!r} is not one of its variants", hint=f"known: {known}"
                )
    return patterns


def with_total(families: Sequence[Family], total: int) -> list[Family]:
    """Return the families with as many copies as there are to be models in all; with 0, those that are given.

    The next copy always goes to the family with the greatest quotient of its given copies and those that it has plus
    one (D'Hondt's method), the first of equal ones, so that more models include fewer.
    """
    if not total:
        return list(families)
    copies = [0] * len(families)
    heap = [(-float(spec.copies), i) for i, (spec, _) in enumerate(families)]
    heapify(heap)
    for _ in range(total):
        _, i = heap[0]
        copies[i] += 1
        heapreplace(heap, (-families[i][0].copies / (copies[i] + 1), i))
    numbered = zip(families, copies, strict=True)
    return [(replace(spec, copies=number), variants) for (spec, variants), number in numbered if number]


def served_models(families: Sequence[Family], slo: SloSpec, reference: str) -> tuple[ServedModel, ...]:
    """Return all models, the first copy of every family before the second, so that ranks alternate between families."""
    models = []
    for copy in range(max(spec.copies for spec, _ in families)):
        for spec, variants in families:
            if copy >= spec.copies:
                continue
            if reference and reference not in variants:
                raise ScenarioError(f"slo.of = {reference!r}: model {spec.name} has no variant of that name")
            reference_ms = variants[reference or next(iter(variants))].latency_ms
            objective = spec.slo_ms or slo.latency_ms or slo.factor * reference_ms
            name = spec.name if spec.copies == 1 else f"{spec.name}#{copy + 1}"
            models.append(ServedModel(name, spec.name, spec, variants, objective, reference_ms))
    return tuple(models)


def with_memory(models: Sequence[ServedModel], memory_mb: Sequence[float], reference: str) -> tuple[ServedModel, ...]:
    """Return the models with other GPU memory: their variants keep their ratios to the reference variant.

    Args:
        models: The models.
        memory_mb: The memory of the reference variant of each model; NaN for the given one.
        reference: The variant; if empty, the first one of each model.

    Raises:
        ScenarioError: The reference variant of a model has no GPU memory.
    """
    changed = []
    for model, wanted_mb in zip(models, memory_mb, strict=True):
        given_mb = model.variants[reference or next(iter(model.variants))].memory_mb
        if not given_mb:
            hint = "set slo.of to a variant with GPU memory"
            raise ScenarioError(f"workload.memory_path: models.{model.name}: no GPU memory to scale", hint=hint)
        ratio = 1.0 if math.isnan(wanted_mb) else wanted_mb / given_mb
        variants = {
            name: dataclasses.replace(own, memory_mb=own.memory_mb * ratio, load_mb=own.load_mb * ratio)
            for name, own in model.variants.items()
        }
        changed.append(dataclasses.replace(model, variants=variants))
    return tuple(changed)

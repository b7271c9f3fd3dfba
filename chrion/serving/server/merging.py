"""Documents of several replicas, merged into one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


def merge_metrics(texts: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """Return texts in Prometheus's format as one.

    Args:
        texts: Texts, each with the labels that its samples get.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for labels, text in texts:
        family = ""
        added = ",".join(f'{name}="{value}"' for name, value in labels.items())
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ")[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif match := _SAMPLE.fullmatch(line):
                both = ",".join(filter(None, (match["labels"], added)))
                sample = f"{match['name']}{{{both}}}" if both else match["name"]
                samples.setdefault(family, []).append(f"{sample} {match['value']}")
    return "".join(f"{line}\n" for family, head in heads.items() for line in [*head, *samples.get(family, [])])


def gauge(name: str, text: str, value: float) -> str:
    """Return one gauge in Prometheus's format."""
    return f"# HELP {name} {text}\n# TYPE {name} gauge\n{name} {value}\n"


def counter(name: str, text: str, value: float) -> str:
    """Return one counter in Prometheus's format."""
    return f"# HELP {name}_total {text}\n# TYPE {name}_total counter\n{name}_total {value}\n"


def sum_statistics(answers: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return statistics of models, in the order of names and versions: counts and times are added."""
    sums: dict[tuple[str, int], dict[str, Any]] = {}
    for statistics in answers:
        for entry in statistics:
            key = entry["name"], int(entry["version"])
            sums[key] = _sum(sums[key], entry) if key in sums else entry
    return [sums[key] for key in sorted(sums)]


def merge_indices(answers: Iterable[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Return repository indices as one, with the entry of a replica that can serve a version, if there is one."""
    best: dict[tuple[str, str], dict[str, str]] = {}
    for index in answers:
        for entry in index:
            key = entry["name"], entry["version"]
            if key not in best or entry["state"] == "READY":
                best[key] = entry
    return [best[key] for key in sorted(best)]


def merge_snapshots(answers: Mapping[str, dict[str, Any]], *, draining: bool) -> dict[str, Any]:
    """Return the states of replicas, by their names, as one: devices and models are those of all of them."""
    devices = {f"{name} {device}": used for name, own in answers.items() for device, used in own["devices"].items()}
    models = [model | {"replica": name} for name, own in answers.items() for model in own["models"]]
    models.sort(key=lambda model: (model["name"], int(model["version"]), model["replica"]))
    unserved = {(bad["name"], bad["version"]): bad for own in answers.values() for bad in own["unserved"]}
    return {
        "devices": devices,
        "cores": {key: sum(own["cores"][key] for own in answers.values()) for key in ("count", "busy_ms")},
        "models": models,
        "unserved": [unserved[key] for key in sorted(unserved)],
        "generators": [],
        "draining": draining,
        "uptime_s": max((own["uptime_s"] for own in answers.values()), default=0.0),
    }


def _sum(one: Any, other: Any, key: str = "") -> Any:
    """Return the sum of two documents of the same structure."""
    if isinstance(one, dict):
        return {name: _sum(one[name], other[name], name) if name in other else one[name] for name in one}
    if isinstance(one, list):
        return _sum_batches(one, other) if key == "batch_stats" else [*one, *other]
    if isinstance(one, str):
        return one
    return max(one, other) if key == "last_inference" else one + other


def _sum_batches(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_size = {entry["batch_size"]: entry for entry in one}
    for entry in other:
        size = entry["batch_size"]
        by_size[size] = _sum(by_size[size], entry) | {"batch_size": size} if size in by_size else entry
    return [by_size[size] for size in sorted(by_size)]

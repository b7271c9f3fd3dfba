"""The queries of the Grafana dashboard, and the metrics and labels that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "chrion.json"
#: Words of PromQL in the dashboard's queries; all others are metrics and labels.
_WORDS = {"by", "histogram_quantile", "min", "rate", "sum"}
#: Rows of the dashboard about servers of some kinds only; all other rows are about every server.
ROWS = {"replicas": "Replicas", "text": "Text"}
#: Labels that Prometheus itself adds.
_ADDED = {"instance", "job"}


def queries(about: str = "") -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield each query, its metrics, and its labels.

    Args:
        about: A key of ROWS for the queries of that row; empty for those about every server.
    """
    row = ""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        elif about == next((kind for kind, title in ROWS.items() if row.startswith(title)), ""):
            for target in panel["targets"]:
                yield target["expr"], *_names(target)
    if not about:
        yield "label_values", {"nv_inference_request_success"}, {"model"}


def exported(text: str) -> dict[str, set[str]]:
    """Return the labels of each metric in Prometheus's text format; without samples, the metrics of the heads."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        match = re.match(r"# TYPE (\w+) ", line) or re.match(r"(\w+)(?:\{(.*)\})? \S+$", line)
        if match:
            labels = found.setdefault(match[1], set())
            labels |= set(re.findall(r'(\w+)="', line)) if not line.startswith("#") else set()
    return found


def check_queries(text: str, about: str = "") -> None:
    """Assert that all queries name metrics of a text, and labels that these have."""
    names = exported(text)
    checked = 0
    for query, metrics, labels in queries(about):
        assert metrics, query
        assert metrics <= names.keys(), query
        known = set[str]().union(*(names[metric] for metric in metrics))
        assert labels - _ADDED <= known or not known, query
        checked += 1
    assert checked >= 3


def _names(target: dict[str, Any]) -> tuple[set[str], set[str]]:
    query = re.sub(r"\[[^\]]*\]", "", target["expr"])
    labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    for group in re.findall(r"by \(([^)]*)\)", query):
        labels |= {label.strip() for label in group.split(",")}
    labels |= set(re.findall(r"(\w+)=~?\"", query))
    plain = re.sub(r"by \([^)]*\)|\{[^}]*\}", "", query)
    return set(re.findall(r"[a-zA-Z_]\w*", plain)) - _WORDS, labels

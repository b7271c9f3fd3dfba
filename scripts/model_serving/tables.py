"""The tables of ``docs/results.md``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from page_markers import markdown_table

from model_serving import predictions

_WORKLOADS = {"zipf": "Zipf", "azure": "Azure"}
_NAMES = {"server": "`chrion serve`", "shrink": "`chrion serve`, models shrink", "plain": "plain sessions"}


def sections(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the sections of the page by name."""
    where = f"Measured on {results['machine']}, onnxruntime {results['onnxruntime']}."
    found = {}
    if "prediction" in results:
        found["serve-prediction"] = f"{where}\n\n{_prediction(results['prediction'])}"
    if "plain" in results:
        found["serve-plain"] = _plain(results["plain"])
    if "overhead" in results:
        found["serve-overhead"] = _overhead(results["overhead"])
    return found


def _prediction(rows: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("workload, policy", "requests", "swapping", "predicted", "violations", "predicted", "mean ms", "predicted")
    table = [head]
    for workload in predictions.WORKLOADS:
        for policy in predictions.POLICIES:
            row = rows.get(f"{workload}: {policy}")
            if row:
                measured, predicted = row["measured"], row["predicted"]
                cells = [f"{_WORKLOADS[workload]}, {policy}", f"{measured['requests']}"]
                for key in ("swapping", "violations"):
                    cells += [f"{measured[key]:.1%}", f"{predicted[key]:.1%}"]
                table.append((*cells, f"{measured['mean_ms']:.1f}", f"{predicted['mean_ms']:.1f}"))  # type: ignore[arg-type]
    differences = [
        [abs(row["measured"][key] - row["predicted"][key]) for row in rows.values()]
        for key in ("swapping", "violations")
    ]
    swapping, violations = (100 * max(found) for found in differences)
    objectives = ", ".join(f"{slo_ms:g}" for slo_ms in sorted({row["slo_ms"] for row in rows.values()}))
    text = f"The largest difference is {swapping:.1f} points of swapping and {violations:.1f} of violations."
    text = f"The objective was {objectives} ms. {text}"
    return f"{markdown_table(table)}\n\n{text}"


def _plain(rows: Mapping[str, Mapping[str, Any]]) -> str:
    table = [("workload, server", "requests", "loads", "violations", "mean ms", "p50 ms", "p99 ms")]
    for workload, row in rows.items():
        for name, title in _NAMES.items():
            found = row[name]
            latencies = (f"{found[key]:.1f}" for key in ("mean_ms", "p50_ms", "p99_ms"))
            figures = (f"{found['requests']}", f"{found['loads']}", f"{found['violations']:.1%}")
            table.append((f"{_WORKLOADS[workload]}, {title}", *figures, *latencies))  # type: ignore[arg-type]
    return markdown_table(table)


def _overhead(rows: Mapping[str, Mapping[str, Any]]) -> str:
    titles = {"session": "plain session, in process", "chrion": "`chrion serve`", "starlette": "Starlette alone"}
    table = [("", "p50 ms", "p99 ms", "requests/s")]
    for name, row in rows.items():
        title = titles.get(name, "Ray Serve alone")
        table.append((title, f"{row['p50_ms']:.3f}", f"{row['p99_ms']:.3f}", f"{row['per_s']:.0f}"))
    return markdown_table(table)

"""Measure ``chrion serve``: predictions of the simulation, overhead, and plain sessions with LRU.

    python scripts/bench_serve.py prediction --policy lru --workload zipf --results serve.json
    python scripts/bench_serve.py prediction --workload azure --azure invocations.csv --results serve.json
    python scripts/bench_serve.py plain --results serve.json
    python scripts/bench_serve.py overhead --results serve.json
    python scripts/bench_serve.py table --results serve.json -o docs/data

Each call measures one part, or some rows of it, for ``--seconds`` a row, and adds them to the results; rows that are
measured again are replaced. ``table`` writes the tables as data, which ``scripts/fill_pages.py`` draws.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime as ort
from model_serving import overhead, predictions, tables
from result_files import write_results

from chrion.common.files import write_atomically
from chrion.profiler import this_machine


def main() -> None:
    """Measure what the command line asks for."""
    options = _options()
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.part == "table":
        write_results(options.output, tables.sections(results))
        return
    results["machine"], results["onnxruntime"] = str(this_machine()), ort.__version__
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.models or Path(scratch)
        for key, row in _rows(options, folder):
            results.setdefault(options.part, {})[key] = row
            write_atomically(options.results, json.dumps(results, indent=1))
            print(key, json.dumps(row), flush=True)


def _rows(options: argparse.Namespace, folder: Path) -> Any:
    """Yield the rows of a part as they are measured."""
    if options.part == "overhead":
        yield from overhead.measure(folder, options.seconds, options.only)
        return
    for workload in options.workload:
        if workload == "azure" and not options.azure:
            raise SystemExit("azure: name the trace file with --azure")
        if options.part == "plain":
            yield workload, predictions.measure_plain(workload, options.seconds, options.azure, folder)
            continue
        for policy in options.policy:
            row = predictions.measure(policy, workload, options.seconds, options.azure, folder)
            yield f"{workload}: {policy}", row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("prediction", "plain", "overhead", "table"))
    parser.add_argument("--policy", action="append", choices=predictions.POLICIES)
    parser.add_argument("--workload", action="append", choices=predictions.WORKLOADS)
    parser.add_argument("--azure", type=Path, help="invocations.csv of the Azure Functions 2019 trace")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a row")
    parser.add_argument("--only", action="append", help="overhead: servers to measure")
    parser.add_argument("--models", type=Path, help="folder that keeps the models for further calls")
    parser.add_argument("--results", type=Path, default=Path("serve.json"))
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/data"))
    found = parser.parse_args()
    found.policy = found.policy or list(predictions.POLICIES)
    found.workload = found.workload or ["zipf"]
    return found


if __name__ == "__main__":
    main()

"""Latency against accelerator memory for models that exceed it, by policy.

Predictions for a machine that is known from datasheets (``--hardware``), so no accelerator is needed. The models are
written without values: planning reads no weights. ``-o`` writes the results ``memory``::

    python scripts/bench_memory.py -o docs/data
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from command_arguments import add_output
from result_files import write_results

import chrion
from chrion.graph import Graph
from chrion.hardware import hardware
from chrion.profiler.hardware_profile import estimate_profile
from chrion.scheduler.limits import Limits
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import Planner
from chrion.zoo import specification
from chrion.zoo.dlrm import build_dlrm
from chrion.zoo.llama import build_llama
from chrion.zoo.moe import build_moe
from chrion.zoo.weights_file import WeightsFile

POLICIES = ("chrion", "layers", "first-fit")
#: Budgets, as shares of the memory of the whole model on the accelerator.
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Case:
    """A model and the request that it is planned for."""

    title: str
    build: Callable[[Any, WeightsFile], onnx.ModelProto]
    name: str
    parameters: dict[str, Any]


CASES = (
    Case("DLRM, all categories of Criteo, batch 256", build_dlrm, "dlrm-kaggle", {"batch": 256}),
    Case("one block of Mixtral 8x7B, 16 steps", build_moe, "mixtral-block", {"seq": 16, "skew": 16.0}),
    Case("Llama 3.2 1B, 64 steps", build_llama, "llama-3.2-1b", {"seq": 64}),
)


class Holes(WeightsFile):
    """A file of weights without content, which takes no space on the disk."""

    def add(
        self, name: str, shape: Sequence[int], element: np.dtype[Any], blocks: Iterable[npt.NDArray[Any]]
    ) -> onnx.TensorProto:
        """Leave a hole for a weight."""
        del blocks
        return super().add(name, shape, element, ())


def load(case: Case, folder: Path) -> Graph:
    """Write a model without values and load it."""
    with (folder / "m.onnx.data").open("wb") as file:
        store = Holes(file, "m.onnx.data")
        model = case.build(specification(case.name, case.parameters), store)
        file.truncate(store.size)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return chrion.load(folder / "m.onnx")


def table(case: Case, graph: Graph, machine: str, cores: int) -> list[str]:
    """Return the rows of one model: the latency of each policy at each budget."""
    profile = estimate_profile(graph, hardware(machine), cores)

    def planner(policy: str) -> Planner:
        return Planner(graph, profile, PlanOptions(policy=policy, cores=cores, streams=1))

    whole = planner("accelerator").plan(Limits()).predicted
    cpu = planner("cpu").plan(Limits()).predicted
    size = sum(graph.dag.weight_bytes) / 1e9
    on_accelerator = f"everything on the accelerator {whole.latency_ms:.1f} ms, {whole.resident_mb / 1e3:.1f} GB"
    rows = [
        f"**{case.title}**: {size:.1f} GB of weights; {on_accelerator}; CPU alone {cpu.latency_ms:.1f} ms.",
        "",
        "| policy | " + " | ".join(f"{share * whole.resident_mb / 1e3:.1f} GB" for share in SHARES) + " |",
        "|---|" + "---:|" * len(SHARES),
    ]
    for policy in POLICIES:
        own = planner(policy)
        plans = [own.plan(Limits(None, share * whole.resident_mb)) for share in SHARES]
        rows.append(f"| `{policy}` | " + " | ".join(_cell(plan) for plan in plans) + " |")
        print(*rows[-1:], flush=True)
    return [*rows, ""]


def _cell(plan: Plan) -> str:
    return f"{plan.predicted.latency_ms:.1f}" if plan.meets_budget else "does not fit"


def main() -> None:
    """Print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="l4+epyc-16", help="the machine (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=4, help="CPU cores to use (default: %(default)s)")
    parser.add_argument("--only", default="", help="only the models whose title matches")
    add_output(parser)
    given = parser.parse_args()
    rows = [f"*Estimated* for `--hardware {given.hardware} --cores {given.cores}`; latencies in ms.", ""]
    for case in CASES:
        if re.search(given.only, case.title):
            with tempfile.TemporaryDirectory() as folder:
                rows += table(case, load(case, Path(folder)), given.hardware, given.cores)
    print("\n".join(rows))
    write_results(given.output, {"memory": "\n".join(rows)})


if __name__ == "__main__":
    main()

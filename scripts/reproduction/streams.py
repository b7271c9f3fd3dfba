"""Stream allocation: Table I of Opara on five models of the zoo, and the counts of Nimble and Opara.

The published times are those of other programs on other machines: compare the ratios of the two algorithms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from chrion import load
from chrion.graph import Dag
from chrion.scheduler.policies.matching import maximum_matching
from chrion.scheduler.policies.nimble import nimble_streams
from chrion.scheduler.policies.opara import opara_streams
from chrion.zoo import build
from reproduction.results import Tables

#: Models of Opara's Table I, with small weights: streams depend on the structure alone. The T5 is not named there.
MODELS: dict[str, dict[str, Any]] = {
    "bert-base": {"hidden": 24, "inner": 24, "vocabulary": 64},
    "googlenet": {},
    "nasnet-a-large": {"channels": 8, "stem": 4},
    "inception-v3": {"width": 0.05},
    "t5-base": {"hidden": 24, "inner": 24, "vocabulary": 64},
}
#: The time of Opara and of Nimble in ms.
TABLE_1 = {
    "bert-base": (0.58, 20.8),
    "googlenet": (0.27, 5.80),
    "nasnet-a-large": (1.75, 257.83),
    "inception-v3": (0.50, 14.40),
    "t5-base": (2.8, 161.4),
}
#: Streams of Opara and of Nimble as Opara's section V prints them.
PUBLISHED_STREAMS = {"googlenet": (28, 4), "t5-base": (6, 3)}
#: Nimble's Table 3.1: the degree of logical concurrency, and billions of multiply-adds.
TABLE_3_1 = {
    "inception-v3": (6, 5.7),
    "darts-imagenet": (7, 0.5),
    "nasnet-a-mobile": (12, 0.6),
    "nasnet-a-large": (15, 23.9),
}
REPEATS = 15


def load_dag(name: str, parameters: dict[str, Any] | None = None) -> Dag:
    """Return the operators of a model as its file has them, since the papers fuse none."""
    return load(build(name, parameters), optimise=False).dag


def count_streams(dag: Dag) -> tuple[int, int, int]:
    """Return the streams of Opara, of Nimble, and of Nimble if chains that cannot overlap share one."""
    found = (opara_streams(dag), nimble_streams(dag), nimble_streams(dag, share=True))
    opara, nimble, shared = (max(streams) + 1 for streams in found)
    return opara, nimble, shared


def stream_counts() -> Tables:
    """Return the numbers of streams without a limit, beside the published ones."""
    rows = [["model", "operators", "Opara", "paper's", "Nimble, chains", "Nimble, shared", "paper's"]]
    for name, parameters in MODELS.items():
        dag = load_dag(name, parameters)
        opara, nimble, shared = map(str, count_streams(dag))
        printed = [str(count) for count in PUBLISHED_STREAMS[name]] if name in PUBLISHED_STREAMS else ["", ""]
        rows.append([name, str(len(dag)), opara, printed[0], nimble, shared, printed[1]])
    return {"streams": rows}


def opara_table() -> Tables:
    """Return Opara's Table I: medians of alternating runs, and ratios of medians."""
    rows = [["model", "Opara, ms", "paper's", "Nimble, ms", "paper's", "Nimble / Opara", "paper's"]]
    for name, parameters in MODELS.items():
        dag = load_dag(name, parameters)
        times: dict[Callable[..., list[int]], list[float]] = {opara_streams: [], nimble_streams: []}
        for _ in range(REPEATS):
            for allocate, own in times.items():
                # A new graph each time: it keeps its transitive reduction, which is part of Nimble's work.
                graph = Dag.from_predecessors([dict.fromkeys(before, 0) for before in dag.predecessors])
                began = time.perf_counter()
                allocate(graph)
                own.append((time.perf_counter() - began) * 1e3)
        ours, theirs = (statistics.median(own) for own in times.values()), TABLE_1[name]
        opara, nimble = ours
        pairs = ((opara, theirs[0]), (nimble, theirs[1]), (nimble / opara, theirs[1] / theirs[0]))
        rows.append([name, *(f"{value:.3g}" for pair in pairs for value in pair)])
    return {"opara": rows}


def degree_of_concurrency(dag: Dag) -> int:
    """Return how many operators may run at a time: all less a maximum matching of the closure (Dilworth's theorem)."""
    after = [[j for j in range(len(dag)) if descendants >> j & 1] for descendants in dag.descendants]
    return sum(following is None for following in maximum_matching(after, len(dag)))


def nimble_table() -> Tables:
    """Return Nimble's Table 3.1, of the networks that the zoo has."""
    rows = [["network", "degree of concurrency", "paper's", "billions of multiply-adds", "paper's"]]
    for name, (degree, billions) in TABLE_3_1.items():
        dag = load_dag(name)
        work = sum(flops for flops, kind in zip(dag.flops, dag.op_types, strict=True) if kind in {"Conv", "Gemm"})
        rows.append([name, str(degree_of_concurrency(dag)), str(degree), f"{work / 2e9:.1f}", str(billions)])
    return {"nimble": rows}

"""Stream allocation: Table I of Opara on five models of the zoo, and the counts of Nimble and Opara.

The published times are those of other programs on other machines: compare the ratios of the two algorithms.
"""

from __future__ import annotations

import statistics
import time
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


def opara_table() -> Tables:
    """Return Opara's Table I and the numbers of streams without a limit, ours/paper's.

    Times are medians of CPU time over alternating runs, and ratios are those of medians.
    """
    head = ["model", "operators", "Opara, ms", "Nimble, ms", "Nimble / Opara", "streams, Opara", "Nimble, chains"]
    rows = [[*head, "Nimble, streams"]]
    for name, parameters in MODELS.items():
        dag = load_dag(name, parameters)
        opara_ms, nimble_ms = allocation_ms(dag)
        theirs = TABLE_1[name]
        pairs = ((opara_ms, theirs[0]), (nimble_ms, theirs[1]), (nimble_ms / opara_ms, theirs[1] / theirs[0]))
        opara, chains, shared = count_streams(dag)
        printed = [f"/{count}" for count in PUBLISHED_STREAMS.get(name, ())] or ["", ""]
        times = (f"{ours:.2g}/{theirs:.3g}" for ours, theirs in pairs)
        rows.append([name, str(len(dag)), *times, f"{opara}{printed[0]}", str(chains), f"{shared}{printed[1]}"])
    return {"opara": rows}


def allocation_ms(dag: Dag) -> tuple[float, float]:
    """Return the median CPU times of Opara's and of Nimble's allocation, which run in turn."""
    opara: list[float] = []
    nimble: list[float] = []
    for _ in range(REPEATS):
        for own, allocate in ((opara, opara_streams), (nimble, nimble_streams)):
            # A new graph each time: it keeps its transitive reduction, which is part of Nimble's work.
            graph = Dag.from_predecessors([dict.fromkeys(before, 0) for before in dag.predecessors])
            began = time.thread_time()
            allocate(graph)
            own.append((time.thread_time() - began) * 1e3)
    return statistics.median(opara), statistics.median(nimble)


def degree_of_concurrency(dag: Dag) -> int:
    """Return how many operators may run at a time: all less a maximum matching of the closure (Dilworth's theorem)."""
    after = [[j for j in range(len(dag)) if descendants >> j & 1] for descendants in dag.descendants]
    return sum(following is None for following in maximum_matching(after, len(dag)))


def nimble_table() -> Tables:
    """Return Nimble's Table 3.1, of the networks that the zoo has, ours/paper's."""
    rows = [["network", "degree of concurrency", "billions of multiply-adds"]]
    for name, (degree, billions) in TABLE_3_1.items():
        dag = load_dag(name)
        work = sum(flops for flops, kind in zip(dag.flops, dag.op_types, strict=True) if kind in {"Conv", "Gemm"})
        rows.append([name, f"{degree_of_concurrency(dag)}/{degree}", f"{work / 2e9:.1f}/{billions}"])
    return {"nimble": rows}

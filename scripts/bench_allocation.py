"""Measure the time that Nimble's and Opara's stream allocation take, and print it with Opara's Table I.

    python scripts/bench_allocation.py

Prints two tables and writes no file; takes about a minute. The graphs have 100 to 10 000 operators. The published
figures are those of other programs on another machine, for graphs whose sizes are not given: compare the ratio of the
two algorithms and its growth, not the times.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from chrion.graph import Dag
from chrion.scheduler.policies.nimble import nimble_streams
from chrion.scheduler.policies.opara import opara_streams

#: Opara's Table I: the time in ms of Opara and of Nimble.
PUBLISHED = {
    "GoogLeNet": (0.27, 5.80),
    "Inception-v3": (0.50, 14.40),
    "BERT": (0.58, 20.8),
    "NASNet": (1.75, 257.83),
    "T5": (2.8, 161.4),
}
SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000)
#: Most branches of a module.
MAX_BRANCHES = 10
REPEATS = 5


def random_network(n: int, seed: int = 0) -> Dag:
    """Return a sequence of modules, as in networks of cells: branches of one to three operators, then a join."""
    rng = random.Random(seed)  # noqa: S311 - input of a benchmark
    edges: list[tuple[int, int]] = []
    count = 1
    while count < n:
        module, ends = count - 1, []
        for _ in range(rng.randint(2, MAX_BRANCHES)):
            at = module
            for _ in range(rng.randint(1, 3)):
                edges.append((at, count))
                at, count = count, count + 1
            ends.append(at)
        edges += [(end, count) for end in ends]
        count += 1
    return Dag.from_edges(n, [(a, b) for a, b in edges if b < n])


def median_ms(n: int, allocate: Callable[[Dag], list[int]]) -> tuple[float, int]:
    """Return the median time over graphs of one size, and the number of streams of the last one."""
    times = []
    streams: list[int] = []
    for seed in range(REPEATS):
        dag = random_network(n, seed)
        before = time.perf_counter()
        streams = allocate(dag)
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times), max(streams) + 1


def main() -> None:
    """Measure, and print both tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    measured = Table(
        *("operators", "Opara, ms", "streams", "Nimble, ms", "chains", "Nimble, shared, ms", "streams", "ratio"),
        title="measured",
    )
    for n in SIZES:
        opara_ms, opara_count = median_ms(n, opara_streams)
        nimble_ms, chains = median_ms(n, nimble_streams)
        shared_ms, shared_count = median_ms(n, lambda dag: nimble_streams(dag, share=True))
        opara_cells = (f"{opara_ms:.2f}", f"{opara_count}")
        nimble_cells = (f"{nimble_ms:.2f}", f"{chains}", f"{shared_ms:.2f}", f"{shared_count}")
        measured.add_row(f"{n}", *opara_cells, *nimble_cells, f"{nimble_ms / opara_ms:.1f}")
    published = Table("model", "Opara, ms", "Nimble, ms", "ratio", title="published (Opara, Table I)")
    for name, (opara_ms, nimble_ms) in PUBLISHED.items():
        published.add_row(name, f"{opara_ms:g}", f"{nimble_ms:g}", f"{nimble_ms / opara_ms:.1f}")
    console = Console(width=120)
    console.print(measured)
    console.print(published)


if __name__ == "__main__":
    main()

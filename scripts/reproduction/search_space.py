"""Sizes of IOS's search: its Table 1."""

from __future__ import annotations

from reproduction.architectures import fire, inception_e, nasnet_first_cell
from reproduction.results import Tables
from reproduction.schedule_counts import count_search_space

#: The largest block of a network, its transitions and its schedules as printed.
TABLE_1 = {
    "inception-v3": (inception_e, "4.9e+03", "3.8e+06"),
    "squeezenet": (fire, "51", "1.3e+02"),
    "nasnet-a": (nasnet_first_cell, "3.1e+05", "7.2e+12"),
}


def ios_table() -> Tables:
    """Return the sizes of the search of the largest blocks, with groups of one root each, ours/paper's."""
    rows = [["largest block of", "transitions", "schedules"]]
    for name, (block, transitions, schedules) in TABLE_1.items():
        _, tried, found = count_search_space(block(), groups="rooted")
        rows.append([name, f"{tried}/{transitions}", f"{found}/{schedules}"])
    return {"ios": rows}

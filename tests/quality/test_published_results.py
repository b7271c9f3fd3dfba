"""Reproduced tables that take seconds: those on the page are what the code gives, and the papers' where they agree."""

from __future__ import annotations

import pytest
from decoding.load import equal_lengths, load_scenario
from reproduction.figure8 import figure8
from reproduction.results import Tables, read_tables
from reproduction.search_space import ios_table
from reproduction.streams import MODELS, count_streams, degree_of_concurrency, load_dag
from reproduction.table6 import PAPER, main_rows, paper_profile, plan_patterns
from reproduction.table7 import expected_violations

from chrion import load, partition
from chrion.serving.simulator.decoder_costs import IterationCosts
from chrion.serving.simulator.iterations import simulate_decoder
from chrion.zoo import build


@pytest.fixture(scope="module")
def stored() -> Tables:
    """Return the tables of the data file."""
    return read_tables()


def test_columns_of_table_6(stored: Tables) -> None:
    """Two of the thirteen models have the stored rows, and second figures are those that the paper prints."""
    names = ("lstm-layers-4", "lstm-seq-32")
    head, *rows = main_rows([plan_patterns(name, paper_profile()) for name in names])
    assert head == stored["table6"][0]
    kept = {row[0]: row for row in stored["table6"]}
    assert len(kept) == 1 + len(PAPER)
    assert [kept[name] for name in names] == rows
    assert kept["lstm-layers-4"][-1].endswith("/—")
    printed = [float(cell.split("/")[1]) for cell in kept["lstm-io-32"][1:]]
    assert printed == [59.2, 1533.0, 61.5, 52.4, 927.0, 55.8, 581.0]


def test_orders_of_figure_8(stored: Tables) -> None:
    """The orders are the stored ones, and those that the paper prints."""
    assert figure8() == {"figure8": stored["figure8"]}
    for _, ours, printed in stored["figure8"][1:]:
        assert ours == printed.replace("(", "").replace(")", "")


def test_closed_form_of_table_7(stored: Tables) -> None:
    """The closed form agrees with the stored means of the simulation, and both with the paper to a point."""
    for pattern, rate in expected_violations().items():
        row = next(row for row in stored["table7"] if row[0] == pattern)
        assert row[-1] == f"{100 * rate:.1f}"
        assert float(row[3].split()[0]) == pytest.approx(100 * rate, abs=0.1)
        assert float(row[4]) == pytest.approx(100 * rate, abs=1.0)


def test_sizes_of_the_search_of_ios(stored: Tables) -> None:
    """The counts are the stored ones, and round to the published ones."""
    assert ios_table() == {"ios": stored["ios"]}
    for _, *cells in stored["ios"][1:]:
        for ours, printed in (cell.split("/") for cell in cells):
            assert float(f"{float(ours):.2g}") == float(printed)


def test_stream_counts_of_opara_and_nimble(stored: Tables) -> None:
    """The five models have the stored numbers of operators and streams; GoogLeNet's are the published 28 and 4."""
    for name, parameters in MODELS.items():
        row = next(row for row in stored["opara"] if row[0] == name)
        dag = load_dag(name, parameters)
        streams = [cell.split("/")[0] for cell in row[-3:]]
        assert (row[1], streams) == (str(len(dag)), [str(count) for count in count_streams(dag)]), name
    assert next(row[-3:] for row in stored["opara"] if row[0] == "googlenet") == ["28/28", "28", "4/4"]


def test_the_option_streams_gives_each_stream_a_lane() -> None:
    """GoogLeNet's 28 streams have 28 lanes if there may be as many, and four by default."""
    graph = load(build("googlenet"), optimise=False)
    lanes = [
        len(set(partition(graph, paper_profile(), policy="opara", streams=n).schedule.lanes)) for n in (None, 28, 40)
    ]
    assert lanes == [4, 28, 28]


def test_degrees_of_concurrency(stored: Tables) -> None:
    """Inception-v3 has the published degree, and the stored one."""
    row = next(row for row in stored["nimble"] if row[0] == "inception-v3")
    assert row[1] == f"{degree_of_concurrency(load_dag('inception-v3', {'width': 0.05}))}/6" == "6/6"


def test_equal_requests_lose_nothing_in_fixed_batches() -> None:
    """With a homogeneous trace both policies are as fast if requests always wait, as all of a batch end together."""
    costs = IterationCosts(5.0, 0.1, 0.0, 0.0)
    scenario = equal_lengths(load_scenario(4, 1e6, 400, 8, (costs, costs)))
    ours, theirs = simulate_decoder(scenario)
    assert set(ours.workload.prompts) == {68}
    assert set(ours.workload.new) == {16}
    assert ours.requests_per_s == pytest.approx(theirs.requests_per_s, rel=0.02)

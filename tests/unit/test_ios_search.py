"""The search of IOS, compared with all sequences of stages and with the published sizes of the search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduction.architectures import fire, inception_e, nasnet_first_cell
from reproduction.schedule_counts import count_search_space

from chrion.errors import OptionError
from chrion.graph import Dag
from chrion.graph.blocks import split_into_blocks
from chrion.profiler import Costs, OperatorMemory, uniform_costs
from chrion.scheduler.policies.endings import GROUPS
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import DeviceLanes, Stage, greedy_stages
from property_tests import examples
from strategies import costs_for, dags

Groups = tuple[tuple[int, ...], ...]


def groups_of(dag: Dag, operators: Sequence[int]) -> Groups:
    """Return the weakly connected components of some operators."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(operators)
    graph.add_edges_from((m, i) for i in operators for m in dag.predecessors[i] if m in operators)
    position = {v: at for at, v in enumerate(dag.topological_order)}
    return tuple(tuple(sorted(part, key=position.__getitem__)) for part in nx.connected_components(graph))


def stages_of(dag: Dag, remaining: frozenset[int], r: int | None, s: int | None, groups: str) -> Iterator[Groups]:
    """Yield every last stage of a set of operators: the subsets that no edge leaves, within the limits."""
    for size in range(1, len(remaining) + 1):
        for chosen in itertools.combinations(sorted(remaining), size):
            if any(after in remaining and after not in chosen for i in chosen for after in dag.successors[i]):
                continue
            parts = groups_of(dag, chosen)
            roots = [sum(not set(dag.predecessors[i]) & set(part) for i in part) for part in parts]
            small = r is None or max(map(len, parts)) <= r
            few = s is None or len(parts) <= s
            if small and few and (groups == "connected" or max(roots) == 1):
                yield parts


def sequences(
    dag: Dag, remaining: frozenset[int], r: int | None, s: int | None, groups: str
) -> Iterator[tuple[Groups, ...]]:
    """Yield every sequence of stages of a set of operators, from the first stage to the last."""
    if not remaining:
        yield ()
    for last in stages_of(dag, remaining, r, s, groups):
        for before in sequences(dag, remaining - set(itertools.chain(*last)), r, s, groups):
            yield (*before, last)


LIMITS = st.sampled_from([(None, None), (1, 1), (1, 3), (2, None), (3, 2), (None, 1)])


@examples(60)
@given(dag=dags(5), limits=LIMITS, groups=st.sampled_from(GROUPS))
def test_the_search_space_is_complete(dag: Dag, limits: tuple[int | None, int | None], groups: str) -> None:
    """States, transitions and schedules equal a count over all subsets of operators."""
    r, s = limits
    everything = frozenset(range(len(dag)))
    seen = {everything}
    waiting = [everything]
    transitions = 0
    for remaining in waiting:
        for last in stages_of(dag, remaining, r, s, groups):
            transitions += 1
            rest = remaining - set(itertools.chain(*last))
            if rest and rest not in seen:
                seen.add(rest)
                waiting.append(rest)
    schedules = sum(1 for _ in sequences(dag, everything, r, s, groups))
    assert count_search_space(dag, r, s, groups) == (len(seen), transitions, schedules)


@examples(60)
@given(data=st.data(), limits=LIMITS, groups=st.sampled_from(GROUPS))
def test_no_sequence_of_stages_is_faster(
    data: st.DataObject, limits: tuple[int | None, int | None], groups: str
) -> None:
    """The total latency of the stages found is the least over all sequences."""
    r, s = limits
    dag = data.draw(dags(5))
    costs = replace(data.draw(costs_for(dag)), streams=2)
    stage_ms = DeviceLanes(dag, costs).stage_ms
    found = search_stages(dag, stage_ms, r=r, s=s, groups=groups)
    assert sorted(i for stage in found for group in stage.groups for i in group) == list(range(len(dag)))
    home = {i: at for at, block in enumerate(split_into_blocks(dag)) for i in block}
    totals: dict[bool, list[float]] = {False: [], True: []}  # key: every stage is within a block
    for stages in sequences(dag, frozenset(range(len(dag))), r, s, groups):
        within = all(len({home[i] for i in itertools.chain(*stage)}) == 1 for stage in stages)
        totals[within].append(sum(stage_ms(stage) for stage in stages))
    total_ms = sum(stage_ms(stage.groups) for stage in found)
    assert total_ms == pytest.approx(min(totals[True]))
    if not costs.dispatch_ms:  # then ending a stage at an articulation point costs nothing
        assert total_ms == pytest.approx(min(totals[True] + totals[False]))


@pytest.mark.parametrize(
    ("dag", "transitions", "schedules"),
    [
        (inception_e(), "4.9e+03", "3.8e+06"),
        (fire(), "51", "1.3e+02"),
        (nasnet_first_cell(), "3.1e+05", "7.2e+12"),
    ],
    ids=["inception-v3", "squeezenet", "nasnet"],
)
def test_published_sizes_of_the_search(dag: Dag, transitions: str, schedules: str) -> None:
    """The sizes equal those of the largest blocks in IOS's Table 1, with groups of one root each."""
    _, tried, sequences_found = count_search_space(dag, groups="rooted")
    assert f"{tried:.2g}" == transitions
    assert f"{sequences_found:.2g}" == schedules


def test_connected_groups_have_a_larger_search_space() -> None:
    """The definition in the text includes groups of several roots, which the published counts do not."""
    rooted, connected = count_search_space(inception_e(), groups="rooted"), count_search_space(inception_e())
    assert connected[0] == rooted[0]
    assert connected[1] > rooted[1]
    assert connected[2] > rooted[2]


def test_an_unknown_definition_is_refused() -> None:
    """The message contains the unknown name and the valid ones."""
    with pytest.raises(OptionError, match="groups: expected one of connected, rooted, found 'some'"):
        count_search_space(fire(), groups="some")


#: IOS's Figure 2: a chain a -> b beside c and d; all meet in a concatenation of no cost.
FIGURE_2 = Dag.from_edges(5, [(0, 1), (1, 4), (2, 4), (3, 4)])


def figure_2(share: float) -> DeviceLanes:
    """Return four operators of 1 ms on an accelerator with three lanes."""
    times = (1.0, 1.0, 1.0, 1.0, 0.0)
    costs = Costs(times, (), (OperatorMemory(),) * 5, accelerator_share=(share,) * 5, handoff_ms=0.1, streams=3)
    return DeviceLanes(FIGURE_2, costs)


def total(device: DeviceLanes, stages: Sequence[Stage]) -> float:
    """Return the total latency of stages."""
    return sum(device.stage_ms(stage.groups) for stage in stages)


def test_greedy_overloads_the_first_stage() -> None:
    """In the example of Figure 2, greedy runs a, c, d together and b alone.

    Two stages of two fill the device and are faster.
    """
    device = figure_2(0.5)
    greedy, found = greedy_stages(FIGURE_2), search_stages(FIGURE_2, device.stage_ms, r=1)
    assert [len(stage.groups) for stage in greedy] == [3, 1, 1]
    assert [len(stage.groups) for stage in found if stage.groups != ((4,),)] == [2, 2]
    assert total(device, greedy) == pytest.approx(1.5 + 2 * 0.1 + 1.0)
    assert total(device, found) == pytest.approx(2.0 + 4 * 0.1)


def test_a_larger_batch_needs_another_schedule() -> None:
    """If every operator fills the device, concurrency is no gain; each schedule is best for its batch size."""
    small, large = figure_2(0.3), figure_2(1.0)
    for_small, for_large = search_stages(FIGURE_2, small.stage_ms), search_stages(FIGURE_2, large.stage_ms)
    assert for_small != for_large
    assert max(len(stage.groups) for stage in for_large) == 1
    assert total(small, for_small) < total(small, for_large)
    assert total(large, for_large) < total(large, for_small)


def test_merging_is_chosen_where_it_is_faster() -> None:
    """A stage that can be merged is merged if that takes less time than running it concurrently."""
    device = figure_2(0.5)

    def merged(ms: float) -> list[Stage]:
        return search_stages(FIGURE_2, device.stage_ms, merged_ms={(2, 3): ms})

    assert [set(*zip(*stage.groups, strict=True)) for stage in merged(0.05) if stage.merged] == [{2, 3}]
    assert not any(stage.merged for stage in merged(5.0))


def test_blocks_end_at_articulation_points() -> None:
    """In a diamond between two chains, every operator that all paths contain ends a block."""
    dag = Dag.from_edges(6, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)])
    assert split_into_blocks(dag) == [[0], [1], [2, 3, 4], [5]]


@given(dag=dags(12))
def test_blocks_are_ordered(dag: Dag) -> None:
    """Together the blocks are the graph, and the last operator of a block precedes all of the next block."""
    found = split_into_blocks(dag)
    assert sorted(i for block in found for i in block) == list(range(len(dag)))
    for before, after in itertools.pairwise(found):
        assert all(dag.descendants[before[-1]] >> i & 1 for i in after)


def test_equal_blocks_are_searched_once() -> None:
    """A stack of equal modules needs the costs of one module only."""
    modules = 5
    edges = [(4 * m + a, 4 * m + b) for m in range(modules) for a, b in [(0, 3), (1, 3), (2, 3)]]
    edges += [(4 * m - 1, 4 * m + a) for m in range(1, modules) for a in range(3)]
    dag = Dag.from_edges(4 * modules, edges)
    dag = replace(dag, signatures=tuple(str(i % 4) for i in range(len(dag))))
    requests = []
    stages = search_stages(dag, lambda groups: requests.append(groups) or 1.0)  # type: ignore[func-returns-value]
    assert sum(len(group) for stage in stages for group in stage.groups) == len(dag)
    assert max(i for groups in requests for group in groups for i in group) < 4


@pytest.mark.parametrize(("rows", "columns"), [(12, 30), (30, 3), (60, 1)])
def test_the_search_of_large_blocks_terminates(rows: int, columns: int) -> None:
    """Grids of recurrent layers and wide ones, too large for a complete search, get valid stages with bounded work."""
    edges = [(at, at + 1) for at in range(rows * columns) if (at + 1) % columns]
    edges += [(at, at + columns) for at in range((rows - 1) * columns)] if columns > 3 else []
    dag = Dag.from_edges(rows * columns, edges)
    requests = 0

    def cost(groups: Sequence[Sequence[int]]) -> float:
        nonlocal requests
        requests += 1
        return float(max(map(len, groups)))

    done: set[int] = set()
    for stage in search_stages(dag, cost, most_endings=4000):
        for group in stage.groups:
            for i in group:
                assert set(dag.predecessors[i]) <= done | set(group)
        done |= {i for group in stage.groups for i in group}
    assert done == set(range(len(dag)))
    assert requests < 10 * 4000 * len(dag) / 10


def test_a_cell_of_eighteen_operators_is_searched_as_one_block() -> None:
    """For a cell of the size of NASNet's, with five sums of two branches, the result is the optimum for four lanes."""
    edges, sums = [], []
    for pair in range(5):
        left, right, both = 3 * pair + 2, 3 * pair + 3, 3 * pair + 4
        edges += [(pair % 2, left), ((pair + 1) % 2, right), (left, both), (right, both)]
        sums.append(both)
    dag = Dag.from_edges(18, [*edges, *((i, 17) for i in sums)])
    device = DeviceLanes(dag, uniform_costs(dag, cpu_ms=[1.0] * 4))
    stages = search_stages(dag, device.stage_ms)
    # Two inputs, then fifteen operators on four lanes, then the concatenation.
    assert total(device, stages) == 1.0 + 4.0 + 1.0

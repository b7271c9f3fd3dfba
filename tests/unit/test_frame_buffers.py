"""Buffers of frames: random runs of programs over them, and the fewest buffers that are possible."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.profiler.costs import BufferSupport
from chrion.runtime.execution.program import Copy, RunSegment, Signal, Transfer, Wait, build_program
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.frame_buffers import FrameBuffers, plan_frame
from strategies import costs_for, dags, schedules

VIEWS, WHOLE = BufferSupport(), BufferSupport(views=False)


def chain(lanes: list[int], sizes: list[int]) -> tuple[Dag, Schedule]:
    """Return a chain of operators from an input to an output, one more value than operators."""
    n = len(lanes)
    dag = Dag.from_edges(n, list(itertools.pairwise(range(n))), sizes[1:-1])
    dag = replace(
        dag,
        value_bytes=tuple(sizes[1:]),
        request_inputs=((sizes[0], (0,)),),
        request_outputs=((n - 1, n - 1),),
    )
    return dag, Schedule(tuple(range(n)), tuple(lanes), max(lanes), 1)


def test_a_chain_in_turns_needs_two_buffers() -> None:
    """If the accelerator and a core take turns, all values on the accelerator fit into two buffers."""
    lanes = [i % 2 for i in range(20)]
    dag, schedule = chain(lanes, [4_000_000 // 256 * 256] * 21)
    for support in (VIEWS, WHOLE):
        buffers = plan_frame(dag, schedule, [(i,) for i in range(20)], support)
        assert buffers.bytes == 8_000_000 // 256 * 256
        # Each operator on the accelerator reads one and writes the other.
        assert buffers.of_input[0] != buffers.of_value[0]
        assert all(buffers.of_value[i] != buffers.of_value[i - 1] for i in range(2, 20, 2))


def test_whole_buffers_have_one_type_and_shape() -> None:
    """Values of other shapes have other buffers; types that the accelerator does not hold have none."""
    dag, schedule = chain([0, 1, 0, 1], [8] * 5)
    kinds = ("float[2]", "float[2x1]", "float[2]", "int64[1]")
    dag = replace(dag, value_kinds=kinds, input_kinds=("int64[1]",))
    segments = [(i,) for i in range(4)]
    found = plan_frame(dag, schedule, segments, WHOLE)
    # The values are the input, results 0 and 1, and result 2.
    assert len({found.of_input[0], found.of_value[0], found.of_value[1]}) == 3
    assert found.of_value[2] == found.of_value[0]
    held = plan_frame(dag, schedule, segments, BufferSupport(frozenset({"float"}), views=False))
    assert not held.of_input
    assert set(held.of_value) == {0, 1, 2}


def test_lanes_that_do_not_wait_for_each_other_share_nothing() -> None:
    """Two streams without a common value overlap in time; one stream runs the same segments one after another."""
    dag = Dag.from_edges(4, [(0, 1), (2, 3)], [8, 8])
    segments = [(0,), (1,), (2,), (3,)]
    assert plan_frame(dag, Schedule((0, 1, 2, 3), (0, 0, 0, 0), 0, 1), segments, VIEWS).bytes == 256
    assert plan_frame(dag, Schedule((0, 1, 2, 3), (0, 0, -1, -1), 0, 2), segments, VIEWS).bytes == 512
    assert plan_frame(dag, Schedule((0, 1, 2, 3), (0, 0, 0, 0), 0, 1), segments, WHOLE).sizes == (8,)
    assert plan_frame(dag, Schedule((0, 1, 2, 3), (0, 0, -1, -1), 0, 2), segments, WHOLE).sizes == (8, 8)


def test_a_value_is_kept_until_it_is_on_the_host() -> None:
    """A buffer whose value is being copied to the host is not reused, unless the writer waits for the copy."""
    dag = Dag.from_edges(4, [(0, 1), (2, 3)], [8, 8])
    # Operators 1 and 3 are on cores, so both results are copied; the second segment does not wait for the first copy.
    segments = [(0,), (1,), (2,), (3,)]
    assert plan_frame(dag, Schedule((0, 1, 2, 3), (0, 1, 0, 2), 2, 1), segments, VIEWS).bytes == 512


def draw_case(data: st.DataObject) -> tuple[Dag, Schedule, tuple[tuple[int, ...], ...], list[Transfer]]:
    """Return a random graph with a schedule, its segments, and all values that it transfers."""
    dag = data.draw(dags(10, requests=True))
    sizes = tuple(300 * size for size in dag.value_bytes)  # some are longer than the alignment
    dag = replace(
        dag,
        value_bytes=sizes,
        unread_results=tuple(
            (i, i) for i in data.draw(st.sets(st.sampled_from([i for i in range(len(dag)) if not dag.successors[i]])))
        ),
    )
    costs = data.draw(costs_for(dag, accelerator=True, wide=data.draw(st.booleans())))
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    whole = data.draw(st.booleans())
    cuts = cut(dag, schedule.order, schedule.lanes, stages=schedule.stages, widths=schedule.widths)
    segments = cuts if whole else tuple((i,) for i in schedule.order)
    on_device = [lane <= 0 for lane in schedule.lanes]
    transfers = []
    for at, (size, readers) in enumerate(dag.request_inputs):
        remote = tuple(i for i in readers if on_device[i])
        if size and remote:
            transfers.append(Transfer(f"in{at}", None, remote, upload=True))
    for i, row in enumerate(dag.output_values):
        for value, readers in row:
            remote = tuple(j for j in readers if on_device[i] != on_device[j])
            if dag.value_bytes[value] and (remote or (on_device[i] and (i, value) in dag.request_outputs)):
                transfers.append(Transfer(str(value), i, remote, upload=not on_device[i]))
    return dag, schedule, segments, transfers


class Simulation:
    """The contents of buffers during a run; the value of operator m is m, those of inputs are in0, in1, ..."""

    def __init__(self, dag: Dag, buffers: FrameBuffers) -> None:
        self.spans = {str(v): (b, o, o + dag.value_bytes[v]) for v, (b, o) in buffers.of_value.items()}
        self.spans |= {f"in{at}": (b, o, o + dag.request_inputs[at][0]) for at, (b, o) in buffers.of_input.items()}
        assert all(end <= buffers.sizes[buffer] for buffer, _, end in self.spans.values())
        self.valid: set[str] = set()
        self.in_use: list[str] = []

    def overlap(self, name: str) -> set[str]:
        """Return the values that have a byte in common with another one."""
        buffer, start, end = self.spans[name]
        return {n for n, (b, s, e) in self.spans.items() if n != name and b == buffer and s < end and start < e}

    def begin(self, reads: set[str], writes: set[str]) -> None:
        self.in_use += [*reads, *writes]
        for name in writes:
            overwritten = self.overlap(name)
            assert overwritten.isdisjoint(self.in_use), f"{name} overwrites a value that is in use"
            self.valid -= overwritten
            self.valid.add(name)
        assert reads <= self.valid, "a value was overwritten before it was read"

    def end(self, reads: set[str], writes: set[str]) -> None:
        for name in reads | writes:
            assert name in self.valid
            self.in_use.remove(name)


@given(st.data())
def test_no_run_overwrites_a_value_that_is_read_later(data: st.DataObject) -> None:
    """In any legal run of the program, in which steps overlap, every step finds its values in their buffers."""
    dag, schedule, segments, transfers = draw_case(data)
    program = build_program(dag, schedule, segments, transfers)
    simulation = Simulation(dag, plan_frame(dag, schedule, segments, data.draw(st.sampled_from([VIEWS, WHOLE]))))
    on_device = [lane <= 0 for lane in schedule.lanes]

    def accesses(step: RunSegment | Copy) -> tuple[set[str], set[str]]:
        """Return the values in buffers that a step reads and writes."""
        if isinstance(step, Copy):
            return (set(), {step.value}) if step.upload else ({step.value}, set())
        segment = segments[step.segment]
        if not on_device[segment[0]]:
            return set(), set()
        inside = set(segment)
        reads = {str(m) for i in segment for m in dag.predecessors[i] if m not in inside and dag.value_bytes[m]}
        reads |= {f"in{at}" for at, (size, by) in enumerate(dag.request_inputs) if size and inside.intersection(by)}
        kept = {
            i
            for i in segment
            if dag.value_bytes[i]
            and (set(dag.successors[i]) - inside or (i, i) in (*dag.request_outputs, *dag.unread_results))
        }
        return reads, {str(i) for i in kept}

    at = dict.fromkeys(program.lanes, 0)
    signalled = dict.fromkeys(program.lanes, 0)
    running: dict[int, RunSegment | Copy] = {}
    while any(at[lane] < len(program.lanes[lane]) for lane in at):
        ready = []
        for lane, steps in program.lanes.items():
            step = steps[at[lane]] if at[lane] < len(steps) else None
            if step is not None and (not isinstance(step, Wait) or signalled[step.lane] >= step.count):
                ready.append(lane)
        lane = data.draw(st.sampled_from(ready))
        step = program.lanes[lane][at[lane]]
        if isinstance(step, RunSegment | Copy):
            if lane not in running:
                running[lane] = step
                simulation.begin(*accesses(step))
                continue
            simulation.end(*accesses(running.pop(lane)))
        elif isinstance(step, Signal):
            signalled[lane] = step.count
        at[lane] += 1

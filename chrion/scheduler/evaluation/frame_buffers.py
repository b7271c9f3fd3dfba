"""The buffers of a frame in the accelerator's memory, shared by lifetime.

A frame keeps every value that a segment on the accelerator receives from or passes to another segment, the host or the
caller. Two values share memory if every access to the first one ends before the second one is written, in any run of
the plan. So far as lanes wait for each other, that order is fixed; steps of lanes that do not wait may overlap, and so
do the lifetimes of their values.

What ends before what is found with vector clocks (Mattern, "Virtual time and global states of distributed systems",
1989): a step knows how many steps of each accelerator lane and each copy lane have ended before it starts. It is the
order of the waits in :mod:`chrion.runtime.execution.program`, without those that only wide segments add.

If parts of a buffer can be bound, a frame has one buffer, and each value an offset in it. Some providers give handles
in place of addresses (onnxruntime's WebGPU). Their frames have whole tensors as buffers, each for values of one type
and shape. Pisarchyk and Lee ("Efficient memory management for deep neural net inference", 2020) call these approaches
offset calculation and shared objects; :mod:`chrion.scheduler.evaluation.packing` has both.

The runtime allocates exactly these buffers, and the evaluator counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import BufferSupport
from chrion.scheduler.evaluation.packing import BufferPlace, Clock, DeviceValue, pack, share_buffers
from chrion.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class FrameBuffers:
    """The device buffers of one frame."""

    #: Size of each buffer in bytes.
    sizes: tuple[int, ...] = ()
    #: The place of each value that the frame keeps, by its index into ``Dag.value_bytes``.
    of_value: Mapping[int, BufferPlace] = field(default_factory=dict)
    #: The place of each input of the request, by its index into ``Dag.request_inputs``.
    of_input: Mapping[int, BufferPlace] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(self.sizes)


#: The buffers of a plan without accelerator.
NO_BUFFERS = FrameBuffers()


def plan_frame(dag: Dag, schedule: Schedule, segments: Iterable[Sequence[int]], support: BufferSupport) -> FrameBuffers:
    """Return the device buffers that a frame of a plan keeps.

    Args:
        dag: The graph.
        schedule: The plan's schedule.
        segments: Its segments, in topological order.
        support: What buffers on the accelerator can hold and do.
    """
    if not any(map(is_accelerator_lane, schedule.lanes)):
        return NO_BUFFERS
    lifetimes = Lifetimes(dag, schedule, support.held_types)
    for segment in segments:
        lifetimes.add(segment)
    values = [*lifetimes.inputs.values(), *lifetimes.values.values()]
    sizes, places = pack(values) if support.views else share_buffers(values)
    count = len(lifetimes.inputs)
    return FrameBuffers(
        sizes,
        dict(zip(lifetimes.values, places[count:], strict=True)),
        dict(zip(lifetimes.inputs, places[:count], strict=True)),
    )


class Lifetimes:
    """The values of a frame in the accelerator's memory, with their accesses, found segment by segment.

    Args:
        dag: The graph.
        schedule: The plan's schedule.
        held_types: Types of elements that the accelerator holds; None if it holds all.

    Attributes:
        inputs: Inputs of the request, by their index into ``Dag.request_inputs``, in the order of their copies.
        values: Values of the graph, by their index into ``Dag.value_bytes``, in an order in which they may be written.
    """

    def __init__(self, dag: Dag, schedule: Schedule, held_types: Collection[str] | None) -> None:
        self._dag, self._schedule, self._held_types = dag, schedule, held_types
        self._outputs = set(dag.request_outputs)
        self._upload, self._download = schedule.streams, schedule.streams + 1
        #: What each lane knows after its last step, by lane; copy lanes by position.
        self._lanes: dict[int, Clock] = {}
        self._copies = {at: self._new_clock() for at in (self._upload, self._download)}
        #: What is known once an operator's segment has ended, by operator.
        self._ended: dict[int, Clock] = {}
        #: What is known once a value, or an input, has been copied to the other memory.
        self._copied: dict[int, Clock] = {}
        self._inputs_copied: dict[int, Clock] = {}
        #: What is known of all segments so far, and of those of earlier stages.
        self._all, self._barrier = self._new_clock(), self._new_clock()
        self._stage = 0
        self.inputs: dict[int, DeviceValue] = {}
        self.values: dict[int, DeviceValue] = {}
        #: The inputs that each operator on the accelerator reads.
        self._inputs_of: dict[int, list[int]] = {}
        for at, (size, readers) in enumerate(dag.request_inputs):
            on_device = [i for i in readers if is_accelerator_lane(schedule.lanes[i])]
            kind = dag.input_kind(at)
            if on_device and size and self._is_held(kind):
                known, self._inputs_copied[at] = self._copy(self._upload, self._new_clock())
                self.inputs[at] = DeviceValue(kind, size, known, self._upload)
                for i in on_device:
                    self._inputs_of.setdefault(i, []).append(at)

    def add(self, segment: Sequence[int]) -> None:
        """Add the next segment, and the copies of its values."""
        dag, schedule = self._dag, self._schedule
        lane = schedule.lanes[segment[0]]
        on_device = is_accelerator_lane(lane)
        if schedule.stages and schedule.stages[segment[0]] != self._stage:
            self._stage, self._barrier = schedule.stages[segment[0]], list(self._all)
        known = list(self._lanes.get(lane, self._barrier))
        _merge(known, self._barrier)
        inside = set(segment)
        read = self._read(segment, inside, known, on_device=on_device)
        ended = list(known)
        if on_device:
            ended[-lane] += 1
            for used in read:
                used.ends[-lane] = ended[-lane]
        self._lanes[lane] = ended
        _merge(self._all, ended)
        for i in segment:
            self._ended[i] = ended
        for i in segment:
            for value, readers in dag.output_values[i]:
                if dag.value_bytes[value] and self._is_held(dag.value_kind(value)):
                    if on_device and (not readers or (i, value) in self._outputs or not inside.issuperset(readers)):
                        self._hold(value, known, -lane)
                    self._add_copy(i, value, readers, ended, on_device=on_device)

    def _read(self, segment: Sequence[int], inside: set[int], known: Clock, *, on_device: bool) -> list[DeviceValue]:
        """Add to ``known`` what the producers of a segment's inputs know; return the inputs on the accelerator."""
        lanes, received = self._schedule.lanes, self._dag.received
        read = []
        for i in segment:
            if on_device:
                for at in self._inputs_of.get(i, ()):
                    _merge(known, self._inputs_copied[at])
                    read.append(self.inputs[at])
            for m, values in received[i]:
                if m in inside:
                    continue
                ended, local = self._ended[m], is_accelerator_lane(lanes[m]) == on_device
                if local:
                    _merge(known, ended)
                for value in values:
                    if not local:
                        _merge(known, self._copied.get(value, ended))
                    if on_device and value in self.values:
                        read.append(self.values[value])
        return read

    def _add_copy(self, i: int, value: int, readers: Sequence[int], ended: Clock, *, on_device: bool) -> None:
        """Copy a value of operator ``i`` if it is read in the other memory, or is an output made on the device."""
        lanes = self._schedule.lanes
        returned = on_device and (i, value) in self._outputs
        if not returned and all(is_accelerator_lane(lanes[reader]) == on_device for reader in readers):
            return
        at = self._download if on_device else self._upload
        known, self._copied[value] = self._copy(at, ended)
        if on_device:
            self.values[value].ends[at] = known[at] + 1
        else:
            self._hold(value, known, at)

    def _hold(self, value: int, known: Clock, writer: int) -> None:
        self.values[value] = DeviceValue(self._dag.value_kind(value), self._dag.value_bytes[value], known, writer)

    def _copy(self, at: int, needed: Clock) -> tuple[Clock, Clock]:
        """Add a copy; return what is known before it starts and after it has ended."""
        known = list(self._copies[at])
        _merge(known, needed)
        ended = list(known)
        ended[at] += 1
        self._copies[at] = ended
        return known, ended

    def _is_held(self, kind: str) -> bool:
        return self._held_types is None or kind.partition("[")[0] in self._held_types

    def _new_clock(self) -> Clock:
        return [0] * (self._schedule.streams + 2)


def _merge(clock: Clock, other: Clock) -> None:
    for at, count in enumerate(other):
        if count > clock[at]:  # noqa: PLR1730 - most time is spent here, and a call of max takes twice as long
            clock[at] = count

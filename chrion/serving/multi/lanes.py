"""The lanes of a session: one for each core, lanes of accelerators, or lanes of priority classes.

Models on an accelerator run whole, on lanes of that accelerator. In the background mode, the cheap alternative to
blocks, models run whole and side by side on threads of different niceness: those of a higher one get less of the cores'
time as long as others want it. Each class has a lane for each core. Models are ordered by their priorities, or by their
deadlines if these are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from chrion.errors import OptionError
from chrion.machine.cores import MAX_NICENESS
from chrion.serving.multi.dispatcher import ModelRules

#: The steps of niceness between two classes, which give the first one three times as much of a core that both want; the
#: last class has the highest niceness.
_STEPS = 5
#: Lanes of an accelerator: while one task computes there, the copies and launches of another go on (a choice, not
#: measured).
_ACCELERATOR_LANES = 2


class LaneLayout(NamedTuple):
    """Lanes, and the models that they run."""

    #: The number of lanes; the first ones are those of the CPU.
    lanes: int
    #: How many these are.
    cpu_lanes: int
    #: How many of them are pinned to a core each.
    pinned: int
    #: The lanes of each model; models that are not named have the other lanes.
    own_lanes: Mapping[str, range]
    #: The niceness of lanes; 0 for others.
    niceness: Mapping[int, int]


def lay_out_lanes(
    rules: Mapping[str, ModelRules], cores: int, accelerators: Mapping[str, str], *, background: bool
) -> LaneLayout:
    """Return the lanes of a session.

    Args:
        rules: The models.
        cores: The number of cores.
        accelerators: The execution provider of each model that runs on an accelerator.
        background: Whether the models on the CPU run side by side in priority classes.

    Raises:
        OptionError: All models of the background mode are of one class.
    """
    on_cpu = {name: own for name, own in rules.items() if name not in accelerators}
    own_lanes, niceness = _classes(on_cpu, cores) if background else ({}, {})
    count = len(niceness) if background else cores if on_cpu else 0
    cpu_lanes, pinned = count, 0 if background else count
    for provider in dict.fromkeys(accelerators.values()):
        lanes = range(count, count := count + _ACCELERATOR_LANES)
        own_lanes |= {name: lanes for name, other in accelerators.items() if other == provider}
    return LaneLayout(count, cpu_lanes, pinned, own_lanes, niceness)


def _classes(rules: Mapping[str, ModelRules], cores: int) -> tuple[dict[str, range], dict[int, int]]:
    """Return the lanes of models, and the niceness of lanes, by priority classes."""
    keys: dict[str, float] = {name: own.priority for name, own in rules.items()}
    if len({*keys.values()}) == 1:
        keys = {n: math.inf if own.deadline_ms is None else own.deadline_ms for n, own in rules.items()}
    order = sorted({*keys.values()})
    if len(order) <= 1:
        hint = "priorities={'heavy': 1} puts the model 'heavy' behind the others"
        raise OptionError("background: expected models of different priorities or deadlines, found none", hint=hint)
    own_lanes = {name: range((at := order.index(key)) * cores, (at + 1) * cores) for name, key in keys.items()}
    levels = [min(_STEPS * at, MAX_NICENESS - 1) for at in range(len(order) - 1)] + [MAX_NICENESS]
    return own_lanes, {lane: levels[lane // cores] for lane in range(len(order) * cores)}

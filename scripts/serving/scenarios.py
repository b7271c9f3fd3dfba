"""The scenarios of ``bench_serving.py``: what the sessions of a candidate are, what surrounds them, and the load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench_cpu import Case

from serving.fleet import Setting
from serving.models import BRIEF, FREE, MODELS


@dataclass(frozen=True, slots=True)
class Requests:
    """A load.

    Attributes:
        label: Its name in tables.
        clients: Number of threads that send requests to the sessions of a process.
        pause_s: Pause of a client between two requests.
    """

    label: str
    clients: int = 1
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario.

    Attributes:
        title: Heading of its table.
        text: What is measured, in one sentence.
        setting: The processes.
        loads: The loads.
        models: Models that are measured.
        neighbour: Whether a busy process is pinned to the first core.
        warm_up_s: Least time before a trial in which requests do not count; a session may need it to notice its
            neighbour.
        trial_s: Least length of a trial.
    """

    title: str
    text: str
    loads: Sequence[Requests] = (Requests("1 client"),)
    setting: Setting = field(default_factory=Setting)
    models: Sequence[Case] = field(default_factory=lambda: [case for case in MODELS if case.name in BRIEF])
    neighbour: bool = False
    warm_up_s: float = 0.25
    trial_s: float = 0.5


def scenarios(clients: Sequence[int]) -> dict[str, Scenario]:
    """Return all scenarios by name.

    Args:
        clients: Numbers of client threads of the scenario ``concurrency``.
    """
    loads = [Requests(f"{count} client{'s' * (count > 1)}", count) for count in clients]
    last_cpu = max(os.sched_getaffinity(0))
    return {
        "concurrency": Scenario(
            "Client threads", "Threads call one session without pauses.", loads=loads, models=MODELS
        ),
        "pauses": Scenario(
            "Pauses between requests",
            "One client pauses for 5 ms after each request.",
            loads=[Requests("5 ms between requests", 1, 0.005)],
            models=MODELS,
        ),
        "neighbour": Scenario(
            "A busy neighbour",
            "Another process computes on the first core all the time. Requests of the first 1.2 s are not counted.",
            neighbour=True,
            warm_up_s=1.2,
            trial_s=1.5,
        ),
        "sessions": Scenario(
            "Two sessions in one process",
            "Each session has a client of its own.",
            loads=[Requests("2 sessions", 2)],
            setting=Setting(sessions=2),
        ),
        "processes": Scenario(
            "Four processes of two sessions",
            "Each session has a client of its own; all processes use the same kind of session at a time.",
            loads=[Requests("4 x 2 sessions", 2)],
            setting=Setting(processes=4, sessions=2),
        ),
        "taskset": Scenario(
            "One CPU by affinity",
            "The process may use one CPU only, as under `taskset`.",
            setting=Setting(cpus=(last_cpu,)),
        ),
        "quota": Scenario(
            "A quota of one CPU",
            "The process is in a control group with a quota of one CPU, as in a container.",
            setting=Setting(quota=1.0),
        ),
        "shapes": Scenario(
            "64 shapes in rotation",
            "Each request has the next of 64 shapes. HybridSession was tuned for 45 s before.",
            loads=[Requests("64 shapes")],
            models=FREE,
        ),
    }

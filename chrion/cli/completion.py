"""Completion of names on the command line."""

from __future__ import annotations

from collections.abc import Iterator

from chrion.devices.providers import PROVIDER_NAMES
from chrion.hardware import known_parts
from chrion.scheduler import describe_policies, policy_names
from chrion.serving.simulator.scenario import scenario_descriptions
from chrion.zoo import names


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    """Return the policies that begin with a text, with their descriptions."""
    return [(name, text) for name, text in describe_policies().items() if name.startswith(incomplete)]


def complete_policies(incomplete: str) -> list[str]:
    """Return comma-separated lists whose last policy begins with the last part of a text."""
    *before, last = incomplete.split(",")
    prefix = "".join(f"{name}," for name in before)
    return [prefix + name for name in policy_names() if name.startswith(last) and name not in before]


def complete_accelerator(incomplete: str) -> list[str]:
    """Return the short names of execution providers, and ``none``, that begin with a text."""
    return [name for name in (*PROVIDER_NAMES, "none") if name.startswith(incomplete)]


def complete_hardware(incomplete: str) -> list[str]:
    """Return machines whose last part begins with the last part of a text."""
    *before, last = incomplete.split("+")
    prefix = "".join(f"{name}+" for name in before)
    return [prefix + name for name in known_parts() if name.startswith(last) and name not in before]


def complete_model(incomplete: str) -> list[str]:
    """Return the builders and specifications that begin with a text."""
    return [name for name in names() if name.startswith(incomplete)]


def complete_scenario(incomplete: str) -> Iterator[tuple[str, str]]:
    """Return the bundled scenarios that begin with a text, with their descriptions."""
    return ((s.name, s.description) for s in scenario_descriptions() if s.name.startswith(incomplete))

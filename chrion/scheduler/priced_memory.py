"""The accelerator memory that alpha prices: the one rule for its default, and the names of both definitions."""

from __future__ import annotations

from typing import Literal, get_args

from chrion.common.wrong_values import wrong_value
from chrion.profiler.profiles import Profile

#: The definitions of accelerator memory; see :mod:`chrion.scheduler.evaluation.memory`.
Memory = Literal["resident", "paper"]
MEMORIES: tuple[Memory, ...] = get_args(Memory)
#: What tables and messages call them.
MEMORY_NAMES: dict[Memory, str] = {"resident": "resident memory", "paper": "memory (Eq. 4)"}


def priced_memory(profile: Profile, memory: str | None = None) -> Memory:
    """Return the memory that alpha prices.

    Args:
        profile: The costs. If its accelerator memory was measured, ``resident`` is the default: it predicts what the
            accelerator holds. Otherwise ``paper`` is: the published experiments are defined by Equation 4.
        memory: The choice of the user; None for the default.

    Raises:
        OptionError: There is no such definition.
    """
    return check_memory(memory) or ("resident" if profile.memory_measured else "paper")


def check_memory(name: str | None) -> Memory | None:
    """Return the definition of accelerator memory of a name; None for the default, see :func:`priced_memory`.

    Raises:
        OptionError: There is no such definition.
    """
    if name is None:
        return None
    for memory in MEMORIES:
        if name == memory:
            return memory
    raise wrong_value("memory", f"one of {', '.join(MEMORIES)}", name)

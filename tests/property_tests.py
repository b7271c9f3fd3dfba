"""The number of examples of property tests.

A plain ``pytest`` draws a fifth of a test's examples, ``pytest --hypothesis-profile=full`` all of them. With the
environment variable ``CI`` they are the same ones each time, so that only a change can make a test fail.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

_SHARE = 0.2
_LEAST = 5

settings.register_profile("full", deadline=None, derandomize="CI" in os.environ)
settings.register_profile("small", settings.get_profile("full"), max_examples=20)
settings.load_profile("small")  # the option is read later


def in_full_profile() -> bool:
    """Return whether the tests run with all examples."""
    return settings.get_current_profile_name() == "full"


def repetitions(count: int) -> int:
    """Return a number of repetitions in the full profile, a fifth of it in the small one."""
    return count if in_full_profile() else max(_LEAST, round(_SHARE * count))


def examples(count: int = 100, **rest: Any) -> settings:
    """Return settings for a number of examples in the full profile; ``rest`` is passed to Hypothesis."""
    return settings(max_examples=repetitions(count), **rest)

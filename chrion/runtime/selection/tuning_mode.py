"""Tuning modes of sessions."""

from __future__ import annotations

import os

from chrion.common.wrong_values import wrong_value

#: ``background`` is the default; see :mod:`chrion.runtime.engines`.
TUNING_MODES = ("background", "now", "never")
#: Environment variable that has the tuning mode of sessions created without the argument ``tune``.
TUNE_VARIABLE = "CHRION_TUNE"


def tuning_mode(tune: str | None) -> str:
    """Return the tuning mode: the argument, or else the environment variable, or else ``background``.

    Raises:
        OptionError: The mode is none of ``TUNING_MODES``.
    """
    chosen = tune if tune is not None else os.environ.get(TUNE_VARIABLE) or TUNING_MODES[0]
    if chosen not in TUNING_MODES:
        where = "tune" if tune is not None else f"environment variable {TUNE_VARIABLE}"
        raise wrong_value(where, f"one of {', '.join(TUNING_MODES)}", chosen)
    return chosen

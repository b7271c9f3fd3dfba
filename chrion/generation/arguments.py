"""Checks of the arguments of generators and requests."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from chrion.common.units import format_count
from chrion.common.wrong_values import wrong_value
from chrion.errors import ContextLengthError


def whole_number(name: str, value: SupportsIndex) -> int:
    """Return an argument, of Python's or another integer type, as Python's integer.

    Raises:
        OptionError: It is not a whole number.
    """
    try:
        if not isinstance(value, bool):
            return int(operator.index(value))
    except TypeError:
        pass
    raise wrong_value(name, "a whole number", value)


def at_least(name: str, value: SupportsIndex, least: int) -> int:
    """Return an argument as an integer that is not below a limit.

    Raises:
        OptionError: It is not a whole number, or less.
    """
    number = whole_number(name, value)
    if number < least:
        raise wrong_value(name, f"{least} or more", number)
    return number


def length_error(limits: str, limit: int, prompt: int, new: int, *, memory: bool = False) -> ContextLengthError:
    """Return the error of a request that does not fit.

    Args:
        limits: What the limit is, in words, with what the request needs of it.
        limit: The most tokens of a request; the last one that is generated does not count.
        prompt: The tokens of the prompt.
        new: The most new tokens.
        memory: As in the error.
    """
    most = limit - prompt + 1
    shorter = f"shorten the prompt of {format_count(prompt, 'token')}, or " if prompt > 1 else ""
    hint = f"{shorter}generate at most {most}"
    if most < 1:
        hint = f"the prompt alone has {format_count(prompt, 'token')}, shorten it"
    return ContextLengthError(limits, hint=hint, limit=limit, prompt_tokens=prompt, new_tokens=new, memory=memory)

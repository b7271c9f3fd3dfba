"""The one form of messages about values that are not allowed."""

from __future__ import annotations

from chrion.errors import InputError, OptionError

#: Characters of a value that a message shows.
_SHOWN = 100


def wrong_value(
    name: str, expected: str, found: object, *, hint: str = "", failure: type[InputError] = OptionError
) -> InputError:
    """Return the error for a value that is not allowed, in the one form of such messages.

    Args:
        name: The option, argument or key.
        expected: The values that it may have.
        found: The value; long ones are shortened.
        hint: An example, or what to do.
        failure: The type of the error.
    """
    shown = repr(found)
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
    return failure(f"{name}: expected {expected}, found {shown}", hint=hint)

"""Exceptions that Chrion raises on purpose.

::

    ChrionError
     +- InputError
     |   +- ModelError
     |   |   +- ShapeError
     |   |   +- UnsafeModelError
     |   +- ProfileError
     |   +- HardwareError
     |   +- PlanError
     |   +- ScheduleError
     |   +- OptionError
     |   |   +- ContextLengthError
     |   +- ScenarioError
     |   +- TraceError
     |   +- DataError
     +- ProviderError
     +- ServerError
     +- GenerationError
     +- DroppedError
     +- SpaceError

Wrong input is also a ``ValueError``, an execution provider or a server that does not work is also a ``RuntimeError``,
and a full disk is also an ``OSError``.

A message says where the error is, what is wrong, and what was expected; the hint, if there is one, says what to do.
"""

from __future__ import annotations

import errno


class ChrionError(Exception):
    """The base class of all exceptions of Chrion.

    Attributes:
        message: What is wrong, where, and what was expected.
        hint: What to do about it; may be empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InputError(ChrionError, ValueError):
    """A file, a value or an argument given to Chrion is wrong."""


class ModelError(InputError):
    """A model cannot be read, or it has operators or values that Chrion cannot plan."""


class ShapeError(ModelError):
    """The shape of an input is missing or does not fit the model."""


class UnsafeModelError(ModelError):
    """A model refers to files outside its own folder, or would end the process that opens it."""


class ProfileError(InputError):
    """A profile is damaged, or it lacks measurements that are needed."""


class HardwareError(InputError):
    """A description of hardware is damaged, or a named part does not exist."""


class PlanError(InputError):
    """A plan is damaged, or it was created for another model or machine."""


class ScheduleError(InputError):
    """An order or a placement violates a constraint of the graph."""


class OptionError(InputError):
    """The value of an option is not allowed."""


class ContextLengthError(OptionError):
    """A request for text needs more tokens than the model or the memory for it has.

    Attributes:
        limit: The most tokens of a request.
        prompt_tokens: The tokens of the prompt.
        new_tokens: The most new tokens that the request asks for.
        memory: True if the memory for keys and values limits the request, false if the model does.
    """

    def __init__(  # noqa: PLR0913 - the attributes
        self,
        message: str,
        *,
        hint: str = "",
        limit: int = 0,
        prompt_tokens: int = 0,
        new_tokens: int = 0,
        memory: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.limit, self.prompt_tokens, self.new_tokens, self.memory = limit, prompt_tokens, new_tokens, memory


class ScenarioError(InputError):
    """A simulation scenario is damaged, or its values contradict each other."""


class TraceError(InputError):
    """A request trace has a malformed row."""


class DataError(InputError):
    """A table of data cannot be read, or it does not fit the model."""


class ProviderError(ChrionError, RuntimeError):
    """An execution provider does not exist or does not work on this machine."""


class ServerError(ChrionError, RuntimeError):
    """A server no longer answers."""


class GenerationError(ChrionError, RuntimeError):
    """An iteration of a request failed."""


class DroppedError(ChrionError, RuntimeError):
    """A task was dropped before its end.

    Attributes:
        outcome: ``full`` if its queue was full, ``late`` if it could not meet its deadline, ``removed`` with its model.
    """

    def __init__(self, message: str, *, hint: str = "", outcome: str = "") -> None:
        super().__init__(message, hint=hint)
        self.outcome = outcome


class SpaceError(ChrionError, OSError):
    """The folder of temporary files has no space for a model's weights."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.ENOSPC

"""Every exception that Chrion raises on purpose.

::

    ChrionError
     +- InputError            something given to Chrion is wrong; the command line exits with 2
     |   +- ModelError        a model cannot be read, or holds what cannot be planned
     |   |   +- ShapeError    an input's shape is missing, or does not fit the model
     |   |   +- UnsafeModelError  a model names files that are none of its business
     |   +- ProfileError      a profile file is damaged, or lacks what is asked of it
     |   +- PlanError         a plan file is damaged, or belongs to another model or machine
     |   +- ScheduleError     an order or a placement breaks a rule of the graph
     |   +- OptionError       an option's value is not one of those it takes
     |   +- ScenarioError     a simulation scenario is damaged, or asks for what cannot be
     |   +- TraceError        a request trace has a malformed row
     +- ProviderError         an execution provider cannot be used on this machine

An error says what is wrong, where, what was expected instead, and where one is known, a way out.
"""

from __future__ import annotations


class ChrionError(Exception):
    """Base of all: ``message`` says what, where and what was expected; ``hint`` is a way out, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InputError(ChrionError, ValueError):
    """Something given to Chrion is wrong."""


class ModelError(InputError):
    """A model cannot be read, or holds what cannot be planned."""


class ShapeError(ModelError):
    """An input's shape is missing, or does not fit the model."""


class UnsafeModelError(ModelError):
    """A model names files outside of its own folder."""


class ProfileError(InputError):
    """A profile file is damaged, or lacks what is asked of it."""


class PlanError(InputError):
    """A plan file is damaged, or belongs to another model or machine."""


class ScheduleError(InputError):
    """An order or a placement breaks a rule of the graph."""


class OptionError(InputError):
    """An option's value is not one of those it takes."""


class ScenarioError(InputError):
    """A simulation scenario is damaged, or asks for what cannot be."""


class TraceError(InputError):
    """A request trace has a malformed row."""


class ProviderError(ChrionError, RuntimeError):
    """An execution provider cannot be used on this machine."""

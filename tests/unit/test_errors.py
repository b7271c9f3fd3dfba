"""The tree of exceptions."""

from __future__ import annotations

import pytest

from chrion import errors


def test_a_hint_follows_the_message() -> None:
    """Message and hint are fields of their own and one text together."""
    error = errors.PlanError("it is damaged", hint="make another")
    assert (error.message, error.hint, str(error)) == ("it is damaged", "make another", "it is damaged (make another)")
    assert str(errors.PlanError("it is damaged")) == "it is damaged"


@pytest.mark.parametrize(
    "name", ["ModelError", "ShapeError", "ProfileError", "PlanError", "ScheduleError", "OptionError"]
)
def test_bad_input_is_one_family(name: str) -> None:
    """All of them are InputErrors, and ValueErrors for those who do not know Chrion's."""
    kind = getattr(errors, name)
    assert issubclass(kind, errors.InputError)
    assert issubclass(kind, errors.ChrionError)
    assert issubclass(kind, ValueError)


def test_a_provider_that_does_not_work_is_no_bad_input() -> None:
    """It is the machine's doing."""
    assert issubclass(errors.ProviderError, errors.ChrionError)
    assert not issubclass(errors.ProviderError, errors.InputError)

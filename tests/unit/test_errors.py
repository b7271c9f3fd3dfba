"""The exceptions of Chrion and their tree."""

from __future__ import annotations

import re

from chrion import errors
from chrion.cli.exit_codes import exit_code
from chrion.errors import ChrionError

RUNTIME = ("ProviderError", "ServerError", "GenerationError", "DroppedError")
CLASSES = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


def test_the_text_of_an_error_is_its_message_and_its_hint() -> None:
    """Message and hint are also attributes; with an empty hint the text is the message."""
    error = errors.PlanError("it is damaged", hint="make another")
    assert (error.message, error.hint, str(error)) == ("it is damaged", "make another", "it is damaged (make another)")
    assert str(errors.PlanError("it is damaged")) == "it is damaged"


def test_the_docstring_draws_the_tree() -> None:
    """Each class occurs once in the drawing, below its first base class."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for indent, name in re.findall(r"^    ((?: [ |+][ -] )*)(\w+Error)$", errors.__doc__ or "", re.MULTILINE):
        path[len(indent) // 4 :] = [name]
        parents[name] = path[-2] if indent else "Exception"
    assert parents == {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items()}


def test_only_a_full_disk_is_no_bad_input() -> None:
    """The command line exits with 2 for each error of Chrion, and with 1 for a fault of the system."""
    for name, kind in CLASSES.items():
        assert exit_code(kind("it is damaged")) == (1 if name == "SpaceError" else 2), name


def test_errors_are_also_builtin_errors() -> None:
    """Invalid input is a ValueError, a broken provider a RuntimeError, and a full disk an OSError."""
    for name in CLASSES.keys() - {"ChrionError"}:
        builtin = {"SpaceError": OSError}.get(name, RuntimeError if name in RUNTIME else ValueError)
        assert issubclass(CLASSES[name], builtin), name
        assert issubclass(CLASSES[name], ChrionError), name

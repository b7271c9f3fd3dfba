"""Commands and groups of commands whose help and errors are in the words that a user types."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from chrion.errors import ChrionError, OptionError

#: Base of the errors of wrong usage, whichever library Typer takes it from.
USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
#: Typer writes required arguments in braces, and several as ``{MODEL}...``.
_NO_BRACES = str.maketrans("", "", "{}")


def options_of(command: Any) -> dict[str, Any]:
    """Return the options of a command by every name that they have."""
    named = {name: parameter for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name: parameter for name, parameter in named.items() if name.startswith("-")}


def name_option(message: str, command: Any) -> str:
    """Return a message of the library with the option of a command in place of the parameter at its beginning.

    A parameter for several models, ``deadlines``, may have an option for each or all, ``--deadline``.
    """
    parameter, colon, problem = message.partition(":")
    names = (f"--{name.replace('_', '-')}" for name in (parameter, parameter.removesuffix("s")))
    option = next((name for name in names if name in options_of(command)), parameter)
    return f"{option}{colon}{problem}"


class _PlainHelp:
    """Help without Typer's names of types: flags have none, and an argument's name says what it is."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of the class beside this one
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = _nothing
            elif parameter.is_flag or parameter.count:
                parameter.metavar = ""
            parameter._get_number_range_help_str = _nothing  # noqa: SLF001 - it speaks of an x
        return parameters

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the line on usage."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc] # of the class beside this one
        return [piece.translate(_NO_BRACES) for piece in pieces]


class Command(_PlainHelp, TyperCommand):
    """A command whose errors name its options.

    It refuses the name of one option as the value of another: the value was forgotten.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the name of the command.

        Raises:
            OptionError: An option that takes a value is followed by another option.
        """
        options = options_of(self)
        for word, following in pairwise(itertools.takewhile(lambda word: word != "--", args)):
            option = options.get(word)
            if following in options and option and not (option.is_flag or option.count):
                raise OptionError(f"{word}: expected a value, found the option {following}")
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            error.ctx = getattr(error, "ctx", None) or ctx  # Typer forgets it where an option lacks its value
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            ChrionError: The command failed; its message names options as the user typed them.
        """
        try:
            return super().invoke(ctx)
        except ChrionError as error:
            error.message = name_option(error.message, self)
            raise


class Group(_PlainHelp, TyperGroup):
    """A group of commands."""


def _nothing(*_: Any, **__: Any) -> None:
    return None

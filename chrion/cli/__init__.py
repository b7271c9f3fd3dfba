"""Floor 6: the commands; no logic."""

from __future__ import annotations

import sys

import typer

from chrion.cli.simulate import simulate
from chrion.errors import InputError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run ONNX models on an accelerator and CPU cores.")
app.command()(simulate)


@app.callback()
def _root() -> None:
    """Run ONNX models on an accelerator and CPU cores at once."""


def main() -> None:
    """Run the command; bad input ends with one line and exit code 2."""
    try:
        app()
    except InputError as error:
        print(f"chrion: error: {error}", file=sys.stderr)  # noqa: T201 # the command's own message
        sys.exit(2)

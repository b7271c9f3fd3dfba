"""The ``chrion`` command: its subcommands, and what its exit codes mean.

0: done. 1: a bug. 2: bad input, one line on stderr says what. 3: no plan meets the SLO, or fits the GPU budget.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any, NoReturn

import typer

import chrion
from chrion.cli.comparing import compare
from chrion.cli.demo import demo
from chrion.cli.machine import devices
from chrion.cli.models import model
from chrion.cli.planning import partition, profile, report, sweep
from chrion.cli.running import bench, run
from chrion.cli.simulate import simulate
from chrion.errors import ChrionError

app = typer.Typer(
    name="chrion", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
for command in (demo, devices, model, profile, partition, sweep, run, bench, compare, report, simulate):
    app.command()(command)

#: What wrong usage raises: Typer's own, whichever library it takes it from.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"chrion {chrion.__version__}")  # noqa: T201 - this is what stdout is for
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")] = False,
) -> None:
    """Run one ONNX model on an accelerator and the CPU cores at once."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="chrion: %(message)s", stream=sys.stderr)


def main() -> NoReturn:
    """Run the command line; never returns."""
    try:
        code = app(standalone_mode=False)
    except ChrionError as error:
        _fail(str(error))
    except _USAGE_ERROR as error:
        _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"chrion: error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201 - one line
    sys.exit(2)

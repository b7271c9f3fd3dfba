"""Pictures by matplotlib, which is an extra."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from chrion.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(option: str, width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        OptionError: matplotlib is missing; the message names the option that asked for a picture.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise OptionError(f"{option}: matplotlib is missing", hint="pip install 'chrion[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def check_picture(option: str, path: Path) -> None:
    """Make sure, before long work is done for it, that a picture can be drawn and written.

    Raises:
        OptionError: matplotlib is missing, or the folder is.
    """
    new_figure(option, 1, 1)
    if not path.parent.is_dir():
        raise OptionError(f"{option}: {path} cannot be written: there is no folder {path.parent}")


def png_of(figure: Figure) -> bytes:
    """A figure as a file's content."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()

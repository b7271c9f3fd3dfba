"""Pictures drawn by matplotlib, an optional dependency: sizes, colours, file formats."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

from chrion.common.files import write_atomically
from chrion.common.installation import install_hint
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Suffixes of picture files that can be written.
PICTURE_FORMATS = (".png", ".svg", ".pdf")
#: Resolution of pictures, at which their small text is readable on a page.
_DPI = 110


def check_picture(option: str, path: Path) -> None:
    """Check, before long work starts, that a picture can be drawn and written to a path.

    Args:
        option: The command-line option that names the path, for the message; may be empty.
        path: The picture's file.

    Raises:
        OptionError: matplotlib is not installed, the suffix is not one of :data:`PICTURE_FORMATS`, or the folder does
            not exist.
    """
    where = f"{option}: {path}" if option else str(path)
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        hint = install_hint("plot")
        raise OptionError(f"{where}: a picture needs the package matplotlib", hint=hint) from error
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise wrong_value(where, f"a name ending in {', '.join(PICTURE_FORMATS)}", path.name)
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{where}: cannot be written: there is no folder {path.parent}")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height are in inches.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise OptionError("a picture needs the package matplotlib", hint=install_hint("plot")) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's suffix names, completely or not at all.

    Raises:
        OptionError: The format is not supported, or the file cannot be written.
    """
    check_picture("", path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower().lstrip("."), dpi=_DPI)
    write_atomically(path, buffer.getvalue())


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Add a title and labels to axes, with a faint grid and without a frame."""
    axes.set_title(plain_text(title), fontsize=11)
    axes.set_xlabel(plain_text(x))
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def plain_text(text: str) -> str:
    """Return text that matplotlib draws as it is: a pair of dollar signs would start a formula."""
    return text.replace("$", r"\$")


def shorten_name(name: str, max_length: int = 28) -> str:
    """Return a name for a legend; if it has more than ``max_length`` characters, an ellipsis and its end."""
    return plain_text(name if len(name) <= max_length else f"…{name[1 - max_length :]}")

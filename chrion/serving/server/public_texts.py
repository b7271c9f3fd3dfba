"""Texts for clients, without the folders of this machine."""

from __future__ import annotations

import re
from pathlib import Path

#: The beginning of an absolute path, which does not follow a part of a relative path or of a URL.
_BEGINNING = re.compile(r"(?<![\w.:/\\~-])(?:[A-Za-z]:)?[/\\](?=\w)")
_SEPARATOR = re.compile(r"[/\\]")


def without_folders(text: str) -> str:
    """Return a reason with file names in the place of absolute paths.

    Only folders that exist are removed: names of nodes have the form of paths, too. Therefore the text must not contain
    what a client has sent, which could find out so which folders exist.
    """
    parts, at = [], 0
    for match in _BEGINNING.finditer(text):
        if match.start() >= at:
            parts.append(text[at : match.start()])
            at = _end_of_folders(text, match.start(), match.end())
    return "".join(parts) + text[at:]


def _end_of_folders(text: str, start: int, first: int) -> int:
    """Return where the name begins that follows the existing folders of a path; its start if there are none.

    Args:
        text: The text.
        start: The start of the path.
        first: The start of the first name in the path.
    """
    end = start
    for separator in _SEPARATOR.finditer(text, first):
        if not _is_folder(text[start : separator.start()]):
            break
        end = separator.end()
    return end


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a character that no path has
        return False

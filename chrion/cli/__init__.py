"""The command line."""

from chrion.cli.entry import main

__all__ = ["main"]

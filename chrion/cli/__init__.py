"""The command line."""

from chrion.cli.app import main

__all__ = ["main"]

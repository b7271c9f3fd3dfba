"""``python -m chrion``: the command line."""

from chrion.cli import main

main()

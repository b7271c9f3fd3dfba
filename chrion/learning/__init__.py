"""TOP's agents: GPG for stages of combined blocks, MADDPG for launcher settings and combinations (extra ``learn``).

Nothing that serves requests imports this package.
"""

__all__: list[str] = []

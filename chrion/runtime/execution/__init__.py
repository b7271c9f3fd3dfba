"""Execution: programs of instructions, the lanes that carry them out, and the sessions of segments."""

__all__: list[str] = []

"""Execution of plans: programs of instructions, executors with their lanes, frames of buffers, and segments."""

__all__: list[str] = []

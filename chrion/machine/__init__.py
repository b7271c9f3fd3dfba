"""The machine that the process runs on: cores, their leases and use, limits of the control group, waiting, memory."""

__all__: list[str] = []

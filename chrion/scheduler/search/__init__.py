"""Search: initial solutions, local search, and the trade-off between latency and memory."""

__all__: list[str] = []

"""Benchmarks: plans, schedulers and plain sessions timed side by side."""

__all__: list[str] = []

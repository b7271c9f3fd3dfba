"""Evaluation: the latency and memory of a schedule, and the rules that every schedule keeps."""

__all__: list[str] = []

"""Policies: one module for each published scheduler, and a registry of them all."""

__all__: list[str] = []

"""Execution of models: sessions, the selection of their engines, and the lanes that execute plans."""

from chrion.runtime.execution.executor import Event
from chrion.runtime.session import HybridSession

__all__ = ["Event", "HybridSession"]

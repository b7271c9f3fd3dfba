"""Floor 4: plans become programs, and lanes carry them out."""

from chrion.runtime.execution.executor import Event
from chrion.runtime.session import HybridSession

__all__ = ["Event", "HybridSession"]

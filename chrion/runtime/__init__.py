"""Running of plans: sessions, programs and the lanes that execute them."""

from chrion.runtime.execution.executor import Event
from chrion.runtime.session import HybridSession

__all__ = ["Event", "HybridSession"]

"""The manager of models: a state machine that decides about memory, queues, batches and cores."""

from chrion.serving.manager.live_manager import LiveManager
from chrion.serving.manager.manager import ModelManager
from chrion.serving.manager.policy_settings import PolicySpec
from chrion.serving.manager.records import (
    Action,
    Load,
    ManagedModel,
    ManagedVariant,
    Reason,
    Refuse,
    Request,
    Run,
    Unload,
)

__all__ = [
    "Action",
    "LiveManager",
    "Load",
    "ManagedModel",
    "ManagedVariant",
    "ModelManager",
    "PolicySpec",
    "Reason",
    "Refuse",
    "Request",
    "Run",
    "Unload",
]

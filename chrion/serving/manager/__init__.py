"""The manager of a model server: a state machine that decides about memory, queues, batches and cores."""

from chrion.serving.manager.manager import ModelManager
from chrion.serving.manager.policy_settings import SERVER_POLICIES, PolicySpec
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
    "SERVER_POLICIES",
    "Action",
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

"""Classes of the messages in ``open_inference.proto`` and ``health.proto``.

They are built from the compiled files in a pool of their own: this works with every version of protobuf, whichever
Triton's client or another package needs, and a process can import that client too, whose messages have the same names.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"


def _build_pool() -> descriptor_pool.DescriptorPool:
    content = (resources.files("chrion.serving.server") / "messages.desc").read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(content)
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _build_pool()


def message(name: str, package: str = "inference") -> Any:
    """Return the class of a message, ``ModelInferRequest`` for example."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{package}.{name}"))


def methods() -> dict[str, Any]:
    """Return the descriptor of each method of the service by its name."""
    return dict(_POOL.FindServiceByName(SERVICE).methods_by_name)

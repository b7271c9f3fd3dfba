"""Sessions whose nodes all run on one provider; by default onnxruntime may assign any node to the CPU.

A session is opened with ``session.disable_cpu_ep_fallback``, with which onnxruntime refuses a model if a node would run
on the CPU. The recorded assignment of nodes is read afterwards: versions differ in the nodes that they list, but a node
that is listed under another provider is an error. onnxruntime's refusal names no node; the session is then opened a
second time without the option, to find the nodes for the message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import onnx
import onnxruntime as ort

from chrion.devices.device import Device
from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ProviderError

_RECORD = "session.record_ep_graph_assignment_info"
_STRICT = "session.disable_cpu_ep_fallback"

log = logging.getLogger(__name__)


def open_on_one_provider(
    model: bytes, options: ort.SessionOptions, provider: str, provider_options: Mapping[str, Any], **rest: Any
) -> ort.InferenceSession:
    """Open a session in which every node runs on the provider.

    Args:
        model: The serialised model.
        options: The session's options; entries about the assignment of nodes are added.
        provider: The execution provider.
        provider_options: The provider's options.
        rest: Further arguments of InferenceSession.

    Raises:
        ProviderError: A node would run on another provider; the message names the node.
        Exception: Any other error of onnxruntime.
    """

    def opened(*, strict: bool) -> ort.InferenceSession:
        options.add_session_config_entry(_STRICT, "1" if strict else "0")
        return ort.InferenceSession(model, options, [(provider, dict(provider_options))], enable_fallback=0, **rest)

    options.add_session_config_entry(_RECORD, "1")
    if provider == CPU_PROVIDER:
        return opened(strict=False)
    try:
        session = opened(strict=True)
    except Exception as error:
        if "fallback to CPU EP" not in str(error):
            raise
        raise _refusal(provider, find_foreign_nodes(opened(strict=False), provider)) from error
    if nodes := find_foreign_nodes(session, provider):
        raise _refusal(provider, nodes)
    return session


def find_foreign_nodes(session: ort.InferenceSession, provider: str) -> dict[str, str]:
    """Return the nodes that run on another provider, by name, with that provider's name.

    The session must have recorded its assignment. The result is empty for an onnxruntime without such a record.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    return {
        node.name or node.op_type: part.ep_name
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider
        for node in part.get_nodes()
    }


def find_cpu_nodes(model: onnx.ModelProto, entries: Mapping[str, str], device: Device) -> set[str]:
    """Return the names of the nodes that onnxruntime assigns to the CPU if it may use a device for the whole model.

    Args:
        model: The optimised model.
        entries: The session configuration entries that the model needs.
        device: The device.

    Returns:
        Names of nodes; empty if the device cannot open the model.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # nodes keep their names
    for key, value in {**entries, _RECORD: "1"}.items():
        options.add_session_config_entry(key, value)
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, [device.provider], enable_fallback=0)
    except Exception as error:  # noqa: BLE001 - the model may be too large for the device, while its segments are not
        log.info("cannot find the nodes that %s leaves to the CPU: %s", device.provider, error)
        return set()
    return set(find_foreign_nodes(session, device.provider))


def _refusal(provider: str, nodes: Mapping[str, str]) -> ProviderError:
    listed = ", ".join(f"{name!r} on {where}" for name, where in list(nodes.items())[:5])
    more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    named = f": {listed}{more}" if listed else ""
    return ProviderError(
        f"{provider} does not run all operators of its segments{named}",
        hint="plan again with a profile of this machine",
    )

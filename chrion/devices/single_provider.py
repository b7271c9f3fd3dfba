"""Sessions that are wholly on their provider: onnxruntime may put what it likes on the CPU, unless it is told not to.

A session is made with ``session.disable_cpu_ep_fallback``, which refuses it when a node would run on the CPU, and what
onnxruntime says of its placement is read afterwards: versions differ in which nodes they list there, but one that is
listed under another provider is an error. Where onnxruntime refuses the session it names no node, so it is made once
more without the option, only to find out.
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
    """A session of which every node is on the provider.

    Args:
        model: The model.
        options: The session's options; those that this is about are set here.
        provider: Its execution provider.
        provider_options: And that one's options.
        rest: Further arguments of InferenceSession.

    Raises:
        ProviderError: A node would run elsewhere; the message names it.
        Exception: Whatever else onnxruntime raises.
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
    """Nodes that are not on the provider, by name, each with where it is; needs the placement recorded.

    An onnxruntime that cannot tell lists none.
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
    """Nodes that onnxruntime leaves to the CPU in a whole model; none where the device cannot open it.

    Args:
        model: The model, optimised already.
        entries: Session options that it needs.
        device: The device that everything is offered to.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # nodes keep their names
    for key, value in {**entries, _RECORD: "1"}.items():
        options.add_session_config_entry(key, value)
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, [device.provider], enable_fallback=0)
    except Exception as error:  # noqa: BLE001 - too large for the device, for one; segments of it may not be
        log.info("where %s leaves nodes to the CPU is not known: %s", device.provider, error)
        return set()
    return set(find_foreign_nodes(session, device.provider))


def _refusal(provider: str, nodes: Mapping[str, str]) -> ProviderError:
    listed = ", ".join(f"{name!r} on {where}" for name, where in list(nodes.items())[:5])
    more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    named = f": {listed}{more}" if listed else ""
    return ProviderError(
        f"{provider} does not run all that it was given{named}", hint="plan anew with a profile of this machine"
    )

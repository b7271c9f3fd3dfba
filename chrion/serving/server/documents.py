"""Answers that the HTTP and gRPC services have in common, as data for JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from chrion.common.version import __version__
from chrion.serving.manager.residency import Place
from chrion.serving.server.core import ServingCore
from chrion.serving.server.core_records import Served
from chrion.serving.server.failures import without_folders
from chrion.serving.server.repository import BadVersion, Versions
from chrion.serving.server.statistics import Duration
from chrion.serving.server.tensors import TensorSpec

#: Extensions of the protocol, as Triton names them.
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
_NAME, _PLATFORM = "chrion", "onnxruntime_onnx"
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
READY, LOADING, UNAVAILABLE = "READY", "LOADING", "UNAVAILABLE"


def server_metadata(*, model_control: bool) -> dict[str, Any]:
    """Return the server's metadata."""
    extensions = [name for name in _EXTENSIONS if name != "model_repository" or model_control]
    return {"name": _NAME, "version": __version__, "extensions": extensions}


def model_metadata(
    name: str, versions: Sequence[str], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> dict[str, Any]:
    """Return a model's metadata."""
    return {
        "name": name,
        "versions": sorted(versions, key=int),
        "platform": _PLATFORM,
        "inputs": [_tensor(spec) for spec in inputs],
        "outputs": [_tensor(spec) for spec in outputs],
    }


def model_config(
    name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_batch: int = 0
) -> dict[str, Any]:
    """Return the part of Triton's model configuration that clients read; ``max_batch`` is 0 without batching."""
    return {
        "name": name,
        "platform": _PLATFORM,
        "backend": "onnxruntime",
        "max_batch_size": max_batch,
        "input": [_configured(spec, batched=max_batch > 0) for spec in inputs],
        "output": [_configured(spec, batched=max_batch > 0) for spec in outputs],
    }


def model_statistics(core: ServingCore, served: Served) -> dict[str, Any]:
    """Return the statistics of a version."""
    statistics = served.statistics
    return {
        "name": served.version.name,
        "version": served.version.version,
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inferences,
        "execution_count": statistics.executions,
        "inference_stats": {
            **{name: _duration(getattr(statistics, name)) for name in ("success", "fail", "queue", *_COMPUTE)},
            "cache_hit": _duration(Duration()),
            "cache_miss": _duration(Duration()),
        },
        "batch_stats": [
            {"batch_size": size, **{name: _duration(getattr(batch, name)) for name in _COMPUTE}}
            for size, batch in sorted(statistics.batches.items())
        ],
        "memory_usage": [
            {"type": "GPU" if device == "accelerator" else "CPU", "id": 0, "byte_size": size}
            for device, size in reserved_bytes(core, served).items()
            if size
        ],
        "response_stats": {},
    }


def repository_index(core: ServingCore, versions: Versions, silent: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the state of every version of the repository.

    Args:
        core: The server.
        versions: The versions in the repository.
        silent: Why models that were to generate text do not, by name.
    """
    index = []
    for key in sorted(versions.keys() | core.models.keys()):
        served, entry = core.models.get(key), versions.get(key)
        if served is None:
            state, reason = UNAVAILABLE, entry.reason if isinstance(entry, BadVersion) else "unloaded"
        else:
            state = LOADING if not served.attempted.is_set() else READY if core.is_ready(served) else UNAVAILABLE
            reason = served.failure or _note(served, silent)
        index.append({"name": key[0], "version": key[1], "state": state, "reason": without_folders(reason)})
    return index


def snapshot(core: ServingCore, versions: Versions, silent: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of the server for the web page.

    Args:
        core: The server.
        versions: The versions in the repository.
        silent: As for the index.
    """
    manager = core.manager
    devices = {device: {"used": manager.used(device), "budget": budget} for device, budget in manager.budgets.items()}
    unserved = [
        {"name": bad.name, "version": bad.version, "reason": without_folders(bad.reason)}
        for key, bad in sorted(versions.items())
        if isinstance(bad, BadVersion) and key not in core.models
    ]
    return {
        "devices": devices,
        "cores": {"count": len(core.lane_busy_ms), "busy_ms": sum(core.busy_ms.values())},
        "models": [_model_state(core, served, silent) for served in core.models.values()],
        "unserved": unserved,
        "draining": core.draining,
        "uptime_s": time.time() - core.started_s,
    }


def reserved_bytes(core: ServingCore, served: Served) -> dict[str, int]:
    """Return the memory that is reserved for a version, by device."""
    if core.place(served)[0] is Place.ABSENT:
        return {}
    entry = core.manager.entries[served.number]
    return dict(entry.model.variants[entry.variant].bytes)


def _model_state(core: ServingCore, served: Served, silent: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of a version for the web page."""
    statistics, slo = served.statistics, served.version.managed.slo_ms
    place, variant = core.place(served)
    p50, p99 = statistics.quantiles_ms(0.5, 0.99)
    return {
        "name": served.version.name,
        "version": served.version.version,
        "place": place.value,
        "variant": variant,
        "bytes": reserved_bytes(core, served),
        "waiting": core.waiting_for(served),
        "blocks": core.blocks.count(served.number),
        "requests": statistics.success.count,
        "failures": statistics.fail.count,
        "p50_ms": p50,
        "p99_ms": p99,
        "slo_ms": slo if slo < float("inf") else None,
        "violations": statistics.slo_violations,
        "loads": statistics.loads,
        "evictions": statistics.evictions,
        "idle_s": time.time() - statistics.last_inference_ms / 1000 if statistics.last_inference_ms else None,
        "failure": without_folders(served.failure),
        "note": without_folders(_note(served, silent)),
    }


def _note(served: Served, silent: Mapping[str, str]) -> str:
    """Return what is wrong with a version that is served; empty if nothing is."""
    name = served.version.name
    return served.note or (f"it does not generate text: {silent[name]}" if name in silent else "")


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    """Return an input or output in a model's metadata."""
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape or ())}


def _configured(spec: TensorSpec, *, batched: bool) -> dict[str, Any]:
    """Return an input or output in a model's configuration, with the first dimension only if it is not batched."""
    shape = list(spec.shape or ())
    name = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{name}", "dims": shape[1:] if batched else shape}


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}

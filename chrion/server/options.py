"""Options of the server, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from chrion.errors import OptionError
from chrion.manager import ManagerPolicies
from chrion.manager.policies import ADMISSION, EVICTION, LOAD_ORDER
from chrion.manager.records import ACCELERATOR, HOST
from chrion.server.catalogue import CONTROL_MODES
from chrion.simulator.scenario import find_scenario

#: Share of the free host memory that models may use by default.
_HOST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server."""

    repository: Path
    http: tuple[str, int] = ("127.0.0.1", 8000)
    #: None for no gRPC service.
    grpc: tuple[str, int] | None = ("127.0.0.1", 8001)
    #: Bytes for models by device.
    budgets: Mapping[str, int] = field(default_factory=dict)
    policies: ManagerPolicies = field(default_factory=ManagerPolicies)
    #: The accelerator's execution provider and its options; None for none.
    provider: tuple[str, Mapping[str, Any]] | None = None
    control: str = "none"
    load: tuple[str, ...] = ()
    poll_s: float = 15.0
    body_bytes: int = 256_000_000
    request_bytes: int = 1_000_000_000
    max_waiting: int = 1024
    max_connections: int = 1024
    drain_s: float = 30.0
    token: str = ""
    #: Files of the TLS certificate chain and its key; None for no TLS.
    tls: tuple[Path, Path] | None = None

    def __post_init__(self) -> None:
        if self.control not in CONTROL_MODES:
            known = ", ".join(CONTROL_MODES)
            raise OptionError(f"--model-control: expected one of {known}, found {self.control!r}")
        if self.load and self.control != "explicit":
            raise OptionError("--load-model: only with --model-control explicit")
        if not self.repository.is_dir():
            raise OptionError(f"repository {self.repository}: not a folder")


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        OptionError: The text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise OptionError(f"{option} {text!r}: expected HOST:PORT", hint="for example 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def parse_policies(text: str, base: ManagerPolicies) -> ManagerPolicies:
    """Return policies given as names separated by commas, for example ``cost,deadline``.

    Raises:
        OptionError: A name is unknown, or two names are of one kind.
    """
    kinds = {"eviction": [n for n in EVICTION if n != "belady"], "load_order": LOAD_ORDER, "admission": ADMISSION}
    chosen: dict[str, str] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        kind = next((kind for kind, names in kinds.items() if name in names), None)
        if kind is None or kind in chosen:
            known = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in kinds.items())
            what = "unknown policy" if kind is None else f"two policies for {kind.replace('_', ' ')}"
            raise OptionError(f"--policy: {what}: {name!r}", hint=known)
        chosen[kind] = name
    return replace(base, **chosen)  # type: ignore[arg-type] # all of them are names


def scenario_policies(name: str) -> tuple[ManagerPolicies, int]:
    """Return the policies of a scenario, and the accelerator memory of its first server in bytes.

    Raises:
        ScenarioError: The scenario is invalid.
        OptionError: Its policy needs the future.
    """
    scenario = find_scenario(name).build()
    if scenario.policies.eviction == "belady":
        raise OptionError(f"--scenario {name}: eviction 'belady' needs the future requests: a server cannot use it")
    policies = scenario.policies
    return (
        ManagerPolicies(policies.eviction, policies.load_order, policies.admission),
        scenario.servers[0].budget_bytes,
    )


def default_budgets(gpu_mb: float | None, memory_mb: float | None) -> dict[str, int]:
    """Return the budgets by device; the host's is half of its free memory by default."""
    host = round(memory_mb * 1e6) if memory_mb else round(psutil.virtual_memory().available * _HOST_SHARE)
    return {HOST: host} | ({ACCELERATOR: round(gpu_mb * 1e6)} if gpu_mb else {})

"""Options of the server, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from msgspec import structs

from chrion.common.wrong_values import wrong_value
from chrion.devices import CPU_PROVIDER, usable_provider
from chrion.errors import OptionError
from chrion.serving.manager.policies import ADMISSION, EVICTION, LOAD_ORDER, ROUTING
from chrion.serving.manager.policy_settings import DEFAULT_POLICIES, PolicySpec
from chrion.serving.manager.records import ACCELERATOR, HOST
from chrion.serving.server.catalogue import CONTROL_MODES

#: Share of the free host memory that models may use by default: the other half is for requests, outputs and other
#: programs.
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
    policies: PolicySpec = DEFAULT_POLICIES
    #: The accelerator's execution provider and its options; None for none.
    provider: tuple[str, Mapping[str, Any]] | None = None
    control: str = "none"
    load: tuple[str, ...] = ()
    poll_s: float = 15.0
    body_bytes: int = 256_000_000
    request_bytes: int = 1_000_000_000
    max_connections: int = 1024
    #: Connections of HTTP from one address.
    max_client_connections: int = 512
    #: Time that a run may take, unless ``model.toml`` says otherwise.
    max_run_s: float = 300.0
    drain_s: float = 30.0
    token: str = ""
    #: Files of the TLS certificate chain and its key; None for no TLS.
    tls: tuple[Path, Path] | None = None
    #: The OpenTelemetry collector; empty for no traces.
    otlp: str = ""
    #: Origins whose pages may read answers, or ``*`` for all of them.
    cors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.control not in CONTROL_MODES:
            known = ", ".join(CONTROL_MODES)
            raise wrong_value("--model-control", f"one of {known}", self.control)
        if self.load and self.control != "explicit":
            raise OptionError("--load-model: only with --model-control explicit")
        if not self.repository.is_dir():
            raise wrong_value("repository", "a folder", str(self.repository))


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        OptionError: The text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise wrong_value(option, "HOST:PORT", text, hint="for example 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def parse_origin(text: str) -> str:
    """Return an origin as browsers send it, ``https://example.org`` for example, or ``*``.

    Raises:
        OptionError: The text is neither.
    """
    parts = urlsplit(text)
    if text != "*" and not (
        parts.scheme in ("http", "https") and parts.netloc and text == f"{parts.scheme}://{parts.netloc}"
    ):
        raise wrong_value("--cors", "SCHEME://HOST[:PORT] or *", text, hint="for example http://localhost:3000")
    return text


def parse_policies(text: str, base: PolicySpec, *, routing: bool = False) -> PolicySpec:
    """Return policies given as names separated by commas, for example ``cost,deadline``.

    Args:
        text: The names.
        base: The policies of the kinds that are not named.
        routing: Whether requests are routed to replicas, so that the names may have a policy for that.

    Raises:
        OptionError: A name is unknown, or two names are of one kind.
    """
    kinds = {"eviction": [n for n in EVICTION if n != "belady"], "load_order": LOAD_ORDER, "admission": ADMISSION}
    if routing:
        kinds["routing"] = ROUTING
    chosen: dict[str, str] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        kind = next((kind for kind, names in kinds.items() if name in names), None)
        if kind is None or kind in chosen:
            known = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in kinds.items())
            problem = "unknown policy" if kind is None else f"two policies for {kind.replace('_', ' ')}"
            raise OptionError(f"--serving-policy: {problem}: {name!r}", hint=known)
        chosen[kind] = name
    return structs.replace(base, **chosen)


def parse_replicas(text: str) -> tuple[int, int]:
    """Return the minimum and the maximum number of replicas of ``N`` or ``MIN..MAX``; both 0 for ``nodes``.

    Raises:
        OptionError: The text has another form.
    """
    if text == "nodes":
        return 0, 0
    minimum, dots, maximum = text.partition("..")
    numbers = [int(part) for part in (minimum, maximum if dots else minimum) if part.isascii() and part.isdigit()]
    if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1] <= 1000:
        raise wrong_value("--replicas", "nodes, a number, or MIN..MAX", text, hint="for example 2..8")
    return numbers[0], numbers[1]


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What decides about the accelerator and the budgets of a machine."""

    #: As ``--accelerator`` takes it; ``auto`` for the first that works.
    accelerator: str = "none"
    #: Memory for models in MB. Without an accelerator the first is ignored; None for half of the free host memory.
    gpu_mb: float = 0.0
    memory_mb: float | None = None
    #: Whether to refuse machines without an accelerator.
    needs_gpu: bool = False

    def applied_to(self, options: ServerOptions, *, replicas: int = 1) -> ServerOptions:
        """Return options with the accelerator and the budgets of this machine.

        Args:
            options: The other options.
            replicas: Servers on this machine that share its host memory.

        Raises:
            ProviderError: The accelerator does not work.
            OptionError: There is none but one is needed, or the memory for models on it is unknown.
        """
        provider = usable_provider(self.accelerator)
        free_mb = psutil.virtual_memory().available * _HOST_SHARE / replicas / 1e6
        budgets = {HOST: round((self.memory_mb or free_mb) * 1e6)}
        if provider is None or provider == CPU_PROVIDER:
            if self.needs_gpu:
                raise OptionError("--gpu-budget: there is no accelerator", hint="chrion devices shows what works")
            return replace(options, budgets=budgets, provider=None)
        if not self.gpu_mb:
            hint = "add --gpu-budget or --scenario"
            raise OptionError("--accelerator: the memory for models is unknown", hint=hint)
        return replace(options, budgets=budgets | {ACCELERATOR: round(self.gpu_mb * 1e6)}, provider=(provider, {}))


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What decides about the replicas on a Ray cluster."""

    #: The address of the cluster, ``auto`` for the one of this machine, or ``local`` for a new one on this machine.
    address: str
    devices: DeviceOptions
    #: Least and greatest number of replicas; 0 for one on each node or GPU.
    replicas: tuple[int, int] = (0, 0)

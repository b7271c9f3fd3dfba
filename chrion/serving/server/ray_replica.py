"""A replica of Ray Serve: the server's core with its manager, without sockets, for the models of one node or GPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from chrion.machine.cores import physical_cores
from chrion.serving.manager.cluster_view import ReplicaState
from chrion.serving.server import logs
from chrion.serving.server.catalogue import Catalogue
from chrion.serving.server.failures import RequestFailure
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.grace import Grace
from chrion.serving.server.options import DeviceOptions, ServerOptions
from chrion.serving.server.replica_state import StateReports
from chrion.serving.server.served_models import serving_core
from chrion.serving.server.target import LocalTarget

#: The failure of requests for text.
NO_TEXT = "decoders do not generate text with --ray: serve them without it"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a replica.

    Attributes:
        number: Number of the request; calls with the same number are the same request.
        model: The model whose weights are wanted, as in :class:`chrion.serving.manager.cluster_view.ReplicaState`;
            empty if any replica will do.
        method: A method of :class:`chrion.serving.server.target.Target`.
        arguments: Its arguments.
        replica: The replica that has to answer; empty if the router chooses.
        tried: Replicas that are not asked again.
    """

    number: int
    model: str
    method: str
    arguments: tuple[Any, ...] = ()
    replica: str = ""
    tried: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a replica: a value or a failure, and its state."""

    state: ReplicaState
    value: Any = None
    #: The arguments of a :class:`chrion.serving.server.failures.RequestFailure`.
    failure: tuple[Any, str, float | None] | None = None


class ModelReplica:
    """The class of the deployment.

    Args:
        options: The server's options, without budgets and accelerator.
        devices: What decides about them on this node.
    """

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, options: ServerOptions, devices: DeviceOptions
    ) -> None:
        logs.set_up_logs()
        index, count = _gpu_of_node()
        cores = share(physical_cores(), index, count)
        options = devices.applied_to(options, replicas=count)
        self._core = serving_core(options, options.budgets, cores)
        catalogue = Catalogue(options.repository, self._core, options.control, accelerator=options.provider is not None)
        without_text = GenerationService({}, options.policies.max_waiting, refused=NO_TEXT)
        self._target = LocalTarget(self._core, catalogue, without_text)
        self._reports = StateReports(self._core, ray.util.get_node_ip_address())
        self._core.start()
        await catalogue.start(options.load)
        poll = options.control == "poll"
        self._poller = asyncio.create_task(catalogue.poll_forever(options.poll_s)) if poll else None

    async def answer(self, call: Call) -> Reply:
        """Answer a call; cancelled if the client leaves."""
        try:
            value = await getattr(self._target, call.method)(*call.arguments)
        except RequestFailure as failure:
            return Reply(self._report(), failure=(failure.status, failure.message, failure.retry_s))
        return Reply(self._report(), value)

    async def record_routing_stats(self) -> dict[str, ReplicaState]:
        """Return what the router should know; Serve calls it and gives the result to the router."""
        return {"state": self._report()}

    async def check_health(self) -> None:
        """Answer Serve, from the event loop that serves requests; if it is blocked, the replica is replaced."""

    async def __del__(self) -> None:  # Serve awaits it after the last request
        if self._poller:
            self._poller.cancel()
        await self._core.close(Grace(0.0))

    def _report(self) -> ReplicaState:
        return self._reports.latest(time.monotonic() * 1000)


def share(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """Return the cores of one of several replicas on a node; at least one, which they share if there are too few."""
    own = tuple(cores[len(cores) * index // count : len(cores) * (index + 1) // count])
    return own or (cores[index % len(cores)],)


def _gpu_of_node() -> tuple[int, int]:
    """Return the index of this replica's GPU, and the number of GPUs of its node; 0 and 1 without a GPU."""
    context = ray.get_runtime_context()
    own = context.get_accelerator_ids().get("GPU", [])
    node: Mapping[str, Any] = next((n for n in ray.nodes() if n["NodeID"] == context.get_node_id()), {})
    count = int(node.get("Resources", {}).get("GPU", 0))
    if not own or not own[0].isdigit() or int(own[0]) >= count:
        return 0, 1
    return int(own[0]), count

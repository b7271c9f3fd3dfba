"""The servers of a cluster and their GPUs, made from their specifications."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.serving.simulator.cluster_state import ClusterState
from chrion.serving.simulator.general_server import GeneralServer, Options
from chrion.serving.simulator.host import Host
from chrion.serving.simulator.server import Server
from chrion.serving.simulator.settings import ServerSpec


class ClusterParts:
    """GPUs, and the servers that they belong to if these have options.

    Args:
        servers: The specification of each server.
        states: What GPUs share, with the table of times for the speed of each GPU.
        options: What servers do beyond the simple ones; None for nothing.
    """

    def __init__(self, servers: Sequence[ServerSpec], states: Sequence[ClusterState], options: Options | None) -> None:
        #: One entry for each GPU.
        self.servers: list[Server] = []
        #: One entry for each server; empty without options.
        self.hosts: list[Host[GeneralServer]] = []
        self._states = states
        self._load_ms: dict[tuple[float, float], list[float]] = {}
        for i, spec in enumerate(servers):
            if options is None:
                self.servers.append(Server(i, spec, self._load_times(spec), states[i]))
            else:
                self._add_host(spec, options)

    def _add_host(self, spec: ServerSpec, options: Options) -> None:
        weights_mb = self._states[0].table.load_mb[: self._states[0].table.models]
        host = Host[GeneralServer](len(self.hosts), spec, weights_mb)
        for _ in range(spec.gpus):
            i = len(self.servers)
            gpu = GeneralServer(i, host, self._load_times(spec), self._states[i], options)
            host.gpus.append(gpu)
            self.servers.append(gpu)
        self.hosts.append(host)

    def _load_times(self, spec: ServerSpec) -> list[float]:
        link = spec.pcie_gb_per_s, spec.load_fixed_ms
        if link not in self._load_ms:
            self._load_ms[link] = self._states[0].table.load_ms(spec)
        return self._load_ms[link]

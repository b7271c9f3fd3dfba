"""The servers of a cluster and their GPUs, made from their specifications."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.serving.simulator.cluster_state import ClusterState
from chrion.serving.simulator.general_server import GeneralServer, Host, Options
from chrion.serving.simulator.server import Server
from chrion.serving.simulator.settings import ServerSpec


def build_servers(
    specs: Sequence[ServerSpec], states: Sequence[ClusterState], options: Options | None
) -> tuple[list[Server], list[Host]]:
    """Return an entry for each GPU, and one for each server; the latter are empty without options.

    Args:
        specs: The specification of each server.
        states: What GPUs share, with the table of times for the speed of each GPU.
        options: What servers do beyond the simple ones; None for nothing.
    """
    table = states[0].table
    links = {(spec.pcie_gb_per_s, spec.load_fixed_ms): spec for spec in specs}
    load_times = {link: table.load_ms(spec) for link, spec in links.items()}
    servers: list[Server] = []
    hosts: list[Host] = []
    for spec in specs:
        load_ms = load_times[spec.pcie_gb_per_s, spec.load_fixed_ms]
        if options is None:
            servers.append(Server(len(servers), spec, load_ms, states[len(servers)]))
            continue
        host = Host(len(hosts), spec, table.load_mb[: table.models])
        for i in range(len(servers), len(servers) + spec.gpus):
            host.gpus.append(GeneralServer(i, host, load_ms, states[i], options))
        servers += host.gpus
        hosts.append(host)
    return servers, hosts

"""Models in service: policies, the server and its protocols, the simulation of a cluster, replays of its workloads."""

__all__: list[str] = []

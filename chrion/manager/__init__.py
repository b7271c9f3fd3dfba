"""Management of the models that share a device's memory: decisions that the simulator and a server have in common."""

__all__: list[str] = []

"""The replay of a scenario's requests on a running server."""

__all__: list[str] = []

"""Several models on one machine: their blocks compete for lanes, by deadlines or another policy."""

__all__: list[str] = []

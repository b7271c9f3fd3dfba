"""Selection: which engine runs a model: a plan or a plain session."""

__all__: list[str] = []

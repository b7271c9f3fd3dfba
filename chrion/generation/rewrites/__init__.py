"""Graph rewrites for decoders: what a decoder is, its caches and attention, and the graphs that the engines run."""

__all__: list[str] = []

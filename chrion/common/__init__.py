"""What several packages need: files, units, times, names of lanes, and imports on first use."""

__all__: list[str] = []

"""The layers of the package, which the tests check and ``docs/design.md`` lists."""

from __future__ import annotations

Layers = tuple[tuple[str, ...], ...]

#: Packages and modules by layer, from the lowest up. A module imports from its own package and those listed before.
LAYERS: Layers = (
    ("errors", "common", "machine", "native", "hardware"),
    ("graph",),
    ("devices", "pipelines", "profiler", "zoo"),
    ("scheduler",),
    ("runtime",),
    ("generation",),
    ("serving",),
    ("backend", "learning", "report"),
    ("cli", "__main__"),
)
#: Layers inside three packages; modules that are not listed belong to the highest. Entries of one layer do not import
#: each other.
INSIDE: dict[str, Layers] = {
    "scheduler": (
        ("limits", "schedule", "priced_memory"),
        ("native_kernels", "plan"),
        ("evaluation",),
        ("policies",),  # published policies and their helpers
        ("search",),
        ("policies.chrion",),
        ("policies.registry",),
        ("plan_options",),
        ("explain", "fixed_placement", "planner"),
    ),
    "serving": (("ray_cluster",), ("manager", "multi", "variants"), ("server", "simulator"), ("replay",)),
    "runtime": (
        ("live_comparison", "live_selection", "options", "process_hooks", "requests"),
        ("iobinding",),
        ("execution",),
        ("selection",),
    ),
}

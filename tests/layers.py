"""The layers of the package, which the tests check and ``docs/design.md`` lists."""

from __future__ import annotations

Layers = tuple[tuple[str, ...], ...]

#: Packages and modules from the lowest layer up. A module imports from its own package and from lower layers.
PACKAGES: Layers = (
    ("errors",),
    ("common",),
    ("hardware", "machine", "native"),
    ("graph",),
    ("zoo",),
    ("devices",),
    ("profiler",),
    ("scheduler",),
    ("runtime",),
    ("generation",),
    ("serving",),
    ("backend", "report"),
    ("cli",),
    ("__main__",),
)
#: The same inside two packages; modules that are not listed belong to the highest layer.
INSIDE: dict[str, Layers] = {
    "scheduler": (
        ("schedule", "priced_memory"),
        ("plan",),
        ("evaluation",),
        ("policies",),  # published policies and their helpers
        ("search",),
        ("policies.chrion",),
        ("policies.registry",),
        ("explain", "fixed_placement", "planner"),
    ),
    "serving": (("manager", "ray_cluster"), ("simulator",), ("server",), ("replay",)),
    "runtime": (("live_comparison", "options", "process_hooks", "requests"), ("execution",), ("selection",)),
}

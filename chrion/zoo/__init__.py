"""Example models, built from specifications with seeded weights."""

from chrion.zoo.recurrent import RecurrentSpec, build_recurrent
from chrion.zoo.specs import BUILDERS, Written, build, names, specification, streams_weights, weights_path, write

__all__ = [
    "BUILDERS",
    "RecurrentSpec",
    "Written",
    "build",
    "build_recurrent",
    "names",
    "specification",
    "streams_weights",
    "weights_path",
    "write",
]

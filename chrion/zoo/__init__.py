"""Example models, built from specifications with seeded weights."""

from chrion.zoo.recurrent import RecurrentSpec, build_recurrent
from chrion.zoo.specs import BUILDERS, build, names, specification, streams_weights, weights_path, write

__all__ = [
    "BUILDERS",
    "RecurrentSpec",
    "build",
    "build_recurrent",
    "names",
    "specification",
    "streams_weights",
    "weights_path",
    "write",
]

"""Example models, built from specifications with seeded weights."""

from chrion.zoo.recurrent import RecurrentSpec, build_recurrent
from chrion.zoo.specs import BUILDERS, build, names, specification

__all__ = ["BUILDERS", "RecurrentSpec", "build", "build_recurrent", "names", "specification"]

"""Inference of one ONNX model on an accelerator and the CPU cores of a machine at the same time.

The public names are imported from their modules on first use: onnxruntime and onnx take up to a second to import, and a
command starts and handles Ctrl-C before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chrion.common.installation import warn_of_fault
from chrion.common.lazy_names import import_on_first_use
from chrion.common.version import __version__

if TYPE_CHECKING:
    from chrion.errors import ChrionError
    from chrion.generation import Generator, Sampling
    from chrion.graph import Dag, Graph, load
    from chrion.pipelines import finetune, translate
    from chrion.profiler import Profile, profile
    from chrion.runtime import HybridSession
    from chrion.scheduler import Plan, partition
    from chrion.serving.multi.session import MultiSession

__all__ = [
    "ChrionError",
    "Dag",
    "Generator",
    "Graph",
    "HybridSession",
    "MultiSession",
    "Plan",
    "Profile",
    "Sampling",
    "__version__",
    "finetune",
    "load",
    "partition",
    "profile",
    "translate",
]

_MODULES = {
    "ChrionError": "chrion.errors",
    "Dag": "chrion.graph",
    "Generator": "chrion.generation",
    "Graph": "chrion.graph",
    "HybridSession": "chrion.runtime",
    "MultiSession": "chrion.serving.multi.session",
    "Plan": "chrion.scheduler",
    "Profile": "chrion.profiler",
    "Sampling": "chrion.generation",
    "finetune": "chrion.pipelines",
    "load": "chrion.graph",
    "partition": "chrion.scheduler",
    "profile": "chrion.profiler",
    "translate": "chrion.pipelines",
}


warn_of_fault()
if not TYPE_CHECKING:  # type checkers would accept any attribute
    __getattr__ = import_on_first_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Distributions that add policies by entry points, installed into a temporary folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chrion.scheduler.policies.registry import ENTRY_POINT_GROUP

#: A module with a policy that puts everything on the last core, and objects that are no valid policies.
_MODULE = '''
from chrion.scheduler import Schedule

def last_core(dag, costs, alpha):
    """Everything on the last core.

    Not in the description.
    """
    return Schedule(dag.topological_order, (costs.cores,) * len(dag), costs.cores)

def backwards(dag, costs, alpha):
    return Schedule(dag.topological_order[::-1], (1,) * len(dag), 1)

def nothing(dag, costs, alpha):
    return None

NUMBER = 7
'''

#: Installs a distribution of a name, with entry points given as lines ``name = module:object``.
Install = Callable[[str, str], None]


def policy_installer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs each distribution into a folder of its own, importable until the test ends."""

    def install(distribution: str, points: str) -> None:
        module = distribution.replace("-", "_")
        monkeypatch.delitem(sys.modules, module, raising=False)
        info = folder / distribution / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / distribution / f"{module}.py").write_text(_MODULE)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{points}\n")
        monkeypatch.syspath_prepend(str(folder / distribution))

    return install

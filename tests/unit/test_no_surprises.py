"""What no module of Chrion does: run code that it is given as data, or talk to others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_layers import MODULES, module_name

#: Modules that run data as code, write memory as it is, or reach other machines.
MODULES_REFUSED = {
    *["pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "codeop", "runpy", "imp"],
    *["socket", "socketserver", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "requests", "httpx", "aiohttp"],
    *["asyncio", "webbrowser", "telnetlib", "subprocess"],
}
CALLS_REFUSED = {"eval", "exec", "compile", "__import__"}
#: Methods that load a library; of ``os``, those that start a shell or another program.
METHODS_REFUSED = {"register_custom_ops_library", "register_execution_provider_library", "LoadLibrary", "CDLL"}
PROGRAMS_REFUSED = {"system", "popen", "startfile", "execv", "spawnv", "posix_spawn"}
#: What is refused to all others, and why not to these.
ALLOWED = {
    "chrion.devices.probe": {"subprocess"},  # this interpreter, and itself
    "chrion.native.bindings": {"CDLL", "register_custom_ops_library"},  # Chrion's own, beside the module
    "chrion.simulator.sweep": {"socket"},  # whether the Ray cluster that the user names is there
}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_module_runs_data_or_talks_to_others(path: Path) -> None:
    """No pickle, no eval, no network, no library that a file names, no shell; arrays are read without objects."""
    found = offences(path.read_text(encoding="utf-8"), ALLOWED.get(module_name(path), set()))
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from urllib.request import urlopen",
        "import os, http.client",
        "eval('1')",
        "import builtins\nbuiltins.exec('1')",
        "options.register_custom_ops_library('x.so')",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "import subprocess",
        "os.system('ls')",
    ],
)
def test_what_is_looked_for_is_found(source: str) -> None:
    """The test above can fail."""
    assert offences(source, set())


def offences(source: str, allowed: set[str]) -> list[str]:
    """What a module does that none should."""
    refused = MODULES_REFUSED - allowed
    found = []
    for part in ast.walk(ast.parse(source)):
        if isinstance(part, ast.Import):
            found += [a.name for a in part.names if a.name.split(".")[0] in refused]
        elif isinstance(part, ast.ImportFrom):
            found += [part.module or ""] if (part.module or "").split(".")[0] in refused else []
        elif isinstance(part, ast.Call):
            found += [name for name in _bad_call(part) if name not in allowed]
    return found


def _bad_call(call: ast.Call) -> list[str]:
    if isinstance(call.func, ast.Name):
        return [call.func.id] if call.func.id in CALLS_REFUSED else []
    if not isinstance(call.func, ast.Attribute):
        return []
    owner, name = call.func.value, call.func.attr
    of = owner.id if isinstance(owner, ast.Name) else ""
    if (
        name in METHODS_REFUSED
        or (name in PROGRAMS_REFUSED and of == "os")
        or (name in CALLS_REFUSED and of == "builtins")
    ):
        return [name]
    safe = any(k.arg == "allow_pickle" and getattr(k.value, "value", None) is False for k in call.keywords)
    return [f"{of}.load with objects"] if (of, name) == ("np", "load") and not safe else []

"""Tests that no module of Chrion executes data as code or communicates with other machines."""

from __future__ import annotations

import ast

import pytest
from test_layers import MODULES, module_name

#: Modules that execute data as code or connect to other machines.
FORBIDDEN_MODULES = {
    *["pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "codeop", "runpy", "imp"],
    *["socket", "socketserver", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "requests", "httpx", "aiohttp"],
    *["asyncio", "webbrowser", "telnetlib", "subprocess"],
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
#: Methods that load a library, and functions of ``os`` that start a program.
FORBIDDEN_METHODS = {"register_custom_ops_library", "register_execution_provider_library", "LoadLibrary", "CDLL"}
FORBIDDEN_PROGRAMS = {"system", "popen", "startfile", "execv", "spawnv", "posix_spawn"}
#: Modules of the server that wait for requests.
SERVER = (
    "block_runs",
    "catalogue",
    "connections",
    "core",
    "core_records",
    "disconnects",
    "generation_service",
    "grace",
    "grpc_health",
    "grpc_service",
    "grpc_stream",
    "openai_service",
    "protocol_decoder",
    "ray_replica",
    "ray_serve",
    "ray_target",
    "rest",
    "run_watch",
    "served_models",
    "target",
)
#: Exceptions by module, each with its reason.
ALLOWED = {
    "chrion.devices.probe": {"subprocess"},  # runs itself with the same interpreter
    "chrion.runtime.selection.tuning_process": {"subprocess"},  # runs its worker with the same interpreter
    "chrion.runtime.selection.footprint": {"subprocess"},  # runs itself with the same interpreter
    "chrion.native.operators": {"register_custom_ops_library"},  # the libraries that Chrion compiles
    "chrion.native.bindings": {"register_custom_ops_library"},
    "chrion.native.library": {"CDLL"},
    **{f"chrion.serving.server.{name}": {"asyncio"} for name in SERVER},  # `chrion serve`
    "chrion.serving.server.origins": {"socket"},  # finds the addresses of the name that the server is bound to
    "chrion.serving.server.run": {"asyncio", "socket"},  # `chrion serve`
    "chrion.serving.server.supervisor": {
        "asyncio",
        "subprocess",
    },  # `--restart`: `chrion serve` in a process of its own
    "chrion.generation.streams": {"asyncio"},  # tokens for `async for`, without connections
    "chrion.cli.replay": {"ssl"},  # `chrion replay`, a client of the server that it is given
    "chrion.serving.replay.http_client": {"asyncio", "ssl"},
    "chrion.serving.replay.open_loop": {"asyncio"},
    "chrion.serving.replay.run": {"asyncio", "ssl"},
    "chrion.serving.replay.target": {"asyncio"},
    "chrion.serving.ray_cluster": {"socket"},  # checks whether the given Ray cluster is reachable
}


def test_no_module_makes_a_forbidden_call() -> None:
    """No module uses pickle, eval, the network, a shell or a library from a file, or reads arrays with objects."""
    for path in MODULES:
        name = module_name(path)
        found = find_forbidden(path.read_text(encoding="utf-8"), ALLOWED.get(name, set()))
        assert not found, name


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
def test_forbidden_calls_are_found(source: str) -> None:
    """Each kind of forbidden import or call is reported."""
    assert find_forbidden(source, set())


def find_forbidden(source: str, allowed: set[str]) -> list[str]:
    """Return the forbidden imports and calls of a module."""
    refused = FORBIDDEN_MODULES - allowed
    found = []
    for part in ast.walk(ast.parse(source)):
        if isinstance(part, ast.Import):
            found += [a.name for a in part.names if a.name.split(".")[0] in refused]
        elif isinstance(part, ast.ImportFrom):
            module = part.module or ""
            # Taking an address apart connects to nothing.
            found += [module] if module.split(".")[0] in refused and module != "urllib.parse" else []
        elif isinstance(part, ast.Call):
            found += [name for name in _forbidden_names(part) if name not in allowed]
    return found


def _forbidden_names(call: ast.Call) -> list[str]:
    if isinstance(call.func, ast.Name):
        return [call.func.id] if call.func.id in FORBIDDEN_CALLS else []
    if not isinstance(call.func, ast.Attribute):
        return []
    owner, name = call.func.value, call.func.attr
    of = owner.id if isinstance(owner, ast.Name) else ""
    if (
        name in FORBIDDEN_METHODS
        or (name in FORBIDDEN_PROGRAMS and of == "os")
        or (name in FORBIDDEN_CALLS and of == "builtins")
    ):
        return [name]
    safe = any(k.arg == "allow_pickle" and getattr(k.value, "value", None) is False for k in call.keywords)
    return [f"{of}.load with objects"] if (of, name) == ("np", "load") and not safe else []

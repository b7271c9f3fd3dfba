"""Messages of gRPC: their classes work with whatever protobuf is installed."""

from __future__ import annotations

import ast

from test_layers import MODULES, module_name


def test_no_module_uses_generated_messages() -> None:
    """Modules that protoc has generated demand a version of protobuf, which a client beside the server may exclude."""
    used = []
    for path in MODULES:
        imports = [part for part in ast.walk(ast.parse(path.read_bytes())) if isinstance(part, ast.ImportFrom)]
        names = [f"{part.module}.{alias.name}" for part in imports for alias in part.names]
        used += [(module_name(path), name) for name in names if "_pb2" in name and "google.protobuf." not in name]
    assert used == []

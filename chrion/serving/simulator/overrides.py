"""Changes to the values of a scenario: ``--set key=value`` and ``--sweep key=a,b``.

A key is a path (``servers.gpu_memory_gb``, ``models.baseline.copies``, ``variants.gpu.jitter_cv``), or its last part
alone (``gpu_memory_gb``) if only one section has it, apart from classes and domains. A path that names no server, model
or variant changes all of them.
"""

from __future__ import annotations

import copy
import itertools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from chrion.common.suggestions import did_you_mean
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.serving.simulator.settings import SECTIONS
from chrion.serving.variants import VariantTable

#: Keys at the top level of a scenario.
TOP_KEYS = ("name", "description", "seed", "preload", "patterns", "shrink", "total_models", "catalogue", "use")
VARIANT_KEYS = VariantTable.__struct_fields__
#: Names of entries that a message lists.
_LISTED = 12


def parse_set(text: str) -> tuple[str, Any]:
    """Return the key and the value of ``key=value``; a value that is not TOML is text.

    Raises:
        OptionError: The text has another form.
    """
    key, equals, value = text.partition("=")
    if not (equals and key.strip() and value.strip()):
        raise wrong_value("--set", "key=value", text, hint="for example rate_per_s=8")
    return key.strip(), _value(value.strip())


def parse_sweep(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the key and the values of ``key=a,b,c``.

    Raises:
        OptionError: The text has another form.
    """
    key, equals, values = text.partition("=")
    parts = [part.strip() for part in values.split(",")]
    if not (equals and key.strip() and all(parts)):
        raise wrong_value("--sweep", "key=value,value", text, hint="for example rate_per_s=4,8,12")
    return key.strip(), tuple(_value(part) for part in parts)


def server_path(key: str) -> list[str]:
    """Return the full path of a key of a scenario with servers.

    Raises:
        OptionError: No section has it, or several sections have it.
    """
    path = key.split(".")
    if len(path) > 1:
        return path
    homes = ["variants"] if key in VARIANT_KEYS else []
    homes += [name for name, kind in SECTIONS.items() if key in kind.__struct_fields__]
    if homes[1:] in (["classes"], ["domains"]):  # a key of models or servers, too, which alone means theirs
        homes = homes[:1]
    if key in SECTIONS:
        raise OptionError(
            f"key {key!r} is a section", hint=f"use {key}.{SECTIONS[key].__struct_fields__[0]} or another"
        )
    if len(homes) != 1:
        if homes:
            raise OptionError(f"ambiguous key {key!r}: expected one of {', '.join(f'{home}.{key}' for home in homes)}")
        known = [*VARIANT_KEYS, *TOP_KEYS, *(name for kind in SECTIONS.values() for name in kind.__struct_fields__)]
        raise OptionError(f"unknown key {key!r}", hint=did_you_mean(key, known, "docs/simulation.md lists all keys"))
    return [homes[0], key]


def parameter_grid(
    sweeps: Sequence[tuple[str, tuple[Any, ...]]], full_path: Callable[[str], list[str]] = server_path
) -> list[dict[str, Any]]:
    """Return every combination of the swept values; the last key changes fastest.

    Args:
        sweeps: Values by key.
        full_path: Returns the full path of a key in scenarios of this kind, or raises an :class:`OptionError`.

    Raises:
        OptionError: Two sweeps change the same key.
    """
    keys = [key for key, _ in sweeps]
    paths = [_sweep_path(key, full_path) for key in keys]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            first = keys[paths.index(path)]
            same = (
                f"key {keys[i]!r} occurs twice" if first == keys[i] else f"keys {first!r} and {keys[i]!r} are the same"
            )
            raise OptionError(f"--sweep: {same}", hint="list all values of a key in one option")
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(values for _, values in sweeps))]


def apply_sets(content: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a scenario's content with some values changed.

    Args:
        content: The scenario, with the models of its catalogue.
        sets: Values by key, without those of :data:`TOP_KEYS`.

    Raises:
        OptionError: No section has a key, several sections have it, or a path names no entry of the scenario.
    """
    if not sets:
        return dict(content)
    changed = copy.deepcopy(dict(content))
    for key, value in sets.items():
        path = server_path(key)
        for table in _tables(changed, path, key):
            table[path[-1]] = value
    return changed


def _sweep_path(key: str, full_path: Callable[[str], list[str]]) -> list[str]:
    """Return the full path of a key, or the key itself if it has none; a scenario then refuses it."""
    try:
        return full_path(key)
    except OptionError:
        return [key]


def _tables(content: dict[str, Any], path: list[str], key: str) -> list[dict[str, Any]]:
    """Return the tables in which a path sets the entry ``path[-1]``."""
    section, *rest = path
    if section == "variants":
        section, rest = "models", ["*", "variants", *rest[-2:]]
    if section not in SECTIONS:
        hint = did_you_mean(section, [*SECTIONS, "variants"])
        raise OptionError(f"key {key!r}: unknown section {section!r}", hint=hint)
    default: Any = [{}] if section in ("servers", "classes", "domains") else {}
    tables = _entries(content.setdefault(section, default), rest[:-1] if len(rest) > 1 else ["*"])
    matches = list(tables)
    if not matches:
        names = _names(content[section])
        hint = next((hint for name in rest[:-1] if (hint := did_you_mean(name, names, "-")) != "-"), "")
        raise OptionError(
            f"key {key!r}: the scenario has no entry of that name",
            hint=hint or f"entries: {', '.join(names[:_LISTED])}",
        )
    return matches


def _names(node: Any) -> list[str]:
    """Return the names of the entries of a section, and of the variants of its models."""
    entries = [entry for entry in node if isinstance(entry, dict)] if isinstance(node, list) else []
    names = [str(entry["name"]) for entry in entries if "name" in entry]
    variants = (entry.get("variants") for entry in entries)
    return list(dict.fromkeys([*names, *(name for table in variants if isinstance(table, dict) for name in table)]))


def _entries(node: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the tables that a path leads to; ``*`` or a missing name matches all entries."""
    if isinstance(node, list):
        name, rest = (path[0], path[1:]) if path else ("*", [])
        for entry in node:
            if isinstance(entry, dict) and name in ("*", entry.get("name")):
                yield from _entries(entry, rest)
    elif isinstance(node, dict):
        if not path or path == ["*"]:
            yield node
        elif path == ["variants"]:
            variants = node.get("variants")
            tables = variants.values() if isinstance(variants, dict) else ()
            yield from (table for table in tables if isinstance(table, dict))
        elif path[0] in node:
            yield from _entries(node[path[0]], path[1:])


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text

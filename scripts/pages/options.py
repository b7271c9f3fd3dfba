"""Tables of the page on options, from the table that sessions use."""

from __future__ import annotations

from collections.abc import Mapping

from chrion.runtime.options.table import (
    ARGUMENTS,
    RUN_KEYS,
    RUN_OPTIONS,
    SESSION_KEYS,
    SESSION_OPTIONS,
    Option,
    Treatment,
)

TABLES: Mapping[str, Mapping[str, Option]] = {
    "Session options": SESSION_OPTIONS,
    "Session configuration keys": SESSION_KEYS,
    "Run options": RUN_OPTIONS,
    "Run configuration keys": RUN_KEYS,
    "Arguments of InferenceSession": ARGUMENTS,
}


def option_tables() -> str:
    """Return a section for each kind of option."""
    return "\n\n".join(f"## {title}\n\n{format_table(options)}" for title, options in TABLES.items())


def format_table(options: Mapping[str, Option]) -> str:
    """Return one table, sorted by treatment and name."""
    order = list(Treatment)
    rows = sorted(options.values(), key=lambda o: (order.index(o.treatment), o.name))
    cells = [f"| `{o.name}` | {o.treatment.value} | {o.why}{format_harmless_values(o)} |" for o in rows]
    return "\n".join(["| option | treatment | explanation |", "| --- | --- | --- |", *cells])


def format_harmless_values(option: Option) -> str:
    """Describe the values of a configuration key that do not make the model run plain, although others do."""
    shown = [f"`{value}`" for value in option.harmless or () if value and option.treatment is Treatment.PLAIN]
    return f" (except {', '.join(shown)})" if shown else ""

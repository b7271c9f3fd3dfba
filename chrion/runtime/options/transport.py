"""Session options as plain data, from which another process creates equal options.

The data contains the options that a cut session honours; with others, no other process needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

from chrion.runtime.options.session_options import read_attributes, read_entries

Data = Mapping[str, Mapping[str, Any]]


def options_to_data(options: ort.SessionOptions | None) -> Data | None:
    """Return the honoured options as data for JSON."""
    if options is None:
        return None
    values = read_attributes(options).items()
    plain = {name: v if isinstance(v, bool | int | float | str) else int(v) for name, v in values}
    return {"attributes": plain, "entries": dict(read_entries(options))}


def options_from_data(data: Data | None) -> ort.SessionOptions | None:
    """Create session options from the result of :func:`options_to_data`."""
    if data is None:
        return None
    options = ort.SessionOptions()
    for name, value in data["attributes"].items():
        kind = type(getattr(options, name))  # enumerations are stored as numbers
        if getattr(options, name) != kind(value):
            setattr(options, name, kind(value))
    for key, value in data["entries"].items():
        options.add_session_config_entry(key, value)
    return options


def copy_options(options: ort.SessionOptions | None) -> ort.SessionOptions:
    """Create session options with the same honoured options."""
    return options_from_data(options_to_data(options)) or ort.SessionOptions()

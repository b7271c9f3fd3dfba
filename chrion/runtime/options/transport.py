"""Session options as plain data, from which another process creates equal options.

Options that Python cannot read back (registered libraries of operators, added initialisers) are not part of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

from chrion.runtime.options.session_options import readable_attributes, readable_entries

Data = Mapping[str, Mapping[str, Any]]


def options_to_data(options: ort.SessionOptions | None) -> Data | None:
    """Return the options that Python can read, as data for JSON."""
    if options is None:
        return None
    values = readable_attributes(options).items()
    plain = {name: v if isinstance(v, bool | int | float | str) else int(v) for name, v in values}
    return {"attributes": plain, "entries": dict(readable_entries(options))}


def options_from_data(data: Data | None) -> ort.SessionOptions | None:
    """Create session options from the result of :func:`options_to_data`."""
    return None if data is None else _create(data)


def copy_options(options: ort.SessionOptions | None) -> ort.SessionOptions:
    """Create session options that are equal in all that Python can read."""
    data = options_to_data(options)
    return ort.SessionOptions() if data is None else _create(data)


def _create(data: Data) -> ort.SessionOptions:
    options = ort.SessionOptions()
    for name, value in data["attributes"].items():
        kind = type(getattr(options, name))  # enumerations are stored as numbers
        if getattr(options, name) != kind(value):
            setattr(options, name, kind(value))
    for key, value in data["entries"].items():
        options.add_session_config_entry(key, value)
    return options

"""Transport of a session's configuration to another process."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph.opened_model import OpenedModel
from chrion.runtime.options.session_options import (
    BASELINE_KEYS,
    INHERITED_KEYS,
    fingerprint,
    options_from_data,
    options_to_data,
)
from chrion.runtime.selection.configuration import SessionConfig, config_from_data, config_to_data
from property_tests import examples

ATTRIBUTES = {
    "enable_cpu_mem_arena": st.booleans(),
    "enable_mem_pattern": st.booleans(),
    "enable_mem_reuse": st.booleans(),
    "execution_mode": st.sampled_from([ort.ExecutionMode.ORT_SEQUENTIAL, ort.ExecutionMode.ORT_PARALLEL]),
    "execution_order": st.sampled_from([ort.ExecutionOrder.DEFAULT, ort.ExecutionOrder.PRIORITY_BASED]),
    "graph_optimization_level": st.sampled_from(list(ort.GraphOptimizationLevel.__members__.values())),
    "inter_op_num_threads": st.integers(0, 64),
    "intra_op_num_threads": st.integers(0, 64),
    "log_severity_level": st.integers(0, 4),
    "log_verbosity_level": st.integers(0, 9),
    "logid": st.text("abc \u00e4\u4e2d"),
    "use_deterministic_compute": st.booleans(),
}
ENTRIES = st.dictionaries(
    st.sampled_from([*INHERITED_KEYS, *BASELINE_KEYS]), st.sampled_from(["0", "1", "", "a;b", "\u00e4"])
)


@examples(100)
@given(st.fixed_dictionaries({}, optional=ATTRIBUTES), ENTRIES)
def test_options_survive_the_transport(attributes: dict[str, Any], entries: dict[str, str]) -> None:
    """Options are equal in the other process, and different options have different fingerprints."""
    options = ort.SessionOptions()
    for name, value in attributes.items():
        setattr(options, name, value)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    data = json.loads(json.dumps(options_to_data(options)))
    made = options_from_data(data)
    assert made is not None
    assert fingerprint(made) == fingerprint(options)
    assert {name: getattr(made, name) for name in attributes} == attributes
    assert {key: made.get_session_config_entry(key) for key in entries} == entries


def test_missing_options_stay_missing() -> None:
    """A session without options differs from one with default options."""
    assert options_from_data(options_to_data(None)) is None
    assert fingerprint(None) != fingerprint(ort.SessionOptions())


def test_the_configuration_survives_the_transport() -> None:
    """All of the configuration is sent, except a plan, which needs no tuning."""
    config = SessionConfig(
        model=OpenedModel(b"model"),
        options=None,
        providers=[("CUDAExecutionProvider", {"device_id": "1"}), "CPUExecutionProvider"],
        provider_options=None,
        plan=None,
        slo_ms=5.0,
        alpha=0.3,
        cores=2,
        budget_mb=600.0,
        rest={"enable_fallback": 0},
        memory="paper",
    )
    found = config_from_data(io.BytesIO(b"".join(config_to_data(config))))
    assert found.model.source == b"model"
    assert replace(found, model=config.model) == config
    assert found.decision_key == config.decision_key


def test_a_configuration_with_objects_raises() -> None:
    """Provider options with objects are refused, since they cannot be sent to another process."""
    providers = [("CPUExecutionProvider", {"stream": object()})]
    config = SessionConfig(OpenedModel(b""), None, providers)
    with pytest.raises(TypeError):
        config_to_data(config)

"""Tests of session options that Python cannot read back, and of options that write files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

import chrion.native
from chrion import HybridSession
from chrion.errors import UnsafeModelError
from chrion.runtime.options.probe import replaces_weights
from helpers import FLOAT, assert_equal, node, value
from option_cases import (
    CPU,
    DOUBLED,
    FEED,
    Change,
    chain,
    check_session,
    cut,
    doubled,
    options,
    ort_value,
    plain,
)
from random_plans import random_plan
from seams.execution import around, note


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder, in which files that a session writes appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Methods of SessionOptions.


def test_an_added_initializer_replaces_the_weight() -> None:
    """Outputs are those of the added weight, not of the model's own."""
    given = options(lambda o: o.add_initializer("w", doubled()))
    with cut(chain(), given) as session:
        assert "'add_initializer'" in session.explain()
        (found,) = session.run(None, FEED)
    assert_equal([found], plain(chain(), given).run(None, FEED))
    assert not np.allclose(found, plain(chain(), options()).run(None, FEED)[0])


def test_added_initializers_are_detected_on_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both providers are probed, and a failing accelerator does not hide a weight that is replaced on the CPU."""
    tried: list[Any] = []

    def on_cpu(probe: Callable[..., Any], model: Any, given: Any, accelerator: Any = None) -> Any:
        tried.append(accelerator)
        if accelerator is not None and accelerator[0] == "broken":
            raise RuntimeError("broken")
        return probe(model, given)

    around(monkeypatch, "probe options", on_cpu)
    for name in ("working", "broken"):
        assert not replaces_weights(options(), ["w"], (name, {}))
        assert tried[-2:] == [None, (name, {})]
    assert replaces_weights(options(lambda o: o.add_initializer("w", doubled())), ["w"], ("broken", {}))


def test_an_added_initializer_of_another_name_changes_nothing() -> None:
    """The model is cut if no weight has the name of the added initialiser."""
    check_session(lambda o: o.add_initializer("other", ort_value(DOUBLED)))


@pytest.mark.parametrize("where", ["subgraph", "constant", "folded"])
def test_added_initializers_are_detected_wherever_the_weight_is(where: str) -> None:
    """A weight in an inner graph, in a Constant node, or removed by optimisation can be replaced."""
    model = chain()
    weight = model.graph.initializer[0]
    if where == "subgraph":
        inner = onnx.helper.make_graph([node("MatMul", ["b", "v"], ["z"])], "then", [], [value("z", FLOAT, [2, 4])])
        inner.initializer.add().CopyFrom(weight)
        inner.initializer[0].name = "v"
        model.graph.initializer.append(onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [1], [True]))
        model.graph.node[2].CopyFrom(node("If", ["c"], ["y"], name="if", then_branch=inner, else_branch=inner))
    elif where == "constant":
        model.graph.node.insert(0, node("Constant", [], ["v"], name="constant", value=weight))
        model.graph.node[3].input[1] = "v"
    else:
        model.graph.node.insert(0, node("Neg", ["v"], ["u"], name="negative"))
        model.graph.initializer.add().CopyFrom(weight)
        model.graph.initializer[1].name = "v"
        model.graph.node[3].input[1] = "u"
    given = options(lambda o: o.add_initializer("v", doubled()))
    with cut(model, given) as session:
        assert "'add_initializer'" in session.explain()
        assert_equal(session.run(None, FEED), plain(model, given).run(None, FEED))


def external(folder: Path) -> str:
    """Write the chain with its weight in a separate file, and return its path."""
    path = folder / "model.onnx"
    onnx.save(chain(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return str(path)


def test_added_external_initializers_replace_the_weight(folder: Path) -> None:
    """Outputs are those of the added weight, not of the weight in the file."""
    given = options(lambda o: o.add_external_initializers(["w"], [doubled()]))
    path = external(folder)
    with cut(path, given) as session:
        assert "add_external_initializers" in session.explain()
        assert_equal(session.run(None, FEED), plain(path, given).run(None, FEED))


def test_files_of_weights_in_memory_replace_those_on_the_disk(folder: Path) -> None:
    """Outputs are those of the weight file in memory; without one, the model is cut."""
    path, content = external(folder), DOUBLED.tobytes()
    given = options(
        lambda o: o.add_external_initializers_from_files_in_memory(["weights.bin"], [content], [len(content)])
    )
    with cut(path, given) as session:
        assert "'add_external_initializers_from_files_in_memory'" in session.explain()
        (found,) = session.run(None, FEED)
    assert_equal([found], plain(path, given).run(None, FEED))
    assert not np.allclose(found, plain(path, options()).run(None, FEED)[0])
    with cut(path, options()) as session:
        assert session.plan is not None


@pytest.mark.parametrize("way", ["name", "denotation"])
def test_fixed_dimensions_are_those_of_the_session(way: str) -> None:
    """The session shows fixed dimensions, and requests must have them."""

    def change(made: ort.SessionOptions) -> None:
        if way == "name":
            made.add_free_dimension_override_by_name("rows", 2)
        else:
            made.add_free_dimension_override_by_denotation("DATA_BATCH", 2)

    reference = plain(chain(free=True), options(change))
    with cut(chain(free=True), options(change)) as session:
        assert "'add_free_dimension_override_by_name'" in session.explain()
        assert [i.shape for i in session.get_inputs()] == [i.shape for i in reference.get_inputs()] == [[2, 4]]
        assert_equal(session.run(None, FEED), reference.run(None, FEED))
        for either in (session, reference):
            with pytest.raises(InvalidArgument):
                either.run(None, {"x": np.ones((3, 4), np.float32)})


def test_other_fixed_dimensions_change_nothing() -> None:
    """If no dimension of the model is fixed, the model is cut and its dimensions stay symbolic."""
    with cut(chain(free=True), options(lambda o: o.add_free_dimension_override_by_name("columns", 2))) as session:
        session.run(None, FEED)
        assert session.plan is not None


def choose_cpu(made: ort.SessionOptions) -> None:
    """Select the CPU device."""
    made.add_provider_for_devices([d for d in ort.get_ep_devices() if d.ep_name == CPU], {})


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.add_provider(CPU, {}),
        choose_cpu,
        lambda o: o.set_provider_selection_policy(ort.OrtExecutionProviderDevicePolicy.PREFER_CPU),
        lambda o: o.set_provider_selection_policy_delegate(lambda devices, *_: devices[:1]),
    ],
)
def test_providers_in_the_options_are_used(change: Change) -> None:
    """The model runs plain, so that one session reads the providers in the options."""
    with HybridSession(chain(), options(change), plan=partial(random_plan, pick=Random(0))) as session:
        assert "'has_providers'" in session.explain()
        assert_equal(session.run(None, FEED), plain(chain(), options()).run(None, FEED))


def test_a_cancelled_load_raises() -> None:
    """A cancelled load raises InferenceSession's exception."""
    given = options(lambda o: o.set_load_cancellation_flag(True))
    with pytest.raises(Exception) as expected:  # noqa: PT011 - the type is compared below
        plain(chain(), given)
    with pytest.raises(type(expected.value)):
        cut(chain(), given)


def test_a_library_without_operators_changes_nothing() -> None:
    """The model is cut if a registered library contains no operators."""
    library = str(Path(chrion.native.__file__).with_name("liblanes.so"))
    check_session(lambda o: o.register_custom_ops_library(library))


def test_invalid_options_raise_onnxruntimes_exception() -> None:
    """Invalid options are refused, although no segment would receive them."""
    check_session(
        lambda o: o.add_session_config_entry("session.intra_op_thread_affinities", "1;2;3;4;5;6;7;8;9"),
        "",
    )


# Files.


@pytest.mark.parametrize("planned", [True, False])
def test_one_profile_is_written(planned: bool) -> None:  # noqa: FBT001 - a parameter
    """Only the session that runs the model writes a profile, not those that are opened for tuning."""
    given = options(lambda o: setattr(o, "enable_profiling", True))
    make = cut if planned else partial(HybridSession, providers=[CPU])
    with make(chain(), given) as session:
        session.run(None, FEED)
        start_ns, profile = session.get_profiling_start_time_ns(), session.end_profiling()
    assert start_ns > 0
    assert [str(path) for path in Path().glob("*")] == [profile]
    assert "relu" in Path(profile).read_text()


def test_without_profiling_its_end_is_empty() -> None:
    """Without profiling ``end_profiling`` returns an empty text, as InferenceSession does."""
    reference = plain(chain(), options())
    for planned in (cut(chain()), HybridSession(chain(), cores=1)):
        with planned as session:
            assert session.end_profiling() == reference.end_profiling()
            assert session.get_profiling_start_time_ns() == reference.get_profiling_start_time_ns()


def test_the_optimised_model_is_written_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the session that runs the model writes the optimised model."""
    opened = note(monkeypatch, "open a plain engine")
    given = options(lambda o: setattr(o, "optimized_model_filepath", "optimised.onnx"))
    with HybridSession(chain(), given, [CPU]) as session:
        assert "'optimized_model_filepath'" in session.explain()
        session.run(None, FEED)
    assert len(opened) == 1
    assert [path.name for path in folder.glob("*")] == ["optimised.onnx"]


def test_models_with_outside_weights_are_refused_with_any_options(folder: Path) -> None:
    """Weights outside the model's folder are refused, also if the options make the model run plain."""
    (folder / "inside").mkdir()
    path = external(folder / "inside")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../weights.bin"
    onnx.save(model, path)
    with pytest.raises(UnsafeModelError):
        HybridSession(path, options(lambda o: setattr(o, "enable_profiling", True)))

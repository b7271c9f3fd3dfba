"""Tensors of the protocol: binary data and JSON, against numpy and the protocol's examples."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from chrion.serving.server import tensors
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.rest_codec import parse_request
from chrion.serving.server.sessions import run_failure
from chrion.serving.server.tensors import DTYPES, TensorSpec, unequal_sizes

NUMBERS = sorted(set(DTYPES) - {"BYTES", "BF16"})


def written(datatype: str, array: tensors.Array) -> list[object]:
    """Return the elements of a tensor as its JSON has them."""
    found: list[object] = json.loads(b"[%b]" % b"".join(tensors.json_text(datatype, array)))
    return found


@given(data=st.data(), datatype=st.sampled_from(NUMBERS))
def test_numbers_survive_both_ways(data: st.DataObject, datatype: str) -> None:
    """Binary data and JSON of any array give the array back, bit for bit."""
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = data.draw(arrays.arrays(DTYPES[datatype], shape))
    raw = tensors.to_raw(datatype, array)
    assert raw == array.tobytes()
    assert tensors.from_raw("x", datatype, list(shape), raw).tobytes() == raw
    if datatype.startswith("FP") and not np.isfinite(array).all():
        return  # a NaN has many representations
    nested, flat = array.tolist(), written(datatype, array)
    for given_ in (flat, nested) if shape else (flat,):
        assert tensors.from_json("x", datatype, list(shape), given_).tobytes() == raw


@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=5))
def test_strings_survive_both_ways(texts: list[str]) -> None:
    """Texts are their length and their UTF-8, whatever they contain."""
    array = np.array([*texts, ""], object)[:-1]
    raw = tensors.to_raw("BYTES", array)
    assert raw == b"".join(struct.pack("<I", len(t.encode())) + t.encode() for t in texts)
    assert tensors.from_raw("x", "BYTES", [len(texts)], raw).tolist() == texts
    assert tensors.from_json("x", "BYTES", [len(texts)], texts).tolist() == texts


@given(raw=st.binary(max_size=30), elements=st.integers(0, 5))
def test_damaged_strings_are_refused_or_whole(raw: bytes, elements: int) -> None:
    """Random bytes are either refused, or exactly the binary data of what they are read as."""
    found = None
    with contextlib.suppress(RequestFailure):
        found = tensors.from_raw("x", "BYTES", [elements], raw)
    assert found is None or tensors.to_raw("BYTES", found) == raw


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("INT8", [128]), ("UINT8", [-1]), ("UINT64", [2**64]), ("INT64", [2**63]), ("INT32", [1.5]), ("BOOL", [1])],
)
def test_elements_out_of_range_are_refused(datatype: str, data: list[Any]) -> None:
    """An element that its type cannot hold is an error; it is not rounded or wrapped."""
    with pytest.raises(RequestFailure) as refused:
        tensors.from_json("x", datatype, [1], data)
    assert refused.value.status is Status.INVALID


@given(value=st.floats(width=32, allow_nan=False))
def test_bfloat16_is_written_as_its_value(value: float) -> None:
    """BF16, which numpy lacks, is the upper half of FP32."""
    bits = np.array([value], np.float32).view(np.uint32) & 0xFFFF0000
    expected = bits.view(np.float32)
    assert written("BF16", (bits >> 16).astype(np.uint16)) == expected.tolist()


@pytest.mark.parametrize("shape", [(1, 4), (7, 4)])
def test_free_dimensions_take_any_size(shape: tuple[int, ...]) -> None:
    """A shape fits if its fixed dimensions do, or if even the number of dimensions is free."""
    tensors.check_input(TensorSpec("x", "FP32", (-1, 4)), "FP32", shape)
    tensors.check_input(TensorSpec("x", "FP32", None), "FP32", shape)
    with pytest.raises(RequestFailure):
        tensors.check_input(TensorSpec("x", "FP32", (-1, 5)), "FP32", shape)


def test_the_example_of_the_binary_extension() -> None:
    """The request in the description of the extension: one binary and one JSON input."""
    header = (
        b'{"model_name":"mymodel","inputs":[{"name":"input0","shape":[2,2],"datatype":"UINT32",'
        b'"parameters":{"binary_data_size":16}},{"name":"input1","shape":[3],"datatype":"BOOL","data":[true,false,true]}],'
        b'"outputs":[{"name":"output0","parameters":{"binary_data":true}}]}'
    )
    request = parse_request(header + struct.pack("<4I", 1, 2, 3, 4), str(len(header)))
    assert request.feeds["input0"][1].tolist() == [[1, 2], [3, 4]]
    assert request.feeds["input1"][1].tolist() == [True, False, True]
    assert request.outputs == {"output0": True}


@pytest.mark.parametrize("datatype", ["UINT8", "FP32", "BYTES"])
def test_huge_shapes_without_elements_are_refused(datatype: str) -> None:
    """Numpy has no array of such a shape, although it would be empty; the largest one it has is accepted."""
    most = (2**63 - 1) // DTYPES[datatype].itemsize
    assert tensors.from_raw("x", datatype, [0, most], b"").shape == (0, most)
    for shape in ([0, most + 1], [2**62, 2**62, 0]):
        for build in (tensors.from_raw, tensors.from_json, tensors.from_contents):
            data: Any = b"" if build is tensors.from_raw else []
            with pytest.raises(RequestFailure, match=r"shape: .* although it has no elements|at least 0"):
                build("x", datatype, shape, data)


@pytest.mark.parametrize(
    ("names", "status", "where"),
    [
        (("rows", ""), Status.INVALID, "dimension 'rows'"),
        (("", ""), Status.INTERNAL, "the first dimension"),
        (("", "width"), Status.INVALID, "dimension 'width'"),
    ],
)
def test_only_a_named_dimension_makes_a_failure_the_clients(names: tuple[str, str], status: Status, where: str) -> None:
    """Inputs whose free first dimensions have no name may differ, so that the failure stays the server's."""
    inputs = [TensorSpec(name, "FP32", (-1, -1), names) for name in "ab"]
    feeds = {"a": ("FP32", np.zeros((2, 2), np.float32)), "b": ("FP32", np.zeros((1, 1), np.float32))}
    failure = run_failure("m", RuntimeError("broken"), 1 << 30, unequal_sizes(inputs, feeds))
    assert failure.status is status
    assert f"broken; inputs differ in {where}: 2 in a; 1 in b" in str(failure)
    equal = run_failure("m", RuntimeError("broken"), 1 << 30, unequal_sizes(inputs, dict.fromkeys("ab", feeds["a"])))
    assert (equal.status, str(equal)) == (Status.INTERNAL, "model 'm': broken")

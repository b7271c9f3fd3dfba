"""Bodies of JSON: numbers of tensors are cut out of them, and what remains is limited."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.json_bodies import parse_body, parse_tensors
from chrion.serving.server.number_text import NumberText
from chrion.serving.server.rest_codec import InferenceRequest, build_response, parse_request
from chrion.serving.server.tensors import TensorSpec

#: More than a body that is parsed as a whole.
PADDING = " " * 70_000


def request(data: str, *, datatype: str = "FP64", shape: Any = (5000,), more: str = "") -> bytes:
    """Return a body above that size with one input."""
    head = f'{{"name": "x", "datatype": "{datatype}", "shape": {json.dumps(shape)}, "data": {data}{more}}}'
    return f'{{{PADDING}"inputs": [{head}]}}'.encode()


def read(body: bytes) -> np.ndarray[Any, Any]:
    return parse_request(body, None).feeds["x"][1]


@given(
    array=arrays.arrays(
        np.float64,
        arrays.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=40).filter(lambda s: 600 < np.prod(s) < 9000),
    ),
    space=st.sampled_from(["", " ", "\n\t "]),
    flat=st.booleans(),
)
def test_long_lists_give_their_numbers(array: np.ndarray[Any, Any], space: str, flat: bool) -> None:  # noqa: FBT001
    """Numbers, infinities included, are read bit for bit from flat and nested lists with any white space."""
    data = json.dumps(array.ravel().tolist() if flat else array.tolist(), separators=("," + space, ":"))
    body = request(data.replace("]", space + "]"), shape=array.shape)
    assert np.array_equal(read(body), array, equal_nan=True)


@pytest.mark.parametrize("place", [1, 2, 40_000, 99_999])
@pytest.mark.parametrize("damage", [",", "[", "]", "1 2", "}", "{", '"', "'1'", "x", "\0", "\xe9", "--"])
def test_damaged_lists_are_refused(place: int, damage: str) -> None:
    """Whatever stands in a list that is no number, the body is refused."""
    data = "[" + "1.125," * 30_000 + "1]"
    with pytest.raises(RequestFailure) as refused:
        read(request(data[:place] + damage + data[place:], shape=[30_001]))
    assert refused.value.status in (Status.INVALID, Status.TOO_LARGE)


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        ("[" + "1," * 4999 + "1]", [4999], "expected 4999 elements for shape .4999., found 5000"),
        ("[" + "1," * 4999 + "true]", [5000], "elements cannot be bool"),
        ("[" + "1," * 4999 + "1.5]", [5000], "elements cannot be float"),
        ("[" + "1," * 4999 + "[1]]", [5000], "lists and elements at the same depth"),
        ("[[" + "1," * 2499 + "1],[" + "1," * 2498 + "1,1]]", [5000], None),
        ("[[" + "1," * 2498 + "1],[" + "1," * 2500 + "1]]", [2, 2500], "lists of different lengths"),
        ("[[" + "1," * 2499 + "1],[" + "1," * 2499 + "1]],1]", [2, 2500], "expected 5000 elements"),
        ("[" + "1," * 4999 + "300]", [5000], "out of the range of INT8"),
    ],
)
def test_lists_that_do_not_fit(data: str, shape: list[int], message: str | None) -> None:
    """A long list is accepted and refused like a short one."""
    body = request(data, datatype="INT8", shape=shape)
    if message is None:
        assert read(body).shape == tuple(shape)
        return
    with pytest.raises(RequestFailure, match=message) as refused:
        read(body)
    assert refused.value.status is Status.INVALID


def test_a_key_in_a_text_is_no_list() -> None:
    """What looks like the data of a tensor inside a text stays text."""
    text = '"data":[' + "1," * 5000 + "1]"
    assert parse_tensors(memoryview(PADDING.encode() + json.dumps({"id": text}).encode()), lambda _: None) == {
        "id": text
    }


def test_constants_are_no_placeholders() -> None:
    """A constant beside a long list is read as what it is, and the list, too."""
    body = request("[" + "1," * 4999 + "1]", more=', "parameters": {"a": NaN, "data": Infinity}')
    found = parse_tensors(memoryview(body), lambda _: None)["inputs"][0]
    assert found["parameters"]["data"] == float("inf")
    assert found["data"] == [1] * 5000


def test_two_long_lists_keep_their_order() -> None:
    """Each tensor gets its own numbers, also if a key follows its data."""
    lists = ["[" + ",".join([digit] * 5000) + "]" for digit in "12"]
    entries = ",".join(
        f'{{"data":{data},"name":"{name}","datatype":"INT64","shape":[5000]}}'
        for name, data in zip("ab", lists, strict=True)
    )
    feeds = parse_request(f'{{"inputs":[{entries}]}}{PADDING}'.encode(), None).feeds
    assert [set(feeds[name][1].tolist()) for name in "ab"] == [{1}, {2}]


@pytest.mark.parametrize(
    ("document", "about"),
    [
        (b"[" + b"[]," * 40_000 + b"[]]", "40002 of them lists and objects"),
        (b"[" + b"1," * 200_000 + b"1]", "200002 values"),
        (b'"' + b"a" * 5_000_000 + b'"', "bytes of JSON beside the numbers of tensors"),
        (b'{"inputs":[{"data":[' + b"1," * 40_000_000 + b"1]}]}", "bytes of numbers in JSON"),
        (
            b'{"inputs":[{"data":[' + b"[]," * 400_000 + b'[]],"name":"x","datatype":"FP32","shape":[0]}]}',
            "data may have",
        ),
    ],
    ids=["lists", "values", "bytes", "numbers", "empty lists"],
)
def test_documents_over_a_limit_name_it(document: bytes, about: str) -> None:
    """Bodies whose parsers would hold all threads are refused, with a word about binary data."""
    with pytest.raises(RequestFailure, match=about) as refused:
        parse_request(document, None)
    assert refused.value.status is Status.TOO_LARGE
    assert "binary data" in refused.value.message


def test_outputs_with_too_much_json_are_refused() -> None:
    """Outputs over the limit of text are refused, with a word about binary data, which has none."""
    texts = np.array(["x" * 8_000_000] * 9, object)
    found = [(TensorSpec("y", "BYTES", (-1,)), texts)]
    with pytest.raises(RequestFailure, match="binary_data_output") as refused:
        build_response(InferenceRequest(), ("m", "1"), found)
    assert refused.value.status is Status.TOO_LARGE
    assert len(build_response(InferenceRequest(binary=True), ("m", "1"), found)[0]) > 72_000_000


def test_memory_is_taken_for_values_and_arrays() -> None:
    """The values of a document are counted before it is parsed, and an array before it is made."""
    taken: list[int] = []
    parse_body(b"[" + b"1," * 999 + b"1]", taken.append)
    assert 1000 * 64 < sum(taken) < 1000 * 80
    taken.clear()
    found = parse_request(request("[" + "1," * 99_999 + "1]", shape=[100_000]), None, taken.append)
    assert found.feeds["x"][1].nbytes in taken
    assert sum(taken) < 2_000_000


def test_reading_ends_with_its_request() -> None:
    """A list of a client that has left is not read to its end."""
    calls = []

    def take(size: int) -> None:
        calls.append(size)
        if len(calls) > 3:
            raise RequestFailure(Status.CANCELLED, "left")

    text = NumberText(memoryview(b"[" + b"1," * 999_999 + b"1]"), take, lambda: None)
    with pytest.raises(RequestFailure, match="left"):
        text.read([1_000_000], 1_000_000, np.dtype(np.int8), lambda values: np.array(values, np.int8))
    assert len(calls) == 4

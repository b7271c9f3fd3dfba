"""Digests of models without the values of their weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from chrion.graph.model_digest import model_digest
from chrion.graph.opened_model import OpenedModel
from property_tests import examples

LARGE, SMALL = (64, 64), (4,)


def product(seed: int = 0, *, raw: bool = True) -> onnx.ModelProto:
    """Return a matrix product and a sum, with a large weight of random values and a small one."""
    values = np.random.default_rng(seed).normal(size=LARGE).astype(np.float32)
    large = numpy_helper.from_array(values, "w") if raw else helper.make_tensor("w", 1, LARGE, values.ravel())
    small = numpy_helper.from_array(np.arange(4, dtype=np.float32), "b")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("LeakyRelu", ["p"], ["y"], alpha=0.5)],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
        [large, small],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def digest_of(content: bytes) -> str:
    """Return the digest of a model's bytes."""
    return OpenedModel(content).digest


SOURCE = product().SerializeToString()
#: Positions of the large weight's values.
VALUES = product().graph.initializer[0].raw_data
FIRST = SOURCE.index(VALUES)


@examples(100)
@given(st.integers(0, len(SOURCE) - 1), st.integers(1, 255))
def test_every_byte_but_the_values_of_large_weights_counts(position: int, change: int) -> None:
    """A model with any other byte is another model; one with other values is the same."""
    changed = bytearray(SOURCE)
    changed[position] ^= change
    is_value = FIRST <= position < FIRST + len(VALUES)
    assert (digest_of(bytes(changed)) == digest_of(SOURCE)) is is_value


@pytest.mark.parametrize("raw", [True, False])
def test_a_retrained_model_has_the_same_digest(raw: bool) -> None:  # noqa: FBT001
    """Whichever field of a tensor has the values; values of up to a kilobyte may be shapes, which count."""
    before = product(1, raw=raw)
    assert digest_of(product(2, raw=raw).SerializeToString()) == digest_of(before.SerializeToString())
    small = product(1, raw=raw)
    small.graph.initializer[1].raw_data = bytes(16)
    assert digest_of(small.SerializeToString()) != digest_of(before.SerializeToString())


def test_copies_and_touched_files_keep_the_digest(tmp_path: Path) -> None:
    """The digest is that of the bytes, also with external weights, whose file is not read."""
    proto = product()
    plain, copy = tmp_path / "m.onnx", tmp_path / "other" / "n.onnx"
    plain.write_bytes(SOURCE)
    copy.parent.mkdir()
    shutil.copy(plain, copy)
    os.utime(copy, (1.0, 2.0))
    assert OpenedModel(plain).digest == OpenedModel(str(copy)).digest == digest_of(SOURCE)
    beside = tmp_path / "e.onnx"
    onnx.save(proto, beside, save_as_external_data=True, location="w.bin", size_threshold=1024)
    before = OpenedModel(beside).digest
    (tmp_path / "w.bin").write_bytes(bytes(4 * 64 * 64))
    assert OpenedModel(beside).digest == before != digest_of(SOURCE)


def test_a_replaced_file_leaves_the_digest_of_the_model_that_was_opened(tmp_path: Path) -> None:
    """One that was changed in place has a digest that no other model has."""
    path, other = tmp_path / "m.onnx", product()
    other.graph.node[1].attribute[0].f = 0.25
    path.write_bytes(SOURCE)
    opened = OpenedModel(path)
    (tmp_path / "new").write_bytes(other.SerializeToString())
    (tmp_path / "new").rename(path)
    assert opened.digest == digest_of(SOURCE)
    opened = OpenedModel(path)
    path.write_bytes(SOURCE)
    assert opened.digest not in {digest_of(SOURCE), digest_of(other.SerializeToString())}
    assert OpenedModel(tmp_path / "missing.onnx").digest != OpenedModel(tmp_path / "gone.onnx").digest


def test_large_weights_are_not_read() -> None:
    """Of a model of 20 MB less than 100 KB is read."""
    model = product()
    model.graph.initializer[0].raw_data = bytes(20_000_000)
    content, read = model.SerializeToString(), 0

    def count(at: int, length: int) -> bytes:
        nonlocal read
        read += min(length, len(content) - at)
        return content[at : at + length]

    model_digest(count, len(content))
    assert read < 100_000


@examples(100)
@given(st.binary(max_size=400))
def test_any_file_has_a_digest_of_its_content(content: bytes) -> None:
    """What is no model, such as a file in onnxruntime's own format, is read as a whole."""
    for other in (content + b"\x07", b"\x07" + content):
        assert digest_of(content) != digest_of(other)


def test_a_file_of_very_many_fields_is_read_as_a_whole() -> None:
    """Reading its fields one by one could take minutes."""
    content = b"\x08\x01" * 1_200_000
    assert digest_of(content) != digest_of(content[:-2] + b"\x08\x02")


def test_the_digest_of_the_content_has_all_values(tmp_path: Path) -> None:
    """It is the same for a copy, and another one if a value of a large or of an external weight differs."""
    kept, retrained = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(product(), kept)
    onnx.save(product(1), retrained)
    shutil.copy(kept, tmp_path / "copy.onnx")
    digests = [OpenedModel(path).content_digest for path in (kept, tmp_path / "copy.onnx", retrained)]
    assert digests[0] == digests[1] == OpenedModel(kept.read_bytes()).content_digest
    assert digests[2] != digests[0]
    for seed, folder in enumerate(("e0", "e1")):
        (tmp_path / folder).mkdir()
        onnx.save(product(seed), tmp_path / folder / "m.onnx", save_as_external_data=True, size_threshold=0)
    first, second = (OpenedModel(tmp_path / folder / "m.onnx") for folder in ("e0", "e1"))
    assert first.content_digest != second.content_digest

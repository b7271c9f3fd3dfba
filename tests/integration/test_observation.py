"""What runs of a decoder show of its values, and what is left out of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import chrion
from chrion.generation.rewrites.decoder import decoder_signature, random_cache
from chrion.generation.rewrites.observation import Decoder, Size
from chrion.graph.ort_sessions import weights_folder_option
from decoder_support import PlainDecoder, small_decoder
from seams.execution import note


def with_int8_weights(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Store the large weights of a decoder as integers; return the shapes of what dequantises them, by name."""
    shapes = {}
    for tensor in [t for t in model.graph.initializer if np.prod(t.dims) > 4096]:
        value = numpy_helper.to_array(tensor)
        scale = np.float32(np.abs(value).max() / 127)
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(np.round(value / scale).astype(np.int8), f"{name}/int8"))
        model.graph.initializer.append(numpy_helper.from_array(scale, f"{name}/scale"))
        model.graph.node.insert(0, helper.make_node("DequantizeLinear", [tensor.name, f"{name}/scale"], [name], name))
        shapes[name] = value.shape
    return shapes


def test_dequantised_weights_are_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their shapes and types are known without them, and requests run in a batch with plain onnxruntime's tokens."""
    model = small_decoder("gpt2-decoder", hidden=96, inner=128)
    shapes = with_int8_weights(model)
    assert len(shapes) > 5
    graph = chrion.load(model)
    observed = note(monkeypatch, "observe values")
    seen = Decoder(graph, decoder_signature(graph), graph.model).seen
    ((proto, *_),) = (call.given for call in observed)
    assert not {output.name for output in proto.graph.output} & shapes.keys()
    for name, shape in shapes.items():
        assert seen.shapes[name] == tuple(Size(0, 0, n) for n in shape)
        assert seen.types[name] == np.float32
        assert name not in seen.constants
    plain = PlainDecoder(model)
    with chrion.Generator(graph, threads=1) as generator:
        assert generator.refused == ""
        assert generator.submit([1, 2, 3], 8).result(60) == plain.generate([1, 2, 3], 8)


def test_sizes_are_those_of_any_number_of_tokens() -> None:
    """What is found in short runs holds in a longer one of plain onnxruntime."""
    model = small_decoder("llama-decoder")
    graph = chrion.load(model)
    signature = decoder_signature(graph)
    seen = Decoder(graph, signature, graph.model).seen
    longer = onnx.ModelProto()
    longer.CopyFrom(graph.model)
    names = [name for node in longer.graph.node for name in node.output]
    del longer.graph.output[:]
    longer.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(*next(iter(weights_folder_option(graph.weights_folder).items())))
    session = ort.InferenceSession(longer.SerializeToString(), options, providers=["CPUExecutionProvider"])
    new, past = 9, 40
    caches = random_cache(signature, past)
    for name, value in zip(names, session.run(names, signature.feed([1] * new, past) | caches), strict=True):
        assert tuple(size and size(new, past) for size in seen.shapes[name]) == value.shape
        assert seen.types[name] == value.dtype
        if name in seen.sizes:
            assert [size(new, past) for size in seen.sizes[name]] == value.reshape(-1).tolist()

"""Models that onnxruntime's tools have quantized, fused, converted to half precision or optimized offline."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
import transformers as hf
from cases import Feed, case, main
from onnx import version_converter
from onnxconverter_common import float16 as common_float16
from onnxruntime import quantization
from onnxruntime.quantization import QuantFormat, QuantType, matmul_nbits_quantizer
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
from onnxruntime.transformers import float16, optimizer
from torch import nn
from torch_export import Subject, export, normal, seeded
from transformer_wrappers import SMALL, Positional, encoder, text_feed, with_past

#: Installed by pip for this family.
REQUIREMENTS = [
    "torch==2.13.0",
    "transformers==4.49.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
    "onnxconverter-common==1.16.0",
    "sympy==1.14.0",
]

#: Writes a model made from the one at a path, given requests as calibration data, to another path.
Tool = Callable[[Path, Sequence[Feed], Path], Any]


class Reader(quantization.CalibrationDataReader):
    """Requests as calibration data."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Feed | None:
        """Return the next request."""
        return next(self._feeds, None)


def tool(
    name: str, build: Callable[[], Subject], exporter: str, *, opset: int = 17, atol: float = 1e-4, rtol: float = 1e-3
) -> Callable[[Tool], Tool]:
    """Register a tool's work on an exported subject as a case.

    Args:
        name: Of the case.
        build: Makes the subject, which the TorchScript exporter writes first.
        exporter: The tool as its users call it.
        opset: Of the exported model.
        atol: Absolute tolerance for outputs. Quantized models round, so that equal results need some.
        rtol: Relative tolerance for outputs.
    """

    def register(work: Tool) -> Tool:
        @case(name, exporter=exporter, package="onnxruntime", rtol=rtol, atol=atol)
        def _make(path: Path) -> Sequence[Feed]:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "source.onnx"
                feeds = export(seeded(build), source, dynamo=False, opset=opset)
                work(source, feeds, path)
            return feeds

        return work

    return register


def _bert() -> Subject:
    model = hf.BertModel._from_config(hf.BertConfig(**SMALL), attn_implementation="eager")
    return encoder(model, ["last_hidden_state", "pooler_output"], "token_type_ids")


def _gpt2() -> Subject:
    config = hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return with_past(hf.GPT2LMHeadModel._from_config(config, attn_implementation="eager"), 4, 8)


def _llama() -> Subject:
    return with_past(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)), 2, 8)


def _vit() -> Subject:
    widths = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.ViTConfig(**widths, image_size=32, patch_size=8)
    model = hf.ViTModel._from_config(config, attn_implementation="eager", add_pooling_layer=False)
    feeds = [{"pixel_values": normal(batch, 3, 32, 32)} for batch in (2, 1, 4)]
    outputs = ["last_hidden_state"]
    return Subject(Positional(model, ["pixel_values"], outputs), feeds, outputs, {"pixel_values": {0: "batch"}})


class Residual(nn.Module):
    """A small convolutional network with a skip connection and a depthwise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Hardswish())
        self.pointwise = nn.Conv2d(16, 16, 1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        stem = self.stem(x)
        return self.head(torch.relu(self.pointwise(self.depthwise(stem)) + stem))


def _residual() -> Subject:
    feeds = [{"x": normal(*size)} for size in ((2, 3, 32, 32), (1, 3, 48, 32), (4, 3, 16, 16))]
    return Subject(Residual(), feeds, axes={"x": {0: "batch", 2: "height", 3: "width"}})


class LastStep(nn.Module):
    """A recurrent classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of all steps."""
        return self.head(self.layer(x)[0])


def _lstm() -> Subject:
    feeds = [{"x": normal(length, batch, 8)} for length, batch in ((5, 2), (3, 1), (8, 3))]
    return Subject(LastStep(), feeds, axes={"x": {0: "length", 1: "batch"}})


@tool("dynamic-int8-bert", _bert, "onnxruntime quantize_dynamic", opset=14, atol=0.05)
def _dynamic_bert(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    quantization.quantize_dynamic(source, path, weight_type=QuantType.QInt8)


@tool("dynamic-uint8-per-channel-llama", _llama, "onnxruntime quantize_dynamic", atol=0.05)
def _dynamic_llama(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    quantization.quantize_dynamic(source, path, per_channel=True, weight_type=QuantType.QUInt8)


@tool("dynamic-lstm", _lstm, "onnxruntime quantize_dynamic", atol=0.05)
def _dynamic_lstm(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    quantization.quantize_dynamic(source, path, op_types_to_quantize=["LSTM", "MatMul"])


@tool("dynamic-convolution", _residual, "onnxruntime quantize_dynamic", opset=13, atol=0.05)
def _dynamic_convolution(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    quantization.quantize_dynamic(source, path, weight_type=QuantType.QUInt8)


def _static(name: str, build: Callable[[], Subject], *, opset: int = 17, **options: Any) -> None:
    @tool(name, build, "onnxruntime quantize_static", opset=opset, atol=0.05)
    def _quantize(source: Path, feeds: Sequence[Feed], path: Path) -> None:
        prepared = source.with_name("prepared.onnx")
        quantization.quant_pre_process(source, prepared, skip_symbolic_shape=True)
        quantization.quantize_static(prepared, path, Reader(feeds[:1]), **options)


_static("static-qdq", _residual, quant_format=QuantFormat.QDQ)
_static("static-qoperator", _residual, opset=13, quant_format=QuantFormat.QOperator, activation_type=QuantType.QUInt8)
_static("static-qdq-per-channel", _residual, per_channel=True, activation_type=QuantType.QUInt8)
_static("static-qdq-percentile", _residual, calibrate_method=quantization.CalibrationMethod.Percentile)
_static("static-qdq-int16", _residual, activation_type=QuantType.QInt16)
_static("static-qdq-int4", _vit, opset=17, weight_type=QuantType.QInt4, op_types_to_quantize=["MatMul"])
_static("static-qdq-bert", _bert, opset=17, op_types_to_quantize=["MatMul", "Gemm"])
_static(
    "static-qoperator-vit",
    _vit,
    op_types_to_quantize=["MatMul", "Add"],
    quant_format=QuantFormat.QOperator,
    activation_type=QuantType.QUInt8,
)


def _fused(name: str, build: Callable[[], Subject], kind: str, *, opset: int = 14) -> None:
    @tool(name, build, "onnxruntime.transformers optimizer", opset=opset)
    def _optimize(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
        fused = optimizer.optimize_model(str(source), kind, num_heads=4, hidden_size=32, opt_level=0)
        fused.save_model_to_file(str(path))


_fused("fused-bert", _bert, "bert")
_fused("fused-gpt2", _gpt2, "gpt2")
_fused("fused-vit", _vit, "vit")
_fused("fused-llama", _llama, "gpt_neox", opset=17)


@tool("fused-and-dynamic-bert", _bert, "onnxruntime.transformers optimizer", opset=14, atol=0.05)
def _fused_and_dynamic(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    fused = optimizer.optimize_model(str(source), "bert", num_heads=4, hidden_size=32, opt_level=0)
    middle = source.with_name("fused.onnx")
    fused.save_model_to_file(str(middle))
    quantization.quantize_dynamic(middle, path, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT})


@tool("half-bert", _bert, "onnxruntime.transformers float16", atol=0.02, rtol=0.02)
def _half_bert(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=True), path)


@tool("half-blocked-vit", _vit, "onnxruntime.transformers float16", atol=0.02, rtol=0.02)
def _half_vit(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    blocked = ["Softmax", "LayerNormalization"]
    onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=True, op_block_list=blocked), path)


@tool("half-convolution", _residual, "onnxconverter-common float16", atol=0.02, rtol=0.02)
def _half_convolution(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    onnx.save(common_float16.convert_float_to_float16(onnx.load(source), keep_io_types=True), path)


def _blockwise(name: str, build: Callable[[], Subject], *, opset: int = 17, **options: Any) -> None:
    @tool(name, build, "onnxruntime matmul_nbits_quantizer", opset=opset, atol=1e-3)
    def _quantize(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
        model = onnx.load(source)
        if options.get("quant_format") == QuantFormat.QDQ:
            model = version_converter.convert_version(model, 21)  # the first with 4 bits
        made = matmul_nbits_quantizer.MatMulNBitsQuantizer(model, **options)
        made.process()
        made.model.save_model_to_file(str(path))


_blockwise("four-bits-llama", _llama, block_size=32, is_symmetric=True)
_blockwise("four-bits-asymmetric-bert", _bert, block_size=16, is_symmetric=False, accuracy_level=4)
_blockwise("four-bits-qdq-llama", _llama, block_size=32, quant_format=QuantFormat.QDQ)
_blockwise(
    "four-bits-gather-gpt2",
    _gpt2,
    block_size=32,
    op_types_to_quantize=("MatMul", "Gather"),
    quant_axes=(("MatMul", 0), ("Gather", 1)),
)
_blockwise("eight-bits-llama", _llama, bits=8, block_size=32)


@tool("bnb4-llama", _llama, "onnxruntime matmul_bnb4_quantizer", atol=1e-3)
def _bnb4(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    made = MatMulBnb4Quantizer(onnx.load(source), MatMulBnb4Quantizer.NF4, 32)
    made.process()
    made.model.save_model_to_file(str(path))


def _offline(name: str, build: Callable[[], Subject], level: str, *, opset: int = 17) -> None:
    @tool(name, build, "onnxruntime offline optimization", opset=opset)
    def _optimize(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 3
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


_offline("offline-basic-bert", _bert, "BASIC")
_offline("offline-extended-bert", _bert, "EXTENDED", opset=14)
_offline("offline-extended-convolution", _residual, "EXTENDED")
_offline("offline-all-convolution", _residual, "ALL")
_offline("offline-extended-gpt2", _gpt2, "EXTENDED")


@tool("symbolic-shapes-llama", _llama, "onnxruntime symbolic_shape_infer")
def _symbolic(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    onnx.save(SymbolicShapeInference.infer_shapes(onnx.load(source), auto_merge=True), path)


def _bert_pairs() -> Subject:
    feeds = [text_feed(2, length, "token_type_ids") for length in (8, 13, 5)]
    return replace(_bert(), feeds=feeds)


@tool("fixed-batch-bert", _bert_pairs, "onnxruntime make_dynamic_shape_fixed")
def _fixed(source: Path, _feeds: Sequence[Feed], path: Path) -> None:
    model = onnx.load(source)
    make_dim_param_fixed(model.graph, "batch", 2)
    onnx.save(model, path)


if __name__ == "__main__":
    sys.exit(main("ort_tools"))

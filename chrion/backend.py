"""An ONNX backend: an implementation of ``onnx.backend.base.Backend`` that runs models with HybridSession.

::

    import chrion.backend

    prepared = chrion.backend.prepare(model)
    outputs = prepared.run([x])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from chrion.common.wrong_values import wrong_value
from chrion.devices import CPU_PROVIDER, provider_name
from chrion.devices.probe import failure_reason
from chrion.errors import OptionError, ProviderError
from chrion.runtime.session import HybridSession

#: The keyword arguments that ``prepare`` passes to HybridSession; it ignores all others.
_OPTIONS = ("sess_options", "plan", "slo", "alpha", "cores", "strict")


class HybridRep(BackendRep):
    """A prepared model."""

    def __init__(self, session: HybridSession) -> None:
        self.session = session

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Run the model.

        Args:
            inputs: Arrays in the order of the model's inputs, arrays by name, or the array of a single input.

        Returns:
            The outputs as a named tuple, in the model's order.
        """
        names = [i.name for i in self.session.get_inputs()]
        outputs = self.session.run(None, _by_name(names, inputs))
        result: tuple[Any, ...] = namedtupledict("Outputs", [o.name for o in self.session.get_outputs()])(*outputs)
        return result


class HybridBackend(Backend):
    """A backend that runs models with HybridSession, on the devices ``CPU``, ``CUDA`` and ``CUDA:n``."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> bool:  # noqa: ARG003 - ONNX's signature
        """Return whether the device works; any model is accepted."""
        return cls.supports_device(device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether the device works on this machine."""
        try:
            provider, _ = _provider(device)
            return provider == CPU_PROVIDER or failure_reason(provider_name(provider)) is None
        except (OptionError, ProviderError):
            return False

    @classmethod
    def prepare(cls, model: onnx.ModelProto | bytes | str, device: str = "CPU", **kwargs: Any) -> HybridRep:
        """Prepare a model to run.

        Args:
            model: A ModelProto, its bytes, or a file.
            device: ``CPU``, ``CUDA`` or ``CUDA:n``.
            kwargs: ``plan``, ``slo``, ``alpha``, ``cores``, ``strict`` and ``sess_options`` are passed to
                HybridSession; others are ignored, since test suites pass their tolerances.

        Raises:
            OptionError: The device is not one of these.
            Exception: Any error of HybridSession.
        """
        provider, options = _provider(device)
        providers = [CPU_PROVIDER] if provider == CPU_PROVIDER else [(provider, options), CPU_PROVIDER]
        known = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        return HybridRep(cls.open(model, providers=providers, **known))

    @classmethod
    def open(cls, model: onnx.ModelProto | bytes | str, **options: Any) -> HybridSession:
        """Create the session of a prepared model."""
        return HybridSession(model, **options)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,  # noqa: ARG003 - inferred
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run a model of one operator.

        Args:
            node: The operator.
            inputs: Arrays for its inputs, without those that it omits.
            device: ``CPU``, ``CUDA`` or ``CUDA:n``.
            outputs_info: Ignored; onnxruntime infers the types of the outputs.
            kwargs: As for :meth:`prepare`; also ``opset_version``, the version of the operator's domain.
        """
        feed = {name: np.asarray(a) for name, a in _by_name([n for n in node.input if n], inputs).items()}
        return cls.run_model(_model_of_node(node, feed, kwargs.pop("opset_version", None)), feed, device, **kwargs)


def _provider(device: str) -> tuple[str, dict[str, str]]:
    kind, _, index = device.partition(":")
    if kind == "CPU" and index in {"", "0"}:
        return CPU_PROVIDER, {}
    if kind == "CUDA" and (index or "0").isdecimal():
        return "CUDAExecutionProvider", {"device_id": index or "0"}
    raise wrong_value("device", "CPU, CUDA or CUDA:n", device)


def _by_name(names: Sequence[str], inputs: Any) -> Mapping[str, Any]:
    if isinstance(inputs, Mapping):
        return inputs
    several = inputs if isinstance(inputs, list | tuple) else [inputs]
    given = [np.asarray(i) if isinstance(i, np.generic) else i for i in several]  # onnxruntime refuses numpy scalars
    if len(given) > len(names):
        raise ValueError(f"the model has {len(names)} inputs ({', '.join(names)}), got {len(given)}")
    return dict(zip(names, given, strict=False))


def _model_of_node(
    node: onnx.NodeProto, feed: Mapping[str, np.ndarray[Any, Any]], version: int | None
) -> onnx.ModelProto:
    """Return a model of one node; onnxruntime infers the types of its outputs."""
    graph = onnx.GraphProto(name=node.op_type, node=[node])
    for name, array in feed.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    for name in node.output:
        if name:
            graph.output.add().name = name
    if version is None and onnx.defs.has(node.op_type, node.domain):
        version = onnx.defs.get_schema(node.op_type, domain=node.domain).since_version
    opsets = [helper.make_opsetid(node.domain, version or 1)]
    oldest = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
    return helper.make_model(graph, opset_imports=opsets, ir_version=oldest)


is_compatible = HybridBackend.is_compatible
supports_device = HybridBackend.supports_device
prepare = HybridBackend.prepare
run_model = HybridBackend.run_model
run_node = HybridBackend.run_node

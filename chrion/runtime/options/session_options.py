"""Effect of the caller's options on a session whose model may be cut.

The options that a cut session honours are listed here. Any other that differs from its default is the reason why the
model runs plain. :mod:`chrion.runtime.options.probe` finds those that Python cannot read. onnxruntime does not list the
configuration keys that are set, so the keys that have an effect on such a session are listed too; others are not
detected.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from chrion.graph.ort_sessions import first_line
from chrion.runtime.options.thread_limit import given_threads

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

#: Further keyword arguments of InferenceSession; it ignores all others.
_ARGUMENTS = ("enable_fallback", "disabled_optimizers", "read_config_from_model")
#: Options that change neither results nor speed.
_LOGGING = ("log_severity_level", "log_verbosity_level", "logid")
#: Session options that segments inherit.
INHERITED_OPTIONS = (
    *_LOGGING,
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "execution_order",
    "graph_optimization_level",
    "use_deterministic_compute",
)
#: Session options for the threads of plain sessions, of which one is a plan's baseline; lanes are Chrion's threads.
BASELINE_OPTIONS = ("execution_mode", "inter_op_num_threads", "intra_op_num_threads")
#: The same for configuration keys.
INHERITED_KEYS = (
    "mlas.disable_kleidiai",
    "mlas.enable_gemm_fastmath_arm64_bfloat16",
    "mlas.kleidiai.conv_igemm_max_work",
    "mlas.nchwc_depthwise_sliding",
    "mlas.nchwc_pointwise_conv_max_input_channel_batch",
    "mlas.qnbit.force_fp32",
    "mlas.use_lut_gemm",
    "session.disable_prepacking",
    "session.graph_optimizations_loop_level",
    "session.use_device_allocator_for_initializers",
    "session.use_env_allocators",
)
BASELINE_KEYS = (
    "session.dynamic_block_base",
    "session.force_spinning_stop",
    "session.inter_op.allow_spinning",
    "session.inter_op.spin_backoff_max",
    "session.inter_op.spin_duration_us",
    "session.intra_op.allow_spinning",
    "session.intra_op.spin_backoff_max",
    "session.intra_op.spin_duration_us",
    "session.intra_op_thread_affinities",
    "session.prepack.enable_parallel",
)
#: Other configuration keys of onnxruntime 1.31 that have an effect on models in ONNX's format, with their defaults.
UNSUPPORTED_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        """
        ep.context_file_path ep.context_model_external_initializers_file_name ep.context_node_name_prefix
        ep.context_source_model_path ep.cuda.fpa_intb_gemm ep.cuda.fpa_intb_profile_m
        ep.cuda.gqa_workspace_max_total_sequence_length ep.nnapi.partitioning_stop_ops
        optimization.constant_folding_max_output_size_in_bytes optimization.minimal_build_optimizations
        session.collect_node_memory_stats_to_file session.function_expansion_byte_limit
        session.function_expansion_node_limit session.layer_assignment_settings session.max_shape_override
        session.model_external_initializers_file_folder_path session.moe_expert_counter_alpha
        session.moe_expert_counter_beta session.moe_expert_counter_state_file session.name_based_layer_assignment
        session.node_partition_config_file session.qdq_matmulnbits_accuracy_level session.qdq_matmulnbits_block_size
        session.qdqisint8allowed session.resource_cuda_partitioning_settings
        """.split(),  # noqa: SIM905 - a list would have one name a line
        "",
    ),
    **dict.fromkeys(
        """
        ep.context_embed_mode ep.context_enable ep.enable_weightless ep.enable_weightless_ep_context_nodes
        ep.share_ep_contexts ep.stop_share_ep_contexts optimization.disable_specified_optimizers
        optimization.enable_cast_chain_elimination optimization.enable_gelu_approximation session.compile_only
        session.debug_layout_transformation session.disable_aot_function_inlining session.disable_cpu_ep_fallback
        session.disable_double_qdq_remover session.disable_model_compile session.disable_qdq_constant_folding
        session.disable_quant_qdq session.enable_dq_matmulnbits_fusion session.enable_moe_expert_counting
        session.enable_moe_expert_statistics session.enable_quant_qdq_cleanup session.fail_on_suboptimal_compiled_model
        session.record_ep_graph_assignment_info session.set_denormal_as_zero session.strict_shape_type_inference
        session.strict_workspace_verification session.x64quantprecision
        """.split(),  # noqa: SIM905 - a list would have one name a line
        "0",
    ),
    "session.allow_released_opsets_only": "1",
    "session.gqa_value_layout": "BNSH",
    "session.load_model_format": "ONNX",
}
#: Run options that every segment's run gets.
RUN_OPTIONS = (*_LOGGING, "terminate")
#: Keys of run options that make a request run plain, with their defaults; the second only if there is an accelerator.
UNSUPPORTED_RUN_KEYS: Mapping[str, str] = {"memory.enable_memory_arena_shrinkage": ""}
UNSUPPORTED_ACCELERATOR_RUN_KEYS: Mapping[str, str] = {
    "disable_synchronize_execution_providers": "0",
    "gpu_graph_id": "",
    "qnn.htp_perf_mode": "",
    "qnn.htp_perf_mode_post_run": "",
    "qnn.lora_config": "",
    "qnn.rpc_control_latency": "",
}
_CONFIG_FROM_MODEL = "ORT_LOAD_CONFIG_FROM_MODEL"


def known_arguments(rest: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Return the keyword arguments that InferenceSession uses, and warn about those that it ignores.

    Args:
        rest: Keyword arguments that the session does not have itself.
        own: The names of those that it has.

    Raises:
        TypeError: One is similar to the session's own, so that it is misspelt.
    """
    for name in sorted(set(rest).difference(_ARGUMENTS)):
        if similar := difflib.get_close_matches(name, own, 1, 0.8):
            raise TypeError(f"HybridSession: unexpected argument {name!r}: did you mean {similar[0]!r}?")
        log.warning("the argument %r is ignored, as InferenceSession ignores it", name)
    return {name: value for name, value in rest.items() if name in _ARGUMENTS}


def wants_errors(rest: Mapping[str, Any]) -> bool:
    """Return whether the caller has disabled InferenceSession's fallback to other providers."""
    return int(rest.get("enable_fallback", 1)) != 1


def session_reason(options: ort.SessionOptions | None, rest: Mapping[str, Any]) -> str:
    """Find an option that Python can read and that makes the model run plain.

    Args:
        options: The caller's session options, or None.
        rest: The keyword arguments that :func:`known_arguments` returned.

    Returns:
        The reason, which names the option; empty if there is none.
    """
    if rest.get("disabled_optimizers"):
        return _reason("argument", "disabled_optimizers")
    if int(rest.get("read_config_from_model", 0)) == 1:
        return _reason("argument", "read_config_from_model")
    if os.environ.get(_CONFIG_FROM_MODEL) == "1":  # it also applies to sessions that load models and run segments
        return _reason("environment variable", _CONFIG_FROM_MODEL)
    if options is None:
        return ""
    if options.has_providers():
        return _reason("session option", "has_providers")
    honoured = {*INHERITED_OPTIONS, *BASELINE_OPTIONS, "profile_file_prefix"}
    return _attribute_reason("session option", options, ort.SessionOptions, honoured) or _entry_reason(
        "session configuration", options.get_session_config_entry, UNSUPPORTED_KEYS
    )


def hidden_reason(
    options: ort.SessionOptions | None,
    model: onnx.ModelProto,
    weights: Iterable[str],
    accelerator: tuple[str, Mapping[str, Any]] | None,
) -> str:
    """Find an option that Python cannot read and that makes the model run plain.

    Args:
        options: The caller's session options, or None. :func:`session_reason` must have found no reason, so that
            sessions created with them write no files.
        model: The model as the caller gave it.
        weights: Names of the optimised model's weights.
        accelerator: The caller's accelerator and its options, if there is one.

    Returns:
        The reason, which names the option; empty if there is none.
    """
    if options is None:
        return ""
    from chrion.runtime.options import probe  # noqa: PLC0415 - most sessions have no options

    try:
        fixed = probe.fixes_dimensions(options, model)
    except Exception as error:  # noqa: BLE001 - InferenceSession raises it for the caller's model
        return f"session options (add_external_initializers, or invalid options): {first_line(error)}"
    if fixed:
        return _reason("session option", "add_free_dimension_override_by_name")
    if probe.replaces_weights(options, sorted({*probe.weight_names(model), *weights}), accelerator):
        return _reason("session option", "add_initializer")
    if probe.holds_files(options, probe.weight_files(model)):
        return _reason("session option", "add_external_initializers_from_files_in_memory")
    return ""


def run_reason(options: ort.RunOptions | None, *, accelerated: bool) -> str:
    """Find an option that makes a request run plain.

    Args:
        options: The request's options, or None.
        accelerated: Whether the engine uses an accelerator.

    Returns:
        The reason, which names the option; empty if there is none.
    """
    if options is None:
        return ""
    from chrion.runtime.options.probe import brings_adapters  # noqa: PLC0415 - as above

    keys = {**UNSUPPORTED_RUN_KEYS, **(UNSUPPORTED_ACCELERATOR_RUN_KEYS if accelerated else {})}
    reason = _attribute_reason("run option", options, ort.RunOptions, RUN_OPTIONS) or _entry_reason(
        "run configuration", options.get_run_config_entry, keys
    )
    if not reason and brings_adapters(options):
        return _reason("run option", "add_active_adapter")
    return reason


def inherit(base: ort.SessionOptions | None, target: ort.SessionOptions) -> None:
    """Copy the options that segments inherit from the caller's to a segment's."""
    if base is None:
        return
    for name in _available(INHERITED_OPTIONS):
        setattr(target, name, getattr(base, name))
    for key, value in read_entries(base, INHERITED_KEYS):
        target.add_session_config_entry(key, value)


def optimises(options: ort.SessionOptions | None) -> bool:
    """Return whether the options let onnxruntime optimise the model, which is done before it is cut."""
    return options is None or options.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL


def fingerprint(options: ort.SessionOptions | None) -> tuple[tuple[str, str], ...] | None:
    """Return the honoured options that the choice between plans and plain sessions depends on."""
    if options is None:
        return None
    values = [(name, str(value)) for name, value in read_attributes(options).items() if name not in _LOGGING]
    return tuple(sorted((*values, *read_entries(options))))


def read_attributes(options: ort.SessionOptions) -> dict[str, Any]:
    """Return the honoured options that are attributes, as the caller has set them."""
    values = {name: getattr(options, name) for name in _available((*INHERITED_OPTIONS, *BASELINE_OPTIONS))}
    return values | {"intra_op_num_threads": given_threads(options)}


def read_entries(
    options: ort.SessionOptions, keys: Iterable[str] = (*INHERITED_KEYS, *BASELINE_KEYS)
) -> list[tuple[str, str]]:
    """List those of the keys that are set, by default all honoured ones, with their values."""
    return _entries(options.get_session_config_entry, keys)


def _available(names: Iterable[str]) -> list[str]:
    """Return the options that this release of onnxruntime has."""
    return [name for name in names if hasattr(ort.SessionOptions, name)]


@functools.cache
def _defaults(kind: type) -> Mapping[str, Any]:
    """Return the attributes of session or run options, with their defaults."""
    made = kind()
    return {name: getattr(made, name) for name in dir(kind) if isinstance(getattr(kind, name), property)}


def _attribute_reason(kind: str, options: Any, options_class: type, honoured: Iterable[str]) -> str:
    for name, default in _defaults(options_class).items():
        if name not in honoured and getattr(options, name) != default:
            return _reason(kind, name)
    return ""


def _entry_reason(kind: str, read: Callable[[str], str], defaults: Mapping[str, str]) -> str:
    for key, value in _entries(read, defaults):
        if value not in {"", defaults[key]}:
            return _reason(kind, key)
    return ""


def _entries(read: Callable[[str], str], keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return the entries that are set, as (key, value)."""
    entries = []
    for key in keys:
        try:
            entries.append((key, read(key)))
        except RuntimeError:  # onnxruntime's answer for a key that is not set
            continue
    return entries


def _reason(kind: str, name: str) -> str:
    return f"{kind} {name!r}: a cut session does not honour it"


Data = Mapping[str, Mapping[str, Any]]


def options_to_data(options: ort.SessionOptions | None) -> Data | None:
    """Return the honoured options as data for JSON; with others, no other process needs them."""
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

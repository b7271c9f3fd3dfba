"""The table of onnxruntime's options: the effect of each on a session that is cut into segments.

An option is honoured in a cut session, or makes the model run plain, or has no effect on a cut session. The lists are
complete for onnxruntime 1.31: every member of ``SessionOptions`` and ``RunOptions``, every configuration key that the
library reads, every argument of ``InferenceSession``. :mod:`chrion.runtime.options.session_options` applies the
table; the page ``docs/options.md`` is generated from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class Treatment(Enum):
    """Effect of an option on a session whose model could be cut."""

    HONOURED = "honoured"
    PLAIN = "runs plain"
    NO_EFFECT = "no effect"


@dataclass(frozen=True, slots=True)
class Option:
    """An option and its treatment."""

    name: str
    treatment: Treatment
    #: Explanation of the treatment: the way it is honoured, or the reason why the model runs plain or it has no effect.
    why: str
    #: Values of a configuration key with which the model can be cut; None for all values. For an attribute, a tuple
    #: means that the model can be cut with the default value only.
    harmless: tuple[str, ...] | None = None
    #: Whether segments inherit the caller's value.
    inherited: bool = False
    #: Whether Python can read it.
    readable: bool = True
    #: Whether it has an effect only if an accelerator is used.
    for_accelerators: bool = False


_HONOURED, _PLAIN, _NO_EFFECT = Treatment.HONOURED, Treatment.PLAIN, Treatment.NO_EFFECT
_UNSET = ("",)
_OFF = ("", "0")


def _table(*groups: Iterable[Option]) -> dict[str, Option]:
    return {option.name: option for group in groups for option in group}


def _inherited(why: str, *names: str) -> list[Option]:
    return [Option(name, _HONOURED, why, inherited=True) for name in names]


def _honoured(why: str, *names: str) -> list[Option]:
    return [Option(name, _HONOURED, why) for name in names]


def _plain(why: str, *names: str, harmless: tuple[str, ...] = _OFF) -> list[Option]:
    return [Option(name, _PLAIN, why, harmless) for name in names]


def _hidden(why: str, *names: str) -> list[Option]:
    return [Option(name, _PLAIN, why, readable=False) for name in names]


def _no_effect(why: str, *names: str) -> list[Option]:
    return [Option(name, _NO_EFFECT, why) for name in names]


_SEGMENTS = "every segment's session gets it"
_THREADS = "lanes are Chrion's own threads; plain sessions get it, including the baseline of a plan"

#: Members of ``SessionOptions``.
SESSION_OPTIONS: Mapping[str, Option] = _table(
    _inherited(
        _SEGMENTS,
        "enable_cpu_mem_arena",
        "enable_mem_pattern",
        "enable_mem_reuse",
        "execution_order",
        "log_severity_level",
        "log_verbosity_level",
        "logid",
        "use_deterministic_compute",
    ),
    _inherited(
        "every segment's session gets it; with ORT_DISABLE_ALL the model is not optimised before it is cut either, "
        "unless a plan is given, because plans are made for the optimised model",
        "graph_optimization_level",
    ),
    _honoured("see the session configuration keys", "add_session_config_entry", "get_session_config_entry"),
    _plain("a profile covers one session", "enable_profiling", harmless=()),
    _plain("onnxruntime writes the optimised model of one session", "optimized_model_filepath", harmless=()),
    _plain("the session uses the process's thread pools, which lanes do not", "use_per_session_threads", harmless=()),
    _plain("the options choose the execution providers", "has_providers", harmless=()),
    _hidden(
        "the options choose the execution providers; detected by has_providers()",
        "add_provider",
        "add_provider_for_devices",
        "set_provider_selection_policy",
        "set_provider_selection_policy_delegate",
    ),
    _hidden(
        "weights of the model are replaced; detected by a small session created with the options",
        "add_initializer",
        "add_external_initializers",
    ),
    _hidden(
        "weight files are in memory; detected by a small session created with the options",
        "add_external_initializers_from_files_in_memory",
    ),
    _hidden(
        "free dimensions are fixed; detected by a small session created with the options",
        "add_free_dimension_override_by_denotation",
        "add_free_dimension_override_by_name",
    ),
    _hidden(
        "a small session created with the options is cancelled, and so is the plain session; a flag that is set later "
        "does not stop loading",
        "set_load_cancellation_flag",
    ),
    _hidden(
        "without the library onnxruntime refuses the model, so it is not cut; a library that replaces a built-in "
        "operator is not detected",
        "register_custom_ops_library",
    ),
    _hidden(
        "only EPContext nodes use it; onnxruntime's CPU provider refuses them, so models with them are not cut",
        "set_ep_context_data_read_func",
        "clear_ep_context_data_read_func",
    ),
    _honoured(
        "it limits the CPU lanes of tuned plans, unless `cores` is given; by default, plain sessions have no more "
        "threads than the affinity and the quota of the process allow",
        "intra_op_num_threads",
    ),
    _no_effect(_THREADS, "execution_mode", "inter_op_num_threads"),
    _no_effect("it concerns the profile's file, and with enable_profiling the model runs plain", "profile_file_prefix"),
)

_PLACEMENT = "the caller decides the placement of operators"
_BEFORE = "it changes onnxruntime's optimiser, which runs before the model is cut"
_QUANTISED = "it changes the fusion of quantised operators, which may cross the borders of segments"
_COMPILED = "it concerns models compiled for a provider"
_CHECKS = "onnxruntime checks the model as a whole"
_ORT = "it concerns models in onnxruntime's own format, which run plain"
_SAVED = "it concerns the file of the optimised model, and with optimized_model_filepath the model runs plain"
_MOE = "the counts of experts, and their files, belong to one session"

#: Keys of ``SessionOptions.add_session_config_entry``.
SESSION_KEYS: Mapping[str, Option] = _table(
    _inherited(
        _SEGMENTS,
        "session.disable_prepacking",
        "session.graph_optimizations_loop_level",
        "session.use_device_allocator_for_initializers",
        "session.use_env_allocators",
    ),
    _inherited(
        f"{_SEGMENTS}, so it applies to the segment's kernels",
        "mlas.disable_kleidiai",
        "mlas.enable_gemm_fastmath_arm64_bfloat16",
        "mlas.kleidiai.conv_igemm_max_work",
        "mlas.nchwc_depthwise_sliding",
        "mlas.nchwc_pointwise_conv_max_input_channel_batch",
        "mlas.qnbit.force_fp32",
        "mlas.use_lut_gemm",
    ),
    _plain(_PLACEMENT, "session.disable_cpu_ep_fallback", "session.strict_workspace_verification"),
    _plain(
        _PLACEMENT,
        "session.layer_assignment_settings",
        "session.max_shape_override",
        "session.name_based_layer_assignment",
        "session.resource_cuda_partitioning_settings",
        harmless=_UNSET,
    ),
    _plain("the record of assignments covers one session", "session.record_ep_graph_assignment_info"),
    _plain("onnxruntime writes files for one session", "session.debug_layout_transformation"),
    _plain(
        "onnxruntime reads or writes a file for one session",
        "session.collect_node_memory_stats_to_file",
        "session.node_partition_config_file",
        harmless=_UNSET,
    ),
    _plain(
        "onnxruntime sets denormal numbers to zero in its own threads only, and lanes are Chrion's",
        "session.set_denormal_as_zero",
    ),
    _plain(
        _BEFORE,
        "optimization.disable_specified_optimizers",
        "optimization.enable_cast_chain_elimination",
        "optimization.enable_gelu_approximation",
        "session.disable_aot_function_inlining",
        "session.disable_qdq_constant_folding",
    ),
    _plain(
        _BEFORE,
        "optimization.constant_folding_max_output_size_in_bytes",
        "optimization.minimal_build_optimizations",
        "session.function_expansion_byte_limit",
        "session.function_expansion_node_limit",
        harmless=_UNSET,
    ),
    _plain(
        _QUANTISED,
        "session.disable_double_qdq_remover",
        "session.disable_quant_qdq",
        "session.enable_dq_matmulnbits_fusion",
        "session.enable_quant_qdq_cleanup",
        "session.x64quantprecision",
    ),
    _plain(
        _QUANTISED,
        "session.qdq_matmulnbits_accuracy_level",
        "session.qdq_matmulnbits_block_size",
        "session.qdqisint8allowed",
        harmless=_UNSET,
    ),
    _plain("it changes the layout of inputs and outputs", "session.gqa_value_layout", harmless=("", "BNSH")),
    _plain(
        _MOE,
        "session.enable_moe_expert_counting",
        "session.enable_moe_expert_statistics",
    ),
    _plain(
        _MOE,
        "session.moe_expert_counter_alpha",
        "session.moe_expert_counter_beta",
        "session.moe_expert_counter_state_file",
        harmless=_UNSET,
    ),
    _plain(_CHECKS, "session.strict_shape_type_inference"),
    _plain(_CHECKS, "session.allow_released_opsets_only", harmless=("", "1")),
    _plain("the model is in another format", "session.load_model_format", harmless=("", "ONNX")),
    _plain(
        "weights are in another folder",
        "session.model_external_initializers_file_folder_path",
        harmless=_UNSET,
    ),
    _plain(
        _COMPILED,
        "ep.context_file_path",
        "ep.context_model_external_initializers_file_name",
        "ep.context_node_name_prefix",
        "ep.context_source_model_path",
        harmless=_UNSET,
    ),
    _plain(
        _COMPILED,
        "ep.context_embed_mode",
        "ep.context_enable",
        "ep.enable_weightless",
        "ep.enable_weightless_ep_context_nodes",
        "ep.share_ep_contexts",
        "ep.stop_share_ep_contexts",
        "session.compile_only",
        "session.disable_model_compile",
        "session.fail_on_suboptimal_compiled_model",
    ),
    _plain(
        "it applies to one provider and one session",
        "ep.cuda.fpa_intb_gemm",
        "ep.cuda.fpa_intb_profile_m",
        "ep.cuda.gqa_workspace_max_total_sequence_length",
        "ep.nnapi.partitioning_stop_ops",
        harmless=_UNSET,
    ),
    _no_effect(
        _THREADS,
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
    ),
    _no_effect(
        _SAVED,
        "session.optimized_model_external_initializers_file_name",
        "session.optimized_model_external_initializers_min_size_in_bytes",
        "session.save_external_prepacked_constant_initializers",
        "session.save_model_format",
    ),
    _no_effect(
        _ORT,
        "session.enable_saved_runtime_optimizations",
        "session.use_memory_mapped_ort_model",
        "session.use_ort_model_bytes_directly",
        "session.use_ort_model_bytes_for_initializers",
    ),
    _no_effect(
        "it concerns weight files in memory, with which the model runs plain",
        "session.use_external_initializer_file_buffers_directly",
    ),
    _no_effect(
        "onnxruntime reports a session option under this key, and ignores what is set",
        "session.enable_cpu_mem_arena",
        "session.enable_mem_pattern",
        "session.enable_profiling",
        "session.execution_mode",
        "session.graph_optimization_level",
        "session.inter_op_num_threads",
        "session.intra_op_num_threads",
        "session.log_id",
        "session.log_severity_level",
        "session.log_verbosity_level",
        "session.optimized_model_filepath",
        "session.use_deterministic_compute",
        "session.use_per_session_threads",
    ),
)

_RUN = "every segment's run gets it"

#: Members of ``RunOptions``. They concern one request: it runs plain in a plain session beside the cut one.
RUN_OPTIONS: Mapping[str, Option] = _table(
    _honoured(_RUN, "log_severity_level", "log_verbosity_level", "logid"),
    _honoured("every segment's run gets it, even if it is set during the request", "terminate"),
    _honoured("see the run configuration keys", "add_run_config_entry", "get_run_config_entry"),
    _plain(
        "only a session of the whole model knows the operators that an output needs",
        "only_execute_path_to_fetches",
        harmless=(),
    ),
    _hidden(
        "adapters give values to inputs of the whole model; detected by a run of a small session; run_async honours "
        "them too, while InferenceSession's ignores them",
        "add_active_adapter",
    ),
)

_DEVICE = "it applies to one session; on the CPU it has no effect"

#: Keys of ``RunOptions.add_run_config_entry``.
RUN_KEYS: Mapping[str, Option] = _table(
    [
        Option("memory.enable_memory_arena_shrinkage", _PLAIN, "small segments have no arena, and refuse it", _UNSET),
        Option("disable_synchronize_execution_providers", _PLAIN, _DEVICE, _OFF, for_accelerators=True),
        Option("gpu_graph_id", _PLAIN, _DEVICE, _UNSET, for_accelerators=True),
        Option("qnn.htp_perf_mode", _PLAIN, _DEVICE, _UNSET, for_accelerators=True),
        Option("qnn.htp_perf_mode_post_run", _PLAIN, _DEVICE, _UNSET, for_accelerators=True),
        Option("qnn.lora_config", _PLAIN, _DEVICE, _UNSET, for_accelerators=True),
        Option("qnn.rpc_control_latency", _PLAIN, _DEVICE, _UNSET, for_accelerators=True),
    ],
)

#: Arguments of ``InferenceSession``, including undocumented ones.
ARGUMENTS: Mapping[str, Option] = _table(
    _honoured("the model", "path_or_bytes"),
    _honoured("see the session options", "sess_options"),
    _honoured("the first provider other than the CPU's is the accelerator of a plan", "providers"),
    _honoured("segments on the accelerator get its options", "provider_options"),
    _honoured("0 raises if the accelerator fails, like strict=True", "enable_fallback"),
    _plain(_BEFORE, "disabled_optimizers", harmless=()),
    _plain(
        "the model file may hold session options; the environment variable ORT_LOAD_CONFIG_FROM_MODEL does the same",
        "read_config_from_model",
        harmless=(),
    ),
)

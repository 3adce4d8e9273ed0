"""The keys of a DeepSpeed configuration (0.19.6, and older names that it still takes), and what
each one means for strata. Data for deepspeed.py.

    KEYS["zero_optimization.overlap_comm"].verdict      # "not needed"
    known("zero_optimization")                          # the names in a section

A verdict follows from what a key changes. HONOURED: it becomes a keyword of strata.wrap(), or the
optimizer, scheduler or scaler; deepspeed.py says how. NOT_NEEDED: it changes where bytes go, how
fast, or what is logged, and strata decides that itself. REFUSED: it changes what is computed or
saved, and strata has nothing that does the same; `why` says what to use instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

HONOURED, NOT_NEEDED, REFUSED = "honoured", "not needed", "refused"
VERDICTS = (HONOURED, NOT_NEEDED, REFUSED)


class Key(NamedTuple):
    """What is known of a key."""

    verdict: str
    why: str = ""
    switch: str = ""  # of a refused section: what turns it on, or the parts of it
    off: float = 0  # of a refused number: up to here it turns nothing on

    def is_on(self, value: Any) -> bool:
        """Whether a refused key turns anything on with this value."""
        if isinstance(value, dict) and self.switch:
            if self.switch not in value:
                return any(self.is_on(part) for part in value.values() if isinstance(part, dict))
            value = value[self.switch]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value > self.off
        return bool(value) and value != "none"


# Why strata needs no such key; several keys share one reason.
_RANKS = "strata exchanges between ranks by itself: there is nothing to tune"
_PLANNED = "the planner decides what is on the device, and when it moves; memory={...} bounds it"
_PAGES = "parameters, gradients and state are in pages of one size; page_size= sets it"
_OVERLAPPED = "reads, updates and writes always overlap"
_IO = "depth and size of requests are strata's; io_engine= chooses the engine"
_PINNED = "host memory is claimed once, and pinned where the system lets"
_SSD_ROOM = "memory={'host': ..., 'ssd': ...} bounds the tiers as a whole"
_SAVES = "strata.save() and strata.export_safetensors() write whole parameters, piece by piece"
_MASTER = "the master copy is float32-exact, in 2 bytes beside a 16-bit parameter"
_REPORT = "strata.report(model) says where time and bytes went"
_TRACKER = "the loop's own logging, or report_to= of TrainingArguments"
_LOOP = "the loop's own: "
_ACTIVATIONS = "activations='auto' plans for each unit whether to keep, swap or recompute them"
_CHECKS = "strata checks itself"
_SCALER = "strata.GradScaler halves its scale at every overflow, and has no least one"

# What to use instead of a refused key.
_ONE_PROCESS = "leave it out: one process trains, on one device"
_CHANGES_DATA = "choose the samples in the DataLoader"
_CHANGES_MODEL = "change the model ahead of strata.wrap()"

# (section, names in it, verdict, why, and for refused ones: switch, off)
_ROWS: tuple[tuple[Any, ...], ...] = (
    # 1. The step.
    ("", "train_batch_size gradient_accumulation_steps gradient_clipping", HONOURED),
    ("", "train_micro_batch_size_per_gpu", HONOURED),
    ("", "managed_gradient_accumulation", NOT_NEEDED, "the loop calls optimizer.step() itself"),
    ("optimizer", "type params", HONOURED),
    ("optimizer", "legacy_fusion", NOT_NEEDED, "every update is one fused pass"),
    ("scheduler", "type params", HONOURED),
    ("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", NOT_NEEDED,
     "strata has kernels for AdamW, Adam, SGD, Adagrad and Lion; other element-wise classes run as "
     "they are"),
    ("", "dataloader_drop_last", NOT_NEEDED, _LOOP + "DataLoader(drop_last=...)"),
    ("", "sparse_gradients", REFUSED, "gradients are dense: nn.Embedding(sparse=False)"),
    # 2. Number formats.
    ("fp16", "enabled loss_scale initial_scale_power loss_scale_window", HONOURED),
    ("fp16", "hysteresis consecutive_hysteresis min_loss_scale", NOT_NEEDED, _SCALER),
    ("fp16", "auto_cast", REFUSED, "cast floating-point inputs in the loop: x.half()"),
    ("fp16", "fp16_master_weights_and_grads", NOT_NEEDED, _MASTER),
    ("bf16", "enabled check_grad_overflow bf16_optimizer_states", HONOURED),
    ("bf16", "immediate_grad_update", NOT_NEEDED, "update= says when parameters are updated"),
    ("bf16", "bf16_master_weights_and_grads", NOT_NEEDED, _MASTER),
    ("data_types", "grad_accum_dtype param_dtype", HONOURED),
    ("data_types", "buffer_dtype", REFUSED,
     "leave it out: buffers beside parameters get dtype=, all others keep theirs"),
    ("", "amp", REFUSED, 'Apex is not used: "bf16": {"enabled": true}', "enabled"),
    ("", "torch_autocast", REFUSED,
     "write `with torch.autocast(...)` around the forward, or \"bf16\": {\"enabled\": true}",
     "enabled"),
    # 3. ZeRO, and what is offloaded.
    ("zero_optimization", "offload_param offload_optimizer", NOT_NEEDED, "nothing is offloaded"),
    ("zero_optimization", "stage", NOT_NEEDED,
     "all training state is in pages on device, host and SSD, as stage 3 would have it"),
    ("zero_optimization",
     "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
     "use_multi_rank_bucket_allreduce round_robin_gradients grad_hooks zero_hpz_partition_size "
     "zero_quantized_weights zero_quantized_gradients zeropp_loco_param mics_shard_size "
     "mics_hierarchical_params_gather use_all_reduce_for_fetch_params "
     "stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential "
     "legacy_stage1", NOT_NEEDED, _RANKS),
    ("zero_optimization", "contiguous_gradients sub_group_size", NOT_NEEDED, _PAGES),
    ("zero_optimization",
     "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
     "stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
     "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
     "stage3_module_granularity_threshold module_granularity_threshold memory_efficient_linear",
     NOT_NEEDED, _PLANNED),
    ("zero_optimization", "leaf_module", NOT_NEEDED,
     "units are found in the model; units= names more"),
    ("zero_optimization",
     "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
     "stage3_gather_fp16_weights_on_model_save elastic_checkpoint pipeline_loading_checkpoint "
     "load_from_fp32_weights", NOT_NEEDED, _SAVES),
    ("zero_optimization", "ignore_unused_parameters", NOT_NEEDED,
     "unused parameters are ordinary: they get no update"),
    ("zero_optimization", "override_module_apply", NOT_NEEDED,
     "no method of the model is replaced; weights='init' initialises a model on meta"),
    ("zero_optimization", "log_trace_cache_warnings enable_sanity_checks", NOT_NEEDED, _CHECKS),
    ("zero_optimization", "save_muon_momentum_buffer_in_memory", NOT_NEEDED, "for Muon alone"),
    ("zero_optimization", "cpu_offload cpu_offload_param", HONOURED),
    ("zero_optimization", "cpu_offload_use_pin_memory", NOT_NEEDED, _PINNED),
    ("zero_optimization", "zero_quantized_nontrainable_weights", REFUSED,
     "leave it out: frozen parameters rest in the dtype of the computation"),
    ("zero_optimization", "zenflow", REFUSED,
     "strata.wrap(update=strata.LockFree(max_staleness=1)) lets updates lag, with a bound"),
    ("zero_optimization.offload_param", "device nvme_path", HONOURED),
    ("zero_optimization.offload_param", "buffer_count buffer_size", NOT_NEEDED, _PAGES),
    ("zero_optimization.offload_param", "max_in_cpu", NOT_NEEDED, _SSD_ROOM),
    ("zero_optimization.offload_param", "pin_memory", NOT_NEEDED, _PINNED),
    ("zero_optimization.offload_optimizer", "device nvme_path", HONOURED),
    ("zero_optimization.offload_optimizer", "buffer_count buffer_size", NOT_NEEDED, _PAGES),
    ("zero_optimization.offload_optimizer", "pin_memory", NOT_NEEDED, _PINNED),
    ("zero_optimization.offload_optimizer", "pipeline_read pipeline_write pipeline fast_init",
     NOT_NEEDED, _OVERLAPPED),
    ("zero_optimization.offload_optimizer", "ratio super_offload", NOT_NEEDED,
     "units that rest on the device are updated there, all others by the CPU"),
    ("zero_optimization.offload_optimizer", "cpuadam_cores_perc", NOT_NEEDED,
     "workers= says how many threads update"),
    ("aio", "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events",
     NOT_NEEDED, _IO),
    ("aio", "use_gds", NOT_NEEDED, "pages pass through pinned host memory"),
    # 4. Activations.
    ("activation_checkpointing",
     "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
     "synchronize_checkpoint_boundary", NOT_NEEDED, _ACTIVATIONS),
    ("activation_checkpointing", "profile", NOT_NEEDED, _REPORT),
    # 5. Several ranks.
    ("",
     "communication_data_type seq_parallel_communication_data_type gradient_allreduce_op "
     "prescale_gradients gradient_predivide_factor disable_allgather data_parallel_size "
     "use_data_before_expert_parallelism", NOT_NEEDED, _RANKS),
    ("", "sequence_parallel_size", REFUSED, _ONE_PROCESS, "", 1),
    ("", "tensor_parallel", REFUSED, _ONE_PROCESS, "autotp_size", 1),
    ("", "expert_parallel elasticity", REFUSED, _ONE_PROCESS, "enabled"),
    ("", "pipeline", REFUSED, "a plain model instead of a PipelineModule"),
    # 6. What is logged.
    ("", "steps_per_print wall_clock_breakdown memory_breakdown dump_state", NOT_NEEDED, _REPORT),
    ("", "log_level vocabulary_size", NOT_NEEDED, "the logger 'strata' has a level of its own"),
    ("timers", "throughput", NOT_NEEDED, _REPORT),
    ("flops_profiler",
     "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
     NOT_NEEDED, _REPORT),
    ("comms_logger", "enabled verbose prof_all debug prof_ops", NOT_NEEDED, _RANKS),
    ("tensorboard", "enabled output_path job_name", NOT_NEEDED, _TRACKER),
    ("csv_monitor", "enabled output_path job_name", NOT_NEEDED, _TRACKER),
    ("wandb", "enabled group team project", NOT_NEEDED, _TRACKER),
    ("comet",
     "enabled workspace project samples_log_interval experiment_name api_key experiment_key online "
     "mode", NOT_NEEDED, _TRACKER),
    # 7. Checkpoints.
    ("checkpoint",
     "tag_validation use_node_local_storage checkpoint_serialization parallel_write writer",
     NOT_NEEDED, _SAVES),
    ("checkpoint", "load_universal", REFUSED,
     "turn DeepSpeed's checkpoint into safetensors (its zero_to_fp32.py), and pass weights="),
    ("", "nebula", REFUSED, "strata.save(), into a folder", "enabled"),
    ("", "datastates_ckpt", REFUSED, "strata.save(), into a folder"),
    # 8. What changes the model, or what it learns.
    ("", "graph_harvesting", REFUSED, 'torch.compile(model, mode="reduce-overhead")'),
    ("", "compile", REFUSED, "torch.compile(model)", "deepcompile"),
    ("", "hybrid_engine", REFUSED, "model.generate() works on a wrapped model", "enabled"),
    ("", "sparse_attention weight_quantization", REFUSED, _CHANGES_MODEL),
    ("", "compression_training quantize_training eigenvalue progressive_layer_drop", REFUSED,
     _CHANGES_MODEL, "enabled"),
    ("", "data_efficiency curriculum_learning", REFUSED, _CHANGES_DATA, "enabled"),
    ("", "autotuning", REFUSED, "`strata estimate` says what a batch would take", "enabled"),
)  # fmt: skip

KEYS: dict[str, Key] = {
    f"{section}.{name}" if section else name: Key(*rest)
    for section, names, *rest in _ROWS
    for name in names.split()
}
SECTIONS = frozenset(section for section, *_ in _ROWS if section)
# Sections by the names that they had before.
FORMER = {"bfloat16": "bf16"}


def known(section: str) -> list[str]:
    """The names in a section, those of sections within it too; "": of the whole file."""
    inside = f"{section}." if section else ""
    paths = [*KEYS, *SECTIONS]
    ends = {path.removeprefix(inside) for path in paths if path.startswith(inside)}
    return sorted({end for end in ends if "." not in end} | (set() if section else set(FORMER)))

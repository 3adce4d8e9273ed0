"""The keys of a DeepSpeed configuration (0.19.6, and older names that it still takes), and what
each one means for strata. Data for deepspeed.py.

    KEYS["gradient_clipping"]                    # Keyword("max_grad_norm", ...)
    KEYS["zero_optimization.overlap_comm"]       # why it is not needed
    KEYS["sparse_gradients"]                     # Refused("gradients are dense: ...")

A verdict follows from what a key changes. A Keyword of strata.wrap() does the same. A sentence says
why a key is not needed: it changes where bytes go, how fast, or what is logged, and strata decides
that itself. Refused is what changes values in a way that strata has not. TAKEN keys are read
together with others. A section that is a key itself is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._errors import check_choice


class Keyword(NamedTuple):
    """A keyword of strata.wrap(). `make` gives its value, or null where the key turns nothing on,
    for which `off` is why."""

    name: str
    make: Callable[[Any], Any]
    off: str
    more: str = ""  # of what it does


class Refused(NamedTuple):
    """What to use instead. Only `switch` in a section, or a number above `least`, turns it on."""

    instead: str
    switch: str = ""
    least: float = 0

    def is_on(self, value: Any) -> bool:
        """Whether a value turns it on."""
        if isinstance(value, dict) and self.switch:
            if self.switch not in value:
                return any(self.is_on(part) for part in value.values() if isinstance(part, dict))
            value = value[self.switch]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value > self.least
        return bool(value) and value != "none"


def number(key: str, value: Any, whole: bool = False) -> Any:
    """The value. Raises ValueError where it is none of the numbers that there can be."""
    kind = "whole number from 1 on" if whole else "number from 0 on"
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_one or not value >= int(whole) or (whole and value % 1):
        raise ValueError(f"{key} must be a {kind}, not {value!r}")
    return int(value) if whole else float(value)


def _dtype(name: Any) -> torch.dtype | None:
    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name is not None:
        check_choice("data_types.param_dtype", str(name), known)
    return known.get(name)


TAKEN = None
Verdict = Keyword | Refused | str | None

# Reasons that several keys share.
_RANKS = "strata exchanges between ranks by itself: there is nothing to tune"
_PLANNED = "the planner decides what is on the device, and when it moves; memory={...} bounds it"
_PAGES = "parameters, gradients and state are in pages of one size; page_size= sets it"
_PINNED = "host memory is claimed once, and pinned where the system lets"
_TIERS = "what has no room on the device rests in host memory, and what has none there on the SSD"
_SAVES = "strata.save() and strata.export_safetensors() write whole parameters, piece by piece"
_MASTER = "the master copy is float32-exact, in 2 bytes beside a 16-bit parameter"
_REPORT = "strata.report(model) says where time and bytes went"
_ONE_PROCESS = "leave it out: one process trains, on one device"

# Names by section, one verdict for all in a line.
_TABLE: dict[str, dict[str, Verdict]] = {
    "": {
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps": TAKEN,
        "gradient_clipping": Keyword(
            "max_grad_norm", lambda n: number("gradient_clipping", n) or None, "nothing is clipped"
        ),
        "managed_gradient_accumulation": "the loop calls optimizer.step() itself",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer":
            "strata has kernels for AdamW, Adam, SGD, Adagrad and Lion; other element-wise classes "
            "run as they are",
        "dataloader_drop_last": "the loop's own: DataLoader(drop_last=...)",
        "sparse_gradients": Refused("gradients are dense: nn.Embedding(sparse=False)"),
        "amp": Refused('Apex is not used: "bf16": {"enabled": true}', "enabled"),
        "torch_autocast": Refused(
            'write `with torch.autocast(...)` around the forward, or "bf16": {"enabled": true}',
            "enabled",
        ),
        "communication_data_type seq_parallel_communication_data_type gradient_allreduce_op "
        "prescale_gradients gradient_predivide_factor disable_allgather data_parallel_size "
        "use_data_before_expert_parallelism comms_logger": _RANKS,
        "sequence_parallel_size": Refused(_ONE_PROCESS, least=1),
        "tensor_parallel": Refused(_ONE_PROCESS, "autotp_size", 1),
        "expert_parallel elasticity": Refused(_ONE_PROCESS, "enabled"),
        "pipeline": Refused("a plain model instead of a PipelineModule"),
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state timers flops_profiler":
            _REPORT,
        "log_level vocabulary_size": "the logger 'strata' has a level of its own",
        "tensorboard csv_monitor wandb comet":
            "the loop's own logging, or report_to= of TrainingArguments",
        "activation_checkpointing":
            "activations='auto' plans for each unit whether to keep, swap or recompute them",
        "checkpoint": Refused(
            "turn DeepSpeed's checkpoint into safetensors (its zero_to_fp32.py), and pass weights=",
            "load_universal",
        ),
        "nebula": Refused("strata.save(), into a folder", "enabled"),
        "datastates_ckpt": Refused("strata.save(), into a folder"),
        "graph_harvesting": Refused('torch.compile(model, mode="reduce-overhead")'),
        "compile": Refused("torch.compile(model)", "deepcompile"),
        "hybrid_engine": Refused("model.generate() works on a wrapped model", "enabled"),
        "sparse_attention weight_quantization":
            Refused("change the model before strata.wrap()"),
        "compression_training quantize_training eigenvalue progressive_layer_drop":
            Refused("change the model before strata.wrap()", "enabled"),
        "data_efficiency curriculum_learning":
            Refused("choose the samples in the DataLoader", "enabled"),
        "autotuning": Refused("`strata estimate` says what a batch would take", "enabled"),
    },
    "optimizer": {
        "type params": TAKEN,
        "legacy_fusion": "every update is one fused pass",
    },
    "scheduler": {"type params": TAKEN},
    "fp16": {
        "enabled": Keyword(
            "dtype", lambda on: torch.float16, "off", "; scaler(): scale(loss).backward(), "
            "step(optimizer), update() (Trainer has one)",
        ),
        "initial_scale_power loss_scale_window": TAKEN,
        "loss_scale": Refused("write 0: scaler() adapts its scale, and has no fixed one"),
        "hysteresis consecutive_hysteresis min_loss_scale":
            "strata.GradScaler halves its scale at every overflow, and has no least one",
        "auto_cast": Refused("cast floating-point inputs in the loop: x.half()"),
        "fp16_master_weights_and_grads": _MASTER,
    },
    "bf16": {
        "enabled": Keyword("dtype", lambda on: torch.bfloat16, "off"),
        "check_grad_overflow": Keyword(
            "skip_nonfinite", lambda on: bool(on) or None, "steps are not checked unless asked"
        ),
        "bf16_optimizer_states": Keyword(
            "state_dtype", lambda on: torch.bfloat16 if on else None, "moments are float32",
            ", rounded stochastically",
        ),
        "immediate_grad_update": "update= says when parameters are updated",
        "bf16_master_weights_and_grads": _MASTER,
    },
    "data_types": {
        "param_dtype": Keyword("dtype", _dtype, "bf16 and fp16 say it"),
        "grad_accum_dtype": "gradients of several backward() calls add up in float32",
        "buffer_dtype": Refused(
            "leave it out: buffers beside parameters get dtype=, all others keep theirs"
        ),
    },
    "zero_optimization": {
        "offload_param offload_optimizer": "nothing is offloaded",
        "stage": "all training state is in pages on device, host and SSD, as stage 3 would have it",
        "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
        "use_multi_rank_bucket_allreduce round_robin_gradients grad_hooks zero_hpz_partition_size "
        "zero_quantized_weights zero_quantized_gradients zeropp_loco_param mics_shard_size "
        "mics_hierarchical_params_gather use_all_reduce_for_fetch_params "
        "stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential "
        "legacy_stage1": _RANKS,
        "contiguous_gradients sub_group_size": _PAGES,
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance "
        "max_reuse_distance stage3_prefetch_bucket_size prefetch_bucket_size "
        "stage3_param_persistence_threshold param_persistence_threshold "
        "stage3_model_persistence_threshold model_persistence_threshold "
        "stage3_module_granularity_threshold module_granularity_threshold memory_efficient_linear":
            _PLANNED,
        "leaf_module": "units are found in the model; units= names more",
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save elastic_checkpoint pipeline_loading_checkpoint "
        "load_from_fp32_weights": _SAVES,
        "ignore_unused_parameters": "unused parameters are ordinary: they get no update",
        "override_module_apply":
            "no method of the model is replaced; weights='init' initialises a model on meta",
        "log_trace_cache_warnings enable_sanity_checks": "strata checks itself",
        "save_muon_momentum_buffer_in_memory": "for Muon alone",
        "cpu_offload cpu_offload_param": _TIERS,
        "cpu_offload_use_pin_memory": _PINNED,
        "zero_quantized_nontrainable_weights":
            Refused("leave it out: frozen parameters rest in the dtype of the computation"),
        "zenflow": Refused(
            "strata.wrap(update=strata.LockFree(max_staleness=1)) lets updates lag, with a bound"
        ),
    },
    "zero_optimization.offload_param": {
        "device": _TIERS,
        "nvme_path": TAKEN,
        "buffer_count buffer_size": _PAGES,
        "max_in_cpu": "memory={'host': ..., 'ssd': ...} bounds the tiers as a whole",
        "pin_memory": _PINNED,
    },
    "zero_optimization.offload_optimizer": {
        "device": _TIERS,
        "nvme_path": TAKEN,
        "buffer_count buffer_size": _PAGES,
        "pin_memory": _PINNED,
        "pipeline_read pipeline_write pipeline fast_init":
            "reads, updates and writes always overlap",
        "ratio super_offload":
            "units that rest on the device are updated there, all others by the CPU",
        "cpuadam_cores_perc": "workers= says how many threads update",
    },
    "aio": {
        "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events":
            "depth and size of requests are strata's; io_engine= chooses the engine",
        "use_gds": "pages pass through pinned host memory",
    },
}  # fmt: skip

KEYS: dict[str, Verdict] = {
    f"{section}.{name}" if section else name: verdict
    for section, rows in _TABLE.items()
    for names, verdict in rows.items()
    for name in names.split()
}
SECTIONS = frozenset(_TABLE) - {""}
FORMER = {"bfloat16": "bf16"}  # sections by the names that they had before


def known(section: str) -> list[str]:
    """The names in a section, those of sections within it too; "": of the whole file."""
    inside = f"{section}." if section else ""
    paths = [*KEYS, *SECTIONS]
    ends = {path.removeprefix(inside) for path in paths if path.startswith(inside)}
    return sorted({end for end in ends if "." not in end} | (set() if section else set(FORMER)))

"""What TrainingArguments say, for transformers.py: what cannot be followed, and keywords for
wrap().

    check_arguments(args)                           # ValueError, with what to use instead
    kind, more = OPTIMIZERS[optimizer_name(args)]   # args.optim
    keywords = keywords_of_arguments(args, optimizer)
    keywords |= clipping(args, keywords)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._config.launched import processes_started
from .._errors import nearest
from ..optim import Lion

# Names of `TrainingArguments.optim`, and what trains so here: a class, and keywords for wrap().
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_torch": ("adamw", {}),
    "adamw_torch_fused": ("adamw", {}),
    "paged_adamw_32bit": ("adamw", {}),
    "adamw_8bit": ("adamw", {"state_dtype": "8bit"}),
    "adamw_bnb_8bit": ("adamw", {"state_dtype": "8bit"}),
    "adamw_torch_8bit": ("adamw", {"state_dtype": "8bit"}),
    "paged_adamw_8bit": ("adamw", {"state_dtype": "8bit"}),
    "lion_32bit": ("lion", {}),
    "paged_lion_32bit": ("lion", {}),
    "lion_8bit": ("lion", {"state_dtype": "8bit"}),
    "paged_lion_8bit": ("lion", {"state_dtype": "8bit"}),
    "sgd": ("torch", {}),
    "adagrad": ("torch", {}),
    "rmsprop": ("torch", {}),
}


def check_arguments(args: Any) -> None:
    """Raises ValueError for training arguments that cannot be followed."""
    refused = [
        (args.deepspeed, "deepspeed=", "leave it out; strata.from_deepspeed() translates its file"),
        (args.fsdp, "fsdp=", "leave it out: strata partitions and offloads by itself"),
        (
            args.torch_compile,
            "torch_compile=",
            "leave it out, and compile the wrapped model",
        ),
        (
            args.world_size == 1 < processes_started(),
            f"{processes_started()} processes of which these training arguments see one",
            "give use_cpu=True",
        ),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process", "set CUDA_VISIBLE_DEVICES to one"),
        (args.auto_find_batch_size, "auto_find_batch_size=", "leave it out: steps are planned"),
        (args.bf16_full_eval, "bf16_full_eval=", "give strata={'dtype': torch.bfloat16}"),
        (args.fp16_full_eval, "fp16_full_eval=", "give strata={'dtype': torch.float16}"),
    ]
    for asked, what, instead in refused:
        if asked:
            raise ValueError(f"strata cannot train with {what}: {instead}")
    name = optimizer_name(args)
    if name not in OPTIMIZERS:
        raise ValueError(
            f"optim={name!r} has no equivalent in strata: {nearest(name, OPTIMIZERS)} Or build "
            "any torch optimizer and pass optimizers=(optimizer, None)"
        )


def keywords_of_arguments(args: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Keywords for wrap() that follow from the training arguments."""
    keywords: dict[str, Any] = {}
    if args.gradient_accumulation_steps > 1:
        keywords["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if isinstance(optimizer, torch.optim.AdamW | Lion):
        keywords |= OPTIMIZERS[optimizer_name(args)][1]
    return keywords


def clipping(args: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for wrap() that make its update clip. Raises ValueError where nobody could. See Note
    [Who clips] in transformers.py."""
    update, norm = keywords.get("update", "on_step"), args.max_grad_norm
    told = keywords.get("max_grad_norm") or keywords.get("max_unit_norm")
    if told or not norm or update == "on_step":
        return {}
    if update == "in_backward":
        raise ValueError(
            f"max_grad_norm={norm} of the training arguments needs all gradients, and "
            "update='in_backward' uses them up before: give strata={'max_unit_norm': "
            f"{norm}, ...}}, which clips every unit by itself, or max_grad_norm=0"
        )
    return {"max_grad_norm": norm}


def optimizer_name(args: Any) -> str:
    """As people write it."""
    return str(getattr(args.optim, "value", args.optim))

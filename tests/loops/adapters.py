"""Adapters of PEFT and what they are put on, for the loops."""

from typing import Any

import torch
from peft import IA3Config, LoraConfig
from toys import rows
from transformers import MixtralConfig, MixtralForCausalLM

TOKENS = torch.stack([row["input_ids"] for row in rows(4)])
KINDS: dict[str, Any] = {
    "LoRA": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "DoRA": LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "rsLoRA": LoraConfig(r=4, target_modules=["o_proj"], use_rslora=True, task_type="CAUSAL_LM"),
    "modules to save": LoraConfig(
        r=4, target_modules=["v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "IA3": IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits  # type: ignore[no-any-return]


def mixtral(**more: Any) -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, **more,
        )
    )  # fmt: skip


EXPERTS = LoraConfig(
    r=4, target_modules=["q_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)  # fmt: skip

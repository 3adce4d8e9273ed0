"""The Trainer of Transformers: a mixin, and a keyword. It is cut half-way, and goes on by itself.

./dev run python examples/trainer.py --out runs/trainer
"""

import argparse

import torch
from strata.integrations.transformers import TrainerMixin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/trainer")
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()


class StrataTrainer(TrainerMixin, Trainer):
    """Trains what does not fit."""


def trainer(steps: int) -> StrataTrainer:
    """For a model that has no values yet: they are drawn where they will rest."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
                num_attention_heads=4, num_key_value_heads=4,
            )
        )  # fmt: skip
    tokens = (torch.arange(64)[:, None] * 7 + torch.arange(65)) % 256  # each counts on from its own
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=options.out, max_steps=steps, save_steps=options.steps // 2, logging_steps=5,
        per_device_train_batch_size=4, learning_rate=3e-3, lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(), report_to=[], disable_tqdm=True,
    )  # fmt: skip
    memory = {"device": "8MiB", "host": "32MiB"}
    return StrataTrainer(
        model, arguments, train_dataset=rows, strata={"memory": memory, "weights": "init"}
    )


trainer(options.steps // 2).train()
whole = trainer(options.steps)
whole.train(resume_from_checkpoint=True)
whole.save_model()  # from_pretrained() reads it

"""TRL's SFTTrainer with LoRA, over a base that rests in pages.

    ./dev run python examples/sft_lora.py --model path/to/llama --data chats.jsonl

`chats.jsonl` has one {"messages": [{"role": ..., "content": ...}, ...]} a line, or {"text": ...}.
Needs trl and peft.
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from strata.integrations.transformers import TrainerMixin
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="folder with safetensors and a tokenizer")
parser.add_argument("--data", required=True)
parser.add_argument("--out", default="runs/sft")
parser.add_argument("--device", default="4GiB")
parser.add_argument("--host", default="8GiB")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()


class StrataSFTTrainer(TrainerMixin, SFTTrainer):
    """Fine-tunes what does not fit."""


trainer = StrataSFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16),
    processing_class=AutoTokenizer.from_pretrained(options.model),
    train_dataset=load_dataset("json", data_files=options.data, split="train"),
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    args=SFTConfig(
        output_dir=options.out, max_steps=options.steps, per_device_train_batch_size=2,
        logging_steps=1, max_length=256, report_to=[], use_cpu=not torch.cuda.is_available(),
    ),
    strata={"memory": {"device": options.device, "host": options.host}},
)  # fmt: skip
trainer.train()
trainer.save_model()  # the adapter's files: kilobytes

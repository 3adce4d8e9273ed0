"""Llamas with LoRA over a base in NF4, as both sides of the qlora benches make them: strata from
modules on the meta device, bitsandbytes and PEFT in memory. Both draw the base tensor by tensor, so
that no more than one is there in full.

python -m benchmarks.qlora strata --hidden=1024 --layers=16 --tokens=512 --steps=3 --seed=0 ...
"""

import argparse
import json
import time
from typing import Any

import torch
from strata._config import machine
from torch import nn
from transformers import LlamaForCausalLM

from .models import llama_config, tokens

RANK = 8
FORM = "nf4-double"


def dtype_name() -> str:
    """What both sides compute in: bfloat16, and float32 where processors have no products in it."""
    return "bfloat16" if machine.has_bfloat16(machine.processor_flags()) else "float32"


def with_adapters(model: nn.Module, rank: int = RANK, layers: Any = "all-linear") -> Any:
    """LoRA beside such layers, or every linear one of the blocks; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules=layers))


def of_strata(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its optimizer, wrapped."""
    import strata

    with torch.device("meta"):
        model = with_adapters(LlamaForCausalLM(llama_config(options.hidden, options.layers)))
    trained = [p for p in model.parameters() if p.requires_grad]
    memory = {"device": options.device_bytes, "host": options.host_bytes}
    if options.ssd_path:
        memory["ssd"] = options.ssd_bytes
    return strata.wrap(
        model.train(),
        torch.optim.AdamW(trained),
        memory=memory,
        ssd_path=options.ssd_path,
        dtype=getattr(torch, dtype_name()),
        weights="init",
        seed=options.seed,
        device="host",
        activations=None if options.limited else "auto",
        frozen=FORM,
    )


def of_bitsandbytes(options: argparse.Namespace) -> tuple[Any, Any]:
    """The same model with the layers of bitsandbytes, in memory."""
    import bitsandbytes

    dtype = getattr(torch, dtype_name())
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(options.hidden, options.layers))
    kept = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if not isinstance(layer, nn.Linear) or layer is kept:
                continue
            four = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
            drawn = torch.empty(layer.weight.shape, dtype=dtype).normal_(std=0.02)
            four.weight = bitsandbytes.nn.Params4bit(
                drawn, requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            setattr(module, name, four.to("cpu"))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = torch.empty(parameter.shape, dtype=dtype).normal_(std=0.02)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, None)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model = with_adapters(model)
    return model.train(), torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


def main() -> None:
    """Trains and prints {"losses": [...], "seconds": [...]}."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["strata", "bitsandbytes"])
    for name in ("hidden", "layers", "tokens", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("device-bytes", "host-bytes", "ssd-bytes"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--ssd-path")
    parser.add_argument("--limited", action="store_true")  # the limit holds for activations, too
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    made = of_strata if options.side == "strata" else of_bitsandbytes
    began = time.perf_counter()
    model, optimizer = made(options)
    if options.limited:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    setup = time.perf_counter() - began
    batch = tokens(options.tokens, options.seed)
    losses, seconds = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"losses": losses, "seconds": seconds, "setup": setup}))


if __name__ == "__main__":
    main()

"""One attempt of a bench that looks for the largest model, or times one in a process of its own:
trains a Llama for a few steps. Imports little, for every megabyte counts.

python -m benchmarks.attempt strata --hidden=1024 --layers=16 --tokens=128 --steps=3 --seed=0
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from .device import HOST, seconds_on, torch_device
from .models import llama_config, tokens, with_adapters

FORM = "nf4-double"  # of the base below adapters


def command(side: str, **options: object) -> list[str]:
    """The command line of an attempt; True is a flag."""
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in options.items()
    ]
    return [sys.executable, "-m", "benchmarks.attempt", side, *words]


def completed(
    done: subprocess.CompletedProcess[str], what: str, say: Callable[[str], None]
) -> bool:
    """Whether all steps were done, with finite losses. Says what came of it."""
    if done.returncode != 0:
        reason = "killed by the limit" if done.returncode == -9 else last_line(done.stderr)
        say(f"{what}: {reason} (exit status {done.returncode})")
        return False
    found = report(done)
    say(f"{what}: ok, {found['setup']:.0f} s to begin, {found['seconds'][-1]:.1f} s a step")
    return all(math.isfinite(loss) for loss in found["losses"])


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What an attempt has printed: {"losses": [...], "seconds": [...], "setup": seconds}."""
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def last_line(text: str) -> str:
    """The end of an error message."""
    return (text.strip().splitlines() or ["failed without a word"])[-1]


def dtype_name() -> str:
    """The dtype of adapters' steps: bfloat16, or float32 where the processor has no products in
    it."""
    from strata._config import machine

    return "bfloat16" if machine.has_bfloat16(machine.processor_flags()) else "float32"


def of_plain(options: argparse.Namespace) -> tuple[Any, Any]:
    """Plain PyTorch, in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)  # built in 16 bit, never in 32
    model = LlamaForCausalLM(llama_config(options.hidden, options.layers)).train()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def of_strata(options: argparse.Namespace) -> tuple[Any, Any]:
    """The wrapped model, made where its parameters rest."""
    import strata

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(llama_config(options.hidden, options.layers)).train()
        if options.adapters:
            model = with_adapters(model)
    memory = {"device": options.device_bytes, "host": options.host_bytes}
    if options.ssd_path:
        memory["ssd"] = options.ssd_bytes
    where: dict[str, Any] = (
        {} if options.device == HOST else {"init_device": torch_device(options.device)}
    )
    return strata.wrap(
        model.train(),
        torch.optim.AdamW(p for p in model.parameters() if p.requires_grad),
        memory=memory,
        ssd_path=options.ssd_path,
        dtype=getattr(torch, dtype_name() if options.adapters else "bfloat16"),
        weights="init",
        seed=options.seed,
        device=options.device,
        update=options.update,
        # Without a plan, the limit of the whole process holds for activations.
        activations="auto" if options.planned else None,
        frozen=FORM if options.adapters else "as-is",
        **where,
    )


def of_bitsandbytes(options: argparse.Namespace) -> tuple[Any, Any]:
    """Adapters over the layers of bitsandbytes, in memory. The base is drawn tensor by tensor, as
    strata does, so that no more than one is there in full."""
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


SIDES = {"plain": of_plain, "strata": of_strata, "bitsandbytes": of_bitsandbytes}


def main() -> None:
    """Trains, and prints a report()."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    for name in ("hidden", "layers", "tokens", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("device-bytes", "host-bytes", "ssd-bytes"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--ssd-path", type=Path)
    parser.add_argument("--device", default=HOST)
    parser.add_argument("--update", default="on_step")
    for name in ("adapters", "planned", "checkpointing"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    model, optimizer = SIDES[options.side](options)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    setup = time.perf_counter() - began
    batch = tokens(options.tokens, options.seed).to(torch_device(options.device))
    losses: list[float] = []

    def step() -> None:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    seconds = [seconds_on(options.device, step) for _ in range(options.steps)]
    if options.side == "strata":
        import strata

        strata.synchronize(model)
    print(json.dumps({"losses": losses, "seconds": seconds, "setup": setup}))


if __name__ == "__main__":
    main()

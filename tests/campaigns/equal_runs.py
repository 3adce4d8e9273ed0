"""Trainings of a small Llama that are to leave the same bits however they are set up: budgets, page
size, I/O engine, workers, update mode, tiles, forms of a frozen base, and ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import strata
import torch
from random_training import digest_of_state
from rank_loops import Rank, hash_of
from strata._config.update_modes import parse_update
from strata._runtime.wrapped import wrapped
from strata._storage.stored import stored_tensors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, VOCABULARY, TOKENS = 4, 512, 64
KIB, MIB = 1 << 10, 1 << 20
PLACES = ("resident", "tiny", "ssd")
PAGES = (64 * KIB, 256 * KIB, 1 * MIB)
KINDS = ("master", "moment1", "moment2")
MICRO_BATCHES = 12  # of a step of ranks that update on the step, over all of them


@dataclass(frozen=True)
class Setting:
    """How a run is set up."""

    place: str = "resident"
    page_size: int = PAGES[0]
    io_engine: str = "auto"
    workers: int = 1
    update: str = "on_step"
    activations: str | None = None
    frozen: str = "as-is"  # how the base of adapters rests; as it is, all is trained
    tiles: int = 1  # of the head, and of layers below adapters
    dtype: torch.dtype = torch.bfloat16


def batch(seed: int) -> torch.Tensor:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, TOKENS), generator=generator)


def llama(setting: Setting, seed: int) -> nn.Module:
    """The same weights for the same seed, form and dtype."""
    hidden = 128 if setting.frozen == "as-is" else 512  # int8 needs rows of whole blocks of 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 21 // 8,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(config).to(setting.dtype).train()
    tiled = ["lm_head"]
    if setting.frozen != "as-is":
        from peft import LoraConfig, get_peft_model

        layers = LoraConfig(r=8, target_modules=["q_proj", "down_proj"])
        model = get_peft_model(model, layers)  # type: ignore[arg-type]
        tiled = [name for name, _ in model.named_modules() if name.endswith(".base_layer")]
    for name in tiled if setting.tiles > 1 else ():
        strata.nn.tile(model, name, setting.tiles)
    return model


def budgets(setting: Setting, parameters: int) -> dict[str, int]:
    """Room for everything; tiny budgets with some state in host memory; or all state on the SSD."""
    if setting.place == "resident":
        return {"device": 8 * parameters + 64 * MIB, "host": 32 * parameters + 64 * MIB}
    page = setting.page_size
    host = 48 * page + (6 * parameters if setting.place == "tiny" else 0)
    host += 6 * parameters if setting.update.startswith("lock-free") else 0  # float32 sums
    ssd = 32 * parameters + 128 * MIB
    return {"device": parameters * 4 // LAYERS + 8 * page, "host": host, "ssd": ssd}


@contextmanager
def opened(
    setting: Setting, folder: Path, seed: int, more: Mapping[str, int] | None = None, **options: Any
) -> Iterator[Any]:
    """The wrapped model and its optimizer. `more`: bytes for each parameter, added to budgets."""
    model = llama(setting, seed)
    parameters = sum(p.numel() for p in model.parameters())
    memory = budgets(setting, parameters)
    for tier, each in (more or {}).items():
        memory[tier] = memory.get(tier, 64 * MIB) + each * parameters
    model, optimizer = strata.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
        memory=memory,
        ssd_path=folder if "ssd" in memory else None,
        page_size=setting.page_size,
        io_engine=setting.io_engine,
        workers=setting.workers,
        activations=setting.activations,
        frozen=setting.frozen,
        dtype=setting.dtype,
        device="host",
        **{"update": parse_update(setting.update), **options},
    )
    try:
        yield model, optimizer
    finally:
        wrapped(model).session.close()


def train(model: nn.Module, optimizer: Any, steps: int, seed: int) -> list[float]:
    """The losses of so many steps on one batch."""
    losses = []
    for _ in range(steps):
        loss = model(input_ids=batch(seed), labels=batch(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trained(setting: Setting, folder: Path, seed: int, steps: int) -> tuple[list[float], str]:
    """The losses of a run, and a hash of the parameters that it ends with."""
    with opened(setting, folder, seed) as (model, optimizer):
        losses = train(model, optimizer, steps, seed)
        return losses, hash_of(model)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and moments as the bits of float32. The rows of tiles, in order, are the whole."""
    session, found = wrapped(model).session, {}
    for tensor, kind in itertools.product(stored_tensors(model), KINDS):
        parts = []
        for part, shape in zip(tensor.parts, tensor.part_shapes, strict=True):
            values = torch.empty(torch.Size(shape).numel())
            session.read(part, kind, 0, values.data_ptr(), values.numel())
            parts.append(values)
        found[f"{tensor.name}.{kind}"] = torch.cat(parts).view(torch.int32)
    return found


def digests(run: Rank, of: int, seed: int, steps: int, **setting: Any) -> str:
    """Run by ranks: a digest of what some steps end with. One process that is alone takes the
    micro-batches of `of` ranks, and updates on the step."""
    made, alone = Setting(**setting), run.ranks == 1
    count = MICRO_BATCHES if made.update == "on_step" else of
    mine = range(count)[run.rank :: run.ranks]
    if alone:
        made = replace(made, update="on_step")
    folder = run.folder / "ssd"
    folder.mkdir(exist_ok=True)
    options = {"gradient_accumulation_steps": max(len(mine), 2 if alone else 1)}
    # Host memory for gradients in float32, and for pages of each rank in passing.
    more = {"host": 8 + 4 * run.ranks}
    with opened(made, folder, seed, more, **options) as (model, optimizer):
        for step in range(steps):
            for number in mine:
                tokens = batch(seed + step * count + number)
                model(input_ids=tokens, labels=tokens).loss.backward()
            # Divided once, by all of them.
            optimizer.step(**({"loss_scale": float(len(mine))} if len(mine) > 1 else {}))
            optimizer.zero_grad()
        digest = digest_of_state(model).hex()
        strata.unwrap(model)
    return digest

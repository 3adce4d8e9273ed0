"""What every rank does in tests/python/test_torchrun.py, and a process that is alone: loops of
Transformers and Accelerate, as their users write them.

    torchrun --nproc-per-node 2 torchrun_programs.py trainers FOLDER     # FOLDER/trainers-RANK.json
    trainers(Path("folder"), ranks=1)                                    # the same in one process
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import strata
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from strata.integrations.transformers import TrainerMixin
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WINDOWS = 4  # micro-batches of a step, over all ranks
STEPS = 4
MEMORY = {"device": "2MiB", "host": "32MiB"}
EPSILON = 1e-2  # AdamW with less makes a step of what is nothing but rounding


def llama() -> LlamaForCausalLM:
    """The same values each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=1,
            pad_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def rows(count: int = 64, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Of each another number of tokens is learned."""
    drawn = []
    for i in range(count):
        ids = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[: i % (length - 4)] = -100
        drawn.append({"input_ids": ids, "labels": labels})
    return drawn


def hash_of(model: nn.Module) -> str:
    """Of all parameters, to the bit."""
    of = hashlib.sha256()
    for name, value in model.state_dict().items():
        of.update(name.encode() + value.detach().float().contiguous().numpy().tobytes())
    return of.hexdigest()


def values_of(model: nn.Module) -> torch.Tensor:
    """All parameters, one behind the other."""
    inner = getattr(model, "module", model)
    return torch.cat([v.detach().float().flatten() for v in inner.state_dict().values()]).clone()


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest, of parameters."""
    return float((one - other).abs().max())


class Mixed(TrainerMixin, Trainer):
    """Wraps its model itself."""


def arguments(folder: Path, ranks: int, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": STEPS,
        "gradient_accumulation_steps": WINDOWS // ranks, "learning_rate": 1e-2,
        "max_grad_norm": 0.3, "logging_steps": 1, "save_steps": 2, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "adam_epsilon": EPSILON,
    }  # fmt: skip
    return TrainingArguments(**(given | more))


def plain(folder: Path, ranks: int, **more: Any) -> Trainer:
    """A Trainer of Transformers over a wrapped model."""
    told = arguments(folder, ranks, **more)
    model = llama()
    model, optimizer = strata.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON, weight_decay=0.0),
        memory=MEMORY,
        gradient_accumulation_steps=WINDOWS,
    )
    return Trainer(
        model, told, train_dataset=rows(), eval_dataset=rows(8), optimizers=(optimizer, None)
    )


def mixed(folder: Path, ranks: int, **more: Any) -> Trainer:
    """One with the mixin."""
    keywords = {"memory": MEMORY, **more.pop("strata", {})}
    return Mixed(
        llama(),
        arguments(folder, ranks, **more),
        train_dataset=rows(),
        eval_dataset=rows(8),
        strata=keywords,
    )


def logged(trainer: Trainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def finish(trainer: Trainer) -> None:
    """The session ends, and with it that of the other ranks."""
    strata.unwrap(trainer.model)


def trainers(folder: Path, ranks: int) -> dict[str, Any]:
    """Both kinds, whole and gone on with; and what plain DDP makes of the same batches."""
    found: dict[str, Any] = {}
    if ranks > 1:
        told = arguments(folder / "ddp", ranks, save_strategy="no")
        ddp = Trainer(llama(), told, train_dataset=rows())
        ddp.train()
        expected, norms = values_of(ddp.model), logged(ddp, "grad_norm")

    more = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = plain(folder / "plain", ranks, **more)
    trainer.train()
    found["plain"] = hash_of(trainer.model)
    found["plain norms"] = logged(trainer, "grad_norm")
    found["plain losses"] = logged(trainer, "loss")
    if ranks > 1:
        found["plain to ddp"] = difference(values_of(trainer.model), expected)
        found["norms to ddp"] = max(
            abs(a - b) for a, b in zip(found["plain norms"], norms, strict=True)
        )
    trainer.save_model(str(folder / "plain-model"))
    finish(trainer)
    trainer = plain(folder / "plain", ranks, **more)
    trainer.train(resume_from_checkpoint=str(folder / "plain" / "checkpoint-2"))
    found["plain gone on"] = hash_of(trainer.model)
    finish(trainer)

    for name, keywords in {"mixed": {}, "snapped": with_ssd(folder)}.items():
        trainer = mixed(folder / name, ranks, strata=keywords, **more)
        trainer.train()
        assert bool(trainer.snapshots) == bool(keywords)
        found[name] = hash_of(trainer.model)
        found["evaluated"] = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(folder / f"{name}-model"))
        finish(trainer)
        trainer = mixed(folder / name, ranks, strata=keywords, **more)
        trainer.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
        found[f"{name} gone on"] = hash_of(trainer.model)
        finish(trainer)
    return found


def with_ssd(folder: Path) -> dict[str, Any]:
    """Keywords of a wrap() whose checkpoints are snapshots."""
    drive = folder / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    return {"memory": {**MEMORY, "ssd": "256MiB"}, "ssd_path": str(drive)}


def kinds(folder: Path, ranks: int) -> dict[str, Any]:
    """What a mixin can be told beside: autocast, bfloat16, the best model at the end."""
    found: dict[str, Any] = {}
    trainer = mixed(folder / "autocast", ranks, bf16=True, save_strategy="no")
    trainer.train()
    found["autocast"] = hash_of(trainer.model)
    finish(trainer)
    half = {"dtype": torch.bfloat16}
    trainer = mixed(folder / "half", ranks, strata=half, save_strategy="no", max_grad_norm=0.0)
    trainer.train()
    found["half"] = hash_of(trainer.model)
    finish(trainer)
    snapped = with_ssd(folder)
    late = snapped | {"update": strata.LockFree(max_staleness=0)}
    kinds = {"best": {}, "best of snapshots": snapped, "best of late snapshots": late}
    for name, keywords in kinds.items():
        trainer = mixed(
            folder / name,
            ranks,
            strata=keywords,
            learning_rate=0.5,  # too much: the last step is not the best one
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        )
        trainer.train()
        best = min(logged(trainer, "eval_loss"))
        found[name] = abs(trainer.evaluate()["eval_loss"] - best)
        found[f"{name}, its step"] = trainer.state.best_global_step
        finish(trainer)
    return found


def accelerated(folder: Path, ranks: int) -> dict[str, Any]:
    """A loop of Accelerate, whole and gone on with, and under its own DDP."""
    found: dict[str, Any] = {}
    if ranks == 1:  # what earlier loops of the process have told Accelerate
        AcceleratorState._reset_state(reset_partial_state=True)

    def run(model: nn.Module, optimizer: Any, save: int | None = None, load: str = "") -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOWS // ranks)
        loader = DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if load:
            accelerator.load_state(load)
            loader = accelerator.skip_first_batches(loader, 2 * WINDOWS // ranks)
        step = 0
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and step == save:
                accelerator.save_state(str(folder / "state"))
        accelerator.wait_for_everyone()
        return accelerator.unwrap_model(model)

    def wrapped() -> Any:
        Accelerator(cpu=True)  # torch.distributed is there
        model = llama()
        return strata.wrap(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON),
            memory=MEMORY,
            gradient_accumulation_steps=WINDOWS,
        )

    if ranks > 1:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON)
        expected = values_of(run(model, optimizer))
    model = run(*wrapped(), save=2)
    found["whole"] = hash_of(model)
    if ranks > 1:
        found["to ddp"] = difference(values_of(model), expected)
    strata.unwrap(model)
    model = run(*wrapped(), load=str(folder / "state"))
    found["gone on"] = hash_of(model)
    strata.unwrap(model)
    return found


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(folder: Path, ranks: int) -> dict[str, Any]:
    """What cannot be, in the words of each rank; all of them go on."""
    Accelerator(cpu=True)
    found: dict[str, Any] = {}
    ddp = nn.parallel.DistributedDataParallel(llama())
    found["wrap of DDP"] = _said(lambda: strata.wrap(ddp, torch.optim.AdamW(ddp.parameters())))
    sharded = llama()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(sharded.parameters())
    found["wrap of FSDP"] = _said(lambda: strata.wrap(sharded, optimizer))
    model = llama()
    model, _ = strata.wrap(model, torch.optim.AdamW(model.parameters()), memory=MEMORY)
    found["DDP of wrapped"] = _said(lambda: nn.parallel.DistributedDataParallel(model))
    above = nn.ModuleList([model, nn.Linear(2, 2)])
    found["DDP above it"] = _said(lambda: nn.parallel.DistributedDataParallel(above))
    plain_again = strata.unwrap(model)
    ddp = nn.parallel.DistributedDataParallel(llama())
    inside, _ = strata.wrap(ddp.module, torch.optim.AdamW(ddp.parameters()), memory=MEMORY)
    ids = rows(1)[0]["input_ids"].unsqueeze(0)
    found["DDP was there"] = _said(lambda: ddp(input_ids=ids))
    strata.unwrap(inside)
    found["DDP of unwrapped"] = _said(lambda: nn.parallel.DistributedDataParallel(plain_again))
    group = distributed.new_subgroups(1)[0]
    model = llama()
    alone = {"memory": MEMORY, "rank_group": group}
    model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters()), **alone)
    found["Accelerate of some"] = _said(lambda: Accelerator(cpu=True).prepare(model, optimizer))
    found["Trainer of some"] = _said(lambda: mixed(folder / "some", ranks, strata=alone))
    strata.unwrap(model)
    trainer = plain(folder / "bf16", ranks, bf16=True, save_strategy="no")
    found["plain autocast"] = _said(trainer.train)
    return found


def without_cpu(folder: Path, ranks: int) -> dict[str, Any]:
    """Training arguments that do not see the other ranks."""
    return {
        "mixin": _said(lambda: mixed(folder / "alone", ranks, use_cpu=False)),
        "plain": _said(lambda: plain(folder / "alone", ranks, use_cpu=False).train()),
    }


def main() -> None:
    torch.set_num_threads(1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    found = globals()[name](folder / name, ranks)
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""What ranks do in tests/python/test_rank_promises.py: see rank_scenarios.py."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import strata
import torch
from rank_loops import (
    BATCHES,
    Rank,
    batches_of,
    hash_of,
    make_model,
    options_of,
    train,
    wrap,
)
from safetensors.torch import save_file
from strata._config.ranks import ranks_there
from strata._runtime.wrapped import wrapped
from strata._storage.weights import WeightFiles
from torch import distributed

TOKENS = 12


def tiny_llama() -> Any:
    """The same for all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=64,
        )
    )


def machines(run: Rank) -> tuple[str, ...]:
    """Of a launcher that says nothing of machines, for which Accelerate puts a 1."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found = ranks_there()
    return found.machines if found is not None else ()


def wraps_apart(run: Rank, **options: Any) -> list[str]:
    """What each rank is told; nothing where they train."""
    try:
        wrap(run, make_model(), **options_of(run, options))
    except (ValueError, strata.StrataError) as error:
        return [str(error)]
    return []


def sees_no_folder(run: Rank) -> str:
    """Two ranks and two others have folders that only they see. What is learned."""
    from strata._config import ranks

    home = run.folder / f"tmp-{run.rank // 2}"
    home.mkdir(exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(home)
    ranks._sees = lambda folder: folder.startswith(str(home))
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 2)
    return hash_of(model)


def reads_pages(run: Rank, steps: int, **options: Any) -> int:
    """Bytes of pages that this rank reads from the SSD in steps behind the first one."""
    width = 256
    options = options_of(run, {"ssd_path": "own", **options})
    model, optimizer = wrap(run, make_model(3, width), **options)
    session = wrapped(model).session
    train(run, model, optimizer, 1, width=width)
    run.meet()
    before = session.stats()["ssd to host bytes"]
    train(run, model, optimizer, steps, first=1, width=width)
    run.meet()
    read: int = session.stats()["ssd to host bytes"] - before
    return read


def shows(run: Rank, only_first: bool) -> dict[str, Any] | None:
    """Everything that reads a model, behind a step: on every rank, or on rank 0 while the others go
    on to the next step, and wait there."""
    model, optimizer = wrap(run, tiny_llama())
    batches = torch.arange(BATCHES * TOKENS).reshape(BATCHES, TOKENS) % 256

    def step() -> None:
        mine = run.share(list(batches.split(1)))
        for tokens in mine:
            (model(input_ids=tokens, labels=tokens).loss / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    found: dict[str, Any] = {}
    if run.rank == 0 or not only_first:
        found["state_dict"] = hash_of(model)
        to = run.folder / f"export-{run.rank}"
        strata.export_safetensors(model, to)
        found["export"] = hashlib.sha256((to / "model.safetensors").read_bytes()).hexdigest()
        model.eval()
        prompt = torch.arange(4).reshape(1, 4)
        found["tokens"] = model.generate(
            prompt, max_new_tokens=6 + 2 * run.rank * (not only_first), do_sample=False
        ).tolist()[0][:10]
        model.train()
    step()
    found["behind"] = hash_of(model)
    return found


def reads_weights(run: Rank, path: str) -> dict[str, Any]:
    """A model on the meta device gets its values from a file. How much of it this process has
    looked at, by what the kernel mapped for it."""
    looked = 0
    close = WeightFiles.close

    def counted(files: WeightFiles) -> None:
        nonlocal looked
        looked = _resident_of(path)
        close(files)

    WeightFiles.close = counted  # type: ignore[method-assign]
    with torch.device("meta"):
        model = make_model(4, 512)
    model, _ = wrap(run, model, weights=path, page_size="64KiB")
    return {"looked": looked, "hash": hash_of(model)}


def writes_weights(_: Rank, path: str) -> None:
    """The values of a plain model, as a file."""
    save_file(make_model(4, 512).state_dict(), path)


def _resident_of(path: str) -> int:
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(path)
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def skips(run: Rank) -> list[Any]:
    """The second step overflows on the last rank alone; the fourth is NaN there."""
    model, optimizer = wrap(run, make_model(), skip_nonfinite=True, max_grad_norm=0.05)
    for step in range(5):
        mine = run.share(batches_of(step))
        for batch in mine:
            last = batch is mine[-1] and run.rank == run.ranks - 1
            factor = {1: float("inf"), 3: float("nan")}.get(step, 1.0) if last else 1.0
            (model(batch).square().mean() * factor / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [wrapped(model).steps.skipped, hash_of(model)]


def sums(run: Rank) -> str:
    """Every micro-batch counts alike, on however many ranks, also where some have more of them."""
    model, optimizer = wrap(run, make_model(), rank_gradients="sum")
    for step in range(3):
        for batch in run.share(batches_of(step)):
            (model(batch).square().mean() / BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of(model)


def is_interrupted(run: Rank, **options: Any) -> None:
    """Rank 1 stays in the middle of its second step; the others wait for it in theirs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, optimizer = wrap(run, make_model(), **options)
    train(run, model, optimizer, 1)

    def stay(*_: Any) -> None:
        if run.rank == 1:
            run.mark("there")
            time.sleep(1000)

    model[1].register_forward_pre_hook(stay)
    train(run, model, optimizer, 10)


def is_slow(run: Rank, steps: int, pause: float, **options: Any) -> str:
    """Rank 1 is always the last one."""
    model, optimizer = wrap(run, make_model(), **options)
    for step in range(steps):
        time.sleep(pause * run.rank)
        train(run, model, optimizer, 1, first=step)
    return hash_of(model)


def stays(run: Rank, steps: int = 1000, **options: Any) -> str:
    """Marks that training goes on; until a signal comes."""
    model, optimizer = wrap(run, make_model(), **options)
    for step in range(steps):
        train(run, model, optimizer, 1, first=step)
        if step == 1 and run.rank == run.ranks - 1:
            run.mark("there")
        time.sleep(0.01)
    return hash_of(model)


def ends_ahead(run: Rank, where: str) -> None:
    """Rank 1 ends before it has come to train, as one does that lacks memory."""
    if run.rank == 1 and where == "ahead":
        os._exit(3)
    if run.rank == 1 and where == "memory":
        from strata import _opening

        _opening._core = type(
            "Core", (), {"plan": _opening._core.plan, "Session": lambda *_: os._exit(3)}
        )
    if run.rank == 1 and where == "values":
        from strata import _opening

        _opening._fill = lambda *_: os._exit(3)
    wrap(run, make_model())
    distributed.barrier()

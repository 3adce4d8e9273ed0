"""A child of the bench ranks-equal: a rank, or one process that is alone, trains a small Llama as
often as it is asked to, each time under other budgets, and answers with a digest of its state.
"""

import argparse
import copy
import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import strata
import torch
import torch.distributed as dist
from strata._config.update_modes import parse_update
from torch import nn

from .equal import ADAMW, HIDDEN, LAYERS, PAGES, TOKENS, VOCABULARY, budgets
from .models import llama, llama_config, tokens
from .peers.child import Answer, claim_stdout, serve
from .sides import Paged, digest_of_state

PLACES = ("resident", "tiny", "ssd")
MODES = ("on_step", "in_backward", "lock-free:0")
MICRO_BATCHES = 12  # of a step on the step, over all ranks
RANKS_MAX = 4
STEPS = 3
Combination = tuple[str, int, str]  # place, page size, update mode


class Trainer:
    """One rank of so many, which takes its share of each step's micro-batches."""

    def __init__(self, rank: int, ranks: int, seed: int, folder: Path) -> None:
        self.rank, self.ranks, self.seed, self.folder = rank, ranks, seed, folder

    def wrap(self, combination: Combination, windows: int) -> Paged:
        """The model, for so many micro-batches of this rank in a step."""
        place, page, mode = combination
        model = llama(llama_config(HIDDEN, LAYERS, VOCABULARY), torch.bfloat16, self.seed)
        parameters = sum(p.numel() for p in model.parameters())
        memory = budgets(place, page, parameters)
        memory["host"] += 8 * parameters + self.ranks * 48 * page  # gradients in float32
        options = {
            "page_size": page,
            "dtype": torch.bfloat16,
            "update": "on_step" if self.ranks == 1 else parse_update(mode),
            # Two at least of one that is alone: from there on gradients add up in float32.
            "gradient_accumulation_steps": max(windows, 2) if self.ranks == 1 else windows,
        }
        ssd = None if place == "resident" else self.folder
        return Paged(model, self.batch(0), memory, ssd, options, **ADAMW)

    def batch(self, number: int) -> torch.Tensor:
        """One of all micro-batches of a run."""
        return tokens(TOKENS, self.seed + number, VOCABULARY)

    def train(self, combination: Combination, of: int) -> Answer:
        """A digest of what some steps end with. One process that is alone takes the micro-batches
        of `of` ranks, and updates on the step."""
        mode = combination[2]
        count = MICRO_BATCHES if mode == "on_step" else of
        mine = range(count)[self.rank :: self.ranks]
        side = self.wrap(combination, len(mine))
        for step in range(STEPS):
            for number in mine:
                batch = self.batch(step * count + number)
                side.model(input_ids=batch, labels=batch).loss.backward()
            if len(mine) > 1:  # divided once, by all of them
                side.optimizer.step(loss_scale=float(len(mine)))  # type: ignore[call-overload]
            else:
                side.optimizer.step()
            side.optimizer.zero_grad()
        side.synchronize()
        answer = {"digest": digest_of_state(side.model).hex()}
        strata.unwrap(side.model)
        return answer

    def against_ddp(self) -> Answer:
        """The largest relative distance of a parameter from DistributedDataParallel's, in
        float32."""
        plain = llama(llama_config(HIDDEN, LAYERS, VOCABULARY), torch.float32, self.seed)
        ours = copy.deepcopy(plain)
        theirs = nn.parallel.DistributedDataParallel(plain)
        adamw: Any = ADAMW
        sides = [
            (theirs, torch.optim.AdamW(theirs.parameters(), **adamw)),
            strata.wrap(
                ours,
                torch.optim.AdamW(ours.parameters(), **adamw),
                activations=None,
                device="host",
            ),
        ]
        for step in range(STEPS):
            batch = self.batch(step * self.ranks + self.rank)
            for model, optimizer in sides:
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        shown = ours.state_dict()
        distance = max(
            float((shown[name] - value).norm() / value.norm())
            for name, value in plain.state_dict().items()
        )
        strata.unwrap(ours)
        return {"distance": distance}


def main() -> None:
    """Answers an order, [place, page size, mode, ranks] as JSON, with a digest, and "ddp" with a
    distance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    answers = claim_stdout()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    trainer = Trainer(rank, ranks, options.seed, options.folder)
    orders: dict[str, Callable[[], Answer]] = {
        json.dumps([*each, of]): partial(trainer.train, each, of)
        for each in itertools.product(PLACES, PAGES, MODES)
        for of in range(1, RANKS_MAX + 1)
    }
    serve(answers, {**orders, "ddp": trainer.against_ddp})
    os._exit(0)


if __name__ == "__main__":
    main()

"""A side of the bench vs-torch: trains a Llama by plain PyTorch or by strata, a turn at a time."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .common import MIB
from .device import HOST, seconds_on, torch_device
from .models import llama, llama_config, tokens
from .peers.child import Answer, claim_stdout, serve
from .planned import Planned, pytorch_peak
from .sides import Paged, Plain

STEPS = 3  # of a turn, behind one that fills PyTorch's cache


@dataclass(frozen=True)
class Setting:
    """What is trained."""

    hidden: int
    layers: int
    vocabulary: int
    sequences: int
    sequence: int
    room: int = 1  # the share of state that is on the device, of so many times the model

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.sequences * self.sequence


FULL = Setting(2048, 24, 32_000, 4, 4096)
QUICK = Setting(128, 2, 256, 2, 64, room=64)  # a quarter of so few is less than some pages


def open_side(options: argparse.Namespace, setting: Setting) -> Plain | Paged:
    """The model, ready to train."""
    where = torch_device(options.device)
    config = llama_config(setting.hidden, setting.layers, setting.vocabulary)
    model = llama(config, torch.bfloat16, options.seed)
    batch = tokens(setting.tokens, options.seed, setting.vocabulary, setting.sequences).to(where)
    if options.side == "plain":
        return Plain(model.to(where), batch)
    state_bytes = 16 * sum(p.numel() for p in model.parameters())
    memory = {"device": options.device_bytes, "host": state_bytes + 512 * MIB}
    return Planned(model, batch, memory, options={"update": options.side, "device": options.device})


def held_bytes(side: Plain | Paged, device: str) -> int:
    """What PyTorch holds at most in a step, beside what it holds between two."""
    side.step()  # the optimizer's state is there from now on
    if device == HOST:
        return pytorch_peak(side)
    torch.cuda.reset_peak_memory_stats(device)
    between = torch.cuda.memory_allocated(device)
    side.step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - between


def turn_seconds(side: Plain | Paged, device: str) -> float:
    """Of a step among others. An update that runs on belongs to the step behind it."""
    side.step()

    def steps() -> None:
        for _ in range(STEPS):
            side.step()

    seconds = seconds_on(device, steps) / STEPS
    side.synchronize()
    return seconds


def between_turns(command: Callable[[], Answer], device: str) -> Callable[[], Answer]:
    """A command that leaves nothing in PyTorch's cache: the other sides need the memory next."""

    def whole() -> Answer:
        answer = command()
        if device != HOST:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        return answer

    return whole


def commands(side: Plain | Paged, device: str) -> dict[str, Callable[[], Answer]]:
    """What the child answers: "warm" with the loss of a step, "turn" with seconds, "held" with
    bytes.
    """

    def warm() -> Answer:
        return {"loss": side.step()}

    def turn() -> Answer:
        return {"seconds": turn_seconds(side, device)}

    def held() -> Answer:
        return {"bytes": held_bytes(side, device)}

    found = {"warm": warm, "turn": turn, "held": held}
    return {name: between_turns(command, device) for name, command in found.items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["plain", "on_step", "in_backward"])
    parser.add_argument("--device", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device-bytes", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    """Answers until nobody asks any more."""
    options = parse()
    answers = claim_stdout()
    side = open_side(options, QUICK if options.quick else FULL)
    if options.device != HOST:
        torch.cuda.empty_cache()  # of making the model
    serve(answers, commands(side, options.device))
    side.close()
    os._exit(0)  # threads of libraries that would wait for each other are not waited for


if __name__ == "__main__":
    main()

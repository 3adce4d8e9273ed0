"""The command line: ``python -m benchmarks NAME [--json FILE]``."""

import argparse
import contextlib
import difflib
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from . import allocator  # noqa: F401  (first: .device imports torch)
from .common import ROOT, BenchError, Context, Figure, as_json, print_table
from .device import HOST, parse_device

# Each module has run(context), which yields figures.
BENCHES = {
    "step": "step time against plain PyTorch: all resident, state in host memory, state on the SSD",
    "io-bound": "SSD bandwidth of a step with little computation, against fio",
    "hide": "what updates add to a step in each mode, state on the SSD; LockFree at 128 tokens",
    "quality": "held-out loss of every update mode on real text; a round is a seed",
    "adam": "the optimizer kernel against a loop over its bytes, DeepSpeed's and torch's",
    "vs-deepspeed": "a training step against DeepSpeed's ZeRO-3 with CPU and with NVMe offload",
    "capacity": "the largest Llama that trains within 2 GiB of memory and 20 GB of SSD",
    "qlora-capacity": "the largest Llama whose adapters train over NF4 in 2 GiB and 20 GB of SSD",
    "qlora-step": "LoRA over a base in NF4 against bitsandbytes and PEFT",
    "plan-error": "predicted against measured steps, the lower bound, and the best of all plans",
    "wrap": "what a wrapped module costs when its parameters are there, and clip_grad_norm_",
    "lock": "how long the core's lock is held in steady steps",
    "save-stall": "how long saving holds the loop: snapshots, save, torch.save, DCP's async_save",
    "ranks": "two ranks of this machine over one process, and over FSDP2: steps and memory",
    "paper-8b": "65,536 tokens of an 8 B Llama in 24 GB of an H200, on paper",
    "copy": "pages that move between host memory and the device, against one copy of everything",
    "update-gpu": "the optimizer kernel on the device, against a copy inside its memory",
    "step-gpu": "a step of an 8 B Llama in 24 GB of a GPU, against the GPU's matrix products",
    "capacity-gpu": "the largest Llama that trains with all of GPU, host and SSD",
    "vs-torch": "a Llama with a quarter of its state on the GPU, against plain PyTorch",
}
# These measure a device, as --device says; the others measure the host.
OF_DEVICE = ("copy", "update-gpu", "step-gpu", "capacity-gpu", "vs-torch")
NEEDS_GPU = ("step-gpu", "capacity-gpu", "vs-torch")  # except with --quick
ROUNDS, ROUNDS_OF_QUALITY = 5, 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="./dev bench", description="Measures strata.")
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(BENCHES)}; all; or list")
    parser.add_argument("--json", metavar="FILE", help="keep the figures as JSON lines; -: stdout")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="capacity-gpu: keeps attempts there, and uses them",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--rounds", type=int, help="turns of every side (5, quality 3; quick: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ssd-path", type=Path, default=ROOT / "build", help="folder on the disk to measure"
    )
    parser.add_argument(
        "--device",
        default="host",
        help=f"host (default), cuda or cuda:N: of {', '.join(OF_DEVICE)}",
    )
    options = parser.parse_args(arguments)
    known = [*BENCHES, "all", "list"]
    if options.name not in known:
        near = difflib.get_close_matches(options.name, known, n=1, cutoff=0.0)[0]
        parser.error(f"unknown bench {options.name!r}; did you mean {near!r}?")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds: at least 1")
    if not options.ssd_path.is_dir():
        parser.error(f"--ssd-path: {options.ssd_path} is not a folder")
    try:
        options.device = parse_device(options.device)
    except ValueError as error:
        parser.error(f"--device: {error}")
    if options.device != HOST and options.name not in (*OF_DEVICE, "all", "list"):
        parser.error(f"--device: {options.name} measures the host; GPUs: {', '.join(OF_DEVICE)}")
    return options


def chosen(options: argparse.Namespace) -> Sequence[str]:
    """The benches to run: "all" are those that the device is made for."""
    if options.name != "all":
        return [options.name]
    if options.device != HOST:
        return OF_DEVICE
    left_out: tuple[str, ...] = () if options.quick else NEEDS_GPU
    return [name for name in BENCHES if name not in left_out]


def context_of(name: str, options: argparse.Namespace) -> Context:
    """What the command line asks of one bench."""
    full = ROUNDS_OF_QUALITY if name == "quality" else ROUNDS
    rounds = options.rounds or (1 if options.quick else full)
    where = options.ssd_path.resolve()
    return Context(options.quick, options.seed, rounds, where, options.device, options.resume)


def run_bench(name: str, context: Context) -> Iterator[Figure]:
    """All figures of one bench."""
    print(f"{name}: {BENCHES[name]}", file=sys.stderr, flush=True)
    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    return module.run(context)


def open_sink(target: str | None) -> contextlib.AbstractContextManager[TextIO | None]:
    """Where JSON lines go, if anywhere."""
    if target is None or target == "-":
        return contextlib.nullcontext(sys.stdout if target else None)
    return open(target, "w")


def main(arguments: Sequence[str]) -> int:
    """Runs what was asked for; 1 where one could not run (a missed target is a figure)."""
    options = parse(arguments)
    if options.name == "list":
        for name, purpose in BENCHES.items():
            print(f"{name:10} {purpose}")
        return 0
    figures: list[Figure] = []
    status = 0
    with open_sink(options.json) as sink:
        for name in chosen(options):
            try:
                for figure in run_bench(name, context_of(name, options)):
                    figures.append(figure)
                    if sink:  # at once: what was measured survives what comes after
                        print(as_json(figure, options.seed), file=sink, flush=True)
            except BenchError as error:
                print(f"{name}: {error}", file=sys.stderr)
                status = 1
    if figures:
        console = Console(stderr=options.json == "-")
        console.width = max(console.width, 110)  # a figure that is cut is no figure
        print_table(figures, options.seed, console)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

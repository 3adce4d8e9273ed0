"""The largest Llama that trains with all that a machine has free of device memory, host memory and
SSD. Gradients are used as soon as they are complete, so a parameter takes 12 bytes: itself, its
residual and two moments. Each attempt is a process of its own, with a limit in time.
"""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .attempt import command, completed
from .common import GIB, MIB, Context, Figure
from .device import free_bytes, full_size_needs_gpu
from .host_room import grow
from .models import parameter_count

BYTES_PER_PARAMETER = 12
OF_BYTES_MIN = 95.0  # percent
FIRST = 0.97  # of what would fill every byte: the first attempt
STEP, PRECISION = 0.05, 0.01  # the first step down; how close the search comes
ATTEMPT_SECONDS = 1800
DEPTH_MIN = 64  # layers: so that one more is a small step
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
TOKENS = 2048
STEPS = 3 + 3  # three are recorded and timed, and the plan that is made has to fit as well
HOST_MAX = 1024 * GIB  # bytes: a machine may show what it has only as it is touched

# What is left to the driver and PyTorch, to Python and the system, and to the file system.
DEVICE_LEFT, HOST_LEFT, SSD_LEFT = GIB, 6 * GIB, GIB


@dataclass(frozen=True)
class Machine:
    """Bytes of every tier."""

    device: int
    host: int
    ssd: int

    @property
    def parameters(self) -> float:
        """That would fill every byte."""
        return (self.device + self.host + self.ssd) / BYTES_PER_PARAMETER


QUICK = Machine(512 * MIB, 128 * MIB, 256 * MIB)


def free(context: Context) -> Machine:
    """What is free before anything runs."""
    from strata._config.machine import free_host_bytes

    grow(HOST_MAX, context.say)
    ssd = shutil.disk_usage(context.ssd_path).free
    return Machine(free_bytes(context.device), free_host_bytes(), ssd)


def budgets(machine: Machine) -> Machine:
    """What strata is given of it."""
    return Machine(machine.device - DEVICE_LEFT, machine.host - HOST_LEFT, machine.ssd - SSD_LEFT)


def width_for(parameters: float) -> int:
    """The widest Llama of about that many parameters that is deep enough."""
    for hidden in reversed(WIDTHS):
        if parameter_count(hidden, DEPTH_MIN) <= parameters:
            return hidden
    return WIDTHS[0]


def layers_for(hidden: int, parameters: float) -> int:
    """The most layers that stay below so many parameters."""
    block = parameter_count(hidden, 1) - parameter_count(hidden, 0)
    return max(1, int((parameters - parameter_count(hidden, 0)) / block))


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The most layers that fit, where `most` would fill every byte; 0 where none do. Goes down from
    FIRST in steps that double until one fits, then halves the distance to what did not, until that
    is small.
    """
    failed, tried = most + 1, max(1, int(most * FIRST))
    step = max(1, int(most * STEP))
    while not fits(tried):
        if tried == 1:
            return 0
        failed, tried = tried, max(1, tried - step)
        step *= 2
    while failed - tried > max(1, PRECISION * most):
        middle = (failed + tried) // 2
        if fits(middle):
            tried = middle
        else:
            failed = middle
    return tried


def attempt(context: Context, given: Machine, hidden: int, layers: int) -> bool:
    """Whether all steps of a model of this shape complete with finite losses."""
    size = f"{parameter_count(hidden, layers) / 1e9:.4g} B ({hidden} x {layers})"
    with context.scratch() as folder:
        words = command(
            "strata",
            hidden=hidden,
            layers=layers,
            tokens=64 if context.quick else TOKENS,
            steps=STEPS,
            seed=context.seed,
            device=context.device,
            device_bytes=given.device,
            host_bytes=given.host,
            ssd_bytes=given.ssd,
            ssd_path=folder,
            update="in_backward",
            planned=True,
        )
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=ATTEMPT_SECONDS
            )
        except subprocess.TimeoutExpired:
            context.say(f"{size}: not within {ATTEMPT_SECONDS} s")
            return False
    return completed(done, size, context.say)


class Attempts:
    """What is known of numbers of layers: in a file, so that a search that was cut off goes on."""

    def __init__(self, path: Path | None, shape: Mapping[str, int]) -> None:
        """Reads what earlier runs found. `shape`: attempts on another one say nothing."""
        self._path, self._shape = path, dict(shape)
        self._known: dict[int, bool] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # half a line: it was cut off there
                    found = json.loads(line)
                    if found["shape"] == self._shape:
                        self._known[found["layers"]] = found["fits"]

    def ask(self, layers: int, attempt: Callable[[int], bool]) -> bool:
        """Whether so many layers fit; tries only what nobody has tried."""
        if layers not in self._known:
            self._known[layers] = attempt(layers)
            if self._path is not None:
                line = {"shape": self._shape, "layers": layers, "fits": self._known[layers]}
                with self._path.open("a") as file:
                    print(json.dumps(line), file=file)
        return self._known[layers]


def run(context: Context) -> Iterator[Figure]:
    """Yields the parameters that fit, and their share of what would fill every byte."""
    full_size_needs_gpu(context)
    machine = QUICK if context.quick else free(context)
    given = machine if context.quick else budgets(machine)
    if context.quick:
        hidden, layers = WIDTHS[0], 2  # one attempt
        layers = layers if attempt(context, given, hidden, layers) else 0
    else:
        hidden = width_for(machine.parameters)
        most = layers_for(hidden, machine.parameters)
        attempts = Attempts(context.resume, {"hidden": hidden, "seed": context.seed})
        layers = largest(
            most,
            lambda count: attempts.ask(count, lambda n: attempt(context, given, hidden, n)),
        )
    best = parameter_count(hidden, layers) if layers else 0
    bench, target = "capacity-gpu", None if context.quick else OF_BYTES_MIN
    for tier in ("device", "host", "ssd"):
        yield Figure(bench, f"{tier}_free", getattr(machine, tier) / 1e9, "GB")
    yield Figure(bench, "parameters", best, "parameters", None, machine.parameters, "higher")
    share = 100 * best / machine.parameters
    yield Figure(bench, "of_all_bytes", share, "%", target, 100, "higher")
    share = 100 * best / given.parameters
    yield Figure(bench, "of_budgets", share, "%", None, 100, "higher")

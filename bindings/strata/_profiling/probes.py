"""How fast a device computes, and the lanes of a step at work: how fast each is alone, and what is
left of it beside another. For calibrate.py.

    compute = Compute("bfloat16", torch.device("cuda", 0))
    compute.run(0.1)                           # FLOP/s
    matmul_flops("bfloat16", compute.device)
    alone, slow = measure_lanes(compute, copies, update, ssd, attempt)
    alone["upload"], slow["compute"]["update"]

Two lanes together run at the same time, each on a thread of its own: what is left of each one's
speed is its entry in `slow`. Computation always is the caller's thread, and on a GPU the stream
that is current there; copies are the core's, on streams of their own.

Note [Time on a GPU]. Python launches kernels and goes on. Work that repeats is launched some rounds
ahead, so that the work is measured and not its launch. Each round leaves an event on the caller's
stream: the events give the device's own time, and the caller waits for an older one before it
launches more. Nothing waits for the device as a whole. A round that is shorter than its launch
would measure the launch all the same, so rounds are made large enough for the device at hand.

Note [Slow processors]. One without arithmetic for a 16-bit dtype takes seconds for what another one
does in milliseconds. So rounds on the host begin small as well, and grow as long as they are short.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from .._config.threads import Thread

if TYPE_CHECKING:
    from .._core import CopyProbe, DtypeName, LaneName, SsdProbe, UpdateProbe

SHORTEST_SECONDS = 0.1  # spent on looking for the shortest time
ROUNDS_MIN = 4  # for that
ROUNDS_AHEAD = 3  # that are launched on a GPU
GPU_ROUND_SECONDS = 1.5e-3  # several times what its launch takes
ROUND_SECONDS = 20e-3  # of the host: windows hold several of them
COPIED_BYTES = 128 << 20  # more than any cache

# Of a block: tokens at first and at most, and widths. Of a product: rows at most, and the others.
TOKENS, TOKENS_MAX, HIDDEN, FEED_FORWARD = 1, 64, 768, 2048
GPU_TOKENS, GPU_TOKENS_MAX, GPU_HIDDEN, GPU_FEED_FORWARD = 256, 8192, 2048, 5632
PRODUCT, GPU_PRODUCT = (512, 1024, 2048), (4096, 4096, 4096)


class Compute:
    """Forward and backward of a feed-forward block, over and over."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype
        on_gpu = device.type == "cuda"
        hidden, wide = (GPU_HIDDEN, GPU_FEED_FORWARD) if on_gpu else (HIDDEN, FEED_FORWARD)
        self._weights = [
            self._tensor(*shape) for shape in ((hidden, wide), (hidden, wide), (wide, hidden))
        ]
        self._take(GPU_TOKENS if on_gpu else TOKENS)
        self._once()  # what is only slow the first time
        if on_gpu:
            self._grow(GPU_TOKENS_MAX, GPU_ROUND_SECONDS)
        else:
            self._grow(TOKENS_MAX, ROUND_SECONDS)

    def run(self, seconds: float) -> float:
        """FLOP/s over about `seconds`, on the caller's current stream."""
        rounds, took = repeat(self._once, self.device, seconds)
        return rounds * self._flops / took

    def _grow(self, tokens_max: int, enough: float) -> None:
        """More tokens, until a round takes long enough; or as many as there is memory for."""
        while self.tokens < tokens_max:
            rounds, took = repeat(self._once, self.device, enough / 2)
            if took / rounds >= enough:
                return
            try:
                self._take(2 * self.tokens)
                self._once()
            except torch.OutOfMemoryError:
                self._take(self.tokens // 2)
                return

    def _take(self, tokens: int) -> None:
        hidden, wide = self._weights[0].shape
        self.tokens = tokens
        self._flops = 6 * tokens * 3 * hidden * wide
        self._batch = self._tensor(tokens, hidden)

    def _tensor(self, *shape: int) -> torch.Tensor:
        return _random(shape, self._dtype, self.device).requires_grad_()

    def _once(self) -> None:
        x, (gate, up, down) = self._batch, self._weights
        with torch.enable_grad():
            loss = (F.silu(x @ gate) * (x @ up) @ down).sum()
            torch.autograd.grad(loss, [x, gate, up, down])


def matmul_flops(dtype: str, device: torch.device) -> float:
    """FLOP/s of large matrix products."""
    on_gpu = device.type == "cuda"
    most, inner, columns = GPU_PRODUCT if on_gpu else PRODUCT
    a, b = _random((most, inner), dtype, device), _random((inner, columns), dtype, device)
    rows = most if on_gpu else 1

    def product() -> None:
        torch.mm(a[:rows], b)

    product()
    while rows < most and repeat(product, device, 0.0)[1] < ROUND_SECONDS:
        rows = min(most, 2 * rows)
    return 2 * rows * inner * columns / _shortest(product, device)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that copies inside the device's memory read and write, together."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * COPIED_BYTES / _shortest(lambda: target.copy_(source), device)


def slice_seconds(device: torch.device) -> float:
    """What a block costs beside its arithmetic: forward and backward of one with next to none. On a
    GPU that is the time of its launches."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, device="cpu")
        block = block.to(device)
        x = torch.zeros(1, 4, 32, requires_grad=True, device=device)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # there is nothing to share, and others may keep threads waiting
        try:
            return _shortest(lambda: block(x).sum().backward(), device) / 2
        finally:
            torch.set_num_threads(threads)


def repeat(work: Callable[[], object], device: torch.device, seconds: float) -> tuple[int, float]:
    """Repeats `work` for about `seconds`. Returns how often, and how long that took the device."""
    begin = time.perf_counter()
    rounds = 0
    if device.type != "cuda":
        while not rounds or time.perf_counter() - begin < seconds:
            work()
            rounds += 1
        return rounds, time.perf_counter() - begin
    # See Note [Time on a GPU].
    first = last = _mark(device)
    ahead: deque[torch.cuda.Event] = deque()
    while not rounds or time.perf_counter() - begin < seconds:
        work()
        rounds += 1
        last = _mark(device)
        ahead.append(last)
        if len(ahead) == ROUNDS_AHEAD:
            ahead.popleft().synchronize()
    last.synchronize()
    return rounds, first.elapsed_time(last) * 1e-3


def _mark(device: torch.device) -> torch.cuda.Event:
    """An event. A thread that waits for it sleeps: the processor has other work meanwhile."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, undisturbed; of a GPU, of one among several."""
    on_gpu = device.type == "cuda"
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < ROUNDS_MIN or time.perf_counter() - begin < SHORTEST_SECONDS:
        rounds, took = repeat(work, device, SHORTEST_SECONDS / 8 if on_gpu else 0.0)
        taken.append(took / rounds)
    return min(taken)


def _random(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Small numbers; the user's random numbers stay as they are. (Equal ones would take a GPU less
    power, and so less time.)"""
    source = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(shape, generator=source, device="cpu") / shape[-1]
    return values.to(getattr(torch, dtype)).to(device)


ALONE_SECONDS = 0.1  # as often as ROUNDS says
TOGETHER_SECONDS = 0.25
ROUNDS = 3  # of what is measured more than once
SLOWEST = 0.05  # of its speed that a lane keeps beside another, at least
LANES: tuple[LaneName, ...] = ("compute", "upload", "download", "read", "write", "update")

Run = Callable[[float], float]  # seconds to be busy → FLOP, bytes or elements per second
# Names of lanes, and what is to be done with them → its result; None where it cannot be done.
Attempt = Callable[..., Any]


def measure_lanes(
    compute: Compute | None,
    copies: CopyProbe | None,
    update: UpdateProbe | None,
    ssd: SsdProbe | None,
    attempt: Attempt,
) -> tuple[dict[LaneName, float], dict[LaneName, dict[LaneName, float]]]:
    """The speed of every lane alone, and the part of it that is left beside another."""
    runs: dict[LaneName, Run] = {}
    if compute is not None:
        runs["compute"] = compute.run
    if copies is not None:
        runs["upload"] = lambda seconds: copies.run("in", seconds)[0]
        runs["download"] = lambda seconds: copies.run("out", seconds)[1]
    if update is not None:
        runs["update"] = update.run
    if ssd is not None:
        runs["read"] = lambda seconds: ssd.run("in", seconds)[0]
        runs["write"] = lambda seconds: ssd.run("out", seconds)[1]
    alone: dict[LaneName, float] = {}
    for lane in list(runs):
        if (speed := attempt((lane,), lambda run=runs[lane]: _typical(run))) is None:
            del runs[lane]  # a disk that failed
        else:
            alone[lane] = speed

    slow: dict[LaneName, dict[LaneName, float]] = {lane: {} for lane in LANES}
    for first, second, both in _pairs(runs, copies, ssd):
        speeds = attempt((first, second), both)
        if speeds is None:
            continue
        for lane, beside, speed in ((first, second, speeds[0]), (second, first, speeds[1])):
            slow[lane][beside] = min(1.0, max(SLOWEST, speed / alone[lane]))
    # Copies of both ways are the same work to everybody else.
    for lane in ("compute", "read", "write", "update"):
        if "upload" in slow[lane]:
            slow[lane]["download"] = slow[lane]["upload"]
            slow["download"][lane] = slow["upload"][lane]
    return alone, slow


def decode_speed(copies: CopyProbe, dtype: DtypeName) -> float:
    """Bytes per second of values that are computed of codes on the way to frames of the host. Forms
    differ little: what is written takes most of the time."""
    return _typical(lambda seconds: copies.decode_bytes_s("nf4", dtype, seconds))


def _typical(run: Run) -> float:
    """The speed of a lane alone: the median, because lanes together are measured so too."""
    return median(run(ALONE_SECONDS) for _ in range(ROUNDS))


def _pairs(
    runs: Mapping[LaneName, Run], copies: Any, ssd: Any
) -> Iterator[tuple[LaneName, LaneName, Callable[[], tuple[float, float]]]]:
    """Every two lanes that are measured together."""
    probes = {("upload", "download"): copies, ("read", "write"): ssd}
    for first, second in combinations([lane for lane in LANES if lane in runs], 2):
        if probe := probes.get((first, second)):  # both ways of one link
            yield first, second, partial(probe.run, "both", TOGETHER_SECONDS)
        elif "download" not in (first, second):
            # What computation loses decides most: it is measured more than once.
            rounds = ROUNDS if first == "compute" else 1
            yield first, second, partial(together, runs[first], runs[second], rounds)


def together(first: Run, second: Run, rounds: int = 1) -> tuple[float, float]:
    """The speeds of two lanes at the same time: `first` on this thread, `second` beside it. The
    medians of some rounds."""
    speeds = [_together_once(first, second) for _ in range(rounds)]
    return median(speed[0] for speed in speeds), median(speed[1] for speed in speeds)


def _together_once(first: Run, second: Run) -> tuple[float, float]:
    ready = threading.Barrier(2)
    speeds: list[float] = []
    errors: list[BaseException] = []

    def beside() -> None:
        try:
            ready.wait()
            speeds.append(second(TOGETHER_SECONDS))
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)

    thread = Thread(target=beside, name="strata-calibrate")
    thread.start()
    ready.wait()
    try:
        speed = first(TOGETHER_SECONDS)
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return speed, speeds[0]

"""A steady step never waits for the device as a whole: on a double of torch.cuda that knows no such
call, and with --device cuda by what PyTorch and its profiler say.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import strata
import strata._profiling.memory_curve
import strata._runtime.wrapped as wrapped_module
import torch
from fake_cuda import FakeCuda
from small_models import adamw, build
from stacks import Blocks
from strata._profiling.allocator import Allocator
from strata._profiling.recorder import Recorder
from strata._runtime.wrapped import wrapped

from benchmarks import sync_trace

GPU = torch.device("cuda", 0)
UNDER_WAY = 6  # steps until a plan is followed, and its memory was looked at
STEPS = 4


def step(model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    """What a user writes, who does not look at the loss."""
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# On a double --------------------------------------------------------------------------------------


@pytest.fixture
def gpu_clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Times and memory are a GPU's, tensors the host's. Models may outlive the double, which knows
    the user's limit: allocators put that back ahead of its end."""
    cuda = FakeCuda(monkeypatch)
    made: list[Allocator] = []

    def make(device: torch.device, size: int) -> Allocator:
        made.append(Allocator(GPU, size))
        return made[-1]

    monkeypatch.setattr(wrapped_module, "Recorder", lambda device: Recorder(GPU))
    monkeypatch.setattr(
        sys.modules["strata._planning.planning"],
        "Allocator",
        make,
    )
    yield cuda
    for allocator in made:
        allocator.close()


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From the call on, looking at a tensor's values raises, as it would wait on a GPU."""
    with monkeypatch.context() as patch:

        def forbid() -> None:
            for name in READS:

                def read(tensor: torch.Tensor, *args: Any, name: str = name) -> None:
                    raise AssertionError(f"Tensor.{name} waits for the device")

                patch.setattr(torch.Tensor, name, read)

        yield forbid


@pytest.mark.host_only
@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.parametrize("activations", ["keep", "swap", "recompute"])
def test_a_steady_step_asks_nothing_that_waits_for_the_device(
    core: ModuleType,
    gpu_clocks: FakeCuda,
    nothing_is_read: Callable[[], None],
    activations: Any,
) -> None:
    model = build(Blocks)
    memory = {"device": "8MiB", "host": "64MiB"}
    model, optimizer = strata.wrap(model, adamw(model), memory=memory, activations=activations)
    batch = torch.randn(64, 48)
    for _ in range(UNDER_WAY):
        step(model, optimizer, batch)
    assert wrapped(model).planning.plan is not None  # type: ignore[union-attr]
    assert "memory_stats" in gpu_clocks.asked  # the double stands where it should
    gpu_clocks.asked.clear()
    nothing_is_read()
    for _ in range(STEPS):
        step(model, optimizer, batch)
    # One wait for the last event of a step, which the gradients have passed already.
    assert gpu_clocks.asked == ["event.synchronize"] * STEPS


@pytest.mark.host_only
@pytest.mark.parametrize("name", ["Stream.synchronize", "empty_cache"])
def test_the_double_notices(cuda_double: FakeCuda, name: str) -> None:
    if name == "Stream.synchronize":
        torch.cuda.Stream(GPU).synchronize()
    else:
        getattr(torch.cuda, name)()
    assert len(cuda_double.asked) == 1
    with pytest.raises(AssertionError, match="never waited for"):
        torch.cuda.synchronize()


@pytest.fixture
def cuda_double(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


# The trace ----------------------------------------------------------------------------------------


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


@pytest.mark.host_only
def test_synchronising_calls_of_a_step_are_counted_by_kind() -> None:
    events = [
        event(sync_trace.RANGE, 10, 20),
        event("cudaDeviceSynchronize", 5, 9),  # the profiler's own
        event("cuCtxSynchronize", 11, 12),
        event("cudaFree", 12, 13),
        event("cudaMemcpyAsync", 13, 14),
        event("cudaMemcpy", 13, 14),
        event("cudaStreamSynchronize", 14, 15),
        event("cuMemcpyDtoHAsync_v2", 14, 15),
        event("cuEventSynchronize", 15, 16),
        event("cudaEventSynchronize", 16, 30),
        event("cudaEventQuery", 17, 18),
        event("cudaDeviceSynchronize", 21, 22),
    ]
    assert sync_trace.count(events) == {"device": 2, "stream": 2, "event": 2}


@pytest.mark.host_only
def test_a_step_of_the_host_synchronises_nothing() -> None:
    """In a process of its own: once, behind the profilers of other suites, torch aborted here."""
    program = (
        "import torch; from benchmarks import sync_trace; "
        "print(sync_trace.synchronisations(lambda: torch.ones(3) + 1))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=env
    )
    assert done.stdout.strip() == "{'device': 0, 'stream': 0, 'event': 0}"


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu_only
@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.parametrize("activations", ["keep", "swap", None])
def test_a_steady_step_on_a_gpu_waits_for_no_stream(core: ModuleType, activations: Any) -> None:
    """PyTorch's debug mode raises where PyTorch itself waits for a stream or the device (not for an
    event); the profiler sees the driver's calls, those of strata's threads as well."""
    model = build(Blocks)
    memory = {"device": "64MiB"}
    model, optimizer = strata.wrap(model, adamw(model), memory=memory, activations=activations)
    batch = torch.randn(64, 48)
    for _ in range(2 * UNDER_WAY):
        step(model, optimizer, batch)

    def steady() -> None:
        for _ in range(STEPS):
            step(model, optimizer, batch)

    torch.cuda.set_sync_debug_mode("error")
    try:
        steady()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counts = sync_trace.synchronisations(steady)
    assert (counts["device"], counts["stream"]) == (0, 0)
    strata.unwrap(model)

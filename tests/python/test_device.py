"""Which device computes, and what is told to it: on doubles of the core and of torch.cuda."""

import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_core
import pytest
import strata
import strata._activations.swapping
import strata._config.configure
import strata._runtime.wrapped as wrapped_module
import torch
from fake_cuda import FakeCuda, Stream
from small_models import adamw, batch, build, llama
from strata._config import device, kernel
from strata._profiling import clock
from strata._profiling.allocator import Allocator
from strata._profiling.memory_curve import CudaMemoryCurve, start_curve
from strata._profiling.recorder import Recorder
from strata._profiling.uses import Uses
from strata._runtime import streams
from strata._runtime.lander import Lander
from strata._runtime.wrapped import wrapped
from torch import nn

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def usable(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The double of the core takes a GPU, too; its memory remains the host's."""
    monkeypatch.setattr(fake_core, "device_error", lambda name: "")
    return cuda


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(core: ModuleType, name: Any) -> None:
    model = mlp()
    with pytest.raises(strata.StrataError, match=r"device='cuda.* cannot be used: .+"):
        strata.wrap(model, adamw(model), device=name)
    strata.wrap(model, adamw(model))  # nothing was changed
    strata.unwrap(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["auto", "host", "cpu", torch.device("cpu")])
def test_words_for_the_host(core: ModuleType, name: Any) -> None:
    model = mlp()
    strata.wrap(model, adamw(model), device=name)
    assert wrapped(model).config["device"] == "host"
    assert wrapped(model).device == torch.device("cpu")
    strata.unwrap(model)


def test_words_that_mean_nothing() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="unknown device 'cudda': did you mean 'cuda'"):
        strata.wrap(model, adamw(model), device="cudda")
    with pytest.raises(TypeError, match="device must be"):
        strata.wrap(model, adamw(model), device=0)  # type: ignore[arg-type]
    assert device.parse("cuda") == device.parse("cuda:0") == "cuda:0"
    assert device.parse(torch.device("cuda", 3)) == "cuda:3"


def test_auto_takes_a_gpu_where_core_and_torch_can(
    usable: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_core", fake_core)
    assert device.choose("auto", mlp()) == "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto", mlp()) == "host"
    with pytest.raises(strata.StrataError, match="cannot use GPUs: install a build with CUDA"):
        device.choose("cuda", mlp())


@pytest.mark.parametrize("there", [True, False])
def test_auto_says_why_it_takes_the_host_only_where_there_is_a_gpu(
    there: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shown = tmp_path / "nvidiactl"
    if there:
        shown.touch()
    monkeypatch.setattr(kernel, "DRIVER_FILES", (shown,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "_core", fake_core)
    monkeypatch.setattr(fake_core, "device_error", lambda name: "the NVIDIA driver is too old")
    with caplog.at_level(logging.INFO, "strata"):
        assert device.choose("auto", mlp()) == "host"
        assert device.choose("host", mlp()) == "host"
    said = [(r.levelno, r.getMessage()) for r in caplog.records]
    warning = (logging.WARNING, "device='auto' is the host: the NVIDIA driver is too old")
    assert said == ([warning] if there else [])


# Streams ------------------------------------------------------------------------------------------

ACTIVATIONS = {"save_activation", "fetch_activation", "await_activation"}
TOLD = {"enter", "leave", "land_gradient", "device_written", *ACTIVATIONS}


@pytest.mark.parametrize("core", ["fake"], indirect=True)
def test_every_call_that_touches_the_device_names_the_current_stream(
    core: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Stream] = []

    def stream_of_landings(device: Any) -> Stream:
        made.append(Stream())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream_of_landings)
    for module in (wrapped_module, strata._activations.swapping):
        monkeypatch.setattr(module, "current_stream", lambda _: streams.current_stream(GPU))
    monkeypatch.setattr(wrapped_module, "Inline", lambda: Lander(GPU, 1 << 20))
    model = build(llama)
    model, optimizer = strata.wrap(
        model, adamw(model), memory={"device": "8MiB", "host": "8MiB"}, activations="swap"
    )
    for _ in range(6):
        model(**batch(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    told = wrapped(model).session.streams  # type: ignore[attr-defined]
    strata.unwrap(model)
    assert {name for name, _ in told} == TOLD
    (of_landings,) = made  # streams share the few queues of a GPU
    for name, stream in told:
        assert stream == (of_landings.cuda_stream if name == "land_gradient" else 7), name
    assert set(of_landings.waits) == {7}  # behind what computed the gradient
    assert len(of_landings.waits) > 6


def test_a_stream_that_is_captured_is_handed_to_no_landing(cuda: FakeCuda) -> None:
    lander = Lander(GPU, 4096)
    done: list[int] = []
    cuda.capturing = True
    for _ in range(3):  # they leave nothing under way
        with pytest.raises(strata.StrataError, match="around a backward of the model"):
            lander.put(done.append, 4096)
    cuda.capturing = False
    lander.put(done.append, 4096)
    lander.wait()
    lander.close()
    assert len(done) == 1


def test_the_host_has_no_streams() -> None:
    assert streams.current_stream(torch.device("cpu")) == 0


# Times --------------------------------------------------------------------------------------------


def test_times_are_the_devices(cuda: FakeCuda) -> None:
    recorder = Recorder(GPU)

    def compute(seconds: float) -> None:
        cuda.time += seconds  # Python has gone on at once

    compute(5.0)
    for unit, backward, seconds in ((0, False, 1.0), (1, False, 2.0), (1, True, 4.0)):
        wait_began = recorder.now()
        compute(0.25)  # the stream waits for the unit
        recorder.enter(unit, backward, wait_began, True)
        compute(seconds)
        recorder.leave(unit)
        compute(0.5)
    with recorder.paused():
        compute(8.0)
    step = recorder.take()
    assert [round(use.seconds, 6) for use in step.uses] == [1.0, 2.0, 4.0]
    assert [round(use.waited, 6) for use in step.uses] == [0.25, 0.25, 0.25]
    assert [round(use.gap_seconds, 6) for use in step.uses] == [0.0, 0.5, 0.5]
    assert step.tail_seconds == pytest.approx(0.5)
    assert step.end - step.begin == pytest.approx(7.0 + 3 * 0.75 + 8.0)
    assert step.uses[0].entered - step.uses[0].wait_began == pytest.approx(0.25)
    assert recorder.take().uses == []


def test_forwards_without_end_keep_no_more_events(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "EVENTS_MAX", 3)
    recorder = Recorder(GPU)
    for _ in range(5):
        recorder.enter(0, False, recorder.now(), True)
        cuda.time += 100.0
        recorder.leave(0)
    assert sum(use.seconds for use in recorder.take().uses) < 1.0  # as Python saw it
    recorder.enter(0, False, recorder.now(), True)
    assert recorder.take().uses[0].unit == 0


def test_times_of_streams_that_nobody_joined_are_waited_for(cuda: FakeCuda) -> None:
    recorder = Recorder(GPU)
    main = cuda.stream
    cuda.time = 5.0
    recorder.enter(0, False, recorder.now(), True)
    cuda.stream = SimpleNamespace(cuda_stream=8)
    cuda.time = 8.0
    recorder.leave(0)
    cuda.stream = main
    recorder.enter(1, False, recorder.now(), True)
    cuda.time = 9.0
    recorder.leave(1)
    assert [use.seconds for use in recorder.take().uses] == pytest.approx([3.0, 1.0])
    assert cuda.asked.count("event.synchronize") == 2  # of each stream, the last one


def test_uses_are_put_together_alike_by_any_clock() -> None:
    found = []
    for shift in (0.0, 100.0):
        uses = Uses()
        uses.enter(0, False, shift + 1, shift + 2)
        uses.pause(shift + 3, shift + 4)
        uses.leave(0, shift + 6)
        step = uses.finish(shift + 7)
        found.append((step.uses[0].seconds, step.uses[0].waited, step.tail_seconds))
    assert found == [(3.0, 2.0, 1.0)] * 2


# Memory -------------------------------------------------------------------------------------------


def test_peaks_are_those_between_moments(cuda: FakeCuda) -> None:
    cuda.take(100)
    curve = CudaMemoryCurve(GPU)
    moments = []
    for most, left in ((50, 10), (5, 0), (0, 200)):
        cuda.take(most)
        cuda.take(left - most)
        time = clock.perf_counter()
        curve.note(time)
        moments.append(time)
    curve.stop()
    assert [curve.at(time) for time in moments] == [110, 110, 310]
    assert curve.peak(0.0, moments[0]) == 150
    assert curve.peak(moments[0], moments[1]) == 115
    assert curve.peak(moments[1], moments[1]) == 110
    assert curve.peak(moments[0], float("inf")) == 310


def test_pytorch_gets_what_pages_leave(cuda: FakeCuda) -> None:
    allocator = Allocator(GPU, 4 << 30)
    allocator.give_pages(3 << 30)
    allocator.give_pages(3 << 30)
    allocator.give_pages(5 << 30)
    allocator.close()
    assert cuda.fractions == [1 / 8, 0.0, 1.0]
    host = Allocator(torch.device("cpu"), 4 << 30)
    host.give_pages(1 << 30)
    host.close()
    assert len(cuda.fractions) == 3


def test_a_limit_of_the_users_is_kept_to_and_put_back(cuda: FakeCuda) -> None:
    cuda.fractions = [0.25]
    allocator = Allocator(GPU, 4 << 30)
    allocator.give_pages(1 << 30)  # leaves 3 of 8 GiB
    allocator.give_pages(3 << 30)
    allocator.close()
    allocator.close()
    assert cuda.fractions == [0.25, 0.25, 1 / 8, 0.25]


def test_models_on_one_device_share_its_limit(cuda: FakeCuda) -> None:
    cuda.fractions = [0.75]
    first, second = Allocator(GPU, 4 << 30), Allocator(GPU, 3 << 30)
    first.give_pages(2 << 30)  # leaves 2 of 8 GiB
    second.give_pages(2 << 30)
    assert cuda.fractions[-1] == 3 / 8
    first.give_pages(4 << 30)
    assert cuda.fractions[-1] == 1 / 8
    first.close()
    assert cuda.fractions[-1] == 1 / 8
    second.close()
    assert cuda.fractions[-1] == 0.75


def test_a_limit_goes_with_the_model_that_nobody_unwraps(cuda: FakeCuda) -> None:
    first, second = Allocator(GPU, 4 << 30), Allocator(GPU, 4 << 30)
    first.give_pages(2 << 30)
    second.give_pages(3 << 30)
    del first
    assert cuda.fractions[-1] == 1 / 8
    del second
    assert cuda.fractions[-1] == 1.0


def test_a_limit_that_the_user_sets_meanwhile_stays(cuda: FakeCuda) -> None:
    allocator = Allocator(GPU, 4 << 30)
    allocator.give_pages(2 << 30)
    cuda.fractions.append(0.5)
    allocator.give_pages(3 << 30)
    allocator.close()
    assert cuda.fractions[-1] == 0.5


def test_an_allocator_of_the_users_is_asked_nothing_that_it_cannot_say(cuda: FakeCuda) -> None:
    cuda.backend = "pluggable"
    assert start_curve(GPU) is None
    allocator = Allocator(GPU, 4 << 30)
    allocator.give_pages(3 << 30)
    allocator.close()
    assert cuda.fractions == [1 / 8, 1.0]
    assert "memory_stats" not in cuda.asked


@pytest.mark.parametrize("initialized", [True, False])
def test_what_pytorch_has_in_reserve_is_free(cuda: FakeCuda, initialized: bool) -> None:
    cuda.initialized = initialized
    cuda.free, cuda.reserve = 2 << 30, 3 << 30
    assert device.free_bytes("cuda:0") == (5 << 30 if initialized else 2 << 30)
    assert cuda.asked == ["empty_cache"] * initialized + ["mem_get_info"]
    assert device.free_bytes("host") is None


@pytest.mark.parametrize("core", ["fake"], indirect=True)
def test_budgets_are_asked_of_the_gpu(
    core: ModuleType, usable: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    plan = strata.plan(model, adamw(model), device="cuda")
    assert 0 < plan.budgets["device"] <= usable.free
    usable.free = 1000
    small = strata.plan(model, adamw(model), device="cuda", memory={"host": "1GiB"})
    assert small.budgets["device"] == int(1000 * strata._config.options.FREE_SHARE)
    with pytest.raises(strata.StrataError, match="cuda:0 has 1000 B free"):
        strata.plan(model, adamw(model), device="cuda", memory={"device": "1GiB"})
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)  # as if the user had moved it there
    monkeypatch.setattr(strata._config.configure, "_check_devices", lambda model, name: None)
    taken = sum(p.nbytes for p in model.parameters())
    with pytest.raises(strata.StrataError, match=f"the model takes {taken} B beside it until"):
        strata.plan(model, adamw(model), device="cuda", memory={"device": "1GiB"})


# Values are the CPU's -----------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_a_default_device_changes_nothing(core: ModuleType, tmp_path: Path) -> None:
    """The meta device stands for a GPU: what is made on it by mistake has no memory."""
    model, plain = mlp(), mlp()
    inputs = torch.ones(3, 8)
    plain_optimizer = adamw(plain)
    with torch.device("meta"):
        model, optimizer = strata.wrap(
            model, adamw(model), memory={"device": "8MiB", "host": "64MiB"}
        )
        for _ in range(4):
            model(inputs).sum().backward()
            assert strata.gather_grad(model[0].bias).device.type == "cpu"  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        strata.save(model, tmp_path / "saved")
        strata.load(model, tmp_path / "saved")
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        strata.unwrap(model)
    for _ in range(4):
        plain(inputs).sum().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_buffers_come_back_as_they_were(core: ModuleType) -> None:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm)
    strata.wrap(model, adamw(model), dtype=torch.bfloat16)
    assert norm.running_mean is not None
    assert norm.running_mean.dtype == torch.bfloat16
    strata.unwrap(model)
    assert norm.running_mean.dtype == torch.float32

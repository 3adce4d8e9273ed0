"""Calibration of a GPU, on doubles of torch.cuda and of the core's links: who is measured, by which
clock, and what is remembered of whom."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import strata
import torch
from fake_cuda import FakeCuda, MetaGpu
from made_up import every_speed
from small_models import adamw, build, llama
from strata import _core
from strata._cli import io_tune
from strata._cli import main as cli
from strata._config import device
from strata._profiling import calibrate, probes
from strata._profiling.calibrate import Calibration, Setup
from strata._profiling.probes import Compute
from strata._runtime.wrapped import wrapped
from strata._storage import trace_file

PAGE = 64 << 10
GPU = torch.device("cuda", 0)
NAMES = {"cuda:0": "GPU 0 (Toy, 01), driver for CUDA 13.0", "cuda:1": "GPU 1 (Toy, 02), driver"}
ROUND_SECONDS = 2e-3  # that the double takes, whatever the work


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module, name, value in (
        (probes, "ALONE_SECONDS", 0.002),
        (probes, "TOGETHER_SECONDS", 0.002),
        (calibrate, "COPY_BYTES", 16 * PAGE),
        (calibrate, "UPDATE_BYTES", 16 * PAGE),
        (probes, "SHORTEST_SECONDS", 0.002),
        (probes, "GPU_TOKENS", 16),
        (probes, "GPU_HIDDEN", 8),
        (probes, "GPU_FEED_FORWARD", 24),
        (probes, "GPU_PRODUCT", (4, 8, 16)),
    ):
        monkeypatch.setattr(module, name, value)
    described = {"device_description": NAMES.__getitem__, "device_error": lambda name: ""}
    monkeypatch.setattr(device, "_core", SimpleNamespace(**described))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Every round of work, behind which there is an event, takes as long."""
    fake = FakeCuda(monkeypatch)
    record = torch.cuda.Event.record

    def after_a_round(self: Any, stream: Any) -> None:
        fake.time += ROUND_SECONDS
        record(self, stream)

    monkeypatch.setattr(torch.cuda.Event, "record", after_a_round)
    with MetaGpu() as fake.memory:  # type: ignore[attr-defined]
        yield fake


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that copies were asked for; the host's are taken."""
    asked: list[str] = []
    real = _core.CopyProbe

    def probe(page_bytes: int, byte_count: int, name: str) -> _core.CopyProbe:
        asked.append(name)
        return real(page_bytes, byte_count, "host")

    monkeypatch.setattr(_core, "CopyProbe", probe)
    return asked


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """What was asked to be measured; made-up values in place of those of the machine."""
    asked: list[Setup] = []

    def measure(setup: Setup) -> Calibration:
        asked.append(setup)
        return Calibration(every_speed(1e9), 1e12, 1e11)

    monkeypatch.setattr(calibrate, "measure", measure)
    return asked


def forget(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Something that a calibration was measured with is another one now."""
    if change == "gpu":
        monkeypatch.setitem(NAMES, "cuda:0", NAMES["cuda:0"].replace("Toy", "Other"))
    elif change == "driver":
        monkeypatch.setitem(NAMES, "cuda:0", NAMES["cuda:0"].replace("13.0", "13.1"))
    else:
        monkeypatch.setattr(torch.version, "cuda", "99.9")


def test_the_host_and_each_gpu_are_remembered_apart(setups: list[Setup]) -> None:
    for _ in range(2):
        for name in ("host", "cuda:0", "cuda:1"):
            calibrate.calibration(Setup(1, PAGE, device=name))
    assert [setup.device for setup in setups] == ["host", "cuda:0", "cuda:1"]


@pytest.mark.parametrize("change", ["gpu", "driver", "torch"])
def test_what_a_gpu_is_and_what_drives_it_are_told_apart(
    change: str, setups: list[Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("host", "cuda:0"):
        calibrate.calibration(Setup(1, PAGE, device=name))
    forget(monkeypatch, change)
    for name in ("host", "cuda:0"):
        calibrate.calibration(Setup(1, PAGE, device=name))
    assert [setup.device for setup in setups] == ["host", "cuda:0", "cuda:0"]


def test_a_gpu_is_measured_where_it_is(gpu: Any, links: list[str]) -> None:
    torch.manual_seed(3)
    found = calibrate.measure(Setup(1, PAGE, device="cuda:0"))
    after = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(4))
    assert links == ["cuda:0"]
    assert gpu.memory.made > 8
    assert found.typical == []
    for name, value in found.costs.to_dict().items():
        if name not in ("slow", "landing_waits", "updates_first"):
            others = ("read_bytes_s", "write_bytes_s", "decode_bytes_s")
            assert (value > 0) is (name not in others)
    for lane in ("compute", "upload", "download", "update"):
        others = {"compute", "upload", "download", "update"} - {lane}
        assert set(found.costs.slow[lane]) >= others  # type: ignore[index]
    # By its own clock, however long Python took.
    assert found.flops_s == pytest.approx(2 * 4 * 8 * 16 / ROUND_SECONDS)
    assert found.costs.slice_seconds == pytest.approx(ROUND_SECONDS / 2)
    assert found.memory_bytes_s == pytest.approx(2 * probes.COPIED_BYTES / ROUND_SECONDS)


def test_computation_is_timed_by_the_gpu(gpu: FakeCuda) -> None:
    compute = Compute("bfloat16", GPU)
    assert compute.tokens == 16
    flops = 6 * 16 * 3 * 8 * 24
    assert compute.run(0.002) == pytest.approx(flops / ROUND_SECONDS)


def test_rounds_are_told_ahead(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    synchronize = torch.cuda.Event.synchronize

    def noted(event: torch.cuda.Event) -> None:
        done.append("wait")
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", noted)
    rounds, took = probes.repeat(lambda: done.append("work"), GPU, 0.005)
    assert done[: probes.ROUNDS_AHEAD + 1] == ["work"] * probes.ROUNDS_AHEAD + ["wait"]
    assert done[-1] == "wait"
    ahead = 0
    for what in done:
        ahead += 1 if what == "work" else -1
        assert ahead <= probes.ROUNDS_AHEAD
    assert (rounds, took) == (done.count("work"), pytest.approx(rounds * ROUND_SECONDS))


def rounds_by_tokens(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tokens_max: int
) -> Callable[[Any], None]:
    """A round takes a microsecond for each token; and there is not memory for any number."""
    monkeypatch.setattr(f"{__name__}.ROUND_SECONDS", 0.0)

    def once(self: Compute) -> None:
        if self.tokens > tokens_max:
            raise torch.OutOfMemoryError("no more")
        gpu.time += self.tokens * 1e-6

    return once


@pytest.mark.parametrize(("tokens_max", "taken"), [(1 << 20, 2048), (512, 512)])
def test_rounds_are_large_enough_for_the_gpu(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tokens_max: int, taken: int
) -> None:
    monkeypatch.setattr(Compute, "_once", rounds_by_tokens(gpu, monkeypatch, tokens_max))
    compute = Compute("bfloat16", GPU)
    assert compute.tokens == taken
    assert compute.run(0.002) == pytest.approx(6 * 3 * 8 * 24 / 1e-6)


def test_a_gpu_that_is_full_is_taken_to_be_a_modest_one(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> Any:
        raise _core.StrataError("GPU 0 has no memory to hold frames")

    def out_of_memory(self: Compute) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_core, "CopyProbe", full)
    monkeypatch.setattr(Compute, "_once", out_of_memory)
    found = calibrate.calibration(Setup(1, PAGE, device="cuda:0"))
    assert found.typical == ["compute", "upload", "download"]
    assert found.costs.upload_bytes_s == calibrate.TYPICAL["upload"]
    assert found.costs.update_elements_s != calibrate.TYPICAL["update"]
    for words in ("cannot measure upload and download", "no memory", "CUDA out of memory"):
        assert words in caplog.text
    assert not calibrate.cache_folder().exists()  # perhaps there is room, next time


def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_core", _core)
    if not (reason := _core.device_error("cuda:4000")):
        pytest.skip("there are very many GPUs")
    for ask in (
        lambda: calibrate.calibration(Setup(1, PAGE, device="cuda:4000")),
        lambda: _core.CopyProbe(2 << 20, 8 << 20, "cuda:4000"),
    ):
        with pytest.raises(strata.StrataError) as refused:
            ask()
        assert reason in str(refused.value)
    with pytest.raises(strata.StrataError, match="there is no device"):
        _core.CopyProbe(PAGE, 4 * PAGE, "gpu")


# Who asks for it ----------------------------------------------------------------------------------


def test_plans_ask_for_the_device_of_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    asked: list[Setup] = []
    costs = calibrate.costs

    def remember(setup: Setup, refresh: bool = False) -> Any:
        asked.append(setup)
        return costs(setup, refresh)

    monkeypatch.setattr(calibrate, "costs", remember)
    model = build(llama)
    model, optimizer = strata.wrap(
        model, adamw(model), memory={"device": "8MiB", "host": "64MiB"}, device="host"
    )
    state = wrapped(model)
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert [setup.device for setup in asked] == ["host"]
    state.config["device"] = "cuda:0"
    assert state.planning is not None
    state.planning.measure_again()
    assert asked[-1] == Setup(
        state.config["workers"], state.session.plan["page_bytes"], [], "auto", device="cuda:0"
    )
    strata.save_trace(model, tmp_path / "trace")
    assert trace_file.load(tmp_path / "trace").origin.machine == NAMES["cuda:0"]
    strata.unwrap(model)


def tune(*options: str) -> int:
    return cli.main(["io-tune", *options])


@pytest.mark.usefixtures("gpu")
def test_io_tune_measures_the_gpu_that_wrap_would_take(
    setups: list[Setup], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune() == 0
    assert NAMES["cuda:0"] in capsys.readouterr().out
    assert tune("--device", "cuda:1") == 0
    assert NAMES["cuda:1"] in capsys.readouterr().out
    assert tune("--device", "host") == 0
    assert "GPU" not in capsys.readouterr().out
    assert [setup.device for setup in setups] == ["cuda:0", "cuda:1", "host"]
    workers = strata._config.configure.default_workers
    assert [setup.workers for setup in setups] == [
        workers("cuda:0"),
        workers("cuda:0"),
        workers("host"),
    ]


def test_io_tune_refuses_what_is_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        tune("--device", "cudda")
    assert refused.value.code == 2
    assert "unknown device 'cudda': did you mean 'cuda'?" in capsys.readouterr().err
    monkeypatch.setattr(device, "why_not", lambda name: "it is on fire")
    assert tune("--device", "cuda") == 1
    assert "device='cuda:0' cannot be used: it is on fire" in capsys.readouterr().err


def test_lanes_that_were_not_measured_are_shown_as_such() -> None:
    table = io_tune.lanes_table(Calibration(every_speed(8e9), 1e12, 1e11, ["upload"]))
    head, *lanes = table.splitlines()
    assert table.count("typical") == table.count("8.00 GB/s (typical)") == 1
    start = head.index("upload")
    assert {lane[start : start + len("upload")].strip() for lane in lanes} == {""}

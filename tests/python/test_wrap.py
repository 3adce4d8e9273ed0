"""wrap, plan, report, unwrap: what they refuse, choose, say and leave behind."""

import gc
import logging
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_core
import pytest
import strata
import torch
from safetensors.torch import save_file
from small_models import ConvNet, adamw, assert_same, batch, build, llama, tight, train
from strata._config import machine, options
from torch import nn
from variants import thorough


def test_same_objects_come_back(core: ModuleType) -> None:
    model = build(llama)
    parameters = list(model.parameters())
    inner = adamw(model)
    wrapped, optimizer = strata.wrap(model, inner)
    assert wrapped is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert optimizer.param_groups is inner.param_groups
    assert [p.shape for p in parameters] == [p.shape for p in build(llama).parameters()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memroy": 1}, r"'memroy'.*'memory'"),
        ({"ssd_paths": "x"}, r"'ssd_paths'.*'ssd_path'"),
        ({"memory": {"devise": 1}}, r"tier 'devise'.*'device'"),
        ({"memory": {"device": "1GBi"}}, r"unit 'GBi'"),
        ({"memory": {"ssd": "1GiB"}}, "ssd_path"),
        ({"update": "in_bakward"}, r"update 'in_bakward'.*'in_backward'"),
        ({"io_engine": "uring"}, r"io_engine 'uring'.*'io_uring'"),
        ({"dtype": torch.float64}, r"float64.*bfloat16"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"workers": 0}, "workers"),
        (
            {"workers": 100_000, "memory": {"host": "1GiB"}},
            "workers must be from 1 to 1024, not 100000$",
        ),
        ({"workers": 2**70}, "workers must be from 1 to 1024"),
        ({"max_grad_norm": 10**400}, "max_grad_norm is larger than any float"),
        ({"page_size": "4 pages"}, "pages"),
        ({"page_size": "4KiB"}, "power of two from 64.0 KiB"),
        ({"page_size": 100_000}, "power of two"),
        ({"memory": "8GiB"}, "memory must be a dictionary"),
        ({"memory": {"host": "9999999TiB"}}, "more than any machine"),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps must be a whole num"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be a number"),
        ({"workers": "2"}, "workers must be a whole number"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"ssd_path": ""}, "ssd_path is empty"),
    ],
)
def test_bad_arguments(core: ModuleType, arguments: dict[str, Any], message: str) -> None:
    model = build(llama)
    for function in (strata.wrap, strata.plan):
        with pytest.raises((TypeError, ValueError), match=message):
            function(model, adamw(model), **arguments)
    assert_same(model, build(llama))


def test_too_small_a_budget_says_what_would_do(core: ModuleType) -> None:
    model = build(llama)
    with pytest.raises(strata.StrataError, match=r"model\.layers\.0|model\.embed") as caught:
        strata.wrap(model, adamw(model), memory={"device": "1KiB", "host": "64MiB"})
    assert "would do" in str(caught.value)
    assert_same(model, build(llama))


def test_what_the_disk_has_free_is_told_where_space_is_lacking(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    small = {"device": "1MiB", "host": "1MiB", "ssd": "64KiB"}
    place: dict[str, Any] = {"ssd_path": tmp_path, "memory": small, "page_size": "64KiB"}
    with pytest.raises(strata.StrataError, match=rf"rest on the SSD .* \({tmp_path}: .* free\)$"):
        strata.plan(model, adamw(model), **place)
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = -1.0
    for more in (place, {"memory": {**small, "ssd": 0}}):
        with pytest.raises(strata.StrataError, match="lr=-1") as caught:
            strata.plan(model, optimizer, **more)
        assert "free" not in str(caught.value)


def test_a_missing_folder_is_named(core: ModuleType, tmp_path: Path) -> None:
    model = build(llama)
    with pytest.raises(FileNotFoundError, match=r"ssd_path: there is no folder .*gone; make it"):
        strata.wrap(model, adamw(model), ssd_path=tmp_path / "gone")


def test_a_host_budget_beyond_what_is_free_leaves_room_for_the_device(core: ModuleType) -> None:
    model = build(llama)
    report = strata.plan(model, adamw(model), memory={"host": machine.host_bytes()})
    assert report.budgets["device"] == report.plan["device_bytes"] > 0


def test_nested_units_count_together(core: ModuleType) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2000))
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(100, 100)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) * self.scale[:100]
            return x

    model = Scaled()
    options: dict[str, Any] = {"page_size": "64KiB", "memory": {"host": "64MiB"}}
    least = strata.plan(model, adamw(model), **options).plan["device_bytes_min"]
    assert least >= 4 * (2000 + 10100)
    options["memory"]["device"] = least - 1
    with pytest.raises(strata.StrataError, match=r"layers\.0.*would do"):
        strata.wrap(model, adamw(model), **options)
    model, optimizer = tight(model)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()


def test_bad_models(core: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not dict"):
        strata.wrap({}, adamw(nn.Linear(4, 4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameters"):
        strata.wrap(nn.ReLU(), torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    double = nn.Linear(4, 4).double()
    with pytest.raises(ValueError, match=r"'weight'.*float64"):
        strata.wrap(double, adamw(double))
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'1\.weight' has no shape"):
        strata.wrap(lazy, adamw(lazy[0]))
    model = build(llama)
    wrapped, _ = strata.wrap(model, adamw(model))
    with pytest.raises(ValueError, match="already wrapped"):
        strata.wrap(wrapped, torch.optim.SGD(wrapped.parameters()))
    with pytest.raises(ValueError, match="already wrapped"):
        strata.wrap(nn.Sequential(wrapped), torch.optim.SGD(wrapped.parameters()))


def test_functions_want_a_wrapped_model(core: ModuleType) -> None:
    model = build(llama)
    for function in (strata.report, strata.unwrap, strata.synchronize):
        with pytest.raises(ValueError, match="not wrapped"):
            function(model)
    with pytest.raises(ValueError, match="wrapped"):
        strata.gather_grad(next(model.parameters()))


def test_unwrap_gives_a_plain_model(core: ModuleType) -> None:
    plain = build(llama)
    train(plain, adamw(plain), 2)
    model, optimizer = tight(build(llama))
    train(model, optimizer, 2)
    assert strata.unwrap(model) is model
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or "_strata" in m.__dict__ for m in model.modules()
    )
    train(plain, adamw(plain), 1)
    train(model, adamw(model), 1)
    assert_same(model, plain, 1e-5)
    again, optimizer = tight(model)
    train(again, optimizer, 1)
    with pytest.raises(ValueError, match="not wrapped"):
        strata.unwrap(strata.unwrap(again))


def test_mixed_dtypes_are_kept(core: ModuleType) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(3)])
        model[1].bfloat16()
        return model

    model, _ = tight(build(make))
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in build(make).parameters()]


def test_plan_allocates_nothing_and_reads_well(core: ModuleType) -> None:
    with torch.device("meta"):
        model = llama()
    report = strata.plan(model, adamw(model), memory={"device": "1MiB", "host": "64MiB"})
    assert all(p.is_meta for p in model.parameters())
    text = str(report)
    assert "model.layers.3" in text
    assert "host" in text
    assert report.to_dict()["budgets"]["device"] == 1 << 20


def test_report_reads_well(core: ModuleType) -> None:
    model, optimizer = tight(build(llama))
    train(model, optimizer, 3)
    strata.synchronize(model)
    report = strata.report(model)
    assert report.to_dict()["steps"] == 3
    assert report.to_dict()["tiers"]["device"]["peak"] > 0
    assert report.grad_norm is not None
    text = str(report)
    for part in ("3 steps", "device", "host to device", "all units"):
        assert part in text


def test_a_failed_wrap_leaves_the_model_alone(core: ModuleType, tmp_path: Path) -> None:
    model = build(llama)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="other"):
        tight(model, weights=tmp_path)
    assert_same(model, build(llama))
    train(model, adamw(model), 1)


def test_a_disk_that_fails_during_wrap_leaves_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["strata._opening"], "_core", fake_core)
    count = len(list(build(llama).parameters()))
    calls: list[int] = []
    write = fake_core.Session.write

    def failing(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == count:
            raise strata.StrataError("disk full")
        write(self, *arguments)

    monkeypatch.setattr(fake_core.Session, "write", failing)
    model = build(llama)
    with pytest.raises(strata.StrataError, match="disk full"):
        tight(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same(model, build(llama))
    train(model, adamw(model), 1)


def test_buffers_follow_the_dtype_and_come_back(core: ModuleType) -> None:
    plain = build(ConvNet)
    model, optimizer = tight(build(ConvNet), dtype=torch.bfloat16)
    assert model.norm.running_mean.dtype == torch.bfloat16
    train(model, optimizer, 2)
    assert strata.unwrap(model).norm.running_mean.dtype == torch.float32
    assert [b.dtype for b in model.buffers()] == [b.dtype for b in plain.buffers()]


def test_defaults_hold_everything(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "strata"):
        model, optimizer = strata.wrap(model := build(llama), adamw(model))
    assert "budgets: device" in caplog.text
    train(model, optimizer, 1)
    # Short of memory, the budgets are shares of what is free.
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 3 << 20)
    small = build(llama)
    report = strata.plan(small, adamw(small))
    assert sum(report.budgets.values()) <= 3 << 20


def test_memory_of_the_machine() -> None:
    assert 1 << 20 < machine.free_host_bytes() < 1 << 50
    assert 1 <= machine.processors() <= (os.cpu_count() or 1)
    assert machine.free_disk_bytes(["/", "/"]) == machine.free_disk_bytes(["/"])


def test_collected_with_the_model(core: ModuleType) -> None:
    model, optimizer = tight(build(llama))
    train(model, optimizer, 1)
    alive = weakref.ref(model.__dict__["_strata"])
    closed: list[int] = []
    weakref.finalize(alive(), closed.append, 1)
    del model, optimizer
    gc.collect()
    assert alive() is None
    assert closed


def test_what_nobody_can_reach_ends_ahead_of_the_next_session(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has frames and files, and Python would look for it later."""
    model, optimizer = tight(build(llama))
    alive = weakref.ref(model.__dict__["_strata"])
    begins, seen = core.Session, []
    monkeypatch.setattr(core, "Session", lambda *args: seen.append(alive()) or begins(*args))
    gc.disable()
    try:
        del model, optimizer
        tight(build(llama))
    finally:
        gc.enable()
    assert seen == [None]


@pytest.mark.parametrize("end", ["unwrap", "collect"])
def test_what_is_recorded_ends_with_the_model(core: ModuleType, end: str) -> None:
    """Nobody else could profile any more, and every allocation would be noted for ever."""
    model = build(llama)
    strata.wrap(model, adamw(model), memory={"device": "8MiB", "host": "8MiB"})
    output = model(**batch(model))
    assert torch._C._autograd._profiler_enabled()
    if end == "unwrap":
        strata.unwrap(model)
    del model, output
    gc.collect()
    assert not torch._C._autograd._profiler_enabled()


SCRIPT = """
import sys, torch, strata
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128)) for _ in range(4)])
model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters()), ssd_path={ssd!r},
                               memory={{"device": "256KiB", "host": "2MiB", "ssd": "64MiB"}})
for step in range(1000):
    model(torch.ones(1, 128)).sum().backward()
    if step == 2:
        {end}
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", thorough("raise KeyboardInterrupt")])
def test_nothing_is_left_behind(tmp_path: Path, end: str) -> None:
    """Real core only: files and a clean exit."""
    script = SCRIPT.format(ssd=str(tmp_path), end=end)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode not in (0, -6, -11), run.stderr
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size] == [], run.stderr


FORK = """
import gc, os, sys, time, torch, strata
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128)) for _ in range(4)])
model, optimizer = strata.wrap(model, torch.optim.{optimizer}(model.parameters()),
                               memory={{"device": "256KiB", "host": "2MiB"}}, activations=None)
def train():
    optimizer.zero_grad()
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
sys.setswitchinterval(100.0)  # workers that call into Python wait for it until we fork
train()
end = time.perf_counter() + 0.2
while time.perf_counter() < end:
    pass
if os.fork() == 0:
    {child}
    sys.exit(5)
sys.setswitchinterval(0.005)
_, status = os.wait()
train()
strata.unwrap(model)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    ("optimizer", "child"),
    [
        ("AdamW", "pass"),
        thorough("RMSprop", "del model, optimizer, train; gc.collect()"),
    ],
)
def test_a_forked_child_leaves_the_parent_its_session(optimizer: str, child: str) -> None:
    """A child has the objects, but not the threads: whoever waits for one there waits for ever."""
    script = FORK.format(optimizer=optimizer, child=child)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, told = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # parent and child
        raise
    assert process.returncode == 5, told


def test_configuration_names_are_the_keywords_of_wrap() -> None:
    import dataclasses
    import inspect

    keywords = list(inspect.signature(strata.wrap).parameters)
    assert keywords == [
        "model",
        "optimizer",
        *(f.name for f in dataclasses.fields(options.Options) if f.init and f.name != "ranks"),
    ]

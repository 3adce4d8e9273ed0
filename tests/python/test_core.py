"""The core through its seam: values, updates, gradients and failures, without torch modules."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from strata import _core

GROUP: dict[str, Any] = {
    "rule": "adamw", "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
    "momentum": 0.0, "dampening": 0.0, "lr_decay": 0.0, "initial_accumulator": 0.0,
    "nesterov": False, "maximize": False,
}  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
SIZES = [70_000, 33, 200_000, 5, 90_001, 64, 150_000]
KIB = 1024


def config(dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
    params = [
        {"name": f"p{i}", "numel": n, "dtype": dtype, "trainable": True, "unit": i // 2, "group": 0}
        for i, n in enumerate(SIZES)
    ]
    base: dict[str, Any] = {
        "params": params, "units": ["u0", "u1", "u2", "u3"], "groups": [GROUP],
        "page_bytes": 64 * KIB, "device_bytes": (20 if dtype == "float32" else 10) * 64 * KIB,
        "host_bytes": 1 << 30, "ssd_bytes": 0, "ssd_paths": [], "io_engine": "auto", "workers": 2,
        "accumulate": False,
        "update": "on_step",
        "max_staleness": 0,
        "moment_dtype": "float32",
        "pin_workers": True,
        "compute_threads": 1,
    }  # fmt: skip
    return base | changes


def tensors(session: Any) -> list[torch.Tensor]:
    return [torch.from_dlpack(session.tensor(i)) for i in range(len(SIZES))]


def fill(session: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for i, n in enumerate(SIZES):
        values = torch.randn(n, generator=generator)
        session.write(i, "master", 0, values.data_ptr(), n)


def masters(session: Any) -> list[torch.Tensor]:
    out = []
    for i, n in enumerate(SIZES):
        values = torch.empty(n)
        session.read(i, "master", 0, values.data_ptr(), n)
        out.append(values)
    return out


def train(
    session: Any, steps: int, backwards: int = 1, max_norm: float = 0.0
) -> list[torch.Tensor]:
    """Gradients are a function of the parameters as the device shows them."""
    views = tensors(session)
    for step in range(steps):
        for _ in range(backwards):
            for unit in (0, 1, 2, 3, 3, 2, 1, 0):
                session.enter(unit, False)
                session.leave(unit)
            for unit in (3, 2, 1, 0):
                session.enter(unit, True)
                for i in (2 * unit, 2 * unit + 1):
                    if i >= len(SIZES):
                        continue
                    grad = (views[i].float().sin() * (step + 1)).to(views[i].dtype)
                    name = str(grad.dtype).removeprefix("torch.")
                    session.land_gradient(i, grad.data_ptr(), name)
                session.leave(unit)
        session.step([GROUP], max_norm, 1.0, False)
        session.drop_gradients()
    session.synchronize()
    return masters(session)


def run(dtype: str, steps: int = 3, max_norm: float = 0.0, **changes: Any) -> list[torch.Tensor]:
    session = _core.Session(config(dtype, **changes))
    try:
        fill(session)
        return train(session, steps, 2 if changes.get("accumulate") else 1, max_norm)
    finally:
        session.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_budgets_do_not_change_bits(dtype: str, accumulate: bool, tmp_path: Path) -> None:
    base = run(dtype, max_norm=1.0, accumulate=accumulate, device_bytes=1 << 28)
    on_ssd = {"host_bytes": 2048 * KIB, "ssd_bytes": 64 << 20, "ssd_paths": [str(tmp_path)]}
    variants: list[dict[str, Any]] = [
        {"device_bytes": 24 * 64 * KIB},
        {"workers": 1, **on_ssd},
        {"host_bytes": 4096 * KIB, "ssd_bytes": 64 << 20, "ssd_paths": [str(tmp_path)]},
        {"page_bytes": 256 * KIB, "device_bytes": 1 << 28},
        {"workers": 3, **on_ssd, "io_engine": "threads"},
    ]
    for changes in variants:
        other = run(dtype, max_norm=1.0, accumulate=accumulate, **changes)
        for a, b in zip(base, other, strict=True):
            assert torch.equal(a, b), changes


def test_a_norm_of_more_than_its_own_gradients_clips_and_skips() -> None:
    """Of a model whose other parts are elsewhere."""
    ended = []
    for squares in (None, 25.0, float("inf")):
        session = _core.Session(config("float32"))
        fill(session)
        ones = torch.ones(SIZES[0])
        session.land_gradient(0, ones.data_ptr(), "float32")
        result = session.step([GROUP], 1.0, 2.0, True, squares=squares)
        session.synchronize()
        moment = torch.empty(SIZES[0])
        session.read(0, "moment1", 0, moment.data_ptr(), SIZES[0])
        ended.append((result, moment))
        session.close()
    (own, first), (given, second), (infinite, third) = ended
    assert own["norm"] == pytest.approx(SIZES[0] ** 0.5 / 2)
    assert given["norm"] == 2.5  # divided as gradients are
    expected = (1 - GROUP["beta1"]) * 0.5 * torch.ones(SIZES[0])
    assert torch.allclose(first, expected / own["norm"], rtol=1e-5)
    assert torch.allclose(second, expected / 2.5, rtol=1e-5)
    assert (infinite["skipped"], infinite["finite"]) == (True, False)
    assert not third.any()


def test_matches_torch_adamw() -> None:
    generator = torch.Generator().manual_seed(1)
    plain = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in SIZES]
    optimizer = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1)
    for step in range(5):
        for p in plain:
            p.grad = p.detach().sin() * (step + 1)
        optimizer.step()
    for ours, theirs in zip(run("float32", steps=5), plain, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_master_survives_exactly() -> None:
    for dtype in DTYPES:
        session = _core.Session(config(dtype))
        fill(session)
        generator = torch.Generator().manual_seed(1)
        for values in masters(session):
            assert torch.equal(values, torch.randn(values.numel(), generator=generator))
        session.close()


def test_device_written_becomes_the_value() -> None:
    session = _core.Session(config())
    fill(session)
    view = tensors(session)[2]
    session.enter(1, False)
    view.mul_(0.5)
    expected = view.clone()
    session.device_written(2)
    session.leave(1)
    assert torch.equal(masters(session)[2], expected.float())
    for unit in (0, 2, 3, 1):
        session.enter(unit, False)
        session.leave(unit)
    session.enter(1, False)
    assert torch.equal(view, expected)
    session.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_bytes": 64 * KIB}, ["device budget", "u1", "would do"]),
        ({"host_bytes": 64 * KIB}, ["host", "ssd_path"]),
        (
            {"host_bytes": 64 * KIB, "ssd_paths": ["/tmp"], "ssd_bytes": 1 << 30},
            ["one chunk", "KiB"],
        ),
        ({"host_bytes": 2 << 20, "ssd_paths": ["/tmp"], "ssd_bytes": 64 * KIB}, ["SSD", "MiB"]),
    ],
)
def test_infeasible_budgets_say_what_would_do(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(_core.StrataError) as caught:
        _core.plan(config(**changes))
    assert caught.value.fault == "config"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("update", "moments", "at_rest"),
    [
        ("in_backward", "float32", 12),
        ("on_step", "float32", 14),
        ("lock_free", "float32", 16),
        ("in_backward", "bfloat16", 8),
        ("on_step", "bfloat16", 10),
        ("lock_free", "bfloat16", 12),
        ("in_backward", "block8", 6),
        ("on_step", "block8", 8),
        ("lock_free", "block8", 10),
    ],
)
def test_a_plan_tells_the_bytes_at_rest(
    core: ModuleType, update: str, moments: str, at_rest: int
) -> None:
    one = {"name": "p", "numel": 1 << 20, "dtype": "bfloat16", "trainable": True, "group": 0}
    changes: dict[str, Any] = {"update": update, "moment_dtype": moments}
    units = {"params": [one | {"unit": 0}, one | {"unit": 1}], "units": ["u0", "u1"]}
    found = core.plan(config(**units, device_bytes=1 << 28, **changes))
    for unit in found["units"]:
        parts = unit["param_bytes"] + unit["grad_bytes"] + unit["state_bytes"]
        assert parts == at_rest * unit["params"]
        assert unit["grad_tier"] == ("none" if update == "in_backward" else "host")
    # What is always in host memory comes on top, but for gradients that were counted already.
    rest = at_rest * (2 << 20)
    counted = 4 * (2 << 20) if update == "lock_free" else 0
    assert found["host_bytes"] == rest + found["buffer_bytes"] - counted
    if update == "on_step" and moments != "block8":
        assert found["buffer_bytes"] == 0
    if update == "in_backward":
        assert found["buffer_bytes"] >= 2 << 20


def test_late_gradients_that_do_not_fit_are_told_what_would() -> None:
    with pytest.raises(_core.StrataError, match="update='in_backward' would need") as caught:
        _core.plan(config(host_bytes=256 * KIB, update="lock_free"))
    assert "gradients need" in str(caught.value)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "block8"])
def test_moments_keep_what_was_read(moments: str) -> None:
    """A stored moment is read, written back and read again: the same bits, in any pieces."""
    session = _core.Session(config(moment_dtype=moments))
    generator = torch.Generator().manual_seed(1)
    for kind in ("moment1", "moment2"):
        values = torch.randn(SIZES[0], generator=generator).square()
        session.write(0, kind, 0, values.data_ptr(), values.numel())
        stored = torch.empty_like(values)
        session.read(0, kind, 0, stored.data_ptr(), values.numel())
        worst = {"float32": 0.0, "bfloat16": 2.0**-8, "block8": 0.1}[moments]
        assert (stored - values).abs().max() <= worst * values.abs().max()
        if moments == "float32":
            continue
        assert not torch.equal(stored, values)
        session.write(0, kind, 0, stored.data_ptr(), values.numel())
        for begin, count in ((0, 64), (64, 128), (200, 9), (values.numel() - 5, 5)):
            part = torch.empty(count)
            session.read(0, kind, begin, part.data_ptr(), count)
            assert torch.equal(part, stored[begin : begin + count])
            session.write(0, kind, begin, part.data_ptr(), count)
        again = torch.empty_like(values)
        session.read(0, kind, 0, again.data_ptr(), values.numel())
        assert torch.equal(again, stored)
    session.close()


def test_kernels_use_the_instructions_that_the_processor_has() -> None:
    line = next(
        (x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")), ""
    )
    flags = set(line.split())
    expected = "scalar"
    if {"avx2", "fma", "f16c"} <= flags:
        expected = "avx2"
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            expected = "avx512"
    assert _core.best_isa() == expected

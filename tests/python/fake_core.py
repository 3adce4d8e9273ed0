"""An in-memory double of strata._core, and the oracle of the tests of the Python package.

It exists to catch reads of parameters that are not on the device: where the device budget does not
hold all units, a unit's memory is filled with NaN as soon as nobody has it entered. Arithmetic is
torch's own, on float32 tensors. fake_saves.py has its activations, fake_ranks.py who else trains.
"""

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import torch
from fake_param import DTYPES, Param, grad_norm
from fake_ranks import Alone
from fake_saves import Saves, borrow
from strata._core import Budgets, StrataError
from torch.utils.dlpack import to_dlpack

PAGE = 4096


class Session(Saves, Alone):
    """One session. Every method checks what the contract requires of its caller."""

    def __init__(self, config: dict[str, Any], foreign: Any = None, *_of_ranks: Any) -> None:
        super().__init__()
        self.config = config
        self.plan = plan(config)
        self.params = [Param(i, spec, foreign) for i, spec in enumerate(config["params"])]
        self.visits: list[tuple[int, int]] = []  # visit and unit, for each enter without its leave
        self.stepped: list[list[int]] = []  # by step: parameters that had gradients
        self.members = [
            [p for p in self.params if p.spec["unit"] == u] for u in range(len(config["units"]))
        ]
        self.evicts = config["device_bytes"] < sum(p.device.nbytes for p in self.params)
        self.peak = 0
        self.spans: list[dict[str, Any]] = []
        self.staleness = [0] * len(config["units"])  # forwards; none of them sees old parameters
        list(map(self._settle, range(len(self.members))))

    def step_budgets(self, device_bytes: int) -> Budgets:
        return Budgets(
            page_bytes=self.plan["page_bytes"],
            device_bytes=device_bytes,
            host_bytes=self.config["host_bytes"] - self.plan["buffer_bytes"],
            ssd_bytes=self.config["ssd_bytes"],
            staging_bytes=self.plan["staging_bytes"],
            grads_rest=self.config["update"] == "on_step",
        )

    @property
    def device(self) -> tuple[int, int]:
        return (1, 0)

    def tensor(self, param: int) -> Any:
        return to_dlpack(self.params[param].device)

    def write(self, param: int, kind: str, offset: int, address: int, count: int) -> None:
        self._open()
        p = self.params[param]
        assert 0 <= offset < offset + count <= p.spec["numel"]
        p.array(kind)[offset : offset + count] = borrow(address, count, torch.float32)
        if kind == "master" and not p.spec["trainable"]:
            p.master.copy_(p.rounded())
        self._settle(p.spec["unit"])

    def read(self, param: int, kind: str, offset: int, address: int, count: int) -> None:
        self._open()
        p = self.params[param]
        assert 0 <= offset < offset + count <= p.spec["numel"]
        assert kind != "grad" or p.landed
        borrow(address, count, torch.float32).copy_(p.array(kind)[offset : offset + count])

    def entered(self, unit: int) -> int:
        return [entered for _, entered in self.visits].count(unit)

    def enter(
        self, unit: int, backward: bool, recorded: bool = True, *,
        stream: int, visit: int,
    ) -> None:  # fmt: skip
        self._open()
        self._note_stream(stream)
        self.staleness[unit] += recorded and not backward
        self.visits.append((visit, unit))
        held = sum(
            p.device.nbytes
            for u, ps in enumerate(self.members)
            if self.entered(u) and not self.plan["units"][u]["on_device"]
            for p in ps
        )
        self.peak = max(self.peak, held)
        if held > self.config["device_bytes"]:
            self.visits.pop()
            raise StrataError(f"device memory: {held} > {self.config['device_bytes']} bytes")
        if self.entered(unit) == 1:
            begin = perf_counter_ns()
            for p in self.members[unit]:
                p.device.copy_(p.rounded())
            copied = sum(p.device.nbytes for p in self.members[unit])
            self._span("upload", unit, backward, begin, copied)
            self._span("wait", unit, backward, begin, cause="copy")

    def leave(self, unit: int, *, stream: int, visit: int) -> bool:
        self._note_stream(stream)
        if (visit, unit) not in self.visits:
            return False
        self.visits.remove((visit, unit))
        self._settle(unit)
        return True

    def leave_all_but(self, live: list[int], bound: int, *, stream: int) -> int:
        over = [(v, u) for v, u in self.visits if v < bound and v not in live]
        return sum(self.leave(unit, stream=stream, visit=visit) for visit, unit in over)

    def adopt(
        self,
        on_device: list[bool] | None = None,
        param_bytes: int | None = None,
        activation_host_bytes: int | None = None,
        activation_ssd_bytes: int | None = None,
        uses: Sequence[Any] | None = None,
    ) -> None:
        assert uses is None or {use.unit for use in uses} <= set(range(len(self.members)))
        self._make_room(activation_host_bytes, activation_ssd_bytes)
        if on_device is not None:
            if any(p.landed for p in self.params):
                raise StrataError("gradients have landed: units come to rest between two steps")
            for unit, there in zip(self.plan["units"], on_device, strict=True):
                unit["on_device"] = there
        if param_bytes is not None:
            self.config = {**self.config, "device_bytes": param_bytes}

    def resident(self, unit: int) -> bool:
        return not self.evicts or self.entered(unit) > 0

    def device_written(self, param: int, *, stream: int) -> None:
        self._note_stream(stream)
        p = self.params[param]
        assert self.entered(p.spec["unit"]) > 0, "device_written() outside enter()"
        same = p.rounded() == p.device  # what lies beyond 16 bits stays where these did
        p.master.copy_(torch.where(same, p.master, p.device.float()))

    def expect_write(self, param: int) -> None:
        self._open()

    def land_gradient(
        self, param: int, address: int, dtype: str, *, stream: int, owner: object = None
    ) -> None:
        self._open()
        self._note_stream(stream)
        p = self.params[param]
        assert p.spec["trainable"]
        assert dtype in (p.spec["dtype"], "float32" if self.config["accumulate"] else "")
        assert self.config["accumulate"] or self.config["update"] == "on_step" or not p.landed
        begin = perf_counter_ns()
        value = borrow(address, p.spec["numel"], DTYPES[dtype]).to(self._grad_dtype(p))
        sums = value.clone() if p.grad is None else p.grad.to(value.dtype) + value
        p.grad = sums.float()
        p.landed += 1
        self._span("download", p.spec["unit"], True, begin, p.device.nbytes)

    def _grad_dtype(self, p: Param) -> torch.dtype:
        wide = self.config["accumulate"] or self.config["update"] == "lock_free"
        return torch.float32 if wide else DTYPES[p.spec["dtype"]]

    def replace_gradient(self, param: int, address: int, dtype: str, *, stream: int) -> None:
        assert self.config["update"] == "on_step"
        p = self.params[param]
        p.grad, p.landed = None, max(p.landed - 1, 0)
        self.land_gradient(param, address, dtype, stream=stream)

    def scale_gradient(self, param: int, factor: float, divides: bool) -> bool:
        assert self.config["update"] == "on_step"
        p = self.params[param]
        assert p.landed
        grad = p.array("grad").to(self._grad_dtype(p))
        p.grad = (grad.div_(factor) if divides else grad.mul_(factor)).float()
        return True

    def gradient_squares(self, param: int) -> tuple[float, bool]:
        p = self.params[param]
        if p.grad is not None:
            p.squares = p.grad.double().square().sum().item()
        return p.squares, False

    def drop_gradients_of(self, params: list[int]) -> None:
        assert self.config["update"] == "on_step"
        for p in (self.params[i] for i in params):
            p.grad, p.landed = None, 0

    def drop_gradients(self, wanted: bool = False) -> None:
        if self.in_half_step():
            error = StrataError("gradients were used already")
            error.fault = "config"
            raise error
        self._forget()

    def _forget(self) -> None:
        for p in self.params:
            if p.grad is not None:
                self.gradient_squares(p.index)  # they are still known
            p.grad, p.landed, p.updated = None, 0, False

    def gradient_count(self, param: int) -> int:
        return self.params[param].landed

    def gradient_fits(self, param: int) -> bool:
        return True

    def complete(self, unit: int, groups: list[dict[str, Any]], max_unit_norm: float) -> None:
        self._open()
        assert self.config["update"] == "in_backward"
        self._update(unit, groups, 1.0, max_unit_norm)

    def updated(self, param: int) -> bool:
        return self.params[param].updated

    def in_half_step(self) -> bool:
        return any(p.updated for p in self.params)

    def forget_step(self) -> None:
        self._forget()

    def steps(self) -> int:
        return sum(map(bool, self.stepped))

    def last_params(self) -> list[int]:
        return self.stepped[-1] if self.stepped else []

    def step(
        self,
        groups: list[dict[str, Any]],
        max_norm: float,
        grad_divisor: float,
        skip_nonfinite: bool,
        max_unit_norm: float = 0.0,
        squares: float | None = None,
    ) -> dict[str, Any]:
        self._open()
        whole = max_norm > 0 or skip_nonfinite or grad_divisor != 1  # all gradients are needed
        assert not (whole and self.config["update"] == "in_backward")
        assert not (skip_nonfinite and self.config["max_staleness"])
        scale = 1.0 / grad_divisor
        norm = grad_norm(self.params, scale) if squares is None else squares**0.5 * scale
        finite = norm < float("inf")
        if max_norm > 0:
            scale *= clip(norm, max_norm)
        skipped = skip_nonfinite and not finite
        for unit in range(len(self.members)):
            if not skipped:
                self._update(unit, groups, scale, max_unit_norm)
        self.stepped.append([p.index for p in self.params if p.landed])
        self._forget()
        for u in range(len(self.members)):
            assert not self.entered(u), f"unit {u} is entered during step()"
            self._settle(u)
        return {"norm": norm, "finite": finite, "skipped": skipped}

    def _update(self, unit: int, groups: list[dict[str, Any]], scale: float, most: float) -> None:
        if most > 0:
            scale *= clip(grad_norm(self.members[unit], scale), most)
        for p in self.members[unit]:
            if p.landed and not p.updated:
                begin = perf_counter_ns()
                p.update(groups[p.spec["group"]], scale)
                p.updated = True
                self._span("update", unit, False, begin, p.device.nbytes)

    def param_step(self, param: int) -> int:
        return self.params[param].step

    def set_param_step(self, param: int, step: int) -> None:
        self.params[param].step = step

    def synchronize(self) -> None:
        self._open()

    drain = synchronize

    def stats(self) -> dict[str, Any]:
        none = [0] * len(self.members)
        return {
            "staleness": [[n] + [0] * self.config["max_staleness"] for n in self.staleness],
            "merged gradients": none,
            "update waits": none,
            "host to device bytes": 0,
            "waited_s": [0.0] * len(self.members),
            "device_bytes": self.peak,
            "device_bytes_peak": self.peak,
            "host_bytes": 0,
            "ssd_bytes": 0,
            "backend": "fake",
            "workers_where": "nowhere",
            "io_engine": "",
        }

    def timeline(self) -> list[dict[str, Any]]:
        spans, self.spans = self.spans, []
        return spans

    def close(self) -> None:
        self.closed = True
        self.saves.clear()
        for p in self.params:
            p.device.fill_(float("nan"))

    def _span(
        self, track: str, unit: int, backward: bool, begin: int, size: int = 0, cause: str = "none"
    ) -> None:
        span = {"track": track, "cause": cause, "lane": 0, "backward": backward, "unit": unit}
        self.spans.append({**span, "begin_ns": begin, "end_ns": perf_counter_ns(), "bytes": size})

    def _settle(self, unit: int) -> None:
        """What the unit's memory holds while nobody has it entered."""
        for p in self.members[unit]:
            if not self.evicts or self.entered(unit):
                p.device.copy_(p.rounded())
            else:
                p.device.fill_(float("nan"))


def clip(norm: float, max_norm: float) -> float:
    """As torch.nn.utils.clip_grad_norm_: a norm that is NaN makes the gradients so."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


MASTER_BYTES = {"float32": 0, "bfloat16": 2, "float16": 4}  # beside the parameter
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "block8": 1}
REMOTE = ("remote_params", "remote_param_bytes", "remote_landing_bytes", "remote_state_bytes")


def _grad_bytes(config: dict[str, Any], spec: dict[str, Any]) -> int:
    """Of an element where its gradient lands."""
    wide = config["accumulate"] or config["update"] == "lock_free"
    return spec["trainable"] * (4 if wide else DTYPES[spec["dtype"]].itemsize)


def device_error(device: str) -> str:
    return "" if device == "host" else f"the double has no {device}"


def plan(config: dict[str, Any]) -> dict[str, Any]:
    units = len(config["units"])
    sizes, grads, states = [0] * units, [0] * units, [0] * units
    for spec in config["params"]:
        unit, numel = spec["unit"], spec["numel"]
        sizes[unit] += DTYPES[spec["dtype"]].itemsize * numel
        grads[unit] += _grad_bytes(config, spec) * numel
        moments = 2 * MOMENT_BYTES[config["moment_dtype"]]
        states[unit] += (MASTER_BYTES[spec["dtype"]] + moments) * spec["trainable"] * numel
    shown = [DTYPES[s["dtype"]].itemsize * s["numel"] * s["trainable"] for s in config["params"]]
    trained, landing = sum(shown) + sum(grads) + sum(states), grads
    buffers = 0  # as many as the core needs at least; moments have no scales here
    if config["update"] == "in_backward":
        buffers, grads = max(grads), [0] * units
    elif config["update"] == "lock_free":
        buffers = sum(grads)
    resting = [sum(of) for of in zip(sizes, grads, states, strict=True)]
    entered = {
        module: sum(sizes[u] for u in together) for module, together in config.get("together", [])
    }
    nested = max(entered.values(), default=0)
    smallest = max(*sizes, nested)
    if config["device_bytes"] < smallest:
        error = StrataError(
            f"device budget {config['device_bytes']} is too small for forward of "
            f"{max(entered, key=entered.__getitem__, default='a unit')}: {smallest} bytes would do"
        )
        error.tier, error.needed_bytes = "device", smallest
        raise error
    page = config["page_bytes"] or PAGE
    passing = buffers if config["update"] == "in_backward" else 0
    whole = -(-(sum(resting) + passing) // page) * page  # in whole pages, as budgets are
    return {
        "page_bytes": page,
        "device_bytes": min(sum(sizes), config["device_bytes"]),
        "host_bytes": min(whole, config["host_bytes"]),
        "ssd_bytes": 0,
        "staging_bytes": 0,
        "buffer_bytes": buffers,
        "snapshot_bytes": 0,
        "device_bytes_min": smallest,
        "nested_bytes": nested,
        **dict.fromkeys(("trained_page_bytes", "trained_bytes"), trained),
        "units": [
            {
                "name": name,
                "params": sum(s["numel"] for s in config["params"] if s["unit"] == u),
                **dict.fromkeys(("param_bytes", "resting_param_bytes"), sizes[u]),
                "codes": False,
                "landing_bytes": landing[u],
                "grad_bytes": grads[u],
                "state_bytes": states[u],
                **dict.fromkeys(REMOTE, 0),
                "chunks": 1,
                "on_device": False,
                "param_tier": "host",
                "grad_tier": "host" if grads[u] else "none",
                "state_tier": "host" if states[u] else "none",
            }
            for u, name in enumerate(config["units"])
        ],
    }

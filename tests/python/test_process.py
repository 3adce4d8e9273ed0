"""What strata does to a process, and to a model while Ctrl-C is pressed: nothing that stays."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import interrupts
import pytest
import strata
import torch
from safetensors.torch import save_file
from strata._cli.finetune.interrupt import Interrupt
from strata._hooks import hooks
from strata._runtime import undo
from torch import nn
from variants import thorough

SMALL = {"device": "64KiB", "host": "8MiB"}  # tiles are wanted
ROOMY = {"device": "1MiB", "host": "8MiB"}
# In each test that is interrupted.
POINTS = 100 if "STRATA_INTERRUPTS" in os.environ else 10

Made = tuple[nn.Module, torch.optim.Optimizer]


class Normed(nn.Module):
    """Tied layers, a hook and an attribute of the user's, a buffer, and a layer that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(600, 32)
        self.norm = nn.BatchNorm1d(32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 600, bias=False)
        self.head.weight = self.embedding.weight
        self.body[0].register_forward_hook(lambda *_: None)
        self.body[0].weight.note = "mine"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.embedding(x)))).logsumexp(-1).mean()


def build() -> Made:
    torch.manual_seed(0)
    model = Normed()
    groups = [{"params": list(model.body.parameters()), "lr": 0.1}]
    rest = [p for p in model.parameters() if all(p is not q for q in model.body.parameters())]
    return model, torch.optim.Adagrad([*groups, {"params": rest}], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(1)
    loss = model(torch.randint(600, (8,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def looks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a user can tell of a model and its optimizer, but for values."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k != "_parameters"}
        held = {k: list(v.items()) for k, v in own.items() if isinstance(v, dict)}
        seen.append((name, id(module), {k: id(v) for k, v in own.items()}, held))
    for name, p in model.named_parameters(remove_duplicate=False):
        seen.append((name, id(p), type(p), p.requires_grad, p.dtype, p.device, p.data_ptr()))
        seen.append((dict(vars(p)), dict(p._post_accumulate_grad_hooks or {})))
    for group in optimizer.param_groups:
        seen.append({k: [id(q) for q in v] if k == "params" else v for k, v in group.items()})
    seen.append([(id(p), state) for p, state in optimizer.state.items()])
    return seen


def points(work: Callable[[], Any]) -> list[int]:
    """Some of those at which it can be interrupted, spread evenly."""
    counted = interrupts.Interrupt(None)
    counted.run(work)
    return list(range(0, counted.count, max(1, counted.count // POINTS)))


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def meta() -> Made:
    with torch.device("meta"):
        model = stack()
    model[0].weight.note = "mine"  # type: ignore[union-attr]
    return model, torch.optim.AdamW(model.parameters())


CASES = [
    (meta, {"memory": ROOMY}),
    thorough(build, {"memory": ROOMY, "update": "in_backward"}),
    thorough(build, {"memory": SMALL, "dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("make", "options"), CASES)
def test_an_interrupted_wrap_leaves_the_model_as_it_was(
    make: Callable[[], Made], options: dict[str, Any], tmp_path: Path
) -> None:
    if make is meta:
        save_file(stack().state_dict(), tmp_path / "model.safetensors")
        options = {**options, "weights": tmp_path}
    some = points(lambda: strata.wrap(*make(), **options))
    model, optimizer = make()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    before = looks(model, optimizer)
    for point in some:
        interrupts.Interrupt(point).run(partial(strata.wrap, model, optimizer, **options))
        if "_strata" in vars(model):  # wholly wrapped: it came behind
            strata.unwrap(model)
            model, optimizer = make()
            before = looks(model, optimizer)
        assert looks(model, optimizer) == before, point
    for name, value in model.state_dict().items():
        assert value.is_meta == values[name].is_meta
        assert value.is_meta or torch.equal(value, values[name]), name
    again, its_optimizer = strata.wrap(model, optimizer, **options)
    assert again is model
    if options["memory"] is ROOMY and make is build:
        plain, plain_optimizer = build()
        for _ in range(3):
            expected = pytest.approx(train(plain, plain_optimizer), rel=1e-5)  # its own Adagrad
            assert train(model, its_optimizer) == expected
    strata.unwrap(model)


@pytest.mark.parametrize("memory", [ROOMY, thorough(SMALL)])
def test_an_interrupted_unwrap_can_be_done_again(memory: dict[str, str]) -> None:
    model, optimizer = build()
    strata.wrap(model, optimizer, memory=memory)
    for point in points(partial(strata.unwrap, model)):
        model, optimizer = build()
        strata.wrap(model, optimizer, memory=memory)
        interrupts.Interrupt(point).run(partial(strata.unwrap, model))
        if "_strata" in vars(model):
            strata.unwrap(model)
        plain, plain_optimizer = build()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q), point
        groups = zip(optimizer.param_groups, plain_optimizer.param_groups, strict=True)
        assert [len(g["params"]) for g, _ in groups] == [4, 3], point
        assert train(model, optimizer) == train(plain, plain_optimizer), point


def test_an_interrupt_of_the_undoing_is_not_the_end_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    before = looks(model, optimizer)
    left = [False, True, True]

    def restore(self: Any, plain: Any = undo._Parameter.restore) -> None:
        plain(self)
        if left and left.pop():
            raise KeyboardInterrupt

    monkeypatch.setattr(undo._Parameter, "restore", restore)
    monkeypatch.setattr(hooks.Hooks, "install", lambda self, hooked: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        strata.wrap(model, optimizer, memory=ROOMY)
    assert not left
    assert looks(model, optimizer) == before


# Signals ------------------------------------------------------------------------------------------


def test_signals_are_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a library installs no handler")

    monkeypatch.setattr(signal, "signal", refuse)
    model, optimizer = build()
    strata.wrap(model, optimizer, memory=ROOMY)
    strata.unwrap(model)


def test_threads_take_no_signals_and_have_names(tmp_path: Path) -> None:
    def threads() -> dict[str, tuple[str, int]]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            lines = (line.split() for line in (task / "status").read_text().splitlines())
            status = {line[0]: line[1] for line in lines if len(line) == 2}
            found[task.name] = (status["Name:"], int(status["SigBlk:"], 16))
        return found

    train(*build())  # torch starts its own
    before = threads()
    model, optimizer = build()
    disk = {"memory": {**ROOMY, "ssd": "64MiB"}, "ssd_path": tmp_path, "io_engine": "threads"}
    model, optimizer = strata.wrap(model, optimizer, **disk)
    train(model, optimizer)
    strata.snapshot(model, tmp_path / "run").wait()
    found = [of for task, of in threads().items() if task not in before]
    here = threading.enumerate()
    strata.unwrap(model)
    named = {name.rstrip("-0123456789") for name, _ in found}
    assert {"strata-pump", "strata-opt", "strata-io", "strata-hash", "strata-copy"} <= named
    assert "strata-snapshot_0" in {thread.name for thread in here}
    waited_for = {signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM}
    for name, blocked in found:
        assert all(blocked >> (number - 1) & 1 for number in waited_for), name


@pytest.mark.parametrize("handler", [None, signal.SIG_IGN])
def test_a_handler_that_could_not_be_put_back_stays(
    monkeypatch: pytest.MonkeyPatch, handler: Any
) -> None:
    taken = []
    monkeypatch.setattr(signal, "getsignal", lambda number: handler)
    monkeypatch.setattr(signal, "signal", lambda *given: taken.append(given))
    with Interrupt(lambda said: None):
        pass
    assert taken == []


# The process --------------------------------------------------------------------------------------

PROGRAM = """
import gc
import sys
import torch
from process_state import changed, state

def build():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    return model, torch.optim.AdamW(model.parameters())

def train(model, optimizer):
    for _ in range(4):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

train(*build())
plain = set(sys.modules)
before = state()
import strata
from strata._profiling import calibrate

speeds = {f"{lane}_bytes_s": 1e9 for lane in ("upload", "download", "read", "write")}
costs = calibrate.typical_costs().replace(update_elements_s=1e9, **speeds)
calibrate.costs = lambda *_, **__: costs  # that takes seconds
assert (found := changed(before, state())) == {}, found
model, optimizer = build()
before = state()
memory = {"device": "1MiB", "host": "4MiB", "ssd": "16MiB"}
looks = gc.get_stats()[2]["collections"]
model, optimizer = strata.wrap(model, optimizer, memory=memory, ssd_path=sys.argv[1])
assert gc.get_stats()[2]["collections"] == looks  # at everything: no other model was wrapped
assert (found := changed(before, state())) == {}, found
train(model, optimizer)
others = {name for name in sys.modules if name.split(".")[0] not in ("strata", "safetensors")}
assert others <= plain, others - plain  # what takes long to import
from strata._cli.finetune import picture
from strata._report import html_report

assert "svg" in html_report.page(strata.report(model))
step = {"seconds": 1.0, "loss": 1.0, "strata_host_gib": 1.0}
from functools import partial
from pathlib import Path
picture.draw([step], {"host": 1}, Path(sys.argv[1]) / "chart.png", "")
strata.unwrap(model)
assert (found := changed(before, state())) == {}, found
"""


def test_a_process_is_left_as_it_was(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""

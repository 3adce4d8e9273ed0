"""optimizer.state of a wrapped optimizer: what is in pages, to read and to change as in PyTorch."""

import copy
import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from rank_server import Ranks
from strata._runtime.wrapped import Wrapped
from torch import nn

Made = tuple[Any, Any]
MODES: dict[str, dict[str, Any]] = {
    "on_step": {},
    "in_backward": {"update": "in_backward"},
    "lock_free": {"update": strata.LockFree(max_staleness=0)},
    "bfloat16": {"dtype": torch.bfloat16},
}
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "lion": lambda p: strata.Lion(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),  # no kernel
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def make(wraps: bool = True, kind: str = "adamw", **options: Any) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 1))
    optimizer = KINDS[kind](model.parameters())
    if not wraps:
        return model.to(options.get("dtype")), optimizer
    memory = {"device": "1MiB", "host": "8MiB"} | options.pop("memory", {})
    return strata.wrap(model, optimizer, memory=memory, page_size="64KiB", **options)


def step(model: Any, optimizer: Any, count: int = 1) -> None:
    for _ in range(count):
        x = torch.linspace(-1, 1, 96, dtype=next(model.parameters()).dtype).reshape(4, 24)
        (model(x).float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(**options: Any) -> tuple[Any, Any, Any]:
    model, optimizer = make(**options)
    step(model, optimizer, 2)
    return model, optimizer, model[0].weight


# Edits, each of which plain PyTorch is an oracle for.


def zero(o: Any, ps: list[Any]) -> None:
    for p in ps:
        for value in o.state[p].values():
            if torch.is_tensor(value) and value.dim():
                value.zero_()


def scale_views(o: Any, ps: list[Any]) -> None:
    for p in ps:
        for name, value in o.state[p].items():
            if torch.is_tensor(value) and value.dim() and name != "step":
                value.view(-1)[:7].mul_(0.5)
                value[0] = value[0] * 0.25
                for part in value.detach().chunk(2):
                    part.add_(1e-4)


def assign(o: Any, ps: list[Any]) -> None:
    for p in ps:
        state = o.state[p]
        for name in [n for n, v in state.items() if torch.is_tensor(v) and v.dim()]:
            state[name] = state[name] * 0.5


def out_of_place(o: Any, ps: list[Any]) -> None:
    state = o.state[ps[0]]
    name = next(n for n, v in state.items() if torch.is_tensor(v) and v.dim())
    torch.mul(state[name].clone(), 3.0, out=state[name])
    torch._foreach_mul_([o.state[p][name] for p in ps], 0.5)


def rebind(o: Any, ps: list[Any]) -> None:
    o.state = defaultdict(dict)


def clear(o: Any, ps: list[Any]) -> None:
    o.state.clear()


def pop(o: Any, ps: list[Any]) -> None:
    for p in ps:
        assert o.state.pop(p)
        assert o.state.pop(p, None) is None


def delete_one(o: Any, ps: list[Any]) -> None:
    del o.state[ps[0]]
    assert ps[0] not in o.state
    assert len(o.state) == len(ps) - 1


def put_back(o: Any, ps: list[Any]) -> None:
    """What was popped is a plain copy, which may be changed and put back."""
    for p in ps:
        entry = o.state.pop(p)
        entry = {n: v * 0.5 if torch.is_tensor(v) and v.dim() else v for n, v in entry.items()}
        o.state[p] = entry


def backup(o: Any, ps: list[Any]) -> None:
    kept = {p: copy.deepcopy(dict(o.state[p])) for p in ps}
    o.state.clear()
    o.state.update(kept)


def backup_of_entries(o: Any, ps: list[Any]) -> None:
    kept = dict(o.state)
    o.state.clear()
    o.state.update(kept)


def backup_of_tensors(o: Any, ps: list[Any]) -> None:
    kept = {p: dict(o.state[p]) for p in ps}
    for p in ps:
        o.state[p] = {}
        o.state[p] = kept[p]


def exchange(o: Any, ps: list[Any]) -> None:
    a, b = ps[1], ps[3]
    o.state[a], o.state[b] = o.state[b], o.state[a]


def exchange_tensors(o: Any, ps: list[Any]) -> None:
    s, t = o.state[ps[1]], o.state[ps[3]]
    for name in [n for n, v in s.items() if torch.is_tensor(v) and v.dim()]:
        s[name], t[name] = t[name], s[name]


def zero_all(o: Any, ps: list[Any]) -> None:
    for entry in o.state.values():
        for value in entry.values():
            if torch.is_tensor(value):
                value.zero_()
    assert [p in o.state for p in ps] == len(ps) * [True]


def reset_steps(o: Any, ps: list[Any]) -> None:
    for entry in o.state.values():
        entry["step"] = torch.tensor(0.0)
    assert all(entry["exp_avg"].any() for entry in o.state.values())
    assert len(o.state_dict()["state"]) == len(ps)


EDITS = (
    *(zero, scale_views, assign, out_of_place, rebind, clear, pop),
    *(delete_one, put_back, backup, backup_of_entries, backup_of_tensors),
    *(exchange, exchange_tensors, zero_all, reset_steps),
)


def values(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("number", "edit"), enumerate(EDITS))
def test_edits_are_those_of_plain_pytorch(number: int, edit: Any) -> None:
    ends = []
    for wraps in (False, True):
        model, optimizer = make(wraps, **MODES["in_backward" if number % 2 else "on_step"])
        step(model, optimizer, 2)
        begin = values(model)
        edit(optimizer, list(model.parameters()))
        step(model, optimizer, 2)
        ends.append(values(model) - begin)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "adamw"])
def test_classes_are_edited_alike(kind: str) -> None:
    ends = []
    for wraps in (False, True):
        model, optimizer = make(wraps, kind)
        for edit in (scale_views, put_back, clear, zero):
            step(model, optimizer, 2)
            edit(optimizer, list(model.parameters()))
        step(model, optimizer, 1)
        ends.append(values(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "mode"), zip(KINDS, [*MODES, "on_step"], strict=True))
def test_it_reads_as_in_plain_pytorch(kind: str, mode: str) -> None:
    plain, oracle = make(False, kind)
    model, optimizer = make(True, kind, **MODES[mode])
    assert len(optimizer.state) == 0
    assert not optimizer.state
    assert optimizer.state[model[0].weight] == {}
    assert optimizer.state.get(model[0].weight) is None
    for pair in ((plain, oracle), (model, optimizer)):
        step(*pair, 3)
    assert list(optimizer.state) == list(model.parameters())
    rounds = 5e-2 if mode == "bfloat16" else 1e-3
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert q in optimizer.state
        assert oracle.state[p].keys() <= optimizer.state[q].keys()
        for name, value in oracle.state[p].items():
            found = optimizer.state[q].get(name)
            torch.testing.assert_close(
                torch.as_tensor(found).clone(), torch.as_tensor(value), rtol=rounds, atol=1e-2
            )


def test_reading_has_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, _ = trained()
    reads: list[Any] = []
    read = Wrapped.read
    monkeypatch.setattr(Wrapped, "read", lambda *a: reads.append(a[1:]) or read(*a))
    entries = [dict(entry) for _, entry in optimizer.state.items()]
    assert not reads
    assert all(entry["exp_avg"].norm() > 0 for entry in entries)
    assert len(reads) == len(entries)


def test_what_is_held_shows_the_state_as_it_is() -> None:
    model, optimizer, p = trained()
    entry, moment = optimizer.state[p], optimizer.state[p]["exp_avg"]
    row = moment[3]
    before, of_row = moment.clone(), row.clone()
    step(model, optimizer)
    assert not torch.equal(moment, before)
    assert not torch.equal(row, of_row)
    assert torch.equal(row, entry["exp_avg"][3])
    assert entry["step"] == 3
    row.zero_()
    assert (optimizer.state[p]["exp_avg"][3] == 0).all()
    assert (optimizer.state[p]["exp_avg"][4] != 0).any()
    kept, of_row = moment.clone(), row.clone()
    optimizer.state.clear()
    assert len(optimizer.state[p]) == 0
    step(model, optimizer)
    assert entry["step"] == 3
    for held in (moment, entry["exp_avg"]):
        assert torch.equal(held, kept)
    assert torch.equal(row, of_row)


def test_what_was_replaced_may_be_put_back() -> None:
    ends = []
    for wraps in (False, True):
        model, optimizer = make(wraps)
        step(model, optimizer)
        other = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(other)
        step(model, optimizer, 2)
        optimizer.load_state_dict(saved)
        step(model, optimizer)
        optimizer.state, mapping = defaultdict(dict), optimizer.state
        step(model, optimizer)
        assert optimizer.state[model[0].weight]["step"] == 1
        assert mapping[model[0].weight]["step"] == 3
        optimizer.state = mapping
        step(model, optimizer)
        ends.append(values(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-6)


def test_views_have_their_metadata_and_iterate() -> None:
    _, optimizer, p = trained()
    moment = optimizer.state[p]["exp_avg"]
    turned = moment.t()
    assert (turned.shape, turned.stride()) == ((24, 48), (1, 24))
    assert torch.equal(turned.contiguous().view(-1), moment.clone().t().reshape(-1))
    for row in moment:
        row.fill_(2.0)
    assert (moment == 2).all()
    turned[:, 1] = 5.0
    assert (moment[1] == 5).all()
    array = moment.numpy()
    assert not array.flags.writeable
    file = io.BytesIO()
    torch.save(turned, file)
    file.seek(0)
    assert torch.equal(torch.load(file), turned.clone())


def test_steps_may_be_set() -> None:
    _, optimizer, p = trained()
    optimizer.state[p]["step"] += 5
    assert optimizer.state[p]["step"] == 7
    optimizer.state[p]["step"] = torch.tensor(9.0)
    assert optimizer.state_dict()["state"][0]["step"] == 9
    optimizer.state[p]["step"].fill_(1)
    assert optimizer.state[p]["step"] == 1
    with pytest.raises(ValueError, match="whole number"):
        optimizer.state[p]["step"].fill_(1.5)
    assert optimizer.state[p]["step"] == 1


def test_moments_of_fewer_bits_are_edited(tmp_path: Path) -> None:
    memory = {"device": "1MiB", "host": "1MiB", "ssd": "16MiB"}
    for state_dtype in ("8bit", torch.bfloat16):
        _, optimizer, p = trained(state_dtype=state_dtype, memory=memory, ssd_path=tmp_path)
        optimizer.state[p]["exp_avg"].fill_(0.5)
        assert ((optimizer.state[p]["exp_avg"] - 0.5).abs() < 0.01).all()


def test_what_cannot_be_done_is_refused_by_name() -> None:
    _, optimizer, p = trained()
    before = copy.deepcopy(optimizer.state_dict())
    entry = optimizer.state[p]
    other = nn.Parameter(torch.ones(2))
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: entry.update(slow=torch.ones(3)),
            ValueError,
            "'slow' .* nothing that AdamW",
        ),
        (lambda: entry.update(exp_avg=torch.ones(3)), ValueError, "shape"),
        (lambda: entry.pop("exp_avg"), ValueError, "has no 'exp_avg'"),
        (lambda: optimizer.state[other], KeyError, "own parameters"),
        (lambda: optimizer.state.update({other: {}}), KeyError, "own parameters"),
        (lambda: setattr(optimizer, "state", {p: {"exp_avg": 3}}), ValueError, "not a tensor"),
        (lambda: delattr(optimizer, "state"), AttributeError, "optimizer.state.clear"),
        (lambda: entry["exp_avg"].share_memory_(), RuntimeError, "without memory"),
    ]
    for attempt, kind, message in refused:
        with pytest.raises(kind, match=message):
            attempt()
    assert other not in optimizer.state
    assert optimizer.state.pop(other, 3) == 3
    after = optimizer.state_dict()
    for number, name in itertools.product(before["state"], ("step", "exp_avg", "exp_avg_sq")):
        assert torch.equal(after["state"][number][name], before["state"][number][name])


def test_in_a_half_step_it_is_refused() -> None:
    model, optimizer, p = trained(update="in_backward")
    model(torch.ones(1, 24)).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer's state between backward\(\) and step\(\)"):
        optimizer.state[p]["exp_avg"]
    optimizer.step()


def test_copies_are_plain() -> None:
    _, optimizer, p = trained()
    copied = copy.deepcopy(optimizer.state)
    assert type(copied[p]["exp_avg"]) is torch.Tensor
    optimizer.state.clear()
    optimizer.state = copied
    assert torch.equal(optimizer.state[p]["exp_avg"], copied[p]["exp_avg"])
    assert "6 parameters" in repr(optimizer.state)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer.state)


def test_ranks_read_it_and_are_told_how_to_change_it(ranks: Ranks) -> None:
    one, other = ranks.run("rank_scenarios.optimizer_state", 2)
    assert one == other


LOSSES_OF_MOMENTUM: dict[str, Any] = {
    "pop": lambda entry: entry.pop("momentum_buffer"),
    "del": lambda entry: entry.__delitem__("momentum_buffer"),
    "None": lambda entry: entry.__setitem__("momentum_buffer", None),
}


@pytest.mark.parametrize("loss", LOSSES_OF_MOMENTUM)
def test_momentum_that_is_removed_begins_anew(loss: str) -> None:
    results = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if wraps:
            memory = {"device": "1MiB", "host": "4MiB"}
            model, optimizer = strata.wrap(model, optimizer, memory=memory)
        for i in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 1:
                LOSSES_OF_MOMENTUM[loss](optimizer.state[model[0].weight])
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results)

"""Element-wise optimizers that strata has no kernel for, run as the classes they are.

    foreign = make_foreign(optimizer)            # None where there are kernels
    session = _core.Session(config, foreign)     # its workers call it for one slice after another
    spec["options"] = foreign.remember(group)    # the hyperparameters of the updates of this step

The core hands over float32 values, gradient and moments of a slice of a parameter; the class makes
its step on tensors over that memory. Threads: workers call at the same time, under the GIL, which
torch gives up inside its operations.

Note [Scalars]. Beside moments a class may keep numbers, such as a count of steps. They follow from
the step alone: probe() has seen to that. They are kept by parameter and step, not by slice, for
slices of a parameter come in any order. Where a step was read from a checkpoint, its numbers are
not known. They are found by making as many steps on a few elements with today's hyperparameters.
Limit: numbers that depend on hyperparameters (`mu_product` of NAdam) then differ where those were
changed on the way; load_state_dict() takes them from what was saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from .foreign_probe import Kept, State, copy_scalars, options_of, probe, replica, run_step
from .lion import Lion

# Classes whose arithmetic the core's kernels have, and as which rule.
NATIVE: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    Lion: "lion",
}

# Options of so many steps are kept for updates that still wait: far more than can be under way.
STEPS_UNDER_WAY = 64
OPTIONS_KEPT_MIN = 1024
STEPS_KEPT = 4  # of a parameter's scalars
TRIAL_NUMEL = 1 << 14  # as many as the core hands over at a time


def make_foreign(optimizer: torch.optim.Optimizer) -> Foreign | None:
    """What runs this optimizer's class; None where the core has kernels for it.

    Raises TypeError where the class cannot be run on pieces of parameters, and says why.
    """
    return None if type(optimizer) in NATIVE else Foreign(optimizer)


class Foreign:
    """Runs the steps of one optimizer's class, for the workers of one session."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises TypeError as probe() does. Keeps nothing of the optimizer's parameters."""
        self.name = type(optimizer).__name__
        self._like = replica(optimizer)
        self._probed: dict[str, Kept] = {}
        self._numbers: dict[str, int] = {}  # of hyperparameters, those used last at the end
        groups = len(optimizer.param_groups)
        self._options_kept = max(OPTIONS_KEPT_MIN, STEPS_UNDER_WAY * groups)
        self._known: dict[int, tuple[dict[str, Any], Kept]] = {}
        self._scalars: dict[int, dict[int, State]] = {}  # by parameter and step
        self._noting = threading.Lock()
        self._room = max(len(self.kept(group).moments) for group in optimizer.param_groups)

    def kept(self, group: dict[str, Any]) -> Kept:
        """What is kept for parameters of such a group. Raises TypeError as probe() does."""
        # Whether there is, say, a momentum decides about the state; how large it is does not.
        key = repr({n: bool(v) for n, v in options_of(group).items()})
        if key not in self._probed:
            self._probed[key] = probe(self._like, group)
        return self._probed[key]

    def remember(self, group: dict[str, Any]) -> int:
        """A number that stands for the group's hyperparameters as they are now: another one where
        they are others, and on every rank the same."""
        options, kept = options_of(group), self.kept(group)
        if len(kept.moments) > self._room:
            raise ValueError(
                f"{self.name} keeps {', '.join(map(repr, kept.moments))} with the options that the "
                "parameter group has now, and strata.wrap() laid out less: wrap it with them"
            )
        key = _text_of(options)
        number = self._numbers.pop(key, 0)
        if not number:
            number = _number_of(key)
            while number in self._known:  # of an object that only differs by where it lies
                number += 1
            self._known[number] = (options, kept)
        self._numbers[key] = number
        while len(self._numbers) > self._options_kept:
            self._known.pop(self._numbers.pop(next(iter(self._numbers))))
        return number

    def check_kept(self, groups: list[dict[str, Any]], laid_out: list[Kept]) -> None:
        """Raises ValueError where a group's options need other moments than those of `laid_out`,
        which say what each group kept when the model was wrapped."""
        for g, (group, then) in enumerate(zip(groups, laid_out, strict=True)):
            now = self.kept(group).moments
            if now != then.moments[: len(now)]:
                names = [", ".join(map(repr, moments)) for moments in (now, then.moments)]
                raise ValueError(
                    f"{self.name} keeps {names[0]} with the options that parameter group {g} has "
                    f"now, and strata.wrap() laid out {names[1] or 'nothing'}: wrap it with them"
                )

    def seconds_per_element(self, group: dict[str, Any]) -> float:
        """What a step costs on one thread, from a few of them."""
        rule, options = replica(self._like), options_of(group)
        values, grad = (torch.ones(TRIAL_NUMEL, device="cpu") for _ in range(2))
        state: State = {}
        seconds = []
        with _one_thread():
            for _ in range(5):
                begin = perf_counter()
                state = run_step(rule, options, values, grad, state)
                seconds.append(perf_counter() - begin)
        return min(seconds) / TRIAL_NUMEL

    def scalars(self, param: int, step: int, group: dict[str, Any]) -> State:
        """The numbers that the class keeps of a parameter after so many steps."""
        kept = self.kept(group)
        return copy_scalars(self._after(param, step, options_of(group), kept), kept.scalars)

    def set_scalars(self, param: int, step: int, entry: State, group: dict[str, Any]) -> None:
        """Takes over what a state dict says of a parameter, in the place of all that is known."""
        names = self.kept(group).scalars
        known = all(name in entry for name in names)
        self._scalars[param] = {step: copy_scalars(entry, names)} if known else {}

    def __call__(self, number: int, param: int, step: int, count: int, *addresses: int) -> None:
        """Makes the step on a slice: addresses of values, gradient and two moments, 0: absent."""
        options, kept = self._known[number]
        values, grad, *moments = (_borrow(a, count) for a in addresses if a)
        places = dict(zip(kept.moments, moments, strict=False))
        state: State = {}
        if step > 1:
            before = self._after(param, step - 1, options, kept)
            state = {**places, **copy_scalars(before, kept.scalars)}
        with _one_thread():
            after = run_step(replica(self._like), options, values, grad, state)
        for name, place in places.items():
            # The first step makes tensors of its own, and so does a class that does not write in
            # place.
            if after[name].data_ptr() != place.data_ptr():
                place.copy_(after[name])
        self._note(param, step, copy_scalars(after, kept.scalars))

    def _note(self, param: int, step: int, scalars: State) -> None:
        with self._noting:
            known = self._scalars.setdefault(param, {})
            known.setdefault(step, scalars)
            while len(known) > STEPS_KEPT:
                known.pop(next(iter(known)))

    def _after(self, param: int, step: int, options: dict[str, Any], kept: Kept) -> State:
        known = self._scalars.get(param, {})
        if step in known:
            return known[step]
        scalars = _scalars_after(replica(self._like), step, options, kept)
        self._note(param, step, scalars)
        return scalars


def _scalars_after(
    rule: torch.optim.Optimizer, steps: int, options: dict[str, Any], kept: Kept
) -> State:
    """See Note [Scalars]."""
    values, state = torch.ones(1, device="cpu"), dict[str, Any]()
    counts_only = kept.scalars in ((), ("step",))
    for _ in range(1 if counts_only else steps):
        state = run_step(rule, options, values, torch.ones(1, device="cpu"), state)
    scalars = copy_scalars(state, kept.scalars)
    if counts_only and kept.scalars:
        one = scalars["step"]
        scalars["step"] = torch.full_like(one, steps) if torch.is_tensor(one) else type(one)(steps)
    return scalars


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch's operations on the thread that calls.

    Else every worker would bring a team of threads to disturb the computation. torch's own
    set_num_threads() is for all threads of the program.
    """
    threads = torch.get_num_threads()  # of this thread; torch sets it when it first looks
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is None or threads == 1:
        yield
        return
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)


def _text_of(options: dict[str, Any]) -> str:
    """The same for the same values, to the last digit."""
    return repr({n: v.tolist() if torch.is_tensor(v) else v for n, v in options.items()})


def _number_of(text: str) -> int:
    """Of what _text_of() returns. Where an object lies is another matter in every process."""
    words = re.sub(" at 0x[0-9a-f]+", "", text)
    return 1 + int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])


def _borrow(address: int, count: int) -> torch.Tensor:
    """A tensor over somebody else's float32 values."""
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)

"""Accelerator.prepare, which wraps a model and an optimizer of torch when it is given both.

As a plugin of pytest (-p over_prepare) it does so for a whole run, and says at its end how often.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import strata
import torch
from accelerate import Accelerator

_plain = Accelerator.prepare
_count = 0


def _prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    global _count
    models = [a for a in args if isinstance(a, torch.nn.Module) and "_strata" not in a.__dict__]
    optimizers = [a for a in args if type(a).__module__.startswith("torch.optim.")]
    optimizers = [a for a in optimizers if isinstance(a, torch.optim.Optimizer)]
    if len(models) == len(optimizers) == 1:
        memory = {"device": "16MiB", "host": "64MiB"}
        _, wrapped = strata.wrap(models[0], optimizers[0], memory=memory)
        args = tuple(wrapped if a is optimizers[0] else a for a in args)
        _count += 1
    return _plain(self, *args, **kwargs)


@contextmanager
def installed() -> Iterator[Callable[[], int]]:
    """Within it; yields a function that says how many models were wrapped."""
    before = _count
    Accelerator.prepare = _prepare
    try:
        yield lambda: _count - before
    finally:
        Accelerator.prepare = _plain


def pytest_sessionstart() -> None:
    Accelerator.prepare = _prepare


def pytest_sessionfinish() -> None:
    print(f"\nwrapped models: {_count}")

"""What ranks do in tests/python/test_rank_refusals.py: see rank_scenarios.py."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import strata
import torch
from rank_loops import Rank, hash_of, make_model, train, wrap
from safetensors.torch import save_file
from strata._runtime.wrapped import wrapped
from torch import nn


def _odd_model(run: Rank, what: str) -> nn.Module:
    """Of which rank 1 has another one than the others."""
    odd = run.rank == 1
    model: nn.Module = make_model(2 if what in ("models", "core") and odd else 3)
    if what == "buffers" and not odd:
        model.register_buffer("seen", torch.zeros(4))
    if what == "sizes of buffers":
        model.register_buffer("seen", torch.zeros(40 if odd else 4))
    if what == "frozen" and odd:
        model[0].requires_grad_(False)  # type: ignore[operator]
    if what == "tensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (run.ranks,), mesh_dim_names=("tp",))
        linear: Any = model[0][0]  # type: ignore[index]
        linear.weight = nn.Parameter(DTensor.from_local(linear.weight.detach(), mesh, [Partial()]))
    return model


def is_refused(run: Rank, what: str) -> list[str]:
    """What is said where ranks cannot train together."""
    odd = run.rank == 1
    options: dict[str, Any] = {}
    model = _odd_model(run, what)
    if what == "core":
        from strata import _opening

        _opening.check_alike = _opening.check_fitted = lambda *_: None
    if what in ("tiles", "infeasible"):
        small = {"device": "64KiB" if what == "tiles" else "4KiB"}
        options["memory"] = {"host": "96MiB"} | (small if odd else {})
    if what == "units" and odd:
        options["units"] = ["0.0"]
    optimizer: Any = torch.optim.SGD if what == "rules" and odd else torch.optim.AdamW
    if what == ("other folder" if odd else "folder"):
        from strata._config import ranks

        ranks._meeting_folder = _no_folder
    if what == "dtypes" and odd:
        options["dtype"] = torch.bfloat16
    if what == "pages" and odd:
        options["page_size"] = "128KiB"
    if what == "budgets":
        options["memory"] = {"device": "8MiB", "host": "64MiB" if odd else "96MiB"}
    if what == "versions" and odd:
        strata._core.__version__ = "0.0.0"
    if what == "sums" and odd:
        options["rank_gradients"] = "sum"
    if what == "workers" and odd:
        options["workers"] = -1
    if what in ("weights", "missing", "values of a file"):
        path = run.folder / f"of-{run.rank}.safetensors"
        values = model.state_dict()
        if what == "weights":
            values["2.2.weight"] = values["2.2.weight"] + 1e-3 * odd  # one of twelve
        if what != "missing" or not odd:
            save_file(values, path)
        options["weights"] = path
    if what == "no weights" and not odd:
        options["weights"] = "init"
    if what == "seeds":
        options |= {"weights": "init", "seed": run.rank}
    if what in ("weights", "missing", "values of a file", "no weights", "seeds"):
        model = model.to("meta")
    if what == "files" and odd:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    if what == "descriptors" and odd:
        used = 1 + max(map(int, os.listdir("/proc/self/fd")))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, most))
    if what in ("values", "values of a file") and odd:
        from strata._runtime.wrapped import Wrapped

        Wrapped.write = _no_write  # type: ignore[method-assign, assignment]
    before = time.monotonic()
    try:
        strata.wrap(model, optimizer(model.parameters(), lr=1e-2), **options)
    except (ValueError, RuntimeError, OSError) as error:
        found = [type(error).__name__, str(error), str(time.monotonic() - before)]
        _await_refusals(run)
        return found
    return ["none", "", ""]


def opens_files(run: Rank) -> list[str]:
    """What rank 1 is told under one limit of open files after another, until it trains: the others
    hear soon of each refusal."""
    used = 1 + max(map(int, os.listdir("/proc/self/fd")))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for more in range(1, 200):
        if run.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, most))
        model, before, told = make_model(), time.monotonic(), ""
        try:
            wrap(run, model)
        except (ValueError, RuntimeError, OSError) as error:
            told = str(error)
        assert time.monotonic() - before < 20, told
        if not told:
            return [str(more)]
        assert "ulimit -n" in told or "open files" in told, told
    return []


def fails_behind(run: Rank) -> list[str]:
    """Rank 1 fails once all have met, and lives on; the others train. What each is told."""
    if run.rank == 1:
        from strata import _opening

        _opening._move = _no_write
    before = time.monotonic()
    try:
        model, optimizer = wrap(run, make_model())
        train(run, model, optimizer, 2)
    except (ValueError, RuntimeError, OSError) as error:
        found = [type(error).__name__, str(error), str(time.monotonic() - before)]
        _await_refusals(run)
        return found
    return ["none", "", ""]


def _await_refusals(run: Rank) -> None:
    """Lives on for the longest that any rank is to take: its end would tell the others, too."""
    run.mark(f"refused-{run.rank}")
    until = time.monotonic() + 300
    while time.monotonic() < until and len(list(run.folder.glob("refused-*"))) < run.ranks:
        time.sleep(0.01)


def _no_write(*_: Any, **__: Any) -> None:
    raise OSError("no room for values")


def _no_folder() -> str:
    raise PermissionError("no room to meet")


def has_other_memory(run: Rank, budgets: list[str]) -> tuple[int, str]:
    """Each rank has a device budget of its own. Returns the page size, and what was learned."""
    width = 480
    memory = {"device": budgets[run.rank], "host": "96MiB"}
    model, optimizer = wrap(run, make_model(3, width), memory=memory, activations=None)
    train(run, model, optimizer, 2, width=width)
    return wrapped(model).session.plan["page_bytes"], hash_of(model)

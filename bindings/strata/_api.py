"""The public functions: wrap a model, look at it, take it back.

model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
...                                        # a plain PyTorch training loop
print(strata.report(model))
model = strata.unwrap(model)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _core
from ._config.budgets import tier_budgets
from ._config.choices import AS_IS
from ._config.frozen import Frozen
from ._config.options import Options
from ._config.paths import AnyPath
from ._config.ranks import ranks_on_paper
from ._config.sharding import give_back, take_shards, trains_alone
from ._config.sizes import Size
from ._config.units import Chosen
from ._config.update_modes import Update
from ._core import gradients_rest
from ._errors import StrataError, keywords_of, names_nearest
from ._opening import check, open_session
from ._planning.fitting import fit
from ._report.reports import PlanReport, Report, make_report
from ._runtime.optimizer import StrataOptimizer
from ._runtime.undo import Undo
from ._runtime.wrapped import Wrapped, wrapped
from ._storage.rank_board import Board
from ._storage.together import roll_of
from .nn.replace import remove_tiles

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


@names_nearest
def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    memory: Mapping[str, Size] | None = None,
    ssd_path: AnyPath | Sequence[AnyPath] | None = None,
    dtype: torch.dtype | None = None,
    update: Update = "on_step",
    state_dtype: torch.dtype | str = torch.float32,
    max_grad_norm: float | None = None,
    max_unit_norm: float | None = None,
    gradient_accumulation_steps: int = 1,
    skip_nonfinite: bool = False,
    units: Chosen | None = None,
    page_size: Size = "auto",
    io_engine: str = "auto",
    workers: int | None = None,
    weights: AnyPath | None = None,
    seed: int = 0,
    init_device: str | torch.device = "cpu",
    activations: str | None = "auto",
    split: int | None = None,
    device: str | torch.device = "auto",
    snapshots: int = 0,
    frozen: Frozen = AS_IS,
    rank_group: ProcessGroup | DeviceMesh | None = None,
    rank_gradients: str = "mean",
    rank_gathers: str = "exact",
    rank_sums: str = "ranks",
    rank_timeout: float | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Moves the training state of a model into pages. The loop around it stays as it is. Gradients
    that the parameters have already are dropped, and the log says so.

    Args:
        model: any module. A model on the meta device needs `weights`. Layers that are too large for
            the device are cut into tiles (strata.nn), of which no file knows.
        optimizer: of torch.optim, over the model's parameters, without state. What requires a
            gradient and is in none of its groups is not updated: the log names it. Its gradient is
            a plain tensor, for an optimizer of your own; of several ranks there is none.
        memory: budgets by tier, `{"device": "8GiB", "host": "24GiB", "ssd": "200GiB"}`, in bytes or
            words; hard limits. Default: from what is free; no SSD without `ssd_path`.
        ssd_path: a folder on the drive to use, or some on different drives.
        dtype: float32, bfloat16 or float16, of parameters and gradients in the computation; the
            master copy is always float32-exact. Default: the dtype that each parameter has.
        update: `"on_step"`: updates start at optimizer.step(), as in plain PyTorch.
            `"in_backward"`: as soon as a unit's gradients are complete, which then need no memory;
            the same, bit for bit. `strata.LockFree(max_staleness=S)`: a forward waits for updates
            only where its parameters would be more than S steps old.
        state_dtype: of the optimizer's moments. torch.float32 is exact; torch.bfloat16 (rounded
            stochastically) and `"8bit"` (codes with scales) lose bits, for half or a quarter of
            the bytes.
        max_grad_norm: clips the norm of all gradients together, as clip_grad_norm_() does.
        max_unit_norm: clips the norm of each unit's gradients by itself; works in every mode.
        gradient_accumulation_steps: more than 1: so many backward() calls precede a step(), or
            fewer, and their gradients add up in float32. Without it they add up in their own
            dtype, as in plain PyTorch, however many there are. They are not averaged.
        skip_nonfinite: leaves out steps whose gradients hold infinities or NaN.
        units: more units than are found: modules, their names, or a predicate(name, module).
        page_size: bytes in a page, a power of two from 64 KiB to 64 MiB; `"auto"` chooses.
        io_engine: `"io_uring"`, `"libaio"`, `"threads"` or `"memory"`; `"auto"` takes the first
            that works.
        workers: threads of the optimizer. Default: by the number of processors.
        weights: a safetensors file, one of torch.save() with a state dict, or a folder of them, to
            read the parameters from. `"init"`: the modules of a model on the meta device begin with
            the values that `seed` draws.
        seed: of `weights="init"`.
        init_device: where those are drawn. A GPU is faster, and draws others than `"cpu"`.
        activations: what becomes of the tensors that autograd saves between forward and backward.
            `"auto"`: planned for every unit; `"keep"`, `"swap"` (to host memory and SSD) or
            `"recompute"`: so for every unit that can. Units run a second time only where memory is
            needed, and only if a trial shows that this gives the same. The budget covers
            parameters, activations and PyTorch's own memory together, as measured in the first
            step. None: it covers parameters alone.
        split: computes units on so many slices of the batch in turn. Default: as planned.
        device: `"cuda"` or `"cuda:1"`: a GPU, to which the caller moves inputs; `"host"`: a region
            of host memory; `"auto"`: the GPU that the model is on, or one that can be used, or the
            host.
        snapshots: how many complete ones strata.snapshot() will keep, all series together. They and
            the next one get room on the SSD now, or are refused now, with what would do: so many
            times and once more the state of what is trained, and once that of what is frozen; with
            gradient_accumulation_steps and LockFree also of gradients, as a snapshot in the middle
            of an accumulation has them. 0: the first strata.snapshot() makes room, or is refused.
        frozen: how what is frozen rests. `"nf4"` and `"nf4-double"`: in 4 bits, as bitsandbytes has
            them, scales in 32 or 8 bits; `"nf4-torchao"`: as torchao has made them; `"int8"`;
            `"as-is"`: in the dtype of computation. It means the weights of layers, not norms,
            embeddings, the last layer and adapters. A function of a module's name and the module
            gives a form for its weights, or None. Modules stay what they are: values are computed
            on the way to the device.
        rank_group: the processes that train this model together: a group of torch.distributed, or
            a DeviceMesh of one dimension, such as mesh["dp"], or of two, to replicate and to shard
            over. Default: all that torch.distributed knows. Other processes may train other
            models. A group of one trains by itself.
        rank_gradients: of several ranks: `"mean"`: the update gets their average, as that of
            DistributedDataParallel does; `"sum"`: their sum.
        rank_gathers: of ranks of several machines: how parameters that train get to a machine that
            computes with them and does not own them. `"exact"`: as they are. `"int8"`: as codes of
            8 bits with a float32 for each block of 64 (qwZ of ZeRO++): about half of the bytes of
            bfloat16. Lossy: machines compute with parameters that differ by the rounding, at most
            1/254 of the block's largest. Updates, checkpoints and all that is read are exact.
        rank_sums: of ranks of several machines: how their gradients add up. `"ranks"`: each goes to
            its owner, and all are added in the order of ranks: the bits are those of one process.
            `"machines"`: each machine adds up what its ranks have, in float32, and sends one sum:
            fewer bytes where a machine has three ranks or more, or two with gradients in float32.
            The bits depend on which ranks are of one machine.
        rank_timeout: seconds for which this rank waits for another one that neither comes nor ends;
            then it raises StrataError, and so do the others. Default: for as long as it takes, and
            after 10 s the log says for whom.

    Returns:
        The same model, and the optimizer that takes the place of the one that was given.

    Raises:
        StrataError: the budgets cannot work, with the smallest that would; the device cannot be
            used, with the reason; or a disk failed.
        ValueError: an argument, the model or the optimizer is nothing that strata can train.
        TypeError: an unknown keyword, with the nearest, or an argument of another type.
        FileNotFoundError: there is no folder at `ssd_path`.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        >>> model, optimizer = strata.wrap(
        ...     model,
        ...     torch.optim.AdamW(model.parameters(), lr=1e-3),
        ...     memory={"device": "1MiB", "host": "8MiB"},
        ... )
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    options = Options(
        memory, ssd_path, dtype, update, state_dtype, max_grad_norm, max_unit_norm,
        gradient_accumulation_steps, skip_nonfinite, units, page_size, io_engine, workers, weights,
        seed, init_device, activations, split, device, snapshots, frozen, rank_group,
        rank_gradients, rank_gathers, rank_sums, rank_timeout,
    )  # fmt: skip
    return model, open_session(model, optimizer, options).optimizer


@keywords_of(wrap)
def plan(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> PlanReport:
    """A dry run of wrap() with the same arguments. Allocates nothing, and leaves the model alone.

    Returns:
        What would go where; print it.

    Raises:
        StrataError: as wrap() would, and so do ValueError and TypeError.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> plan = strata.plan(model, optimizer, memory={"device": "1MiB", "host": "8MiB"})
        >>> plan.budgets["host"]
        8388608
    """
    wanted = Options(**options)
    check(model, optimizer, wanted)
    undo = Undo(model, optimizer)
    try:
        if not trains_alone(model, wanted):
            wanted = replace(wanted, ranks=ranks_on_paper(wanted.rank_group))
        take_shards(model, optimizer)
        config, _, result = fit(model, optimizer, wanted, _core.plan)
    finally:
        undo.run()
    ranks = wanted.ranks.count if wanted.ranks is not None else 1
    return PlanReport(result, tier_budgets(config), gradients_rest(config), ranks)


def unwrap(model: nn.Module) -> nn.Module:
    """Gives the plain model back: parameters in CPU memory, hooks removed, session closed.

    Parameters get the dtype that they had before wrap(), with the values of the master copy. The
    memory for all of them is needed at once. Where an exception ends it half-way, Ctrl-C too, it
    can be called again and finishes. Of several ranks all call it: it waits for those that still
    train, which may read what this one holds, and after 10 s the log says for whom.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not wrapped.
        RuntimeError: between backward() and step() of update="in_backward".
        StrataError: a page could not be read, or another rank has died. Where parameters are plain
            by then, another call ends the session.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> model, _ = strata.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> model = strata.unwrap(model)
        >>> type(model.weight)
        <class 'torch.nn.parameter.Parameter'>
    """
    state = wrapped(model)
    if not state.given_back:
        _give_back(model, state)
    board = Board.of(state, "unwrap")
    if board is not None:
        try:
            roll_of(state).leave("strata.unwrap()")
            # Others still read what this rank holds.
            board.meet("end", "strata.unwrap()", board.place())
        except StrataError:  # all of them end with it, and read nothing more
            state.ranks = None
            raise
    del model.__dict__["_strata"]
    state.close()
    return model


def _give_back(model: nn.Module, state: Wrapped) -> None:
    """Parameters, buffers, hooks and optimizer as they were before wrap(), with the newest values.
    Can be called again."""
    state.hooks.reset()
    state.refuse_half_step("unwrap()")
    state.synchronize()
    # All values first: where the disk fails, the model remains a wrapped one.
    values = [state.read(i).to(dtype) for i, dtype in enumerate(state.original_dtypes)]
    state.hooks.remove()
    for index, (parameter, value) in enumerate(zip(state.params, values, strict=True)):
        state.views.move(index, partial(value.to, parameter.dtype))
        parameter.__class__ = nn.Parameter
        parameter.data = value
        parameter.__dict__.pop("_strata", None)
    for module, name, dtype, place in state.moved_buffers:
        setattr(module, name, getattr(module, name).to(place, dtype))
    remove_tiles(model, state.optimizer)
    if state.shards is not None:
        dtensors = {state.params[i]: of for i, of in state.shards.dtensors.items()}
        give_back(model, state.optimizer, dtensors, dict(zip(state.params, values, strict=True)))
    if isinstance(state.optimizer, StrataOptimizer):
        state.optimizer.release_inner()
    if state.planning is not None:
        state.planning.allocator.close()
    if state.snapshots is not None:
        state.snapshots.finish()
        state.snapshots.holder.finish()
    state.given_back = True


def report(model: nn.Module) -> Report:
    """Where the time and the bytes went so far. Print it, or save() it for `strata report`.

    Raises:
        ValueError: the model is not wrapped.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> model, _ = strata.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> strata.report(model).steps
        0
    """
    return make_report(wrapped(model))


def gather_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter of a wrapped model, in every mode of updates. Under "on_step"
    `p.grad` is the same in its own dtype, and can be changed.

    Returns:
        A new float32 tensor of the parameter's shape, on its device; None where none has landed.

    Raises:
        ValueError: `parameter` is of no wrapped model.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> model, _ = strata.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> strata.gather_grad(model.bias).sum()
        tensor(64.)
    """
    slot = getattr(parameter, "_strata", None)
    if slot is None:
        raise ValueError("gather_grad() takes a parameter of a wrapped model")
    state, index = slot.state, slot.index
    if state.gradients.on_step or state.gradients.is_own(index):
        return state.gradients.gather(index)
    return state.read(index, "grad").to(state.device) if state.steps.landed[index] else None


def synchronize(model: nn.Module) -> None:
    """Waits until every update and every write of the model has finished. Behind it parameters are
    the newest ones in every mode, also those that LockFree lets lag.

    Raises:
        ValueError: the model is not wrapped.
        StrataError: an update or a write failed.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> strata.synchronize(model)
    """
    wrapped(model).synchronize()

"""Opens the session of a model: room for its pages, values in them, hooks, and what stands for its
optimizer.

    check(model, optimizer)                            # raises where strata cannot train it at all
    state = open_session(model, optimizer, options)    # the model is wrapped
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from . import _core
from ._config.alike import check_alike, check_fitted
from ._config.budgets import device_goal
from ._config.choices import INIT
from ._config.device import say_slow_dtypes
from ._config.managed import check_parameters
from ._config.options import Options
from ._config.ranks import Ranks, all_or_none, find_ranks, naming_lost
from ._config.sharding import check_sharded, take_shards, trains_alone
from ._config.sizes import format_count, format_size
from ._errors import listed
from ._hooks.hooks import Hooks
from ._hooks.parallel import refuse_parallel
from ._optim.foreign import Foreign, make_foreign
from ._planning.fitting import fit
from ._planning.planning import Goal, Planning
from ._runtime.awaited import Watch
from ._runtime.closing import close_unreachable, give_up
from ._runtime.coded import Whole
from ._runtime.escapes import Views
from ._runtime.forks import watch
from ._runtime.optimizer import StrataOptimizer
from ._runtime.paged import make_paged
from ._runtime.shards import Shards
from ._runtime.streams import refuse_graphed
from ._runtime.undo import Undo
from ._runtime.wrapped import Slot, Wrapped
from ._storage import weights as weight_files
from ._storage.rank_board import Board
from ._storage.saved_file import stream_paged
from ._storage.ssd_folders import Claim
from ._storage.stored import stored_tensors
from ._storage.torchao_tensors import codes_of, parts_of
from ._torch_compat import is_nf4
from .nn.replace import release_originals
from .nn.tiles import Tiled

log = logging.getLogger("strata")


def check(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Raises where strata cannot train this model at all, and touches nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
    for module in model.modules():
        if module.__dict__.get("_strata") is not None:
            raise ValueError("this model is already wrapped: call strata.unwrap(model) first")
    if isinstance(optimizer, StrataOptimizer):
        raise ValueError("this optimizer already belongs to a wrapped model")
    refuse_parallel(model)
    refuse_graphed(model)
    check_parameters(model)
    if not any(parameter.numel() for parameter in model.parameters()):
        elements = " with elements" if any(True for _ in model.parameters()) else ""
        raise ValueError(
            f"{type(model).__name__} has no parameters{elements}: there is nothing to train"
        )
    check_sharded(model, options)


def open_session(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> Wrapped:
    """Starts a session for the model and moves it there. Whatever ends it earlier, Ctrl-C too,
    leaves model and optimizer as they were."""
    ranks = None if trains_alone(model, options) else find_ranks(options.rank_group)
    options = replace(options, ranks=ranks)
    undo: Undo | None = None
    try:
        with naming_lost(ranks):
            if ranks is None:
                check(model, optimizer, options)
            else:
                check_alike(ranks.all, options, lambda: _check(model, optimizer, options), model)
            undo = Undo(model, optimizer)
            dropped = _drop_gradients(model)
            take_shards(model, optimizer)
            state = _start(model, optimizer, options, undo)
    except BaseException:
        if undo is not None:
            undo.run()
        if ranks is not None:
            ranks.close()
            if ranks.column is not None:
                ranks.column.close()
        raise
    del undo  # and with it the memory that parameters had before
    if state.shards is not None:
        state.shards.hollow()
    _give_heap_back()
    if state.planning is not None:
        state.planning.allocator.give_reserve_back()
    _log_choices(state)
    _log_left_out(state)
    if dropped:
        log.warning(
            "dropped %s that parameters had before strata.wrap(): step() uses what comes after it",
            format_count(dropped, "gradient"),
        )
    return state


def _log_left_out(state: Wrapped) -> None:
    """Names the parameters that will not be trained, though they require a gradient."""
    specs = zip(state.params, state.config["params"], strict=True)
    names = [repr(spec["name"]) for p, spec in specs if p.requires_grad and not spec["trainable"]]
    if not names:
        return
    alone = state.ranks is None and state.shards is None
    log.warning(
        "in no group of the optimizer that strata.wrap() was given, which does not train them: "
        "%s. %s To train them, put them into a group; if they are not to be trained, call "
        "requires_grad_(False) ahead of wrap()",
        listed(names),
        "Their gradients are plain tensors in memory that no budget counts, for another optimizer."
        if alone
        else "With several ranks they show no gradient, and no other optimizer trains them.",
    )


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> dict[str, str]:
    """As check(). Returns what ranks say of the values that they begin with."""
    check(model, optimizer, options)
    return weight_files.said_of(options.weights, options.seed, options.init_device)


def _give_heap_back() -> None:
    """Returns to the system what parameters had on the heap. glibc would keep it there, all blocks
    of less than 32 MiB, beside the pages that hold their values now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # others than glibc have none
    if trim is not None:
        trim(0)


def _log_choices(state: Wrapped) -> None:
    """Says in the log what was made, and what works less well than it could."""
    stats = state.session.stats()
    log.info(
        "wrapped %s: %s, pages of %s, %s backend%s",
        type(state.model).__name__,
        format_count(len(state.units), "unit"),
        format_size(state.session.plan["page_bytes"]),
        stats["backend"],
        f", {stats['io_engine']} ({stats['io_engine_why']})" if stats["io_engine"] else "",
    )
    log.info("%s %s", format_count(state.config["workers"], "worker"), stats["workers_where"])
    for warning in stats.get("warnings", []):
        log.warning("%s", warning)


def _start(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, undo: Undo
) -> Wrapped:
    # 1. Room, and the values in it.
    claim = Claim()
    undo.first(claim.close)
    with all_or_none(_everybody(options)):
        claim.take(options)
    config, hooked = _fit(model, optimizer, options)
    say_slow_dtypes(config["device"], {param["dtype"] for param in config["params"]})
    close_unreachable()  # they have frames and files
    with all_or_none(_everybody(options)) as come_so_far:  # nobody reads what is not written yet
        foreign = make_foreign(optimizer)
        if foreign is not None:
            _log_cost(foreign, optimizer, config)
        # The core's budget counts whole units that a plan lets rest on the device, too.
        whole = config.copy()
        whole["device_bytes"] = device_goal(config, options)
        come_so_far()
        column = options.ranks.column if options.ranks is not None else None
        session = _core.Session(whole, foreign, come_so_far, column)
        undo.first(session.close)
        state = Wrapped(model, session, config)
        undo.first(state.landings.close)
        state.shards = Shards.of(state)
        if column is not None:
            column.watch(session)
            state.after_leaving.append(column.close)
        state.after_close.append(claim.close)
        if options.ranks is not None and options.weights is None:
            come_so_far()
            _share_values(state, options.ranks.all)
        _fill(state, options)
    if options.ranks is not None:
        options.ranks.close()
        state.ranks = options.ranks
        board = Board.of(state, "watch")
        assert board is not None
        watch_ranks = Watch(session, options.rank_timeout, board.say_awaited)
        undo.first(watch_ranks.end)
        state.after_leaving.append(watch_ranks.end)
        undo.first(partial(give_up, session))  # others may be in their first step from here on
    # 2. The model, and what stands for its optimizer.
    _move(state, options.dtype)
    release_originals(model)
    state.hooks = Hooks(state)
    state.hooks.install(hooked)
    state.optimizer = StrataOptimizer(
        optimizer,
        state,
        max_grad_norm=options.max_grad_norm,
        max_unit_norm=options.max_unit_norm,
        skip_nonfinite=options.skip_nonfinite,
        foreign=foreign,
    )
    undo.first(state.optimizer.release_inner)
    model.__dict__["_strata"] = state
    watch(state)
    stream_paged()
    if options.activations is not None:
        _start_planning(state, options, whole["device_bytes"], undo)
    return state


def _everybody(options: Options) -> Ranks | None:
    """The ranks of all machines; None: this process is alone."""
    return options.ranks.all if options.ranks is not None else None


def _fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
) -> tuple[_core.Config, dict[nn.Module, list[int]]]:
    """The configuration under which the model fits, alike on all ranks, and the modules to hook."""
    options.look_at_machine()
    with all_or_none(_everybody(options)) as come_so_far:
        weight_files.check_values(model, options.weights)
        config, hooked, _ = fit(model, optimizer, options, _core.plan)
        come_so_far()
        if options.take_page_size_of_all(config["page_bytes"]):
            config, hooked, _ = fit(model, optimizer, options, _core.plan)
    if options.ranks is not None:
        check_fitted(
            options.ranks.all, config, sum(isinstance(of, Tiled) for of in model.modules())
        )
    return config, hooked


def _drop_gradients(model: nn.Module) -> int:
    """Those from before wrap(), which autograd would add the first new ones to. Returns how many
    there were."""
    old = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in old:
        parameter.grad = None
    return len(old)


def _log_cost(foreign: Foreign, optimizer: torch.optim.Optimizer, config: _core.Config) -> None:
    """Of a class without a kernel."""
    trained = sum(spec["numel"] for spec in config["params"] if spec["trainable"])
    each = foreign.seconds_per_element(optimizer.param_groups[0])
    log.warning(
        "%s has no kernel in strata and runs as its own class: the same results, but slower, about "
        "%.2g ns for each trained parameter and %.2g s of one core for a step",
        foreign.name,
        each * 1e9,
        each * trained,
    )


def _start_planning(
    state: Wrapped,
    options: Options,
    device_bytes: int,
    undo: Undo,
) -> None:
    """Plans steps from the first one on."""
    config = state.config
    assert options.activations is not None
    # Until activations are known, parameters have no more than the unit that computes and the next.
    needed = state.session.plan["nested_bytes"]
    goal = Goal(
        options.activations,
        options.split,
        device_bytes,
        max(needed, min(2 * needed, config["device_bytes"] // 2)),
        config["workers"],
        config["io_engine"],
        alone=options.ranks is None and state.shards is None,
    )
    state.planning = Planning(state, goal)
    undo.first(state.planning.allocator.close)
    state.session.adopt(param_bytes=goal.param_bytes)


def _share_values(state: Wrapped, ranks: Ranks) -> None:
    """Gives the model of each rank the values that rank 0 has."""
    for parameter in state.params:
        for part in parts_of(parameter) if is_nf4(parameter) else [parameter]:
            ranks.share(part)
    for buffer in state.model.buffers():
        ranks.share(buffer)


def _fill(state: Wrapped, options: Options) -> None:
    """Stores the values of all parameters. The model itself is not touched yet: this may fail."""
    if options.weights is None:
        tiles: dict[int, Whole] = {}
        for tensor in stored_tensors(state.model):
            if len(tensor.parts) > 1:
                whole = Whole([state.params[part] for part in tensor.parts])
                tiles |= dict.fromkeys(tensor.parts, whole)
        for i, parameter in enumerate(state.params):
            if is_nf4(parameter):
                state.write(i, codes_of(state.names[i], parameter))
            else:
                state.write(i, parameter, whole=tiles.get(i))
        return
    place = {name: i for i, name in enumerate(state.names)}
    weight_files.load(
        state.model,
        lambda name, value, whole=None: state.write(place[name], value, whole=whole),
        weights=None if options.weights == INIT else options.weights,
        seed=options.seed,
        device=options.init_device,
    )


def _move(state: Wrapped, dtype: torch.dtype | None) -> None:
    """Moves the parameters onto the session's memory; each remains the same Python object."""
    for i, parameter in enumerate(state.params):
        alias = state.aliases[i]
        if parameter.is_meta or is_nf4(parameter):
            real = nn.Parameter(alias.view(alias.shape), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, real)
        else:
            parameter.data = alias.view(alias.shape)
        state.written[i] = parameter._version
        parameter._strata = Slot(state, i, state.unit_of[i])  # type: ignore[attr-defined]
        make_paged(parameter)
    state.views = Views(state)
    _move_buffers(state, dtype)


def _move_buffers(state: Wrapped, dtype: torch.dtype | None) -> None:
    """Puts buffers on the device. Statistics beside parameters (batch norm) take part in the same
    kernels, so they have the same dtype; tables of modules without parameters (rotary frequencies)
    keep theirs."""
    moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # a buffer may be that of many modules
    for module in state.model.modules():
        beside = next(module.parameters(recurse=False), None) is not None
        for name, buffer in list(module.named_buffers(recurse=False)):
            casts = dtype is not None and beside and buffer.is_floating_point()
            wanted = dtype if casts and dtype is not None else buffer.dtype
            if buffer.dtype == wanted and buffer.device == state.device:
                continue
            state.moved_buffers.append((module, name, buffer.dtype, buffer.device))
            key = (id(buffer), wanted)
            if key not in moved:
                moved[key] = buffer.to(state.device, wanted)
            setattr(module, name, moved[key])

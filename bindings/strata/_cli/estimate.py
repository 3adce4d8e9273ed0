"""`strata estimate`: does a model fit, and how fast would it train, before its weights are there.

strata estimate --model DIR --memory device=8GiB,host=24GiB --batch 4 --sequence 2048

The model is built without memory, its step is counted (meta_trace.py), and arithmetic and traffic
become seconds by what --device achieves here, or by --flops and --device-bandwidth for another one.
What `strata finetune` does by itself is done here, too: a loss without logits where these are many,
and tiles of layers that are larger than the device. finetune asks rehearse() before it reads
anything.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from .._config import device
from .._config.budgets import UNBOUNDED
from .._config.choices import HOST, OF_SEVERAL_MACHINES
from .._config.configure import config_of
from .._config.frozen import coded_parameters, stored_forms
from .._config.options import Options
from .._config.ranks import paper_ranks, plans_of_one_page_size
from .._errors import StrataError, is_for_snapshots
from .._optim.groups import group_spec
from .._planning.fitting import tiles_wanted
from .._planning.forecast import Forecast, forecast
from .._planning.meta_trace import CountedStep, count_step
from .._planning.trace_of import add_under_way, trace_from, traced_unit
from .._profiling.calibrate import TYPICAL_COMPUTING, typical_costs
from .._report.report_text import snapshot_room
from .._runtime.lander import ahead_of
from .._torch_compat import SHAPES_LOGGER, FakeTensorMode
from ..nn.causal_lm import chunk_many, is_chunked
from ..nn.replace import put_tiles
from ..nn.tiles import Tiled
from .lora import add_adapters
from .models import build, choose, config_file, put_on_host
from .options import budgets_of
from .planner import machine_of, reply, show
from .sharing import held_bytes, share_of

if TYPE_CHECKING:
    from .._core import Budgets, Plan, StoredName, Trace, Wishes
    from .._profiling.calibrate import Calibration

MASKLESS = "strata_causal"  # a form of attention, as Transformers names them


@dataclass(frozen=True)
class Step:
    """A step of training, and what it may use."""

    config: Any  # of Transformers
    batch: int
    sequence: int
    memory: Mapping[str, int]  # bytes by tier
    device: str  # the core's name
    options: Options  # as strata.wrap() would be called, with a dtype
    lora: str | None = None  # adapters, as lora.py reads them

    @property
    def tokens(self) -> int:
        """Of one backward."""
        return self.batch * self.sequence

    @property
    def ranks(self) -> int:
        """How many share a machine; `memory` is all that they have, and `device` each."""
        return self.options.shared_by()

    @property
    def ahead_bytes(self) -> int:
        """Of gradients that may be under way: those of the host land at once."""
        return 0 if self.device == HOST else ahead_of(self.memory["device"])

    def budgets(self, sizes: Plan) -> Budgets:
        """As the planner takes them: buffers of gradients are no pages, and take host memory."""
        share = share_of(self.memory, self.ranks)
        host = max(0, share["host"] - sizes["buffer_bytes"])
        ssd = max(0, share["ssd"] - sizes["snapshot_bytes"])
        given = {**share, "host": host, "ssd": ssd}
        return budgets_of(given, sizes["page_bytes"], grads_rest=self.options.update == "on_step")


def count(step: Step) -> tuple[Any, CountedStep]:
    """The model of a Transformers config without memory, as it would train, and its counted step.

    Attention gets no mask and is causal by itself: with shapes only, Transformers cannot see that a
    mask masks nothing else, and would write it out, which training does not.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKLESS, lambda *_args, **_kwargs: None)
    config = copy.deepcopy(step.config)
    config.use_cache = False
    with torch.device("meta"):
        made_as = {"dtype": step.options.dtype, "attn_implementation": MASKLESS}
        model = build(config, **made_as).train()
    if step.lora:
        add_adapters(model, step.lora)
    with FakeTensorMode(), quiet(SHAPES_LOGGER):
        put_on_host(model)
        try:
            chunk_many(model, step.tokens)
            put_tiles(model, tiles_wanted(model, step.options, step.memory["device"]))
            ids = torch.zeros(step.batch, step.sequence, dtype=torch.long)
            slivers = step.options.max_unit_norm is None
            coded = coded_parameters(model, _forms(model, step.options))
            counted = count_step(
                model, lambda: model(input_ids=ids, labels=ids).loss, slivers, coded
            )
        except (RuntimeError, NotImplementedError) as error:
            why = " ".join(str(error).split())
            raise ValueError(
                f"{config.model_type} cannot run on shapes alone and so not be estimated: {why}"
            ) from error
    return model, counted


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Keeps a library from logging anything. What it logs ahead of an exception, with traceback,
    would stand above the refusal that the exception becomes."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def changes(model: Any) -> list[str]:
    """For people: what was changed in the model so that it trains in less memory."""
    tiled = [
        f"{name} is cut into {len(module.tiles)} tiles"
        for name, module in model.named_modules()
        if isinstance(module, Tiled)
    ]
    chunked = ["the loss is computed without logits"] if is_chunked(model) else []
    return [*chunked, *tiled]


def make_trace(
    counted: CountedStep, sizes: Plan, slices_max: int, flops_s: float, bytes_s: float
) -> Trace:
    """Of a device that achieves so many FLOP, and bytes of its memory, in a second."""
    counted.take_times(flops_s, bytes_s)
    saving = {tensor.unit for tensor in counted.tensors if not tensor.input}
    units = [
        traced_unit(
            unit["name"], unit["params"], unit, slices_max if u in saving else 1, u in saving
        )
        for u, unit in enumerate(sizes["units"])
    ]
    return trace_from(counted, units)


def _forms(model: Any, options: Options) -> dict[str, StoredName]:
    """Of a model whose optimizer has all that is not frozen."""
    return stored_forms(model, lambda p: p.requires_grad, options.frozen)


def page_sizes(model: Any, counted: CountedStep, step: Step) -> Plan:
    """Units in whole pages, trained by AdamW, with the page size that wrap() would choose; of
    several ranks for the one that holds most. Raises StrataError where the SSD has no room for
    snapshots, with what would do."""
    optimizer = torch.optim.AdamW(model.parameters())
    config = config_of(
        model,
        optimizer,
        step.options,
        counted.units,
        [group_spec(optimizer, 0, optimizer.param_groups[0])],
        _forms(model, step.options),
        step.device,
    )
    share = share_of(step.memory, step.ranks)
    config |= {
        "device_bytes": share["device"],
        "host_bytes": share["host"],
        "ssd_bytes": share["ssd"],
        "ssd_paths": ["ssd"] if share["ssd"] else [],
    }
    try:
        return max(plans_of_one_page_size(config, _core.plan), key=held_bytes)
    except StrataError as error:
        if is_for_snapshots(error):
            raise
        # Too small even without activations: the planner says by how much.
        config |= {"device_bytes": UNBOUNDED, "host_bytes": UNBOUNDED}
        return max(plans_of_one_page_size(config, _core.plan), key=held_bytes)


def run(options: argparse.Namespace) -> int:
    """0 where the model fits, 1 where it does not. `options`: of estimate_parser(). Raises
    StrataError where the device cannot be used."""
    options.device = device.choose(options.device)  # its pages have sizes of their own
    folder = Path(options.model)
    name = str(config_file(folder)) if folder.is_dir() else options.model  # no weights needed
    wrapped_with = Options(
        dtype=getattr(torch, options.dtype),
        update=options.update,
        state_dtype=getattr(torch, options.state_dtype, options.state_dtype),
        page_size=options.page_size or "auto",
        workers=1,
        snapshots=options.snapshots,
        frozen=options.frozen,
        ranks=paper_ranks(options.ranks, options.machines) if options.ranks > 1 else None,
        **{name: getattr(options, name) for name in OF_SEVERAL_MACHINES},
    )
    config = choose(name, None, options.sequence, trusted=None).config
    step = Step(
        config,
        options.batch,
        options.sequence,
        options.memory,
        options.device,
        wrapped_with,
        options.lora,
    )
    with quiet("transformers"):  # it advises on training this model, which nobody does here
        model, counted = count(step)
    sizes = page_sizes(model, counted, step)
    page_bytes = sizes["page_bytes"]
    machine = machine_of(options, page_bytes, options.dtype)
    shared = step.ranks if options.device == HOST else 1  # ranks that compute on one device
    flops_s, bytes_s = options.flops or machine.flops_s / shared, options.device_bandwidth
    if bytes_s is None:  # another device is limited by its arithmetic
        bytes_s = machine.memory_bytes_s / shared if options.flops is None else float("inf")
    trace = make_trace(counted, sizes, step.batch, flops_s, bytes_s)
    add_under_way(trace, step.ahead_bytes)
    notes = snapshot_room(sizes["snapshot_bytes"])
    answer = reply(
        options, trace, machine.costs, step.budgets(sizes), step.tokens, changes(model), notes
    )
    return show(answer, options.json)


def rehearse(step: Step, wishes: Wishes, machine: Calibration | None = None) -> Forecast:
    """The step on paper. Without a machine on one of typical speeds: what the step needs and moves,
    and not how long it takes. Raises ValueError for a model that cannot run on shapes alone."""
    model, counted = count(step)
    sizes = page_sizes(model, counted, step)
    flops_s, bytes_s = TYPICAL_COMPUTING[0], float("inf")
    if machine is not None:
        flops_s, bytes_s = machine.flops_s, machine.memory_bytes_s
    trace = make_trace(counted, sizes, step.batch, flops_s, bytes_s)
    add_under_way(trace, step.ahead_bytes)
    costs = typical_costs() if machine is None else machine.costs
    return forecast(trace, costs, step.budgets(sizes), wishes, step.tokens)

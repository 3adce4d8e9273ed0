"""`strata estimate`: does a model fit, and how fast would it train, before its weights are there.

strata estimate --model DIR --memory device=8GiB,host=24GiB --batch 4 --sequence 2048

The model is built without memory, its step is counted (meta_trace.py), and arithmetic and traffic
become seconds by what --device achieves here, or by --flops and --device-bandwidth for another one.
What `strata finetune` does by itself is done here, too: a loss without logits where these are many,
and tiles of layers that are larger than the device. finetune asks smallest_device() before it reads
anything.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from .._config import device
from .._config.configure import UNBOUNDED, Options
from .._config.update_modes import STATE_DTYPES, Update, core_mode
from .._errors import StrataError
from .._planning.fitting import tiles_wanted
from .._planning.forecast import Forecast, forecast
from .._planning.meta_trace import CountedStep, count_step
from .._profiling.calibrate import TYPICAL_COMPUTING, typical_costs
from .._torch_compat import SHAPES_LOGGER, FakeTensorMode
from ..nn.causal_lm import chunk_many, is_chunked
from ..nn.replace import put_tiles
from ..nn.tiles import Tiled
from .answer import Answer, ssd_enough
from .finetune_model import build, choose, config_file
from .planner_machine import machine_of, remarks
from .planner_options import budgets_of, wishes_of

if TYPE_CHECKING:
    from .._core import Budgets, Config, DtypeName, GroupSpec, ParamSpec, Plan, Trace, Wishes

MASKLESS = "strata_causal"  # a form of attention, as Transformers names them
ADAMW: GroupSpec = {
    "rule": "adamw",
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "lr_decay": 0.0,
    "initial_accumulator": 0.0,
    "nesterov": False,
    "maximize": False,
}


@dataclass(frozen=True)
class Step:
    """A step of training, and what it may use."""

    config: Any  # of Transformers
    batch: int
    sequence: int
    dtype: DtypeName
    memory: Mapping[str, int]  # bytes by tier
    device: str  # the core's name
    update: Update = "on_step"
    state_dtype: str = "float32"  # as the command line writes it
    page_bytes: int = 0  # 0: chosen
    accumulate: bool = False
    max_unit_norm: float | None = None

    @property
    def tokens(self) -> int:
        """Of one backward."""
        return self.batch * self.sequence

    def budgets(self, sizes: Plan) -> Budgets:
        """As the planner takes them: buffers of gradients are no pages, and take host memory."""
        host = max(0, self.memory["host"] - sizes["buffer_bytes"])
        given = {**self.memory, "host": host}
        return budgets_of(given, sizes["page_bytes"], grads_rest=self.update == "on_step")


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
    options = Options(max_unit_norm=step.max_unit_norm)
    with FakeTensorMode(), _quiet(SHAPES_LOGGER):
        dtype = getattr(torch, step.dtype)
        model = build(config, dtype=dtype, attn_implementation=MASKLESS).train()
        try:
            chunk_many(model, step.tokens)
            put_tiles(model, tiles_wanted(model, options, step.memory["device"]))
            ids = torch.zeros(step.batch, step.sequence, dtype=torch.long)
            counted = count_step(model, lambda: model(input_ids=ids, labels=ids).loss)
        except (RuntimeError, NotImplementedError) as error:
            told = " ".join(str(error).split())
            raise ValueError(
                f"{config.model_type} cannot run on shapes alone and so not be estimated: {told}"
            ) from error
    return model, counted


@contextmanager
def _quiet(library: str) -> Iterator[None]:
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
    """What was done to the model so that it trains in less memory, for people."""
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
    """Seconds are those of arithmetic and of traffic, one after the other."""

    def seconds(flops: int, traffic: int) -> float:
        return flops / flops_s + traffic / bytes_s

    saving = {tensor.unit for tensor in counted.tensors if not tensor.input}
    return {
        "uses": [
            {
                "unit": use.unit,
                "backward": use.backward,
                "enter": use.enter,
                "leave": use.leave,
                "seconds": seconds(use.flops, use.traffic_bytes),
                "gap_seconds": seconds(use.gap_flops, use.gap_traffic_bytes),
                "live_bytes": use.live_bytes,
                "peak_bytes": use.peak_bytes,
                "gap_peak_bytes": use.gap_peak_bytes,
            }
            for use in counted.uses
        ],
        "moments": counted.moments,
        "units": [
            {
                "name": unit["name"],
                "elements": unit["params"],
                "param_bytes": unit["param_bytes"],
                "grad_bytes": unit["landing_bytes"],
                "state_bytes": unit["state_bytes"],
                "chunks": unit["chunks"],
                "slices_max": slices_max if u in saving else 1,
                "may_swap": True,
                "may_recompute": u in saving,
                "traced": "keep",
                "slices_traced": 1,
            }
            for u, unit in enumerate(sizes["units"])
        ],
        "tensors": [
            {
                "unit": tensor.unit,
                "bytes": tensor.bytes,
                "born": tensor.born,
                "last_used": tensor.last_used,
                "input": tensor.input,
            }
            for tensor in counted.tensors
        ],
        "tail_seconds": seconds(counted.tail_flops, counted.tail_traffic_bytes),
        "tail_peak_bytes": counted.tail_peak_bytes,
    }


def page_sizes(model: Any, counted: CountedStep, step: Step) -> Plan:
    """Units in whole pages, trained by AdamW, with the page size that wrap() would choose."""
    update, max_staleness = core_mode(step.update)
    word = step.state_dtype
    unit_of = {p: u for u, unit in enumerate(counted.units) for p in unit.params}
    params: list[ParamSpec] = [
        {
            "name": name,
            "numel": parameter.numel(),
            "dtype": step.dtype,
            "trainable": True,
            "unit": unit_of[i],
            "group": 0,
        }
        for i, (name, parameter) in enumerate(model.named_parameters())
    ]
    config: Config = {
        "params": params,
        "units": [unit.name for unit in counted.units],
        "groups": [ADAMW],
        "page_bytes": step.page_bytes,
        "device_bytes": step.memory["device"],
        "host_bytes": step.memory["host"],
        "ssd_bytes": step.memory["ssd"],
        "ssd_paths": ["ssd"] if step.memory["ssd"] else [],
        "io_engine": "auto",
        "workers": 1,
        "accumulate": step.accumulate,
        "update": update,
        "max_staleness": max_staleness,
        "moment_dtype": STATE_DTYPES[word if word in STATE_DTYPES else f"torch.{word}"],
        "pin_workers": True,
        "compute_threads": 1,
        "device": step.device,
    }
    try:
        return _core.plan(config)
    except StrataError:  # too small even without activations: the planner says by how much
        return _core.plan({**config, "device_bytes": UNBOUNDED, "host_bytes": UNBOUNDED})


def estimate(options: argparse.Namespace) -> Answer:
    """Counts, and plans. Raises StrataError where the device cannot be used."""
    options.device = device.choose(options.device)  # its pages have sizes of their own
    folder = Path(options.model)
    name = str(config_file(folder)) if folder.is_dir() else options.model  # no weights needed
    step = Step(
        choose(name, None, options.sequence).config,
        options.batch,
        options.sequence,
        options.dtype,
        options.memory,
        options.device,
        options.update,
        options.state_dtype,
        options.page_size or 0,
    )
    with _quiet("transformers"):  # it advises on training this model, which nobody does here
        model, counted = count(step)
    sizes = page_sizes(model, counted, step)
    page_bytes = sizes["page_bytes"]
    machine = machine_of(options, page_bytes, step.dtype)
    costs = machine.costs
    flops_s, bytes_s = options.flops or machine.flops_s, options.device_bandwidth
    if bytes_s is None:  # another device is limited by its arithmetic
        bytes_s = machine.memory_bytes_s if options.flops is None else float("inf")
    trace = make_trace(counted, sizes, step.batch, flops_s, bytes_s)
    budgets = step.budgets(sizes)
    wishes = wishes_of(options.activations, options.split)
    found = forecast(trace, costs, budgets, wishes, step.tokens)
    enough = 0 if found.feasible else ssd_enough(trace, costs, budgets, wishes)
    found = replace(found, changes=changes(model))
    return Answer(found, options.steps, options.ssd_endurance, enough, remarks(options))


def rehearse(step: Step, wishes: Wishes) -> Forecast:
    """The step on paper, on a machine of typical speeds: what it needs and moves, and not how long
    it takes. Raises ValueError for a model that cannot run on shapes alone."""
    model, counted = count(step)
    sizes = page_sizes(model, counted, step)
    trace = make_trace(counted, sizes, step.batch, TYPICAL_COMPUTING[0], float("inf"))
    budgets = step.budgets(sizes)
    return forecast(trace, typical_costs(), budgets, wishes, step.tokens)


def run(options: argparse.Namespace) -> int:
    """0 where the model fits, 1 where it does not. `options`: of estimate_parser()."""
    answer = estimate(options)
    print(json.dumps(answer.to_dict(), indent=2) if options.json else answer)
    return answer.status

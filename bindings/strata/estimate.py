"""`strata estimate`: does a model fit, and how fast would it train, before its weights are there.

strata estimate --model DIR --memory device=8GiB,host=24GiB --batch 4 --sequence 2048

The model is built without memory, its step is counted (meta_trace.py), and arithmetic and traffic
become seconds by what --device achieves here, or by --flops and --device-bandwidth for another one.
What `strata finetune` does by itself is done here, too: a loss without logits where these are many,
and tiles of layers that are larger than the device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from . import _core, device
from .configure import UNBOUNDED, Options
from .errors import StrataError
from .finetune_model import choose
from .finetune_options import Parser
from .fitting import tiles_wanted
from .forecast import Forecast, forecast
from .meta_trace import CountedStep, count_step
from .nn.causal_lm import chunk_many, is_chunked
from .nn.replace import put_tiles
from .nn.tiles import Tiled
from .planner_options import (
    add_machine,
    budgets_of,
    machine_of,
    page_size,
    parse_count,
    parse_speed,
    positive,
    wishes_of,
    worded,
)

if TYPE_CHECKING:
    from ._core import Config, DtypeName, GroupSpec, ParamSpec, Plan, Trace

DTYPES = ("bfloat16", "float16", "float32")
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


def count(
    config: Any, batch: int, sequence: int, dtype: DtypeName, device_bytes: int = UNBOUNDED
) -> tuple[Any, CountedStep]:
    """The model of a Transformers config without memory, as it would train, and its counted step.

    Attention gets no mask and is causal by itself: with shapes only, Transformers cannot see that a
    mask masks nothing else, and would write it out, which training does not.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKLESS, lambda *_args, **_kwargs: None)
    config.use_cache = False
    with FakeTensorMode():
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=MASKLESS
            ).train()
            chunk_many(model, batch * sequence)
            put_tiles(model, tiles_wanted(model, Options(), device_bytes))
            ids = torch.zeros(batch, sequence, dtype=torch.long)
            counted = count_step(model, lambda: model(input_ids=ids, labels=ids).loss)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{config.model_type} cannot run on shapes alone and so not be estimated: {error}"
            ) from error
    return model, counted


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


def page_sizes(
    model: Any, counted: CountedStep, options: argparse.Namespace, dtype: DtypeName
) -> Plan:
    """Units in whole pages, trained by AdamW, with the page size that wrap() would choose."""
    unit_of = {p: u for u, unit in enumerate(counted.units) for p in unit.params}
    params: list[ParamSpec] = [
        {
            "name": name,
            "numel": parameter.numel(),
            "dtype": dtype,
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
        "page_bytes": options.page_size or 0,
        "device_bytes": options.memory["device"],
        "host_bytes": options.memory["host"],
        "ssd_bytes": options.memory["ssd"],
        "ssd_paths": ["ssd"] if options.memory["ssd"] else [],
        "io_engine": "auto",
        "workers": 1,
        "accumulate": False,
        "update": "on_step",
        "max_staleness": 0,
        "moment_dtype": "float32",
        "pin_workers": True,
        "compute_threads": 1,
        "device": options.device,
    }
    try:
        return _core.plan(config)
    except StrataError:  # too small even without activations: the planner says by how much
        return _core.plan({**config, "device_bytes": UNBOUNDED, "host_bytes": UNBOUNDED})


def estimate(options: argparse.Namespace) -> Forecast:
    """Counts, and plans. Raises StrataError where the device cannot be used."""
    options.device = device.choose(options.device)  # its pages have sizes of their own
    dtype: DtypeName = options.dtype
    folder = Path(options.model)
    name = str(folder / "config.json") if folder.is_dir() else options.model  # no weights needed
    config = choose(name, None, options.sequence).config
    device_bytes = options.memory["device"]
    model, counted = count(config, options.batch, options.sequence, dtype, device_bytes)
    sizes = page_sizes(model, counted, options, dtype)
    page_bytes = sizes["page_bytes"]
    machine = machine_of(options, page_bytes, dtype)
    costs = machine.costs
    flops_s, bytes_s = options.flops or machine.flops_s, options.device_bandwidth
    if bytes_s is None:  # another device is limited by its arithmetic
        bytes_s = machine.memory_bytes_s if options.flops is None else float("inf")
    trace = make_trace(counted, sizes, options.batch, flops_s, bytes_s)
    tokens = options.batch * options.sequence
    budgets, wishes = budgets_of(options, page_bytes), wishes_of(options)
    found = forecast(trace, costs, budgets, wishes, tokens)
    return replace(found, changes=changes(model))


def run(arguments: Sequence[str], description: str | None) -> int:
    """0 where the model fits, 1 where it does not."""
    parser = Parser(prog="strata estimate", description=description)
    _add_model(parser)
    add_machine(parser)
    options = parser.parse_args(arguments)
    found = estimate(options)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0 if found.feasible else 1


def _add_model(parser: Parser) -> None:
    add = parser.add_argument_group("the model and its step").add_argument
    add(
        "--model",
        required=True,
        metavar="DIR|CONFIG|SIZE",
        help="a Transformers folder or config.json (weights are not read), or a size such as "
        "llama-1b",
    )
    add("--batch", type=worded(positive), default=1, metavar="N", help="sequences (default: 1)")
    add(
        "--sequence",
        type=worded(positive),
        default=2048,
        metavar="N",
        help="tokens of each (default: 2048)",
    )
    add("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    add(
        "--flops",
        type=worded(parse_count),
        metavar="N",
        help="FLOP/s that the device achieves, such as 400T (default: as --device is measured)",
    )
    add(
        "--device-bandwidth",
        type=worded(parse_speed),
        metavar="SPEED",
        help="of the device's memory, such as 3TB/s (default: as --device is measured)",
    )
    add("--page-size", type=worded(page_size), metavar="SIZE", help="default: chosen")

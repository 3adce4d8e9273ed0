"""What a session is asked to do; engine/config.hpp says what each field means. For type checkers
only: import these from _core.

Written by tests/stubs.py from bindings/config_fields.cpp.
"""

from typing import Literal, NotRequired, TypedDict

DtypeName = Literal["float32", "float16", "bfloat16"]
Kind = Literal["master", "moment1", "moment2", "grad"]
RuleName = Literal["adamw", "adam", "sgd", "lion", "adagrad", "foreign"]
MomentName = Literal["float32", "bfloat16", "block8"]
UpdateName = Literal["on_step", "in_backward", "lock_free"]
StoredName = Literal["int8", "nf4", "nf4-double", "nf4-torchao"]

class ParamSpec(TypedDict):
    name: str
    numel: int
    dtype: DtypeName
    trainable: bool
    unit: int
    group: int
    stored: NotRequired[StoredName]

class GroupSpec(TypedDict):
    rule: RuleName
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    dampening: float
    lr_decay: float
    initial_accumulator: float
    nesterov: bool
    maximize: bool
    options: NotRequired[int]
    moments: NotRequired[int]

class Ranks(TypedDict):
    rank: int
    count: int
    folder: str
    pids: list[int]
    timeout_s: float
    sums: bool
    machine: int
    machines: int

class Config(TypedDict):
    params: list[ParamSpec]
    units: list[str]
    groups: list[GroupSpec]
    page_bytes: int
    device_bytes: int
    host_bytes: int
    ssd_bytes: int
    ssd_paths: list[str]
    io_engine: str
    workers: int
    accumulate: bool
    update: UpdateName
    max_staleness: int
    moment_dtype: MomentName
    pin_workers: bool
    compute_threads: int
    snapshots: NotRequired[int]
    device: NotRequired[str]
    ranks: NotRequired[Ranks]
    apart: NotRequired[list[bool]]
    together: NotRequired[list[tuple[str, list[int]]]]

"""Every method of the core with bad arguments, at bad times: an exception, and never an abort.

The calls run in a process of their own: what they may break is that one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from variants import thorough

PRELUDE = """
import random, sys
import torch
from strata import _core

GROUP = {
    "rule": "adamw", "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
    "momentum": 0.0, "dampening": 0.0, "lr_decay": 0.0, "initial_accumulator": 0.0,
    "nesterov": False, "maximize": False,
}
NUMEL = [40_000, 33, 20_000]
memory = torch.zeros(1 << 20)  # larger than any parameter, on both sides
address = memory.data_ptr() + (1 << 20)

def config(**changes):
    params = [
        {"name": f"p{i}", "numel": n, "dtype": "bfloat16", "trainable": i != 1, "unit": i,
         "group": 0}
        for i, n in enumerate(NUMEL)
    ]
    base = {
        "params": params, "units": ["u0", "u1", "u2"], "groups": [GROUP], "page_bytes": 1 << 16,
        "device_bytes": 8 << 16, "host_bytes": 64 << 16, "ssd_bytes": 0, "ssd_paths": [],
        "io_engine": "auto", "workers": 1, "accumulate": False, "update": "on_step",
        "max_staleness": 0, "moment_dtype": "float32", "pin_workers": False, "compute_threads": 1,
    }
    return base | changes

def attempt(call, *args, **more):
    try:
        return call(*args, **more)
    except Exception as error:  # of whatever kind, as long as it is one
        return error

NAN, INF = float("nan"), float("inf")
"""

CALLS = """
pick = random.Random(int(sys.argv[1]))

def group():
    changed = dict(GROUP)
    for _ in range(pick.randrange(3)):
        changed[pick.choice(list(GROUP))] = pick.choice([NAN, INF, -1.0, 0.0, 0.5, 1.0, 2.0])
    rules = ["adamw", "adamw", "adam", "sgd", "lion", "adagrad", "foreign", "x"]
    changed["rule"] = pick.choice(rules)
    return changed | pick.choice([{}, {"options": 1, "moments": pick.randrange(-1, 4)}])

def groups():
    return pick.choice([[GROUP], [GROUP], [group()], [], [GROUP, GROUP]])

def number(*good):
    return pick.choice([*good, *good, 0, 1, 2, 3, 99, 2**32 - 1, 2**40, -1])

def uses(*units):
    return [_core.Use(unit=unit, backward=False, enter=2 * i, leave=2 * i + pick.choice([1, 1, 3]),
                      seconds=0.0, gap_seconds=0.0, live_bytes=0, peak_bytes=0, gap_peak_bytes=0)
            for i, unit in enumerate(units)]

def amount():
    return pick.choice([0.0, 0.0, 1.0, 1.0, NAN, INF, -1.0])

def place():
    return pick.choice([address, address, address, 0])

METHODS = {
    "tensor": lambda: (number(),),
    "write": lambda: (number(), pick.choice(["master", "moment1", "moment2", "grad", "x"]),
                      number(0), place(), number(1, 33)),
    "read": lambda: (number(), pick.choice(["master", "moment1", "moment2", "grad", "x"]),
                     number(0), place(), number(1, 33)),
    "enter": lambda: (number(), pick.random() < 0.5, pick.random() < 0.8),
    "leave": lambda: (number(),),
    "resident": lambda: (number(),),
    "device_written": lambda: (number(),),
    "expect_write": lambda: (number(),),
    "land_gradient": lambda: (number(), place(),
                              pick.choice(["bfloat16", "bfloat16", "float32", "x"])),
    "drop_gradients": lambda: (),
    "gradient_count": lambda: (number(),),
    "gradient_fits": lambda: (number(),),
    "complete": lambda: (number(), groups(), amount()),
    "step": lambda: (groups(), amount(), pick.choice([1.0, 1.0, 0.0, 2.0, NAN]),
                     pick.random() < 0.3, amount()),
    "drain": lambda: (),
    "synchronize": lambda: (),
    "param_step": lambda: (number(),),
    "set_param_step": lambda: (number(), number(5)),
    "stats": lambda: (),
    "timeline": lambda: (),
    "adopt": lambda: (pick.choice([None, [True] * 3, [False] * 3, [True, False, False], []]),
                      pick.choice([None, 0, 1 << 16, 4 << 16, 8 << 16, 2**50]),
                      pick.choice([None, 0, 1 << 16, 2**50]), pick.choice([None, 0, 0, 1 << 16]),
                      pick.choice([None, None, uses(pick.choice([0, 2, 7, -1])), uses(0, 1, 2),
                                   uses(0, 0), []])),
    "save_activation": lambda: (place(), pick.choice([0, 100, 1 << 17, 2**50]), pick.random() < 0.3,
                                number()),
    "activation_saved": lambda: (number(), True),
    "stage_activation": lambda: (number(),),
    "fetch_activation": lambda: (number(), place()),
    "activation_fetched": lambda: (number(), True),
    "await_activation": lambda: (number(),),
    "drop_activation": lambda: (number(),),
}

modes = ["on_step", "in_backward", "lock_free"]
mode = modes[pick.randrange(3)]
more = {"update": mode, "accumulate": mode != "in_backward" and pick.random() < 0.5}
more["max_staleness"] = pick.choice([0, 2]) if mode == "lock_free" else 0
more["moment_dtype"] = pick.choice(["float32", "block8", "bfloat16"])
session = _core.Session(config(**more))
for p in (0, 1, 2):
    session.write(p, "master", 0, address, NUMEL[p])
worked = set()
for turn in range(1500):
    name = pick.choice(list(METHODS))
    args = METHODS[name]()
    if not isinstance(attempt(getattr(session, name), *args), Exception):
        worked.add(name)
session.close()
for name, arguments in METHODS.items():
    attempt(getattr(session, name), *arguments())
session.plan, session.device
session.close()
print(" ".join(sorted(set(METHODS) - worked)))
"""

MADE = """
def spec(**changes):
    return {"params": [config()["params"][0] | changes]}

BAD = [
    {"params": []}, {"groups": []}, {"units": []}, spec(unit=7), spec(group=7), spec(numel=2**60),
    spec(numel=0), {"page_bytes": 1}, {"page_bytes": 3 << 16}, {"page_bytes": 1 << 40},
    {"workers": -5}, {"workers": 10**6}, {"compute_threads": -1}, {"device_bytes": 0},
    {"host_bytes": 0}, {"max_staleness": 2**31}, {"device": "cuda:99"}, {"device": "x"},
    {"groups": [GROUP | {"lr": NAN}]}, {"groups": [GROUP | {"rule": "foreign"}]},
    {"groups": [GROUP | {"rule": "foreign", "options": 1, "moments": 9}]},
    {"groups": [GROUP | {"rule": "foreign", "options": 1, "moments": 1}], "moment_dtype": "block8"},
    {"ssd_paths": ["/nowhere/at/all"], "ssd_bytes": 1 << 30, "host_bytes": 40 << 16},
    {"ssd_bytes": 2**63}, {"host_bytes": 2**63}, {"device_bytes": 2**63},
]
for changes in BAD:
    attempt(_core.plan, config(**changes))
    made = attempt(_core.Session, config(**changes), lambda *args: None)
    if isinstance(made, _core.Session):
        made.close()

span = {
    "group": GROUP, "dtype": "bfloat16", "grad_dtype": "bfloat16", "count": 64, "param": address,
    "master": address + 4096, "moment1": address + 8192, "moment2": address + 16384,
    "grad": address + 32768, "step": 1, "grad_scale": 1.0, "threads": 1, "isa": "best",
}
assert attempt(_core.update_span, **span) is None
for name in ("param", "master", "moment1", "moment2", "grad", "step"):
    assert isinstance(attempt(_core.update_span, **span | {name: 0}), ValueError), name
for name, value in [("dtype", "float32"), ("grad_dtype", "float16"), ("isa", "x"), ("scales1", 64),
                    ("moment_dtype", "block8"), ("group", GROUP | {"rule": "foreign", "options": 1,
                    "moments": 1})]:
    assert isinstance(attempt(_core.update_span, **span | {name: value}), ValueError), name

for page in (0, 1, 3 << 16, 2**50):
    for probe, args in [(_core.CopyProbe, (page, 1 << 22, "host")),
                        (_core.UpdateProbe, (1, "bfloat16", page, 1 << 22)),
                        (_core.SsdProbe, (["."], page, "auto", 1 << 22))]:
        assert isinstance(attempt(probe, *args), ValueError), probe
assert isinstance(attempt(_core.UpdateProbe, 0, "bfloat16", 1 << 16, 1 << 22), ValueError)
assert isinstance(attempt(_core.UpdateProbe, 1, "bfloat16", 1 << 16, 1 << 22, -1), ValueError)
assert isinstance(attempt(_core.SsdProbe, ["."], 1 << 16, "auto", 1 << 22, 1), ValueError)
assert isinstance(attempt(_core.UpdateProbe(1, "bfloat16", 1 << 16, 1 << 20).run, NAN), ValueError)
"""


def run(code: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *arguments],
        capture_output=True, text=True, timeout=300, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "seed", [0, *map(thorough, range(1, max(3, int(os.environ.get("STRATA_SEEDS", "0")))))]
)
def test_bad_calls_raise(seed: int) -> None:
    never = run(CALLS, str(seed)).split()
    assert len(never) < 12, never  # most calls worked at some time, so the session was alive


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    run(MADE)

"""What limits a step, and what would help, in a sentence.

    limiting_sentence(paper, Setting(ssd=True, state="float32"))
    # "limited by the optimizer (twice as fast it would save 31 % of a step): state_dtype='8bit' or
    #  two more workers would help; a faster SSD would not"
    limits(paper, costs, setting)[0].saves     # 0.31

A resource limits a step where the step, simulated with that resource twice as fast, is shorter by
GAIN_MIN. What is a lane's busy time says less: most of it may be hidden behind something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from .._config.choices import RECOMPUTES

if TYPE_CHECKING:
    from .._core import Config, Costs, PaperPlan, Simulation

GAIN_MIN = 0.05
WORKERS_MORE = 2
# By resource: what of Costs is twice as fast, and how buying more of it is called.
FASTER = {
    "computation": ("compute_scale",),
    "the optimizer": ("update_elements_s",),
    "the SSD": ("read_bytes_s", "write_bytes_s"),
    "the link to the device": (
        "upload_bytes_s",
        "download_bytes_s",
        "decode_bytes_s",
        "transfer_seconds",
    ),
}
MORE = {
    "computation": "a faster processor",
    "the optimizer": "more workers",
    "the SSD": "a faster SSD",
    "the link to the device": "a faster link to the device",
}
SECONDS = ("compute_scale", "transfer_seconds")  # less is faster
ADVICE_MAX = 3


@dataclass(frozen=True)
class Setting:
    """What of a run can be changed. The defaults: nothing is known of it."""

    ssd: bool = False  # there is a budget on one
    update: str = "on_step"
    state: str = ""  # how moments are stored, as Config says
    moments: int = 2  # of the optimizer
    spare_processors: int = 0  # that neither compute nor update

    @staticmethod
    def of(config: Config, processors: int) -> Setting:
        """Of a wrapped model, on a machine with so many processors."""
        rules = {group["rule"] for group in config["groups"]}
        foreign = "foreign" in rules  # keeps its moments as it likes
        return Setting(
            ssd=config["ssd_bytes"] > 0,
            update=config["update"],
            state="" if foreign else config["moment_dtype"],
            moments=2 if rules & {"adam", "adamw"} else 1,
            spare_processors=processors - config["workers"] - config["compute_threads"],
        )


@dataclass(frozen=True)
class Limit:
    """A resource, and what it has to do with the length of a step."""

    resource: str  # a key of FASTER
    saves: float  # of a step, where it is twice as fast
    advice: list[str]  # what to change, the cheapest first


def limits(paper: PaperPlan, costs: Costs, setting: Setting) -> list[Limit]:
    """All resources, those that save most first. Empty where the step never ends."""
    run = paper.simulate(costs)
    if not isfinite(run.step_seconds):
        return []
    found = [
        Limit(
            name,
            1 - paper.simulate(_faster(costs, name)).step_seconds / run.step_seconds,
            _advice(name, run, paper, setting),
        )
        for name in FASTER
        if name != "the SSD" or setting.ssd
    ]
    return sorted(found, key=lambda limit: -limit.saves)


def limiting_sentence(paper: PaperPlan, costs: Costs, setting: Setting) -> str:
    """What limits the planned step on this machine. Empty where the step never ends."""
    found = limits(paper, costs, setting)
    if not found:
        return ""
    limiting = [limit for limit in found if limit.saves >= GAIN_MIN]
    if not limiting:
        return (
            f"limited by nothing alone: twice the speed of any one resource would save less than "
            f"{GAIN_MIN:.0%} of a step"
        )
    parts = [
        f"{limit.resource} (twice as fast it would save {limit.saves:.0%} of a step)"
        for limit in limiting
    ]
    less = {limit.resource for limit in found[len(limiting) :]}
    useless = [MORE[name] for name in FASTER if name in less]
    sentence = f"limited by {_joined(parts, 'and')}: {_joined(limiting[0].advice, 'or')} would help"
    return sentence + (f"; {_joined(useless, 'or')} would not" if useless else "")


def _faster(costs: Costs, resource: str) -> Costs:
    changed = {
        name: getattr(costs, name) * (0.5 if name in SECONDS else 2.0) for name in FASTER[resource]
    }
    return costs.replace(**changed)


def _advice(resource: str, run: Simulation, paper: PaperPlan, setting: Setting) -> list[str]:
    """What to change, the cheapest first."""
    found = []
    if resource in ("the optimizer", "the SSD"):
        if setting.state == "float32":
            shorter = "'8bit'" if setting.moments == 2 else "torch.bfloat16"
            found.append(f"state_dtype={shorter} (which loses bits)")
        if setting.update == "on_step":
            found.append("update='in_backward'")
    if resource == "the optimizer":
        if setting.spare_processors >= WORKERS_MORE:
            found.append("two more workers")
        found.append("more tokens in a step")
    elif resource == "the SSD":
        found += ["more host memory", "a faster SSD"]
    elif resource == "the link to the device":
        found += ["a larger device budget", "more tokens in a step"]
    else:
        if _recomputed_share(run, paper) >= GAIN_MIN:
            found.append("a larger device budget, which spares computing twice,")
        found.append(MORE[resource])
    return found[:ADVICE_MAX]


def _recomputed_share(run: Simulation, paper: PaperPlan) -> float:
    """Of the step: what is computed beyond what has to be."""
    computed = run.lanes["compute"].busy_seconds
    units = paper.plan.units
    if not any(unit.activation in RECOMPUTES for unit in units):
        return 0.0
    return (computed - paper.bound().lane_seconds["compute"]) / run.step_seconds


def _joined(words: list[str], last: str) -> str:
    """a, b or c."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} {last} {words[-1]}"

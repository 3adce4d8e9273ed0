"""A parameter of the double of the core: its values, and torch's own arithmetic on them."""

from typing import Any

import torch
from strata import Lion
from strata._core import StrataError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Param:
    def __init__(self, index: int, spec: dict[str, Any], foreign: Any) -> None:
        self.index = index
        self.spec = spec
        self.foreign = foreign
        n = spec["numel"]
        self.device = torch.empty(n, dtype=DTYPES[spec["dtype"]])
        self.master = torch.zeros(n)
        self.moments = [torch.zeros(n), torch.zeros(n)]
        self.grad: torch.Tensor | None = None
        self.landed = 0
        self.squares = 0.0  # of the newest gradient, also when it is gone
        self.updated = False  # with what has landed
        self.step = 0

    def array(self, kind: str) -> torch.Tensor:
        if kind == "master":
            return self.master
        if kind == "grad":
            assert self.grad is not None
            return self.grad
        return self.moments[int(kind[-1]) - 1]

    def rounded(self) -> torch.Tensor:
        """The master in the compute dtype; bfloat16 rounds halves away from zero."""
        return round_master(self.master, self.device.dtype)

    def update(self, group: dict[str, Any], scale: float) -> None:
        # What leaves no moments behind does not count.
        self.step += group["rule"] != "sgd" or group["momentum"] != 0
        grad = self.grad * scale if scale != 1.0 else self.grad
        if group["rule"] == "foreign":
            tensors = [self.master, grad.clone(), *self.moments[: group["moments"]]]
            addresses = [t.data_ptr() for t in tensors] + [0] * (4 - len(tensors))
            try:
                self.foreign(group["options"], self.index, self.step, grad.numel(), *addresses)
            except Exception as error:
                raise StrataError(f"{type(error).__name__}: {error}") from error
            return
        master = torch.nn.Parameter(self.master)
        master.grad = grad
        shared = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        shared |= {"maximize": group["maximize"], "foreach": False}
        if group["rule"] == "sgd":
            names = ("momentum", "dampening", "nesterov")
            rule = torch.optim.SGD([master], **shared, **{k: group[k] for k in names})
            if group["momentum"] and self.step > 1:
                rule.state[master]["momentum_buffer"] = self.moments[0]
            rule.step()
            if group["momentum"]:
                self.moments[0].copy_(rule.state[master]["momentum_buffer"])
            return
        if group["rule"] in ("lion", "adagrad"):
            self._update_one_moment(master, group)
            return
        kind = torch.optim.AdamW if group["rule"] == "adamw" else torch.optim.Adam
        adam = kind([master], betas=(group["beta1"], group["beta2"]), eps=group["eps"], **shared)
        adam.state[master] = {
            "step": torch.tensor(float(self.step - 1)),
            "exp_avg": self.moments[0],
            "exp_avg_sq": self.moments[1],
        }
        adam.step()

    def _update_one_moment(self, master: torch.nn.Parameter, group: dict[str, Any]) -> None:
        rule: torch.optim.Optimizer
        if group["rule"] == "lion":
            betas = (group["beta1"], group["beta2"])
            rule = Lion([master], group["lr"], betas, group["weight_decay"])
            rule.state[master] = {"exp_avg": self.moments[0]}
            rule.step()
            return
        names = ("lr", "lr_decay", "eps", "weight_decay", "maximize")
        rule = torch.optim.Adagrad([master], foreach=False, **{n: group[n] for n in names})
        if self.step == 1:
            self.moments[0].fill_(group["initial_accumulator"])
        rule.state[master] = {"step": torch.tensor(self.step - 1.0), "sum": self.moments[0]}
        rule.step()


def grad_norm(params: list[Param], scale: float) -> float:
    """Of the gradients that have landed, in double."""
    squares = ((p.grad.double() * scale).square().sum().item() for p in params if p.landed)
    return float(sum(squares) ** 0.5)


def round_master(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    bits = (master.contiguous().view(torch.int32).to(torch.int64) + 0x8000) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)

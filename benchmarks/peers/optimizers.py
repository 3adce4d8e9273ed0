"""A child of the bench adam-peers: one update of many parameters by strata, by DeepSpeed and by
PyTorch, in turns, in one process.

All take a bfloat16 gradient and leave a bfloat16 parameter and float32-exact state. What keeps its
master copy in float32 casts: the gradient when it arrives, as ZeRO-Offload copies it into its
float32 buffer, and the parameter when it is done. Only these two passes are counted; unscaling and
clipping, which are one more in ZeRO-Offload, are not.
"""

import argparse
from collections.abc import Callable, Iterable

import torch

from ..adam import strata_side
from ..common import seconds_of
from .child import claim_stdout, serve

LR = 1e-5
WEIGHT_DECAY = 0.1
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def master_side(count: int, make: Make) -> Callable[[], float]:
    """Seconds of one update by an optimizer of float32 parameters, casts included."""
    param = torch.randn(count).bfloat16()
    gradient = torch.randn(count).bfloat16()
    master = torch.nn.Parameter(param.float())
    master.grad = torch.zeros(count)
    optimizer = make([master])
    buffer = master.grad

    def update() -> None:
        buffer.copy_(gradient)
        optimizer.step()
        param.copy_(master.detach())

    return lambda: seconds_of(update)


def deepspeed_adam(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """ZeRO-Offload's optimizer: OpenMP, and AVX-512 where the processor has it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(params, lr=LR, weight_decay=WEIGHT_DECAY)
    return optimizer


def torch_adam(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's fastest."""
    return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def main() -> None:
    """Answers the name of a side with the seconds of one update."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    answers = claim_stdout()
    torch.set_num_threads(options.threads)
    sides = {
        "strata": strata_side(options.count, options.threads),
        "deepspeed": master_side(options.count, deepspeed_adam),
        "torch": master_side(options.count, torch_adam),
    }

    def turn(side: Callable[[], float]) -> Callable[[], dict[str, float]]:
        return lambda: {"seconds": side()}

    serve(answers, {name: turn(side) for name, side in sides.items()})


if __name__ == "__main__":
    main()

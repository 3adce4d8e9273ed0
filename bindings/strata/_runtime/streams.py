"""The stream that computes now, and CUDA graphs: which may be captured, and what of them is handled
with care.

    stream = current_stream(device)  # as the core takes it
    refuse_graphed(model)            # by torch.cuda.make_graphed_callables, ahead of wrap()
    refuse_capture(device, "block3") # a hook runs while the stream is captured
    if owned_by_graph(grad): ...     # its memory is written again at the next replay
    if graphs_in_use(): ...          # torch.compile has captured some, or will

Note [What may be captured]. A replay launches kernels and runs no Python. So a graph around a unit
would bring no pages and take no gradients: it would compute with whatever the frames hold then, and
nobody would be told. That holds for a unit which rests on the device as a whole, too. Its frames
stay only for as long as the plan says so: a larger batch moves it away between two steps, and a
replay leaves out the hooks that would wait for its update. Pinning it for good would take that
memory from the planner for good. So every capture that a hook notices is refused at once, before
anything is submitted: work on a captured stream is recorded and does not run.

What lies inside of a unit may be captured, and torch.compile(model, mode="reduce-overhead") does
so: hooks stay outside of what is compiled, parameters keep their address for life, and whatever
refills the frames is ordered ahead of the replay on the stream that replays. What strata asks the
driver meanwhile, on other threads, is let through: Note [Beside a capture] in
memory/cuda/device.hpp.

Note [Memory of graphs]. Where torch.compile captures, results of a graph lie in a pool of the
graph's. They differ from other tensors in two ways. First, a storage that a replay hands out
belongs to no allocator: letting go of it frees nothing. The compiler has noted which of them were
alive at each graph, so one that lives on, for as long as a copy takes, makes it capture again or
fail. So such activations are kept, not swapped, and such gradients are copied by the stream that
made them and let go. Second, the next forward of the compiled model frees the whole pool, whoever
still refers to something in it. So a forward waits for gradients that are on their way.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from .._errors import StrataError
from .._torch_compat import GRAPHS_MODULE


def capturing(device: torch.device) -> bool:
    """Whether the stream that is current is captured for a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Raises StrataError where the stream that is current is captured. `what`: what would be in the
    graph. See Note [What may be captured]."""
    if capturing(device):
        raise StrataError(
            f"a CUDA graph cannot be captured around {what}: replaying it would run none of the "
            "hooks that bring its pages and take its gradients. Pass the model to "
            "torch.compile(model, mode='reduce-overhead'), which captures inside of units, or "
            "capture only what uses no parameter of the model"
        )


def refuse_graphed(model: nn.Module) -> None:
    """Raises StrataError where torch.cuda.make_graphed_callables was given a module of the model:
    its graph knows the addresses that parameters have now, and would go on to read them."""
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if getattr(forward, "__module__", "") == "torch.cuda.graphs":
            raise StrataError(
                f"{name or type(model).__name__} was made a CUDA graph by "
                "torch.cuda.make_graphed_callables, which keeps to the memory where its parameters "
                "are now: build the model anew, wrap it, and pass it to "
                "torch.compile(model, mode='reduce-overhead')"
            )


def owned_by_graph(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is that of a CUDA graph, or of anybody else but an allocator.
    See Note [Memory of graphs]."""
    return tensor.is_cuda and not tensor.untyped_storage().resizable()


def graphs_in_use() -> bool:
    """Whether torch.compile may have captured CUDA graphs: it loads what does so when it begins."""
    return GRAPHS_MODULE in sys.modules


def current_stream(device: torch.device) -> int:
    """The stream that the calling thread computes on, as cudaStream_t; 0 on the host.

    In a backward that is autograd's thread, and the stream which the node now running uses.
    Raises StrataError where it is captured for a CUDA graph: nothing would happen on it.
    """
    refuse_capture(device, "what strata does")
    return 0 if device.type == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


def keep_until_used(tensor: torch.Tensor, device: torch.device) -> None:
    """For memory that was allocated on another stream than the current one, which uses it: when it
    is freed, PyTorch's allocator gives it to nobody before the current stream has come there."""
    tensor.record_stream(torch.cuda.current_stream(device))

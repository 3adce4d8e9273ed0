"""What becomes of the tensors that autograd saves in a unit's forward, by the planner's names
(offload/planner/trace.hpp): which of them do what, and how they read.

    if unit.activation in RECOMPUTES: ...
    in_words("recompute_host")                  # "recompute from host", where its inputs are

Nothing here needs torch.
"""

RECOMPUTES = frozenset(("recompute", "recompute_host", "recompute_ssd"))
# Some saved tensors leave the device: all of them, or of a recomputed unit its inputs.
SWAPS = frozenset(("swap_host", "swap_ssd", "recompute_host", "recompute_ssd"))
TO_SSD = frozenset(("swap_ssd", "recompute_ssd"))


def leaves(activation: str, is_input: bool) -> bool:
    """Whether a saved tensor leaves the device. `is_input`: it was there before the forward."""
    return activation in SWAPS and (is_input or activation not in RECOMPUTES)


def in_words(activation: str) -> str:
    """For people."""
    return activation.replace("_", " from " if activation in RECOMPUTES else " to ")

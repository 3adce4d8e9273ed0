"""What benches ask of PyTorch's allocator, as soon as this is imported: ahead of torch.

Segments that grow in place leave no gaps between tensors of changing sizes, and the limit that a
device budget sets counts gaps. Children inherit it; what a user has set stays.
"""

import os
from collections.abc import MutableMapping

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # from torch 2.9 on; before
SETTING = "expandable_segments:True"


def choose(environment: MutableMapping[str, str]) -> None:
    """Sets it where nobody has set any."""
    if not any(name in environment for name in NAMES):
        environment.update(dict.fromkeys(NAMES, SETTING))


choose(os.environ)

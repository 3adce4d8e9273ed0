"""A training side under FSDP2: one rank on the processor, float32 shards, computed in bfloat16. It
has no tier below host memory, which is where its shards are anyway.
"""

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..common import seconds_of
from ..sides import train_step


class Sharded:
    """The model under `fully_shard`, layer by layer, with torch's fused AdamW."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, **adamw: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{any_port.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)

    def step(self) -> float:
        """Forward, backward, update. Returns the loss."""
        return train_step(self.model, self.optimizer, self.batch)

    def timed_step(self) -> float:
        """Seconds of a step. Nothing of it is left to the next one."""
        return seconds_of(self.step)

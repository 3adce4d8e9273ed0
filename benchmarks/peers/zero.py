"""A training side under DeepSpeed: ZeRO-3 with optimizer and parameters in host memory, or with the
optimizer's state on the SSD. On the processor: one rank, or those that a launcher has started.
"""

import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..common import MIB, seconds_of

# What DeepSpeed's own integration in Transformers chooses for a model of this width: it is faster
# and takes less memory here than DeepSpeed's defaults, which are for models a hundred times larger.
HIDDEN = 1024
BUCKETS = {
    "reduce_bucket_size": HIDDEN * HIDDEN,
    "stage3_prefetch_bucket_size": HIDDEN * HIDDEN * 9 // 10,
    "stage3_param_persistence_threshold": 10 * HIDDEN,
}
AIO = {
    "block_size": MIB,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


def config(ssd_path: Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration; without a path nothing is on the SSD. All state is one sub-group;
    smaller ones let reads and writes overlap, take less memory, and want more buffers.
    """
    optimizer: dict[str, Any] = {"device": "cpu"}
    if ssd_path is not None:
        optimizer = {
            "device": "nvme",
            "nvme_path": str(ssd_path),
            "pipeline_read": True,
            "pipeline_write": True,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": optimizer,
            "offload_param": {"device": "cpu"},
            **BUCKETS,
        },
        "aio": AIO,
    }


class Zero:
    """The model under DeepSpeed's engine."""

    def __init__(
        self, model: nn.Module, batch: torch.Tensor, ssd_path: Path | None, **adamw: Any
    ) -> None:
        if ssd_path is not None:  # read and written in place: else every one is copied
            os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            os.environ.setdefault("MASTER_PORT", str(any_port.getsockname()[1]))
        self.batch = batch
        optimizer = DeepSpeedCPUAdam(model.parameters(), **adamw)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config(ssd_path)
        )

    def step(self) -> float:
        """Forward, backward, update. Returns the loss."""
        loss = self.engine(input_ids=self.batch, labels=self.batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def timed_step(self) -> float:
        """Seconds of a step. Nothing of it is left to the next one."""
        return seconds_of(self.step)

    def close(self) -> None:
        """Frees everything."""
        self.engine.destroy()

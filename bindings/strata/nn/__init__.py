"""Layers and losses for weights and logits that are too large to be on a device as one piece.

    model.lm_head = strata.nn.TiledLinear.from_linear(model.lm_head, tiles=8)
    strata.nn.tile(model, "lm_head", 8)                      # the same, and tied weights stay tied
    loss = strata.nn.ChunkedCrossEntropy()(hidden, model.lm_head, targets)
    strata.nn.chunk_loss(model)                              # a Transformers model: its own loss

They are ordinary PyTorch modules, and work without strata.wrap() as well.
"""

from .causal_lm import chunk_loss, unchunk_loss
from .cross_entropy import ChunkedCrossEntropy
from .replace import tile
from .tiles import TiledEmbedding, TiledLinear

__all__ = [
    "ChunkedCrossEntropy",
    "TiledEmbedding",
    "TiledLinear",
    "chunk_loss",
    "tile",
    "unchunk_loss",
]

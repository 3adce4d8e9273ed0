"""Adapters over a base that rests as codes, under every combination of tier, page size and what
becomes of activations, with layers whole and in tiles: bitwise equal losses and parameters in each
form. Tiles may change last bits, so whole layers and tiles are compared each with their own.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch

from .common import Context, Figure
from .equal import ADAMW, LAYERS, PAGES, TOKENS, VOCABULARY, budgets, compare
from .models import llama, llama_config, tokens
from .qlora import with_adapters
from .sides import Paged

HIDDEN = 512  # rows of all layers are whole blocks of 64, as int8 needs
FORMS = ("nf4", "nf4-double", "int8")
TILES = (1, 2)  # of the layers below adapters
PLACES = ("resident", "tiny", "ssd")
ACTIVATIONS = (None, "swap", "recompute")
Combination = tuple[str, int, str | None]  # place, page size, activations


def paged(form: str, tiles: int, combination: Combination, seed: int, folder: Path) -> Paged:
    """The side for one combination."""
    import strata

    place, page, activations = combination
    model = llama(llama_config(HIDDEN, LAYERS, VOCABULARY), torch.bfloat16, seed)
    parameters = sum(p.numel() for p in model.parameters())
    torch.manual_seed(seed)
    model = with_adapters(model, layers=["q_proj", "down_proj"])
    below = [name for name, _ in model.named_modules() if name.endswith(".base_layer")]
    for name in below if tiles > 1 else ():
        strata.nn.tile(model, name, tiles)
    options = {
        "page_size": page,
        "dtype": torch.bfloat16,
        "frozen": form,
        "activations": activations,
    }
    return Paged(
        model,
        tokens(TOKENS, seed, VOCABULARY),
        budgets(place, page, parameters),
        None if place == "resident" else folder,
        options,
        **ADAMW,
    )


def run(context: Context) -> Iterator[Figure]:
    """Yields how many runs differ from the first of their form and tiles."""
    steps = 3 if context.quick else 10
    combinations: list[Combination] = list(itertools.product(PLACES, PAGES, ACTIVATIONS))
    if context.quick:
        combinations = [("resident", PAGES[0], None), ("ssd", PAGES[1], "recompute")]
    seed = context.seed
    count = different = 0
    with context.scratch() as folder:
        for form, tiles in itertools.product(FORMS, TILES):
            sides = (
                (f"{form} in {tiles} tile(s), {each}", paged(form, tiles, each, seed, folder))
                for each in combinations
            )
            ran, differ = compare(sides, steps, context)
            count, different = count + ran, different + differ
    yield Figure("equal-codes", "combinations", count, "runs")
    yield Figure("equal-codes", "combinations_that_differ", different, "runs", target=0)

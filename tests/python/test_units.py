"""Which parameters make a unit."""

import pytest
import torch
from small_models import ConvNet, build, gpt2, llama, t5
from strata._config.units import find_units
from torch import nn


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(model)[0]]


def owners(model: nn.Module) -> dict[str, list[int]]:
    known = {module: name for name, module in model.named_modules()}
    return {known[module]: units for module, units in find_units(model)[1].items()}


def test_llama() -> None:
    assert names(build(llama)) == [
        "model.embed_tokens",
        *[f"model.layers.{i}" for i in range(4)],
        "model.norm",
        "lm_head",
    ]


def adapted(layers: int, rank: int) -> nn.Module:
    """Frozen layers with an adapter each, of 2 * rank rows beside 512 of 512."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(512, 512), Adapter(rank)) for _ in range(layers)]
    )
    for layer in model:
        layer[0].requires_grad_(False)
    return model


class Adapter(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(512, rank, bias=False), nn.Linear(rank, 512, bias=False)


def test_slivers_of_blocks_share_units() -> None:
    """Up to 16 MiB of them, and up to 1/64 of the model: 322 KiB here, 8 KiB each."""
    model = adapted(20, rank=2)
    units, hooked = find_units(model)
    trained = [unit for unit in units if "trained" in unit.name]
    assert [unit.name for unit in trained] == ["what is trained of 0 to 19"]
    assert trained[0].bytes == 20 * 8 << 10
    blocks = [hooked[layer] for layer in model]
    assert blocks == [[place, 0] for place in range(1, 21)], "its own has the larger index"


def test_what_is_no_codes_among_codes_is_a_sliver_too() -> None:
    """Here biases, of 2 KiB each, beside what is trained."""
    model = adapted(20, rank=2)
    coded = {id(layer[0].weight) for layer in model}
    units, hooked = find_units(model, coded=coded)
    assert units[0].name == "what is small of 0 to 19"
    assert units[0].bytes == 20 * (8 + 2) << 10
    assert [unit.bytes for unit in units[1:]] == [512 * 512 * 4] * 20
    assert [hooked[layer] for layer in model] == [[place, 0] for place in range(1, 21)]
    # Where too much of a block is none, what is trained is a sliver all the same.
    coded = {id(layer[0].bias) for layer in model}
    units, _ = find_units(model, coded=coded)
    assert units[0].bytes == 20 * 8 << 10


def test_what_is_trained_of_blocks_alone_stays_with_them() -> None:
    """Where the model is small, where it is clipped by itself, and where nothing is frozen."""
    assert names(adapted(20, rank=64)) == [str(i) for i in range(20)]
    units, _ = find_units(adapted(20, rank=2), slivers=False)
    assert [unit.name for unit in units] == [str(i) for i in range(20)]
    assert names(adapted(20, rank=2).requires_grad_(True)) == [str(i) for i in range(20)]


def test_every_parameter_has_one_unit() -> None:
    for make in (llama, gpt2, t5, ConvNet):
        model = build(make)
        units, _ = find_units(model)
        placed = sorted(p for unit in units for p in unit.params)
        assert placed == list(range(len(list(model.parameters()))))
        assert sum(u.bytes for u in units) == sum(p.nbytes for p in model.parameters())


def test_gpt2_head_reads_the_embedding() -> None:
    model = build(gpt2)
    found = names(model)
    assert found[:2] == ["transformer.wte", "transformer.wpe"]
    assert [n for n in found if ".h." in n] == [f"transformer.h.{i}" for i in range(3)]
    assert owners(model)["lm_head"] == owners(model)["transformer.wte"] == [0]


def test_t5_norms_share_a_unit() -> None:
    model = build(t5)
    found = names(model)
    assert "encoder.final_layer_norm+decoder.final_layer_norm" in found
    assert found[0] == "shared"
    assert {f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (0, 1)} <= set(found)
    hooked = owners(model)
    assert hooked["encoder.final_layer_norm"] == hooked["decoder.final_layer_norm"]


def test_convolutions() -> None:
    found = names(build(ConvNet))
    assert found == ["stem", "norm+head", "stages.0", "stages.1", "stages.2"]


def test_a_sequence_of_leaves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Linear(64, 9))
    assert names(model) == ["0", "2", "3"]


class Wrapped(nn.Module):
    """Owns a parameter and a list of them beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(300))
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(300)) for _ in range(2)])
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(2))


def test_own_parameters_beside_modules() -> None:
    model = Wrapped()
    units, hooked = find_units(model)
    assert [u.name for u in units] == ["model", "blocks.0", "blocks.1"]
    assert len(units[0].params) == 3
    assert hooked[model] == [0]


def test_an_attention_layer_is_one_unit() -> None:
    model = nn.Module()
    model.attention = nn.MultiheadAttention(64, 4)
    model.out = nn.Linear(64, 64)
    assert names(model) == ["attention", "out"]


def test_chosen_units() -> None:
    model = build(llama)
    whole, _ = find_units(model, ["model"])
    assert [u.name for u in whole] == ["model", "lm_head"]
    by_module, _ = find_units(model, [model.model])
    assert [u.name for u in by_module] == ["model", "lm_head"]
    finer, _ = find_units(model, lambda name, module: name.endswith("mlp"))
    assert "model.layers.2.mlp" in [u.name for u in finer]
    assert "model.layers.2" not in [u.name for u in finer]


def test_bad_choices() -> None:
    model = build(llama)
    with pytest.raises(ValueError, match=r"lm_hed.*'lm_head'"):
        find_units(model, ["lm_hed"])
    with pytest.raises(ValueError, match="lies in"):
        find_units(model, ["model", "model.layers.1"])
    with pytest.raises(ValueError, match="not a module of the model"):
        find_units(model, [nn.Linear(1, 1)])

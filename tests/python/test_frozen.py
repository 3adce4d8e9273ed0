"""wrap(frozen="nf4"): frozen weights rest as codes; modules compute with the values of codes, to
the bit, whatever the budgets, and checkpoints give the codes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from peft import LoraConfig, get_peft_model
from strata import StrataError
from strata._runtime import coded
from strata._runtime.wrapped import Wrapped, wrapped
from strata._storage.checkpoint_files import CheckpointError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from variants import thorough

FORMS = ("int8", "nf4", "nf4-double")
EACH_FORM = (thorough("int8"), thorough("nf4"), "nf4-double")
ROOMY = {"device": "64MiB", "host": "64MiB"}
# NF4 of QLoRA (arXiv:2305.14314), appendix E, as bitsandbytes has it.
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=128, intermediate_size=320, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **more,
        )
    )  # fmt: skip


def freeze(model: nn.Module) -> nn.Module:
    """All but norms."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def wrap(model: nn.Module, frozen: Any = "nf4", **keywords: Any) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    keywords = {"memory": ROOMY, "dtype": torch.bfloat16, **keywords}
    return strata.wrap(model, optimizer, frozen=frozen, **keywords)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(64, (2, 16), generator=generator) for _ in range(count)]


def train(model: nn.Module, optimizer: Any, steps: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in steps:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of_codes(state: Wrapped) -> dict[str, list[torch.Tensor]]:
    """Codes and scales of all that rests so."""
    return {
        spec["name"]: coded.read(state, i)
        for i, spec in enumerate(state.config["params"])
        if "stored" in spec
    }


def trained(state: Wrapped) -> list[torch.Tensor]:
    return [state.read(i) for i, spec in enumerate(state.config["params"]) if spec["trainable"]]


def values_of(weight: torch.Tensor) -> torch.Tensor:
    """What nf4 makes of a weight, computed here in a few lines of torch."""
    blocks = weight.float().reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / largest).unsqueeze(-1).sub(NF4).abs().argmin(-1)
    return (NF4[nearest] * largest).to(weight.dtype).reshape(weight.shape)


def test_modules_compute_with_the_values_of_the_codes() -> None:
    plain = freeze(llama()).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "_proj" in name:
                parameter.copy_(values_of(parameter))
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    reference, _ = strata.wrap(plain, optimizer, memory=ROOMY)
    model, optimizer = wrap(freeze(llama()).to(torch.bfloat16))
    state = wrapped(model)
    stored = of_codes(state)
    assert len(stored) == 3 * 7
    assert all("_proj" in name for name in stored)  # no norms, no embeddings, no head
    for i, name in enumerate(state.names):
        if name in stored:
            assert torch.equal(state.read(i), wrapped(reference).read(i)), name
    assert train(model, optimizer, batches(3)) == train(
        reference, wrapped(reference).optimizer, batches(3)
    )


@pytest.mark.parametrize("form", EACH_FORM)
def test_budgets_change_no_bit(tmp_path: Path, form: str) -> None:
    model, optimizer = wrap(freeze(llama()), form)
    losses = train(model, optimizer, batches(4))
    expected, codes = trained(wrapped(model)), of_codes(wrapped(model))
    settings: list[dict[str, Any]] = [
        {"memory": {"device": "2MiB", "host": "2MiB", "ssd": "64MiB"}, "page_size": "64KiB"},
        {"memory": {"device": "3MiB", "host": "6MiB", "ssd": "64MiB"}, "page_size": "256KiB"},
        {"memory": ROOMY, "activations": "recompute"},
        {"memory": {"device": "3MiB", "host": "4MiB", "ssd": "64MiB"}, "update": "in_backward"},
    ]
    for setting in settings:
        model, optimizer = wrap(freeze(llama()), form, ssd_path=tmp_path, **setting)
        assert train(model, optimizer, batches(4)) == losses, setting
        state = wrapped(model)
        for one, other in zip(trained(state), expected, strict=True):
            assert torch.equal(one, other), setting
        for name, stored in of_codes(state).items():
            assert all(map(torch.equal, stored, codes[name]))
        strata.unwrap(model)


def test_codes_take_a_quarter_of_the_host_memory() -> None:
    sizes = {}
    for form in ("as-is", "nf4"):
        model, _ = wrap(freeze(llama()), form, page_size="64KiB")
        plan = wrapped(model).session.plan
        sizes[form] = sum(unit["resting_param_bytes"] for unit in plan["units"])
        strata.unwrap(model)
    assert sizes["nf4"] < 0.6 * sizes["as-is"]  # embeddings, norms and half-empty pages are in it


@pytest.mark.thorough
def test_norms_of_many_blocks_share_pages() -> None:
    """Each block alone would have a page of its norms, and its own of adapters; no bit differs."""
    losses, taken = [], []
    for apart in (None, 1e9):  # gradients of units are clipped by themselves, and never are
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 24}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))
        config = LoraConfig(r=1, target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(base, config)
        model, optimizer = wrap(model, page_size="64KiB", max_unit_norm=apart)
        state = wrapped(model)
        small = [
            spec for spec in state.config["params"]
            if not spec["trainable"] and "stored" not in spec and "layernorm" in spec["name"]
        ]  # fmt: skip
        units = {spec["unit"] for spec in small}
        plan = state.session.plan["units"]
        taken.append(sum(plan[u]["param_bytes"] - plan[u]["params"] * 2 for u in units))
        assert len(units) == (1 if apart is None else 24)
        losses.append(train(model, optimizer, batches(3)))
        strata.unwrap(model)
    assert taken[0] < taken[1] / 20
    assert losses[0] == losses[1]


def test_a_parameter_outside_its_module_has_its_values() -> None:
    model, _ = wrap(freeze(llama()).to(torch.bfloat16))
    weight = llama().to(torch.bfloat16).model.layers[1].mlp.down_proj.weight
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight + 0, values_of(weight))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(model.state_dict()[name] + 0, values_of(weight))
    plain = strata.unwrap(model)
    assert torch.equal(plain.model.layers[1].mlp.down_proj.weight, values_of(weight))


def test_weights_are_quantised_as_they_are_read(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    model, optimizer = wrap(freeze(llama()), "nf4-double")
    with torch.device("meta"):
        empty = llama()
    streamed, other = wrap(freeze(empty), "nf4-double", weights=tmp_path / "base")
    one, two = of_codes(wrapped(model)), of_codes(wrapped(streamed))
    assert one.keys() == two.keys()
    for name, stored in one.items():
        assert all(map(torch.equal, stored, two[name])), name
    assert train(model, optimizer, batches(2)) == train(streamed, other, batches(2))


@pytest.mark.parametrize("form", EACH_FORM)
def test_a_checkpoint_gives_the_codes_back(tmp_path: Path, form: str) -> None:
    model, optimizer = wrap(freeze(llama()), form)
    train(model, optimizer, batches(2))
    strata.save(model, tmp_path / "c")
    codes = of_codes(wrapped(model))
    losses = train(model, optimizer, batches(4)[2:])
    # Another model of the same shape: all that it has comes from the checkpoint.
    other, optimizer = wrap(freeze(llama(seed=5)), form, page_size="64KiB")
    strata.load(other, tmp_path / "c")
    for name, stored in of_codes(wrapped(other)).items():
        assert all(map(torch.equal, stored, codes[name])), name
    assert train(other, optimizer, batches(4)[2:]) == losses
    for wrong in ("as-is", *(f for f in FORMS if f != form)):
        third, _ = wrap(freeze(llama()), wrong)
        with pytest.raises(CheckpointError, match=r"rests as|stored as"):
            strata.load(third, tmp_path / "c")


def test_what_did_not_change_is_linked(tmp_path: Path) -> None:
    model, optimizer = wrap(freeze(llama()))
    for step in (1, 2):
        train(model, optimizer, batches(1))
        strata.save(model, tmp_path / f"c{step}")
    linked = [
        path.name
        for path in (tmp_path / "c2").glob("parameters-*.safetensors")
        if path.stat().st_nlink > 1
    ]
    assert linked  # the shard of all codes


def test_a_function_chooses() -> None:
    def choose(name: str, module: nn.Module) -> str | None:
        if name.endswith("mlp.up_proj"):
            return "int8"
        return "nf4" if isinstance(module, nn.Embedding) else None

    model, optimizer = wrap(freeze(llama()), choose)
    forms = {s["name"]: s.get("stored") for s in wrapped(model).config["params"] if "stored" in s}
    assert forms.pop("model.embed_tokens.weight") == "nf4"
    assert set(forms.values()) == {"int8"}
    assert len(forms) == 3
    train(model, optimizer, batches(1))


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: wrap(freeze(llama()), "nf5"), ValueError, "nf4"),
    (lambda: wrap(freeze(llama()), lambda *_: "nf5"), ValueError, "did you mean 'nf4'"),
    (lambda: wrap(llama(), lambda *_: "nf4"), ValueError, "it is trained: freeze it"),
]


def odd_rows() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_int8_needs_whole_rows(form: str) -> None:
    if form == "nf4":  # 32 x 64 elements are whole blocks
        wrap(odd_rows(), form)
        return
    with pytest.raises(ValueError, match=r"rows of '0.weight', of shape \(64, 32\)"):
        wrap(odd_rows(), form)


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_cannot_be_is_refused(
    call: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_values_that_are_not_finite_are_refused() -> None:
    model = freeze(llama())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(StrataError, match=r"up_proj\.weight has a value that is infinite or not a"):
        wrap(model)
    assert type(model.model.norm.weight) is nn.Parameter  # as it was


def test_a_write_in_place_is_refused_and_undone() -> None:
    model, _ = wrap(freeze(llama()))
    weight = model.model.layers[0].mlp.up_proj.weight
    inputs = batches(1)[0]
    values, loss = weight.detach().clone(), model(input_ids=inputs, labels=inputs).loss.item()
    for change in (lambda: weight.mul_(2), lambda: weight.zero_(), lambda: weight[0].fill_(1)):
        with pytest.raises(StrataError, match=r"rests as nf4.*undone.*safe_merge"), torch.no_grad():
            change()
        assert torch.equal(weight.detach().clone(), values)
        assert model(input_ids=inputs, labels=inputs).loss.item() == loss


def with_adapters(tiles: int) -> nn.Module:
    """A base in blocks of 2 MiB, whose layers are cut into tiles."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base.to(torch.bfloat16), config)
    layers = [n for n, _ in model.named_modules() if n.endswith("base_layer")] if tiles > 1 else []
    for name in layers:
        strata.nn.tile(model, name, tiles)
    return model


@pytest.mark.parametrize("form", EACH_FORM)
def test_tiles_of_codes_train_where_a_block_has_no_room(form: str) -> None:
    """What computes with one tile at a time gives the same bits whatever the budgets."""
    steps = [batch[:1, :8] for batch in batches(2)]
    found = []
    for device in ("64MiB", "1792KiB"):
        memory = {"device": device, "host": "64MiB"}
        model, optimizer = wrap(with_adapters(4), form, memory=memory, page_size="64KiB")
        found.append((train(model, optimizer, steps), trained(wrapped(model))))
        assert len(of_codes(wrapped(model))) == 2 * 7 * 4
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    # Without being asked, where nothing else fits.
    model, optimizer = wrap(with_adapters(1), form, memory=memory, page_size="64KiB")
    tiled = [m for m in model.modules() if isinstance(m, strata.nn.TiledLinear)]
    assert tiled
    assert train(model, optimizer, steps) == pytest.approx(found[0][0], rel=3e-2)


@pytest.mark.parametrize("form", EACH_FORM)
def test_adapters_are_merged_into_codes_where_that_is_asked_for(form: str) -> None:
    """PEFT adds in place, which is refused, or writes whole weights, which are quantised again."""
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model, _ = wrap(get_peft_model(llama().to(torch.bfloat16), config), form)
    name = "model.layers.1.mlp.up_proj"
    layer = model.get_submodule(f"base_model.model.{name}")
    sum_of_both = layer.base_layer.weight.detach().clone() + layer.get_delta_weight("default")
    with pytest.raises(StrataError, match=rf"rests as {form}: .* Write all of it"):
        model.merge_and_unload()
    model, _ = wrap(get_peft_model(llama().to(torch.bfloat16), config), form)
    stored = wrapped(model)
    merged = model.merge_and_unload(safe_merge=True)
    other = freeze(llama()).to(torch.bfloat16)
    with torch.no_grad():
        other.get_submodule(name).weight.copy_(sum_of_both)
    expected = of_codes(wrapped(wrap(other, form)[0]))[f"{name}.weight"]
    found = of_codes(stored)[f"base_model.model.{name}.base_layer.weight"]
    assert all(map(torch.equal, found, expected))
    assert torch.equal(merged.get_submodule(name).weight, other.get_submodule(name).weight)


@pytest.mark.parametrize("form", EACH_FORM)
@pytest.mark.parametrize("page_size", ["64KiB", "256KiB"])
def test_a_snapshot_gives_the_codes_back(tmp_path: Path, form: str, page_size: str) -> None:
    """With the same pages it is adopted, with others it is read."""
    (tmp_path / "drive").mkdir()
    small = {"device": "3MiB", "host": "3MiB", "ssd": "64MiB"}
    keywords: dict[str, Any] = {"memory": small, "ssd_path": tmp_path / "drive"}
    model, optimizer = wrap(freeze(llama()), form, page_size="64KiB", **keywords)
    train(model, optimizer, batches(2))
    strata.snapshot(model, tmp_path / "s").wait()
    codes = of_codes(wrapped(model))
    losses = train(model, optimizer, batches(4)[2:])
    strata.unwrap(model)
    other, optimizer = wrap(freeze(llama(seed=5)), form, page_size=page_size, **keywords)
    strata.load(other, tmp_path / "s")
    assert train(other, optimizer, batches(4)[2:]) == losses
    for name, stored in of_codes(wrapped(other)).items():
        assert all(map(torch.equal, stored, codes[name])), name


def test_a_checkpoint_has_the_codes(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    small = {"device": "3MiB", "host": "3MiB", "ssd": "128MiB"}
    model, optimizer = wrap(freeze(llama()), memory=small, ssd_path=tmp_path / "drive")
    train(model, optimizer, batches(2))
    strata.save(model, tmp_path / "c")
    codes = of_codes(wrapped(model))
    other, _ = wrap(freeze(llama(seed=5)))
    strata.load(other, tmp_path / "c")
    for name, stored in of_codes(wrapped(other)).items():
        assert all(map(torch.equal, stored, codes[name])), name

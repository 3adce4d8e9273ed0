"""Layers that are larger than the device: wrapped, trained, saved and given back."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from safetensors.torch import load_file
from small_models import adamw, assert_same, build, train
from strata._config.units import find_units
from strata._runtime.wrapped import wrapped
from strata.nn import TiledEmbedding, TiledLinear, chunk_loss
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from variants import thorough

ROUNDING = 1e-4
# The embedding and the head of llama() take 256 KiB each, everything else less than 48 KiB.
LESS: dict[str, Any] = {
    "memory": {"device": "192KiB", "host": "64MiB"},
    "page_size": "64KiB",
    "activations": None,
}


def llama(**more: Any) -> Any:
    options = {"vocab_size": 2048, "num_hidden_layers": 2, "max_position_embeddings": 64} | more
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
            **options,
        )
    )  # fmt: skip


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=2048, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_head_larger_than_the_device_trains(
    core: ModuleType, make: Callable[[], Any], chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build(make)
    expected = train(plain, adamw(plain))
    model: Any = build(make)
    head, parameters = model.lm_head, list(model.parameters())
    names = list(model.state_dict())
    if chunked:
        chunk_loss(model)
    given = adamw(model)
    with caplog.at_level(logging.INFO, "strata"):
        model, optimizer = strata.wrap(model, given, **LESS)
    told = [r.getMessage() for r in caplog.records if "cut into tiles: " in r.getMessage()]
    assert len(told) == 1
    assert "lm_head into 11" in told[0]
    assert isinstance(model.lm_head, TiledLinear)
    assert isinstance(model.get_input_embeddings(), TiledEmbedding)
    assert train(model, optimizer) == pytest.approx(expected, abs=ROUNDING)
    assert list(model.state_dict()) == names
    assert_same(model, plain, ROUNDING)
    strata.unwrap(model)
    assert_same(model, plain, ROUNDING)
    # The very modules and parameters that were there before, in the optimizer too.
    assert model.lm_head is head
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert list(map(id, given.param_groups[0]["params"])) == list(map(id, parameters))
    assert train(model, adamw(model), 1)[0] < expected[0]


@pytest.mark.parametrize("update", ["in_backward", strata.LockFree(0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes_of_updates_give_the_same_bits(
    core: ModuleType, update: Any, dtype: torch.dtype
) -> None:
    results = []
    for mode in ("on_step", update):
        model = build(llama)
        chunk_loss(model)
        model, optimizer = strata.wrap(model, adamw(model), dtype=dtype, update=mode, **LESS)
        results.append(train(model, optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize("chunked", [False, thorough(True)])
def test_activations_are_planned_around_tiles(chunked: bool) -> None:
    """The same bits whatever becomes of activations, with batches that may be sliced."""
    results = {}
    for mode in ("auto", "keep", "swap", "recompute"):
        model = build(llama)
        if chunked:
            chunk_loss(model)
        memory = {"device": "1MiB", "host": "64MiB"}
        strata.nn.tile(model, "lm_head", 5)
        model, optimizer = strata.wrap(
            model, adamw(model), memory=memory, page_size="64KiB", activations=mode
        )
        results[mode] = train(model, optimizer, 6)
    assert results["keep"] == results["swap"] == results["recompute"] == results["auto"]
    plain = build(llama)
    assert results["auto"] == pytest.approx(train(plain, adamw(plain), 6), abs=ROUNDING)


def test_a_budget_that_the_logits_would_break() -> None:
    """64 tokens: logits of 2 MiB, several times. The refusal says what would help."""
    tokens = torch.randint(0, 64, (2, 32))

    def steps(device: str, chunked: bool) -> str:
        model: Any = build(lambda: llama(vocab_size=8192))
        if chunked:
            chunk_loss(model, chunk_bytes=1 << 16)
        memory = {"device": device, "host": "64MiB"}
        model, optimizer = strata.wrap(model, adamw(model), memory=memory, page_size="64KiB")
        try:
            for _ in range(5):
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except strata.StrataError as error:
            return str(error)
        assert wrapped(model).planning.plan is not None
        return "fits"

    assert "strata.nn.tile(model, 'lm_head', 8)" in steps("1536KiB", True)
    assert steps("6MiB", False).endswith(
        "; strata.nn.chunk_loss(model) makes the loss do without the logits"
    )
    assert steps("3MiB", True) == "fits"


def test_the_loss_of_a_plain_head_streams_too(core: ModuleType) -> None:
    """ChunkedCrossEntropy within a user's own model, on a head that no one cut."""

    class Model(nn.Module):
        def __init__(self, chunked: bool) -> None:
            super().__init__()
            self.body = nn.Linear(16, 32)
            self.head = nn.Linear(32, 700)
            self.criterion = strata.nn.ChunkedCrossEntropy() if chunked else None

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.body(x))
            if self.criterion is not None:
                return self.criterion(hidden, self.head, y)
            return F.cross_entropy(self.head(hidden), y)

    losses = []
    for chunked in (False, True):
        model = build(lambda chunked=chunked: Model(chunked))
        memory = {"device": "1MiB", "host": "64MiB"}
        model, optimizer = strata.wrap(model, adamw(model), memory=memory, page_size="64KiB")
        losses.append([])
        torch.manual_seed(1)
        for _ in range(6):
            loss = model(torch.randn(8, 16), torch.randint(0, 700, (8,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=ROUNDING)
    assert losses[1][-1] != losses[1][0]


def test_checkpoints_do_not_know_of_tiles(core: ModuleType, tmp_path: Path) -> None:
    """Saved with tiles, continued with none and with others; saved with none, continued with."""
    roomy = {**LESS, "memory": {"device": "64MiB", "host": "64MiB"}}
    other = {**LESS, "memory": {"device": "256KiB", "host": "64MiB"}}
    for first, second in ((LESS, roomy), (roomy, LESS), (LESS, other)):
        model, optimizer = strata.wrap(*_fresh(), **first)
        train(model, optimizer, 2)
        strata.save(model, tmp_path / "checkpoint")
        expected = train(model, optimizer, 2)
        again, optimizer = strata.wrap(*_fresh(seed=5), **second)
        strata.load(again, tmp_path / "checkpoint")
        assert train(again, optimizer, 2) == pytest.approx(expected, abs=ROUNDING)
        assert_same(again, model, ROUNDING)


def _fresh(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(llama, seed)
    return model, adamw(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_exports_are_those_of_the_plain_model(
    core: ModuleType, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    model, _ = strata.wrap(*_fresh(), **LESS)
    strata.export_safetensors(model, tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = build(llama).state_dict()
    assert found.keys() == expected.keys()
    tolerance = 0.0 if dtype is None else 1e-2
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value, rtol=tolerance, atol=0.0)
    # ... and a model without values gets them from there, tile by tile.
    with torch.device("meta"):
        empty = llama()
    empty, _ = strata.wrap(empty, adamw(empty), weights=tmp_path / "out", **LESS)
    assert isinstance(empty.lm_head, TiledLinear)
    state = empty.state_dict()
    assert all(torch.equal(state[name], value.float()) for name, value in found.items())


def test_first_values_are_those_of_the_plain_model(core: ModuleType) -> None:
    states = []
    for device in ("192KiB", "64MiB"):
        with torch.device("meta"):
            model = llama()
        memory = {"device": device, "host": "64MiB"}
        options = {**LESS, "memory": memory, "weights": "init"}
        model, _ = strata.wrap(model, adamw(model), seed=3, **options)
        states.append(strata.unwrap(model).state_dict())
        assert type(model.lm_head) is nn.Linear
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_dry_run_and_a_refusal_leave_the_model_alone(core: ModuleType) -> None:
    model: Any = build(llama)
    given = adamw(model)
    before, parameters = list(model.named_modules()), given.param_groups[0]["params"]
    assert any("tiles.3" in u["name"] for u in strata.plan(model, given, **LESS).plan["units"])
    bad: list[dict[str, Any]] = [
        {"memory": {"device": "1KiB", "host": "64MiB"}},  # no block fits
        {"max_unit_norm": 1.0},  # of a unit: not of a tile
        {"weights": "nowhere"},  # fails when tiles are there already
    ]
    for more in bad:
        with pytest.raises((strata.StrataError, FileNotFoundError)):
            strata.wrap(model, given, **{**LESS, **more})
        assert list(model.named_modules()) == before
        assert list(map(id, given.param_groups[0]["params"])) == list(map(id, parameters))
        assert_same(model, build(llama))


def test_a_head_that_was_untied_by_accident_is_refused() -> None:
    model: Any = build(gpt2)
    model.lm_head = TiledLinear.from_linear(model.lm_head, 4)  # the embedding keeps the whole
    with pytest.raises(ValueError, match=r"lm_head\.tiles\.0\.weight' .*strata\.nn\.tile"):
        strata.wrap(model, adamw(model), **LESS)


def test_the_loss_can_be_chunked_behind_wrap(core: ModuleType) -> None:
    plain = build(llama)
    expected = train(plain, adamw(plain))
    model, optimizer = strata.wrap(*_fresh(), **LESS)
    with pytest.raises(ValueError, match="this model is wrapped"):
        strata.nn.tile(model, "lm_head", 2)
    chunk_loss(model)
    assert train(model, optimizer) == pytest.approx(expected, abs=ROUNDING)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert type(model(input_ids=tokens, labels=tokens).logits) is not torch.Tensor


def test_a_large_layer_within_a_block(core: ModuleType) -> None:
    """The block is no unit any more: its modules are, and the large one's tiles."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.up = nn.Linear(32, 2048)
            self.down = nn.Linear(2048, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(4, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def make() -> nn.Module:
        return nn.Sequential(Block(), Block())

    plain = build(make)
    expected = steps(plain, adamw(plain))
    model = build(make)
    model, optimizer = strata.wrap(model, adamw(model), **LESS)
    names = [unit.name for unit in wrapped(model).units]
    assert "0.up.tiles.0" in names
    assert "1.down.tiles.3" in names
    assert "0" not in names
    assert steps(model, optimizer) == pytest.approx(expected, abs=ROUNDING)
    assert [u.name for u in find_units(strata.unwrap(model))[0]] == ["0", "1"]


def test_a_tiled_model_can_be_copied_read_and_asked(core: ModuleType) -> None:
    plain: Any = build(llama)
    model: Any
    model, _ = strata.wrap(*_fresh(), **LESS)
    tokens = torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
        generated = [
            m.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
            for m in (model, plain)
        ]
    assert torch.equal(*generated)
    copied = copy.deepcopy(model)
    assert_same(copied, plain)
    assert torch.equal(model.lm_head.state_dict()["weight"], plain.lm_head.weight)

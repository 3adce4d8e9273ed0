"""What strata.save writes, strata.load continues from: bit for bit, whatever the budgets."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strata
import torch
from strata._runtime.wrapped import wrapped
from strata._storage import rng
from strata._storage.checkpoint import raw_bytes
from strata._storage.checkpoint_files import CheckpointError, read_manifest
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOMY = {"device": "8MiB", "host": "32MiB"}
TIGHT = {"device": "512KiB", "host": "4MiB", "ssd": "32MiB"}


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


class Case:
    """A wrapped model that trains on tokens drawn from torch's global random stream."""

    def __init__(
        self, tmp_path: Path, memory: dict[str, str], model: nn.Module, **how: Any
    ) -> None:
        self.model = model
        make = how.pop("optimizer", adamw)
        paths = {"ssd_path": tmp_path} if "ssd" in memory else {}
        self.model, self.optimizer = strata.wrap(model, make(model), memory=memory, **paths, **how)
        self.state = wrapped(self.model)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            tokens = torch.randint(0, 96, (2, 16))
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def masters(self) -> list[torch.Tensor]:
        return [self.state.read(i) for i in range(len(self.state.params))]

    def close(self) -> None:
        self.state.close()


@pytest.fixture
def make(tmp_path: Path) -> Any:
    made: list[Case] = []

    def one(memory: dict[str, str], model: nn.Module, **how: Any) -> Case:
        disk = tmp_path / f"disk{len(made)}"
        disk.mkdir()
        made.append(Case(disk, memory, model, **how))
        return made[-1]

    yield one
    for case in made:
        case.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_resumed_run_is_bitwise_equal(make: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    whole = make(ROOMY, llama(), dtype=dtype)
    torch.manual_seed(7)
    expected = whole.train(6)

    first = make(ROOMY, llama(), dtype=dtype)
    torch.manual_seed(7)
    losses = first.train(3)
    strata.save(first.model, tmp_path / "c", extra={"place": 3})
    second = make(TIGHT, llama(), dtype=dtype, page_size="64KiB")
    torch.manual_seed(1234)
    assert strata.load(second.model, tmp_path / "c") == {"place": 3}
    losses += second.train(3)
    assert losses == expected
    for one, other in zip(whole.masters(), second.masters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_continues_with_its_momentum(make: Any, tmp_path: Path, momentum: float) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    whole = make(ROOMY, llama(), optimizer=sgd)
    torch.manual_seed(7)
    expected = whole.train(4)
    first = make(ROOMY, llama(), optimizer=sgd)
    torch.manual_seed(7)
    losses = first.train(2)
    strata.save(first.model, tmp_path / "c")
    second = make(ROOMY, llama(), optimizer=sgd)
    strata.load(second.model, tmp_path / "c")
    assert losses + second.train(2) == expected


def test_frozen_parameters_buffers_and_hyperparameters(make: Any, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(32, 32, dtype=torch.bfloat16).requires_grad_(False)
            self.norm = nn.BatchNorm1d(32)
            self.out = nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(self.frozen(x.bfloat16()).float()))

    def build() -> Case:
        torch.manual_seed(0)
        return make(ROOMY, Net())

    def step(case: Case) -> None:
        case.model(torch.randn(8, 32)).square().mean().backward()
        case.optimizer.step()
        case.optimizer.zero_grad()

    first = build()
    step(first)
    first.optimizer.param_groups[0]["lr"] = 0.125
    strata.save(first.model, tmp_path / "c")
    second = build()
    strata.load(second.model, tmp_path / "c")
    assert second.optimizer.param_groups[0]["lr"] == 0.125
    assert second.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.equal(first.model.norm.running_mean, second.model.norm.running_mean)
    assert second.model.norm.num_batches_tracked.item() == 1
    for case in (first, second):
        torch.manual_seed(3)
        step(case)
    for one, other in zip(first.masters(), second.masters(), strict=True):
        assert torch.equal(one, other)


def test_random_states_continue(make: Any, tmp_path: Path) -> None:
    case = make(ROOMY, llama())
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    strata.save(case.model, tmp_path / "c")
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.rand(100)
    strata.load(case.model, tmp_path / "c")
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_another_model_is_refused_and_nothing_is_changed(make: Any, tmp_path: Path) -> None:
    strata.save(make(ROOMY, llama()).model, tmp_path / "c")
    wide = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    other = make(ROOMY, LlamaForCausalLM(wide))
    before = other.masters()
    with pytest.raises(CheckpointError) as caught:
        strata.load(other.model, tmp_path / "c")
    message = str(caught.value)
    assert "'model.embed_tokens.weight' has shape [96, 48], the model's has [96, 64]" in message
    assert "and 26 more" in message
    for one, now in zip(before, other.masters(), strict=True):
        assert torch.equal(one, now)


def test_damage_is_found_before_anything_is_changed(make: Any, tmp_path: Path) -> None:
    first = make(ROOMY, llama())
    first.train(1)
    strata.save(first.model, tmp_path / "c")
    last = tmp_path / "c" / "moments-00001.safetensors"
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    other = make(ROOMY, llama())
    before = other.masters()
    with pytest.raises(CheckpointError, match=r"moment2 of 'lm_head.weight' .* is damaged"):
        strata.load(other.model, tmp_path / "c")
    for one, now in zip(before, other.masters(), strict=True):
        assert torch.equal(one, now)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        strata.load(other.model, tmp_path / "nowhere")


def test_progress_ends_at_the_whole(make: Any, tmp_path: Path) -> None:
    case = make(ROOMY, llama())
    seen: list[tuple[int, int]] = []
    strata.save(case.model, tmp_path / "c", progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] == read_manifest(tmp_path / "c")["bytes"]
    seen.clear()
    strata.load(case.model, tmp_path / "c", progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_loads_in_transformers(make: Any, tmp_path: Path, tied: bool) -> None:
    case = make(TIGHT, llama(tie_word_embeddings=tied), dtype=torch.bfloat16)
    case.train(2)
    strata.export_safetensors(case.model, tmp_path / "out", dtype=torch.float32, shard_bytes=60_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32
    for (name, loaded), master in zip(model.named_parameters(), case.masters(), strict=True):
        assert torch.equal(loaded, master), name

    # A second export, into one file of the computation's dtype, replaces the first.
    strata.export_safetensors(case.model, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.dtype == torch.bfloat16
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        ours = case.model.eval()(input_ids=tokens).logits
        assert torch.equal(model(input_ids=tokens).logits, ours)


def test_random_states_of_gpus_are_those_of_a_run_that_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To ask for them makes a context on every GPU, which a run on the host has no use for."""
    made: list[int] = []

    def state(device: int) -> torch.Tensor:
        made.append(device)
        return torch.tensor([7, device], dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state(0), state(1)])
    assert rng.capture()["cuda"] == []
    assert made == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    captured = rng.capture()
    assert made == [0, 1]
    set_on: dict[int, list[int]] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # the run goes on with fewer
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda value, device: set_on.update({device: value.tolist()})
    )
    rng.restore(captured)
    assert set_on == {0: [7, 0]}


def test_steps_are_counted_on_from_a_checkpoint(make: Any, tmp_path: Path) -> None:
    case = make(TIGHT, llama())
    case.train(3)
    strata.save(case.model, tmp_path / "c")
    case.train(2)
    strata.load(case.model, tmp_path / "c")
    assert strata.snapshot(case.model, tmp_path / "run").wait().name == "step-000003"
    again = make(TIGHT, llama())
    again.train(1)
    strata.load(again.model, tmp_path / "c")
    again.train(1)
    assert strata.snapshot(again.model, tmp_path / "run").wait().name == "step-000004"


@pytest.mark.parametrize("kind", ["saved", "snapshot"])
def test_groups_in_another_order_are_refused(make: Any, tmp_path: Path, kind: str) -> None:
    def grouped(model: nn.Module, turned: bool = False) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups[::-1] if turned else groups)

    first = make(TIGHT, llama(), optimizer=grouped)
    first.train(1)
    if kind == "saved":
        strata.save(first.model, tmp_path / "c")
    else:
        strata.snapshot(first.model, tmp_path / "c").wait()
    other = make(TIGHT, llama(), optimizer=lambda model: grouped(model, turned=True))
    before = other.masters()
    with pytest.raises(
        CheckpointError,
        match=r"another optimizer: .* was in parameter group 0, .* wrap with weights=",
    ):
        strata.load(other.model, tmp_path / "c")
    assert all(map(torch.equal, before, other.masters()))
    strata.load(first.model, tmp_path / "c")


def test_one_element_may_have_any_stride() -> None:
    one = torch.arange(6.0)[4::3]
    assert one.stride() == (3,)
    assert b"".join(map(bytes, raw_bytes(one))) == b"".join(map(bytes, raw_bytes(one.clone())))

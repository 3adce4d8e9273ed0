"""What an error proposes would help, and what is shown of the device is all that it holds."""

import logging
from typing import Any

import pytest
import strata
import torch
from strata._cli.finetune.view import tiers_text
from strata._errors import StrataError
from strata._planning.planning import Planning
from strata._runtime.wrapped import wrapped
from strata.integrations.transformers import held
from transformers import LlamaConfig, LlamaForCausalLM


def llama(vocabulary: int, device: str) -> tuple[Any, Any]:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    memory = {"device": device, "host": "64MiB"}
    return strata.wrap(made, torch.optim.AdamW(made.parameters()), memory=memory)


def train(model: Any, optimizer: Any, buffer_bytes: int = 0) -> None:
    """Some steps; the loop has a buffer of its own beside the loss."""
    ids = torch.zeros(4, 64, dtype=torch.long)
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        buffer = torch.ones(buffer_bytes // 4)
        (loss + 0 * buffer.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("vocabulary", "buffer_bytes", "chunked"), [(8192, 0, True), (96, 24 << 20, False)]
)
def test_a_loss_without_logits_is_proposed_where_the_logits_are_what_is_too_much(
    vocabulary: int, buffer_bytes: int, chunked: bool
) -> None:
    model, optimizer = llama(vocabulary, "8MiB")
    with pytest.raises(StrataError, match="infeasible: device") as refused:
        train(model, optimizer, buffer_bytes)
    assert ("chunk_loss" in str(refused.value)) == chunked
    strata.unwrap(model)


def test_a_parameter_of_another_shape_is_told_another_way_than_one_of_another_dtype() -> None:
    model, _ = llama(96, "8MiB")
    with pytest.raises(RuntimeError, match=r"resize the model before wrap\(\)"):
        model.resize_token_embeddings(100, mean_resizing=False)
    with pytest.raises(RuntimeError, match=r"pass dtype= to wrap\(\)"):
        model.half()
    strata.unwrap(model)


def test_the_device_that_is_shown_has_the_memory_of_pytorch() -> None:
    model, optimizer = llama(96, "8MiB")
    before = held(model)
    train(model, optimizer)
    found, planning = held(model), wrapped(model).planning
    assert "strata_device_peak_gib" not in before
    assert planning is not None
    assert found["strata_device_peak_gib"] * 2**30 == planning.device_peak
    assert found["strata_device_peak_gib"] > found["strata_device_gib"]
    record = {"strata_device_gib": 30 / 1024, "strata_device_peak_gib": 191.9 / 1024}
    assert tiers_text(record, {"device": 192 << 20}) == "device 192/192 MiB (pages 30)"
    strata.unwrap(model)


def test_a_larger_budget_is_named_only_where_a_step_was_planned_with_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = llama(96, "8MiB")
    train(model, optimizer)
    planning = wrapped(model).planning
    assert planning is not None
    assert planning.current is not None
    real = Planning._plan_for
    for fits in (True, False):

        def plan_for(self: Any, trace: Any, reserve: int, size: int | None = None) -> Any:
            if size is None or not fits:  # noqa: B023
                raise StrataError("infeasible")
            return real(self, trace, reserve, size)

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "strata"):
            patch.setattr(Planning, "_plan_for", plan_for)
            caplog.clear()
            planning._check_peak(planning.current, 16 << 20)
        assert "there is no smaller plan" in caplog.text
        assert ("would do" in caplog.text) == fits
    strata.unwrap(model)

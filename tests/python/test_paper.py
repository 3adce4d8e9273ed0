"""Steps on paper: the formulas against Transformers' own model, counted on shapes and for real."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from strata import _core
from strata._cli import estimate
from strata._config.options import Options
from strata.nn.request import CHUNK_BYTES, COLUMNS_MIN
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import paper, paper_8b
from benchmarks.paper import LlamaSizes, PaperMachine, llama_trace

SIZES = LlamaSizes("toy", 3, 64, 160, 4, 2, 512)
SEQUENCE, BATCH = 32, 2
TOKENS = SEQUENCE * BATCH


def auto(trace):
    """The planner chooses all, and nothing rests on the device."""
    return _core.Wishes(on_device=[False] * len(trace.units))


def made_as(dtype):
    return Options(dtype=getattr(torch, dtype))


def config(sizes=SIZES):
    return LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )


def saved_by_units(dtype):
    """Bytes of storages that autograd really saves in each decoder layer, views counted once; what
    was there before the layer, and parameters, left out."""
    model = LlamaForCausalLM(config()).to(dtype).train()
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    current, saved, alive = [], defaultdict(int), []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if current and storage._cdata not in known:
            known.add(storage._cdata)
            alive.append(tensor)
            saved[current[-1]] += storage.nbytes()
        return tensor

    def enter(module, args, kwargs, name):
        given = [*args, *kwargs.values(), *kwargs.get("position_embeddings", ())]
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        known.update(t.untyped_storage()._cdata for t in tensors)
        alive.extend(tensors)
        current.append(name)

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(
            lambda m, a, k, i=i: enter(m, a, k, f"model.layers.{i}"), with_kwargs=True
        )
        layer.register_forward_hook(lambda *_: current.clear())
    ids = torch.randint(SIZES.vocabulary, (BATCH, SEQUENCE))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return dict(saved)


def counted(dtype):
    room = dict.fromkeys(("device", "host", "ssd"), 1 << 50)
    return estimate.count(estimate.Step(config(), BATCH, SEQUENCE, room, "host", made_as(dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_block_saves_is_what_autograd_really_saves(dtype):
    real = saved_by_units(getattr(torch, dtype))
    _, step = counted(dtype)
    on_paper = paper.block_saved_bytes(SIZES, TOKENS, 2 if dtype == "bfloat16" else 4)
    for u, unit in enumerate(step.units):
        if not unit.name.startswith("model.layers"):
            continue
        saved = (step.tensors[number] for number in step.saved)
        here = sum(t.bytes for t in saved if t.unit == u and not t.input)
        assert here == real[unit.name] == on_paper


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_formulas_agree_with_the_counted_step(dtype):
    _, step = counted(dtype)
    trace = llama_trace(SIZES, TOKENS, SEQUENCE, 1.0, 2 if dtype == "bfloat16" else 4)
    # The last norm and the ends of the model are so small here that they may share a unit.
    blocks = {u for u, unit in enumerate(step.units) if unit.name.startswith("model.layers")}
    names = [unit.name for unit in trace.units]
    for use in step.uses:
        if use.unit not in blocks:
            continue
        u = names.index(step.units[use.unit].name)
        found = next(x for x in trace.uses if x.unit == u and x.backward == use.backward)
        assert found.seconds == pytest.approx(use.flops, rel=0.02)
        grown = found.peak_bytes - found.live_bytes
        assert grown == pytest.approx(use.peak_bytes - use.live_bytes, rel=0.35)


@pytest.mark.thorough
def test_a_loss_without_logits_agrees_with_the_counted_step():
    """Of a vocabulary so large that the head's matrix is more than a few chunks of logits."""
    sizes = replace(SIZES, vocabulary=1 << 22)
    room = dict.fromkeys(("device", "host", "ssd"), 1 << 50)
    tokens = SEQUENCE * 64
    _, step = estimate.count(
        estimate.Step(config(sizes), 64, SEQUENCE, room, "host", made_as("bfloat16"))
    )
    trace = llama_trace(sizes, tokens, SEQUENCE, 1.0, chunked_loss=True)
    assert paper.LOGITS_BYTES == CHUNK_BYTES
    assert COLUMNS_MIN["cuda"] == paper.LOGITS_COLUMNS
    for backward in (False, True):
        use = next(
            u for u in step.uses if step.units[u.unit].name == "lm_head" and u.backward == backward
        )
        found = next(
            u
            for u in trace.uses
            if trace.units[u.unit].name == "lm_head" and u.backward == backward
        )
        assert found.seconds == pytest.approx(use.flops, rel=0.02)
        grown = found.peak_bytes - found.live_bytes
        assert grown == pytest.approx(use.peak_bytes - use.live_bytes, rel=0.35)


def test_the_arithmetic_of_a_step_is_what_kept_activations_compute():
    trace = llama_trace(SIZES, TOKENS, SEQUENCE, 1.0)
    computed = sum(use.seconds for use in trace.uses)
    assert paper.model_flops(SIZES, TOKENS, SEQUENCE) == pytest.approx(computed)


def test_parameters_are_those_of_the_model():
    model = LlamaForCausalLM(config())
    assert SIZES.parameters == sum(p.numel() for p in model.parameters())
    trace = llama_trace(SIZES, TOKENS, SEQUENCE, 1.0)
    assert sum(unit.elements for unit in trace.units) == SIZES.parameters
    assert paper.LLAMA_7B.parameters == 6_738_415_616
    assert paper.LLAMA_70B.parameters == 68_976_648_192


def test_a_trace_on_paper_holds_together():
    trace = llama_trace(SIZES, TOKENS, SEQUENCE, 1e9)
    assert _core.check_trace(trace) == ""
    assert trace.units[1].slices_max == BATCH
    with pytest.raises(ValueError, match="65 tokens are not a number of sequences of 32"):
        llama_trace(SIZES, 65, SEQUENCE, 1e9)


def machine(ssds=1, link=25e9, device=80 * 10**9):
    return PaperMachine("paper", device, 4e14, link, 256 * 10**9, 200e9, ssds)


def test_the_smallest_machine_is_refused_and_told_what_would_do():
    trace = llama_trace(paper.LLAMA_7B, 16384, 2048, 4e14)
    small = machine(device=2 * 10**9)
    plan = _core.PaperPlan(trace, small.costs(), small.budgets(), auto(trace)).plan
    assert not plan.feasible
    enough = small.budgets().replace(device_bytes=plan.device_bytes_min)
    assert _core.PaperPlan(trace, small.costs(), enough, auto(trace)).plan.feasible


def test_a_device_that_has_room_holds_what_host_memory_cannot():
    trace = llama_trace(paper.LLAMA_7B, 2048, 2048, 4e14)
    some = replace(machine(ssds=0), host_bytes=64 * 10**9)

    def planned(wishes):
        return _core.PaperPlan(trace, some.costs(), some.budgets(), wishes)

    # 14 bytes of each parameter, in host memory alone.
    assert not planned(auto(trace)).plan.feasible
    found = planned(_core.Wishes())
    assert found.check() == ""
    held = found.plan.resting_device_bytes + found.plan.resting_host_bytes
    assert held >= 14 * paper.LLAMA_7B.parameters


def test_a_long_batch_of_8_billion_fits_24_gb_of_one_gpu():
    """Its layers' inputs alone are 17 GB: they wait in host memory."""
    found = paper_8b.step()
    assert found.feasible, found.refusal
    assert paper_8b.mfu(found) >= paper_8b.MFU_MIN
    assert found.plan.peaks["device"].bytes <= paper_8b.DEVICE_BYTES
    assert "recompute_host" in {unit.activation for unit in found.plan.units}
    assert "limited by" in found.limited


def test_a_faster_machine_is_never_slower():
    trace = llama_trace(replace(paper.LLAMA_70B, layers=16), 16384, 2048, 4e14)

    def seconds(some):
        some = replace(some, host_bytes=32 * 10**9)
        found = _core.PaperPlan(trace, some.costs(), some.budgets(), auto(trace))
        assert found.check() == ""
        step = found.simulate().step_seconds
        assert found.bound().seconds <= step * (1 + 1e-9)
        return step

    by_disks = [seconds(machine(ssds)) for ssds in (1, 2, 4)]
    assert by_disks == sorted(by_disks, reverse=True)
    assert by_disks[0] > 1.5 * by_disks[1]  # states on one disk are what this step waits for

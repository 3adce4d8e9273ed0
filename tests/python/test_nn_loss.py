"""The chunked loss: the numbers of plain PyTorch, with a part of the memory."""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_models import gpt2, llama
from strata._profiling.memory_curve import MemoryCurve
from strata._torch_compat import FakeTensorMode
from strata.nn import ChunkedCrossEntropy, TiledLinear, chunk_loss, products, unchunk_loss
from strata.nn.request import Request, _chunks
from tiled_layers import gradients, heads
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, T5Config, T5ForConditionalGeneration


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_the_loss_is_that_of_plain_pytorch(reduction: str, smoothing: float, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(12, 300, bias=bias).double()
    x = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 300, (3, 7))
    targets[0, :3] = -100
    options: Any = {"label_smoothing": smoothing, "reduction": reduction}
    plain = F.cross_entropy(linear(x).flatten(0, 1), targets.flatten(), **options)
    expected = gradients(plain, linear, x)
    for head in heads(linear):
        # 64 columns at a time, the fewest.
        loss = ChunkedCrossEntropy(**options, chunk_bytes=1)(x, head, targets)
        assert loss.item() == pytest.approx(plain.item(), rel=1e-12)
        found = gradients(loss, head, x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradcheck(smoothing: float) -> None:
    torch.manual_seed(0)
    head = TiledLinear.from_linear(nn.Linear(3, 70).double(), 2)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 69, -100, 35])
    criterion = ChunkedCrossEntropy(label_smoothing=smoothing, chunk_bytes=1)
    parameters = list(head.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: criterion(x, head, targets), (x, *parameters))


def test_bfloat16_is_as_near_to_the_truth_as_plain_pytorch() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 1000, bias=False)
    short = copy.deepcopy(linear).bfloat16()
    x = torch.randn(128, 64).bfloat16().requires_grad_()
    targets = torch.randint(0, 1000, (128,))
    exact_head = copy.deepcopy(short).double()
    y = x.detach().double().requires_grad_()
    exact = gradients(F.cross_entropy(exact_head(y), targets), exact_head, y)
    plain = gradients(F.cross_entropy(short(x).float(), targets), short, x)
    for head in heads(short):
        loss = ChunkedCrossEntropy(chunk_bytes=1)(x, head, targets)
        assert loss.dtype == torch.float32
        found = gradients(loss, head, x)
        for name in ("weight", "x"):
            off = [(g[name] - exact[name]).norm() for g in (found, plain)]
            assert off[0] <= 1.5 * off[1], name


def test_autocast_computes_as_the_layer_would() -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 200)
    x = torch.randn(9, 16, requires_grad=True)
    targets = torch.randint(0, 200, (9,))
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.cross_entropy(head(x), targets)
        loss = ChunkedCrossEntropy()(x, head, targets)
    expected, found = gradients(plain, head, x), gradients(loss, head, x)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-2)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=2e-3)
    assert found["weight"].dtype == torch.float32


def test_edges_of_the_loss() -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 70)
    x = torch.randn(3, 4, requires_grad=True)
    nothing = torch.full((3,), -100)
    assert ChunkedCrossEntropy()(x, head, nothing).isnan()  # as F.cross_entropy
    assert ChunkedCrossEntropy(reduction="sum")(x, head, nothing).item() == 0.0
    other = ChunkedCrossEntropy(ignore_index=5)(x, head, torch.tensor([5, 1, 5]))
    assert other.item() == pytest.approx(F.cross_entropy(head(x)[1:2], torch.tensor([1])).item())
    head.requires_grad_(False)
    ChunkedCrossEntropy()(x, head, torch.tensor([1, 2, 3])).backward()
    assert x.grad is not None
    assert head.weight.grad is None
    with torch.no_grad():
        assert not ChunkedCrossEntropy()(x, head, torch.tensor([1, 2, 3])).requires_grad


def test_bad_input_of_the_loss() -> None:
    head, x = nn.Linear(4, 70), torch.randn(3, 4)
    criterion, targets = ChunkedCrossEntropy(), torch.tensor([1, 2, 3])
    for wrong in (70, -1):
        with pytest.raises(IndexError, match=f"a target is {wrong}, and must be from 0 to 69"):
            criterion(x, head, torch.tensor([1, wrong, -100]))
    with pytest.raises(ValueError, match=r"\(3, 5\) do not fit a head of 4 features"):
        criterion(torch.randn(3, 5), head, targets)
    with pytest.raises(ValueError, match=r"targets of shape \(2,\) do not fit"):
        criterion(x, head, targets[:2])
    with pytest.raises(TypeError, match=r"whole numbers, not torch\.float32"):
        criterion(x, head, targets.float())
    with pytest.raises(TypeError, match=r"float64 and the head is torch\.float32"):
        criterion(x.double(), head, targets)
    with pytest.raises(TypeError, match="Bilinear may do more"):
        criterion(x, nn.Bilinear(4, 4, 4), targets)

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input * 2)

    with pytest.raises(TypeError, match="Doubled may do more"):
        criterion(x, Doubled(4, 70), targets)
    for options in ({"reduction": "none"}, {"label_smoothing": 1.5}, {"chunk_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ChunkedCrossEntropy(**options)  # type: ignore[arg-type]


def peak_of(step: Callable[[], torch.Tensor]) -> int:
    """The most bytes that PyTorch holds during a forward and backward."""
    curve = MemoryCurve.start()
    assert curve is not None
    step().backward()
    curve.stop()
    return curve.peak(0.0, float("inf"))


def test_less_memory_than_one_matrix_of_logits() -> None:
    torch.manual_seed(0)
    tokens, columns = 512, 32_000
    linear = nn.Linear(32, columns, bias=False)
    x = torch.randn(tokens, 32, requires_grad=True)
    targets = torch.randint(0, columns, (tokens,))
    logits = 4 * tokens * columns
    criterion = ChunkedCrossEntropy(chunk_bytes=4 << 20)
    ours = [peak_of(lambda head=head: criterion(x, head, targets)) for head in heads(linear)]
    plain = peak_of(lambda: F.cross_entropy(linear(x), targets))
    weight = linear.weight.nbytes  # its gradient is there in any case
    assert plain > 2 * logits
    assert max(ours) < logits / 2 + weight


class Writes(TorchDispatchMode):
    """Counts the operations that write something of a shape, but for those that make it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape and not func.is_view:
            self.names.append(str(func).removeprefix("aten."))
        return out


CHUNKS = 5


def writes_of_backward(dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """What writes something as large as the hidden states, and as the weight's part of a chunk."""
    torch.manual_seed(0)
    head = nn.Linear(12, 64 * CHUNKS, bias=True).to(dtype)
    x = torch.randn(9, 12).requires_grad_()
    lse, picked = Request(x, torch.arange(9), chunk_bytes=1).answer(head.weight, head.bias)
    loss = (lse - picked).sum()
    with Writes((9, 12)) as hidden, Writes((64, 12)) as weight:
        loss.backward()
    return hidden.names, weight.names


def test_a_chunk_passes_once_over_the_gradients() -> None:
    hidden, weight = writes_of_backward(torch.float32)
    assert hidden == ["zeros_like.default"] + ["addmm_.default"] * CHUNKS
    assert weight == ["mm.out"] * CHUNKS


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host that knows `out_dtype` as a GPU does: 16-bit factors, float32 sums."""
    library = torch.library.Library("aten", "IMPL")

    def mm(left: Any, right: Any, out_dtype: torch.dtype) -> torch.Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            return left.to(out_dtype) @ right.to(out_dtype)

    def mm_out(left: Any, right: Any, out_dtype: torch.dtype, *, out: Any) -> torch.Tensor:
        assert out.dtype == out_dtype
        return out.copy_(mm(left, right, out_dtype))

    def addmm_out(
        total: Any, left: Any, right: Any, out_dtype: torch.dtype, *, out: Any, **_: Any
    ) -> torch.Tensor:
        assert total.data_ptr() == out.data_ptr()
        assert out.dtype == out_dtype
        return out.add_(mm(left, right, out_dtype))

    for name, kernel in (
        ("mm.dtype", mm),
        ("mm.dtype_out", mm_out),
        ("addmm.dtype_out", addmm_out),
    ):
        library.impl(name, kernel, "CPU")
    monkeypatch.setattr(products, "OUT_DTYPE", {"cuda", "cpu"})
    yield
    library._destroy()


def test_a_device_that_widens_rounds_nothing_on_the_way(widening: None) -> None:
    hidden, weight = writes_of_backward(torch.bfloat16)
    assert [name for name in hidden if name.startswith(("mm", "add"))] == (
        ["addmm.dtype_out"] * CHUNKS
    )
    assert weight.count("mm.out") == CHUNKS  # the parameter's own dtype: rounded once
    torch.manual_seed(0)
    head = nn.Linear(64, 1000).bfloat16()
    x = torch.randn(128, 64).bfloat16().float().requires_grad_()
    targets = torch.randint(0, 1000, (128,))
    exact = copy.deepcopy(head).double()
    y = x.detach().double().requires_grad_()
    expected = F.cross_entropy(exact(y), targets)
    loss = ChunkedCrossEntropy(chunk_bytes=1)(x.bfloat16(), head, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the logits: float32 as well
    with torch.autocast("cpu", torch.bfloat16):  # a float32 weight gets float32 sums
        wide = copy.deepcopy(head).float()
        found = gradients(ChunkedCrossEntropy(chunk_bytes=1)(x, wide, targets), wide, x)
    off = found["weight"] - gradients(expected, exact, y)["weight"]
    assert off.norm() < 2e-3 * found["weight"].norm()


def test_a_gpu_gets_chunks_that_it_multiplies_faster_than_it_reads() -> None:
    """65,536 tokens of Llama 3's head, and 2,048 tokens, whose chunks were as wide before."""
    with FakeTensorMode():
        weight = torch.empty(128_256, 4096, dtype=torch.bfloat16)
        for device, tokens, chosen, columns in (
            ("cuda", 65_536, None, 1024),
            ("cuda", 2048, None, 4096),
            ("cuda", 2048, 1, 64),  # what a user says holds
            ("cpu", 65_536, None, 128),
            ("cpu", 2048, None, 4096),
        ):
            states = torch.empty(tokens, 4096, dtype=torch.bfloat16, device=device)
            request = Request(states, torch.empty(tokens), chunk_bytes=chosen)
            chunks = list(_chunks(states, weight, request))
            assert chunks[0] == (0, columns)
            assert chunks[-1][1] == 128_256
            assert all(end == begin for (_, end), (begin, _) in pairwise(chunks))


# Transformers' models ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_models_own_loss_without_logits(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    model.eval()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    chunk_loss(model)
    chunk_loss(model)  # again: nothing
    assert list(model.state_dict()) == names
    tokens = torch.randint(0, 64, (2, 9))
    labels = tokens.masked_fill(torch.rand(2, 9) < 0.3, -100)
    for given in ({"labels": labels}, {"labels": labels, "num_items_in_batch": 5}):
        losses = [m(input_ids=tokens, **given).loss for m in (plain, model)]
        assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-6)
        for loss in losses:
            loss.backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    shifted = {"labels": labels, "shift_labels": labels.roll(1, 1)}
    losses = [m(input_ids=tokens, **shifted).loss for m in (plain, model)]
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-6)
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    output = model(input_ids=tokens, labels=labels)
    for use in (lambda z: z.argmax(-1), lambda z: z / 2, torch.tanh, lambda z: z[0]):
        with pytest.raises((RuntimeError, AttributeError), match="without labels"):
            use(output.logits)


def test_copies_and_the_way_back() -> None:
    torch.manual_seed(0)
    model = llama()
    tokens = torch.randint(0, 64, (2, 9))
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    chunk_loss(model)
    other = copy.deepcopy(model)
    unchunk_loss(model)
    unchunk_loss(model)
    assert model(input_ids=tokens, labels=tokens).logits.shape == (2, 9, 64)
    again = other(input_ids=tokens, labels=tokens)
    assert again.loss.item() == pytest.approx(expected, abs=1e-6)
    assert type(again.logits) is not torch.Tensor
    unchunk_loss(other)
    assert other(input_ids=tokens, labels=tokens).logits.shape == (2, 9, 64)


def test_models_whose_loss_is_something_else_are_refused() -> None:
    tiny: Any = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    capped = Gemma2ForCausalLM(
        Gemma2Config(
            **tiny, hidden_size=16, intermediate_size=16, num_key_value_heads=1, head_dim=8
        )
    )
    with pytest.raises(ValueError, match=r"changes its logits.*final_logit_softcapping"):
        chunk_loss(capped)
    capped.config.final_logit_softcapping = None
    chunk_loss(capped)
    capped.config.final_logit_softcapping = 30.0  # told by the first use at the latest
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(RuntimeError, match="chunk_loss"):
        capped(input_ids=tokens, labels=tokens)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    )
    for model in (t5, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="no causal language model"):
            chunk_loss(model)
    other = llama()
    other.loss_function = lambda **_: torch.zeros(())
    with pytest.raises(ValueError, match="the loss of LlamaForCausalLM is <lambda>"):
        chunk_loss(other)

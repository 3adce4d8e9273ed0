"""Modules of many kinds: recurrent, convolutional, lazy, scripted, with parameters in lists."""

from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

HABITS = Habits()


@HABITS.add
def packed_sequences(run: Run) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
            self.rnn.flatten_parameters()

        def forward(self, x: torch.Tensor) -> Any:
            lengths = torch.tensor([3, 2])
            packed = pack_padded_sequence(x.view(2, 3, WIDTH), lengths, batch_first=True)
            out, (hidden, _) = self.rnn(packed)
            padded, _ = pad_packed_sequence(out, batch_first=True)
            return x + padded.reshape(6, WIDTH) + hidden[-1].mean(0)

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, packed: Any) -> Any:
            return self.gru(packed)

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__(Recurrent, 1)
            self.last = Passes()

        def forward(self, x: torch.Tensor) -> Any:
            x = self.blocks[0](self.stem(x)).view(2, 3, WIDTH)
            packed = pack_padded_sequence(x, torch.tensor([3, 1]), batch_first=True)
            return self.head(self.last(packed)[1][0])

    run.train(*run.wrap(Outer()))


@HABITS.add
def parameters_in_lists_and_dicts(run: Run) -> None:
    class Lists(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList(torch.ones(WIDTH) * i for i in (1, 2, 3))
            self.tasks = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for gain, block in zip(self.gains, self.blocks, strict=True):
                x = block(x * gain)
            return self.head(x) + self.tasks["a" if len(x) % 2 else "b"]

    run.train(*run.wrap(Lists()), lambda m, i: m(batch(i, 5 + i % 2)).square().mean())


@HABITS.add
def mapped_over_stacked_weights(run: Run) -> None:
    """An ensemble in one parameter, by vmap within the forward."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(0.1 * torch.randn(3, WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            return x + torch.vmap(F.linear, (None, 0))(x, self.weights).tanh().mean(0)

    run.train(*run.wrap(Net(Ensemble, 2)))


@torch.jit.script
def scripted(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + bias) * 0.5


@HABITS.add
def scripted_functions(run: Run) -> None:
    class Scripted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            return x + scripted(self.inner(x), self.bias)

    run.train(*run.wrap(Net(Scripted)))


@HABITS.add
def lazy_modules_after_a_dry_run(run: Run) -> None:
    plain = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.LazyLinear(4))
    plain(batch(0))
    run.train(*run.wrap(plain))


@HABITS.add
def spectra_and_double_precision(run: Run) -> None:
    class Fourier(Block):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

        def forward(self, x: torch.Tensor) -> Any:
            spectrum = torch.fft.rfft(self.inner(x)) * torch.view_as_complex(self.filter)
            x = x + torch.fft.irfft(spectrum, n=WIDTH)
            return x + (x.double() - x.double().mean()).tanh().float() * 0.1

    run.train(*run.wrap(Net(Fourier)))


@HABITS.add
def images(run: Run) -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
            self.norm = nn.GroupNorm(2, 8)
            self.squeeze = nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> Any:
            y = F.silu(self.norm(self.conv(x)), inplace=True)
            return x + y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 8, 3, 2, 1)
            self.stages = nn.Sequential(*[Stage() for _ in range(3)])
            self.head = nn.ConvTranspose2d(8, 1, 2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            x = x.view(-1, 1, 4, 8).to(memory_format=torch.channels_last)
            return self.head(self.stages(self.stem(x)))

    run.train(*run.wrap(Images()))


@HABITS.add
def masked_attention(run: Run) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor, padding: Any = None, need: bool = False) -> Any:
            mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
            y, weights = self.attention(
                x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=need
            )
            self.weights = None if weights is None else weights.detach()
            return self.norm(x + y)

    class Tokens(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x).view(2, 3, WIDTH)
            padding = torch.tensor([[False, False, True], [False, False, False]])
            for i, block in enumerate(self.blocks):
                x = block(x, padding, need=i == 1)
            return self.head(x)

    model, optimizer = run.wrap(Tokens(Attends))
    run.train(model, optimizer, then=lambda step: run.note(model.blocks[1].weights))


@HABITS.add
def embeddings_with_padding(run: Run) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH, padding_idx=0)
            self.bag = nn.EmbeddingBag(20, WIDTH, mode="mean")
            self.net = Net()

        def forward(self, ids: torch.Tensor) -> Any:
            return self.net(self.embed(ids).mean(1) + self.bag(ids))

    ids = torch.randint(0, 20, (6, 5), generator=torch.Generator().manual_seed(1))
    run.train(*run.wrap(Text()), lambda m, i: (m(ids.roll(i, 1)) - 1).square().mean())


@HABITS.add
def pruned_after_wrapping(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=1)
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.3)
    run.train(model, optimizer, steps=2)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


@HABITS.add
def parametrised_after_wrapping(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=1)
    parametrize.register_parametrization(model.stem, "weight", Symmetric())
    run.train(model, optimizer, steps=2)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_modules(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)

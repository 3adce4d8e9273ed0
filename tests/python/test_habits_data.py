"""What people do with parameters outside of a forward: averages, copies, swaps, clipping, logging,
pruning, parametrisations."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters

HABITS = Habits()


def values(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@HABITS.add
def two_parameters_exchange_their_data(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def swap(step: int) -> None:
        a, b = model.blocks[0].up.weight, model.blocks[2].up.weight
        a.data, b.data = b.data, a.data

    run.train(model, optimizer, then=swap)


@HABITS.add
def detached_values_that_are_kept(run: Run) -> None:
    """They share the parameter's memory, and so see its updates."""
    model, optimizer = run.wrap(Net())
    kept = {name: p.detach() for name, p in model.named_parameters()}
    views = [p.data for p in model.parameters()]

    def look(step: int) -> None:
        run.note([kept[name].norm() for name in kept], [v.sum() for v in views])
        run.note(all(torch.equal(p, kept[name]) for name, p in model.named_parameters()))

    run.train(model, optimizer, then=look)


@HABITS.add
def critic_with_clipped_weights(run: Run) -> None:
    """WGAN: p.data.clamp_."""
    model, optimizer = run.wrap(Net())

    def clip(step: int) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)

    run.train(model, optimizer, then=clip)


@HABITS.add
def rows_of_bounded_norm(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    @torch.no_grad()
    def clip(step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                norm = module.weight.norm(2, 1, keepdim=True)
                module.weight.mul_(norm.clamp(max=0.5) / norm)
                module.weight.data = module.weight.data.renorm(2, 0, 0.45)

    run.train(model, optimizer, then=clip)


@HABITS.add
def initialised_after_wrapping(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.constant_(module.bias, 0.01)
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(0.9)
            module.bias.data.zero_()

    model.apply(start)
    nn.init.orthogonal_(model.head.weight)
    model.stem.weight.data.copy_(torch.eye(WIDTH))
    model.stem.weight.data.normal_(mean=0.0, std=0.1)
    run.note(values(model))
    run.train(model, optimizer)


@HABITS.add
def reset_parameters_in_the_middle(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def reset(step: int) -> None:
        model.blocks[step % 3].up.reset_parameters()
        with torch.no_grad():
            model.head.weight[:2] = 0.0
            model.head.bias += 0.1
            model.stem.weight *= 0.9

    run.train(model, optimizer, then=reset)


@HABITS.add
def noise_on_weights_and_back(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def perturbed(m: Any, step: int) -> torch.Tensor:
        noise = [0.01 * torch.randn_like(p) for p in m.parameters()]
        with torch.no_grad():
            for p, n in zip(m.parameters(), noise, strict=True):
                p.add_(n)
            run.note(mean_loss(m, step))
            for p, n in zip(m.parameters(), noise, strict=True):
                p.sub_(n)
        return mean_loss(m, step)

    run.train(model, optimizer, perturbed)


@HABITS.add
def lists_of_parameters(run: Run) -> None:
    """torch._foreach_*: reads and writes."""
    model, optimizer = run.wrap(Net())
    copies = values(model)

    @torch.no_grad()
    def touch(step: int) -> None:
        params = list(model.parameters())
        run.note(torch._foreach_norm(params))
        run.note(torch._foreach_mul(params, 0.5))
        torch._foreach_copy_(copies, params)
        torch._foreach_mul_(params, 0.99)
        torch._foreach_lerp_(params, copies, 0.5)
        torch._foreach_add_(params, torch._foreach_sub(copies, params), alpha=0.1)

    run.train(model, optimizer, then=touch)


@HABITS.add
def one_vector_and_back(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def turn(step: int) -> None:
        vector = parameters_to_vector(model.parameters())
        flat = torch.cat([p.data.view(-1) for p in model.parameters()])
        run.note(vector, torch.equal(vector, flat))
        vector_to_parameters(vector * 0.98, model.parameters())

    run.train(model, optimizer, then=turn)


@HABITS.add
def reads_of_every_kind(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def read(step: int) -> None:
        weight = model.blocks[1].up.weight
        run.note(weight.detach().numpy().mean().item(), weight.data.numpy().std().item())
        run.note(
            weight.detach().cpu().numpy().tobytes() == weight.detach().clone().numpy().tobytes()
        )
        run.note(
            torch.histc(weight.detach(), 10), np.histogram(weight.detach().numpy(), 5)[0].tolist()
        )
        run.note(weight.tolist()[0], weight[0, 0].item(), float(weight.sum()), weight.max(1))
        run.note(
            torch.linalg.svdvals(weight.data), weight.data.quantile(0.9), weight.data.sort()[0]
        )
        run.note(sum(p.numel() for p in model.parameters()), weight.shape, weight.stride())
        run.note(str(weight.device), str(weight.dtype), weight.is_leaf, weight.is_contiguous())
        run.note(copy.deepcopy(weight), type(copy.deepcopy(weight)) is nn.Parameter)
        run.note(
            torch.stack([p.norm() for p in model.parameters()]), torch.zeros(3).copy_(weight[0, :3])
        )
        run.note(sum((p**2).sum() for p in model.parameters()), bool((weight == weight).all()))
        run.note(repr(weight)[:60], len(weight), [row.sum() for row in weight][:3])
        run.note(torch.allclose(weight, weight.clone()), weight in set(model.parameters()))

    run.train(model, optimizer, then=read)


@HABITS.add
def pruning_before_wrapping(run: Run) -> None:
    plain = Net()
    for block in plain.blocks:
        prune.l1_unstructured(block.up, "weight", amount=0.3)
    run.train(*run.wrap(plain))


@HABITS.add
def magnitude_masks_by_hand(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    @torch.no_grad()
    def mask(step: int) -> None:
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(p.abs() > p.abs().flatten().kthvalue(p.numel() // 4).values)

    run.train(model, optimizer, then=mask)
    run.note(sum(int((p == 0).sum()) for p in model.parameters()))


@HABITS.add
def parametrised_weights(run: Run) -> None:
    plain = Net()
    parametrizations.weight_norm(plain.blocks[0].up)
    parametrizations.spectral_norm(plain.blocks[1].up)
    parametrizations.orthogonal(plain.blocks[2].down)
    run.train(*run.wrap(plain))


@HABITS.add
def spectral_norm_by_hooks(run: Run) -> None:
    plain = Net()
    nn.utils.spectral_norm(plain.blocks[0].up)
    nn.utils.spectral_norm(plain.head)
    run.train(*run.wrap(plain))


@HABITS.add
def adapters_merged_by_hand(run: Run) -> None:
    """LoRA of one's own: merged for evaluation, and taken out again."""

    class Lora(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.requires_grad_(False)
            self.a = nn.Parameter(0.1 * torch.randn(4, WIDTH))
            self.b = nn.Parameter(torch.zeros(2 * WIDTH, 4))

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            return self.down(F.gelu(self.up(h) + h @ self.a.t() @ self.b.t()))

    model, optimizer = run.wrap(Net(Lora))

    @torch.no_grad()
    def merge(step: int) -> None:
        for sign in (1, -1):
            for block in model.blocks:
                block.up.weight.data += sign * (block.b @ block.a)
            run.note(model.blocks[0].up.weight.norm(), model(batch(7)))

    run.train(model, optimizer, then=merge)


@HABITS.add
def moved_where_it_is(run: Run) -> None:
    """.to(device), .float(), .cpu(): nothing to be done."""
    model, optimizer = run.wrap(Net())
    model = model.to("cpu").float().cpu().to(torch.float32).train()
    run.note(next(model.parameters()).device.type, str(next(model.parameters()).dtype))
    run.train(model, optimizer)


@HABITS.add_with(early="refused")
def descent_by_hand(run: Run) -> None:
    """Without an optimizer's step: p.data.sub_(lr * p.grad)."""
    model, _ = run.wrap(Net())
    for step in range(3):
        loss = mean_loss(model, step)
        loss.backward()
        run.note(loss)
        for p in model.parameters():
            p.data.sub_(0.05 * p.grad.data)
        model.zero_grad()


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_data(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)

"""What people do between backward() and step(): gradients clipped, changed, compared and penalised,
and several backwards in a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

HABITS = Habits()


def edited(run: Run, edit: Any) -> None:
    """The plain loop, with a change of the gradients before each step."""
    model, optimizer = run.wrap(Net())
    for step in range(3):
        loss = mean_loss(model, step)
        loss.backward()
        edit(model, step)
        run.note(loss)
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add_with(early="refused")
def clipped_by_norm_and_value(run: Run) -> None:
    def edit(model: Any, step: int) -> None:
        run.note(clip_grad_norm_(model.parameters(), 0.5))
        run.note(clip_grad_norm_(model.blocks[1].parameters(), 0.05, norm_type=float("inf")))
        clip_grad_value_(model.head.parameters(), 0.01)
        if step == 2:
            total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)

    edited(run, edit)


@HABITS.add_with(early="refused")
def clipped_by_hand(run: Run) -> None:
    """Adaptive clipping: each row by the norm of its weights."""

    def edit(model: Any, step: int) -> None:
        for p in model.parameters():
            if p.dim() > 1:
                bound = p.detach().norm(2, 1, keepdim=True).clamp(min=1e-3) * 0.05
                norm = p.grad.norm(2, 1, keepdim=True)
                p.grad.copy_(torch.where(norm > bound, p.grad * bound / norm, p.grad))

    edited(run, edit)


@HABITS.add_with(early="refused")
def edits_of_every_kind(run: Run) -> None:
    def edit(model: Any, step: int) -> None:
        model.stem.weight.grad.mul_(0.5)
        model.stem.bias.grad.clamp_(-1e-3, 1e-3)
        model.head.weight.grad += 1e-3 * torch.randn_like(model.head.weight)
        model.head.bias.grad.data.add_(1e-3)
        centred = model.blocks[0].up.weight.grad
        centred.sub_(centred.mean(1, keepdim=True))
        model.blocks[0].down.weight.grad = torch.sign(model.blocks[0].down.weight.grad)
        model.blocks[1].up.weight.grad = None
        model.blocks[1].up.bias.grad.zero_()
        model.blocks[2].up.weight.grad[:3] = 0
        model.blocks[2].norm.weight.grad.data = model.blocks[2].norm.weight.grad.data * 2
        torch._foreach_mul_([p.grad for p in model.blocks[2].parameters()], 0.9)

    edited(run, edit)


@HABITS.add_with(early="refused")
def gradients_logged(run: Run) -> None:
    def edit(model: Any, step: int) -> None:
        for p in model.parameters():
            run.note(p.grad.norm(), p.grad.abs().max().item(), p.grad.mean(), tuple(p.grad.shape))
            run.note(torch.histc(p.grad, 5), p.grad.detach().numpy().std().item())
            run.note((p.grad.norm() / p.norm()).item(), bool(p.grad.isnan().any()))
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        run.note(flat, F.cosine_similarity(flat, flat.roll(1), 0))

    edited(run, edit)


@HABITS.add_with(early="refused")
def sharpness_aware_steps(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        mean_loss(model, step).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * 0.05 / (norm + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = mean_loss(model, step)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        run.note(loss)
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add_with(early="refused")
def accumulated(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(6):
        loss = mean_loss(model, step) / 3
        loss.backward()
        run.note(loss)
        if step % 3 == 2:
            run.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()


@HABITS.add_with(early="refused")
def two_losses_of_one_graph(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        out = model(batch(step))
        first, second = (out - 1).square().mean(), out.abs().mean()
        first.backward(retain_graph=True)
        run.note_gradients(model)
        second.backward()
        run.note_gradients(model)
        run.note(first, second)
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add_with(early="refused")
def conflicts_projected_out(run: Run) -> None:
    """PCGrad: gradients of two tasks, one after the other."""
    model, optimizer = run.wrap(Net())
    params = list(model.parameters())
    for step in range(3):
        found = []
        for task in range(2):
            optimizer.zero_grad()
            (model(batch(step))[:, task] - task).square().mean().backward()
            found.append([p.grad.clone() for p in params])
        dot = sum((a * b).sum() for a, b in zip(*found, strict=True))
        size = sum(b.square().sum() for b in found[1])
        for p, a, b in zip(params, *found, strict=True):
            p.grad = a + b - min(dot, torch.zeros(())) / size * b
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add
def gradients_by_autograd_grad(run: Run) -> None:
    """Two tasks weighted by the norms of their gradients at a shared layer (GradNorm)."""
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        out = m(batch(step))
        losses = [(out[:, :2] - 1).square().mean(), out[:, 2:].abs().mean()]
        norms = [
            torch.autograd.grad(loss, m.blocks[2].down.weight, retain_graph=True)[0].norm()
            for loss in losses
        ]
        run.note(norms)
        return sum(loss / norm.clamp(min=0.1) for loss, norm in zip(losses, norms, strict=True))

    run.train(model, optimizer, loss_of)


@HABITS.add_with(early="perhaps")
def penalty_on_gradients_of_inputs(run: Run) -> None:
    """WGAN-GP, R1: create_graph."""
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        x = batch(step).requires_grad_(True)
        score = m(x).sum()
        (grad,) = torch.autograd.grad(score, x, create_graph=True)
        return (m(x) - 1).square().mean() + 0.1 * (grad.norm(2, 1) - 1).square().mean()

    run.train(model, optimizer, loss_of)


@HABITS.add_with(early="perhaps")
def penalty_on_gradients_of_parameters(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        loss = mean_loss(m, step)
        grads = torch.autograd.grad(loss, list(m.head.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in grads)

    run.train(model, optimizer, loss_of)


@HABITS.add
def hessian_vector_products(run: Run) -> None:
    """Hutchinson's trace, as Sophia and curvature logs estimate it."""
    model, optimizer = run.wrap(Net())

    def look(step: int) -> None:
        params = list(model.blocks[0].parameters())
        grads = torch.autograd.grad(mean_loss(model, step), params, create_graph=True)
        signs = [torch.randint(0, 2, p.shape) * 2.0 - 1 for p in params]
        run.note(torch.autograd.grad(grads, params, signs))

    run.train(model, optimizer, then=look, steps=2)


@HABITS.add
def adversarial_inputs(run: Run) -> None:
    """FGSM, PGD: gradients of inputs alone, then a step on what they gave."""
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        x = batch(step)
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            (grad,) = torch.autograd.grad((m(x + delta) - 1).square().mean(), delta)
            delta.data = (delta.data + 0.1 * grad.sign()).clamp(-0.2, 0.2)
        return (m(x + delta.detach()) - 1).square().mean()

    run.train(model, optimizer, loss_of)


@HABITS.add_with(early="refused")
def first_order_meta_learning(run: Run) -> None:
    """Reptile: inner steps, then a step back to between."""
    model, optimizer = run.wrap(Net())
    for task in range(2):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(2):
            model.zero_grad()
            loss = mean_loss(model, 10 * task + step)
            loss.backward()
            run.note(loss)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.grad = before[name] - p
                p.copy_(before[name])
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add_with(early="refused")
def scaler_of_torch(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    for step in range(5):
        loss = mean_loss(model, step) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        run.note(bool(norm.isfinite()))
        scaler.step(optimizer)
        scaler.update()
        run.note(scaler.get_scale())
        optimizer.zero_grad()


@HABITS.add
def penalties_on_weights(run: Run) -> None:
    """L1, orthogonality, distance from the start, importance (EWC)."""
    model, optimizer = run.wrap(Net())
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_of(m: Any, step: int) -> torch.Tensor:
        loss = mean_loss(m, step)
        loss = loss + 1e-3 * sum(p.abs().sum() for p in m.blocks[0].parameters())
        w = m.blocks[1].up.weight
        loss = loss + 1e-3 * (w.t() @ w - torch.eye(WIDTH)).square().sum()
        return loss + 0.1 * sum((p - start[n]).square().sum() for n, p in m.named_parameters())

    run.train(model, optimizer, loss_of)


@HABITS.add_with(early="none")
def fisher_information(run: Run) -> None:
    """Squares of gradients over some batches, without a step."""
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(3):
        model.zero_grad()
        F.log_softmax(model(batch(i)), 1)[:, 0].mean().backward()
        for name, p in model.named_parameters():
            fisher[name] += p.grad.detach() ** 2
    run.note(fisher)
    model.zero_grad()
    run.train(model, optimizer, steps=1)


@HABITS.add
def backward_into_some_parameters(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        loss = mean_loss(model, step)
        loss.backward(inputs=list(model.blocks[1].parameters()))
        run.note(loss)
        run.note([p.grad is None for p in model.stem.parameters()])
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add
def backward_of_several_tensors(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        out = model(batch(step))
        torch.autograd.backward([out[:, 0].sum(), out[:, 1:]], [None, torch.ones(6, 3) * 0.1])
        run.note(out)
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add
def gradients_set_to_none_one_by_one(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        for p in model.parameters():
            p.grad = None
        loss = mean_loss(model, step)
        loss.backward()
        optimizer.step()
        run.note(loss)
    optimizer.zero_grad()


@HABITS.add_with(early="none")
def gradient_norms_after_the_step(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        mean_loss(model, step).backward()
        optimizer.step()
        run.note([p.grad.norm().item() for p in model.parameters()])
        optimizer.zero_grad()


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_gradients(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)

"""Losses over several forwards: pairs, episodes, teachers, whole batches."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn
from torch.nn import functional as F

HABITS = Habits()


@HABITS.add
def graphs_without_a_backward(run: Run) -> None:
    """A loss that is computed and thrown away."""
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        unused = mean_loss(m, step + 20)
        if step % 2:
            del unused
            gc.collect()
        return mean_loss(m, step)

    run.train(model, optimizer, loss_of)


@HABITS.add_with(early="perhaps")
def generator_and_discriminator(run: Run) -> None:
    """The generator's backward adds to gradients of the discriminator that nobody uses."""
    generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    made, made_by = run.wrap(generator)
    judged, judge = run.wrap(Net())
    for step in range(4):
        judged.zero_grad()
        fake = made(batch(step))
        (mean_loss(judged, step) - judged(fake.detach()).mean()).backward()
        judge.step()
        made.zero_grad()
        loss = judged(fake).square().mean()
        loss.backward()
        made_by.step()
        run.note(loss)


@HABITS.add
def two_forwards_and_one_backward(run: Run) -> None:
    """Siamese, contrastive, consistency under two draws of dropout (R-Drop)."""

    class Drops(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x + F.dropout(self.inner(x), 0.2, self.training)

    def loss_of(m: Any, step: int) -> torch.Tensor:
        first, second = m(batch(step)), m(batch(step))
        return (first - 1).square().mean() + F.mse_loss(first, second)

    run.train(*run.wrap(Net(Drops)), loss_of)


@HABITS.add
def sum_of_losses_over_many_forwards(run: Run) -> None:
    """An episode: all log-probabilities, then one backward."""

    def loss_of(m: Any, step: int) -> torch.Tensor:
        chosen = []
        for i in range(5):
            policy = torch.distributions.Categorical(logits=m(batch(10 * step + i, 1)))
            action = policy.sample()
            chosen.append(policy.log_prob(action) * (action - 1.5))
        return -torch.stack(chosen).mean()

    run.train(*run.wrap(Net()), loss_of)


@HABITS.add
def rollouts_between_updates(run: Run) -> None:
    """PPO: acting without gradients, then epochs over what was seen."""
    model, optimizer = run.wrap(Net())
    state = batch(0, 1)
    for _ in range(2):
        seen = []
        with torch.no_grad():
            for _ in range(4):
                policy = torch.distributions.Categorical(logits=model(state))
                action = policy.sample()
                seen.append((state, action, policy.log_prob(action)))
                state = torch.tanh(state.roll(int(action) + 1, 1) * 1.1)
        states, actions, before = (torch.cat(parts) for parts in zip(*seen, strict=True))
        for _ in range(2):
            policy = torch.distributions.Categorical(logits=model(states))
            ratio = (policy.log_prob(actions) - before).exp()
            loss = -torch.min(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5).mean()
            loss = loss - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)


@HABITS.add
def teacher_and_student(run: Run) -> None:
    """DINO: the teacher is the average of the student, in one module with it."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Net(), Net()
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)
            self.register_buffer("center", torch.zeros(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            with torch.no_grad():
                target = self.teacher(y)
                self.center = self.center * 0.9 + target.mean(0) * 0.1
            wanted = ((target - self.center) / 0.5).softmax(1)
            return -(wanted * self.student(x).log_softmax(1)).sum(1).mean()

    plain = Pair()
    optimizer = torch.optim.AdamW(plain.student.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer = run.wrap(plain, optimizer)

    @torch.no_grad()
    def follow(step: int) -> None:
        pairs = zip(model.student.parameters(), model.teacher.parameters(), strict=True)
        for s, t in pairs:
            t.data = t.data * 0.9 + s.data * 0.1

    run.train(model, optimizer, lambda m, i: m(batch(i), batch(i + 10)), then=follow)


@HABITS.add
def redundancy_reduced(run: Run) -> None:
    """VICReg, Barlow twins: losses over the whole batch of two views."""

    def loss_of(m: Any, step: int) -> torch.Tensor:
        x, y = m(batch(step, 8)), m(batch(step, 8) + 0.1)
        std = (x.var(0) + 1e-4).sqrt()
        cross = (x - x.mean(0)).t() @ (y - y.mean(0)) / 7
        off = cross - torch.diag(cross.diagonal())
        return F.mse_loss(x, y) + F.relu(1 - std).mean() + off.square().sum() / 4

    run.train(*run.wrap(Net()), loss_of)


@HABITS.add
def hard_examples_mined(run: Run) -> None:
    """A forward picks the rows on which another one trains."""

    def loss_of(m: Any, step: int) -> torch.Tensor:
        x = batch(step, 12)
        with torch.no_grad():
            hard = (m(x) - 1).square().mean(1).topk(5).indices
        return (m(x[hard]) - 1).square().mean()

    run.train(*run.wrap(Net()), loss_of)


@HABITS.add
def loss_logged_as_a_graph(run: Run) -> None:
    """`total += loss`: the classic leak, which keeps all graphs."""
    model, optimizer = run.wrap(Net())
    total: Any = 0.0
    outputs = []

    def loss_of(m: Any, step: int) -> torch.Tensor:
        nonlocal total
        loss = mean_loss(m, step)
        total = total + loss
        outputs.append(loss)
        return loss

    run.train(model, optimizer, loss_of)
    run.note(total, outputs)


@HABITS.add
def modes_toggled_inside_a_step(run: Run) -> None:
    class Drops(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x + F.dropout(self.inner(x), 0.2, self.training)

    def loss_of(m: Any, step: int) -> torch.Tensor:
        m.eval()
        with torch.no_grad():
            target = m(batch(step))
        m.train()
        m.blocks[0].eval()
        return F.mse_loss(m(batch(step)), target + 1)

    run.train(*run.wrap(Net(Drops)), loss_of)


@HABITS.add
def graphs_retained_without_need(run: Run) -> None:
    """backward(retain_graph=True), as beginners write it everywhere."""
    model, optimizer = run.wrap(Net())
    for step in range(4):
        optimizer.zero_grad()
        loss = mean_loss(model, step)
        loss.backward(retain_graph=True)
        optimizer.step()
        run.note(loss)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_losses(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)

"""What a run says at its beginning and at its end, beside what plain PyTorch would have needed."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from .._config.sizes import format_duration, format_number, format_size
from .._report.reports import make_report
from .._runtime.wrapped import Wrapped
from .._torch_compat import FakeTensorMode
from .finetune_data import Data
from .finetune_model import Choice
from .finetune_view import print_table
from .metrics import Metrics

# float32 parameter 4, gradient 4, and the two moments of AdamW 4 + 4
PLAIN_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class PlainNeeds:
    """The memory of a plain PyTorch step. `activation_bytes`: saved for backward, in float32."""

    parameters: int
    activation_bytes: int | None

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and moments."""
        return self.parameters * PLAIN_BYTES_PER_PARAMETER

    def __str__(self) -> str:
        """The sum, and what it is made of."""
        total = format_size(self.state_bytes + (self.activation_bytes or 0))
        state = (
            f"{PLAIN_BYTES_PER_PARAMETER} bytes a parameter (float32 weight, gradient, two "
            f"moments) = {format_size(self.state_bytes)}"
        )
        if self.activation_bytes is None:
            return f"{total} in one memory, without activations: {state}"
        saved = format_size(self.activation_bytes)
        return f"{total} in one memory: {state}, and {saved} of float32 activations for one batch"


def plain_needs(choice: Choice, batch: int, sequence: int) -> PlainNeeds:
    """Counted in a forward pass over fake tensors, which have shapes and no values."""
    with FakeTensorMode():
        model = choice.build("cpu")
        parameters = list(model.parameters())
        known = {p.untyped_storage()._cdata for p in parameters}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        tokens = torch.zeros((batch, sequence), dtype=torch.int64)
        count = sum(p.numel() for p in parameters)
        try:
            # The graph keeps every saved storage alive, so that no address counts twice.
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                graph = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        except (RuntimeError, NotImplementedError):  # the forward pass asks for a value
            return PlainNeeds(count, None)
        del graph
        return PlainNeeds(count, sum(saved.values()))


def budgets(state: Wrapped) -> dict[str, int]:
    """Bytes of each tier."""
    config = state.config
    return {
        "device": config["device_bytes"],
        "host": config["host_bytes"],
        "ssd": config["ssd_bytes"],
    }


def perplexity(loss: float) -> str:
    """For people: exp(loss)."""
    return f"{math.exp(loss):.1f}" if loss < 20 else f"e^{loss:.1f}"


def opening(state: Wrapped, choice: Choice, data: Data) -> str:
    """One line on what is about to be trained, on what, and where it lives."""
    count = sum(spec["numel"] for spec in state.config["params"])
    stats = state.session.stats()
    tiers = ", ".join(
        f"{tier} {format_size(size)}" for tier, size in budgets(state).items() if size
    )
    tokens = (data.training.count + data.held_out.count) * data.training.sequence
    return (
        f"{choice.name}: {count / 1e6:.1f} M parameters "
        f"({'from ' + str(choice.weights) if choice.weights else 'fresh'}), "
        f"{data.documents} documents, {tokens / 1e6:.2f} M tokens; {tiers}; "
        f"page {format_size(state.session.plan['page_bytes'])}"
        + (f", {stats['io_engine']} I/O" if stats["io_engine"] else "")
    )


def summary(
    state: Wrapped,
    metrics: Metrics,
    needs: PlainNeeds,
    tiers: dict[str, int],
    output: Path,
    name: str,
) -> None:
    """Prints the table at the end of a run."""
    steps, evaluations = metrics.steps, metrics.evaluations
    first, last = evaluations[0], evaluations[-1]
    rates = [record["tokens_per_second"] for record in steps]
    stats = state.session.stats()
    peaks = {tier: max(record[f"{tier}_bytes"] for record in steps) for tier in tiers}
    peaks["device"] = max(peaks["device"], stats["device_bytes_peak"])
    size = needs.parameters * getattr(torch, state.config["params"][0]["dtype"]).itemsize
    rows = [
        (
            "held-out loss",
            f"{first['held_out_loss']:.4f} → {last['held_out_loss']:.4f} (perplexity "
            f"{perplexity(first['held_out_loss'])} → {perplexity(last['held_out_loss'])})",
        ),
        ("steps", f"{len(steps)} in {format_duration(steps[-1]['seconds'])}"),
        ("speed", f"{format_number(sorted(rates)[len(rates) // 2])} tokens/s (median step)"),
        ("parameters", f"{needs.parameters / 1e6:.1f} M, {format_size(size)} as computed with"),
    ]
    if limited := make_report(state).limited:
        rows.append(("speed is", limited))
    if state.steps_skipped:
        rows.append(("skipped steps", f"{state.steps_skipped}, their gradients were not finite"))
    rows += [
        (f"{tier} memory", f"{format_size(peaks[tier])} of {format_size(budget)}")
        for tier, budget in tiers.items()
        if budget
    ]
    rows += [
        ("plain PyTorch", str(needs)),
        ("model", str(output / "model")),
        ("picture", str(output / "progress.png")),
        ("report", f"strata report --html report.html {output / 'report.json'}"),
    ]
    print_table(name, rows)

"""The demo keeps its promises: what `./dev demo` says, checked without running it."""

import torch
from strata._cli.finetune import options
from strata._cli.models import choose
from strata._config.sizes import parse_size


def test_the_demo_is_a_large_model_in_little_memory() -> None:
    choice = choose(options.PRESET["model"], None, options.PRESET["sequence"])
    count = sum(p.numel() for p in choice.build().parameters())
    assert count >= 100_000_000
    # Parameters, gradients and moments in 16 bits, as plain PyTorch would hold them on the device,
    # beside activations.
    plain = 4 * count * torch.bfloat16.itemsize
    assert parse_size(options.PRESET["device_memory"]) <= plain / 4
    # The moments of AdamW alone are more than the host may hold: they rest on the disk.
    assert parse_size(options.PRESET["host_memory"]) < count * 8
    assert parse_size(options.PRESET["ssd_memory"]) > count * 8

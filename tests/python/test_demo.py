"""The demo keeps its promises: what `./dev demo` says, checked without running it."""

import json
import random
from pathlib import Path

import pytest
import torch
from strata._cli.finetune import demo
from strata._cli.finetune.options import parse
from strata._cli.models import choose
from strata._config.sizes import parse_size


def test_the_demo_is_a_large_model_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse([], demo.__doc__, demo.preset())
    start, memory = options.start, options.memory
    choice = choose(start.model, start.vocabulary, start.sequence)
    count = sum(p.numel() for p in choice.build().parameters())
    assert count >= 100_000_000
    # Parameters, gradients and moments in 16 bits, as plain PyTorch would hold them on the device,
    # beside activations.
    plain = 4 * count * torch.bfloat16.itemsize
    assert parse_size(memory.device_memory) <= plain / 4
    # The moments of AdamW alone are more than the host may hold: they rest on the disk.
    assert parse_size(memory.host_memory) < count * 8
    assert parse_size(memory.ssd_memory) > count * 8
    demo.write_tales()
    tales = [json.loads(line)["text"] for line in Path(*start.data).read_text().splitlines()]
    assert len(set(tales)) == demo.TALES


def test_tales_are_whole_and_remember_who_is_in_them() -> None:
    ways, draw = demo.rules(), random.Random(1)
    for _ in range(200):
        tale = demo.tell(ways, draw)
        assert "{" not in tale
        assert "|" not in tale
        assert tale[0].isupper()
        assert tale.endswith(".")
        told = [name for name in ways["name"] if name in tale.replace(",", " ").split()]
        assert len({name for name in ways["thing"] if name in tale.split()}) <= 2
        assert 1 <= len(told) <= 2

"""What torchrun, or whoever started this process, says of those beside it. Needs no torch.

processes_started()        # 2; 1: this one is alone
if leads(): print(...)     # rank 0, or a process that is alone
f"{rank_name()}no room"    # "rank 1: no room"; of a process that is alone "no room"
restarts_share_a_store()   # of torchrun, where those that start again find what the dead wrote
"""

from __future__ import annotations

import os


def processes_started() -> int:
    """How many are to train together, this one too."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this process tells what all of them do."""
    return processes_started() == 1 or os.environ.get("RANK", "0") == "0"


def rank_name() -> str:
    """What an error message begins with, so that it can be told whose it is."""
    return f"rank {os.environ.get('RANK', '0')}: " if processes_started() > 1 else ""


def restarts_share_a_store() -> bool:
    """Whether torchrun starts processes again with the store that those which died have used: a
    group may then be made with their addresses, and never come together (PyTorch issue 135712)."""
    again = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

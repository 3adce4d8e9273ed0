"""``python -m benchmarks.peers``: makes the environment of the peers, where it is missing."""

import sys

from .environment import make, ready

if __name__ == "__main__":
    if not ready():
        make(lambda text: print(f"  {text}", file=sys.stderr, flush=True))

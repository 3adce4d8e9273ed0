"""The ranks of one side of a bench, each a child process that is asked for what it measures.

group = Group("benchmarks.ranks_child", ["strata"], ranks=2)
group.ask("memory")  # what each rank answers, in their order
group.close()
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .peers.child import Answer, Child


class Group:
    """One process that is alone, or ranks that find each other as torchrun's do."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        ranks: int,
        threads: int = 1,
        env: Callable[[int], Mapping[str, str]] = lambda rank: {},
        inside: Callable[[int], Sequence[str]] = lambda rank: (),
        python: Path = Path(sys.executable),
    ) -> None:
        """`module` is run with the arguments. By rank, `env` goes on top of the environment, and
        `inside` ahead of the command."""
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = str(any_port.getsockname()[1])

        def start(rank: int) -> Child:
            of = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            if ranks > 1:
                of |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                of |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [*inside(rank), str(python), "-m", module, *arguments]
            return Child(command, {**of, **env(rank)})

        self._pool = ThreadPoolExecutor(ranks)
        self._children = list(self._pool.map(start, range(ranks)))

    def ask(self, command: str) -> Sequence[Answer]:
        """What each rank answers."""
        return list(self._pool.map(lambda child: child.ask(command), self._children))

    def step(self) -> float:
        """Seconds of the slowest rank."""
        return max(float(answer["seconds"]) for answer in self.ask("step"))

    def close(self) -> None:
        """Lets all end."""
        list(self._pool.map(lambda child: child.close(), self._children))
        self._pool.shutdown()

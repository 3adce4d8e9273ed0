"""Work in a child that is killed in the middle, at any file operation.

for operation in range(1, 200):
    done = survives(lambda: strata.save(model, path), operation)
"""

import os
import signal
import sys
from collections.abc import Callable


def survives(work: Callable[[], None], operation: int) -> bool:
    """Runs `work` in a child that is killed before its nth file operation. True: it got by."""
    child = os.fork()
    if child == 0:
        left = operation

        def count(event: str, _: object) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status)

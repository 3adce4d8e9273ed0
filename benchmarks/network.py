"""A network between two hosts that are namespaces of this one, with a rate. Needs root.

    with Network() as network:
        network.limit(125e6)                             # bytes a second, each way; None: none
        subprocess.run([*network.inside(0), "python", ...], env={**os.environ, **network.env(0)})

Each namespace has one end of a veth pair, and a token bucket (tc tbf) delays what it sends.
Loopback is up in both, so a process may reach its own host as usual.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

from .common import BenchError

HOSTS = 2
BURST_BYTES = 256 << 10
QUEUE_BYTES = 512 << 10  # some milliseconds: what waits for others on a network is as short


class Network:
    """Two namespaces, gone afterwards."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise BenchError("network namespaces need root, and ip and tc (apt install iproute2)")
        self._names = [f"strata-{os.getpid()}-{host}" for host in range(HOSTS)]
        self._links = [f"sv{os.getpid()}-{host}" for host in range(HOSTS)]  # 15 letters at most

    def __enter__(self) -> Network:
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            first, second = self._links
            _run("ip", "link", "add", first, "netns", self._names[0], "type", "veth",
                 *("peer", "name", second, "netns", self._names[1]))  # fmt: skip
            for host, (name, link) in enumerate(zip(self._names, self._links, strict=True)):
                _run("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", link)
                _run("ip", "-n", name, "link", "set", link, "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """The pair of links goes with its namespaces."""
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def limit(self, bytes_s: float | None) -> None:
        """From here on each host sends so fast."""
        for name, link in zip(self._names, self._links, strict=True):
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", link, "root"],
                           check=False, capture_output=True)  # fmt: skip
            if bytes_s is None:
                continue
            _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf",
                 *("rate", f"{bytes_s * 8:.0f}bit"), *("burst", str(BURST_BYTES)),
                 *("limit", str(QUEUE_BYTES)))  # fmt: skip

    def inside(self, host: int) -> Sequence[str]:
        """What goes ahead of a command, to run it there."""
        return ["ip", "netns", "exec", self._names[host]]

    def env(self, host: int) -> dict[str, str]:
        """For ranks: the first host has rank 0."""
        return {
            "MASTER_ADDR": address(0),
            "GLOO_SOCKET_IFNAME": self._links[host],
            "STRATA_MACHINE": f"host-{host}",
        }


def address(host: int) -> str:
    """Of a host."""
    return f"10.83.0.{host + 1}"


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")

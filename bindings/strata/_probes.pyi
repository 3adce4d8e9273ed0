"""How fast this machine is: probes keep a link at work for a while (offload/storage/calibrate.hpp).
`run` releases the GIL and returns what went through per second, so several threads can run several
probes at once. For type checkers only: import these from _core.
"""

from typing import Literal

from ._core import DtypeName, GroupSpec, StoredName

Ways = Literal["in", "out", "both"]  # towards the computation, away from it

class SsdProbe:
    """Files on SSD, striped over `paths` as a session's are; removed with the object. `depth`:
    requests in flight, 0: chosen."""

    def __init__(
        self, paths: list[str], page_bytes: int, io_engine: str, file_bytes: int, depth: int = 0
    ) -> None: ...
    def run(self, ways: Ways, seconds: float) -> tuple[float, float]:
        """(bytes read, bytes written) per second."""
    @property
    def io_engine(self) -> str: ...
    @property
    def depth(self) -> int: ...

class CopyProbe:
    """The copy engine between host memory (`bytes` of it, pinned if the system lets) and frames of
    the device, "host" or "cuda:N"."""

    def __init__(self, page_bytes: int, bytes: int, device: str) -> None:
        """Raises StrataError where the device cannot be used, or has no room."""
    def run(self, ways: Ways, seconds: float) -> tuple[float, float]:
        """(bytes uploaded, bytes downloaded) per second."""
    def decode_bytes_s(self, stored: StoredName, dtype: DtypeName, seconds: float) -> float:
        """Bytes of values per second, that are computed of codes on the way to the host's frames.
        REQUIRES: the device is the host."""
    def transfer_seconds(self) -> float:
        """What one of many copies takes beside its bytes."""

class UpdateProbe:
    """The workers on chunks of AdamW, placed as a session would `beside` so many threads
    of computation; None: wherever the system puts them."""

    def __init__(
        self, workers: int, dtype: DtypeName, page_bytes: int, bytes: int, beside: int | None = None
    ) -> None: ...
    def run(self, seconds: float) -> float:
        """Elements per second, all workers together."""

def packing(stored: StoredName, page_bytes: int) -> tuple[int, int, int]:
    """Of a page of codes: the elements in it, and where scales and groups of scales begin."""

def code_values(name: str) -> list[float]:
    """What codes of 4 bits ("nf4", "nf4-torchao"), or codes of scales ("scales"), stand for."""

def config_schema() -> tuple[dict[str, list[str]], dict[str, dict[str, tuple[str, bool]]]]:
    """What Config is made of: by enum the names of its values; by struct and field its type, and
    whether it must be given."""

def best_isa() -> str:
    """The instructions that kernels use on this processor: "scalar", "avx2" or "avx512"."""

def update_span(
    group: GroupSpec,
    dtype: DtypeName,
    grad_dtype: DtypeName,
    count: int,
    param: int,
    master: int,
    moment1: int,
    moment2: int,
    grad: int,
    step: int,
    grad_scale: float,
    threads: int,
    isa: str,
    moment_dtype: Literal["float32", "bfloat16", "block8"] = "float32",
    scales1: int = 0,
    scales2: int = 0,
    param_id: int = 0,
    first: int = 0,
) -> None:
    """Runs a kernel on plain memory, for tests and benchmarks. Addresses: 0 where absent. isa:
    "best", "scalar", "avx2", "avx512". Scales: of "block8", bfloat16, one for every 64 elements.
    param_id, first: which elements these are, where random bits are drawn."""

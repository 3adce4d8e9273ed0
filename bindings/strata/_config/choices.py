"""What options may be set to, for the command line and strata.wrap() alike. Needs no torch, so that
`strata --help` and wrong calls are answered at once.

    parse_device("cuda")                      # "cuda:0", as the core names it
    check_page_size(sizes.parse_size("4MiB"))
    in_words("recompute_host")                # "recompute from host", where its inputs are
"""

from .._errors import check_choice
from .sizes import format_size

ACTIVATIONS = ("auto", "keep", "swap", "recompute")
IO_ENGINES = ("auto", "io_uring", "libaio", "threads", "memory")
DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "8bit")  # as the command line writes them
# What becomes of saved tensors, by the planner's names (offload/trace.hpp): which of them do what.
RECOMPUTES = frozenset(("recompute", "recompute_host", "recompute_ssd"))
# Some saved tensors leave the device: all of them, or of a recomputed unit its inputs.
SWAPS = frozenset(("swap_host", "swap_ssd", "recompute_host", "recompute_ssd"))
TO_SSD = frozenset(("swap_ssd", "recompute_ssd"))
HOST = "host"
DEVICES = ("auto", HOST, "cpu", "cuda")
PAGE_BYTES_MIN, PAGE_BYTES_MAX = 64 << 10, 64 << 20
WORKERS_LIMIT = 1024  # of the core

# Fresh models that have a name: hidden size, layers, heads, intermediate size.
MODEL_SIZES = {
    "llama-10m": (256, 8, 4, 768),
    "llama-25m": (384, 10, 6, 1024),
    "llama-110m": (768, 14, 12, 2048),
    "llama-350m": (1024, 24, 16, 3072),
    "llama-1b": (2048, 20, 16, 5632),
}


def parse_device(text: str) -> str:
    """The core's name of the device that is meant; "auto" as it is. Raises ValueError."""
    kind, _, number = text.partition(":")
    if kind == "cuda" and number.isdecimal():
        return f"cuda:{int(number)}"
    check_choice("device", text, DEVICES)
    return {"cpu": HOST, "cuda": "cuda:0"}.get(text, text)


def check_split(slices: int | None, activations: str | None) -> None:
    """Raises ValueError for what is no number of slices, and for what they cannot go with."""
    if slices is None:
        return
    if slices < 2:
        raise ValueError(f"split must be at least 2, or left out, not {slices}")
    if activations not in ("auto", "recompute"):
        raise ValueError(
            "split computes slices of the batch one after the other and recomputes them, which "
            f"activations={activations!r} rules out: take activations='auto'"
        )


def check_workers(workers: int) -> None:
    """Raises ValueError for what is no number of threads that the core would start."""
    if not 1 <= workers <= WORKERS_LIMIT:
        raise ValueError(f"workers must be from 1 to {WORKERS_LIMIT}, not {workers}")


def check_page_size(size: int) -> None:
    """Raises ValueError for what no page can be."""
    if not PAGE_BYTES_MIN <= size <= PAGE_BYTES_MAX or size & (size - 1):
        raise ValueError(
            f"page_size must be a power of two from {format_size(PAGE_BYTES_MIN)} to "
            f"{format_size(PAGE_BYTES_MAX)}, not {format_size(size)}"
        )


def leaves(activation: str, is_input: bool) -> bool:
    """Whether a saved tensor leaves the device. `is_input`: it was there before the forward."""
    return activation in SWAPS and (is_input or activation not in RECOMPUTES)


def in_words(activation: str) -> str:
    """For people."""
    return activation.replace("_", " from " if activation in RECOMPUTES else " to ")

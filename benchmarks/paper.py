"""Training steps and machines on paper: Llama-shaped models of any size as traces, and machines as
costs and budgets, to plan what nobody has run.

    trace = llama_trace(LLAMA_7B, tokens=16384, sequence=2048, flops_s=400e12)
    machine = PaperMachine("one H100", 80 * 10**9, flops_s=400e12, link_bytes_s=50e9, ...)
    paper = _core.PaperPlan(trace, machine.costs(), machine.budgets(), wishes)

Note [What a Llama step takes]. T tokens, sequence s, hidden h, feed-forward f, vocabulary V, a
heads, h_kv values for keys and as many for values, d bytes a number; the Llama of Transformers with
fused attention.
  arithmetic: forward of a block T (2 (2 h² + 2 h h_kv + 3 h f) + 2 s h), causal attention half
    of 4 s h; of the head 2 T h V; backward twice that. Everything else computes next to nothing.
  saved by a block: its input d T h (what recomputing holds; plain autograd does not need it); two
    norms of (4 + 2 d) T h + 4 T (a float32 copy, the normalised value, the weighted one, the
    scale), or 3 d T h + 4 T where d is 4 and the first one's copy is the input; queries and
    attention's result 2 d T h; keys and values 2 d T h_kv; the softmax's logarithms 4 T a; gate,
    up, silu(gate) and their product 4 d T f.
  head and loss: logits d T V; the loss and its gradient reach 12 T V where log-softmax and its
    gradient, of 4 T V each, meet what they are made of.
  head and loss without logits: the states as float32, 4 T h, are what the head saves, with 4 T;
    forward makes d T h and two chunks and a half of logits, backward 8 T h, the matrix' gradient
    and a chunk and a half, and computes the logits again: three times the forward's arithmetic.
  beside what is saved: forward of a block 3 d T h, its result among them; backward 2 d T f; of the
    head and the embedding the gradient d h V of their matrix.
Each of these was held against Transformers' own model on tensors that are shapes only: see
_planning/meta_trace.py and the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from strata import _core

if TYPE_CHECKING:
    from strata._core import Budgets, Costs, LaneName, SavedTensor, Trace, TracedUnit, Use

PAGE_BYTES = 4 << 20
# Bytes beside a parameter of so many: residual or master, and two moments; see optimizers/.
STATE_BYTES = {2: 10, 4: 8}
LOGITS_BYTES = 32 << 20  # of a chunk, and its fewest columns on a GPU: see nn/request.py
LOGITS_COLUMNS = 1024
UPDATE_BYTES = (
    32  # moved in host memory for an element: 26 by the update, 6 by copies before, after
)


@dataclass(frozen=True)
class LlamaSizes:
    """The shape of a Llama."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def kv_hidden(self) -> int:
        """Values of keys, and of values, a token."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def block_matrices(self) -> int:
        """Elements of a block's matrices."""
        h, kv, f = self.hidden, self.kv_hidden, self.feed_forward
        return 2 * h * h + 2 * h * kv + 3 * h * f

    @property
    def parameters(self) -> int:
        """Elements of the whole model; embedding and head are not tied."""
        block = self.block_matrices + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden


LLAMA_7B = LlamaSizes("7B", 32, 4096, 11008, 32, 32, 32000)
LLAMA_8B = LlamaSizes("8B", 32, 4096, 14336, 32, 8, 128256)
LLAMA_13B = LlamaSizes("13B", 40, 5120, 13824, 40, 40, 32000)
LLAMA_70B = LlamaSizes("70B", 80, 8192, 28672, 64, 8, 32000)


def block_saved_bytes(sizes: LlamaSizes, tokens: int, dtype_bytes: int = 2) -> int:
    """What autograd saves in a block's forward, its input not counted."""
    h, f, d = sizes.hidden, sizes.feed_forward, dtype_bytes
    norms = 2 * (((4 + 2 * d) if d < 4 else 3 * d) * h + 4)
    if d == 4:
        norms -= d * h  # the first norm's copy is the block's input itself
    attention = 2 * d * h + 2 * d * sizes.kv_hidden + 4 * sizes.heads
    return tokens * (norms + attention + 4 * d * f)


def llama_trace(
    sizes: LlamaSizes,
    tokens: int,
    sequence: int,
    flops_s: float,
    dtype_bytes: int = 2,
    page_bytes: int = PAGE_BYTES,
    chunked_loss: bool = False,
) -> Trace:
    """A step of `tokens` tokens in sequences of `sequence`, as if recorded with every activation
    kept on a device that achieves `flops_s`. `chunked_loss`: logits are never made, see
    nn/causal_lm.py. Raises ValueError where sequences do not fill it."""
    if tokens <= 0 or sequence <= 0 or tokens % sequence:
        raise ValueError(f"{tokens} tokens are not a number of sequences of {sequence}")
    return _Builder(sizes, tokens, sequence, flops_s, dtype_bytes, page_bytes, chunked_loss).trace()


def model_flops(sizes: LlamaSizes, tokens: int, sequence: int) -> float:
    """The arithmetic of a step that no way of computing it can spare: forward, and backward twice
    that, of every matrix and of attention, half of which causality spares. What is computed again
    does not count; nor does the embedding, which is looked up."""
    matrices = sizes.layers * sizes.block_matrices + sizes.vocabulary * sizes.hidden
    return 6.0 * tokens * (matrices + sizes.layers * sequence * sizes.hidden)


@dataclass(frozen=True)
class _Part:
    """A unit on paper."""

    name: str
    elements: int
    input_bytes: int
    saved_bytes: int  # beside its input
    output_bytes: int
    forward_flops: float
    forward_extra: int  # bytes beside what it saves and returns
    backward_extra: int
    backward_flops: float = 2.0  # of the forward's


class _Builder:
    def __init__(
        self,
        sizes: LlamaSizes,
        tokens: int,
        sequence: int,
        flops_s: float,
        dtype_bytes: int,
        page_bytes: int,
        chunked_loss: bool,
    ) -> None:
        self.sizes = sizes
        self.chunked_loss = chunked_loss
        self.tokens = tokens
        self.sequence = sequence
        self.flops_s = flops_s
        self.d = dtype_bytes
        self.page_bytes = page_bytes

    def parts(self) -> list[_Part]:
        s, t, d = self.sizes, self.tokens, self.d
        h, f, v = s.hidden, s.feed_forward, s.vocabulary
        wide = d * t * h
        embed = _Part("model.embed_tokens", v * h, 8 * t, 0, wide, 0.0, 0, d * v * h)
        flops = t * (2.0 * s.block_matrices + 2.0 * self.sequence * h)
        saved = block_saved_bytes(s, t, d)
        blocks = [
            _Part(
                f"model.layers.{i}",
                s.block_matrices + 2 * h,
                wide,
                saved,
                wide,
                flops,
                2 * wide,
                2 * d * t * f,
            )
            for i in range(s.layers)
        ]
        copies = (4 if d < 4 else 0) + d
        norm = _Part("model.norm", h, wide, t * (4 + copies * h), wide, 0.0, wide, 16 * t * h)
        flops = 2.0 * t * h * v
        head = _Part("lm_head", v * h, wide, 0, d * t * v, flops, 0, d * v * h + wide)
        if self.chunked_loss:
            states, chunk = 4 * t * h, max(LOGITS_BYTES, 4 * t * LOGITS_COLUMNS)
            norm = replace(norm, output_bytes=wide + states)  # its gradient comes as both
            head = _Part(
                "lm_head",
                v * h,
                states,
                4 * t,
                8 * t,
                flops,
                wide + 5 * chunk // 2,
                d * v * h + 8 * t * h + 3 * chunk // 2,
                3.0,
            )
        return [embed, *blocks, norm, head]

    def trace(self) -> Trace:
        parts = self.parts()
        uses: list[Use] = []
        tensors: list[SavedTensor] = []
        last = 2 * len(parts) - 1
        # 1. Forward: what is saved piles up.
        held = 0
        for i, part in enumerate(parts):
            live = held + part.input_bytes
            grown = part.saved_bytes + part.output_bytes + part.forward_extra
            uses.append(self._use(i, False, len(uses), part.forward_flops, live, live + grown))
            for size, is_input in ((part.input_bytes, True), (part.saved_bytes, False)):
                if size:
                    tensors.append(
                        _core.SavedTensor(
                            unit=i,
                            bytes=size,
                            born=i,
                            last_used=last - i,
                            input=is_input,
                        )
                    )
            held += part.input_bytes + part.saved_bytes
        # 2. The loss, in the gap before the first backward.
        scores = self.tokens * self.sizes.vocabulary
        gap_peak = held + (0 if self.chunked_loss else scores * 12)
        # 3. Backward: it shrinks again.
        for i in range(len(parts) - 1, -1, -1):
            part = parts[i]
            live = held + part.output_bytes  # its gradient
            peak = live + part.backward_extra
            flops = part.backward_flops * part.forward_flops
            use = self._use(i, True, len(uses), flops, live, peak)
            use.gap_peak_bytes = gap_peak if i == len(parts) - 1 else live
            uses.append(use)
            held -= part.input_bytes + part.saved_bytes
        return _core.Trace(
            uses=uses,
            moments=2 * len(uses),
            units=[self._unit(part) for part in parts],
            tensors=tensors,
            tail_seconds=0.0,
            tail_peak_bytes=0,
        )

    def _use(
        self, unit: int, backward: bool, place: int, flops: float, live: int, peak: int
    ) -> Use:
        return _core.Use(
            unit=unit,
            backward=backward,
            enter=2 * place,
            leave=2 * place + 1,
            seconds=flops / self.flops_s,
            gap_seconds=0.0,
            live_bytes=live,
            peak_bytes=peak,
            gap_peak_bytes=live,
        )

    def _unit(self, part: _Part) -> TracedUnit:
        return paper_unit(
            part.name,
            part.elements,
            self.d,
            self.page_bytes,
            self.tokens // self.sequence,
            may_recompute=part.saved_bytes > 0 and part.name != "lm_head",
        )


def paper_unit(
    name: str,
    elements: int,
    dtype_bytes: int,
    page_bytes: int,
    slices_max: int,
    may_recompute: bool,
    trained: bool = True,
) -> TracedUnit:
    """A unit that is one parameter, in whole pages: a chunk is what lies behind a page of it."""
    chunks = ceil(elements * dtype_bytes / page_bytes)
    return _core.TracedUnit(
        name=name,
        elements=elements,
        param_bytes=chunks * page_bytes,
        grad_bytes=chunks * page_bytes if trained else 0,
        state_bytes=chunks * page_bytes * STATE_BYTES[dtype_bytes] // dtype_bytes if trained else 0,
        chunks=chunks,
        slices_max=slices_max,
        may_swap=True,
        may_recompute=may_recompute,
        traced="keep",
        slices_traced=1,
    )


@dataclass(frozen=True)
class PaperMachine:
    """A machine by its data sheet: what links achieve, not what is printed on them."""

    name: str
    device_bytes: int
    flops_s: float  # sustained in training, of the compute dtype
    link_bytes_s: float  # host ↔ device, each way, both at the same time
    host_bytes: int
    host_memory_bytes_s: float
    ssds: int
    ssd_read_bytes_s: float = 6.5e9  # of one drive
    ssd_write_bytes_s: float = 4.5e9
    ssd_mixed: float = 0.6  # of its speed that each way keeps beside the other
    ssd_bytes: int = 4 * 10**12
    device_share: float = 0.92  # of the device that is left beside the driver's and kernels' own
    peak_flops_s: float = 0.0  # as printed; 0: of no interest

    def costs(self) -> Costs:
        """Computation as in traces made with this machine's flops_s. What moves through host memory
        slows the update there by the share it takes; the device's own computation is alone."""
        speeds: dict[LaneName, float] = {
            "upload": self.link_bytes_s,
            "download": self.link_bytes_s,
            "read": self.ssds * self.ssd_read_bytes_s,
            "write": self.ssds * self.ssd_write_bytes_s,
        }
        slow: dict[LaneName, dict[LaneName, float]] = {
            "update": {
                lane: max(0.3, 1 - speed / self.host_memory_bytes_s)
                for lane, speed in speeds.items()
            },
            "read": {"write": self.ssd_mixed},
            "write": {"read": self.ssd_mixed},
        }
        return _core.Costs(
            compute_scale=1.0,
            upload_bytes_s=speeds["upload"],
            download_bytes_s=speeds["download"],
            read_bytes_s=speeds["read"],
            write_bytes_s=speeds["write"],
            update_elements_s=self.host_memory_bytes_s / UPDATE_BYTES,
            transfer_seconds=1e-5,
            slice_seconds=5e-4,
            slow=slow,
        )

    def budgets(self, page_bytes: int = PAGE_BYTES) -> Budgets:
        """A tenth of host memory is the operating system's and Python's."""
        return _core.paper_budgets(
            page_bytes,
            device_bytes=int(self.device_bytes * self.device_share),
            host_bytes=int(self.host_bytes * 0.9),
            ssd_bytes=self.ssds * self.ssd_bytes,
        )


# Of one H200 in a machine of 128 GiB: what its matrix products, PCIe 5 and eight channels of memory
# achieve. No SSD.
H200 = PaperMachine(
    "one H200",
    device_bytes=141 * 10**9,
    flops_s=790e12,
    link_bytes_s=55e9,
    host_bytes=137 * 10**9,
    host_memory_bytes_s=200e9,
    ssds=0,
)
# One H100 SXM of eight in a machine of 2 TiB, whose host memory is that of all: two sockets of
# twelve channels.
H100_OF_8 = PaperMachine(
    "one H100 of 8",
    device_bytes=80 * 10**9,
    flops_s=600e12,
    link_bytes_s=50e9,
    host_bytes=2199 * 10**9,
    host_memory_bytes_s=700e9,
    ssds=0,
    peak_flops_s=989e12,
)

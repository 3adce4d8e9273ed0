"""The hash of the core is XXH3-64, which checkpoints hold and other programs know."""

import sys
import threading

import numpy as np
import pytest
from strata._core import Hasher

DATA = bytes(i * 7 % 251 for i in range(300_000))
# As the reference implementation has them, at the lengths where its way of hashing changes.
DIGESTS = {
    0: "2d06800538d394c2",
    1: "c44bdff4074eecdb",
    3: "c3489259e968ad9e",
    8: "b88dee77f6bf6980",
    16: "9da23836adf2be1e",
    17: "f34c3c9cf5a112d1",
    128: "4c659b745f435148",
    129: "b85222b83902b6e5",
    240: "d6dfbf67b0675b54",
    241: "c614c8c3575348c1",
    1024: "f22ef3dc84ff47ea",
    1025: "43f869a83769a435",
    300_000: "fc0f7694d76899d1",
}


@pytest.mark.parametrize(("length", "digest"), DIGESTS.items())
@pytest.mark.parametrize("piece", [1, 77, 1 << 20])
def test_digests_are_those_of_the_reference(length: int, digest: str, piece: int) -> None:
    if length // piece > 10_000:
        piece = 10_007
    hasher = Hasher()
    for start in range(0, length, piece):
        hasher.update(memoryview(DATA)[start : min(start + piece, length)])
    assert hasher.hexdigest() == digest
    assert hasher.hexdigest() == digest, "to ask changes nothing"


def test_any_bytes_in_one_piece_are_taken() -> None:
    digests = set()
    numbers = np.arange(1000, dtype=np.float32)
    for buffer in (numbers, numbers.data, numbers.tobytes(), bytearray(numbers.tobytes())):
        hasher = Hasher()
        hasher.update(buffer)
        digests.add(hasher.hexdigest())
    assert len(digests) == 1


def test_other_things_are_refused() -> None:
    hasher = Hasher()
    with pytest.raises((BufferError, ValueError)):
        hasher.update(np.arange(10)[::2])
    with pytest.raises(TypeError):
        hasher.update("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        hasher.update(None)  # type: ignore[arg-type]
    assert hasher.hexdigest() == DIGESTS[0]


def test_others_run_meanwhile() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # so nobody gets the GIL unless it is released
    many, beside = bytes(1 << 28), False
    try:
        for _ in range(10):
            thread = threading.Thread(target=Hasher().update, args=(many,))
            thread.start()
            beside = beside or thread.is_alive()
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert beside

"""What steps take: time, bytes and memory, measured while they run or ahead of them.

Knows clocks, PyTorch's allocators and the probes of the core. Must not know the hooks that feed it.
In reading order: uses, recorder, clock, memory_curve (one recorded step); timeline, windows (all
others); allocator; disk_speed, probes, calibrate (the machine).
"""

"""What steps take: time, bytes and memory, measured while they run or ahead of them.

Knows clocks, PyTorch's allocators and the probes of the core. Must not know the hooks that feed it.
In reading order: uses, recorder, clock, curve, memory_curve and cuda_memory (one recorded step);
timeline, windows, reached (all others); compute_probe, lane_probe, calibrate (the machine).
"""

"""From the user's words to the core's Config.

Knows words, sizes, the machine, and what of a model can be managed. Must not know sessions.
In reading order: sizes, paths, choices, launched and update_modes (words; none needs torch, so the
command line answers at once), machine, kernel and drives (without torch, too), device, managed and
units, rank_group, machines, ranks, sharding and alike, configure.
"""

"""One wrapped model: its session, parameters in pages, gradients and optimizer.

Knows the core's session. Must not know what becomes of activations, plans or reports.
In reading order: wrapped, visits, paged, escapes, streams, lander, optimizer, loaded_state,
forks, undo.
"""

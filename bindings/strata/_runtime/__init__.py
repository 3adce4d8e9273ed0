"""One wrapped model: its session, parameters in pages, gradients and optimizer.

Knows the core's session. Must not know what becomes of activations, plans or reports.
In reading order: wrapped, steps, closing, own_mapping, visits, paged, paged_run, tensor_functions,
geometry, escapes, shards, streams, lander, ownership, real_grads, gradients, held_gradients,
grad_shown, stand_in, grad_tensor, grad_answers, optimizer, optimizer_state, optimizer_pages,
loaded_state, forks, undo.
"""

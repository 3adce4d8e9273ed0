"""strata beside other libraries: what others write, turned into what strata.wrap() takes.

Knows the public functions, and the other libraries' words. Must not import those libraries.
In reading order: deepspeed; _deepspeed_keys, _deepspeed_optim; transformers; _trainer_saving,
_trainer_checkpoints.
"""

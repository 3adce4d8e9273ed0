"""`strata finetune`: trains a causal language model on text or records, inside memory budgets.

Knows the package as a user of strata.wrap() does, and reports. Must not know the other commands.
In reading order: identity, options, run, trainer, check, claim, origin, data, files, encode, view,
picture, interrupt, demo.
"""

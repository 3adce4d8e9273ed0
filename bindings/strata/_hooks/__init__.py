"""Everything that torch calls, and when it does.

Knows wrapped models and their activations. Must not know plans, files or reports.
In reading order: hooks (the list of all), exchanged, frames, saved, pins, land_hook.
"""

"""`strata doctor`: would training work here, how large could a model be, and what to change first.

Knows the machine and the planner. In reading order: facts (none needs torch), capacity, run.
"""

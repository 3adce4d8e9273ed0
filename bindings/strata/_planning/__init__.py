"""When to record, time and plan; what the planner is asked, and what it says.

Knows wrapped models, recorded steps and the core's planner. Must not know the command line.
In reading order: planning, shape_class, recording, second_runs, trace_of, claims (a model in
training); fitting, budget_check, limits (what would help); meta_trace, forecast (steps that nobody
ran).
"""

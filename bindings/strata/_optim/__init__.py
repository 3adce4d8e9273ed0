"""Classes of torch.optim: which strata can stand for, and how others are run as they are.

Knows torch.optim and the core's GroupSpec. Must not know models, sessions or pages.
In reading order: groups (options of parameter groups), foreign_probe and foreign (classes without a
kernel), lion (which torch does not have).
"""

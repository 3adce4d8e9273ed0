"""One command that builds, tests and measures strata on a machine with a GPU: see ``run``."""

"""Measurements, each against its physical bound: ``./dev bench NAME [--json FILE]``."""

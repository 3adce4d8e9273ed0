"""Fixtures: the core, once as the in-memory double and once as the real one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_core

try:
    import strata._core as real_core
except ImportError:
    real_core = None
    sys.modules["strata._core"] = fake_core
